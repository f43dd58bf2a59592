"""Critical paths of steps as rows, in ns, and as text, in ms."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from stepmark.ground.grouping import group_by
from stepmark.ground.units import ranks_text
from stepmark.model.kernel_groups import group_of
from stepmark.tables.columns import MS, NO_HEADING, PERCENT, Row, given, known, text
from stepmark.tables.table import Table
from stepmark.timeline.critical_path import (
    CATEGORIES,
    COMMUNICATION,
    COMPUTE,
    GAP,
    HOST,
    PEER,
    UNKNOWN,
    Path,
    Segment,
)

DEFINITIONS = (
    "The path goes back from the end of the last GPU event of the step, on the rank that ends "
    "last (clocks of ranks are set by the ends of common collectives), to the start of its "
    "window (where the step before ends on the GPU). An event waited for the one before it on "
    "its stream, for its launch, or for an event of another stream, whichever came last; a "
    "launch for what the host thread did since it last waited for the GPU; a collective for "
    "the last rank to arrive, on which the path goes on. The parts add up to the step.",
    "launch path on the host: the path runs through what the host did before a launch. It "
    "counts all of the host's time on the path, also while the GPU was busy with earlier work; "
    "host-bound in a breakdown counts only time in which the GPU was idle.",
    "step >=: the least time of the step if all of this took none: the work that remains on "
    "this path, or on one stream. It is a bound and no forecast: where another path becomes "
    "the longest, the step takes more. Communication that may be waiting counts as 0 in it "
    "(bound_without_ns).",
)
_TITLES = {
    PEER: "waiting for a peer",
    HOST: "launch path on the host",
    GAP: "gaps between events",
    UNKNOWN: "before the events",
}
_SEGMENT = ("rank", "start_ns", "end_ns", "category", "name", "is_inferred")
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
            {"step": path.step} | dict(zip(_SEGMENT, segment, strict=True))
            for path in paths
            for segment in path.segments
        ],
    }


def _categories(path: Path) -> Iterator[Row]:
    window = path.window[1] - path.window[0]
    for category in CATEGORIES:
        parts = [segment for segment in path.segments if segment.category == category]
        if time := _time(parts):
            yield {
                "step": path.step,
                "category": category,
                "time_ns": time,
                "share_pct": 100 * time / window,
                "inferred_ns": _time(part for part in parts if part.is_inferred),
                "other_ranks_ns": _time(part for part in parts if part.rank != path.rank),
                "step_at_least_ns": path.at_least[category],
                "bound_without_ns": path.uncounted if category != COMMUNICATION else 0,
            }


def _names(path: Path) -> Iterator[Row]:
    parts = group_by(path.segments, _category_and_name)
    for (category, name), own in sorted(parts.items(), key=lambda item: -_time(item[1])):
        yield {
            "step": path.step,
            "category": category,
            "name": name,
            "segments": len(own),
            "time_ns": _time(own),
        }


def _category_and_name(segment: Segment) -> tuple[str, str]:
    name = group_of(segment.name) if segment.category == COMPUTE else segment.name
    return segment.category, name


def _time(segments: Iterable[Segment]) -> int:
    return sum(segment.time for segment in segments)


def _bound_words(row: Row) -> str:
    """Return the least time of a step without a category; * where waiting may be part of it."""
    if "step_at_least_ns" not in row:
        return ""
    mark = " *" if row["bound_without_ns"] else ""
    return f"{MS.show(row['step_at_least_ns'])}{mark}"


_COLUMNS = (
    given("what", heading=NO_HEADING),
    given("time_ns", MS, "ms"),
    given("share_pct", PERCENT, "%"),
    given("step_at_least_ns", MS, "step >= ms", _bound_words),
)


def _show_path(path: Path) -> Iterator[Row]:
    """Yield each category, the longest first, with its longest names."""
    names = list(_names(path))
    for row in sorted(_categories(path), key=lambda each: -known(each, "time_ns")):
        category = text(row, "category")
        yield row | {"what": _TITLES.get(category, category)}
        own = [each for each in names if each["category"] == category]
        if len(own) > 1 or own[0]["name"] != category:
            for each in own[:_MOST_NAMES]:
                yield {"what": f"  {text(each, 'name')[:_NAME]}", "time_ns": each["time_ns"]}
        if rest := own[_MOST_NAMES:]:
            yield {
                "what": f"  {len(rest)} others",
                "time_ns": sum(known(each, "time_ns") for each in rest),
            }


def lines(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the text of the paths."""
    for path in paths:
        step = "whole trace" if path.step is None else f"step {path.step}"
        yield f"{step}, rank {path.rank}: {MS.show(_time(path.segments))} ms, of which"
        yield from Table(list(_show_path(path)), _COLUMNS).text()
        yield from _remarks(path)
        yield ""
    for definition in DEFINITIONS:
        yield from textwrap.wrap(definition, _WIDTH)


def _remarks(path: Path) -> Iterator[str]:
    by_rank: Counter[int] = Counter()
    for segment in path.segments:
        by_rank[segment.rank] += segment.time
    if set(by_rank) != {path.rank}:
        words = ", ".join(
            f"rank {rank} {MS.show(time)} ms" for rank, time in by_rank.most_common()
        )
        yield f"where the path runs: {words}; ranks wait for it in collectives"
    if inferred := [part for part in path.segments if part.is_inferred]:
        yield (
            f"inferred: {len(inferred)} waits for another stream "
            f"({MS.show(_time(inferred))} ms of gaps), as the trace does not tell which event "
            "was awaited"
        )
    if path.uncounted or path.unmatched:
        yield (
            f"* {MS.show(path.unmatched)} ms of communication on this path, and "
            f"{MS.show(path.uncounted)} ms of rank {path.rank} on and beside it, may be "
            "waiting for other ranks: their traces are missing, or do not say which collective "
            "it is. It counts as 0 in these bounds"
        )
    if path.absent:
        yield f"no trace of {ranks_text(path.absent)}: whether they arrived last is not known"
    if path.without_clocks:
        yield (
            f"clocks of {ranks_text(path.without_clocks)} cannot be compared: the path does "
            "not go on there"
        )
