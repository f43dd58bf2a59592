"""Sort the events of a trace into tables, in columns of integers."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from stepmark.timeline.trace_columns import NONE, Flags, GpuKind, Ints
from stepmark.traces.kineto.events import Args, Event, comm_args_of
from stepmark.traces.kineto.gloo import OPERATOR, WORK, args_of, gloo_calls, signature

# Above this a double has no room for nanoseconds; such times are absolute, of torch < 2.4.
_EXACT_US = 2.0**43
_MAX_US = 2.0**61 / 1000
_MAX_DURATION_US = 86_400e6  # a day; sums over 100,000 of them have room in 63 bits
_KINDS = {
    "kernel": GpuKind.KERNEL,
    "Kernel": GpuKind.KERNEL,
    "gpu_memcpy": GpuKind.MEMCPY,
    "Memcpy": GpuKind.MEMCPY,
    "gpu_memset": GpuKind.MEMSET,
    "Memset": GpuKind.MEMSET,
}
TABLES = {
    "cuda_runtime": "calls",
    "cuda_driver": "calls",
    "Runtime": "calls",
    "cpu_op": "ops",
    "Operator": "ops",
    "user_annotation": "spans",
    "cuda_sync": "syncs",
    **dict.fromkeys(_KINDS, "gpu"),
}
# Of MTIA, XPU, HPU and others: their work is not read, and the trace says so.
_OTHER_DEVICES = re.compile(r"^(?:mtia|xpu|hpu|privateuse1)_(?!runtime|driver)|^hpu_op$")
# Copies that ROCm calls kernels (7.1: every one of them).
_ROCM_COPIES = {"__amd_rocclr_copy": GpuKind.MEMCPY, "MEMORY_COPY_": GpuKind.MEMCPY}
_ROCM_COPIES["__amd_rocclr_fill"] = GpuKind.MEMSET
_COMM = "record_param_comms"
STACK = "nn.Module: "
_MARKER = "Marker"  # PyTorch-ROCm before 2.1.2: not work of the GPU
# Operations whose shapes say which product or attention of a model they are.
_SHAPED = re.compile(
    r"aten::(?:b?mm|addmm|baddbmm|_scaled_mm|_scaled_grouped_mm|_grouped_mm|linear|embedding"
    r"|_?scaled_dot_product_\w+|_flash_attention_\w+|\w*layer_norm\w*|\w*rms_norm\w*"
    r"|_log_softmax|nll_loss\w*)$|flash_attn|^(?:Fused|flash)"
)
_NO_ARGS = Args()


class _Ids(dict[Any, int]):
    """Numbers of values in the order in which they are seen."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class EventTables:
    """Columns of a file's events, in pieces."""

    def __init__(self) -> None:
        self.names, self.threads, self.streams = _Ids(), _Ids(), _Ids()
        self.comm_args, self.shapes = _Ids(), _Ids()
        self.columns: dict[str, list[list[Ints]]] = {}
        self.damage: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.num_events = 0
        self.has_phases = False  # whether any has a `ph`, as all events of a trace do
        self.ranks: Counter[int] = Counter()
        self._comms: dict[tuple[Any, ...], int] = {}
        self._gloo: list[list[Ints]] = []
        self._signatures = _Ids()

    def add(self, events: Sequence[Event]) -> None:
        """Sort events into tables."""
        self.num_events += len(events)
        self.has_phases = self.has_phases or any(event.ph for event in events)
        by_cat: dict[str, list[Event]] = {}
        for event in events:
            try:
                by_cat[event.cat].append(event)
            except KeyError:
                by_cat[event.cat] = [event]
        tables: dict[str, list[Event]] = {}
        for cat, rows in by_cat.items():
            if _OTHER_DEVICES.search(cat):
                self.damage["other-device"] += len(rows)
                self.examples.setdefault("other-device", cat)
            if table := TABLES.get(cat):
                tables.setdefault(table, []).extend(rows)
                if table == "gpu" and any(event.name == _MARKER for event in rows):
                    tables[table] = self._without_markers(tables[table])
            elif cat == "python_function":
                modules = [event for event in rows if event.name.startswith(STACK)]
                tables.setdefault("spans", []).extend(modules)
        for table, candidates in tables.items():
            if rows := self._valid(candidates):
                self.columns.setdefault(table, []).append(getattr(self, f"_{table}")(rows))
                if table == "ops" and (comms := [e for e in rows if e.name == _COMM]):
                    self.columns.setdefault("comms", []).append(self._comm_calls(comms))
                prefix = {"ops": OPERATOR, "spans": WORK}.get(table)
                if prefix and (own := [e for e in rows if e.name.startswith(prefix)]):
                    self._gloo.append(self._gloo_events(own))

    def _valid(self, events: list[Event]) -> list[Event]:
        """Return events with a duration, at a possible time; count the others."""
        rows = [event for event in events if event.ph == "X"]
        start = np.array([event.ts for event in rows], np.float64)
        duration = np.array([event.dur for event in rows], np.float64)
        is_valid = (abs(start) < _MAX_US) & (duration >= 0) & (duration < _MAX_DURATION_US)
        if is_valid.all():
            return rows
        for event, valid, span in zip(rows, is_valid, duration, strict=True):
            if not valid and (event.ts is None or event.dur is None):
                self._count("no-time", event)
            elif not valid:
                self._count("negative-duration" if span < 0 else "time-out-of-range", event)
        return list(itertools.compress(rows, is_valid))

    def _without_markers(self, rows: Sequence[Event]) -> list[Event]:
        for event in rows:
            if event.name == _MARKER:
                self._count("marker", event)
        return [event for event in rows if event.name != _MARKER]

    def _count(self, kind: str, event: Event) -> None:
        self.damage[kind] += 1
        self.examples.setdefault(kind, f"{event.cat} {event.name[:80]!r} at {event.ts}")

    def _times(self, rows: Sequence[Event]) -> list[Ints]:
        start = _nanoseconds([event.ts for event in rows])
        if start.size and abs(start).max() > _EXACT_US * 1000 and not self.damage["rounded"]:
            self.damage["rounded"] += any(event.ts % 1 for event in rows if event.ts)
        return [start, start + _nanoseconds([event.dur for event in rows])]

    def _intern_names(self, rows: Sequence[Event]) -> list[Ints]:
        names = self.names
        return [*self._times(rows), _ints([names[event.name] for event in rows])]

    def _on_thread(self, rows: Sequence[Event]) -> list[Ints]:
        threads = self.threads
        return [
            *self._intern_names(rows),
            _ints([threads[event.pid, event.tid] for event in rows]),
        ]

    _spans = _on_thread

    def _calls(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        return [
            *self._on_thread(rows),
            _ids([each.correlation for each in args]),
            _externals(args),
        ]

    def _ops(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        columns = self._on_thread(rows)
        shapes = [NONE] * len(rows)
        for number, (event, each) in enumerate(zip(rows, args, strict=True)):
            if each.input_dims and _SHAPED.search(event.name):
                key = (each.input_dims, each.input_types, each.input_strides)
                shapes[number] = self.shapes[tuple(map(bytes, key))]
        return [
            *columns,
            _externals(args),
            _ids([each.sequence for each in args]),
            _ids([each.forward_thread for each in args]),
            _ints(shapes),
        ]

    def _gpu(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        kinds: list[int] = [_KINDS[event.cat] for event in rows]
        for number, event in enumerate(rows):
            if event.name.startswith(tuple(_ROCM_COPIES)):
                prefix = next(key for key in _ROCM_COPIES if event.name.startswith(key))
                kinds[number] = _ROCM_COPIES[prefix]
        bytes_moved = [
            each.num_bytes if each.num_bytes is not None else each.old_num_bytes
            for each in args
        ]
        return [
            *self._intern_names(rows),
            _ints(kinds),
            self._stream_ids(rows, args),
            _ids([each.correlation for each in args]),
            _externals(args),
            _ids(bytes_moved),
            self._comm_ids(args),
            _ids([each.seq for each in args]),
        ]

    def _syncs(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        devices = [
            event.pid if each.device is None else each.device
            for event, each in zip(rows, args, strict=True)
        ]
        awaited = [each.awaited for each in args]
        return [
            *self._intern_names(rows),
            self._stream_ids(rows, args),
            _ids([each.correlation for each in args]),
            _ints([self.streams[key] for key in zip(devices, awaited, strict=True)]),
            _ids([each.recorded for each in args]),
        ]

    def _comm_calls(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        # Of sends and receives it is the peer's.
        own = [each for each in args if each.collective not in ("send", "recv")]
        self.ranks.update(each.rank for each in own if each.rank is not None)
        columns = self._on_thread(rows)
        return [
            *(columns[0], columns[1], columns[3]),
            _externals(args),
            self._comm_ids(args),
            _ids([each.seq for each in args]),
            *[np.full(len(rows), NONE, np.int64)] * 2,
        ]

    def _gloo_events(self, rows: Sequence[Event]) -> list[Ints]:
        args = _args(rows)
        start, end, _, thread = self._on_thread(rows)
        signatures = self._signatures
        pairs = zip(rows, args, strict=True)
        numbers = [signatures[signature(event.name, each)] for event, each in pairs]
        return [start, end, thread, _externals(args), _ints(numbers)]

    def add_gloo(self) -> None:
        """Add calls that torch does not record as record_param_comms, once all is read."""
        if not self._gloo:
            return
        columns = [np.concatenate(pieces) for pieces in zip(*self._gloo, strict=True)]
        self._gloo.clear()
        order = np.lexsort((columns[1], columns[0]))
        order = order[~self._is_recorded(*(column[order] for column in columns[:3]))]
        start, end, thread, external, number = (column[order] for column in columns)
        signatures = list(self._signatures)
        size = len(signatures) + 1
        for rows, work in gloo_calls((start, end), thread, signatures, number):
            has_work = work != NONE
            pair = number[rows] * np.int64(size) + np.where(has_work, number[work] + 1, 0)
            pairs, index = np.unique(pair, return_inverse=True)
            args = [
                args_of(signatures[key // size], [None, *signatures][key % size])
                for key in pairs.tolist()
            ]
            self.columns.setdefault("comms", []).append(
                [
                    *(column[rows] for column in (start, end, thread, external)),
                    _ints([self.comm_args[each] for each in args])[index],
                    np.full(rows.size, NONE, np.int32),
                    *(np.where(has_work, times[work], NONE) for times in (start, end)),
                ]
            )

    def _is_recorded(self, start: Ints, end: Ints, thread: Ints) -> Flags:
        """Return whether a record_param_comms begins within each event, on its thread."""
        result = np.zeros(start.size, bool)
        pieces = self.columns.get("comms", [])
        starts, threads = (
            np.concatenate([EMPTY, *(piece[place][piece[4] != NONE] for piece in pieces)])
            for place in (0, 2)
        )
        for number in np.unique(threads):
            own = np.sort(starts[threads == number])
            has_recorded = np.searchsorted(own, start) < np.searchsorted(own, end)
            result |= has_recorded & (thread == number)
        return result

    def _stream_ids(self, rows: Sequence[Event], args: Sequence[Args]) -> Ints:
        streams = self.streams
        return _ints(
            [
                streams[
                    event.pid if each.device is None else each.device,
                    event.tid if each.stream is None else each.stream,
                ]
                for event, each in zip(rows, args, strict=True)
            ]
        )

    def _comm_ids(self, args: Sequence[Args]) -> Ints:
        return _ints([NONE if each.collective is None else self._comm(each) for each in args])

    def _comm(self, args: Args) -> int:
        key = (
            *(args.collective, args.dtype, args.in_elements, args.out_elements),
            *(args.group, args.group_desc, args.group_size, str(args.group_ranks)),
            *(str(args.in_splits), str(args.out_splits), args.source, args.target),
        )
        number = self._comms.get(key)
        if number is None:
            number = self._comms[key] = self.comm_args[comm_args_of(args)]
        return number


_NARROW = 2**31
EMPTY: Ints = np.empty(0, np.int64)


def _args(rows: Sequence[Event]) -> list[Args]:
    return [event.args or _NO_ARGS for event in rows]


def _ints(values: Sequence[int]) -> Ints:
    """Return a column in 4 bytes a row where that is enough, as for most ids."""
    return narrow(np.array(values, np.int64))


def narrow(column: Ints) -> Ints:
    """Return a column in 4 bytes a row where that is enough."""
    if column.size and column.min() >= -_NARROW and column.max() < _NARROW:
        return column.astype(np.int32)
    return column


def _ids(values: Sequence[int | None]) -> Ints:
    """Return ids; what is absent or needs more than 63 bits is NONE."""
    try:
        return _ints([NONE if value is None else value for value in values])
    except OverflowError:
        return _ints(
            [NONE if value is None or abs(value) >= 2**63 else value for value in values]
        )


def _externals(args: Sequence[Args]) -> Ints:
    return _ids(
        [
            each.external_id if each.external_id is not None else each.old_external_id
            for each in args
        ]
    )


def _nanoseconds(micros: Sequence[float | None]) -> Ints:
    """Return exact nanoseconds of times with three decimals, below 2**43 us."""
    values = np.array(micros, np.float64)
    whole = np.floor(values)
    thousandths = np.rint((values - whole) * 1000)
    return np.asarray(whole.astype(np.int64) * 1000 + thousandths.astype(np.int64))
