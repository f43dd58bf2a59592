"""What runs in a step, and when: predicted, scheduled, replayed or profiled, in columns.

One span may stand for several in a row that are left out. A timeline is made when it is asked
for: a step of a large pipeline has millions of spans.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from stepmark.step.workload import COMPUTE
from stepmark.tables.columns import Row

LEFT_OUT = "left out"
_NONE = -1  # in columns of _NUMBERS: there is none
_NUMBERS = ("layer", "microbatch")


class Span(NamedTuple):
    """Work on a stream of a rank. Spans of one stream do not overlap.

    rank: in a pipeline that was predicted or scheduled, the stage. kind: of Work, or a group
    of kernels; COMMUNICATION; WAITING, of a call of communication; a pass; or LEFT_OUT:
    repetitions that were not simulated one by one. name: of the module, collective or kernel.
    """

    rank: int
    stream: str  # COMPUTE, or a stream of communication
    kind: str
    name: str
    start_ns: int
    end_ns: int
    module: str = ""
    phase: str = ""
    layer: int | None = None
    microbatch: int | None = None
    repeats: int = 1

    @property
    def time_ns(self) -> int:
        """Return how long it runs."""
        return self.end_ns - self.start_ns


_TEXTS = ("stream", "kind", "name", "module", "phase")  # numbers of Timeline.texts


class Timeline:
    """Spans in columns of one length, which numpy reads as they are.

    window: start and end; of a schedule, times are units. step: its number in a trace. columns:
    by the field of Span. texts: with their numbers.
    """

    def __init__(
        self, spans: Iterable[Span], window: tuple[int, int], step: int | None = None
    ) -> None:
        """Keep these spans, one after the other."""
        self.window = window
        self.step = step
        self.texts: dict[str, int] = {}
        self.columns = {name: array("q") for name in Span._fields}
        columns = tuple(self.columns.values())
        for span in spans:
            for column, value in zip(columns, span, strict=True):
                number = _NONE if value is None else value
                if isinstance(number, str):
                    number = self.texts.setdefault(number, len(self.texts))
                column.append(number)

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __iter__(self) -> Iterator[Span]:
        return self.spans(range(len(self)))

    def spans(self, places: Iterable[int]) -> Iterator[Span]:
        """Yield the spans at these places."""
        texts = list(self.texts)
        for place in places:
            own: dict[str, Any] = {}
            for name, column in self.columns.items():
                value = column[place]
                own[name] = texts[value] if name in _TEXTS else value
            numbers = {name: None for name in _NUMBERS if own[name] == _NONE}
            yield Span(**own | numbers)

    def perfetto(self, lane: str = "stage") -> Row:
        """Return the step in Chrome's trace format, which Perfetto reads.

        Stages (what the lane is called) are processes and streams are threads; kinds of work
        are categories.
        """
        spans = sorted(self, key=lambda span: span.start_ns)
        streams = {(span.rank, span.stream) for span in spans}
        ordered = sorted(streams, key=lambda each: (each[0], each[1] != COMPUTE, each[1]))
        threads = {each: number for number, each in enumerate(ordered, 1)}
        events: list[Row] = [
            {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": value}}
            for (rank, stream), thread in threads.items()
            for name, value in (("process_name", f"{lane} {rank}"), ("thread_name", stream))
        ]
        for span in spans:
            numbers = {"layer": span.layer, "microbatch": span.microbatch}
            events.append(
                {
                    "ph": "X",
                    "cat": span.kind,
                    "name": span.name if span.layer is None else f"{span.name} {span.layer}",
                    "pid": span.rank,
                    "tid": threads[span.rank, span.stream],
                    "ts": span.start_ns / 1e3,
                    "dur": span.time_ns / 1e3,
                    "args": {
                        "module": span.module,
                        "phase": span.phase,
                        **{name: n for name, n in numbers.items() if n is not None},
                    },
                }
            )
        return {"displayTimeUnit": "ms", "traceEvents": events}
