"""The breakdown of traces as rows, in ns, and as text, in ms."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any

from stepmark.ground.grouping import group_by
from stepmark.ground.units import ranks_text
from stepmark.tables.columns import (
    BYTES,
    COUNT,
    MS,
    NO_HEADING,
    NUMBER,
    PAGE,
    PERCENT,
    SHOWN,
    US,
    Column,
    Row,
    View,
    given,
    rows_of,
)
from stepmark.tables.table import Table
from stepmark.timeline.ledger_text import DEFINITIONS, spread_lines
from stepmark.timeline.trace_breakdown import RankTimes, StepTimes
from stepmark.traces.trace_messages_text import slow_rank, slow_rank_line

Ranks = Sequence[tuple[int, RankTimes]]
_MOST_ROWS = 16  # of a table by rank; above, the slowest are shown
_NOTABLE = 0.01  # share of a step from which the first sentence names a rank


@dataclass(frozen=True, slots=True)
class _RankStep:
    """A step of a rank. base_ns: start of the first window, of all ranks if clocks agree."""

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
    queue = item.times.queue
    window_ns = item.times.window_ns
    return queue.depth_ns / window_ns if queue and window_ns else None


STEP_COLUMNS: tuple[Column[_RankStep], ...] = (
    Column("rank", lambda o: o.rank, COUNT, "", SHOWN),
    Column("device", _of("device"), COUNT, "GPU", SHOWN),
    Column(
        "step",
        _of("step"),
        COUNT,
        views=SHOWN,
        words=lambda row: "all" if row["step"] is None else str(row["step"]),
    ),
    Column("clock", lambda o: "host" if o.times.device is None else "gpu"),
    Column("start_ns", _of("start_ns"), COUNT),
    Column("end_ns", _of("end_ns"), COUNT),
    Column("from_ns", lambda o: o.times.start_ns - o.base_ns, MS, "from", SHOWN),
    Column("window_ns", _of("window_ns"), MS, "took", SHOWN),
    Column("compute_ns", _of("compute_ns"), MS, "compute", SHOWN),
    Column("exposed_comm_ns", _of("exposed_comm_ns"), MS, "exposed comm", SHOWN),
    Column("exposed_waiting_ns", _of("exposed_waiting_ns"), MS, "waiting", SHOWN),
    Column("exposed_copies_ns", _of("exposed_memory_ns"), MS, "exposed copies", SHOWN),
    Column("idle_ns", _of("idle_ns"), MS, "idle", SHOWN),
    Column("host_bound_ns", _of("idle", "host_bound_ns"), MS, "host-bound", SHOWN),
    Column("launch_call_ns", _of("idle", "launch_call_ns"), COUNT),
    Column("kernel_gap_ns", _of("idle", "kernel_gap_ns"), MS, "kernel gaps", SHOWN),
    Column("unknown_idle_ns", _of("idle", "unknown_ns"), MS, "unknown", SHOWN),
    Column("comm_ns", _of("comm_ns"), MS, "all comm", SHOWN),
    Column("waiting_ns", _of("waiting_ns"), COUNT),
    Column("overlap_ns", _of("overlap_ns"), COUNT),
    Column("overlap_pct", _overlap_pct, PERCENT, "hidden %", SHOWN),
    Column("copies_ns", _of("memory_ns"), COUNT),
    Column("other_steps_ns", _of("other_steps_ns"), COUNT),
    Column("events", _of("num_events"), COUNT, "", SHOWN),
    Column("queue_mean_depth", _mean_depth, PERCENT, "queue", PAGE),
    Column("queue_max_depth", _of("queue", "max"), COUNT, "deepest", PAGE),
    Column("queue_empty_ns", _of("queue", "empty_ns"), COUNT),
)
_TABLES = {"communication": "comms", **{n: n for n in ("kernels", "launches", "copies")}}
# What may make a rank late, and how that reads before its time.
_CAUSES = {
    "host_bound_ns": "whose host is late: host-bound for",
    "idle_ns": "which is idle longer:",
    "compute_ns": "which computes longer:",
}
_SUMMANDS = ("compute_ns", "exposed_comm_ns", "exposed_copies_ns", "idle_ns")
PARTS = {
    "step": "window_ns",
    "  compute": "compute_ns",
    "  exposed communication": "exposed_comm_ns",
    "    waiting for other ranks": "exposed_waiting_ns",
    "  exposed copies": "exposed_copies_ns",
    "  idle": "idle_ns",
    "    host-bound": "host_bound_ns",
    "      during the launch call": "launch_call_ns",
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
            {"rank": rank} | _flat(item)
            for rank, times in ranks
            for item in getattr(times, attribute)
        ]
    tabled["arrivals"] = [
        {"rank": rank, "steps": len(times.steps)} | _flat(times.arrivals)
        for rank, times in ranks
        if times.arrivals
    ]
    return tabled


def _flat(item: Any) -> Row:
    """Return the fields of a dataclass whose values are no dataclasses."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _steps(ranks: Ranks) -> Iterator[_RankStep]:
    starts = {
        rank: min(s.start_ns for s in times.steps) for rank, times in ranks if times.steps
    }
    agreeing = {rank for rank, t in ranks if t.arrivals and t.arrivals.early_ns is not None}
    common_ns = min((starts[rank] for rank in agreeing), default=0)
    for rank, times in ranks:
        for step in times.steps:
            yield _RankStep(rank, step, common_ns if rank in agreeing else starts[rank])


def lines(ranks: Ranks, *, details: bool = False) -> Iterator[str]:
    """Yield the report as text: what was measured on GPUs, then what on hosts.

    details: also launch calls, copies and the queue of launches.
    """
    tabled = tables(ranks)
    clocks = [
        clock for clock in ("gpu", "host") if any(r["clock"] == clock for r in tabled["steps"])
    ]
    if not clocks:
        is_missing = any(
            d.kind == "no-device-times" for _, times in ranks for d in times.damage
        )
        yield "no times of any step" if is_missing else "nothing ran in any step"
    for place, clock in enumerate(clocks):
        if place:
            yield ""
        own = {row["rank"] for row in tabled["steps"] if row["clock"] == clock}
        part = {name: [r for r in rows if r["rank"] in own] for name, rows in tabled.items()}
        yield from _report(part, clock, details)
    if clocks:
        more = "" if details else "; launch calls and copies: trace breakdown --details"
        yield from ["", f"Definitions: {DEFINITIONS}{more}."]


def summary(ranks: Ranks) -> list[str]:
    """Return the parts of a step alone: mean, share, spread."""
    steps = tables(ranks)["steps"]
    return _summary(steps) if steps else []


def _report(tabled: dict[str, list[Row]], clock: str, details: bool) -> Iterator[str]:
    steps = tabled["steps"]
    yield _headline(steps, tabled["arrivals"])
    yield from [*_gain_lines(steps, tabled["arrivals"]), ""]
    yield from _summary(steps)
    yield ""
    yield from _step_lines(steps, tabled["arrivals"], details)
    yield from _arrival_lines(steps, tabled["arrivals"])
    kernels = "Kernels and copies" if clock == "gpu" else "Operators"
    if rows := tabled["communication"]:
        yield from ["", "Communication: ms of a step in which any call of a line runs, mean"]
        yield from _means(rows, _comm_label, len(steps))
    if rows := tabled["kernels"]:
        yield from ["", f"{kernels}: ms of a step, sums over calls, mean"]
        yield from _means(rows, lambda row: str(row["group"]), len(steps))
    if details:
        yield from _launch_lines(tabled["launches"])
        yield from _copy_lines(tabled["copies"])


def _headline(steps: Sequence[Row], arrivals: Sequence[Row]) -> str:
    """Return where the time went, and which rank is waited for, else is the slowest."""
    took = _sum(steps, "window_ns")
    waiting = _waiting(steps, arrivals)
    parts = []
    for title, name in PARTS.items():
        if name in _SUMMANDS and _share(time := _sum(steps, name), took) != "0.0 %":
            cause = waiting if name == "exposed_comm_ns" else ""
            for part in ("host_bound_ns", "unknown_idle_ns") if name == "idle_ns" else ():
                if 2 * (own := _sum(steps, part)) > time:
                    words = "host-bound" if part == "host_bound_ns" else "of unknown cause"
                    cause = f" ({MS.show(own / len(steps))} ms is {words})"
            parts.append(f"{title.strip()} {_share(time, took)}{cause}")
    if any(row["idle_ns"] is None for row in steps):
        parts.append("the rest is idle or not in the cut trace")
    if " for rank " not in waiting:
        parts += _slowest(steps)
    average = " on average" if len(steps) > 1 else ""
    where = " on the host (no GPU events)" if steps[0]["clock"] == "host" else ""
    return (
        f"{_which(steps)}{where}: {MS.show(took / len(steps))} ms{average}: {', '.join(parts)}"
    )


def _slowest(steps: Sequence[Row]) -> Iterator[str]:
    """Yield the rank with the longest steps, without the time that is or may be waiting."""
    is_known = all(row["exposed_waiting_ns"] is not None for row in steps)
    waits = "exposed_waiting_ns" if is_known else "exposed_comm_ns"
    by_rank = group_by(steps, lambda row: row["rank"])
    own = {
        rank: (_sum(rows, "window_ns") - _sum(rows, waits)) / len(rows)
        for rank, rows in by_rank.items()
    }
    slowest = max(own, key=lambda rank: own[rank])
    longer_ns = own[slowest] - mean(own.values())
    latest_begin = max(min(_ns(row, "start_ns") for row in rows) for rows in by_rank.values())
    first_end = min(max(_ns(row, "end_ns") for row in rows) for rows in by_rank.values())
    is_one_job = latest_begin < first_end
    if is_one_job and longer_ns * len(steps) > _NOTABLE * _sum(steps, "window_ns"):
        text = f"the slowest is rank {slowest} with {MS.show(own[slowest])} ms"
        if _sum(steps, waits):
            text += " without waiting" if is_known else " without exposed communication"
        yield text


def _waiting(steps: Sequence[Row], arrivals: Sequence[Row]) -> str:
    """Return what part of exposed communication is waiting, and for which rank."""
    ranks = {row["rank"] for row in steps}
    took, comm, waiting = (
        _mean(steps, name, ranks)
        for name in ("window_ns", "exposed_comm_ns", "exposed_waiting_ns")
    )
    if comm > _NOTABLE * took and any(row["exposed_waiting_ns"] is None for row in steps):
        return " (how much of it is waiting for other ranks is not known)"
    if waiting <= _NOTABLE * took or not _sum(arrivals, "caused_ns"):
        return ""
    caused = {row["rank"]: _ns(row, "caused_ns") for row in arrivals}
    slowest = _slow_rank(arrivals)
    text = f"{MS.show(waiting)} of {MS.show(comm)} ms is waiting"
    if slowest is None:
        return f" ({text}; slow rank: none)"
    is_most = 2 * caused[slowest] > _sum(arrivals, "waiting_ns")
    text += f", {'mostly' if is_most else 'in part'} for rank {slowest}"
    for name, cause in _CAUSES.items():
        own, others = (_mean(steps, name, o) for o in ({slowest}, ranks - {slowest}))
        if own - others > waiting / 2:
            return f" ({text}, {cause} {MS.show(own)} ms, others {MS.show(others)} ms)"
    return f" ({text})"


def _slow_rank(arrivals: Sequence[Row]) -> object:
    """Return the rank that arrives last in most calls, or None."""
    return slow_rank({row["rank"]: _ns(row, "num_last") for row in arrivals})


def _gain_lines(steps: Sequence[Row], arrivals: Sequence[Row]) -> Iterator[str]:
    """Yield what the step gains at most if the slow rank arrives with the others.

    All ranks end a step together, so that it gains what the rank gains that waits the least.
    """
    slowest = _slow_rank(arrivals)
    ranks = {row["rank"] for row in steps}
    others = {row["rank"] for row in arrivals} - {slowest}
    if slowest is None or len(others) + 1 < len(ranks):
        return
    waiting, rank = min((_mean(steps, "exposed_waiting_ns", {rank}), rank) for rank in others)
    took = _mean(steps, "window_ns", ranks)
    # More than a step cannot be gained: the ranks' steps are then not of one length.
    if _NOTABLE * took < waiting < took:
        yield (
            f"if rank {slowest} arrived with the others, the step would be at most "
            f"{MS.show(waiting)} ms ({_share(waiting, took)}) shorter (exposed waiting of rank "
            f"{rank}, the least of the others)"
        )


def _mean(steps: Sequence[Row], name: str, ranks: set[object]) -> float:
    own = [row for row in steps if row["rank"] in ranks and row[name] is not None]
    return mean([_ns(row, name) for row in own] or [0])


def _which(steps: Sequence[Row]) -> str:
    numbers = {int(str(row["step"])) for row in steps if row["step"] is not None}
    which = ranks_text(numbers).replace("rank", "step") if numbers else "whole trace"
    return f"{which} of {ranks_text({_ns(row, 'rank') for row in steps})}"


def _summary(steps: Sequence[Row]) -> list[str]:
    """Return each part of a step: mean, share, spread."""
    parts: list[tuple[str, list[int], float]] = []
    for title, name in PARTS.items():
        known = [row for row in steps if row[name] is not None]
        values = [_ns(row, name) for row in known]
        if any(values):
            parts.append((title, values, _sum(known, "window_ns") / len(known)))
    return spread_lines(_which(steps), parts, several=len(steps) > 1)


def _step_lines(steps: Sequence[Row], arrivals: Sequence[Row], details: bool) -> Iterator[str]:
    """Yield a line per rank and step, of the slowest where there are many."""
    shown = list(steps)
    ranks = {row["rank"] for row in steps}
    is_common = ranks == {row["rank"] for row in arrivals if row["early_ns"] is not None}
    since = "all ranks" if is_common else "each rank, as their clocks are not known to agree"
    clock = f"; 'from' counts from the first of {since}" if len(ranks) > 1 else ""
    if len(steps) > _MOST_ROWS:
        shown = sorted(steps, key=lambda row: -_ns(row, "window_ns"))[:_MOST_ROWS]
        yield f"The slowest {_MOST_ROWS} of {len(steps)}, in ms (--json has all){clock}:"
    else:
        yield f"By rank and step, in ms{clock}:"
    devices = {(row["rank"], row["device"]) for row in steps}
    has_several = len(devices) > len(ranks)
    columns = [
        column
        for column in STEP_COLUMNS
        if (View.PAGE if details else View.CONSOLE) in column.views
        and any(row[column.name] for row in shown)
        and (column.name != "device" or has_several)
    ]
    yield from Table(shown, columns).text(columns)


def _arrival_lines(steps: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """Yield which ranks the others wait for, the most first."""
    if len(rows) < 2:
        return
    order = sorted(rows, key=lambda row: -_ns(row, "caused_ns"))
    num_others = len(rows) - 1
    yield ""
    yield slow_rank_line(
        [
            {
                "rank": row["rank"],
                "arrived_last": row["num_last"],
                "waiting_s": _ns(row, "waiting_ns") / _ns(row, "steps") * 1e-9,
                "exposed_waiting_s": _mean(steps, "exposed_waiting_ns", {row["rank"]}) * 1e-9,
            }
            for row in rows
        ]
    )
    is_cut = len(rows) > _MOST_ROWS
    most = f", the {_MOST_ROWS} that are waited for the most" if is_cut else ""
    units = "means: waits in ms of a step, early of a call"
    yield f"Calls matched over ranks, of all steps{most}; {units}:"
    shown: list[Row] = []
    for row in order[:_MOST_ROWS]:
        num_steps = _ns(row, "steps")
        early_ns = _ns(row, "early_ns") / _ns(row, "num_calls")
        means = {
            "waits_ns": _ns(row, "waiting_ns") / num_steps,
            "waited_for_ns": _ns(row, "caused_ns") / num_steps / num_others,
            "early": "n/a" if row["early_ns"] is None else MS.show(early_ns),
        }
        shown.append(row | means)
    yield from Table(shown, _ARRIVAL_COLUMNS).text()


_ARRIVAL_COLUMNS = (
    given("rank", COUNT),
    given("num_calls", COUNT, "calls"),
    given("waits_ns", MS, "waits"),
    given("waited_for_ns", MS, "others wait for it"),
    given("num_last", COUNT, "last in"),
    given("early", COUNT),
)


def _comm_label(row: Row) -> str:
    if not row["collective"]:
        unstated = "" if row["device"] is None else " (collective not stated)"
        return f"{row['kernel']}{unstated}"
    desc = row["group_desc"]
    group = row["group"] if desc in ("", "undefined") else desc
    return f"{row['collective']}, group {group} of {row['group_size'] or 'unknown size'}"


def _by_label(
    rows: Iterable[Row], label: Callable[[Row], str], time: str
) -> dict[str, list[Row]]:
    """Return rows by label, those that took the most time first."""
    groups = group_by(rows, label)
    return dict(sorted(groups.items(), key=lambda item: -_sum(item[1], time)))


def _means(rows: Sequence[Row], label: Callable[[Row], str], num_steps: int) -> Iterator[str]:
    """Yield means by label over all ranks and steps, and the range of these."""
    table: list[Row] = []
    for key, own in _by_label(rows, label, "time_ns").items():
        each: Counter[object] = Counter()
        for row in own:
            each[row["rank"], row["device"], row["step"]] += _ns(row, "time_ns")
        num_calls = _sum(own, "num_events") / num_steps
        mean_row: Row = {
            "label": key,
            "calls": f"{num_calls:.4g}" if num_calls < 1e3 else f"{num_calls:.0f}",
            "time_ns": _sum(own, "time_ns") / num_steps,
            "min_ns": min(each.values()) if len(each) == num_steps else 0,
            "max_ns": max(each.values()),
        }
        if "exposed_ns" in own[0]:
            mean_row["exposed_ns"] = _sum(own, "exposed_ns") / num_steps
        table.append(mean_row)
    yield from Table(table, _MEAN_COLUMNS).text()


_MEAN_COLUMNS = (
    given("label", heading=NO_HEADING),
    given("calls", COUNT),
    given("time_ns", MS, "time"),
    given("exposed_ns", MS, "exposed"),
    given("min_ns", MS, "min"),
    given("max_ns", MS, "max"),
)


def _launch_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield calls by name; medians and maxima are those of the rank with the largest."""
    table: list[Row] = []
    for name, own in _by_label(rows, lambda row: str(row["call"]), "total_ns").items():
        calls = _sum(own, "num_calls")
        short = _sum(own, "num_short")
        largest = {key: max(_ns(row, key) for row in own) for key in _LARGEST}
        table.append(
            {
                "call": name,
                "num_calls": calls,
                "num_events": _sum(own, "num_events"),
                "mean_ns": _sum(own, "total_ns") / calls,
                **largest,
                "short": f"{short} ({_share(short, calls)})",
            }
        )
    if table:
        yield from ["", *Table(table, _LAUNCH_COLUMNS).text()]


_LARGEST = ("median_ns", "max_ns", "median_delay_ns")
_LAUNCH_COLUMNS = (
    given("call", heading="Launch calls, of all ranks and steps, in us"),
    given("num_calls", COUNT, "calls"),
    given("num_events", COUNT, "events"),
    given("mean_ns", US, "mean"),
    given("median_ns", US, "median"),
    given("max_ns", US, "max"),
    given("median_delay_ns", US, "median delay"),
    given("short", COUNT, "longer than their work"),
)


def _copy_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield bandwidth of copies by kind: all bytes over the sum of durations."""
    table: list[Row] = []
    for name, own in _by_label(rows, lambda row: str(row["name"]), "time_ns").items():
        time_ns = _sum(own, "time_ns")
        num_bytes = _sum(own, "num_bytes")
        is_known = all(row["num_bytes"] is not None for row in own)
        table.append(
            {
                "name": name,
                "num_copies": _sum(own, "num_copies"),
                "bytes": num_bytes if is_known else "unknown",
                "time_ns": time_ns,
                "gb_s": num_bytes / time_ns if is_known and time_ns else "unknown",
            }
        )
    if table:
        yield from ["", *Table(table, _COPY_COLUMNS).text()]


_COPY_COLUMNS = (
    given("name", heading="Copies, of all ranks and steps"),
    given("num_copies", COUNT, "copies"),
    given("bytes", BYTES),
    given("time_ns", MS, "ms"),
    given("gb_s", NUMBER, "GB/s"),
)


def _sum(rows: Iterable[Row], name: str) -> int:
    return sum(_ns(row, name) for row in rows)


def _ns(row: Row, name: str) -> int:
    value = row[name]
    return value if isinstance(value, int) else 0


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
