"""The end of `stepmark run` on a terminal: machine, answer, ledger, what is worth doing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from stepmark.cases.record import RunInfo
from stepmark.ground.units import format_bytes
from stepmark.predictions.predicted_steps import StepReport, Suggestion
from stepmark.runs.summary import train_lines
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.outcomes import MATMULS
from stepmark.tables.row_tables import unique_cases
from stepmark.timeline.ledger_rows import short_lines

WIDTH = 100
_LEAD = 10
_VERSIONS = ("cuda", "hip", "nccl", "rccl", "driver")


def lines(
    run: RunInfo,
    rows: Sequence[Row],
    comm_rows: Sequence[Row],
    train_rows: Sequence[Row],
    report: StepReport | None,
    page: Path,
) -> Iterator[str]:
    """Yield at most 40 lines of WIDTH columns. rows: of operators."""
    for name, value in machine_facts(run, rows, comm_rows):
        yield from _entry(name, value)
    yield from _entry("problems", problems([*unique_cases(rows), *comm_rows, *train_rows]))
    steps = report.steps if report else ()
    if report is None or not steps:
        yield ""
        yield from (part for line in train_lines(train_rows) for part in wrap(line, WIDTH))
        notes = report.notes if report else ()
        yield from (part for note in notes for part in wrap(f"note: {note}", WIDTH))
    for step in steps:
        yield from ("", *wrap(step.sentence, WIDTH), "")
        yield from short_lines(step.predicted, step.measured.ledger)
        yield ""
        for place, suggestion in enumerate(step.suggestions, 1):
            yield from suggestion_lines(place, suggestion)
    yield ""
    yield from _entry("page", str(page))
    yield from _entry("details", f"stepmark runs show {page.parent}")


def suggestion_lines(place: int, suggestion: Suggestion) -> Iterator[str]:
    """Yield a suggestion and its command, which a shell takes as it is printed."""
    yield from wrap(f"{place}. {suggestion.text}:", WIDTH, subsequent_indent="   ")
    command = wrap(
        suggestion.command, WIDTH - 9, break_long_words=False, break_on_hyphens=False
    )
    yield "     " + " \\\n       ".join(command)


def machine_facts(
    run: RunInfo, rows: Sequence[Row], comm_rows: Sequence[Row]
) -> list[tuple[str, str]]:
    """Return what the run was measured on, and the best rates that it measured, by name."""
    environment = run.environment
    versions = [
        f"{n} {environment.versions[n]}" for n in _VERSIONS if n in environment.versions
    ]
    commit = f" ({environment.git_commit[:8]})" if environment.git_commit else ""
    software = [f"torch {environment.torch}", *versions]
    software.append(f"stepmark {environment.stepmark}{commit}")
    return [
        ("machine", _devices(run)),
        ("software", ", ".join(software)),
        ("measured", ", ".join(_rates(rows, comm_rows))),
    ]


def _devices(run: RunInfo) -> str:
    environment = run.environment
    counts = Counter(device.name for device in environment.devices)
    device = next(iter(environment.devices), None)
    words = [f"{count} x {name}" for name, count in counts.items()] or ["device unknown"]
    if device is not None and not device.num_sms and device.name == environment.cpu:
        num_ranks = len(environment.devices)
        words = [f"{device.name} for {num_ranks} rank{'s' * (num_ranks > 1)}"]
    if device is not None and device.memory_bytes is not None and device.num_sms:
        words.append(f"{format_bytes(device.memory_bytes)} each")
    if device is not None and device.power_limit_w is not None:
        words.append(f"power limit {device.power_limit_w:.0f} W")
    memory = format_bytes(environment.memory_bytes)
    host = f"host: {environment.num_cores} cores, {memory}"
    return ", ".join([*words, host])


def _rates(rows: Sequence[Row], comm_rows: Sequence[Row]) -> Iterator[str]:
    """Yield the highest rate of products, copies and each collective."""
    right = [row for row in unique_cases(rows) if row["status"] == "measured"]
    products = [row for row in right if row["family"] in MATMULS]
    copies = [row for row in right if row["family"] == "copy"]
    collectives = [row for row in comm_rows if row["status"] == "measured" and not row["pair"]]
    for name, key, share, unit, of, own in (
        ("matmul", "tflops", "pct_peak", "TFLOP/s", "peak", products),
        ("copy", "gb_per_s", "pct_hbm", "GB/s", "peak", copies),
        ("all_reduce", "busbw_gb_s", "pct_link", "GB/s busbw", "the link", collectives),
    ):
        known = [row for row in own if row.get("collective") in (None, name) and row[key]]
        known = [row for row in known if not row.get("validity")] or known
        best = max(known, key=lambda row: number(row, key) or 0.0, default=None)
        if best is not None:
            of_peak = number(best, share)
            words = f"{name} {digits(number(best, key), 3)} {unit}"
            yield words + ("" if of_peak is None else f" ({of_peak:.0f} % of {of})")


def problems(rows: Sequence[Row]) -> str:
    """Return how many cases failed, are wrong, impossible or doubtful; "" without any."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for row in rows:
        status = text(row, "status")
        if status != "measured":
            counts[status] += 1
        elif row.get("over_limit"):
            counts["above a hard limit"] += 1
        elif row.get("validity"):
            counts["doubtful"] += 1
            reasons[text(row, "validity")] += 1
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    words += f", mostly {reasons.most_common(1)[0][0]}" if reasons else ""
    return f"{words} (of {len(rows)} cases)" if counts else ""


def _entry(name: str, value: str) -> Iterator[str]:
    """Yield a named value, folded; nothing without one."""
    if value:
        yield from wrap(
            f"{name:<{_LEAD}}{value}",
            WIDTH,
            subsequent_indent=" " * _LEAD,
            break_on_hyphens=False,
            break_long_words=False,
        )
