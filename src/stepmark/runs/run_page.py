"""The page of a run: what it measured, with its commands and its environment."""

from collections.abc import Sequence

from stepmark.cases.record import DeviceInfo, Failed, Record, RunInfo
from stepmark.collectives import comm_figures
from stepmark.collectives.comm_columns import COMM_COLUMNS
from stepmark.collectives.comm_remarks import comm_lines
from stepmark.ground.units import format_bytes
from stepmark.model.device import DeviceSpec
from stepmark.operators import op_figures
from stepmark.operators.op_columns import OP_COLUMNS
from stepmark.runs.first_screen import machine_facts
from stepmark.runs.summary import summary_lines, train_lines
from stepmark.tables.columns import Row, text
from stepmark.tables.figures import Figure
from stepmark.tables.page import Html, Page, Section, definitions, details, heading, paragraph
from stepmark.tables.page_table import page_table
from stepmark.tables.row_tables import LEAD, describe, ran, unique_cases, validity_counts
from stepmark.training import training_figures
from stepmark.training.train_columns import TRAIN_COLUMNS


def page(
    run: RunInfo,
    records: Sequence[Record],
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row] = (),
    train_rows: Sequence[Row] = (),
    *,
    headline: str = "",
    answer: Sequence[Html] = (),
    evidence: Sequence[Section] = (),
    replays: Sequence[Section | Figure] = (),
) -> Page:
    """Return the page: the answer, the evidence, then the details.

    headline and answer: about the steps that the run predicted; evidence: their lines.
    """
    other_rows = [*comm_rows, *train_rows]
    if answer:
        facts = definitions(machine_facts(run, rows, comm_rows))
        answer = [*answer, heading("Machine"), facts]
    shown = [
        *evidence,
        *(training_figures.figures(records) if train_rows else ()),
        Section("Summary", _summary(run, rows, device, comm_rows, train_rows)),
        *op_figures.figures(rows, run, device),
        *comm_figures.figures(comm_rows, run, device),
        *replays,
    ]
    tables = (
        ("Training", train_rows, TRAIN_COLUMNS, bool(train_rows)),
        ("Measurements", rows, OP_COLUMNS, bool(rows) or not other_rows),
        ("Collectives", comm_rows, COMM_COLUMNS, bool(comm_rows)),
    )
    tracebacks = {r.case.case_id: r.traceback for r in records if isinstance(r, Failed)}
    unmeasured = []
    for row in (*rows, *other_rows):
        if row["status"] in ("skipped", "failed"):
            trace = tracebacks.get(text(row, "case_id"))
            blocks = [text(row, "command"), *([trace] if trace else [])]
            what = f"{describe(row)}: {text(row, 'message')}"
            unmeasured.append(details(text(row, "status"), what, blocks))
    more = [
        *(
            Section(title, page_table(ran(own, columns)))
            for title, own, columns, has in tables
            if has
        ),
        Section("Skipped and failed", unmeasured),
        Section("Environment", _environment(run)),
    ]
    return Page(
        title=f"stepmark {run.run_id}",
        lead=run.created_at,
        command=run.command,
        headline=headline,
        opening=answer,
        sections=[Section("Evidence", (), shown), Section("Details", (), more)],
    )


def _summary(
    run: RunInfo,
    rows: Sequence[Row],
    device: DeviceSpec | None,
    comm_rows: Sequence[Row],
    train_rows: Sequence[Row],
) -> list[Html]:
    peaks = "from data sheet" if device else "device unknown: shares are of measured ceilings"
    rates = dict.fromkeys(text(row, "rate") for row in rows)
    environment = run.environment
    versions = ", ".join(f"{name} {value}" for name, value in environment.versions.items())
    summary = summary_lines(run, rows)
    has_operators = bool(rows) or not (comm_rows or train_rows)
    if not has_operators:
        summary = summary[:1]  # the device; there is nothing to count
    summary += comm_lines(comm_rows, environment.devices) + train_lines(train_rows)
    lines = [(line[:LEAD].strip(), line[LEAD:]) for line in summary]
    if counted := validity_counts(unique_cases(rows)):
        lines.append(("doubtful", counted))
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
    return [definitions(lines), *(paragraph(line, "warning") for line in environment.warnings)]


def _power(device: DeviceInfo) -> str:
    if device.power_limit_w is None:
        return "limit unknown"
    default = device.default_power_limit_w
    text = f"limit {device.power_limit_w:.0f} W"
    is_changed = default not in (None, device.power_limit_w)
    return f"{text} (default {default:.0f} W)" if is_changed else text


def _environment(run: RunInfo) -> list[Html]:
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
    return [definitions(pairs)]


def _device(device: DeviceInfo) -> str:
    memory = device.memory_bytes
    clock_hz = device.max_sm_clock_hz
    words = (
        device.name,
        device.host,
        device.pcie,
        "" if memory is None else format_bytes(memory),
        "" if clock_hz is None else f"at most {clock_hz / 1e6:.0f} MHz",
        {True: "ECC on", False: "ECC off", None: ""}[device.ecc],
        f"power {_power(device)}",
    )
    return ", ".join(filter(None, words))
