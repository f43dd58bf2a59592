"""What the lines around a table of nccl-tests state: version, collective, ranks, method."""

import re
from dataclasses import dataclass, field

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DTYPE_ALIASES

_NAMES = {collective.value.replace("_", ""): collective.value for collective in Collective} | {
    "bcast": "broadcast",
    "allr": "all_reduce",
    "allg": "all_gather",
    "redsct": "reduce_scatter",
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
_NEURON = re.compile(
    r"(?<![\w-])nccom-test\s+(?:\S+\s+){0,40}?(?P<name>allr|allg|redsct|alltoall)\b"
)
_LOOKS_AT = re.compile(r"\s*(?:ldd|make|ls|cd|cp|file|which|nm|chmod|g?it|#\s*Collective)\b")
_SPELLED = re.compile(
    r"(?<![a-z])(?:all[ _-]?reduce|all[ _-]?gather|reduce[ _-]?scatter|all[ _-]?to[ _-]?all"
    r"(?:[ _-]?v)?|send[ _-]?recv|broadcast)(?![a-z])",
    re.IGNORECASE,
)

_VERSION = re.compile(
    r"(?P<tool>[nr]ccl-tests)(?::? version|: Version)\s+(?P<version>\S{1,80})", re.IGNORECASE
)
_OURS = re.compile(r"#\s*stepmark (?P<version>[^\s,]{1,40}),.*layout of nccl-tests")
_OUR_MODE = re.compile(r"#\s*mode (?P<mode>\w+) \(")
_STARTING = re.compile(r"Collective test starting:\s*(?P<name>[\w-]{1,60})")
_CONCLUDED = re.compile(r"Collective test concluded:")
_PARAMETERS = re.compile(r"(?<!\w)nThreads?:? +\d+ +nGpus:? +\d+ .*")
_NUMBERS = re.compile(r"(?P<key>agg[ _]?iters|graph|nThreads?|nGpus):? +(?P<value>\d{1,9})\b")
_BLOCKING = re.compile(r"#\s*Blocking Enabled:?(?P<how>.*)")
_RANK = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d{1,7})\s+(?:Group\s+(?P<group>\d{1,7})\s+)?"
    r"Pid\s+(?P<pid>\d{1,9})\s+on\s+(?P<host>\S{1,255})\s+device\s+(?P<device>\d{1,5})"
)
_PLACEMENTS = re.compile(r"#?\s*(?:(?:out-of|in)-place\s*(?:\(\+ per-iteration\))?\s*){1,2}")
_WRONG = re.compile(r"Out of bounds values\s*:\s*(?P<count>\d{1,18})")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(?P<rate>\S{1,40})")


@dataclass(slots=True)
class Facts:
    """Of one output, as far as its lines state them."""

    tool: str = ""
    version: str = ""
    started: str = ""  # the collective of "Collective test starting"
    parameters: str = ""
    blocking: str = ""
    mode: str = ""  # of our own output
    ranks: list[tuple[int, int, str]] = field(default_factory=list)  # rank, group, process
    num_wrong: int = 0
    average: str = ""
    columns: list[str] = field(default_factory=list)  # header words, in order
    placements: list[str] = field(default_factory=list)  # of the line above them
    ended: bool = False


def collective_named(text: str) -> str:
    """Our name for a collective in any usual spelling; the text itself for others."""
    bare = re.sub(r"_perf(?:_\w+)?$", "", text.strip().lower())
    return _NAMES.get(re.sub(r"[ _-]", "", bare.removeprefix("nccl")), bare)


def collective_in_command(line: str) -> str:
    """The collective of a command line that runs a test; "" if it runs none."""
    if ("_perf" not in line and "nccom-test" not in line) or _LOOKS_AT.match(line):
        return ""
    found = _PROGRAM.search(line) or _NEURON.search(line)
    return collective_named(found["name"]) if found else ""


def command_from(line: str) -> str:
    """The command from the program's name on: what stands before may hold secrets."""
    found = _PROGRAM.search(line) or _NEURON.search(line)
    return line[found.start() :].strip()[:200] if found else ""


def collective_in_text(text: str) -> str:
    """The only collective that a heading or a file name spells; "" for none or several."""
    found = {collective_named(match) for match in _SPELLED.findall(text)}
    return found.pop() if len(found) == 1 else ""


def dtype_named(text: str) -> str:
    """As core/dtypes names it, or the text itself."""
    name = text.lower()
    return str(DTYPE_ALIASES.get(name, name))


def opens_output(line: str) -> bool:
    """Whether this line stands only before the rows of an output."""
    return any(
        pattern.search(line) for pattern in (_VERSION, _OURS, _STARTING, _PARAMETERS)
    ) or line.lstrip("# ").startswith("Using devices")


def rank_of(line: str) -> tuple[int, int, str] | None:
    """(rank, group, process) of a rank line."""
    found = _RANK.match(line)
    if not found:
        return None
    process = f"{found['host']}:{found['pid']}:{found['device']}"
    return int(found["rank"]), int(found["group"] or 0), process


def columns_of(line: str) -> list[str]:
    """The words of a line of column headings; [] if it is none."""
    words = [word for word in re.split(r"[\s|]+", line.strip(" #\t").lower()) if word]
    joined = {word.partition("(")[0] for word in words}
    lead = {"size", "count"} <= joined or {"bytes", "n"} <= joined
    return words if lead and "type" in joined else []


def placements_of(line: str) -> list[str]:
    """The words of the line above the column headings; [] for any other line."""
    return re.findall(r"[a-z-]+-place", line) if _PLACEMENTS.fullmatch(line) else []


def note(facts: Facts, line: str) -> None:
    """Add what this line states."""
    if found := _VERSION.search(line):
        facts.tool, facts.version = found["tool"].lower(), found["version"]
    elif found := _OURS.search(line):
        facts.tool, facts.version = "stepmark", found["version"]
    elif found := _STARTING.search(line):
        facts.started = collective_named(found["name"])
    elif found := _PARAMETERS.search(line):
        facts.parameters = " ".join(found[0].split())
    elif found := _BLOCKING.search(line):
        facts.blocking = found["how"].strip() or "enabled"
    elif found := _WRONG.search(line):
        facts.num_wrong = int(found["count"])
    elif found := _AVERAGE.search(line):
        facts.average, facts.ended = found["rate"].rstrip("GBgb/s"), True
    elif _CONCLUDED.search(line):
        facts.ended = True
    elif found := _OUR_MODE.match(line):
        facts.mode = found["mode"]


def tool_of(facts: Facts, hints: str) -> str:
    """The program, as stated, or by what stands around a bare table."""
    if facts.tool:
        return facts.tool
    if any(word.startswith("count(elem") for word in facts.columns):
        return "nccom-test"
    by_colon = facts.parameters.startswith("nThreads:")
    return "rccl-tests" if by_colon or "rccl" in hints.lower() else "nccl-tests"


def method_of(facts: Facts, tool: str) -> str:
    """How it was timed, as far as the output says; "" where it does not.

    All versions print "Blocking Enabled" with -z, so a parameter line without it means -z 0.
    The parameter line has `graph: N` from 2.13 on (2022); of older ones -G is not known, since
    it existed from 2.10 on. Averages over ranks (-a) and registration (-R) are not printed.
    """
    if tool == "stepmark":
        return f"stepmark {facts.mode}" if facts.mode else ""
    values = {
        found["key"]: int(found["value"]) for found in _NUMBERS.finditer(facts.parameters)
    }
    if "graph" not in values:
        return ""
    words = ["graph" if values["graph"] else ""]
    words += [f"blocking {_blocking_level(facts.blocking)}" if facts.blocking else ""]
    aggregated = next((values[key] for key in values if key.startswith("agg")), 1)
    how = ", ".join(filter(None, words)) or "queued"
    how += f", {aggregated} per group" if aggregated > 1 else ""
    return f"{tool} {how}" + (", time to enqueue" if "cputime" in facts.columns else "")


def _blocking_level(how: str) -> int:
    """-z as the words after "Blocking Enabled" tell it (2.18.1 and 2.19.2 added 2 and 3)."""
    if "outer" in how:
        return 3
    return 2 if "no barrier" in how else 1
