"""A run as one HTML file that needs no network: to mail, to archive, to open offline."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from stepmark.core.columns import Row, text
from stepmark.core.device import DeviceSpec
from stepmark.core.record import DeviceInfo, Failed, Record, RunInfo
from stepmark.core.units import format_bytes
from stepmark.report import comm_figures, figures, training_figures
from stepmark.report.comm_columns import COMM_COLUMNS
from stepmark.report.comm_summary import comm_lines
from stepmark.report.op_columns import OP_COLUMNS
from stepmark.report.page_assets import SCRIPT, STYLE
from stepmark.report.row_tables import describe, table
from stepmark.report.summary import LEAD, summary_lines
from stepmark.report.train_columns import TRAIN_COLUMNS
from stepmark.report.training_summary import train_lines

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def html(
    run: RunInfo,
    records: Sequence[Record],
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row] = (),
    train_rows: Sequence[Row] = (),
) -> str:
    """The whole document: operators (rows), collectives (comm_rows), training (train_rows)."""
    beside = [*comm_rows, *train_rows]
    body = "\n".join(
        (
            section("Summary", _summary(run, rows, device, comm_rows, train_rows)),
            *_train_sections(records, train_rows),
            *_figure_sections(run, rows, device),
            *_comm_sections(run, comm_rows, device),
            section("Measurements", table(rows, OP_COLUMNS) if rows or not beside else ""),
            section("Collectives", table(comm_rows, COMM_COLUMNS) if comm_rows else ""),
            section("Skipped and failed", _unmeasured(records, [*rows, *beside])),
            section("Environment", _environment(run)),
        )
    )
    lead = f"{escape(run.created_at)} &middot; <code>{escape(run.command)}</code>"
    return document(f"stepmark {run.run_id}", lead, body)


def document(title: str, lead: str, body: str) -> str:
    """A page that needs nothing else. `title` is text; `lead` and `body` are HTML."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    shown = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{shown}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{STYLE}</style>\n<script>{get_plotlyjs()}</script></head>\n"
        f'<body><main><h1>{shown}</h1>\n<p class="quiet">{lead}</p>\n{body}\n</main>\n'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, content: str) -> str:
    """Title is HTML; nothing for no content."""
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def _summary(
    run: RunInfo,
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row],
    train_rows: Sequence[Row],
) -> str:
    known = "from data sheet" if device else "device unknown: shares are of measured ceilings"
    rates = dict.fromkeys(text(row, "rate") for row in rows)
    found = run.environment
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
    said = summary_lines(run, rows)
    nothing_else = not comm_rows and not train_rows
    if not rows and not nothing_else:
        said = said[:1]  # the device; there is nothing to count
    said += comm_lines(comm_rows) + train_lines(train_rows)
    lines = [(line[:LEAD].strip(), line[LEAD:]) for line in said]
    lines += [("peaks", known)] if rows or train_rows or nothing_else else []
    lines += [("rate", "; ".join(rates))] if rows or nothing_else else []
    lines += [
        ("versions", f"torch {found.torch}, {versions}".rstrip(", ")),
        ("power", "; ".join(dict.fromkeys(_power(one) for one in found.devices)) or "unknown"),
    ]
    warnings = "".join(f'<p class="warning">{escape(line)}</p>' for line in found.warnings)
    return _pairs(lines) + warnings


def _power(device: DeviceInfo) -> str:
    if device.power_limit_w is None:
        return "limit unknown"
    default = device.default_power_limit_w
    lowered = (
        f" (default {default:.0f} W)" if default not in (None, device.power_limit_w) else ""
    )
    return f"limit {device.power_limit_w:.0f} W{lowered}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    cells = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{''.join(cells)}</dl>"


def _figure_sections(run: RunInfo, rows: Sequence[Row], device: DeviceSpec | None) -> list[str]:
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
        (
            "One layer",
            "Fastest backend and dtype of a role; head, loss, optimizer: once per model.",
            figures.time_breakdown(rows, run),
        ),
    )
    return [
        figure_section(title, note, figure)
        for title, note, figure in drawn
        if any(trace.type == "bar" or trace.mode == "markers" for trace in figure.data)
    ]


def _comm_sections(
    run: RunInfo, comm_rows: Sequence[Row], device: DeviceSpec | None
) -> list[str]:
    return [
        figure_section(title, note, figure)
        for title, note, figure in comm_figures.drawn(comm_rows, run, device)
    ]


def _train_sections(records: Sequence[Record], train_rows: Sequence[Row]) -> list[str]:
    if not train_rows:
        return []
    figures_ = [
        figure_section(title, note, figure)
        for title, note, figure in training_figures.drawn(records)
    ]
    return [section("Training", table(train_rows, TRAIN_COLUMNS)), *figures_]


def figure_section(title: str, note: str, figure: "Figure") -> str:
    """A plot under its title (text) and a note."""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"displaylogo": False, "responsive": True, "displayModeBar": False},
    )
    return section(escape(title), f'<p class="quiet">{escape(note)}</p>{plot}')


def _unmeasured(records: Sequence[Record], rows: Sequence[Row]) -> str:
    tracebacks = {
        one.case.case_id: one.traceback
        for one in records
        if isinstance(one, Failed) and one.traceback
    }
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
    found = run.environment
    pairs = [
        ("host", found.host),
        ("system", f"{found.os}, kernel {found.kernel}"),
        (
            "processor",
            f"{found.cpu}, {found.num_cores} cores, {format_bytes(found.memory_bytes)}",
        ),
        ("software", f"Python {found.python}, torch {found.torch}, stepmark {found.stepmark}"),
        ("commit", found.git_commit or "unknown"),
        *found.versions.items(),
        *((f"rank {one.rank}", _device(one)) for one in found.devices),
        *found.variables.items(),
        *((f"setting {name}", value) for name, value in run.settings.items()),
    ]
    return _pairs(pairs)


def _device(device: DeviceInfo) -> str:
    words = [device.name, device.host, device.uuid, device.pcie]
    if device.memory_bytes is not None:
        words.append(format_bytes(device.memory_bytes))
    if device.max_sm_clock_hz is not None:
        words.append(f"at most {device.max_sm_clock_hz / 1e6:.0f} MHz")
    if device.ecc is not None:
        words.append("ECC on" if device.ecc else "ECC off")
    return ", ".join(word for word in [*words, f"power {_power(device)}"] if word)
