"""Operations of a predicted or replayed step over time: for Perfetto, and as few bars."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from stepmark.step.workload import COMPUTE
from stepmark.tables.columns import Row
from stepmark.timeline.timeline import Span
from stepmark.timeline.trace_timeline import Bar, Timeline

MOST_BARS = 5000
MOST_LANES = 8  # of a figure
_FIRST_PARTS = 20_000  # of the step: what is joined at first


def perfetto(spans: Iterable[Span], lane: str = "stage") -> Row:
    """Return a step in Chrome's trace format, which Perfetto reads.

    Stages (what the lane is called) are processes and streams are threads; kinds of work are
    categories.
    """
    spans = sorted(spans, key=lambda span: span.start_ns)
    streams = {(span.stage, span.stream) for span in spans}
    ordered = sorted(streams, key=lambda each: (each[0], each[1] != COMPUTE, each[1]))
    threads = {each: number for number, each in enumerate(ordered, 1)}
    events: list[Row] = [
        {"ph": "M", "name": name, "pid": stage, "tid": thread, "args": {"name": value}}
        for (stage, stream), thread in threads.items()
        for name, value in (("process_name", f"{lane} {stage}"), ("thread_name", stream))
    ]
    for span in spans:
        thread = threads[span.stage, span.stream]
        numbers = {"layer": span.layer, "microbatch": span.microbatch}
        events.append(
            {
                "ph": "X",
                "cat": span.kind,
                "name": span.name if span.layer is None else f"{span.name} {span.layer}",
                "pid": span.stage,
                "tid": thread,
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {
                    "module": span.module,
                    "phase": span.phase,
                    **{name: value for name, value in numbers.items() if value is not None},
                },
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def timelines_of(spans: Sequence[Span], step_s: float) -> dict[int, Timeline]:
    """Return a timeline per stage, of few enough bars to draw."""
    end = round(step_s * 1e9)
    by_stage: dict[int, dict[str, list[Span]]] = {}
    for span in sorted(spans, key=attrgetter("start_ns")):
        by_stage.setdefault(span.stage, {}).setdefault(span.stream, []).append(span)
    most = MOST_BARS // min(len(by_stage), MOST_LANES) if by_stage else 0
    timelines = {}
    for stage, by_stream in sorted(by_stage.items()):
        joined, parts = 0, [[span] for own in by_stream.values() for span in own]
        while len(parts) > most:
            joined = 2 * joined or end // _FIRST_PARTS + 1
            parts = [part for own in by_stream.values() for part in _joined(own, joined)]
        bars = tuple(map(_bar, parts))
        timelines[stage] = Timeline(step=None, start=0, end=end, joined_ns=joined, bars=bars)
    return timelines


def _joined(spans: Sequence[Span], joined_ns: int) -> Iterator[list[Span]]:
    """Yield spans that are one bar: pauses between them are at most this long, and they are
    of one kind or shorter.
    """
    part: list[Span] = []
    for span in spans:
        if part and (
            span.start_ns - part[-1].end_ns > joined_ns
            or (span.kind != part[-1].kind and max(map(_ns, (span, part[-1]))) > joined_ns)
        ):
            yield part
            part = []
        part.append(span)
    yield part


def _bar(part: Sequence[Span]) -> Bar:
    times: dict[str, int] = {}
    for span in part:
        times[span.kind] = times.get(span.kind, 0) + _ns(span)
    longest = max(part, key=_ns)
    where = {"layer": longest.layer, "micro-batch": longest.microbatch}
    words = [longest.name, longest.module * (longest.module != longest.name), longest.phase]
    words += [f"{name} {value}" for name, value in where.items() if value is not None]
    return Bar(
        stream=longest.stream,
        start=part[0].start_ns,
        end=part[-1].end_ns,
        group=max(times, key=times.__getitem__),
        name=", ".join(filter(None, words)),
        num_events=len(part),
        busy=sum(times.values()),
    )


def _ns(span: Span) -> int:
    return span.end_ns - span.start_ns
