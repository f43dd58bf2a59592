"""Reports of NCCL's RAS subsystem: what ncclras (or nc to port 28028) prints, text or JSON.

The formats are those of src/ras/client_support.cc in the sources of NCCL, 2.24 to 2.30, and of
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from stepmark.findings.finding import Evidence
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.json_text import as_object
from stepmark.job_logs.job_output.lines import split_tag, whole_lines

_MAX_FOREIGN = 100  # lines of other programs in a row, inside a report
_MAX_COMPUTED_RANKS = 2**24  # of one report; ranks beyond that RAS does not list are unknown
_MAX_CHARACTERS = 2000  # of a line
_KINDS = ("INCOMPLETE", "ERROR", "MISMATCH")
_STATUSES = ("NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT")
_ABSENT = ("missing", "DEAD", "NOCOMM", "UNKNOWN")  # values of ranks without data
# Of ncclResult_t, in the words of the text format; 0 is success, 7 in progress.
_RESULTS = {
    1: "Unhandled CUDA error",
    2: "System error",
    3: "Internal error",
    4: "Invalid argument",
    5: "Invalid usage",
    6: "Remote process error",
    8: "Timeout",
}

# Lines with single spaces. A launcher's tag or a time may be in front.
_START = re.compile(
    r"(?P<version>NCCL version (\S{1,40}) compiled with CUDA)|(?P<summary>Job summary$)"
    r"|(?P<communicators>Communicators\.\.\.)|(?P<table>Group Comms Nodes Ranks)"
    r"|#\d{1,9}-\d{1,9} \([0-9a-f]{1,16}\) (?:MISMATCH|INCOMPLETE|ERROR)$"
)
_MARKS = (
    *("compiled with CUDA", "Job summary", "Communicators...", "Group Comms"),
    *(") MISMATCH", ") INCOMPLETE", ") ERROR"),
)
_TOTALS = re.compile(r"(?<!\S)(\d{1,9})(?: \d{1,9} \d{1,9})? (\d{1,9}) (\d{1,9})$")
_LISTED = re.compile(r"Rank (?P<rank>\d{1,9}) -- (?P<place>.*)$")
_SIDE = re.compile(
    r"(?:(?P<count>\d{1,9}) ranks|Rank (?P<rank>\d{1,9})) (?:have |has )?"
    r"(?:status (?P<status>[A-Z]{1,20})|launched up to operation (?P<operation>\d{1,20})"
    r"|not launched any operations|reported (?P<error>(?:[A-Za-z ]{1,60} )?"
    r"(?:error|argument|usage|progress|[Tt]imeout)))(?: -- (?P<place>.*))?$"
)
_HEADING = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) ([A-Z]{1,20})$")
_SUBJECT = re.compile(
    r"ranks have different (?P<mismatch>\w{1,40})(?: operation counts)?$"
    r"|(?P<error>Initialization|Asynchronous) errors? on (?P<failed>\d{1,9}) ranks?$"
    r"|Missing communicator data from (?P<missing>\d{1,9}) ranks?$"
    r"|Missing communicator data from (?P<INCOMPLETE>\d{1,9}) job process(?:es)?$"
    r"|(?P<DEAD>\d{1,9}) job process(?:es are| is) considered dead"
    r"|Encountered (?P<TIMEOUT>\d{1,9}) communication timeouts? while"
)
_PROCESS = re.compile(r"Process (\d{1,9}) on node (\S{1,80})(?: managing GPUs? (.{1,300}))?$")
_ROW = re.compile(
    r"(?<!\S)(\d{1,9}) (\d{1,9}) \d{1,9} \d{1,9}(?:-\d{1,9})? (\d{1,9}) (\d{1,9})"
    r" ([A-Z]{1,20}) ([A-Z]{1,20}(?:,[A-Z]{1,20}){0,4})$"
)
_RANK_LIST = re.compile(r"The (?:missing|unknown) ranks?: ([\d,]{1,1024})$")  # before 2.26
_PLACE = re.compile(r"GPU (.{1,80}?) managed by process (\d{1,9})(?: on node (\S{1,80}))?")
_JSON_START = re.compile(r'\{\s*"nccl_version"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RasProcess:
    """A process as a report names it. `rank` is that of the communicator, not of the job.

    rank: None where processes of the job are listed. pid, node, gpus: None and "" where RAS has
    no information. gpus: CUDA devices as printed, such as "0,1" or "0 (NVML 4)".
    """

    rank: int | None = None
    pid: int | None = None
    node: str = ""
    gpus: str = ""


@dataclass(slots=True, kw_only=True)
class RasSide:
    """Ranks of a communicator, or processes of the job, in one condition.

    value: operations launched, a status word, or the text of an error; "missing" without data
    in this query (slow, stopped or dead); "DEAD" given up after 60 s without contact;
    "TIMEOUT", which counts time-outs of the query. ranks: those within the
    communicator, () unknown: RAS lists small sides only, and the others are computed where they
    are all of one side. processes: the listed ones.
    """

    value: int | str
    count: int
    evidence: Evidence
    ranks: tuple[int, ...] = ()
    processes: list[RasProcess] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RasStatement:
    """One statement on a communicator, or on the job, where `hash` is "" and group None.

    kind: MISMATCH, INCOMPLETE or ERROR; of the job INCOMPLETE, DEAD or TIMEOUT. subject:
    "status", the collective whose operations are counted ("AllGather"; "collective" for all
    together, before 2.26), "data" of ranks or processes, "initialization" or "asynchronous"
    error. size: ranks of the communicator, None unknown. count: ranks or processes that it
    counts, None where it counts none. sides: largest first. Counts of a job that runs differ
    for a moment: only a second report shows whether they move.
    """

    kind: str
    subject: str
    evidence: Evidence
    hash: str = ""  # 16 hexadecimal digits, as NCCL's log names the communicator
    group: int | None = None
    size: int | None = None
    count: int | None = None
    sides: list[RasSide] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RasGroup:
    """A row of the table: communicators alike in size, nodes, status and errors.

    size: ranks per communicator. num_ranks: GPUs in the group that sent data. status: the last
    of NOCOMM (UNKNOWN before 2.26), INIT, RUNNING, FINALIZE, ABORT that any rank has. errors:
    () for OK. JSON has no groups: there each communicator is one.
    """

    number: int
    num_communicators: int
    size: int
    num_ranks: int
    status: str
    errors: tuple[str, ...]
    evidence: Evidence


@dataclass(slots=True, kw_only=True)
class RasReport:
    """The answer to one query.

    totals: nodes, processes and GPUs of the job; None where not stated, as in JSON. is_whole:
    the report was read to its end, and its parts add up; else more may be wrong than
    `statements` has, and numbers of ranks may be too low.
    """

    evidence: Evidence  # its first line
    version: str = ""  # of NCCL, such as "2.26.2"
    totals: tuple[int, int, int] | None = None
    groups: list[RasGroup] = field(default_factory=list)
    statements: list[RasStatement] = field(default_factory=list)
    is_whole: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether all of the report was read, and it states no error, warning or abort.

        It does not show that the job moves: RAS says RUNNING and OK of ranks that all wait in
        one operation (https://github.com/NVIDIA/nccl/issues/1730).
        """
        has_abort = any(row.errors or row.status == "ABORT" for row in self.groups)
        return self.is_whole and bool(self.groups) and not (self.statements or has_abort)


def looks_like_ras(head: bytes) -> bool:
    """Return whether a file that begins so has a RAS report, text or JSON."""
    text = head.decode("utf-8", errors="replace")
    if '"nccl_version"' in text and '"communicators' in text:
        return True
    return any(_START.search(_single_spaced(line)) for line in text.split("\n"))


def read_ras(text: str, file: str) -> tuple[RasReport, ...]:
    """Return the reports of a file in its order, one per query. Raises ConfigError."""
    reports = [*_text_reports(text, file), *_json_reports(text, file)]
    if not any(report.groups or report.statements for report in reports):
        allowed = "a RAS report with communicators; this one ends before them"
        raise ConfigError("file", file, allowed)
    return tuple(sorted(reports, key=lambda report: report.evidence.line))


def _text_reports(text: str, file: str) -> list[RasReport]:
    readers: list[_TextReader] = []
    num_foreign = 0
    for number, raw in enumerate(whole_lines(text), start=1):
        if len(raw) < 4:
            continue
        line = _single_spaced(raw)
        start = _START.search(line) if any(mark in line for mark in _MARKS) else None
        is_open = bool(readers) and num_foreign <= _MAX_FOREIGN
        if start and not (is_open and start.lastgroup not in readers[-1].begun):
            evidence = Evidence(file=file, line=number, text=line[:300])
            readers.append(_TextReader(report=RasReport(evidence=evidence)))
            is_open = True
        if is_open:
            is_known = readers[-1].read(line, number, start)
            num_foreign = 0 if is_known else num_foreign + 1
    return [reader.finish() for reader in readers]


def _single_spaced(line: str) -> str:
    return " ".join(line[:_MAX_CHARACTERS].split())


@dataclass(slots=True, kw_only=True)
class _TextReader:
    """A report and the place in it. begun: parts that were read, of which each has one."""

    report: RasReport
    begun: set[str] = field(default_factory=lambda: {"version"})
    previous: str = ""
    heading: re.Match[str] | None = None
    statement: RasStatement | None = None  # to which sides belong
    side: RasSide | None = None  # to which ranks and processes belong

    def read(self, line: str, number: int, start: re.Match[str] | None) -> bool:
        """Read a line, and return whether it is one of a report."""
        previous = self.previous
        self.previous = line
        evidence = Evidence(file=self.report.evidence.file, line=number, text=line[:300])
        if start:
            self.begun.add(start.lastgroup or "communicators")
            self.report.version = start[2] or self.report.version
        if previous.endswith("(total) (total)") and (match := _TOTALS.search(line)):
            self.report.totals = (int(match[1]), int(match[2]), int(match[3]))
        elif previous.endswith("Warnings") and line.endswith("========"):
            self.begun.add("warnings")
        elif match := _LISTED.search(line):
            self._add_rank(match)
        elif match := _SIDE.search(line):
            self._begin_side(match, evidence)
        elif match := _HEADING.search(line):
            self.heading = match
            self.statement = self.side = None
        elif match := _SUBJECT.search(line):
            self._begin_statement(match, evidence)
        elif match := _ROW.search(line):
            row = RasGroup(
                number=int(match[1]),
                num_communicators=int(match[2]),
                size=int(match[3]),
                num_ranks=int(match[4]),
                status=match[5],
                errors=() if match[6] == "OK" else tuple(match[6].split(",")),
                evidence=evidence,
            )
            self.report.groups.append(row)
        elif self.side and (match := _PROCESS.search(line)):
            process = RasProcess(pid=int(match[1]), node=match[2], gpus=match[3] or "")
            self.side.processes.append(process)
        elif self.side and (match := _RANK_LIST.search(line)):
            numbers = re.findall(r"\d{1,9}", match[1])
            self.side.processes += [RasProcess(rank=int(number)) for number in numbers]
        else:
            return start is not None
        return True

    def _begin_statement(self, match: re.Match[str], evidence: Evidence) -> None:
        name = match.lastgroup or ""
        count = None if name == "mismatch" else int(match[name])
        statement = RasStatement(kind=name, subject="data", count=count, evidence=evidence)
        self.statement = self.side = None
        if name.islower():
            if self.heading is None:
                return
            statement.group = int(self.heading[1])
            statement.hash = self.heading[2].zfill(16)
            statement.kind = self.heading[3]
            statement.subject = match["mismatch"] or (match["error"] or "data").lower()
        self.statement = statement
        self.report.statements.append(statement)
        if statement.subject == "data" and count is not None:
            value = statement.kind.replace("INCOMPLETE", "missing")
            self.side = RasSide(value=value, count=count, evidence=evidence)
            statement.sides.append(self.side)

    def _begin_side(self, match: re.Match[str], evidence: Evidence) -> None:
        if self.statement is None:
            return
        value: int | str = match["status"] or match["error"] or int(match["operation"] or 0)
        self.side = RasSide(value=value, count=int(match["count"] or 1), evidence=evidence)
        self.statement.sides.append(self.side)
        if match["rank"]:
            self._add_rank(match)

    def _add_rank(self, match: re.Match[str]) -> None:
        if self.side is None:
            return
        process = RasProcess(rank=int(match["rank"]))
        if place := _PLACE.search(match["place"] or ""):
            process = replace(process, pid=int(place[2]), node=place[3] or "", gpus=place[1])
        self.side.processes.append(process)

    def finish(self) -> RasReport:
        """Return the report with sizes and ranks, which the table and all statements give."""
        statements = self.report.statements
        sizes = {row.number: row.size for row in self.report.groups}
        absent: dict[str, list[RasSide]] = defaultdict(list)
        for statement in statements:
            statement.size = None if statement.group is None else sizes.get(statement.group)
            absent[statement.hash] += [s for s in statement.sides if s.value in _ABSENT]
        computes = sum(each.size or 0 for each in statements) < _MAX_COMPUTED_RANKS
        add_up = [_fill_ranks(each, absent[each.hash], computes) for each in statements]
        self.report.is_whole = (
            "warnings" in self.begun
            and bool(self.report.groups)
            and all(add_up)
            and self._has_statements()
        )
        return self.report

    def _has_statements(self) -> bool:
        """Return whether each communicator that the table counts under an error has one."""
        stated = {(each.group, each.kind, each.hash) for each in self.report.statements}
        counts = Counter((group, kind) for group, kind, _ in stated)
        return all(
            counts[row.number, error] >= row.num_communicators
            for row in self.report.groups
            for error in row.errors
        )


def _fill_ranks(statement: RasStatement, absent: Sequence[RasSide], computes: bool) -> bool:
    """Set the ranks of each side. Return whether the sides add up and no list is cut.

    absent: sides of any statement on the communicator whose ranks sent no data on it.
    """
    size = statement.size
    for side in statement.sides:
        ranks = {each.rank for each in side.processes}
        is_valid = all(rank is not None and (size is None or rank < size) for rank in ranks)
        if is_valid and len(ranks) == len(side.processes) == side.count:
            side.ranks = tuple(sorted(rank for rank in ranks if rank is not None))
    unlisted = [side for side in statement.sides if not side.ranks]
    others = [side for side in absent if side not in statement.sides]
    if size is not None and computes and len(unlisted) == 1:
        listed = (side.ranks for side in (*statement.sides, *others))
        rest = set(range(size)).difference(*listed)
        # More may be left: ranks without data that RAS does not list.
        if len(rest) == unlisted[0].count:
            unlisted[0].ranks = tuple(sorted(rest))
    total = statement.count
    if total is None and size is not None:
        total = size - sum(side.count for side in others)
    # Ranks are listed all or none; of processes of the job RAS may know some only.
    is_cut = any(0 < len(side.processes) < side.count for side in statement.sides)
    adds_up = sum(side.count for side in statement.sides) == total
    return adds_up and not (is_cut and statement.hash)


def _json_reports(text: str, file: str) -> Iterator[RasReport]:
    """Yield reports in JSON. One that is cut is empty."""
    if '"nccl_version"' not in text:
        return
    if not _JSON_START.search(text) and not text.lstrip().startswith("{"):
        text = "\n".join(split_tag(line)[2] for line in text.split("\n"))
    starts = [match.start() for match in _JSON_START.finditer(text)] or [max(0, text.find("{"))]
    line = position = 0
    for start, end in pairwise([*starts, len(text)]):
        if '"communicators' not in text[start:end]:
            continue
        line += text.count("\n", position, start)
        position = start
        try:
            json_text.check_depth(text[start:end])
            document = as_object(json.JSONDecoder().raw_decode(text[start:end])[0])
        except ValueError:
            document = {}
        evidence = Evidence(
            file=file, line=line + 1, text=text[start : start + 60].split("\n")[0]
        )
        yield _json_report(document, text[start:end], evidence)


def _json_report(document: Mapping[str, Any], text: str, start: Evidence) -> RasReport:
    report = RasReport(evidence=start, version=str(document.get("nccl_version") or "")[:40])
    communicators = _dicts(document.get("communicators"))
    report.is_whole = len(communicators) == document.get("communicators_count")
    line = start.line
    position = 0
    for number, fields in enumerate(communicators):
        place = max(position, text.find(f'"{fields.get("hash")}"', position))
        line += text.count("\n", position, place)
        position = place
        words = [f"{key} {fields.get(key)}" for key in ("hash", "size", "ranks_count")]
        evidence = Evidence(file=start.file, line=line, text=", ".join(words)[:300])
        group, statements = _json_communicator(number, fields, evidence)
        report.groups.append(group)
        report.statements += statements
        report.is_whole &= _is_json_whole(fields)
    if count := _integer(as_object(document.get("ras")).get("timeouts_count")):
        side = RasSide(value="TIMEOUT", count=count, evidence=start)
        report.statements.append(
            RasStatement(kind="TIMEOUT", subject="data", evidence=start, sides=[side])
        )
    return report


def _json_communicator(
    number: int, fields: Mapping[str, Any], evidence: Evidence
) -> tuple[RasGroup, list[RasStatement]]:
    """Return what the text format states, from the data of each rank."""
    members: dict[tuple[str, str], dict[int | str, list[RasProcess]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for entry in _dicts(fields.get("missing_ranks")):
        status = as_object(entry.get("status"))
        is_dead = status.get("considered_dead") is True
        if status.get("unresponsive") is False and not is_dead:
            members["MISMATCH", "status"]["NOCOMM"].append(_json_process(entry))
        else:
            value = "DEAD" if is_dead else "missing"
            members["INCOMPLETE", "data"][value].append(_json_process(entry))
    for entry in _dicts(fields.get("ranks")):
        for kind, subject, condition in _conditions(entry):
            members[kind, subject][condition].append(_json_process(entry))
    statements = []
    for kind, subject in sorted(members, key=lambda key: _KINDS.index(key[0])):
        values = members[kind, subject]
        if kind == "MISMATCH" and len(values) < 2:
            continue
        statement = RasStatement(
            kind=kind,
            subject=subject,
            evidence=evidence,
            hash=str(fields.get("hash") or "").removeprefix("0x")[:16].zfill(16),
            group=number,
            size=_integer(fields.get("size")),
            sides=[
                RasSide(value=value, count=len(found), evidence=evidence, processes=found)
                for value, found in sorted(values.items(), key=lambda pair: -len(pair[1]))
            ],
        )
        _fill_ranks(statement, (), computes=False)
        statements.append(statement)
    kinds = {statement.kind for statement in statements}
    group = RasGroup(
        number=number,
        num_communicators=1,
        size=_integer(fields.get("size")) or 0,
        num_ranks=len(_dicts(fields.get("ranks"))),
        status=next((w for w in reversed(_STATUSES) if w in members["MISMATCH", "status"]), ""),
        errors=tuple(kind for kind in _KINDS if kind in kinds),
        evidence=evidence,
    )
    return group, statements


def _conditions(entry: Mapping[str, Any]) -> Iterator[tuple[str, str, int | str]]:
    """Yield (kind, subject, value) of a rank with data, by the rules of the text format."""
    status = as_object(entry.get("status"))
    state = _integer(status.get("init_state"))
    if status.get("abort_flag"):
        yield "MISMATCH", "status", "ABORT"
    elif status.get("finalize_called") or status.get("destroy_flag"):
        yield "MISMATCH", "status", "FINALIZE"
    elif state is not None:
        yield "MISMATCH", "status", "INIT" if state else "RUNNING"
    for subject, code in (
        ("initialization", state),
        ("asynchronous", status.get("async_error")),
    ):
        if code not in (None, 0, 7):
            yield "ERROR", subject, _RESULTS.get(code, f"error {code}")
    for name, value in as_object(entry.get("collective_counts")).items():
        if (count := _integer(value)) is not None:
            yield "MISMATCH", name, count


def _is_json_whole(fields: Mapping[str, Any]) -> bool:
    """Return whether all ranks are listed with status and counts.

    NCCL 2.29 writes null for those of a communicator that is being set up
    (https://github.com/NVIDIA/nccl/issues/2346).
    """
    ranks = _dicts(fields.get("ranks"))
    missing = _dicts(fields.get("missing_ranks"))
    has_all = all(
        as_object(e.get("status")) and as_object(e.get("collective_counts")) for e in ranks
    )
    return has_all and len(ranks) + len(missing) == fields.get("size")


def _json_process(entry: Mapping[str, Any]) -> RasProcess:
    cuda = _integer(entry.get("cuda_dev"))
    nvml = _integer(entry.get("nvml_dev"))
    gpus = "" if cuda is None else str(cuda)
    return RasProcess(
        rank=_integer(entry.get("rank")),
        pid=_integer(entry.get("pid")),
        node=str(entry.get("host") or "").removeprefix("unknown")[:80],
        gpus=gpus if nvml in (cuda, None) else f"{gpus} (NVML {nvml})",
    )


def _integer(value: object) -> int | None:
    """Return a count; None for other values: RAS writes -1 for an unknown process."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64:
        return value
    return None


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
