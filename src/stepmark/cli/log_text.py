"""What `stepmark logs` found, as lines for people."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli.log_sources import Rows, Source
from stepmark.core.finding import Finding, Severity

if TYPE_CHECKING:
    from stepmark.core.reading import Table

_SHOWN_FINDINGS = 200
_SHOWN_EVIDENCE = 3
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags that say what is of interest."""

    histogram: bool
    by: str | None
    bins: str | None
    ranks: int | None
    curve: str | None
    steps: int | None
    runs: Path
    force: bool
    tuning: bool
    page: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewed:
    """A source with its histogram as it was asked for."""

    source: Source
    rows: Rows  # of the histogram
    totals: dict[str, float | int] | None  # by the curve


def source_text(each: Viewed, asked: Asked) -> Iterator[str]:
    """With --histogram or --tuning those alone and what is a problem; else all in short."""
    source = each.source
    if not asked.histogram and not asked.tuning:
        yield from source.lines
        yield from finding_text(source.findings)
        yield from _histogram_summary(source)
        return
    yield f"# {source.kind}: {files_text(source)}"
    if asked.tuning:
        yield from _tuning_text(source)
    if asked.histogram:
        yield from _histogram_text(each, asked)
    problems = [one for one in source.findings if one.severity is Severity.PROBLEM]
    yield from finding_text(problems)


def _histogram_summary(source: Source) -> Iterator[str]:
    from stepmark.report.histogram_text import summary, unknown_ranks  # noqa: PLC0415

    if not source.histogram:
        return
    yield "messages (--histogram for all sizes):"
    yield from (f"  {line}" for line in summary(source.histogram, source.num_ranks_seen))
    if line := unknown_ranks(source.histogram):
        yield f"  {line}"


def _histogram_text(each: Viewed, asked: Asked) -> Iterator[str]:
    from stepmark.report.histogram_text import lines, unknown_ranks  # noqa: PLC0415

    source = each.source
    if not each.rows:
        yield "no messages: a log has them with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL"
        return
    if line := unknown_ranks(source.histogram):
        yield f"# {line}"
    yield from lines(each.rows)
    if asked.steps:
        yield _per_step(source, asked.steps)
    if each.totals is not None:
        yield from _curve_text(each.totals, asked)


def _per_step(source: Source, steps: int) -> str:
    from stepmark.core.units import format_bytes  # noqa: PLC0415

    share = steps * max(source.num_ranks_seen, 1)
    calls = sum(tally.calls for tally in source.histogram.values()) / share
    num_bytes = sum(
        tally.calls * (kind.call_bytes if kind.message_bytes is None else kind.message_bytes)
        for kind, tally in source.histogram.items()
    )
    return f"# {calls:.4g} calls of {format_bytes(num_bytes / share)} per rank and step"


def _curve_text(totals: dict[str, float | int], asked: Asked) -> Iterator[str]:
    from stepmark.core.units import format_time  # noqa: PLC0415

    seconds = totals["seconds_per_rank"]
    line = f"# by {asked.curve} these messages take {format_time(seconds)} per rank"
    if asked.steps:
        line += f", {format_time(totals['seconds_per_rank_and_step'])} per step"
    yield f"{line}, one after another and without waiting"
    for key, why in (
        ("uncovered_calls", "calls are of collectives that it has no times of"),
        ("below_calls", "calls are smaller than its smallest size: that size's time is taken"),
        (
            "extrapolated_calls",
            "calls are larger than its largest size: its bandwidth is taken",
        ),
    ):
        if totals[key]:
            yield f"# {totals[key]} {why}"


def _tuning_text(source: Source) -> Iterator[str]:
    from stepmark.core.units import format_bytes  # noqa: PLC0415

    if not source.tuning:
        yield "no choice of algorithms: a log has them with NCCL_DEBUG_SUBSYS=TUNING"
    for row in source.tuning:
        known = row["size_bytes"] is not None
        size = row["size_bytes"] if known else row["printed_bytes"]
        assert isinstance(size, int)
        channels = "" if row["channels"] is None else f", {row['channels']} channels"
        what = f"{row['collective'] or 'call'} of {format_bytes(size)}"
        how = f"{row['algorithm']} {row['protocol']}{channels}, {row['calls']} calls"
        yield f"{what}{'' if known else ' as printed'}: {how}"


def finding_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Each finding with the first lines that prove it."""
    for one in findings[:_SHOWN_FINDINGS]:
        yield f"{one.severity}: {one.text} [{one.rule}]"
        shown = 1 if one.severity is Severity.NOTE else _SHOWN_EVIDENCE
        for proof in one.evidence[:shown]:
            line = f":{proof.line}" if proof.line else ""
            yield f"    {proof.file}{line}: {proof.text[:_SHOWN_CHARACTERS]}"
        if one.count > len(one.evidence[:shown]) > 0:
            yield f"    {one.count} in all"
    if len(findings) > _SHOWN_FINDINGS:
        yield f"... and {len(findings) - _SHOWN_FINDINGS} more; --json has all"


def table_text(table: "Table") -> list[str]:
    """Its name, what it holds, and how that is known."""
    from rich.console import Console  # noqa: PLC0415

    from stepmark.report.tables_found import print_found  # noqa: PLC0415

    text = StringIO()
    print_found([(table, ())], Console(file=text), file_width=200)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def files_text(source: Source) -> str:
    """The files of a source in a few words."""
    first = source.files[0]
    return first if len(source.files) == 1 else f"{first} and {len(source.files) - 1} more"
