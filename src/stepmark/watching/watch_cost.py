"""Step times of a watched job, without and with the profiler, and the ratio of the two."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

from stepmark.ground.units import format_time, plural, ranks_text
from stepmark.tables.columns import RATIO, Row, given, number
from stepmark.tables.table import Table

T = TypeVar("T")
_MAX_SHOWN = 16
_SIGNIFICANT = 1.05  # ratio of medians


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """The report of one process of the job, as watching/watch_site writes it. Times in seconds.

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
        row: Row = {
            "rank": self.rank,
            "host": self.host,
            "is_profiled": self.trace is not None,
        }
        unprofiled = [time for time in (*self.unprofiled_s, *self.after_s) if time is not None]
        profiled = [time for time in self.profiled_s if time is not None]
        for name, times in (("unprofiled", unprofiled), ("profiled", profiled)):
            row |= {
                f"{name}_s": median(times) if times else None,
                f"{name}_min_s": min(times, default=None),
                f"{name}_max_s": max(times, default=None),
                f"{name}_steps": len(times),
            }
        plain = number(row, "unprofiled_s")
        slow = number(row, "profiled_s")
        return row | {
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
        plain, slow = (number(self.row, f"{name}_s") for name in ("unprofiled", "profiled"))
        if self.trace is None or not plain or not slow or slow / plain < _SIGNIFICANT:
            return 0.0
        return slow - plain


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
    table = Table([rank.row for rank in timed[:_MAX_SHOWN]])
    yield from (f"  {line}" for line in table.text(_COLUMNS))
    if len(timed) > _MAX_SHOWN:
        yield f"  ... and {len(timed) - _MAX_SHOWN} more; --json or --csv has all"
    start = max((rank.start_s for rank in timed if rank.start_s is not None), default=None)
    write = max((rank.write_s for rank in timed if rank.write_s is not None), default=None)
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


def _ratio(row: Row) -> str:
    ratio = RATIO.show(row["ratio"]) if row["is_profiled"] else ""
    return f"{ratio}, ranges overlap" if ratio and row["ranges_overlap"] else ratio


def _times(row: Row, name: str) -> str:
    middle, low, high = (number(row, f"{name}_{part}") for part in ("s", "min_s", "max_s"))
    if middle is None or low is None or high is None:
        return "unknown"
    span = f"{format_time(low)} to {format_time(high)}"
    return f"{format_time(middle)} ({span}, {row[f'{name}_steps']})"


_COLUMNS = (
    given("rank"),
    given("unprofiled_s", heading="unprofiled", words=partial(_times, name="unprofiled")),
    given(
        "profiled_s",
        heading="profiled",
        words=lambda row: _times(row, "profiled") if row["is_profiled"] else "-",
    ),
    given("ratio", heading="profiled/unprofiled", words=_ratio),
)


def job_lines(ranks: Sequence[WatchedRank], exit_code: int = 0) -> Iterator[str]:
    """Yield what the job was, which ranks were profiled, and why others were not."""
    timed = [rank for rank in ranks if rank.world_size is not None]
    if not ranks and exit_code:
        yield (
            "no process of the job reported torch before it ended (exit code "
            f"{exit_code}); a signal leaves no time to report"
        )
    elif not ranks:
        yield (
            "no process of the job has loaded torch: a container, sudo, python -E or -I may "
            "hide the variables PYTHONPATH and STEPMARK_WATCH from it"
        )
    elif not timed:
        why = dict.fromkeys(rank.reason or "no step" for rank in ranks)
        count = plural(len(ranks), "process")
        yield f"{count} with torch, none with steps: {'; '.join(why)}"
    else:
        size = max(rank.world_size or 1 for rank in timed)
        hosts = plural(len({rank.host for rank in timed}), "host")
        facts = dict.fromkeys(f"torch {rank.torch} on {rank.device}" for rank in timed)
        yield f"{plural(size, 'rank')} on {hosts}; {', '.join(facts)}"
        silent = set(range(size)) - {rank.rank for rank in timed}
        if silent:
            yield f"no step was seen of {ranks_text(silent)}"
        windows = _ranks_by(
            (rank.profiled_steps, rank) for rank in timed if rank.profiled_steps
        )
        for window, members in windows.items():
            yield f"profiled: steps {window[0]} to {window[1]} of {members}"
        if len(windows) > 1:
            yield "the windows differ, so ranks cannot be compared step by step"
        reasons = _ranks_by((rank.reason, rank) for rank in timed if rank.reason)
        for reason, members in reasons.items():
            yield f"not profiled: {members}: {reason}"
    notes = _ranks_by((note, rank) for rank in ranks for note in rank.notes.values())
    for note, members in notes.items():
        yield f"note: {members}: {note}"


def _ranks_by(pairs: Iterable[tuple[T, WatchedRank]]) -> dict[T, str]:
    """Return the ranks of each value as text."""
    members: dict[T, list[int]] = {}
    for value, rank in pairs:
        members.setdefault(value, []).append(rank.rank)
    return {value: ranks_text(own) for value, own in members.items()}
