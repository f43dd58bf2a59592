"""Traces for other tools: cut down to some steps, or as tables of integer nanoseconds."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from stepmark.ground.errors import ConfigError
from stepmark.timeline.trace_columns import NONE, GpuKind, Ints, RankTrace
from stepmark.traces.kineto.event_tables import TABLES
from stepmark.traces.kineto.events import Event
from stepmark.traces.kineto.links import gpu_comms, launches, span_of, steps
from stepmark.traces.kineto.stream import EventStream
from stepmark.traces.kineto.windows import gpu_windows
from stepmark.traces.trace_options import TraceInputs

_STEP = "ProfilerStep#"
_ROWS = 1 << 16  # of a piece of a table
# Columns of numbers that are looked up.
_WHOLE = ("step", "device", "in_elements", "out_elements", "group_size")


class _CopiedEvent(Event, gc=False):
    id: int | str | None = None  # of flows


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The steps of one process that are kept, and the window in which the GPU ran them.

    correlations: of the GPU events in the window; calls: starts of the calls that launched
    them, ascending; base: what the file's times are counted from.
    """

    base: int
    names: frozenset[str]
    host: tuple[int, int]
    gpu: tuple[int, int]
    correlations: frozenset[int]
    calls: Sequence[int]

    def keeps(self, event: _CopiedEvent) -> bool:
        """Return whether an event belongs to the steps, or runs on the GPU in their window."""
        if event.ph == "M" or event.ts is None:
            return event.ph == "M"
        if event.name.startswith(_STEP):
            return event.name in self.names
        if event.cat in ("ac2g", "async_cpu_to_gpu", "async_gpu"):
            return event.id in self.correlations
        table = TABLES.get(event.cat)
        correlation = event.args.correlation if event.args else None
        if table in ("gpu", "calls") and correlation in self.correlations:
            return True
        start = self.base + _nanoseconds(event.ts)
        end = start + _nanoseconds(max(event.dur or 0, 0))
        is_gpu = table == "gpu" or event.cat.startswith(("gpu_", "cuda_sync", "cuda_event"))
        window = self.gpu if is_gpu else self.host
        launched = bisect_left(self.calls, start) < bisect_right(self.calls, end)
        return (start <= window[1] and end >= window[0]) or (launched and not is_gpu)


def _nanoseconds(micros: float) -> int:
    """Return what the reader's columns have for this time."""
    whole = math.floor(micros)
    return whole * 1000 + round((micros - whole) * 1000)


def select(trace: RankTrace, inputs: TraceInputs) -> Selection | None:
    """Return the selection of --steps, None without. Raises ConfigError for no such steps.

    The window on the GPU begins where the step before ends there, so that the steps' idle time
    and what runs beside them are those of the whole trace.
    """
    if inputs.steps is None:
        return None
    marked = steps(trace)
    rows = chosen_steps(trace, inputs)
    if rows[-1] - rows[0] + 1 != len(rows):
        allowed = "consecutive steps: the time between others would belong to none"
        raise ConfigError("steps", ",".join(str(marked.numbers[row]) for row in rows), allowed)
    gpu = trace.gpu
    is_own = np.isin(marked.of_gpu, rows)
    windows = gpu_windows(trace, marked)
    window = int(windows.start[rows[0]]), int(windows.end[rows[-1]])
    is_kept = is_own | ((gpu.start <= window[1]) & (gpu.end >= window[0]))
    call = launches(trace)[is_kept]
    return Selection(
        base=trace.info.base_ns,
        names=frozenset(f"{_STEP}{marked.numbers[row]}" for row in rows),
        host=(int(marked.start[rows[0]]), int(marked.end[rows[-1]])),
        gpu=window,
        correlations=frozenset(gpu.correlation[is_kept].tolist()) - {NONE},
        calls=np.sort(trace.calls.start[call[call != NONE]]).tolist(),
    )


def chosen_steps(trace: RankTrace, inputs: TraceInputs) -> list[int]:
    """Return the indices of the steps of --steps. Raises ConfigError where there are none."""
    marked = steps(trace)
    inputs.check_steps(marked.numbers, () if marked.is_marked else (trace.info.file,))
    return [row for row, number in enumerate(marked.numbers) if inputs.has_step(number)]


def busy_steps(trace: RankTrace, inputs: TraceInputs) -> dict[int, tuple[int, int]]:
    """Return the window of each chosen step that has GPU events, by index."""
    start, end = gpu_windows(trace, steps(trace))
    rows = (row for row in chosen_steps(trace, inputs) if end[row] > start[row])
    return {row: (int(start[row]), int(end[row])) for row in rows}


def trimmed(path: Path, selection: Selection | None) -> Iterator[bytes]:
    """Yield the text of a trace with the selected events alone, each as it stands in the file.

    Header and tail stay. The events of a file that is cut short are those before the cut.
    """
    stream = EventStream(path, msgspec.Raw)
    decode = msgspec.json.Decoder(_CopiedEvent, strict=False).decode
    separator = b"\n"
    for number, texts in enumerate(stream):
        if not number:
            yield stream.head
        pieces = []
        for text in texts:
            try:
                event = decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # the reader leaves it out, too
            if selection is None or selection.keeps(event):
                pieces.append(bytes(text))
        if pieces:
            yield separator + b",\n".join(pieces)
            separator = b",\n"
    yield b"\n]" + (stream.tail or (b"}" if stream.head[:1] == b"{" else b""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTable:
    """A table of a trace. types: SQL types by column; pieces: columns of some rows each."""

    name: str
    types: Mapping[str, str]
    pieces: Iterator[Sequence[Sequence[object]]]


Column = tuple["Ints", Sequence[object] | None]  # values, or indices into texts


def tables(trace: RankTrace, rank: int, inputs: TraceInputs) -> Iterator[ExportedTable]:
    """Yield GPU events, calls, ops and messages; times are nanoseconds since 1970.

    step: that launched a GPU event, or in which a call, op or message starts.
    """
    marked = steps(trace)
    chosen = chosen_steps(trace, inputs)
    for name, more in _columns(trace).items():
        table = getattr(trace, name)
        step = marked.of_gpu
        if name != "gpu":
            step = span_of(marked.start, marked.end, table.start)
        columns: dict[str, Column] = {
            "rank": (np.full(step.size, rank), None),
            "step": (step, marked.numbers),
            "start_ns": (table.start, None),
            "end_ns": (table.end, None),
            **more,
        }
        is_kept = np.isin(step, chosen) | (inputs.steps is None)
        yield ExportedTable(
            name=name,
            types={
                key: "BIGINT" if texts is None or key in _WHOLE else "VARCHAR"
                for key, (_, texts) in columns.items()
            },
            pieces=_pieces(list(columns.values()), np.flatnonzero(is_kept)),
        )


def _columns(trace: RankTrace) -> dict[str, dict[str, Column]]:
    """Return the columns of each table that other tables lack."""
    gpu = trace.gpu
    calls = trace.calls
    ops = trace.ops
    comms = trace.comms

    def of_thread(thread: Ints) -> dict[str, Column]:
        processes, threads = ([each[part] for each in trace.threads] for part in (0, 1))
        return {"process": (thread, processes), "thread": (thread, threads)}

    def of_message(args: Ints, seq: Ints) -> dict[str, Column]:
        known = trace.comm_args
        return {
            "collective": (args, [each.collective for each in known]),
            "dtype": (args, [each.dtype for each in known]),
            "in_elements": (args, [each.in_elements for each in known]),
            "out_elements": (args, [each.out_elements for each in known]),
            "group_name": (args, [each.group for each in known]),
            "group_size": (args, [each.group_size for each in known]),
            "seq": (seq, None),
        }

    return {
        "gpu": {
            "name": (gpu.name, trace.names),
            "kind": (gpu.kind, [kind.name.lower() for kind in GpuKind]),
            "device": (gpu.stream, [device for device, _ in trace.streams]),
            "stream": (gpu.stream, [stream for _, stream in trace.streams]),
            "launch_ns": (np.append(calls.start, NONE)[launches(trace)], None),
            "correlation": (gpu.correlation, None),
            "external_id": (gpu.external, None),
            "num_bytes": (gpu.num_bytes, None),
            **of_message(*gpu_comms(trace)),
        },
        "calls": {
            "name": (calls.name, trace.names),
            **of_thread(calls.thread),
            "correlation": (calls.correlation, None),
            "external_id": (calls.external, None),
        },
        "ops": {
            "name": (ops.name, trace.names),
            **of_thread(ops.thread),
            "external_id": (ops.external, None),
            "sequence": (ops.sequence, None),
            "forward_thread": (ops.forward_thread, None),
            "shapes": (ops.shapes, trace.shapes),
        },
        "comms": {
            **of_thread(comms.thread),
            "external_id": (comms.external, None),
            **of_message(comms.comm, comms.seq),
        },
    }


def _pieces(columns: Sequence[Column], rows: Ints) -> Iterator[list[list[object]]]:
    for first in range(0, rows.size, _ROWS):
        piece = rows[first : first + _ROWS]
        yield [
            [
                None if at == NONE else texts[at] if texts else at
                for at in values[piece].tolist()
            ]
            for values, texts in columns
        ]
