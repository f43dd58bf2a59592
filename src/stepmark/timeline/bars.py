"""A timeline in few enough bars to draw."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepmark.timeline.timeline import Span, Timeline
from stepmark.timeline.trace_columns import Ints

MOST_BARS = 5000
MOST_LANES = 8  # of a figure
_FIRST_PARTS = 20_000  # of the window: what is joined at first


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The window of a step on one rank. joined_ns: shorter pauses are inside bars."""

    step: int | None  # None: the trace has no marks of steps
    start: int
    end: int
    joined_ns: int
    bars: tuple[Bar, ...]


def bars(timeline: Timeline, most: int | None = None) -> dict[int, Bars]:
    """Return the bars of each rank. most: of one; None: as many as a figure has place for.

    Spans of a stream are joined over short pauses, if they are of one kind or shorter than
    these. The more spans there are, the longer is a short pause.
    """
    ranks = np.asarray(timeline.columns["rank"])
    numbers = np.unique(ranks)
    most = most or MOST_BARS // min(max(1, numbers.size), MOST_LANES)
    return {
        number: _of_rank(timeline, np.flatnonzero(ranks == number), most)
        for number in numbers.tolist()
    }


def _of_rank(timeline: Timeline, rows: Ints, most: int) -> Bars:
    stream, start, end, kind = (
        np.asarray(timeline.columns[name])[rows]
        for name in ("stream", "start_ns", "end_ns", "kind")
    )
    order = np.lexsort((start, stream))
    rows, stream, start, end, kind = (each[order] for each in (rows, stream, start, end, kind))
    took = end - start
    texts = list(timeline.texts)
    (first_ns, last_ns), joined, begins = timeline.window, 0, np.arange(rows.size)
    while begins.size > most:
        joined = 2 * joined or (last_ns - first_ns) // _FIRST_PARTS + 1
        is_long = took > joined
        is_new = (start[1:] - end[:-1] > joined) | (stream[1:] != stream[:-1])
        is_new |= (kind[1:] != kind[:-1]) & (is_long[1:] | is_long[:-1])
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
        step=timeline.step, start=first_ns, end=last_ns, joined_ns=joined, bars=tuple(found)
    )


def _words(span: Span) -> str:
    where = {"layer": span.layer, "micro-batch": span.microbatch}
    words = [span.name, span.module if span.module != span.name else "", span.phase]
    words += [f"{name} {value}" for name, value in where.items() if value is not None]
    return ", ".join(filter(None, words))
