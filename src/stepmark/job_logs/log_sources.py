"""The inputs of stepmark logs: files sorted by what they contain, each kind read alike."""

import glob
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stepmark.cases.message import Histogram
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.histogram import ranks_seen, with_ranks
from stepmark.findings.log_facts import LogFacts
from stepmark.findings.stalls import Cause
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import decode, is_binary, read_head, read_text
from stepmark.ground.units import plural, ranks_text
from stepmark.job_logs import log_summary
from stepmark.job_logs.answers import endings_of
from stepmark.job_logs.failures import XIDS
from stepmark.job_logs.flight_recorder import (
    looks_like_flight_recorder,
    read_flight_recorder,
)
from stepmark.job_logs.flight_recorder.findings import findings
from stepmark.job_logs.flight_recorder.groups import progress
from stepmark.job_logs.flight_recorder.operations import Dump, histogram_of
from stepmark.job_logs.flight_recorder.trace_text import (
    TracedCall,
    TraceProblem,
    looks_like_trace_text,
    read_trace_text,
)
from stepmark.job_logs.inspector import looks_like_inspector, read_inspector
from stepmark.job_logs.job_output import is_job_output
from stepmark.job_logs.job_output.lines import has_nccl_line
from stepmark.job_logs.job_output.steps import UNCERTAIN
from stepmark.job_logs.job_stalls import JobStalls, stalls_of
from stepmark.job_logs.log_options import TrainingView
from stepmark.job_logs.nccl_log import looks_like_log, read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose
from stepmark.job_logs.nccl_log.start_rules import healthy_facts
from stepmark.job_logs.ras_report import looks_like_ras, read_ras
from stepmark.job_logs.reports import ras_findings
from stepmark.job_logs.training_log import (
    training_flops,
    training_log_figures,
    training_log_text,
)
from stepmark.job_logs.training_log.steady_state import steady_state
from stepmark.job_logs.training_log.step_lines import read_step_lines
from stepmark.job_logs.training_log.training_log import TrainingLog, difference_of, log_of
from stepmark.tables.figures import Figure
from stepmark.tables.row_tables import LEAD
from stepmark.tables.table import Table
from stepmark.text_tables import looks_like_tables
from stepmark.text_tables.profiler_tables_verb import looks_like_profiler_table

MAX_FILES = 100_000
# In the folder of a watched job: its output, and folders with logs and dumps.
WATCHED_OUTPUT = "output.log"
NCCL_FOLDER = "nccl"
FLIGHT_FOLDER = "flight"
# Files of a folder that may be output of a job; a named file may have any name.
_OUTPUT_NAME = re.compile(
    r"(?i)^[^.]+$|\.(?:out|err|log|txt|stdout|stderr)(?:\.\d{1,6})?(?:\.gz)?$|\.[oe]\d{1,12}$|\.gz$"
)
LOG = "NCCL log"
FLIGHT = "flight recorder"
INSPECTOR = "inspector"
TABLES = "tables"
RAS = "RAS report"
ANALYSIS = "analysis of dumps"
OUTPUT = "job output"  # a log without lines of NCCL
TRAINING = "training log"


def is_output_name(path: Path) -> bool:
    """Return whether a file of a folder may be output of a job, by its name."""
    return bool(_OUTPUT_NAME.search(path.name))


@dataclass(slots=True, kw_only=True)
class Inputs:
    """Paths by kind. A job's output that is a log with tables is in both."""

    paths: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    unknown: list[tuple[Path, str]] = field(default_factory=list)  # in folders, with the reason
    # Of the only file, if it had to be read whole to see what it is.
    facts: dict[Path, LogFacts] = field(default_factory=dict)
    # Steps of trainers, and why those of other files cannot be read.
    training: list[TrainingLog] = field(default_factory=list)
    unread_steps: list[ConfigError] = field(default_factory=list)


def collect(words: Sequence[str], *, only_tables: bool = False) -> Inputs:
    """Sort the files that the words name. Raises ConfigError.

    Refused are a name without a file, a named file of no known kind, and a folder or pattern
    without any file of a known kind.
    """
    inputs = Inputs()
    sorted_paths: set[Path] = set()
    for word in words:
        paths, is_named = _expand(word)
        is_known = [
            path.resolve() in sorted_paths
            or _sort(
                path,
                inputs,
                is_named=is_named,
                is_only=is_named and len(words) == 1,
                only_tables=only_tables,
            )
            for path in paths
        ]
        sorted_paths.update(path.resolve() for path in paths)
        if not any(is_known):
            raise ConfigError(
                "file",
                word,
                "a folder or pattern with logs, dumps or tables (a run: `stepmark runs show`)",
            )
    return inputs


def _expand(word: str) -> tuple[list[Path], bool]:
    """Return (files, whether one was named). Existing names may contain pattern signs."""
    path = Path(word)
    try:
        if not word:
            raise ValueError("an empty name")
        if (path / WATCHED_OUTPUT).is_file():
            return _of_watched_job(path), False
        if path.is_dir():
            return _limited(word, (p for p in path.rglob("*") if p.is_file())), False
        if path.exists():
            return [path], True
        matches = glob.glob(word, recursive=True) if glob.has_magic(word) else []
    except (OSError, ValueError) as error:
        raise ConfigError("file", word, f"a name that can be read ({error})") from None
    files = _limited(word, (file for file in map(Path, matches) if file.is_file()))
    if not files:
        raise ConfigError("file", word, "a file, a folder or a quoted pattern that exists")
    return files, False


def _of_watched_job(folder: Path) -> list[Path]:
    """Return the output, logs and dumps of a watched job; traces and reports are not read."""
    files = [folder / WATCHED_OUTPUT]
    for name in (NCCL_FOLDER, FLIGHT_FOLDER):
        files += sorted(file for file in (folder / name).glob("*") if file.stat().st_size)
    return files


def _limited(word: str, files: Iterator[Path]) -> list[Path]:
    """Return the files sorted, so that equal folders give equal output."""
    limited = list(itertools.islice(files, MAX_FILES + 1))
    if len(limited) > MAX_FILES:
        raise ConfigError("file", word, f"at most {MAX_FILES} files")
    return sorted(limited)


def _sort(
    path: Path, inputs: Inputs, *, is_named: bool, is_only: bool, only_tables: bool
) -> bool:
    """Add the file to the inputs, and return whether it is of a known kind."""
    try:
        kinds = kinds_of(path)
        is_output = is_named or is_output_name(path)
        if not only_tables and kinds <= {TABLES, RAS, ANALYSIS} and is_output:
            has_tables = bool(kinds)
            is_log = (
                _read_only(path, inputs, has_other=has_tables)
                if is_only
                else is_job_output(path, has_tables=has_tables)
            )
            kinds |= {LOG} if is_log else set()
        if not only_tables and kinds <= {TABLES, LOG} and is_output:
            kinds |= {TRAINING} if _read_steps(path, inputs) else set()
    except ConfigError as error:
        if is_named:
            raise
        inputs.unknown.append((path, error.allowed))
        return False
    if only_tables:
        kinds = {TABLES} if is_named or TABLES in kinds else set()
    if not kinds and is_named:
        if looks_like_profiler_table(read_head(path)):
            raise ConfigError(
                "file", path, f"use stepmark trace breakdown {path} for its tables"
            )
        allowed = (
            "an NCCL log, a flight-recorder dump, inspector lines, a table, or output of a job "
            "that trained or failed"
        )
        raise ConfigError("file", path, f"{allowed}; --tables searches it for tables anyway")
    if not kinds:
        inputs.unknown.append((path, "it contains nothing that stepmark recognizes"))
    for kind in kinds:
        inputs.paths[kind].append(path)
    return bool(kinds)


def _read_only(path: Path, inputs: Inputs, *, has_other: bool) -> bool:
    """Read the only file, and return whether it is output of a job, as is_job_output does.

    has_other: it is something else already, a table or a report.
    """
    if is_binary(read_head(path)):
        return False
    try:
        facts = inputs.facts[path] = read_log([path])
    except ConfigError:
        return False
    # A report of RAS begins with the version, too.
    has_failed = facts.has_failed or any(
        one.rule in (UNCERTAIN, *XIDS) for one in facts.failures
    )
    is_stalled = any(state.waits_in is not None for state in facts.progress)
    is_log = facts.processes or has_failed or is_stalled or facts.stopped or facts.after_ends
    is_job = facts.versions or facts.endings or facts.has_steps
    return bool(is_log or (is_job and not has_other))


def _read_steps(path: Path, inputs: Inputs) -> bool:
    """Read the steps of a file, and return whether it has one, be it torn."""
    try:
        lines = read_step_lines(path)
        if not any(own.steps or own.has_unread for own in lines):
            return False
        inputs.training.append(log_of(path, lines))
    except ConfigError as error:
        inputs.unread_steps.append(error)
    return True


def kinds_of(path: Path) -> set[str]:
    """Return what a file contains, by its first 64 KiB. Raises ConfigError."""
    head = read_head(path)
    if not head.strip():
        raise ConfigError("file", path, "a file with content; this one is empty")
    if looks_like_inspector(head):
        return {INSPECTOR}
    if looks_like_flight_recorder(head):
        return {FLIGHT}
    if looks_like_trace_text(head):
        return {ANALYSIS}
    if looks_like_ras(head):
        return {RAS, LOG} if has_nccl_line(head) else {RAS}
    is_report = head.startswith(b"{\n") and path.suffix == ".json"  # ours may quote a log
    kinds = {LOG} if looks_like_log(head) and not is_report else set()
    if not is_binary(head) and looks_like_tables(decode(head)):
        kinds.add(TABLES)
    return kinds


Rows = list[dict[str, object]]
_MAX_RANKS_SHOWN = 16
_UNREAD = "in no format that is read (docs/verbs/logs.md lists those of trainers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One job's files of one kind."""

    kind: str
    files: tuple[str, ...]
    histogram: Histogram
    num_ranks_seen: int
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]  # a description, shown before the findings
    rows: tuple[tuple[str, Rows], ...] = ()  # further tables by name
    tuning: tuple[dict[str, object], ...] = ()  # NCCL's choices by size, as its log has them
    endings: tuple[Evidence, ...] = ()  # lines that show the end of the job
    summary: str = ""  # what is in order, in a few words
    headline: str = ""  # what the answer begins with, unless the job failed
    figures: tuple[Figure, ...] = ()
    histogram_rows: Rows = field(default_factory=list)  # as the options ask for them
    by_curve: dict[str, float | int] | None = None  # totals of expected times


def read_sources(
    inputs: Inputs, num_ranks: int | None, training: TrainingView | None = None
) -> list[Source]:
    """Read one source per kind of file. Raises ConfigError.

    training: what is shown of the steps of trainers; None: nothing. Messages of two kinds may
    be of one job, so they are never added; a log and dumps are taken as of one job, with one
    cause.
    """
    paths = inputs.paths
    dumps = read_flight_recorder(paths[FLIGHT])
    traced = [
        call for path in paths[ANALYSIS] for call in read_trace_text(read_text(path), str(path))
    ]
    facts = None
    if paths[LOG]:
        known = inputs.facts.get(paths[LOG][0]) if num_ranks is None else None
        facts = known or read_log(paths[LOG], num_ranks=num_ranks)
    stalls = stalls_of(facts, dumps, traced)
    by_kind: dict[str, Source] = {}
    if facts:
        by_kind[LOG] = _log(facts, stalls, paths[LOG])
    # What the files show together is told with the first of them.
    if dumps:
        by_kind[FLIGHT] = _flight_recorder(
            dumps, stalls.causes, paths[FLIGHT], is_first=not by_kind
        )
    if traced:
        own = [] if by_kind else [cause.finding() for cause in stalls.causes]
        by_kind[ANALYSIS] = _analysis(traced, own, paths[ANALYSIS])
    if paths[RAS]:
        by_kind[RAS] = _ras(paths[RAS])
    if paths[INSPECTOR]:
        by_kind[INSPECTOR] = _inspector(paths[INSPECTOR])
    if facts and facts.has_steps and not (inputs.training or inputs.unread_steps):
        lines = (*by_kind[LOG].lines, f"{'steps':<{LEAD}}{_UNREAD}")
        by_kind[LOG] = replace(by_kind[LOG], lines=lines)
    sources = list(by_kind.values())
    if training and (inputs.training or inputs.unread_steps):
        sources.insert(0, _training(inputs, training))
    if num_ranks is None:
        return sources
    return [
        replace(source, histogram=with_ranks(source.histogram, num_ranks)) for source in sources
    ]


def _log(facts: LogFacts, stalls: JobStalls, paths: Sequence[Path]) -> Source:
    diagnosed = tuple(diagnose(facts, stalls))
    return Source(
        kind=LOG if facts.has_messages else OUTPUT,
        files=tuple(map(str, paths)),
        histogram=facts.messages,
        num_ranks_seen=max(len(facts.processes), ranks_seen(facts.messages)),
        findings=diagnosed,
        lines=tuple(log_summary.fact_lines(facts)),
        tuning=tuple(log_summary.choice_rows(facts)),
        endings=tuple(endings_of(facts)),
        summary=", ".join(healthy_facts(facts)),
        rows=(
            ("facts", log_summary.fact_rows(facts)),
            ("communicators", log_summary.communicator_rows(facts)),
            ("transports", log_summary.transport_rows(facts)),
            ("predictions", log_summary.prediction_rows(facts)),
        ),
    )


def _training(inputs: Inputs, options: TrainingView) -> Source:
    """Return the steps of the file with most of them, and what is wrong in those of others."""
    unread = [
        Finding(
            rule="steps-unread",
            severity=Severity.WARNING,
            text=f"The steps of {error.value} are not read: it must be {error.allowed}.",
        )
        for error in inputs.unread_steps
    ]
    if not inputs.training:
        return Source(
            kind=TRAINING,
            files=tuple(str(error.value) for error in inputs.unread_steps),
            histogram={},
            num_ranks_seen=0,
            findings=tuple(unread),
            lines=(),
        )
    log = max(inputs.training, key=lambda own: len(own.steps))
    steady = steady_state(log)
    flops: Rows = []
    if options.model:
        flops = training_flops.flops_rows(log, steady, options.model, options.device)
    lines = [*training_log_text.lines(log, steady)]
    headline = training_log_text.headline(log, steady)
    others = [own for own in inputs.training if own is not log]
    if others:
        lines.insert(1, f"{'':<{LEAD}}{plural(len(others), 'file')} with fewer steps left out")
    if others or unread:
        headline = f"{Path(log.file).name}: {headline}"
    if flops:
        lines += ["", *Table(flops, training_flops.COLUMNS).text()]
    return Source(
        kind=TRAINING,
        files=(log.file,),
        histogram={},
        num_ranks_seen=0,
        findings=(
            *training_log_text.findings(log),
            *(one for own in others for one in _findings_of_other(own, log)),
            *unread,
        ),
        lines=tuple(lines),
        headline=headline,
        figures=tuple(training_log_figures.figures(log, steady)),
        rows=(
            ("training", [training_log_text.summary_row(log, steady)]),
            ("parts", training_log_text.part_rows(log, steady)),
            ("steps", training_log_text.step_rows(log, steady)),
            ("flops", flops),
        ),
    )


def _findings_of_other(own: TrainingLog, shown: TrainingLog) -> Iterator[Finding]:
    """Yield whether a file is of another job than the one shown, and its bad losses."""
    if difference := difference_of(own, shown):
        yield Finding(
            rule="several-jobs",
            severity=Severity.WARNING,
            text=f"{own.file} is of another job or start than {shown.file}: {difference}.",
            action="Read the log of each job by itself.",
        )
    for one in training_log_text.findings(own):
        if one.rule == "loss-nan":
            yield replace(one, text=f"{Path(own.file).name}: {one.text}")


def _flight_recorder(
    dumps: Sequence[Dump], causes: Sequence[Cause], paths: Sequence[Path], *, is_first: bool
) -> Source:
    """Return the dumps; with the causes, unless they are shown with the log of the job."""
    messages, uncounted = histogram_of(dumps)
    ranks = [dump.rank for dump in dumps if dump.rank is not None]
    versions = dict.fromkeys(dump.version or "unknown" for dump in dumps)
    nccl = dict.fromkeys(dump.nccl for dump in dumps if dump.nccl)
    num_operations = sum(len(dump.operations) for dump in dumps)
    lines = [
        f"flight recorder: {len(dumps)} dump{'s' if len(dumps) > 1 else ''}"
        + (f", {ranks_text(ranks)}" if ranks else ", rank unknown")
        + f", {num_operations} operations, format {', '.join(versions)}"
        + (f", NCCL {', '.join(nccl)}" if nccl else "")
    ]
    rows: Rows = [asdict(rank) for rank in progress(dumps)]
    lines += [_progress_text(r) for r in rows[:_MAX_RANKS_SHOWN] if r["first"] is not None]
    more = len(rows) - _MAX_RANKS_SHOWN
    lines += [f"  ... and {more} more; --json or --csv has all"] if more > 0 else []
    lines += [f"  not in the histogram: {n} {reason}" for reason, n in uncounted.items()]
    return Source(
        kind=FLIGHT,
        files=tuple(map(str, paths)),
        histogram=messages,
        num_ranks_seen=len(dumps),
        findings=tuple(findings(dumps, causes, is_first=is_first)),
        lines=tuple(lines),
        rows=(("ranks", rows),),
    )


def _analysis(
    traced: Sequence[TracedCall], own: Sequence[Finding], paths: Sequence[Path]
) -> Source:
    """Return what torch's analyzer of dumps printed."""
    counts = Counter(one.problem.value for one in traced)
    words = ", ".join(f"{number} of {kind}" for kind, number in counts.items())
    unclear = [one for one in traced if one.problem in _UNCLEAR or not one.is_whole]
    notes = [
        Finding(
            rule="analysis-unclear",
            severity=Severity.WARNING,
            text=_unclear_text(one),
            evidence=tuple(one.evidence),
        )
        for one in unclear[:_MAX_RANKS_SHOWN]
    ]
    return Source(
        kind=ANALYSIS,
        files=tuple(map(str, paths)),
        histogram={},
        num_ranks_seen=0,
        findings=(*own, *notes),
        lines=(f"analysis of flight-recorder dumps: {len(traced)} calls, {words}",),
    )


def _unclear_text(one: TracedCall) -> str:
    if one.ranks_without_dump:
        who = ranks_text(one.ranks_without_dump)
        return f"The analyzer could not decide: the dumps of {who} are missing; read them too."
    return f"The analyzer does not decide on a call ({one.problem.value})."


_UNCLEAR = (TraceProblem.UNDECIDED, TraceProblem.MISSING_DUMPS, TraceProblem.ABORTED)


def _ras(paths: Sequence[Path]) -> Source:
    """Return reports of RAS; of one job, so a later one is the job's state."""
    reports = [report for path in paths for report in read_ras(read_text(path), str(path))]
    lines = []
    summary = ""
    for report in reports:
        if report.is_ok:
            size = max(row.size for row in report.groups)
            summary = f"RAS states {size} ranks without an error; it does not show progress"
        words = [f"NCCL {report.version}"] if report.version else []
        if report.totals:
            words.append("{} nodes, {} processes, {} GPUs".format(*report.totals))
        lines.append(f"RAS report: {', '.join(words) or 'no summary'}")
        lines += [
            f"  group {row.number}: communicators {row.num_communicators}, ranks {row.size}, "
            f"{row.status} {' '.join(row.errors) or 'OK'}"
            for row in report.groups[:_MAX_RANKS_SHOWN]
        ]
    return Source(
        kind=RAS,
        files=tuple(map(str, paths)),
        histogram={},
        num_ranks_seen=0,
        findings=tuple(one for report in reports for one in ras_findings(report)),
        summary=summary,
        lines=tuple(lines),
    )


def _progress_text(row: dict[str, object]) -> str:
    rank = "?" if row["rank"] is None else row["rank"]
    last = "none" if row["last_completed"] is None else row["last_completed"]
    return (
        f"  rank {rank}, group {row['group']}: collectives {row['first']} to "
        f"{row['last_enqueued']} enqueued, last completed {last}"
    )


def _inspector(paths: Sequence[Path]) -> Source:
    facts = read_inspector(paths)
    calls = sum(tally.calls for tally in facts.histogram.values())
    clocks = ", ".join(
        f"{n} {source or 'unnamed clock'}" for source, n in facts.timing_sources.items()
    )
    rows: Rows = [
        {"collective": name, "algorithm": algorithm, "protocol": protocol, "calls": n}
        for (name, algorithm, protocol), n in facts.algorithms.items()
    ]
    lines = [
        f"inspector: {calls} operations of {facts.num_ranks_seen} ranks, format "
        f"{', '.join(facts.versions) or 'unknown'}, timed by: {clocks}"
    ]
    lines += [
        f"  {row['collective']}: {row['algorithm']} {row['protocol']}, {row['calls']} calls"
        for row in rows
    ]
    return Source(
        kind=INSPECTOR,
        files=tuple(map(str, paths)),
        histogram=facts.histogram,
        num_ranks_seen=facts.num_ranks_seen,
        findings=facts.findings,
        lines=tuple(lines),
        rows=(("algorithms", rows),) if rows else (),
    )
