"""Step times of a watched job, without and with the profiler, and the ratio of the two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from stepmark.core.columns import Row
from stepmark.core.units import format_time, ranks_text
from stepmark.report.trace_messages import arrived_last

_MAX_SHOWN = 16
_SIGNIFICANT = 1.05  # ratio of medians


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """The report of one process of the job, as bench/watch_site writes it. Times in seconds.

    A time is None where the clock changed within a step.
    """

    schema: int
    rank: int
    host: str
    pid: int
    trace: str | None = None  # path in the run's folder
    reason: str | None = None  # why there is no trace of a rank that was to be profiled
    is_chosen: bool = False
    world_size: int | None = None  # None: it made no step
    torch: str = ""
    device: str = ""
    clock: str = ""
    optimizer: str = ""
    steps: int = 0  # that were seen; none is counted after the last that is timed
    profiled_steps: tuple[int, int] | None = None  # first and last
    has_kernels: bool | None = None
    unprofiled_s: tuple[float | None, ...] = ()
    profiled_s: tuple[float | None, ...] = ()
    after_s: tuple[float | None, ...] = ()  # unprofiled, after the profile
    start_s: float | None = None  # the job's pause to start the profiler
    write_s: float | None = None  # and to write the trace
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        """Return a row of the table, with the figures and what they are made of."""
        unprofiled = [time for time in (*self.unprofiled_s, *self.after_s) if time is not None]
        profiled = [time for time in self.profiled_s if time is not None]
        plain, slow = _middle(unprofiled), _middle(profiled)
        return {
            "rank": self.rank,
            "host": self.host,
            "is_profiled": self.trace is not None,
            "unprofiled_s": plain,
            "unprofiled_min_s": min(unprofiled, default=None),
            "unprofiled_max_s": max(unprofiled, default=None),
            "unprofiled_steps": len(unprofiled),
            "profiled_s": slow,
            "profiled_min_s": min(profiled, default=None),
            "profiled_max_s": max(profiled, default=None),
            "profiled_steps": len(profiled),
            "ratio": slow / plain if plain and slow else None,
            "ranges_overlap": bool(profiled and unprofiled)
            and min(profiled) <= max(unprofiled)
            and max(profiled) >= min(unprofiled),
            "start_s": self.start_s,
            "write_s": self.write_s,
            "trace": self.trace,
            "reason": self.reason,
        }

    @property
    def slowdown_s(self) -> float:
        """Return by how much the profiled steps are longer; 0 where that is not significant."""
        row = self.row
        slow, plain, ratio = row["profiled_s"], row["unprofiled_s"], row["ratio"]
        if not isinstance(ratio, float) or self.trace is None or ratio < _SIGNIFICANT:
            return 0.0
        assert isinstance(slow, float)
        assert isinstance(plain, float)
        return slow - plain


def _middle(times: Sequence[float]) -> float | None:
    return median(times) if times else None


def cost_lines(ranks: Sequence[WatchedRank]) -> Iterator[str]:
    """Yield what the profiler cost: of ranks that made steps, by rank."""
    timed = [rank for rank in ranks if rank.world_size is not None]
    if not timed:
        return
    clocks = " or ".join(dict.fromkeys(rank.clock for rank in timed))
    optimizers = " or ".join(dict.fromkeys(rank.optimizer for rank in timed))
    yield (
        f"time of a step, from one step of {optimizers} to the next, by {clocks}: "
        "median (least to most, number of steps)"
    )
    cells: list[tuple[str, ...]] = [("rank", "unprofiled", "profiled", "profiled/unprofiled")]
    cells += [_cells(rank) for rank in timed[:_MAX_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        pairs = zip(row, widths, strict=True)
        yield "  " + "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()
    if len(timed) > _MAX_SHOWN:
        yield f"  ... and {len(timed) - _MAX_SHOWN} more; --json or --csv has all"
    start, write = (
        max((each for each in times if each is not None), default=None)
        for times in ([r.start_s for r in timed], [r.write_s for r in timed])
    )
    if start is not None:
        written = "" if write is None else f" and {format_time(write)} to write the trace"
        yield f"the job waited {format_time(start)} to start the profiler{written}, once"
    longer = max((rank.slowdown_s for rank in timed), default=0.0)
    if longer > 0:
        yield (
            f"figures of the profiled steps contain up to {format_time(longer)} per step that "
            "the profiler adds, on a GPU mostly as idle time, because the host is slower"
        )
    if len({rank.trace is None for rank in timed}) > 1:
        yield "a rank without a profile waits in collectives for those with one"


def _cells(rank: WatchedRank) -> tuple[str, ...]:
    row = rank.row
    ratio = "" if row["ratio"] is None or rank.trace is None else f"{row['ratio']:.3f}"
    if ratio and row["ranges_overlap"]:
        ratio += ", ranges overlap"
    profiled = _times(row, "profiled") if rank.trace else "-"
    return str(rank.rank), _times(row, "unprofiled"), profiled, ratio


def _times(row: Row, name: str) -> str:
    times = [row[f"{name}_{part}"] for part in ("s", "min_s", "max_s")]
    middle, low, high = (format_time(t) if isinstance(t, float) else "" for t in times)
    return f"{middle} ({low} to {high}, {row[f'{name}_steps']})" if middle else "unknown"


def job_lines(ranks: Sequence[WatchedRank]) -> Iterator[str]:
    """Yield what the job was, which ranks were profiled, and why others were not."""
    timed = [rank for rank in ranks if rank.world_size is not None]
    if not ranks:
        yield (
            "no process of the job has loaded torch: a container, sudo, python -E or -I may "
            "hide the variables PYTHONPATH and STEPMARK_WATCH from it"
        )
    elif not timed:
        reasons = dict.fromkeys(rank.reason or "no step" for rank in ranks)
        yield f"{len(ranks)} processes with torch, none with steps: {'; '.join(reasons)}"
    else:
        size = max(rank.world_size or 1 for rank in timed)
        hosts = len({rank.host for rank in timed})
        facts = dict.fromkeys(f"torch {rank.torch} on {rank.device}" for rank in timed)
        plural = "" if size == 1 else "s"
        yield f"{size} rank{plural} on {hosts} host{'s' * (hosts > 1)}; {', '.join(facts)}"
        silent = set(range(size)) - {rank.rank for rank in timed}
        if silent:
            yield f"no step was seen of {ranks_text(silent)}"
        profiled = [rank for rank in timed if rank.trace]
        windows = dict.fromkeys(rank.profiled_steps for rank in profiled)
        for window in windows:
            if window is not None:
                members = [rank.rank for rank in profiled if rank.profiled_steps == window]
                yield f"profiled: steps {window[0]} to {window[1]} of {ranks_text(members)}"
        if len(windows) > 1:
            yield "the windows differ, so ranks cannot be compared step by step"
        reasons = dict.fromkeys(rank.reason for rank in timed if rank.reason)
        for reason in reasons:
            members = [rank.rank for rank in timed if rank.reason == reason]
            yield f"not profiled: {ranks_text(members)}: {reason}"
    notes = dict.fromkeys(note for rank in ranks for note in rank.notes.values())
    for note in notes:
        members = [rank.rank for rank in ranks if note in rank.notes.values()]
        yield f"note: {ranks_text(members)}: {note}"


def slow_rank_line(rows: Sequence[Row]) -> str:
    """Return which rank the others wait for, by the ranks' rows of `trace messages`."""
    slowest, last, calls = arrived_last(rows)
    if sum(row["arrived_last"] is not None for row in rows) < 2 or not calls:
        return "slow rank: not known, as no collective has kernels on two ranks or more"
    text = f"rank {slowest} arrives last in {last} of {calls} collectives"
    if 2 * last <= calls:
        return f"slow rank: none; {text}"
    waits = [
        wait
        for row in rows
        if row["rank"] != slowest and isinstance(wait := row.get("waiting_s"), float)
    ]
    waited = f", and the others wait {format_time(median(waits))} per step" if waits else ""
    return f"slow rank: {text}{waited}"
