"""Parse lines of nccl-tests and rccl-tests: facts around a table, and rows of figures.

Columns are found from the right end: the columns between type and figures (redop, root) differ
by version and collective, and copies into slides lose empty cells.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from stepmark.ground.dtypes import DTYPE_ALIASES
from stepmark.ground.reading import Reading
from stepmark.model.collectives import collective_named
from stepmark.text_tables.printed_figures import NUMBER, collective_of

# Names of nccl-tests, and common spellings with other separators.
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
_STEPMARK_MODE = re.compile(r"#\s*mode (?P<mode>[\w-]+) \(")
_STARTING = re.compile(r"Collective test starting:\s*(?P<name>[\w-]{1,60})")
_PARAMETERS = re.compile(r"(?<!\w)nThreads?:? +\d+ +nGpus:? +\d+ .*")
_NUMBERS = re.compile(r"(?P<key>agg[ _]?iters|graph|nThreads?|nGpus):? +(?P<value>\d{1,9})\b")
_SWEEP = re.compile(
    r"minBytes:? +(?P<first>\d{1,18}) +maxBytes:? +(?P<last>\d{1,18}) +"
    r"step:? +(?P<step>\d{1,18})\((?P<unit>factor|bytes)\)"
)
_REDUCED = re.compile(r"#\s*Reducing maxBytes to (?P<last>\d{1,18}) due to memory")
_BLOCKING = re.compile(r"#\s*Blocking Enabled:?(?P<how>.*)")
_RANK = re.compile(
    r"\bRank\s+(?P<rank>\d{1,7})\s+(?:Group\s+(?P<group>\d{1,7})\s+)?"
    r"Pid\s+\d{1,9}\s+on\s+(?P<host>\S{1,255})\s+device\s+(?P<index>\d{1,5})"
    r"(?:\s+\[(?P<bus>[^\]\s]{1,40})\])?(?:\s+(?P<gpu>[A-Z]\w[\w .()/-]{0,60}?)(?=\s*(?:#|$)))?"
)
_PLACEMENTS = re.compile(r"#?\s*(?:(?:out-of|in)-place\s*(?:\(\+ per-iteration\))?\s*){1,2}")
_WRONG = re.compile(r"Out of bounds values\s*:\s*(?P<count>\d{1,18})")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(?P<rate>\S{1,40})")


UNKNOWN_COLLECTIVE = "the collective is not known (compare --collective NAME)"
UNKNOWN_RANKS = "the number of ranks is not known (compare --ranks N)"

# Launchers' prefixes. A tag names the task; a time stamp differs from line to line.
_TAG = re.compile(
    r"""\s*(?:
        \[(?:[\w.-]{1,80}@)?(?:default|rank)?\d{1,6}(?:,\s?\d{1,6})?\]    # torchrun, mpirun
        (?:<std(?:out|err)>)?:?
      | \[[A-Za-z][\w.-]{0,80}:\d{1,7}\]:?           # Open MPI's host:pid, torchrun's role:rank
      | \d{1,6}:(?=\s)                                                  # srun --label
      | \[pod/[\w./-]{1,253}\](?=\s)                                    # kubectl logs --prefix
      | [A-Za-z][\w.-]{0,63}-\d{1,6}\s+\|(?=\s)                         # docker compose
      | [A-Za-z][\w.-]{0,253}/[\w.-]{1,253}\s+\|(?=\s)                  # pod/container
      | \([A-Za-z_][^()\n]{0,80}\bpid=\d{1,9}[^()\n]{0,60}\)             # Ray
      | [A-Za-z][\w.-]{0,63}:(?=\s+(?:\#|\d{1,19}\s+\d{1,19}\s+[a-z]))    # pdsh, clush
    )[ ]?""",
    re.VERBOSE,
)
_STAMP = re.compile(
    r"\s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ ]?"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}[ ]?"
)
_MAX_PREFIXES = 3


@dataclass(slots=True)
class OutputFacts:
    """Facts of one output, as far as its lines state them."""

    tool: str = ""
    version: str = ""
    collective: str = ""  # of "Collective test starting"
    parameters: str = ""
    max_bytes: int | None = None  # as reduced for want of memory
    blocking: str = ""
    mode: str = ""  # of stepmark's own output
    ranks: list[tuple[int, int]] = field(default_factory=list)  # rank, group
    # Of the same lines: host, PCI address (or number), name.
    gpus: list[tuple[str, str, str]] = field(default_factory=list)
    num_wrong: int = 0
    average: str = ""
    columns: list[str] = field(default_factory=list)  # header words, in order
    placements: list[str] = field(default_factory=list)  # of the line above them
    is_complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The sizes that an output measures, in bytes, as its parameter line has them.

    nccl-tests' loop: from min_bytes while size <= max_bytes, times or plus the step.
    """

    min_bytes: int
    max_bytes: int
    step: int
    is_factor: bool

    @property
    def num_sizes(self) -> int | None:
        """The number of sizes; None for a step that leads nowhere."""
        first = self.min_bytes
        last = self.max_bytes
        step = self.step
        if not self.is_factor:
            return (last - first) // step + 1 if step and first <= last else None
        if not first or step < 2:
            return None
        return sum(first * step**power <= last for power in range(64)) or None


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


def inferred_collective(file: str, readings: Sequence[Reading]) -> tuple[str, str]:
    """Return (collective, reason) by the file's name, else by the figures."""
    name = PurePath(file).name
    if collective := collective_in_text(name):
        return collective, f"the file's name, {name}"
    return collective_of(readings)


def dtype_named(text: str) -> str:
    """Return the type as ground/dtypes names it, or the text itself."""
    name = text.lower()
    return str(DTYPE_ALIASES.get(name, name))


def opens_output(line: str) -> bool:
    """Return whether this line stands only before the rows of an output."""
    return any(
        pattern.search(line) for pattern in (_VERSION, _STEPMARK, _STARTING, _PARAMETERS)
    ) or line.lstrip("# ").startswith("Using devices")


def is_second(line: str, facts: OutputFacts) -> bool:
    """Return whether a line that opens an output states what these facts have already."""
    stated = OutputFacts()
    add_facts(stated, line)
    names = ("version", "collective", "parameters")
    is_known = any(getattr(stated, name) and getattr(facts, name) for name in names)
    return bool(facts.parameters) and is_known


def ranks_of(line: str) -> list[tuple[int, int]]:
    """Return (rank, group) of a rank line, or of several that were printed into one line."""
    return [(int(match["rank"]), int(match["group"] or 0)) for match in _RANK.finditer(line)]


def gpus_of(line: str) -> list[tuple[str, str, str]]:
    """Return (host, PCI address or number, name) of a rank line, or of several in one line."""
    return [
        (match["host"], match["bus"] or match["index"], match["gpu"] or "")
        for match in _RANK.finditer(line)
    ]


def hosts_and_device(gpus: Sequence[tuple[str, str, str]]) -> tuple[int | None, str]:
    """Return (hosts, name of the GPUs); None and "" where the lines do not tell.

    A GPU that occurs twice is one of two hosts with the same name, as containers have. A CPU,
    for which our own output has the address 0000:00:00, may occur once for each rank.
    """
    hosts = {host for host, _, _ in gpus}
    names = {name for _, _, name in gpus}
    uses = Counter((host, bus) for host, bus, _ in gpus if bus != "0000:00:00")
    is_known = gpus and max(uses.values(), default=1) == 1
    return (len(hosts) if is_known else None), (names.pop() if len(names) == 1 else "")


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
    """Add the facts of this line."""
    if match := _VERSION.search(line):
        facts.tool = match["tool"].lower()
        facts.version = match["version"]
    elif match := _STEPMARK.search(line):
        facts.tool = "stepmark"
        facts.version = match["version"]
    elif match := _STARTING.search(line):
        facts.collective = collective_named(match["name"])
    elif match := _PARAMETERS.search(line):
        facts.parameters = " ".join(match[0].split())
    elif match := _REDUCED.match(line):
        facts.max_bytes = int(match["last"])
    elif match := _BLOCKING.search(line):
        facts.blocking = match["how"].strip() or "enabled"
    elif match := _WRONG.search(line):
        facts.num_wrong = int(match["count"])
        facts.is_complete = True
    elif match := _AVERAGE.search(line):
        facts.average = match["rate"]
        facts.is_complete = True
    elif "Collective test concluded:" in line:
        facts.is_complete = True
    elif match := _STEPMARK_MODE.match(line):
        facts.mode = match["mode"]


def tool_of(facts: OutputFacts, hints: str) -> str:
    """Return the program as stated, or by the words around a bare table."""
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
    values = parameters_of(facts)
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


def sweep_of(facts: OutputFacts) -> Sweep | None:
    """Return the sizes that the parameter line asks for; None where it does not say.

    stepmark may measure others than its line has.
    """
    match = _SWEEP.search(facts.parameters)
    if not match or facts.tool == "stepmark":
        return None
    last = int(match["last"])
    return Sweep(
        min_bytes=int(match["first"]),
        max_bytes=min(last, facts.max_bytes or last),
        step=int(match["step"]),
        is_factor=match["unit"] == "factor",
    )


def parameters_of(facts: OutputFacts) -> dict[str, int]:
    """Return numbers of the parameter line by name, also nThread and nGpu."""
    return {
        m["key"].removesuffix("s") if m["key"][0] == "n" else m["key"]: int(m["value"])
        for m in _NUMBERS.finditer(facts.parameters)
    }


def gpus_per_thread(facts: OutputFacts) -> int:
    """Return nGpus of the parameter line, 1 where it is not known."""
    return max(parameters_of(facts).get("nGpu", 1), 1)


def _blocking_level(how: str) -> int:
    """Return -z by the words after "Blocking Enabled" (2.18.1 and 2.19.2 added 2 and 3)."""
    if "outer" in how:
        return 3
    return 2 if "no barrier" in how else 1


TYPES = frozenset(
    (
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "char"),
        *("int", "half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2", "fp8_e4m3"),
        *("fp8_e5m2", "fp8", "fp64", "fp32", "fp16", "bf16", "float16", "float32", "float64"),
    )
)
_ROW = re.compile(
    r"\s*(?:[-*>|]\s*)?(?P<size>\d{1,19})[\s|,]+(?P<count>\d{1,19})[\s|,]+"
    r"(?P<type>[A-Za-z]\w{2,11})(?![\w.])"
    r"(?:[\s|,]+(?P<redop>(?i:sum|prod|min|max|avg|mulsum|none))(?![^\s|,]))?"
)
_CELL = rf"(?:{NUMBER}|(?i:N/A|-?nan|-?inf|--?))"
# Up to a time stamp, algorithm names or a log line.
_FIGURES = re.compile(rf"(?:[\s|,]+{_CELL}[*%]?(?![^\s|,]))*")
# A row whose figures have no exponent, as nearly all: read in a third of the time.
_PLAIN_ROW = re.compile(
    r" *(?P<size>\d{1,19}) +(?P<count>\d{1,19}) +(?P<type>[A-Za-z]\w{2,11}) +"
    r"(?:(?P<redop>sum|prod|min|max|avg|mulsum|none) +)?(?P<figures>[-\d. ]+)"
)
_MAX_PLAIN = 20  # characters of such a figure
_SEPARATORS = re.compile(r"[\s|,]+")
_TIME_STAMP = re.compile(r"[\s|,]*(?:\d{4}-\d\d-\d\d\s+\d\d:\d\d:\d\d)?[\s|,]*")
# A log line that follows a figure directly: the row was printed in parts.
_CELL_BEFORE_LOG = re.compile(rf"[\s|,]+(?P<cell>N/A|{NUMBER})(?=[A-Za-z\[])")
MAX_LINE = 4096

# The figures of one placement by their number. Five: rccl-tests' device time.
_FIGURE_NAMES = {
    3: ("time", "algbw", "busbw"),
    4: ("time", "algbw", "busbw", "wrong"),
    5: ("time", "hipevt", "algbw", "busbw", "wrong"),
    8: ("time", "algbw", "busbw", "wrong", "i_min", "i_max", "i_p99", "i_cv"),
}
# Figures in a row -> (placements, figures of each); one more is the root.
_LAYOUT_BY_WIDTH = {8: (2, 4), 4: (1, 4), 16: (2, 8), 10: (2, 5), 3: (1, 3)}
_COLUMN_NAMES = {"cputime": "time", "#wrong": "wrong", "error": "wrong", "res": "wrong"}


@dataclass(slots=True)
class Row:
    """A row as printed; `cells` are the figures, with the root in front if it is there."""

    line: int
    size: int
    count: int
    dtype: str
    redop: str
    cells: list[str] = field(default_factory=list)
    last_line: int = 0  # differs from `line` for a row broken in two
    # The figures as numbers, if all of them are without an exponent; else [].
    values: list[float] = field(default_factory=list)

    @property
    def kind(self) -> tuple[str, ...]:
        """What all rows of one sweep have in common: type, redop, root."""
        return self.dtype, self.redop, self.cells[0] if len(self.cells) % 4 else ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of the cells of all rows of one table."""

    width: int  # cells of a complete row, root included
    placements: int
    columns: tuple[str, ...]  # of each placement

    @property
    def has_root(self) -> bool:
        return self.width > self.placements * len(self.columns)


def parse_row(line: str, number: int) -> Row | None:
    """Return a row, possibly an incomplete one, or None for any other line."""
    if len(line) > MAX_LINE:
        return None
    if plain := _parse_plain_row(line, number):
        return plain
    match = _ROW.match(line)
    if not match or match["type"].lower() not in TYPES:
        return None
    return Row(
        line=number,
        size=int(match["size"]),
        count=int(match["count"]),
        dtype=match["type"],
        redop=(match["redop"] or "").lower(),
        cells=_figures(line, match.end())[0],
        last_line=number,
    )


def _parse_plain_row(line: str, number: int) -> Row | None:
    """Return a row whose figures are all plain numbers; None for any other line."""
    match = _PLAIN_ROW.fullmatch(line)
    if not match or match["type"] not in TYPES:
        return None
    size, count, dtype, redop, figures = match.groups()
    cells = figures.split()
    try:
        values = list(map(float, cells))
    except ValueError:
        return None
    if not cells or max(map(len, cells)) > _MAX_PLAIN:
        return None
    return Row(number, int(size), int(count), dtype, redop or "", cells, number, values)


def parse_continuation(line: str) -> list[str]:
    """Return the figures of a line that holds nothing else; [] for any other."""
    if len(line) > MAX_LINE:
        return []
    cells, rest, is_before_log = _figures(" " + line, 0)
    return cells if is_before_log or _TIME_STAMP.fullmatch(rest) else []


def _figures(line: str, start: int) -> tuple[list[str], str, bool]:
    """Return (figures, what follows, whether a log line follows the last figure directly)."""
    match = _FIGURES.match(line, start)
    end = match.end() if match else start
    cells = [cell.rstrip("%") for cell in _SEPARATORS.split(line[start:end]) if cell]
    last = _CELL_BEFORE_LOG.match(line, end)
    return ([*cells, last["cell"]] if last else cells), line[end:], last is not None


def header_layout(columns: Sequence[str]) -> Layout | None:
    """Return the layout that header words in usual order state; None for scrambled ones."""
    words = [_COLUMN_NAMES.get(word, word.rstrip("%")) for word in columns if word[0] != "("]
    if "time" not in words:
        return None
    figures = words[words.index("time") :]
    while figures and figures[-1] not in ("wrong", "i_cv"):
        figures.pop()
    placements = figures.count("time")
    width = len(figures) // max(placements, 1)
    names = tuple(figures[:width])
    is_usual = names in _FIGURE_NAMES.values() and list(names) * placements == figures
    if not is_usual or placements > 2:
        return None
    return Layout(placements * width + ("root" in words), placements, names)


def layout_of(rows: Sequence[Row], columns: Sequence[str]) -> Layout | None:
    """Return the header's layout, for want of one that by the most frequent width of rows."""
    if stated := header_layout(columns):
        return stated
    widths = Counter(filter(_layout_by_width, (len(row.cells) for row in rows)))
    best = max(widths, key=lambda width: (widths[width], width), default=0)
    layout = _layout_by_width(best)
    return Layout(best, layout[0], _FIGURE_NAMES[layout[1]]) if layout else None


def _layout_by_width(width: int) -> tuple[int, int] | None:
    """Prefer four figures and a root to rccl-tests' five; three come without a root."""
    return _LAYOUT_BY_WIDTH.get(width) or (
        _LAYOUT_BY_WIDTH.get(width - 1) if width != 4 else None
    )


def split_prefix(line: str) -> tuple[str, str]:
    """Return (tag, rest); the tag is "" for a line without a launcher's mark."""
    tags = []
    rest = line
    for _ in range(_MAX_PREFIXES):
        if stamp := _STAMP.match(rest):
            rest = rest[stamp.end() :]
        elif tag := _TAG.match(rest):
            tags.append(re.sub(r"<.*>:?|:", "", tag[0]).strip())
            rest = rest[tag.end() :]
            if "<std" in rest:  # a line that was printed in parts has the tag again
                rest = rest.replace(tag[0].strip(), " ")
        else:
            break
    return " ".join(tags), rest
