"""Text that torch's flight-recorder analyzer prints: torchfrtrace, tools/flight_recorder.

Since September 2024 it prints a block per collective with a problem. The formats are those of
types.py and utils.py in torch/distributed/flight_recorder/components of
https://github.com/pytorch/pytorch.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground import json_text
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.job_output.lines import whole_lines

Sizes = tuple[tuple[int, ...], ...]  # dimensions of each tensor

_HEAD = re.compile(
    r"(?P<missing>Not all ranks joining collective)[,:]? (?:sequence number: )?(\d{1,20})"
    r"|Input/output mismatch in the collective (?:sequence number: )?(\d{1,20})"
    r"|Collective (?:sequence number: )?(\d{1,20})(?: at entry \d{1,20})? (?:has )?errors"
)
_MARKS = (
    *("joining collective", "mismatch in the collective", " errors", "missed FR dumps"),
    *("Missing dump files", "No errors found", "Too many mismatches"),
)
_FIELD = re.compile(
    r"(group info|collective|missing ranks|input sizes|output sizes|world size|expected ranks"
    r"|collective state|error m(?:sg|essage)|total (?:in|out)put numel|collective stack trace):"
    r"(.*)$"
)
_FRAME = re.compile(r"(?:^|\s)(\S{1,200} at \S{1,400}:\d{1,9})$")
_NOTE = re.compile(
    r"(?P<UNDECIDED>missed FR dumps from ranks \((\{[\d, ]*\})\))"
    r"|(?P<MISSING_DUMPS>Missing dump files from ranks (\{[\d', ]*\}))"
    r"|(?P<NO_ERROR>No errors found for this collective entry)"
    r"|(?P<ABORTED>Too many mismatches for process_group (\S{1,200}?): ?(.{0,200}?),? aborting)"
)
_CULPRIT = re.compile(r"(\d{1,8}); (?:Error type: )?([A-Z_]{5,40})(?:, (.*))?$")


class TraceProblem(StrEnum):
    """What a block states.

    UNDECIDED: dumps are missing, so the analyzer does not decide; it says so of each call of
    the group, sound or not. NO_ERROR: it found none, and does not know why the call did not
    finish. MISSING_DUMPS: it stopped because files are missing. ABORTED: it stopped after ten
    mismatches of a group, whose name it may print with a number behind it.
    """

    MISSING_RANKS = "missing ranks"
    MISMATCH = "mismatch"
    UNDECIDED = "undecided"
    NO_ERROR = "no error"
    MISSING_DUMPS = "missing dumps"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSide:
    """One side of a mismatch. words: its value as printed, such as all_reduce or [[1024]].

    ranks: global; () unknown. The first side has the ranks that the analyzer does not name:
    each made the expected call, or left no dump.
    """

    ranks: tuple[int, ...]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """What differs in one collective.

    error: COLLECTIVE_TYPE_MISMATCH, SIZE_OR_SYNTAX_MISMATCH, COLLECTIVE_STATE_MISMATCH or
    COLLECTIVE_DTYPE_MISMATCH. subject: "collective type", "input sizes", "dtypes", "state"...;
    "" where only the error is named. sides: first the call of the rank that the analyzer read
    first (no words: unknown), then those that differ from it, which it calls culprits: any side
    may be the wrong one. Versions of 2024 give all culprits of an error the words of the last.
    """

    error: str
    subject: str
    sides: tuple[MismatchSide, ...]


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """One block. Values are None, "" or () where it does not state them.

    group, description: of the process group ("0", "default_pg"). kind: torch's name without
    backend and peers ("all_reduce", "send"). Ranks are global. expected_ranks: members of the
    group. num_expected: their number, which early versions print alone. kind, sizes and state
    are those of the rank that the analyzer read first, which need not be rank 0. mismatches:
    () of a block that is cut. stack: "function at file:line", innermost first. evidence: its
    first line, then those of ranks and errors. is_whole: the block was read up to its stack.
    """

    problem: TraceProblem
    evidence: list[Evidence]
    sequence: int | None = None
    group: str = ""
    description: str = ""
    kind: str = ""
    expected_ranks: tuple[int, ...] = ()
    num_expected: int | None = None
    missing_ranks: tuple[int, ...] = ()
    ranks_without_dump: tuple[int, ...] = ()
    state: str = ""
    input_sizes: Sizes | None = None
    mismatches: tuple[CallMismatch, ...] = ()
    stack: list[str] = field(default_factory=list)
    is_whole: bool = False


def looks_like_trace_text(head: bytes) -> bool:
    """Return whether a file that begins so has blocks of the analyzer."""
    text = head.decode("utf-8", errors="replace")
    return bool(_HEAD.search(text) or _NOTE.search(text))


def read_trace_text(text: str, file: str) -> tuple[TracedCall, ...]:
    """Return the blocks of a file in its order. Raises ConfigError where there is none."""
    calls: list[TracedCall] = []
    is_open = False
    for number, line in enumerate(whole_lines(text), start=1):
        if not line or not (is_open or any(mark in line for mark in _MARKS)):
            continue
        evidence = Evidence(file=file, line=number, text=line[:300].strip())
        if head := _HEAD.search(line) or _NOTE.search(line):
            is_open = head.re is _HEAD
            calls.append(_begin(head, evidence))
        elif is_open and (entry := _FIELD.search(line)):
            _read_field(calls[-1], entry[1], " ".join(entry[2].split()), evidence)
        elif is_open and len(calls[-1].stack) < 1000 and (frame := _FRAME.search(line)):
            calls[-1].stack.append(frame[1])
        elif is_open and calls[-1].stack:
            is_open = False
    if not calls:
        raise ConfigError("file", file, "text of torch's flight-recorder analyzer with a block")
    for call in calls:
        if not call.is_whole:
            call.mismatches = ()  # more ranks may differ, and words may be cut
    return tuple(calls)


def _begin(match: re.Match[str], evidence: Evidence) -> TracedCall:
    """Return the block of a first line, which is all of a note."""
    values = [value for value in match.groups()[1:] if value is not None]
    if match.re is _HEAD:
        is_missing = match["missing"] is not None
        problem = TraceProblem.MISSING_RANKS if is_missing else TraceProblem.MISMATCH
        call = TracedCall(problem=problem, evidence=[evidence], sequence=int(values[-1]))
        if match[0].startswith(
            "Input/output"
        ):  # of an all-to-all: the sums of all ranks differ
            size = CallMismatch(error="SIZE_OR_SYNTAX_MISMATCH", subject="numel", sides=())
            call.mismatches = (size,)
        return call
    problem = TraceProblem[match.lastgroup or ""]
    call = TracedCall(problem=problem, evidence=[evidence], is_whole=True)
    if problem == TraceProblem.ABORTED:
        call.group, call.description = values[-2:]
    else:
        call.ranks_without_dump = _ranks(values[-1].replace("'", "")) if values else ()
    return call


def _read_field(call: TracedCall, name: str, value: str, evidence: Evidence) -> None:
    if name == "group info":
        call.group, _, call.description = value.partition(":")
    elif name == "collective":
        call.kind = value.rpartition(":")[2].split(" ")[0]
    elif name == "missing ranks":
        call.missing_ranks = _ranks(value)
        call.evidence.append(evidence)
    elif name == "input sizes":
        call.input_sizes = _sizes(value)
    elif name == "expected ranks" and value.startswith("{"):
        call.expected_ranks = _ranks(value)
        call.evidence.append(evidence)
    elif name in ("world size", "expected ranks"):
        call.num_expected = int(value) if value.isdecimal() and len(value) < 9 else None
    elif name == "collective state":
        call.state = value[:20]
    elif name.startswith("error"):
        call.mismatches = _mismatches(value, call.expected_ranks)
        call.evidence.append(evidence)
    elif name.startswith("total"):
        side = MismatchSide(ranks=(), words=f"{name.removeprefix('total ')} {value}"[:80])
        call.mismatches = tuple(
            replace(each, sides=(*each.sides, side)) for each in call.mismatches
        )
    elif name == "collective stack trace":
        call.is_whole = bool(call.state and (call.missing_ranks or call.mismatches))


def _mismatches(text: str, expected_ranks: tuple[int, ...]) -> tuple[CallMismatch, ...]:
    """Return what differs, by error and expected value, from the list of culprit ranks."""
    ranks: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for part in text.split("Culprit rank ")[1:]:
        if match := _CULPRIT.search(part.rstrip(", ")):
            value = match[3] or ""  # such as "Found input numel '8' does not match output ..."
            subject = words = ""
            expected, _, found = value.partition(" does not match found ")
            if found:
                subject, _, words = expected.removeprefix("Expected ").partition(": ")
                value = found.partition(": ")[2].strip("'")
            ranks[match[2], subject, words.strip("'")][value].append(int(match[1]))
    culprits = {
        rank for values in ranks.values() for found in values.values() for rank in found
    }
    rest = tuple(rank for rank in expected_ranks if rank not in culprits)
    return tuple(
        CallMismatch(
            error=error,
            subject=subject,
            sides=(
                MismatchSide(ranks=rest, words=words),
                *(
                    MismatchSide(ranks=tuple(sorted(found)), words=value)
                    for value, found in values.items()
                ),
            ),
        )
        for (error, subject, words), values in ranks.items()
    )


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of "{0, 1}"; () of a list that is cut or has impossible ranks."""
    if not (text.startswith("{") and text.endswith("}")):
        return ()
    ranks = {int(word) for word in re.findall(r"\d{1,9}", text)}
    return tuple(sorted(ranks)) if max(ranks, default=0) < MAX_RANKS else ()


def _sizes(text: str) -> Sizes | None:
    """Return the sizes of "[[3, 4], [2]]"; None of others, such as lists that are cut."""
    try:
        sizes: Sizes = json_text.decode(text, Sizes)
    except ValueError:
        return None
    return sizes
