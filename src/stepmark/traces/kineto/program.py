"""The program of one step of a process: its messages and computations in issue order.

A computation is the consecutive GPU events of one stream that one operation of torch launched;
its time is the sum of theirs. A message is a call of torch.distributed. Which operation of
another stream one waits for is inferred: the last that ended before it started, where the host
made a stream wait for an event between the launches of its stream (in traces without such
calls: everywhere).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stepmark.cases.message import RECV, SEND
from stepmark.ground import json_text
from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Bmm, Gemm, Layout, Phase
from stepmark.model.ops.fields import MULTIPLIED
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Kernel, Operation, pass_of
from stepmark.timeline.trace_columns import NONE, CommArgs, Ints, RankTrace
from stepmark.traces.kineto.attribution import PHASES, attribute, operation_of
from stepmark.traces.kineto.export import busy_steps
from stepmark.traces.kineto.host_ops import HostOps
from stepmark.traces.kineto.instances import PHASES as COMM_PHASES
from stepmark.traces.kineto.instances import comm_calls
from stepmark.traces.kineto.intervals import time_before, union
from stepmark.traces.kineto.links import launches, name_flags, steps
from stepmark.traces.kineto.messages import kind_of, members_of
from stepmark.traces.kineto.stream_waits import WAITS, made_to_wait
from stepmark.traces.kineto.windows import is_communication
from stepmark.traces.trace_options import TraceInputs

_PHASES = dict(zip(COMM_PHASES, (Phase.STEP, Phase.FWD, Phase.BWD, Phase.OPTIM), strict=True))
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """One step. times: of each operation, ns, None where no GPU event is known.

    starts_s: of each operation since the first GPU event of the step. window_ns: from this one
    to the end of the last.
    host_ns: of the host by pass, without waits for the GPU. members: ranks of each group of
    its messages. left_out: what is no operation, and how often.
    """

    step: int
    operations: tuple[Operation, ...]
    times: tuple[int | None, ...]
    starts_s: tuple[float | None, ...]
    window_ns: int
    host_ns: dict[str, int]
    members: dict[str, tuple[int, ...]]
    left_out: Counter[str]


def step_windows(inputs: TraceInputs, trace: RankTrace) -> dict[int, int]:
    """Return how long the GPU needed for each chosen step that has GPU events, ns."""
    numbers = steps(trace).numbers
    windows = busy_steps(trace, inputs).items()
    return {numbers[row]: end - start for row, (start, end) in windows}


def program(trace: RankTrace, step: int) -> RankProgram | None:
    """Return the program of the step of this number; None where the trace has no such step."""
    marked = steps(trace)
    if step not in marked.numbers:
        return None
    row = marked.numbers.index(step)
    maker = _UnitBuilder(trace, np.flatnonzero(marked.of_gpu == row))
    calls = comm_calls(trace, marked)
    for place in np.flatnonzero(calls.step == row).tolist():
        maker.add_message(
            calls.args[calls.comm[place]],
            _PHASES[COMM_PHASES[calls.phase[place]]],
            *(int(calls.issued[place]), int(calls.start[place]), int(calls.end[place])),
        )
    maker.add_computations()
    mark = int(marked.start[row]), int(marked.end[row])
    for name, count, _ in calls.unlinked:
        maker.left_out[f"kernels {name[:60]} of no call in the trace"] += count
    if calls.without_args:
        maker.left_out["calls whose arguments are not recorded"] += calls.without_args
    return maker.program(step, mark)


@dataclass(slots=True, kw_only=True)
class _Item:
    """An operation before its waits are known. start is NONE where it has no GPU event."""

    op: Operation
    issued: int
    start: int
    end: int
    time: int | None
    stream: int
    was_made_to_wait: bool  # to wait for an event of another stream
    seen: dict[int, int] = field(default_factory=dict)  # by stream: up to which item it waits
    reach: int = NONE  # the last end of its stream up to it


class _UnitBuilder:
    def __init__(self, trace: RankTrace, rows: Ints) -> None:
        """rows: GPU events of the step."""
        self.trace = trace
        self.rows = rows
        self.call = launches(trace)[rows]
        self.waits_on_stream = made_to_wait(trace, launches(trace))[rows]
        self.launcher = operation_of(trace)[rows]
        self.attribution = attribute(HostOps(trace), self.launcher)
        self.is_comm = is_communication(trace)[rows]
        self.items: list[_Item] = []
        self.members: dict[str, tuple[int, ...]] = {}
        self.left_out: Counter[str] = Counter()
        kernels = np.flatnonzero(self.is_comm)
        starts = trace.gpu.start[rows[kernels]].tolist()
        self.kernel_at = dict(zip(starts, kernels.tolist(), strict=True))

    def _place(self, at: int | None, module: str, phase: Phase = Phase.STEP) -> dict[str, Any]:
        """Return module, layer, phase and recompute of an operation, where they are known."""
        if at is None:
            return {"module": module, "phase": phase}
        place = self.attribution.places[self.attribution.place[at]]
        return {
            "module": place.role or module,
            "layer": place.layer,
            "phase": Phase(PHASES[self.attribution.phase[at]] or phase),
            "recompute": bool(self.attribution.is_recomputed[at]),
        }

    def add_message(
        self, args: CommArgs, phase: Phase, issued: int, start: int, end: int
    ) -> None:
        members = members_of(args, self.trace.info)
        kind = kind_of(args, members, "")
        if isinstance(kind, str):
            self.left_out[kind] += 1
            return
        if not members:
            allowed = "a call in a group whose ranks the trace states"
            raise ConfigError("trace", f"{self.trace.info.file}: {args.collective}", allowed)
        rank = self.trace.info.rank or 0
        is_pair = kind.collective in (SEND, RECV)
        partner = args.target if kind.collective == SEND else args.source
        if is_pair and partner not in range(len(members)):
            self.left_out[f"{kind.collective} whose peer is not recorded"] += 1
            return
        dtype = DType(kind.dtype) if kind.dtype in list(DType) else DType.UINT8
        self.members[kind.group] = members
        at = self.kernel_at.get(start)
        op = CommOp(
            collective=kind.collective,
            dtype=dtype,
            count=kind.call_bytes // dtype.itemsize,
            group=kind.group,
            **self._place(at, args.collective, phase),
            peer=((partner or 0) - members.index(rank)) % len(members) if is_pair else None,
        )
        self._add(op, issued, (start, end), at)

    def _add(self, op: Operation, issued: int, times: tuple[int, int], at: int | None) -> _Item:
        """Add an operation. at: its first GPU event among those of the step."""
        start, end = times
        item = _Item(
            op=op,
            issued=issued,
            start=start,
            end=end,
            time=end - start if end != NONE else None,
            stream=NONE if at is None else int(self.trace.gpu.stream[self.rows[at]]),
            was_made_to_wait=at is not None and bool(self.waits_on_stream[at]),
        )
        self.items.append(item)
        return item

    def add_computations(self) -> None:
        gpu = self.trace.gpu
        rows = self.rows
        issued = np.append(self.trace.calls.start, NONE)[self.call]
        last = None
        of_last = (NONE, NONE)
        for at in np.lexsort((gpu.start[rows], issued)).tolist():
            if self.is_comm[at]:
                continue
            start = int(gpu.start[rows[at]])
            end = int(gpu.end[rows[at]])
            own = int(self.launcher[at]), int(gpu.stream[rows[at]])
            if last and own[0] != NONE and own == of_last:
                last.end = max(last.end, end)
                last.time = (last.time or 0) + end - start
            else:
                last = self._add(self._computation(at), int(issued[at]), (start, end), at)
            of_last = own

    def _computation(self, at: int) -> ComputeOp:
        trace = self.trace
        launcher = int(self.launcher[at])
        kernel = trace.names[trace.gpu.name[self.rows[at]]]
        if launcher == NONE:
            return ComputeOp(op=Kernel(name=kernel), **self._place(at, ""))
        name = trace.names[trace.ops.name[launcher]]
        shape = int(trace.ops.shapes[launcher])
        product = None
        if name in _PRODUCTS and shape != NONE:
            texts = trace.shapes[shape], *trace.operands[shape]
            product = _product(texts, _PRODUCTS[name], is_tf32="tf32" in kernel)
        return ComputeOp(op=product or Kernel(name=name), **self._place(at, name))

    def program(self, step: int, mark: tuple[int, int]) -> RankProgram:
        """Return the operations in issue order, with the streams and waits of the trace.

        mark: when the host began and ended the step.
        """
        self.items.sort(key=lambda item: item.issued)
        names = self._streams()
        queues: dict[int, list[_Item]] = {}  # by stream
        operations: list[Operation] = []
        for item in self.items:
            own = queues.setdefault(item.stream, [])
            if own:
                item.seen = dict(own[-1].seen)
                item.reach = own[-1].reach
            after = []
            for other, queue in (
                queues.items() if item.start != NONE and item.was_made_to_wait else ()
            ):
                place = bisect_right(queue, item.start, key=lambda each: each.reach) - 1
                if other == item.stream or place <= item.seen.get(other, -1):
                    continue
                back = len(queue) - 1 - place
                after.append(names[other] + (f"~{back}" if back else ""))
                for stream, at in queue[place].seen.items():
                    item.seen[stream] = max(item.seen.get(stream, -1), at)
            item.seen[item.stream], item.reach = len(own), max(item.end, item.reach)
            own.append(item)
            name = names[item.stream]
            operations.append(replace(item.op, stream=name, name=name, after=tuple(after)))
        begun = [item.start for item in self.items if item.start != NONE]
        first = min(begun, default=0)
        return RankProgram(
            step=step,
            operations=tuple(operations),
            times=tuple(item.time for item in self.items),
            starts_s=tuple(
                None if item.start == NONE else (item.start - first) / 1e9
                for item in self.items
            ),
            window_ns=max((item.end for item in self.items), default=first) - first,
            host_ns=self._host_ns(*mark),
            members=self.members,
            left_out=self.left_out,
        )

    def _host_ns(self, start: int, end: int) -> dict[str, int]:
        """Return the time up to the issue of each operation, by pass; the last has the rest."""
        calls = self.trace.calls
        waits = name_flags(self.trace.names, WAITS.search)[calls.name]
        known = self.call != NONE
        call = self.call[known]
        waits[call] |= self.trace.gpu.end[self.rows[known]] <= calls.end[call]  # of copies
        blocked = union(calls.start[waits], calls.end[waits])
        issued = np.array([start, *(item.issued for item in self.items[:-1]), end])
        issued = np.clip(np.maximum.accumulate(issued), start, end)
        free = np.diff(issued - time_before(blocked, issued))
        times: Counter[str] = Counter()
        for item, time in zip(self.items, free.tolist(), strict=True):
            times[pass_of(item.op)] += time
        return dict(times)

    def _streams(self) -> dict[int, str]:
        """Return names of streams: that of most computation, and others as they come."""
        busy: Counter[int] = Counter()
        for item in self.items:
            if isinstance(item.op, ComputeOp):
                busy[item.stream] += item.time or 0
        main = max(busy, key=lambda stream: busy[stream], default=NONE)
        names = {main: COMPUTE}
        for item in self.items:
            name = "unknown" if item.stream == NONE else f"stream {len(names)}"
            names.setdefault(item.stream, name)
        return names


def _product(texts: Sequence[str], first: int, *, is_tf32: bool) -> Gemm | Bmm | None:
    """Return the product of the inputs from `first`; None where type or layout is not known.

    texts: JSON of all inputs' shapes, types and strides.
    """
    try:
        (a, b), dtypes, (of_a, of_b) = (
            json_text.decode(text)[first : first + 2] for text in texts
        )
        dtype = parse_dtype(dtypes[0].removeprefix("c10::"), allowed=MULTIPLIED)
        if dtypes[0] != dtypes[1] or len(a) != len(b) or a[-1] != b[-2]:
            return None
        layout = Layout(f"{_order(a, of_a)}{_order(b, of_b)}")
        sizes: dict[str, Any] = {"m": a[-2], "n": b[-1], "k": a[-1], "layout": layout}
        sizes["dtype"] = DType.TF32 if is_tf32 and dtype is DType.FP32 else dtype
        return Gemm(**sizes) if len(a) == 2 else Bmm(batch=a[0], **sizes)
    except (ConfigError, ValueError, TypeError, IndexError, AttributeError):
        return None


def _order(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return n for rows that are contiguous, t for columns. Raises ValueError for neither."""
    if strides[-1] == 1 and strides[-2] >= shape[-1]:
        return "n"
    if strides[-2] == 1 and strides[-1] >= shape[-2]:
        return "t"
    raise ValueError
