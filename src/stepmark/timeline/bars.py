"""A timeline in few enough bars to draw."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.model.ops import Phase
from stepmark.timeline.ledger import WAITING, Work
from stepmark.timeline.timeline import LEFT_OUT, Span, Timeline
from stepmark.timeline.trace_columns import Ints

MOST_BARS = 5000
MOST_LANES = 8  # of a figure
_FIRST_PARTS = 20_000  # of the window: what is joined at first
# Phases of a prediction and of a replay.
_NOT_BACKWARD = (Phase.FWD, Phase.OPTIM, "forward", Work.OPTIMIZER)
_MARGIN = 8  # of a block: an eighth is shown before and after it
_WHOLE = 0.9  # of the busiest pass of a layer: others are cut by what is left out
_LEAST_STEP = 3  # blocks, of a step that is not shown whole


class Bar(NamedTuple):
    """Spans of one stream that follow one another closely, as one bar.

    group: kind of most of their time; name: of the longest; busy: sum of their times, ns.
    """

    stream: str
    start: int
    end: int
    group: str
    name: str
    num_events: int
    busy: int


class Block(NamedTuple):
    """The time in which a layer is computed once, with some time before and after it."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The window of a step on one rank. joined_ns: shorter pauses are inside bars.

    block: a layer of it, whose events are all apart.
    """

    step: int | None  # None: the trace has no marks of steps
    start: int
    end: int
    joined_ns: int
    bars: tuple[Bar, ...]
    block: Block | None = None


def bars(timeline: Timeline, most: int | None = None) -> dict[int, Bars]:
    """Return the bars of each rank. most: of one; None: as many as a figure has place for.

    Spans of a stream are joined over short pauses, if they are of one kind or shorter than
    these. The more spans there are, the longer is a short pause.
    """
    ranks = np.asarray(timeline.columns["rank"])
    numbers = np.unique(ranks)
    most = most or MOST_BARS // min(max(1, numbers.size), MOST_LANES)
    rows_of = {number: np.flatnonzero(ranks == number) for number in numbers.tolist()}
    block = next((_block(timeline, rows) for rows in rows_of.values()), None)
    return {number: _of_rank(timeline, rows, most, block) for number, rows in rows_of.items()}


def _block(timeline: Timeline, rows: Ints) -> Block | None:
    """Return a backward pass of a layer, a forward one without any; None without layers.

    It is a whole one that nothing interrupts, where few ranks are left out. None, too, of a
    step that is not much longer, which is shown whole.
    """
    layer, microbatch, phase, kind, start, end = (
        np.asarray(timeline.columns[name])[rows]
        for name in ("layer", "microbatch", "phase", "kind", "start_ns", "end_ns")
    )
    is_work = (layer >= 0) & ~np.isin(kind, _numbers(timeline, (COMMUNICATION, WAITING)))
    is_back = is_work & ~np.isin(phase, _numbers(timeline, _NOT_BACKWARD))
    has_back = bool(is_back.any())
    chosen = np.flatnonzero(is_back if has_back else is_work)
    if not chosen.size:
        return None
    chosen = chosen[np.lexsort((microbatch[chosen], layer[chosen]))]
    passes = np.stack((layer[chosen], microbatch[chosen]))
    begins = np.flatnonzero(np.any(np.diff(passes, prepend=-2), axis=0))
    busy = np.add.reduceat(end[chosen] - start[chosen], begins)
    first = np.minimum.reduceat(start[chosen], begins)
    last = np.maximum.reduceat(end[chosen], begins)
    is_cut = busy < _WHOLE * busy.max()
    num_left_out = _num_left_out(timeline, (first + last) // 2)
    best = int(np.lexsort((last - first, num_left_out, is_cut))[0])
    length = int(last[best] - first[best])
    low, high = timeline.window
    if _LEAST_STEP * length > high - low:
        return None
    return Block(
        f"{'the backward pass of ' if has_back else ''}layer {layer[chosen[begins[best]]]}",
        max(low, int(first[best]) - length // _MARGIN),
        min(high, int(last[best]) + length // _MARGIN),
    )


def _num_left_out(timeline: Timeline, times: Ints) -> Ints:
    """Return how many ranks have no events at each time, since repetitions are left out."""
    kind, start, end = (np.asarray(timeline.columns[n]) for n in ("kind", "start_ns", "end_ns"))
    is_left_out = np.isin(kind, _numbers(timeline, (LEFT_OUT,)))
    first, last = start[is_left_out], end[is_left_out]
    num_left_out: Ints = ((times[:, None] >= first) & (times[:, None] < last)).sum(axis=1)
    return num_left_out


def _numbers(timeline: Timeline, texts: Iterable[str]) -> list[int]:
    return [timeline.texts[text] for text in texts if text in timeline.texts]


def _of_rank(timeline: Timeline, rows: Ints, most: int, block: Block | None) -> Bars:
    stream, start, end, kind = (
        np.asarray(timeline.columns[name])[rows]
        for name in ("stream", "start_ns", "end_ns", "kind")
    )
    order = np.lexsort((start, stream))
    rows, stream, start, end, kind = (each[order] for each in (rows, stream, start, end, kind))
    took = end - start
    texts = list(timeline.texts)
    (first_ns, last_ns), joined, begins = timeline.window, 0, np.arange(rows.size)
    is_apart = np.zeros(rows.size, bool)
    if block:
        is_apart = (end > block.start) & (start < block.end)
    if np.count_nonzero(is_apart) > most // 2:
        is_apart[:] = False
    while begins.size > most:
        joined = 2 * joined or (last_ns - first_ns) // _FIRST_PARTS + 1
        is_long = took > joined
        is_new = (start[1:] - end[:-1] > joined) | (stream[1:] != stream[:-1])
        is_new |= (kind[1:] != kind[:-1]) & (is_long[1:] | is_long[:-1])
        is_new |= is_apart[1:] | is_apart[:-1]
        begins = np.flatnonzero(np.concatenate(([True], is_new)))
    found = []
    for low, high in zip(begins.tolist(), [*begins[1:].tolist(), rows.size], strict=True):
        own = took[low:high]
        found.append(
            Bar(
                stream=texts[stream[low]],
                start=max(first_ns, int(start[low])),
                end=min(last_ns, int(end[low:high].max())),
                group=texts[np.bincount(kind[low:high], weights=own).argmax()],
                name=_words(*timeline.spans([int(rows[low + own.argmax()])])),
                num_events=high - low,
                busy=int(own.sum()),
            )
        )
    return Bars(
        step=timeline.step,
        start=first_ns,
        end=last_ns,
        joined_ns=joined,
        bars=tuple(found),
        block=block,
    )


def _words(span: Span) -> str:
    where = {"layer": span.layer, "micro-batch": span.microbatch}
    words = [span.name, span.module if span.module != span.name else "", span.phase]
    words += [f"{name} {value}" for name, value in where.items() if value is not None]
    return ", ".join(filter(None, words))
