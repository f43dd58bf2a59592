"""Facts in the lines around a table of nccl-tests: version, collective, ranks, method."""

import re
from dataclasses import dataclass, field

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DTYPE_ALIASES

_COLLECTIVES = {one.value.replace("_", ""): one.value for one in Collective} | {
    "bcast": "broadcast",
    "alltoallsingle": "all_to_all",
}
# As nccl-tests calls them, and with what people put between the words.
_TESTS = (
    "all_reduce_bias|all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoallv|alltoall|"
    "all_to_all_v|all_to_all|gather|scatter|sendrecv|hypercube|p2p_both|p2p|ping_pong|incast|"
    "multicast|barrier"
)
# Program names may end in what the build added: all_reduce_perf_mpi.
_PROGRAM = re.compile(rf"(?<![\w-])(?P<name>{_TESTS})_perf(?:_\w{{1,20}})?(?![\w-])")
_NOT_A_RUN = re.compile(r"\s*(?:ldd|make|ls|cd|cp|file|which|nm|chmod|g?it|#\s*Collective)\b")
_SPELLED = re.compile(
    r"(?<![a-z])(?:all[ _-]?reduce|all[ _-]?gather|reduce[ _-]?scatter|all[ _-]?to[ _-]?all"
    r"(?:[ _-]?v)?|send[ _-]?recv|broadcast)(?![a-z])",
    re.IGNORECASE,
)

_VERSION = re.compile(
    r"(?P<tool>[nr]ccl-tests)(?::? version|: Version)\s+(?P<version>\S{1,80})", re.IGNORECASE
)
_STEPMARK = re.compile(r"#\s*stepmark (?P<version>[^\s,]{1,40}),.*layout of nccl-tests")
_STEPMARK_MODE = re.compile(r"#\s*mode (?P<mode>\w+) \(")
_STARTING = re.compile(r"Collective test starting:\s*(?P<name>[\w-]{1,60})")
_PARAMETERS = re.compile(r"(?<!\w)nThreads?:? +\d+ +nGpus:? +\d+ .*")
_NUMBERS = re.compile(r"(?P<key>agg[ _]?iters|graph|nThreads?|nGpus):? +(?P<value>\d{1,9})\b")
_BLOCKING = re.compile(r"#\s*Blocking Enabled:?(?P<how>.*)")
_RANK = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d{1,7})\s+(?:Group\s+(?P<group>\d{1,7})\s+)?"
    r"Pid\s+\d{1,9}\s+on\s+\S{1,255}\s+device\s+\d{1,5}"
)
_PLACEMENTS = re.compile(r"#?\s*(?:(?:out-of|in)-place\s*(?:\(\+ per-iteration\))?\s*){1,2}")
_WRONG = re.compile(r"Out of bounds values\s*:\s*(?P<count>\d{1,18})")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(?P<rate>\S{1,40})")


@dataclass(slots=True)
class OutputFacts:
    """Facts of one output, as far as its lines state them."""

    tool: str = ""
    version: str = ""
    collective: str = ""  # of "Collective test starting"
    parameters: str = ""
    blocking: str = ""
    mode: str = ""  # of stepmark's own output
    ranks: list[tuple[int, int]] = field(default_factory=list)  # rank, group
    num_wrong: int = 0
    average: str = ""
    columns: list[str] = field(default_factory=list)  # header words, in order
    placements: list[str] = field(default_factory=list)  # of the line above them
    is_complete: bool = False


def collective_named(text: str) -> str:
    """Return our name of a collective in any usual spelling; the text itself for others."""
    bare = re.sub(r"_perf(?:_\w+)?$", "", text.strip().lower())
    return _COLLECTIVES.get(re.sub(r"[ _-]", "", bare.removeprefix("nccl")), bare)


def collective_in_command(line: str) -> str:
    """Return the collective of a command that runs a test; "" if it runs none."""
    if "_perf" not in line or _NOT_A_RUN.match(line):
        return ""
    match = _PROGRAM.search(line)
    return collective_named(match["name"]) if match else ""


def command_from(line: str) -> str:
    """Return the command from the program's name on: what precedes it may hold secrets."""
    match = _PROGRAM.search(line)
    return line[match.start() :].strip()[:200] if match else ""


def collective_in_text(text: str) -> str:
    """Return the only collective that a heading or file name spells; "" for none or several."""
    names = {collective_named(match) for match in _SPELLED.findall(text)}
    return names.pop() if len(names) == 1 else ""


def dtype_named(text: str) -> str:
    """Return the type as core/dtypes names it, or the text itself."""
    name = text.lower()
    return str(DTYPE_ALIASES.get(name, name))


def opens_output(line: str) -> bool:
    """Return whether this line stands only before the rows of an output."""
    return any(
        pattern.search(line) for pattern in (_VERSION, _STEPMARK, _STARTING, _PARAMETERS)
    ) or line.lstrip("# ").startswith("Using devices")


def rank_of(line: str) -> tuple[int, int] | None:
    """Return (rank, group) of a rank line."""
    match = _RANK.match(line)
    return (int(match["rank"]), int(match["group"] or 0)) if match else None


def columns_of(line: str) -> list[str]:
    """Return the words of a line of column headings; [] if it is none."""
    words = [word for word in re.split(r"[\s|]+", line.strip(" #\t").lower()) if word]
    names = {word.partition("(")[0] for word in words}
    is_header = {"size", "count", "type"} <= names or {"bytes", "n", "type"} <= names
    return words if is_header else []


def placements_of(line: str) -> list[str]:
    """Return the words of the line above the column headings; [] for any other line."""
    return re.findall(r"[a-z-]+-place", line) if _PLACEMENTS.fullmatch(line) else []


def add_facts(facts: OutputFacts, line: str) -> None:
    """Add what this line states."""
    if match := _VERSION.search(line):
        facts.tool, facts.version = match["tool"].lower(), match["version"]
    elif match := _STEPMARK.search(line):
        facts.tool, facts.version = "stepmark", match["version"]
    elif match := _STARTING.search(line):
        facts.collective = collective_named(match["name"])
    elif match := _PARAMETERS.search(line):
        facts.parameters = " ".join(match[0].split())
    elif match := _BLOCKING.search(line):
        facts.blocking = match["how"].strip() or "enabled"
    elif match := _WRONG.search(line):
        facts.num_wrong = int(match["count"])
    elif match := _AVERAGE.search(line):
        facts.average, facts.is_complete = match["rate"], True
    elif "Collective test concluded:" in line:
        facts.is_complete = True
    elif match := _STEPMARK_MODE.match(line):
        facts.mode = match["mode"]


def tool_of(facts: OutputFacts, hints: str) -> str:
    """Return the program as stated, or by what stands around a bare table."""
    if facts.tool:
        return facts.tool
    has_colon = facts.parameters.startswith("nThreads:")
    return "rccl-tests" if has_colon or "rccl" in hints.lower() else "nccl-tests"


def method_of(facts: OutputFacts, tool: str) -> str:
    """Return how it was timed, as far as the output says; "" where it does not.

    All versions print "Blocking Enabled" with -z, so a parameter line without it means -z 0.
    The parameter line has `graph: N` from 2.13 on (2022); of older ones -G is not known, since
    it existed from 2.10 on. Averages over ranks (-a) and registration (-R) are not printed.
    """
    if tool == "stepmark":
        return f"stepmark {facts.mode}" if facts.mode else ""
    values = {m["key"]: int(m["value"]) for m in _NUMBERS.finditer(facts.parameters)}
    if "graph" not in values:
        return ""
    words = ["graph"] if values["graph"] else []
    words += [f"blocking {_blocking_level(facts.blocking)}"] if facts.blocking else []
    per_group = next((values[key] for key in values if key.startswith("agg")), 1)
    enqueue = "cputime" in facts.columns
    return method_text(tool, words, per_group, is_enqueue_time=enqueue)


def method_text(tool: str, words: list[str], per_group: int, *, is_enqueue_time: bool) -> str:
    """Return e.g. "nccl-tests graph, 4 per group"."""
    text = f"{tool} {', '.join(words) or 'queued'}"
    text += f", {per_group} per group" if per_group > 1 else ""
    return text + (", time to enqueue" if is_enqueue_time else "")


def _blocking_level(how: str) -> int:
    """Return -z by the words after "Blocking Enabled" (2.18.1 and 2.19.2 added 2 and 3)."""
    if "outer" in how:
        return 3
    return 2 if "no barrier" in how else 1
