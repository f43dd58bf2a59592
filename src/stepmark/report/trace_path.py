"""Critical paths of steps as rows, in ns, and as text, in ms."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from stepmark.core.columns import Row, aligned
from stepmark.core.critical_path import (
    CATEGORIES,
    COMPUTE,
    GAP,
    HOST,
    PEER,
    UNKNOWN,
    Path,
    Segment,
)
from stepmark.core.kernel_groups import group_of
from stepmark.core.units import ranks_text

DEFINITIONS = (
    "The path goes back from the end of the last GPU event of the step, on the rank that ends "
    "last, to the start of its window (where the step before ends on the GPU). An event waited "
    "for the one before it on its stream, for its launch, or for an event of another stream, "
    "whichever came last; a launch for what the host thread did since it last waited for the "
    "GPU; a collective for the last rank to arrive, on which the path goes on. The parts add "
    "up to the step.",
    "step >=: the least time of the step if all of this took none: the work that remains on "
    "this path, or on one stream. It is a bound and no forecast: where another path becomes "
    "the longest, the step takes more.",
)
_TITLES = {
    PEER: "waiting for a peer",
    HOST: "host (launch-bound)",
    GAP: "gaps between events",
    UNKNOWN: "before the events",
}
_MOST_NAMES = 6
_NAME = 72
_WIDTH = 100


def tables(paths: Sequence[Path]) -> dict[str, list[Row]]:
    """Return a row per path, rows by category and by name, and all segments."""
    return {
        "paths": [
            {
                "step": path.step,
                "rank": path.rank,
                "start_ns": path.window[0],
                "end_ns": path.window[1],
                "maybe_waiting_ns": path.unmatched,
                "absent_ranks": path.absent,
                "ranks_without_clock": path.without_clocks,
            }
            for path in paths
        ],
        "categories": [row for path in paths for row in _categories(path)],
        "names": [row for path in paths for row in _names(path)],
        "segments": [
            {
                "step": path.step,
                "rank": segment.rank,
                "start_ns": segment.start,
                "end_ns": segment.end,
                "category": segment.category,
                "name": segment.name,
                "is_inferred": segment.is_inferred,
            }
            for path in paths
            for segment in path.segments
        ],
    }


def _categories(path: Path) -> Iterator[Row]:
    window = path.window[1] - path.window[0]
    for category in CATEGORIES:
        parts = [segment for segment in path.segments if segment.category == category]
        time = _time(parts)
        if time:
            yield {
                "step": path.step,
                "category": category,
                "time_ns": time,
                "share_pct": 100 * time / window,
                "inferred_ns": _time([part for part in parts if part.is_inferred]),
                "other_ranks_ns": _time([part for part in parts if part.rank != path.rank]),
                "step_at_least_ns": path.at_least[category],
            }


def _names(path: Path) -> Iterator[Row]:
    times: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for segment in path.segments:
        is_kernel = segment.category == COMPUTE
        name = group_of(segment.name) if is_kernel else segment.name
        times[segment.category, name] += segment.end - segment.start
        counts[segment.category, name] += 1
    for (category, name), time in sorted(times.items(), key=lambda item: -item[1]):
        yield {
            "step": path.step,
            "category": category,
            "name": name,
            "segments": counts[category, name],
            "time_ns": time,
        }


def _time(segments: Sequence[Segment]) -> int:
    return sum(segment.end - segment.start for segment in segments)


def lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the text of the paths."""
    for path in paths:
        window = path.window[1] - path.window[0]
        step = "whole trace" if path.step is None else f"step {path.step}"
        yield f"{step}, rank {path.rank}: {_ms(window)} ms, of which"
        cells = [["", "ms", "%", "step >= ms"]]
        names = list(_names(path))
        rows = list(_categories(path))
        for row in sorted(rows, key=lambda each: -_int(each["time_ns"])):
            title = _TITLES.get(str(row["category"]), str(row["category"]))
            share = f"{row['share_pct']:.1f}"
            cells.append([title, _ms(row["time_ns"]), share, _ms(row["step_at_least_ns"])])
            own = [each for each in names if each["category"] == row["category"]]
            if [each["name"] for each in own] != [row["category"]]:
                cells += [
                    [f"  {str(each['name'])[:_NAME]}", _ms(each["time_ns"]), "", ""]
                    for each in own[:_MOST_NAMES]
                ]
            if rest := own[_MOST_NAMES:]:
                time = sum(_int(each["time_ns"]) for each in rest)
                cells.append([f"  {len(rest)} others", _ms(time), "", ""])
        yield from aligned(cells, [False, True, True, True])
        yield from _remarks(path)
        yield ""
    for definition in DEFINITIONS:
        yield from textwrap.wrap(definition, _WIDTH)


def _remarks(path: Path) -> Iterator[str]:
    by_rank: Counter[int] = Counter()
    for segment in path.segments:
        by_rank[segment.rank] += segment.end - segment.start
    if set(by_rank) != {path.rank}:
        words = ", ".join(f"rank {rank} {_ms(time)} ms" for rank, time in by_rank.most_common())
        yield f"where the path runs: {words}; ranks wait for it in collectives"
    if inferred := _time([part for part in path.segments if part.is_inferred]):
        count = sum(part.is_inferred for part in path.segments)
        yield (
            f"inferred: {count} waits for another stream ({_ms(inferred)} ms of gaps), as the "
            "trace does not tell which event was awaited"
        )
    if path.unmatched:
        yield (
            f"{_ms(path.unmatched)} ms of communication may be waiting for other ranks: their "
            "traces are missing, or do not say which collective it is"
        )
    if path.absent:
        yield f"no trace of {ranks_text(path.absent)}: whether they arrived last is not known"
    if path.without_clocks:
        yield (
            f"clocks of {ranks_text(path.without_clocks)} cannot be compared: the path does "
            "not go on there"
        )


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _ms(nanoseconds: object) -> str:
    return f"{_int(nanoseconds) / 1e6:.3f}"
