"""The page of a run: what it measured, with its commands and its environment."""

from collections.abc import Iterable, Sequence
from html import escape

from stepmark.cases.record import DeviceInfo, Failed, Record, RunInfo
from stepmark.collectives import comm_figures
from stepmark.collectives.comm_columns import COMM_COLUMNS
from stepmark.collectives.comm_summary import comm_lines
from stepmark.ground.units import format_bytes
from stepmark.model.device import DeviceSpec
from stepmark.operators.op_columns import OP_COLUMNS
from stepmark.runs.first_screen import machine_facts
from stepmark.runs.summary import summary_lines, train_lines
from stepmark.tables import figures
from stepmark.tables.columns import Row, text
from stepmark.tables.figures import Drawn
from stepmark.tables.page import definitions, document, figure_section, section
from stepmark.tables.row_tables import LEAD, describe, page_table, ran
from stepmark.training import training_figures
from stepmark.training.train_columns import TRAIN_COLUMNS

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
        section("Training", page_table(ran(train_rows, TRAIN_COLUMNS)) if train_rows else ""),
        section(
            "Measurements", page_table(ran(rows, OP_COLUMNS)) if rows or not other_rows else ""
        ),
        section("Collectives", page_table(ran(comm_rows, COMM_COLUMNS)) if comm_rows else ""),
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


def _part(title: str, sections: Iterable[str]) -> str:
    """Return sections under a heading of their own; nothing without any."""
    inside = "\n".join(filter(None, sections))
    heading = f'<section><h2 class="part">{title}</h2></section>'
    return f"{heading}\n{inside}" if inside else ""


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
