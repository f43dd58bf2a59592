"""stepmark logs: training and NCCL logs, flight-recorder dumps, inspector lines, tables."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from stepmark import text_tables as tables
from stepmark.collectives.judgement import Judgement, judge, parse_nics, wrapped
from stepmark.collectives.measured_curves import read_curves
from stepmark.findings import expected, histogram
from stepmark.findings.finding import Finding, Severity
from stepmark.findings.histogram_figures import section
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.garbage import no_collection
from stepmark.ground.options import dashed, plain
from stepmark.ground.reading import Table
from stepmark.ground.units import comma_list, format_bytes, format_time, plural
from stepmark.ground.waiting import Waiting
from stepmark.job_logs import log_summary
from stepmark.job_logs.answers import DAMAGE, Answer, JobState, answer_of, as_ended
from stepmark.job_logs.log_options import LogsOptions, MessageView
from stepmark.job_logs.log_sources import (
    LOG,
    TABLES,
    Inputs,
    Rows,
    Source,
    collect,
    is_output_name,
    read_sources,
)
from stepmark.model.device import find_device_by_alias, unknown_device
from stepmark.store.view import print_text
from stepmark.tables.export import write_json, write_tables
from stepmark.tables.page import Page
from stepmark.tables.row_tables import LEAD
from stepmark.text_tables.validate import validate

_OF_MESSAGES = tuple(field.name for field in fields(MessageView))
_MAX_FINDINGS = 200
_MAX_EVIDENCE = 3
_MAX_CONSEQUENCES = 8
# Links of a chain that show a failure, instead of leading to it.
_LABELS = {
    "raised-at": "at:",
    "first-failure": "seen:",
    "gpu-xid": "seen:",
    "gpu-work-ended": "seen:",
}
_MAX_CHARACTERS = 200


def source_text(source: Source, options: LogsOptions) -> Iterator[str]:
    """Yield a summary; with --histogram or --tuning only these, the problems and damage."""
    if options.is_diagnosis:
        yield from source.lines
        yield from finding_text(source.findings)
        yield from _histogram_summary(source, options.steps)
        return
    yield f"# {source.kind}: {files_text(source)}"
    if options.tuning:
        yield from _tuning_text(source)
    if options.shows_histogram:
        yield from _histogram_text(source, options)
    yield from finding_text(
        [
            each
            for each in source.findings
            if each.severity is Severity.PROBLEM or each.rule in DAMAGE
        ]
    )


def _histogram_summary(source: Source, steps: int | None) -> Iterator[str]:
    if not source.histogram:
        return
    yield "messages (--histogram shows all sizes):"
    yield from (
        f"  {line}" for line in histogram.summary(source.histogram, source.num_ranks_seen)
    )
    if steps:
        yield f"  {_per_step(source, steps)}"
    if line := histogram.unknown_ranks(source.histogram):
        yield f"  {line}"


def _histogram_text(source: Source, options: LogsOptions) -> Iterator[str]:
    if not source.histogram_rows:
        yield "no messages: a log has them with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL"
        return
    if line := histogram.unknown_ranks(source.histogram):
        yield f"# {line}"
    yield from histogram.lines(source.histogram_rows)
    if options.steps:
        yield f"# {_per_step(source, options.steps)}"
    if source.by_curve is not None:
        yield from _curve_text(source.by_curve, options)


def _per_step(source: Source, steps: int) -> str:
    rank_steps = steps * max(source.num_ranks_seen, 1)
    calls, num_bytes = (
        total / rank_steps for total in histogram.calls_and_bytes(source.histogram)
    )
    return f"{calls:.4g} calls of {format_bytes(num_bytes)} per rank and step"


def _curve_text(totals: dict[str, float | int], options: LogsOptions) -> Iterator[str]:
    seconds = totals["seconds_per_rank"]
    line = f"# by {options.curve} these messages take {format_time(seconds)} per rank"
    if options.steps:
        line += f", {format_time(totals['seconds_per_rank_and_step'])} per step"
    yield f"{line}, one after another and without waiting"
    yield from expected.beyond_curve(totals)


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
    """Yield each finding: the first lines that prove it, what led to it, what follows."""
    for finding in findings[:_MAX_FINDINGS]:
        yield from _one_finding(finding, f"{finding.severity}:", "")
    if len(findings) > _MAX_FINDINGS:
        yield f"... and {len(findings) - _MAX_FINDINGS} more; --json has all"


def _one_finding(finding: Finding, label: str, indent: str) -> Iterator[str]:
    yield f"{indent}{label} {finding.text} [{finding.rule}]"
    is_short = indent or finding.severity is Severity.NOTE
    evidence = finding.evidence[: 1 if is_short else _MAX_EVIDENCE]
    for line in evidence:
        number = f":{line.line}" if line.line else ""
        yield f"{indent}    {line.file}{number}: {line.text[:_MAX_CHARACTERS]}"
    if finding.count > len(evidence) > 0:
        yield f"{indent}    {finding.count} in all"
    for link in finding.chain:
        yield from _one_finding(link, _LABELS.get(link.rule, "because:"), f"{indent}  ")
    if finding.action and not indent:
        yield f"  do: {finding.action}"
    for consequence in finding.consequences[:_MAX_CONSEQUENCES]:
        yield from _one_finding(consequence, "consequence:", f"{indent}  ")
    if len(finding.consequences) > _MAX_CONSEQUENCES:
        more = len(finding.consequences) - _MAX_CONSEQUENCES
        yield f"{indent}  ... and {more} more consequences; --json has all"


def files_text(source: Source) -> str:
    """Return the files of a source in a few words."""
    return comma_list(source.files, 1)


TableFindings = tuple[Table, tuple[Finding, ...]]


def run(options: LogsOptions) -> int:
    """Print and write what the files contain. Return LogReport.exit_code."""
    report = report_of(options)
    if not options.to_stdout:
        print_text(report.text())
    for finding in report.findings if options.to_stdout else ():
        if finding.rule in DAMAGE:
            sys.stderr.write(f"stepmark: {finding.text}\n")
    report.write()
    return report.exit_code


def report_of(options: LogsOptions) -> "LogReport":
    """Read the files of the options. Raises ConfigError."""
    _check(options)
    with Waiting("finding the kinds of the files"):
        inputs = collect(options.files, only_tables=options.tables)
    for path, reason in inputs.unknown:
        sys.stderr.write(f"stepmark: {path} is left out: {reason}\n")
    with Waiting("reading the logs"), no_collection():
        return read_report(inputs, options)


def _check(options: LogsOptions) -> None:
    """Refuse options that contradict each other. Raises ConfigError."""
    options.check_stdout()
    if options.bins:
        histogram.parse_bins(options.bins)  # before logs are read
    if options.nics:
        parse_nics(options.nics)
    if options.model and (options.tables or not options.is_diagnosis):
        raise ConfigError("model", options.model, "left out with other views than the answer")
    for name, value in plain(options).items() if options.tables else ():
        if name in _OF_MESSAGES:
            rule = "it cannot be combined with --tables, which reads no messages"
            raise ConfigError(name, value, rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Everything that was found in the files."""

    options: LogsOptions
    sources: tuple[Source, ...]
    tables: tuple[TableFindings, ...]
    judgements: tuple[tuple[Judgement, ...], ...]  # of each table
    stops: tuple[Finding, ...]  # outputs of benchmarks that stop or cannot be read
    without_tables: tuple[str, ...]  # files that were searched in vain
    num_left_out: int = 0  # files that may be output of the job and state nothing

    @property
    def findings(self) -> list[Finding]:
        return [
            *(finding for source in self.sources for finding in source.findings),
            *(finding for _, findings in self.tables for finding in findings),
            *self.stops,
        ]

    @property
    def exit_code(self) -> int:
        """1 where a job fails, hangs or gives wrong data; 3 where its end is unknown.

        Tables alone are results and no job; views of messages do not ask for its end.
        """
        if any(each.severity is Severity.PROBLEM for each in self.findings):
            return 1
        is_unknown = self.answer.state is JobState.UNKNOWN
        return 3 if is_unknown and self._is_of_job and self.options.is_diagnosis else 0

    @property
    def _is_of_job(self) -> bool:
        return bool(self.sources) or any(each.rule != "table-unread" for each in self.stops)

    @property
    def answer(self) -> Answer:
        """The answer over all sources and tables."""
        summaries = (source.summary for source in self.sources)
        return answer_of(
            [*(one for source in self.sources for one in source.findings), *self.stops],
            self.tables,
            [line for source in self.sources for line in source.endings],
            "; ".join(filter(None, [*summaries, self.verdicts, self._left_out])),
            is_ended=self.options.ended,
            headline="; ".join(source.headline for source in self.sources if source.headline),
        )

    @property
    def _left_out(self) -> str:
        if not self.num_left_out:
            return ""
        files = plural(self.num_left_out, "file")
        return f"{files} without a word of an end or a failure left out"

    @property
    def verdicts(self) -> str:
        """How many tables are normal, e.g. "4 tables: 3 normal, 1 not normal"."""
        values = Counter(each.value for judged in self.judgements for each in judged)
        words = ", ".join(f"{number} {value}" for value, number in values.items())
        num_tables = sum(map(bool, self.judgements))
        return f"{num_tables} table{'s' if num_tables > 1 else ''}: {words}" if words else ""

    def text(self) -> Iterator[str]:
        """Yield lines for a terminal."""
        if self._is_of_job and self.options.is_diagnosis:
            yield f"{'answer':<{LEAD}}{self.answer.text}"
        elif self.verdicts:
            # The only verdict is the answer itself.
            only = [each for judged in self.judgements for each in judged]
            answer = f"{only[0].value}: {only[0].text}" if len(only) == 1 else self.verdicts
            yield from wrapped(f"{'answer':<{LEAD}}{answer}")
        if self.options.is_diagnosis:
            yield from finding_text(self.stops)
        for place, source in enumerate(self.sources):
            if place:
                yield ""
            yield from source_text(source, self.options)
        if self.sources and self.tables:
            yield ""
        is_only = not self._is_of_job and sum(map(len, self.judgements)) == 1
        for (table, findings), judgements in zip(self.tables, self.judgements, strict=True):
            name, *facts = log_summary.table_lines(table)
            yield name
            for judgement in judgements:
                yield from judgement.lines(with_verdict=not is_only)
            yield from facts
            yield from finding_text(findings)
        for file in self.without_tables:
            yield f"{file}: no table found"

    def write(self) -> None:
        """Write the files that the options name. Raises ConfigError."""
        if self.options.json:
            write_json(self.document(), self.options.json, "logs")
        if self.options.csv:
            write_tables(self._csv_tables(), self.options.csv, "csv")
        if self.options.html:
            write_text(self.options.html, self.page().html(), "html")

    def page(self) -> Page:
        """Return the answer, and each source with its figures."""
        return Page(
            title="stepmark logs",
            lead=self.answer.text,
            sections=[
                section(
                    f"{source.kind}: {files_text(source)}",
                    source.histogram_rows,
                    source.findings,
                    description=source.lines,
                    more=source.figures,
                )
                for source in self.sources
            ],
        )

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, whatever options limit the text."""
        return {
            "answer": asdict(self.answer) if self._is_of_job else None,
            "sources": [
                {
                    "kind": source.kind,
                    "files": source.files,
                    "findings": list(map(_finding_row, source.findings)),
                    "histogram": source.histogram_rows,
                    "tuning": list(source.tuning),
                    "curve": source.by_curve,
                    **dict(source.rows),
                }
                for source in self.sources
            ],
            "tables": [
                asdict(table)
                | {"findings": list(map(_finding_row, findings))}
                | {"judgements": [judgement.document() for judgement in judgements]}
                for (table, findings), judgements in zip(
                    self.tables, self.judgements, strict=True
                )
            ],
            "exit_code": self.exit_code,
        }

    def _csv_tables(self) -> dict[str, Rows]:
        """Return what was requested, or everything that has rows."""
        options = self.options
        requested = {"histogram": options.shows_histogram, "tuning": options.tuning}
        has_request = any(requested.values())
        rows_by_name: dict[str, Rows] = {}
        for source in self.sources:
            label = {"source": source.kind} if len(self.sources) > 1 else {}
            first = {"histogram": source.histogram_rows, "tuning": list(source.tuning)}
            for name, rows in (first | dict(source.rows)).items():
                if not has_request or requested.get(name):
                    rows_by_name.setdefault(name, []).extend(label | row for row in rows)
        if not has_request or not self.sources:
            if self.tables:
                rows_by_name["tables"] = log_summary.rows(self.tables)
                rows_by_name["judgements"] = [
                    {
                        "table": log_summary.name_of(table),
                        "verdict": judgement.value,
                        **row,
                    }
                    for (table, _), judgements in zip(self.tables, self.judgements, strict=True)
                    for judgement in judgements
                    for row in judgement.rows
                ]
            rows_by_name["findings"] = list(map(_finding_row, self.findings))
        return {name: rows for name, rows in rows_by_name.items() if rows} or {"findings": []}


def read_report(inputs: Inputs, options: LogsOptions) -> LogReport:
    """Read all inputs. Raises ConfigError."""
    sources = [_with_rows(one, options) for one in read_sources(inputs, options.ranks, options)]
    if options.ended:
        sources = [replace(one, findings=as_ended(one.findings)) for one in sources]
    # A request for the messages of a job's output is no request for its tables.
    is_about_messages = sources and (options.shows_histogram or options.tuning)
    logs = set(inputs.paths[LOG] if is_about_messages else ())
    files = {
        path: tables.read_tables(path) for path in inputs.paths[TABLES] if path not in logs
    }
    if not sources:
        for file in files.values():
            file.check()
    by_file = {path: file.tables for path, file in files.items()}
    stops = [
        stop.finding(str(path))
        for path, file in files.items()
        for stop in file.stopped
        if stop.unread or path not in inputs.paths[LOG]
    ]
    if not sources and options.curve:
        allowed = "given with logs, dumps or inspector lines to compare with"
        raise ConfigError("curve", options.curve, allowed)
    if options.model and not any(source.headline for source in sources):
        raise ConfigError("model", options.model, "given with a training log")
    if not sources and options.html:
        allowed = "given with output, logs or dumps of a job: tables have no figures"
        raise ConfigError("html", options.html, allowed)
    listed = [_with_hardware(one, options) for group in by_file.values() for one in group]
    given = [name for name in ("nics", "gpus_per_node", "device") if getattr(options, name)]
    if given and not listed and not (options.model and given == ["device"]):
        allowed = "given with a table of results (--device also with --model, for its MFU)"
        raise ConfigError(dashed(given[0]), getattr(options, given[0]), allowed)
    if not (listed or sources or options.tables):
        allowed = "a file with a table of results; none of its lines is a row that can be read"
        raise ConfigError("file", next(iter(files)), allowed)
    nics = parse_nics(options.nics) if options.nics else None
    findings = [tuple(validate(table)) for table in listed]
    judgements = tuple(
        judge(table, nics=nics, findings=checked)
        for table, checked in zip(listed, findings, strict=True)
    )
    return LogReport(
        options=options,
        sources=tuple(sources),
        tables=tuple(
            (table, (*checked, *(f for each in judged for f in each.findings)))
            for table, checked, judged in zip(listed, findings, judgements, strict=True)
        ),
        judgements=judgements,
        stops=as_ended(stops) if options.ended else tuple(stops),
        num_left_out=sum(is_output_name(path) for path, _ in inputs.unknown),
        without_tables=tuple(str(p) for p, group in by_file.items() if not (group or sources)),
    )


def _with_hardware(table: Table, options: LogsOptions) -> Table:
    """Return the table with the GPU and the hosts that options state, where it has none."""
    stated = find_device_by_alias(options.device) if options.device else None
    if options.device and not stated:
        raise unknown_device(options.device)
    device = table.device or (stated.names[0] if stated else "")
    hosts = table.num_hosts
    if not hosts and options.gpus_per_node:
        hosts = -(-(table.num_ranks or 0) // options.gpus_per_node)
    return replace(table, device=device, num_hosts=hosts)


def _with_rows(source: Source, options: LogsOptions) -> Source:
    """Return the source with its histogram as the options ask for it."""
    bins = histogram.parse_bins(options.bins) if options.bins else None
    by = histogram.BY if options.by is None else histogram.parse_by(options.by)
    num_ranks = source.num_ranks_seen
    durations = None
    totals = None
    if options.curve:
        curves = read_curves(options.curve, options.runs)
        durations = expected.expected(source.histogram, curves, force=options.force)
        totals = expected.totals(source.histogram, durations, num_ranks)
        if options.steps:
            totals["seconds_per_rank_and_step"] = totals["seconds_per_rank"] / options.steps
    rows = histogram.rows(
        source.histogram, by=by, bins=bins, num_ranks_seen=num_ranks, expected=durations
    )
    return replace(source, histogram_rows=rows, by_curve=totals)


def _finding_row(finding: Finding) -> dict[str, object]:
    first = finding.evidence[0] if finding.evidence else None
    return {
        "severity": finding.severity.value,
        "rule": finding.rule,
        "text": finding.text,
        "count": finding.count,
        "file": first.file if first else None,
        "line": first.line or None if first else None,
        "evidence": [asdict(line) for line in finding.evidence],
        "action": finding.action,
        "chain": [_finding_row(link) for link in finding.chain],
        "consequences": [_finding_row(one) for one in finding.consequences],
    }
