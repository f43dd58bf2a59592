"""Rows of collectives as nccl-tests prints them, so that its readers read ours.

Column layout and number rule of nccl-tests 2.17.4 and later (src/util.cu); facts without a
column are in `#` lines below each table, which are about the slowest rank. time is the median
over samples of the slowest rank, where nccl-tests has the mean, unless -a asks for another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise

from stepmark import __version__
from stepmark.cases.comm_case import SETTINGS
from stepmark.cases.record import RunInfo
from stepmark.collectives.comm_remarks import remarks, setting_line
from stepmark.ground.dtypes import DType
from stepmark.ground.units import format_bytes
from stepmark.model.collectives import Collective, groups
from stepmark.tables.columns import Row, number, text
from stepmark.tables.row_tables import grouped
from stepmark.tables.table import TableLine

TYPE_NAMES = {
    DType.FP64: "double",
    DType.FP32: "float",
    DType.BF16: "bfloat16",
    DType.FP16: "half",
    DType.FP8_E4M3: "f8e4m3",
    DType.FP8_E5M2: "f8e5m2",
}
_TEST_NAMES = {
    Collective.ALL_TO_ALL: "alltoall_perf",
    Collective.ALL_TO_ALL_V: "alltoallv_perf",
}

# A block has a header of its own, and a table for each value of TABLE.
_BLOCK = ("collective", *SETTINGS)
TABLE = ("dtype", "redop", "root", "pair")
PLACEMENTS = ("out-of-place", "in-place")
NA_HALF = f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"

_LEAD = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_HALF = "  {:>7}  {:>6}  {:>6}  {:>6}"
# Columns of the samples of -I.
_ITERATIONS = 4 * "  {:>7}"
_OF_ITERATIONS = ("min_s", "max_s", "p99_s", "cv_pct")
_RANK = (
    "#  Rank {rank:2} Group {group:2} Pid {pid:6} on {hostname:>10} device {device:2} "
    "[{device_hex}] {device_info}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Values of nccl-tests' parameter line."""

    min_bytes: int
    max_bytes: int
    step: int
    step_is_factor: bool
    warmup_iters: int
    iters: int
    agg_iters: int
    validation: int
    graph: int
    unalign: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a table shows of its rows, as -a, -C, -M and -S of nccl-tests ask for.

    over_ranks: the number of -a; 3, the slowest rank, is how rows have their times.
    """

    over_ranks: int = 3
    cputime: bool = False
    memory: bool = False
    timestamps: bool = False
    per_iter: bool = False

    @property
    def head(self) -> tuple[tuple[str, ...], ...]:
        """Return the cells of the three lines above a table."""
        units: tuple[str, ...] = ("(us)", "(GB/s)", "(GB/s)", "")
        names: tuple[str, ...] = (
            "cputime" if self.cputime else "time",
            "algbw",
            "busbw",
            "#wrong",
        )
        if self.per_iter:
            names += ("i_min", "i_max", "i_p99", "i_cv%")
            units += ("(us)", "(us)", "(us)", "(%)")
        return (
            (*("",) * 5, *("out",) * len(names), *("in",) * len(names)),
            ("size", "count", "type", "redop", "root", *2 * names),
            ("(B)", "(elements)", "", "", "", *2 * units),
        )

    @property
    def half(self) -> str:
        """Return the format of one placement's cells."""
        return _HALF + (_ITERATIONS if self.per_iter else "")

    def head_lines(self) -> list[str]:
        """Return the three lines above a table, as nccl-tests prints them."""
        above = "           out-of-place                       in-place          "
        if self.per_iter:
            name = "-place (+ per-iteration)"
            above = f"{'':14}out-of{name}{'':32}in{name}"
        line = _LEAD + 2 * self.half + " "
        _, names, units = self.head
        return [
            _LEAD.format("", "", "", "", "") + above,
            line.format(*names),
            line.format(*units),
        ]

    @property
    def time_words(self) -> str:
        """Return what the times of the table are."""
        words = f"time = median of {_OVER_RANKS[self.over_ranks][1]}"
        if not self.cputime:
            return words
        return f"cputime = the host's time to issue a call; rates by {words}"

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with the time that is asked for, as table_time_s, and its rates."""
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Row:
        slowest_s = number(row, "time_s")
        time_s = number(row, _OVER_RANKS[self.over_ranks][0])
        if not slowest_s or not time_s:
            return {**row, "table_time_s": None}
        rates = {
            name: None if (rate := number(row, name)) is None else rate * slowest_s / time_s
            for name in ("algbw_gb_s", "busbw_gb_s")
        }
        issue_s = number(row, "issue_s")
        return {**row, **rates, "table_time_s": issue_s if self.cputime else time_s}


# Column and words of each number of -a.
_OVER_RANKS = (
    ("rank0_s", "rank 0"),
    ("rank_mean_s", "the mean over ranks"),
    ("rank_min_s", "the fastest rank"),
    ("time_s", "the slowest rank"),
)


def output_lines(
    rows: Sequence[Row],
    run: RunInfo,
    *,
    step: tuple[int, bool] | None = None,
    head_per_table: bool = False,
    report: Report | None = None,
) -> list[str]:
    """Return all rows: one complete output per collective and setting.

    step is the one asked for, and whether it is a factor; None takes it from the rows.
    head_per_table: repeat the head, as parts of a table on a narrow terminal need it.
    """
    lines: list[str] = []
    report = report or Report()
    for block in grouped(report.of(rows), _BLOCK):
        parameters = parameters_of(block)
        if step is not None:
            parameters = replace(parameters, step=step[0], step_is_factor=step[1])
        block_lines = _block(block, run, parameters, head_per_table, report)
        lines += [*([""] if lines else []), *block_lines]
    return lines


def test_name(collective: str) -> str:
    """Return the name of nccl-tests' program, or the name that it would have."""
    return _TEST_NAMES.get(Collective(collective), f"{collective}_perf")


def type_name(dtype: str) -> str:
    return TYPE_NAMES.get(DType(dtype), dtype)


def lines_of(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return the rows of one table by size, both placements side by side."""
    joined: dict[tuple[float, float], dict[str, Row]] = {}
    for row in rows:
        size = number(row, "size_bytes") or 0
        count = number(row, "count") or 0
        joined.setdefault((size, count), {})[text(row, "placement")] = row
    return [joined[size] for size in sorted(joined)]


def float_text(value: float, width: int) -> str:
    """Print up to two decimals that fit, else an exponent, as nccl-tests' getFloatStr."""
    for places in (2, 1, 0):
        printed = f"{value:{width}.{places}f}"
        if len(printed) <= width:
            return printed
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def parameters_of(rows: Sequence[Row]) -> Parameters:
    """Read the rows of one block. One size alone has nccl-tests' default step."""
    sizes = sorted({int(number(row, "size_bytes") or 0) for row in rows})
    ratios = {high / low for low, high in pairwise(sizes) if low}
    steps = {high - low for low, high in pairwise(sizes)} or {2**20}
    is_factor = len(ratios) == 1 and len(sizes) > 2
    ran = [row for row in rows if row["n"]]
    is_graph = any(row["mode"] == "graph" for row in ran)
    calls = min((int(number(row, "calls_per_sample") or 1) for row in ran), default=0)
    samples = min((int(number(row, "n") or 0) for row in ran), default=0)
    return Parameters(
        min_bytes=sizes[0],
        max_bytes=sizes[-1],
        step=round(ratios.pop()) if is_factor else min(steps),
        step_is_factor=is_factor,
        warmup_iters=min((int(number(row, "warmup_calls") or 0) for row in ran), default=0),
        iters=calls if is_graph else calls * samples,
        agg_iters=int(number(rows[0], "calls_per_group") or 1),
        validation=int(any(row["num_wrong"] is not None for row in ran)),
        graph=samples if is_graph else 0,
        unalign=int(number(rows[0], "unalign") or 0),
    )


def _block(
    rows: Sequence[Row],
    run: RunInfo,
    parameters: Parameters,
    head_per_table: bool,
    report: Report,
) -> list[str]:
    name = test_name(text(rows[0], "collective"))
    lines = _header(rows, run, parameters, name, report)
    tables = grouped(rows, TABLE)
    for place, table in enumerate(tables):
        if len(tables) > 1:
            lines.append(_table_line(table[0]))
        sizes = lines_of(table)
        printed = _table_lines(sizes, report)
        lines += printed if not place or head_per_table else printed[len(report.head) :]
        lines += [
            f"# {row['size_bytes']} {placement} {row['status']}: {row['message']}"
            for halves in sizes
            for placement in PLACEMENTS
            if (row := halves.get(placement)) and row["message"]
        ]
        lines += remarks(table)
    return [*lines, *_footer(rows, name, report)]


def _header(
    rows: Sequence[Row], run: RunInfo, parameters: Parameters, name: str, report: Report
) -> list[str]:
    p = parameters
    nccl = run.environment.versions.get("nccl")
    library = f", nccl {nccl}" if nccl else ""
    unit = "factor" if p.step_is_factor else "bytes"
    return [
        f"# stepmark {__version__}, torch {run.environment.torch}{library}; "
        "layout of nccl-tests, run " + run.run_id,
        f"# Collective test starting: {name}",
        f"# nThread 1 nGpus 1 minBytes {p.min_bytes} maxBytes {p.max_bytes} "
        f"step: {p.step}({unit}) warmup iters: {p.warmup_iters} iters: {p.iters} "
        f"agg iters: {p.agg_iters} validation: {p.validation} graph: {p.graph} "
        f"unalign: {p.unalign}",
        f"{setting_line(rows)}; {report.time_words}",
        "#",
        "# Using devices",
        *(_RANK.format(**device) for device in devices_of(rows, run)),
        "#",
    ]


def devices_of(rows: Sequence[Row], run: RunInfo) -> list[Mapping[str, object]]:
    """Return the devices of the ranks that take part, under the keys of nccl-tests' JSON.

    A CPU, which has no PCI address, gets 0000:00:00 for parsers that expect one.
    """
    world = int(number(rows[0], "world_size") or 0)
    split = text(rows[0], "split")
    colour = {
        rank: index for index, members in enumerate(groups(world, split)) for rank in members
    }
    alone = int(number(rows[0], "num_ranks") or 0)
    last = world if split or rows[0]["pair"] else alone
    return [
        {
            "rank": device.rank,
            "group": colour.get(device.rank, 0),
            "pid": device.pid,
            "hostname": device.host or run.environment.host,
            "device": device.index,
            "device_hex": device.bus_id or "0000:00:00",
            "device_info": device.name,
        }
        for device in run.environment.devices
        if device.rank < last
    ]


def _table_line(row: Row) -> str:
    words = [type_name(text(row, "dtype"))]
    words += [] if row["redop"] == "none" else [text(row, "redop")]
    words += [] if row["root"] == -1 else [f"root {row['root']}"]
    words += [f"pair {text(row, 'pair').replace('-', ' -> ')}"] if row["pair"] else []
    return f"# {', '.join(words)}"


def _table_lines(sizes: Sequence[Mapping[str, Row]], report: Report) -> list[str]:
    """Return the head and a line per size; in parts, figures come before what is the same."""
    timed = [halves for halves in sizes if any(row["time_s"] for row in halves.values())]
    data = [_size_line(halves, report) for halves in timed]
    lines = [*report.head_lines(), *data]
    cells = [*map(list, report.head), *(line.split() for line in data)]
    width = (len(cells[0]) - 5) // 2
    ran = [
        5 + width * number
        for number, placement in enumerate(PLACEMENTS)
        if any(placement in halves and halves[placement]["time_s"] for halves in timed)
    ]
    places = [0, *(start + place for start in ran for place in range(width)), 1, 2, 3, 4]
    if report.timestamps:
        stamps = ["", "timestamp", "%Y-%m-%d %H:%M:%S", *map(_timestamp, timed)]
        lines = [f"{line}{stamp:>21}" for line, stamp in zip(lines, stamps, strict=True)]
        cells = [[*words, stamp] for words, stamp in zip(cells, stamps, strict=True)]
        places.append(5 + 2 * width)
    is_right = [True] * len(places)
    return [
        TableLine.of(line, [words[place] for place in places], is_right)
        for line, words in zip(lines, cells, strict=True)
    ]


def _timestamp(halves: Mapping[str, Row]) -> str:
    """Return when the last measurement of a line began, in this machine's time zone."""
    moments = [number(row, "started_at") or 0.0 for row in halves.values()]
    return datetime.fromtimestamp(max(moments)).strftime("%Y-%m-%d %H:%M:%S")


def _size_line(halves: Mapping[str, Row], report: Report) -> str:
    row = next(iter(halves.values()))
    return (
        f"{row['size_bytes']:12}  {row['count']:12}  {type_name(text(row, 'dtype')):>8}  "
        f"{text(row, 'redop'):>6}  {row['root']:6}"
    ) + "".join(_half(halves.get(placement), report) for placement in PLACEMENTS)


def _half(row: Row | None, report: Report) -> str:
    time_s = number(row, "table_time_s") if row else None
    if row is None or time_s is None:
        return NA_HALF + (_ITERATIONS.format(*4 * ("N/A",)) if report.per_iter else "")
    wrong = number(row, "num_wrong")
    rates = (number(row, "algbw_gb_s"), number(row, "busbw_gb_s"))
    algbw, busbw = ("N/A" if rate is None else float_text(rate, 6) for rate in rates)
    # One column narrower where nothing was checked, as in nccl-tests.
    wrong_text = "    N/A" if wrong is None else f"  {wrong:>6g}"
    cells = f"  {float_text(time_s * 1e6, 7)}  {algbw:>6}  {busbw:>6}{wrong_text}"
    if not report.per_iter:
        return cells
    figures = (
        (number(row, name) or 0.0) * (1 if name.endswith("pct") else 1e6)
        for name in _OF_ITERATIONS
    )
    return cells + _ITERATIONS.format(*(float_text(figure, 7) for figure in figures))


def out_of_bounds(rows: Sequence[Row]) -> int:
    """Return the number of measurements with a wrong element."""
    return sum(1 for row in rows if row["num_wrong"])


def average_busbw(rows: Sequence[Row]) -> float | None:
    """Return the unweighted mean over sizes and placements, as nccl-tests prints it."""
    rates = [rate for row in rows if (rate := number(row, "busbw_gb_s")) is not None]
    return sum(rates) / len(rates) if rates else None


def _memory_line(rows: Sequence[Row]) -> str:
    """Return the memory of the row with the most, in the layout of nccl-tests -M."""
    columns = {
        "init_memory_bytes": "Initialization",
        "buffer_memory_bytes": "User-Allocated",
        "call_memory_bytes": "Collective",
    }
    most = max(rows, key=lambda row: sum(number(row, name) or 0 for name in columns))
    sizes = {word: int(number(most, name) or 0) for name, word in columns.items()}
    words = [f"{word} {format_bytes(size)}" for word, size in sizes.items()]
    total = f"Total {format_bytes(sum(sizes.values()))}"
    return f"# {'GPU memory usage':<20} : {' | '.join([*words, total])}"


def _footer(rows: Sequence[Row], name: str, report: Report) -> list[str]:
    wrong = out_of_bounds(rows)
    average = average_busbw(rows)
    return [
        *([_memory_line(rows)] if report.memory else []),
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {'N/A' if average is None else f'{average:g}'} ",
        "#",
        f"# Collective test concluded: {name}",
        "#",
        "",
    ]
