"""SimAI's rows of a generated workload: its first micro-batch as rows, written M times.

Rows have AICB's names. Each carries one message per pass, so a layer with more takes more rows:
both sides of an expert layer's exchange, or the gather that sequence parallelism repeats in the
backward pass. Gradient traffic of the whole step stands in rows of its own at the start, as
there; the pipeline is a number in the header.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, ComputeOp, Operation, Run, Workload
from stepmark.workload.formats.repeated_text import joined, repeated
from stepmark.workload.formats.simai_layers import (
    microbatch_rows,
    row_name,
    slots,
)
from stepmark.workload.formats.simai_messages import Messages
from stepmark.workload.formats.simai_row import Cell, Row

_GRADIENT_ROWS = {
    "ALLGATHER": "grad_gather",
    "REDUCESCATTER": "grad_param_comm",
    "ALLREDUCE": "grad_param_comm",
    "ALLGATHER_DP_EP": "moe_grad_norm1",
    "REDUCESCATTER_DP_EP": "moe_grad_norm2",
    "ALLREDUCE_DP_EP": "moe_grad_norm2",
}
# Modules whose sums over data-parallel ranks are no gradients.
_SMALL = ("loss", "tokens", "norm", "clip", "gradient_norm", "overflow")
_VPP = ("virtual_pipeline_model_parallel_size", "vpp")
_HEADER = (
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: {tp} ep: {ep} pp: {pp} "
    "vpp: {vpp} ga: {ga} all_gpus: {world} checkpoints: 0 checkpoint_initiates: 0 "
    "pp_comm: {pp_comm}\n"
)


def write(workload: Workload, stage: int = 0) -> Iterator[str]:
    """The text in pieces. Raises ConfigError where compute times are not known."""
    ops = list(first_microbatch(workload, stage))
    _check_times(ops)
    body = [one for one in ops if one.microbatch is not None]
    rest = [one for one in ops if one.microbatch is None]
    before = list(_gradient_rows(workload, stage))
    messages = Messages(workload)
    inside = list(microbatch_rows(messages, body))
    after = list(_step_rows(messages, rest))
    times = workload.num_microbatches
    yield _header(workload, stage) + f"{len(before) + len(inside) * times + len(after)}\n"
    text = "".join(row.line() for row in inside)
    yield from joined(
        [
            *(row.line() for row in before),
            *repeated(text, times),
            *(row.line() for row in after),
        ]
    )


def lost(workload: Workload) -> list[str]:
    """What the text cannot say of this workload, a line each."""
    found = [
        "overlap: messages within a pass are waited for; streams and order inside a row go",
        "element types: sizes are bytes",
        "operators: a row has a time per pass, not shapes",
        "gradient buckets: each kind of gradient message is summed into one row",
    ]
    ops = [op for stage in range(len(workload.stages)) for op in workload.tally(stage)]
    if len(workload.stages) > 1:
        found.append("stages: one is written; the pipeline is pp, vpp and pp_comm in line 1")
    messages = Messages(workload)
    left = {
        f"{op.collective} of {op.group} ({op.module})"
        for op in ops
        if isinstance(op, CommOp)
        and op.collective not in (SEND, RECV)
        and messages.in_pass(op) is messages.of_step(op) is None
    }
    return [*found, *(f"left out: {one}" for one in sorted(left))]


def first_microbatch(workload: Workload, stage: int) -> Iterator[Operation]:
    """Operations of micro-batch 0 and of none, in issue order, without walking the others."""
    spans: dict[str, tuple[int, int, bool]] = {}

    def span(name: str) -> tuple[int, int, bool]:
        """Least and largest micro-batch inside, and whether something belongs to none."""
        if name not in spans:
            lows, highs, loose = [], [], False
            for item in workload.blocks[name]:
                if isinstance(item, Run):
                    low, high, inner = span(item.block)
                    ends = (
                        item.microbatch,
                        item.microbatch + item.microbatch_step * (item.times - 1),
                    )
                    if low <= high:
                        lows.append(low + min(ends))
                        highs.append(high + max(ends))
                    loose = loose or inner
                elif item.microbatch is None:
                    loose = True
                else:
                    lows.append(item.microbatch)
                    highs.append(item.microbatch)
            spans[name] = (min(lows, default=1), max(highs, default=0), loose)
        return spans[name]

    def walk(name: str, layer: int, microbatch: int) -> Iterator[Operation]:
        for item in workload.blocks[name]:
            if isinstance(item, Run):
                low, high, loose = span(item.block)
                for index in range(item.times):
                    base = microbatch + item.microbatch + index * item.microbatch_step
                    if loose or low + base <= 0 <= high + base:
                        at = layer + item.layer + index * item.layer_step
                        yield from walk(item.block, at, base)
            elif item.microbatch is None or item.microbatch + microbatch == 0:
                at_layer = None if item.layer is None else item.layer + layer
                yield replace(
                    item,
                    layer=at_layer,
                    microbatch=None if item.microbatch is None else 0,
                )

    yield from walk(workload.stages[stage].step, 0, 0)


def _check_times(ops: Iterable[Operation]) -> None:
    missing = sorted(
        {
            f"{op.module} {op.phase}"
            for op in ops
            if isinstance(op, ComputeOp) and op.time_s is None
        }
    )
    if missing:
        shown = f"{len(missing)} unknown, e.g. {', '.join(missing[:3])}"
        raise ConfigError("time_s", shown, "known times of all computation (--compute-from)")


def _header(workload: Workload, stage: int) -> str:
    sizes = {name: group.size for name, group in workload.groups.items()}
    sent = [
        op.call_bytes()
        for op in workload.tally(stage)
        if isinstance(op, CommOp) and op.collective == SEND and op.phase is Phase.FWD
    ]
    chunks = [workload.settings.get(name) for name in _VPP]
    return _HEADER.format(
        tp=sizes.get("tp", 1),
        ep=sizes.get("ep", 1),
        pp=len(workload.stages),
        vpp=next((one for one in chunks if isinstance(one, int) and one), 1),
        ga=workload.num_microbatches,
        world=workload.world_size,
        pp_comm=max(sent, default=0),
    )


def _gradient_rows(workload: Workload, stage: int) -> Iterator[Row]:
    messages = Messages(workload)
    sums: dict[tuple[str, str], int] = {}
    for op, count in workload.tally(stage).items():
        comm = messages.of_step(op) if isinstance(op, CommOp) else None
        if comm is not None and isinstance(op, CommOp):
            small = op.module in _SMALL
            name = op.module if small else _GRADIENT_ROWS.get(comm, "grad_comm")
            sums[comm, name] = sums.get((comm, name), 0) + count * messages.num_bytes(op)
    for (comm, name), num_bytes in sorted(sums.items()):
        yield Row(name=name, wgrad=Cell(comm=comm, num_bytes=num_bytes))


def _step_rows(messages: Messages, ops: Sequence[Operation]) -> Iterator[Row]:
    """What belongs to no micro-batch: the optimizer, its norm and the like, each by module."""
    parts: dict[str, list[Operation]] = {}
    for op in ops:
        name = row_name(op.module, split=False, moe=False)
        parts.setdefault("optimizer" if op.phase is Phase.OPTIM else name, []).append(op)
    for name, found in parts.items():
        for number, slot in enumerate(slots(messages, found), start=1):
            cell = slot.cell(slot.dgrad_s + slot.wgrad_s)
            yield Row(name=f"{name}{number}" if name == "optimizer" else name, fwd=cell)
