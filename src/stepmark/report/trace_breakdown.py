"""The breakdown of traces as rows, in ns, and as text, in ms."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from stepmark.core.columns import COUNT, NUMBER, PAGE, SHOWN, TEXT, Column, Row, View, aligned
from stepmark.core.columns import rows as rows_of
from stepmark.core.trace_breakdown import RankTimes, StepTimes
from stepmark.core.units import format_bytes, ranks_text

Ranks = Sequence[tuple[int, RankTimes]]
_MOST_ROWS = 24  # of a table by rank and step; above, the slowest are shown
_SLOWEST = 6
_MOST_SENTENCES = 2
_WIDTH = 100

DEFINITIONS = {
    "gpu": (
        "Times are those of the GPU. An event belongs to the step whose ProfilerStep mark "
        "holds its launch call. A step lasts from the end of the last event of the step "
        "before to the end of its own last one; the first one from where earlier work ends, or "
        "where the host begins it. Without marks the window is from the first event to the "
        "last.",
        "compute: kernels run that are no communication. exposed communication: what calls of "
        "torch.distributed launched, or kernels of NCCL, RCCL and the like run, and no "
        "compute. exposed copies: other copies or memsets run, and neither of these. idle: "
        "nothing runs. The four add up to the step.",
        "idle, by the event that ends it: host-bound until its launch call returned (and of "
        "that, while the call ran: much where a job has many short kernels); kernel gap where "
        "it then started within 100 us; unknown where it started later (it waited for an "
        "event, or work is missing), or its launch is not in the trace.",
        "waiting for other ranks: what a kernel of a collective takes longer than the "
        "shortest one of the same call on any rank, from its start on. others wait for it: "
        "summed over the other ranks, in calls in which this rank's kernel is the shortest. "
        "early: how long before the last rank it arrives, if the clocks of ranks agree.",
        "queue: mean number of events that are launched and have not started.",
    ),
    "host": (
        "Times are those of the host: there are no GPU events. A step is its ProfilerStep "
        "mark; without marks the window is from the first operator to the last.",
        "communication: operators of c10d, waits for them, and spans of gloo's threads. "
        "compute: operators with a namespace (aten::mm) on any thread, outside the "
        "communication of their own thread. exposed communication: communication and no "
        "compute. idle: neither, as Python, autograd and data loading. The three add up to "
        "the step.",
    ),
}


@dataclass(frozen=True, slots=True)
class _RankStep:
    """A step of a rank. base_ns: the start of the rank's first window."""

    rank: int
    times: StepTimes
    base_ns: int


def _of(*path: str) -> Callable[[_RankStep], object]:
    def value(item: _RankStep) -> object:
        part: object = item.times
        for name in path:
            part = None if part is None else getattr(part, name)
        return part

    return value


def _overlap_pct(item: _RankStep) -> float | None:
    times = item.times
    return 100 * times.overlap_ns / times.comm_ns if times.comm_ns else None


def _mean_depth(item: _RankStep) -> float | None:
    queue, window_ns = item.times.queue, item.times.window_ns
    return queue.depth_ns / window_ns if queue and window_ns else None


STEP_COLUMNS: tuple[Column[_RankStep], ...] = (
    Column("rank", lambda o: o.rank, COUNT, "", SHOWN),
    Column("device", _of("device"), TEXT, "GPU", SHOWN),
    Column("step", _of("step"), TEXT, "", SHOWN),
    Column("clock", lambda o: "host" if o.times.device is None else "gpu"),
    Column("start_ns", _of("start_ns"), COUNT),
    Column("end_ns", _of("end_ns"), COUNT),
    Column("from_ns", lambda o: o.times.start_ns - o.base_ns, COUNT, "from", SHOWN),
    Column("window_ns", _of("window_ns"), COUNT, "took", SHOWN),
    Column("compute_ns", _of("compute_ns"), COUNT, "compute", SHOWN),
    Column("exposed_comm_ns", _of("exposed_comm_ns"), COUNT, "exposed comm", SHOWN),
    Column("exposed_waiting_ns", _of("exposed_waiting_ns"), COUNT, "waiting", SHOWN),
    Column("exposed_copies_ns", _of("exposed_memory_ns"), COUNT, "exposed copies", SHOWN),
    Column("idle_ns", _of("idle_ns"), COUNT, "idle", SHOWN),
    Column("host_bound_ns", _of("idle", "host_bound_ns"), COUNT, "host-bound", SHOWN),
    Column("launch_bound_ns", _of("idle", "launch_bound_ns"), COUNT),
    Column("kernel_gap_ns", _of("idle", "kernel_gap_ns"), COUNT, "kernel gaps", SHOWN),
    Column("unknown_idle_ns", _of("idle", "unknown_ns"), COUNT, "unknown", SHOWN),
    Column("comm_ns", _of("comm_ns"), COUNT, "all comm", SHOWN),
    Column("waiting_ns", _of("waiting_ns"), COUNT),
    Column("overlap_ns", _of("overlap_ns"), COUNT),
    Column("overlap_pct", _overlap_pct, NUMBER, "hidden %", SHOWN),
    Column("copies_ns", _of("memory_ns"), COUNT),
    Column("other_steps_ns", _of("other_steps_ns"), COUNT),
    Column("events", _of("num_events"), COUNT, "", SHOWN),
    Column("queue_mean_depth", _mean_depth, NUMBER, "queue", SHOWN),
    Column("queue_max_depth", _of("queue", "max"), COUNT, "", PAGE),
    Column("queue_empty_ns", _of("queue", "empty_ns"), COUNT),
)
_TABLES = {"communication": "comms", **{n: n for n in ("kernels", "launches", "copies")}}
_SUMMANDS = ("compute_ns", "exposed_comm_ns", "exposed_copies_ns", "idle_ns")
_PARTS = {
    "step": "window_ns",
    "  compute": "compute_ns",
    "  exposed communication": "exposed_comm_ns",
    "    waiting for other ranks": "exposed_waiting_ns",
    "  exposed copies": "exposed_copies_ns",
    "  idle": "idle_ns",
    "    host-bound": "host_bound_ns",
    "      during the launch call": "launch_bound_ns",
    "    kernel gaps": "kernel_gap_ns",
    "    unknown": "unknown_idle_ns",
    "all communication": "comm_ns",
    "  waiting for other ranks": "waiting_ns",
    "  hidden by compute": "overlap_ns",
    "work of other steps in the window": "other_steps_ns",
}


def tables(ranks: Ranks) -> dict[str, list[Row]]:
    """Return all rows by table."""
    tabled = {"steps": rows_of(STEP_COLUMNS, _steps(ranks))}
    for table, attribute in _TABLES.items():
        tabled[table] = [
            {"rank": rank} | asdict(item)
            for rank, times in ranks
            for item in getattr(times, attribute)
        ]
    tabled["arrivals"] = [
        {"rank": rank, "steps": len(times.steps)} | asdict(times.arrivals)
        for rank, times in ranks
        if times.arrivals
    ]
    return tabled


def _steps(ranks: Ranks) -> Iterator[_RankStep]:
    for rank, times in ranks:
        base_ns = min((step.start_ns for step in times.steps), default=0)
        for step in times.steps:
            yield _RankStep(rank, step, base_ns)


def lines(ranks: Ranks) -> Iterator[str]:
    """Yield the report as text: what was measured on GPUs, then what on hosts."""
    tabled = tables(ranks)
    clocks = [
        clock for clock in DEFINITIONS if any(r["clock"] == clock for r in tabled["steps"])
    ]
    if not clocks:
        is_missing = any(
            d.kind == "no-device-times" for _, times in ranks for d in times.damage
        )
        yield "no times of any step" if is_missing else "nothing ran in any step"
    for place, clock in enumerate(clocks):
        yield from [""] * (place > 0)
        own = {row["rank"] for row in tabled["steps"] if row["clock"] == clock}
        part = {name: [r for r in rows if r["rank"] in own] for name, rows in tabled.items()}
        yield from _report(part, clock)


def summary(ranks: Ranks) -> Iterator[str]:
    """Yield the parts of a step alone: mean, share, spread."""
    steps = tables(ranks)["steps"]
    return _summary(steps) if steps else iter(())


def _report(tabled: dict[str, list[Row]], clock: str) -> Iterator[str]:
    steps = tabled["steps"]
    yield from _sentences(steps)
    yield from _summary(steps)
    yield ""
    yield from _step_lines(steps)
    yield from _arrival_lines(tabled["arrivals"])
    kernels = "Kernels and copies" if clock == "gpu" else "Operators"
    for title, table, label in (
        ("Communication", "communication", _comm_label),
        (kernels, "kernels", _group_label),
    ):
        if rows := tabled[table]:
            yield from [
                "",
                f"{title}: time in ms, mean over ranks and steps of sums over calls",
            ]
            yield from _means(rows, label, len(steps))
    yield from _launch_lines(tabled["launches"])
    yield from _copy_lines(tabled["copies"])
    for definition in DEFINITIONS[clock]:
        yield from ["", *textwrap.wrap(definition, _WIDTH)]


def _sentences(steps: Sequence[Row]) -> Iterator[str]:
    """Yield one sentence per step of a rank, or on the slowest of many."""
    slowest = max(steps, key=lambda row: _ns(row, "window_ns"))
    many = len(steps) > _MOST_SENTENCES
    for row in [slowest] if many else steps:
        step = "whole trace" if row["step"] is None else f"step {row['step']}"
        first, took = _ns(row, "from_ns"), _ns(row, "window_ns")
        parts = ", ".join(
            f"{title.strip()} {_ms(_ns(row, name))} ms ({_share(_ns(row, name), took)})"
            for title, name in _PARTS.items()
            if name in _SUMMANDS and _ns(row, name)
        )
        yield (
            f"{step}, rank {row['rank']}{' (the slowest)' * many}: {_ms(took)} ms from "
            f"{_ms(first)} to {_ms(first + took)} ms: {parts}"
        )
    yield ""


def _summary(steps: Sequence[Row]) -> Iterator[str]:
    """Yield each part of a step: mean, share, spread."""
    numbers = {int(str(row["step"])) for row in steps if row["step"] is not None}
    which = ranks_text(numbers).replace("rank", "step") if numbers else "whole trace"
    ranks = ranks_text({_ns(row, "rank") for row in steps})
    titles = ("mean", "share", "min", "median", "max") if len(steps) > 1 else ("time", "share")
    cells = [[f"{which} of {ranks}, in ms", *titles]]
    for title, name in _PARTS.items():
        known = [row for row in steps if row[name] is not None]
        values = [_ns(row, name) for row in known]
        if any(values):
            share = _share(sum(values), _sum(known, "window_ns"))
            spread = (min(values), median(values), max(values)) if len(steps) > 1 else ()
            cells.append([title, _ms(mean(values)), share, *map(_ms, spread)])
    yield from aligned(cells, [False, *[True] * len(titles)])


def _step_lines(steps: Sequence[Row]) -> Iterator[str]:
    """Yield a line per rank and step, of the slowest where there are many."""
    shown = list(steps)
    if len(steps) > _MOST_ROWS:
        shown = sorted(steps, key=lambda row: -_ns(row, "window_ns"))[:_SLOWEST]
        yield f"The slowest {_SLOWEST} of {len(steps)}, in ms (--json has all):"
    else:
        yield "By rank and step, in ms:"
    devices = {(row["rank"], row["device"]) for row in steps}
    has_several = len(devices) > len({rank for rank, _ in devices})
    columns = [
        column
        for column in STEP_COLUMNS
        if View.CONSOLE in column.views
        and any(row[column.name] for row in shown)
        and (column.name != "device" or has_several)
    ]
    cells = [[column.title for column in columns]]
    for row in shown:
        cells.append([_cell(row, column.name) for column in columns])
    yield from aligned(cells, [True] * len(columns))


def _arrival_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which ranks the others wait for, the most first."""
    if len(rows) < 2:
        return
    order = sorted(rows, key=lambda row: -_ns(row, "caused_ns"))
    worst = order[0]
    yield ""
    if _ns(worst, "caused_ns"):
        each = _ns(worst, "caused_ns") / _ns(worst, "steps") / (len(rows) - 1)
        yield (
            f"The others wait for rank {worst['rank']} the most: {_ms(each)} ms of a step on "
            f"average. It arrives last in {worst['num_last']} of {worst['num_calls']} calls."
        )
    most = f", the {_SLOWEST} that are waited for the most" * (len(rows) > _MOST_ROWS)
    yield f"Calls matched over ranks{most}; ms per step:"
    titles = ("rank", "calls", "comm", "waits", "others wait for it", "last in", "early")
    cells = [[*titles, "not matched"]]
    for row in order[:_SLOWEST] if most else order:
        names = ("comm_ns", "waiting_ns", "caused_ns", "early_ns", "unmatched_ns")
        comm, waits, caused, early, unmatched = (
            "n/a" if row[name] is None else _ms(_ns(row, name) / _ns(row, "steps"))
            for name in names
        )
        numbers = (str(row["rank"]), str(row["num_calls"]), comm, waits, caused)
        cells.append([*numbers, str(row["num_last"]), early, unmatched])
    yield from aligned(cells, [True] * len(cells[0]))


def _cell(row: Row, name: str) -> str:
    value = row[name]
    if value is None:
        return "all" if name == "step" else ""
    if isinstance(value, float):
        return f"{value:.1f}"
    return _ms(_ns(row, name)) if name.endswith("_ns") else str(value)


def _comm_label(row: Row) -> str:
    if not row["collective"]:
        is_gpu = row["device"] is not None
        return f"{row['kernel']}{' (collective not stated)' * is_gpu}"
    desc = row["group_desc"]
    group = row["group"] if desc in ("", "undefined") else desc
    return f"{row['collective']}, group {group} of {row['group_size'] or 'unknown size'}"


def _group_label(row: Row) -> str:
    return str(row["group"])


def _by_label(
    rows: Iterable[Row], label: Callable[[Row], str], time: str
) -> dict[str, list[Row]]:
    """Return rows by label, those that took the most time first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: -_sum(item[1], time)))


def _means(rows: Sequence[Row], label: Callable[[Row], str], num_steps: int) -> Iterator[str]:
    """Yield means by label over all ranks and steps, and their range."""
    sums = ["time_ns", *["exposed_ns"] * ("exposed_ns" in rows[0])]
    cells = [["", "calls", "time", *["exposed"] * (len(sums) - 1), "min", "max"]]
    for key, own in _by_label(rows, label, "time_ns").items():
        each: Counter[object] = Counter()
        for row in own:
            each[row["rank"], row["device"], row["step"]] += _ns(row, "time_ns")
        least = min(each.values()) if len(each) == num_steps else 0
        means = [_ms(_sum(own, name) / num_steps) for name in sums]
        calls = f"{_sum(own, 'num_events') / num_steps:.4g}"
        cells.append([key, calls, *means, _ms(least), _ms(max(each.values()))])
    yield from aligned(cells, [False, *[True] * (len(cells[0]) - 1)])


def _launch_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield calls by name; medians and maxima are those of the rank with the largest."""
    titles = (
        "calls",
        "events",
        "mean",
        "median",
        "max",
        "median delay",
        "longer than their work",
    )
    cells = [["Launch calls, of all ranks and steps, in us", *titles]]
    for name, own in _by_label(rows, lambda row: str(row["call"]), "total_ns").items():
        calls, short = _sum(own, "num_calls"), _sum(own, "num_short")
        names = ("median_ns", "max_ns", "median_delay_ns")
        largest = (max(_ns(row, name) for row in own) for name in names)
        times = [f"{value / 1e3:.1f}" for value in (_sum(own, "total_ns") / calls, *largest)]
        counts = (str(calls), str(_sum(own, "num_events")))
        cells.append([name, *counts, *times, f"{short} ({_share(short, calls)})"])
    if rows:
        yield from ["", *aligned(cells, [False, *[True] * 7])]


def _copy_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield bandwidth of copies by kind: all bytes over the sum of durations."""
    cells = [["Copies, of all ranks and steps", "copies", "bytes", "ms", "GB/s"]]
    for name, own in _by_label(rows, lambda row: str(row["name"]), "time_ns").items():
        time_ns, num_bytes = _sum(own, "time_ns"), _sum(own, "num_bytes")
        is_known = all(row["num_bytes"] is not None for row in own)
        rate = f"{num_bytes / time_ns:.4g}" if is_known and time_ns else "unknown"
        size = format_bytes(num_bytes) if is_known else "unknown"
        cells.append([name, str(_sum(own, "num_copies")), size, _ms(time_ns), rate])
    if rows:
        yield from ["", *aligned(cells, [False, *[True] * 4])]


def _sum(rows: Iterable[Row], name: str) -> int:
    return sum(_ns(row, name) for row in rows)


def _ns(row: Row, name: str) -> int:
    value = row[name]
    return value if isinstance(value, int) else 0


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
