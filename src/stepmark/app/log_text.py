"""Results of `stepmark logs` as lines for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console

from stepmark.app.log_sources import Rows, Source
from stepmark.core.finding import Finding, Severity
from stepmark.core.reading import Table
from stepmark.core.units import format_bytes, format_time
from stepmark.core.verb_options import LogsOptions
from stepmark.report.histogram_text import lines, summary, unknown_ranks
from stepmark.report.tables_found import print_found

_MAX_FINDINGS = 200
_MAX_EVIDENCE = 3
_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """A source with its histogram as the options ask for it."""

    source: Source
    rows: Rows  # of the histogram
    totals: dict[str, float | int] | None  # by the curve

    @property
    def named_rows(self) -> dict[str, Rows]:
        return {
            "histogram": self.rows,
            "tuning": list(self.source.tuning),
            **dict(self.source.rows),
        }


def source_text(view: SourceView, options: LogsOptions) -> Iterator[str]:
    """Yield a summary; with --histogram or --tuning only these and the problems."""
    source = view.source
    if not options.shows_histogram and not options.tuning:
        yield from source.lines
        yield from finding_text(source.findings)
        yield from _histogram_summary(source)
        return
    yield f"# {source.kind}: {files_text(source)}"
    if options.tuning:
        yield from _tuning_text(source)
    if options.shows_histogram:
        yield from _histogram_text(view, options)
    problems = [one for one in source.findings if one.severity is Severity.PROBLEM]
    yield from finding_text(problems)


def _histogram_summary(source: Source) -> Iterator[str]:
    if not source.histogram:
        return
    yield "messages (--histogram shows all sizes):"
    yield from (f"  {line}" for line in summary(source.histogram, source.num_ranks_seen))
    if line := unknown_ranks(source.histogram):
        yield f"  {line}"


def _histogram_text(view: SourceView, options: LogsOptions) -> Iterator[str]:
    if not view.rows:
        yield "no messages: a log has them with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL"
        return
    if line := unknown_ranks(view.source.histogram):
        yield f"# {line}"
    yield from lines(view.rows)
    if options.steps:
        yield _per_step(view.source, options.steps)
    if view.totals is not None:
        yield from _curve_text(view.totals, options)


def _per_step(source: Source, steps: int) -> str:
    rank_steps = steps * max(source.num_ranks_seen, 1)
    calls = sum(tally.calls for tally in source.histogram.values()) / rank_steps
    num_bytes = sum(
        tally.calls * (kind.call_bytes if kind.message_bytes is None else kind.message_bytes)
        for kind, tally in source.histogram.items()
    )
    return f"# {calls:.4g} calls of {format_bytes(num_bytes / rank_steps)} per rank and step"


def _curve_text(totals: dict[str, float | int], options: LogsOptions) -> Iterator[str]:
    seconds = totals["seconds_per_rank"]
    line = f"# by {options.curve} these messages take {format_time(seconds)} per rank"
    if options.steps:
        line += f", {format_time(totals['seconds_per_rank_and_step'])} per step"
    yield f"{line}, one after another and without waiting"
    for key, reason in (
        ("uncovered_calls", "calls are of collectives that it has no times of"),
        ("below_calls", "calls are smaller than its smallest size, whose time is used"),
        ("extrapolated_calls", "calls are larger than its largest size, whose rate is used"),
    ):
        if totals[key]:
            yield f"# {totals[key]} {reason}"


def _tuning_text(source: Source) -> Iterator[str]:
    if not source.tuning:
        yield "no choice of algorithms: a log has them with NCCL_DEBUG_SUBSYS=TUNING"
    for row in source.tuning:
        is_known = row["size_bytes"] is not None
        size = row["size_bytes"] if is_known else row["printed_bytes"]
        assert isinstance(size, int)
        channels = "" if row["channels"] is None else f", {row['channels']} channels"
        call = f"{row['collective'] or 'call'} of {format_bytes(size)}"
        choice = f"{row['algorithm']} {row['protocol']}{channels}, {row['calls']} calls"
        yield f"{call}{'' if is_known else ' as printed'}: {choice}"


def finding_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each finding with the first lines that prove it."""
    for one in findings[:_MAX_FINDINGS]:
        yield f"{one.severity}: {one.text} [{one.rule}]"
        evidence = one.evidence[: 1 if one.severity is Severity.NOTE else _MAX_EVIDENCE]
        for line in evidence:
            number = f":{line.line}" if line.line else ""
            yield f"    {line.file}{number}: {line.text[:_MAX_CHARACTERS]}"
        if one.count > len(evidence) > 0:
            yield f"    {one.count} in all"
    if len(findings) > _MAX_FINDINGS:
        yield f"... and {len(findings) - _MAX_FINDINGS} more; --json has all"


def table_text(table: Table) -> list[str]:
    """Return its name, its contents, and how each fact is known."""
    text = StringIO()
    print_found([(table, ())], Console(file=text), file_width=200)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def files_text(source: Source) -> str:
    """Return the files of a source in a few words."""
    first = source.files[0]
    return first if len(source.files) == 1 else f"{first} and {len(source.files) - 1} more"
