"""A run as one HTML file that needs no network, to mail, to archive, to open offline."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from plotly.graph_objects import Figure

from stepmark.core.columns import Row, text
from stepmark.core.device import DeviceSpec
from stepmark.core.record import DeviceInfo, Failed, Record, RunInfo
from stepmark.core.units import format_bytes
from stepmark.report import comm_figures, figures, training_figures
from stepmark.report.comm_columns import COMM_COLUMNS
from stepmark.report.figures import Drawn
from stepmark.report.first_screen import machine_facts
from stepmark.report.op_columns import OP_COLUMNS
from stepmark.report.row_tables import describe, table
from stepmark.report.summary import LEAD, comm_lines, summary_lines, train_lines
from stepmark.report.train_columns import TRAIN_COLUMNS

_FEW_SECTIONS = 3
_LAYER_NOTE = "Fastest backend and dtype of each role of a layer (of each kind), once."


def html(
    run: RunInfo,
    records: Sequence[Record],
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row] = (),
    train_rows: Sequence[Row] = (),
    *,
    headline: str = "",
    answer: str = "",
    evidence: str = "",
    replays: str = "",
) -> str:
    """Return the document: the answer, the evidence, then the details.

    headline (text) and answer: about the steps that the run predicted; evidence: their lines.
    """
    other_rows = [*comm_rows, *train_rows]
    shown = (
        evidence,
        *_figures(training_figures.drawn(records) if train_rows else ()),
        section("Summary", _summary(run, rows, device, comm_rows, train_rows)),
        *_figures(_operator_figures(run, rows, device)),
        *_figures(comm_figures.drawn(comm_rows, run, device)),
        replays,
    )
    details = (
        section("Training", table(train_rows, TRAIN_COLUMNS) if train_rows else ""),
        section("Measurements", table(rows, OP_COLUMNS) if rows or not other_rows else ""),
        section("Collectives", table(comm_rows, COMM_COLUMNS) if comm_rows else ""),
        section("Skipped and failed", _unmeasured(records, [*rows, *other_rows])),
        section("Environment", _environment(run)),
    )
    body = f"{_part('Evidence', shown)}\n{_part('Details', details)}"
    lead = f"{escape(run.created_at)} &middot; <code>{escape(run.command)}</code>"
    if answer:
        facts = definitions(machine_facts(run, rows, comm_rows))
        answer = f'<div class="answer">{answer}<h3>Machine</h3>{facts}</div>'
    title = f"stepmark {run.run_id}"
    return document(title, lead, body, headline=headline, opening=answer)


def document(title: str, lead: str, body: str, *, headline: str = "", opening: str = "") -> str:
    """Return a page that needs nothing else.

    `title` and `headline`, which stands in for it on the page, are text; the others are HTML.
    opening: what stands above the table of contents.
    """
    above = f'<p class="quiet">{escape(title)}</p>' if headline else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{STYLE}</style>\n<script>{plotly_js()}</script></head>\n"
        f"<body><main>{above}<h1>{escape(headline or title)}</h1>\n"
        f'<p class="quiet">{lead}</p>\n{opening}\n{_contents(body)}\n{body}\n</main>\n'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


@cache
def plotly_js() -> str:
    """Return plotly.js with lines and bars alone: a quarter of the whole library."""
    file = files("stepmark").joinpath("data", "plotly-basic.min.js")
    return file.read_text(encoding="utf-8")


def _contents(body: str) -> str:
    """Return the table of contents of a page with several sections."""
    heads = re.findall(r'id="([^"]*)"><h2( class="part")?>(.*?)</h2>', body)
    if len(heads) < _FEW_SECTIONS:
        return ""
    links = "".join(
        f'<li{kind}><a href="#{name}">{title}</a></li>' for name, kind, title in heads
    )
    return f"<nav><h3>Contents</h3><ul>{links}</ul></nav>"


def _part(title: str, content: Iterable[str]) -> str:
    """Return sections under a heading of their own; nothing without content."""
    inside = "\n".join(filter(None, content))
    return f'<div id="{title.lower()}"><h2 class="part">{title}</h2></div>{inside}' * bool(
        inside
    )


def section(title: str, content: str) -> str:
    """Return a section, or nothing without content. The title is HTML."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<section id="{name}"><h2>{title}</h2>\n{content}</section>' if content else ""


def _summary(
    run: RunInfo,
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row],
    train_rows: Sequence[Row],
) -> str:
    peaks = "from data sheet" if device else "device unknown: shares are of measured ceilings"
    rates = dict.fromkeys(text(row, "rate") for row in rows)
    environment = run.environment
    versions = ", ".join(f"{name} {value}" for name, value in environment.versions.items())
    summary = summary_lines(run, rows)
    has_operators = bool(rows) or not (comm_rows or train_rows)
    if not has_operators:
        summary = summary[:1]  # the device; there is nothing to count
    summary += comm_lines(comm_rows) + train_lines(train_rows)
    lines = [(line[:LEAD].strip(), line[LEAD:]) for line in summary]
    lines += [("peaks", peaks)] if has_operators or train_rows else []
    lines += [("rate", "; ".join(rates))] if has_operators else []
    lines += [
        ("versions", f"torch {environment.torch}, {versions}".rstrip(", ")),
        (
            "power",
            "; ".join(dict.fromkeys(_power(device_info) for device_info in environment.devices))
            or "unknown",
        ),
    ]
    warnings = "".join(
        f'<p class="warning">{escape(line)}</p>' for line in environment.warnings
    )
    return definitions(lines) + warnings


def _power(device: DeviceInfo) -> str:
    if device.power_limit_w is None:
        return "limit unknown"
    default = device.default_power_limit_w
    text = f"limit {device.power_limit_w:.0f} W"
    is_changed = default not in (None, device.power_limit_w)
    return f"{text} (default {default:.0f} W)" if is_changed else text


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    cells = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{''.join(cells)}</dl>"


def _operator_figures(
    run: RunInfo, rows: Sequence[Row], device: DeviceSpec | None
) -> list[Drawn]:
    """Return the figures that are not empty."""
    drawn = (
        (
            "Roofline",
            "Each point is one operator; the lines are what bounds it.",
            figures.roofline(rows, run, device),
        ),
        (
            "Memory bandwidth",
            "Operators without matrix products: compulsory bytes over time.",
            figures.bandwidth(rows, run, device),
        ),
        ("One layer", _LAYER_NOTE, figures.time_breakdown(rows, run)),
        (
            "Head, loss and optimizer",
            "No part of a layer. Of loss and loss_chunked a step has one: they do not add up.",
            figures.time_breakdown(rows, run, is_layer=False),
        ),
    )
    return [
        (title, note, figure)
        for title, note, figure in drawn
        if any(trace.type == "bar" or trace.mode == "markers" for trace in figure.data)
    ]


def _figures(drawn: Iterable[Drawn]) -> list[str]:
    return [figure_section(*figure) for figure in drawn]


def figure_section(title: str, note: str, figure: Figure) -> str:
    """Return a plot under its title (text) and a note."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displaylogo": False, "responsive": True, "displayModeBar": False},
    )
    return section(
        escape(title), f'<p class="quiet">{escape(note)}</p><div class="plot">{plot}</div>'
    )


def _unmeasured(records: Sequence[Record], rows: Sequence[Row]) -> str:
    tracebacks = {r.case.case_id: r.traceback for r in records if isinstance(r, Failed)}
    items = []
    for row in rows:
        if row["status"] not in ("skipped", "failed"):
            continue
        trace = tracebacks.get(text(row, "case_id"))
        more = f"<pre>{escape(trace)}</pre>" if trace else ""
        items.append(
            f"<details><summary><b>{escape(text(row, 'status'))}</b> {escape(describe(row))}: "
            f"{escape(text(row, 'message'))}</summary>"
            f"<pre>{escape(text(row, 'command'))}</pre>{more}</details>"
        )
    return "\n".join(items)


def _environment(run: RunInfo) -> str:
    env = run.environment
    memory = format_bytes(env.memory_bytes)
    pairs = [
        ("host", env.host),
        ("system", f"{env.os}, kernel {env.kernel}"),
        ("processor", f"{env.cpu}, {env.num_cores} cores, {memory}"),
        ("software", f"Python {env.python}, torch {env.torch}, stepmark {env.stepmark}"),
        ("commit", env.git_commit or "unknown"),
        *env.versions.items(),
        *((f"rank {device.rank}", _device(device)) for device in env.devices),
        *env.variables.items(),
        *((f"setting {name}", value) for name, value in run.settings.items()),
    ]
    return definitions(pairs)


def _device(device: DeviceInfo) -> str:
    words = [device.name, device.host, device.uuid, device.pcie]
    if device.memory_bytes is not None:
        words.append(format_bytes(device.memory_bytes))
    if device.max_sm_clock_hz is not None:
        words.append(f"at most {device.max_sm_clock_hz / 1e6:.0f} MHz")
    if device.ecc is not None:
        words.append("ECC on" if device.ecc else "ECC off")
    return ", ".join(word for word in [*words, f"power {_power(device)}"] if word)


STYLE = """
:root { --ink: #1b1f24; --quiet: #5a6470; --paper: #fff; --line: #d9dee4; --mark: #fff4d6;
  --each: #f6f8fa; --bad: #b42318; --link: #0060a8;
  --shade: rgba(0, 0, 0, .28) }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --quiet: #9aa5b1;
  --paper: #14171b; --line: #30363d; --mark: #3a3217; --each: #1b1f25; --bad: #ff8a7a;
  --link: #6cb6ff; --shade: rgba(255, 255, 255, .28) } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 64px }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 17px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line);
  overflow-wrap: anywhere }
h2.part { font-size: 20px; border: 0; margin-bottom: -20px } li.part { font-weight: 600 }
h3 { font-size: 15px; margin: 22px 0 6px }
a { color: var(--link) }
nav { margin: 28px 0 0; padding: 10px 0; border-top: 1px solid var(--line); font-size: 14px }
nav ul { columns: 2 340px; margin: 0; padding-left: 18px }
ol { padding-left: 20px } li pre { margin: 4px 0 10px }
svg { max-width: 100%; height: auto; display: block } .narrow { display: none }
.quiet { color: var(--quiet); margin: 2px 0 10px; overflow-wrap: anywhere }
code, pre { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--each);
  border: 1px solid var(--line); border-radius: 4px; padding: 8px 10px; margin: 8px 0 }
pre.table { white-space: pre; overflow-x: auto }
dl { display: grid; grid-template-columns: minmax(90px, max-content) minmax(0, 1fr);
  gap: 3px 18px; margin: 0 }
dt { color: var(--quiet); overflow-wrap: anywhere } dd { margin: 0; overflow-wrap: anywhere }
.warning { background: var(--mark); padding: 6px 10px; border-radius: 4px; margin: 10px 0 0 }
.box { overflow: auto; max-height: 75vh; border: 1px solid var(--line); border-radius: 4px }
.box, pre.table { background: linear-gradient(to left, var(--under) 40%, transparent) right /
    48px 100% no-repeat local, linear-gradient(to left, var(--shade), transparent) right /
    18px 100% no-repeat scroll, var(--under) }
.box { --under: var(--paper) } pre.table { --under: var(--each) }
.box, pre.table, .plot { scrollbar-width: thin; scrollbar-color: var(--quiet) transparent }
.box::-webkit-scrollbar, pre.table::-webkit-scrollbar, .plot::-webkit-scrollbar {
  height: 8px; width: 8px }
.box::-webkit-scrollbar-thumb, pre.table::-webkit-scrollbar-thumb,
.plot::-webkit-scrollbar-thumb { background: var(--quiet); border-radius: 4px }
.plot { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; width: 100% }
th, td { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line) }
th { position: sticky; top: 0; background: var(--paper); padding: 0 }
th button { all: unset; cursor: pointer; display: block; padding: 6px 10px; font-weight: 600 }
th button:focus-visible { outline: 2px solid var(--link); outline-offset: -2px }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
.num { text-align: right; font-variant-numeric: tabular-nums }
tbody tr { cursor: pointer } tbody tr:hover, tr.picked { background: var(--mark) }
tr.each { background: var(--each); color: var(--quiet) } tr.bad td { color: var(--bad) }
input { font: inherit; color: inherit; background: var(--paper); padding: 5px 9px;
  border: 1px solid var(--line); border-radius: 4px; width: 260px; max-width: 100% }
details { border-bottom: 1px solid var(--line); padding: 5px 0 }
summary { cursor: pointer; overflow-wrap: anywhere }
.tools { margin: 8px 0 }
@media (max-width: 640px) {
  main { padding: 14px 12px 40px } h1 { font-size: 19px }
  .wide { display: none } .narrow { display: block }
  dl { grid-template-columns: minmax(56px, 88px) minmax(0, 1fr); gap: 3px 10px }
}
@media print {
  :root { --ink: #000; --quiet: #444; --paper: #fff; --line: #bbb; --mark: #fff; --each: #fff;
    --bad: #900; --link: #000 }
  main { max-width: none; padding: 0 } nav, .tools, .command { display: none }
  .wide { display: block } .narrow { display: none }
  .box { overflow: visible; max-height: none; border: 0 } th { position: static }
  table { font-size: 6px; white-space: normal } th button { padding: 1px 2px }
  td { padding: 1px 2px; overflow-wrap: anywhere }
  pre, pre.table { white-space: pre-wrap; font-size: 9px } .plot { overflow: visible }
  h2, h3 { break-after: avoid } svg, .plot, pre { break-inside: avoid }
}
"""

SCRIPT = """
(function () {
  document.querySelectorAll("table.rows").forEach(function (table) {
    var body = table.tBodies[0], section = table.closest("section");
    var find = function (name) { return section.querySelector("." + name); };
    var lines = Array.from(body.rows), box = find("filter");
    var shown = find("shown"), out = find("command");
    var texts = new Map(lines.map(function (r) { return [r, r.textContent.toLowerCase()]; }));
    var heads = table.querySelectorAll("th");
    var apply = function () {
      var words = box.value.toLowerCase().split(/\\s+/), n = 0;
      lines.forEach(function (r) {
        r.hidden = !words.every(function (w) { return texts.get(r).includes(w); });
        n += !r.hidden;
      });
      shown.textContent = n + " of " + lines.length + " rows";
    };
    box.addEventListener("input", apply); apply();
    heads.forEach(function (th, i) {
      th.addEventListener("click", function () {
        var up = th.getAttribute("aria-sort") !== "ascending";
        heads.forEach(function (o) { o.setAttribute("aria-sort", "none"); });
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        lines.sort(function (a, b) {
          var x = a.cells[i], y = b.cells[i], p = x.textContent, q = y.textContent;
          if (!p || !q) return (p ? 0 : 1) - (q ? 0 : 1);
          var d = x.dataset.v && y.dataset.v ? x.dataset.v - y.dataset.v : p.localeCompare(q);
          return up ? d : -d;
        });
        body.append.apply(body, lines);
      });
    });
    body.addEventListener("click", function (e) {
      var line = e.target.closest("tr");
      lines.forEach(function (r) { r.classList.toggle("picked", r === line); });
      if (line) out.textContent = line.dataset.command;
    });
  });
  var plots = Array.from(document.querySelectorAll(".js-plotly-plot"));
  var ink = function () {
    var css = getComputedStyle(document.documentElement);
    plots.forEach(function (plot) {
      Plotly.relayout(plot, { "font.color": css.getPropertyValue("--ink").trim() });
    });
  };
  var besides = plots.filter(function (plot) {
    var x = plot.layout.xaxis2 && plot.layout.xaxis.domain;
    return x && x[1] < 0.5;
  });
  if (matchMedia("(max-width: 640px)").matches) besides.forEach(function (plot) {
    var height = 1.7 * plot.layout.height, whole = [0, 1];
    plot.style.height = plot.parentNode.style.height = height + "px";
    Plotly.relayout(plot, { height: height, "xaxis.domain": whole, "xaxis2.domain": whole,
      "yaxis.domain": [0.6, 1], "yaxis2.domain": [0, 0.4] });
  });
  ink();
  ["(prefers-color-scheme: dark)", "print"].forEach(function (media) {
    matchMedia(media).addEventListener("change", ink);
  });
})();
"""
