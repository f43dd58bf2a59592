"""SimAI's rows of one micro-batch: each ends in at most one message per pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stepmark.core.collectives import Collective
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, ComputeOp, Operation
from stepmark.workload.formats.simai_messages import Messages
from stepmark.workload.formats.simai_row import NONE, Cell, Row

_ROW_OUT = ("out", "down", "residual")  # roles behind the inner width: Megatron's row linears


@dataclass(slots=True, kw_only=True)
class Slot:
    """Computation up to a message. What is no weight gradient counts as dgrad."""

    dgrad_s: float = 0.0
    wgrad_s: float = 0.0
    comm: str = NONE
    num_bytes: int = 0

    def cell(self, seconds: float) -> Cell:
        time_ns = nanoseconds(seconds)
        return Cell(compute_ns=time_ns, comm=self.comm, num_bytes=self.num_bytes)


@dataclass(slots=True, kw_only=True)
class _Passes:
    fwd: list[Operation] = field(default_factory=list)
    bwd: list[Operation] = field(default_factory=list)


def microbatch_rows(messages: Messages, ops: Sequence[Operation]) -> Iterator[Row]:
    gathers = {str(Collective.ALL_GATHER), str(Collective.REDUCE_SCATTER)}
    split = any(
        isinstance(op, CommOp) and op.group == "tp" and op.collective in gathers for op in ops
    )
    moe = {op.layer for op in ops if op.module.startswith(("mlp.router", "mlp.experts"))}
    parts: dict[tuple[int | None, str], _Passes] = {}
    for op in ops:
        key = (op.layer, row_name(op.module, split=split, moe=op.layer in moe))
        passes = parts.setdefault(key, _Passes())
        forward = op.phase is Phase.FWD and not op.recompute
        (passes.fwd if forward else passes.bwd).append(op)
    for (_, name), passes in parts.items():
        yield from _rows(messages, name, passes)


def row_name(module: str, *, split: bool, moe: bool) -> str:
    """AICB's name of the row that a module's operations are in. split: sequence parallelism."""
    part, _, role = module.partition(".")
    if part == "mlp" and moe:
        return "mlp_moelayer"
    if part in ("attention", "mlp"):
        if not split:
            return f"{part}_layer"
        return f"{part}_row" if role in _ROW_OUT else f"{part}_column"
    names = {"embedding": "embedding_layer", "head": "final_column", "loss": "cross_entropy"}
    return names.get(part, "_".join(module.replace(".", " ").split()) or "unnamed")


def _rows(messages: Messages, name: str, passes: _Passes) -> Iterator[Row]:
    """Backward runs from the last row to the first, so its messages are placed from there."""
    fwd, bwd = list(slots(messages, passes.fwd)), list(slots(messages, passes.bwd))
    number = max(len(fwd), len(bwd))
    fwd += [Slot()] * (number - len(fwd))
    bwd = bwd[::-1] + [Slot()] * (number - len(bwd))
    for index, (there, back) in enumerate(zip(fwd, bwd, strict=True), start=1):
        yield Row(
            name=f"{name}{index}" if name == "cross_entropy" else name,
            fwd=there.cell(there.dgrad_s),
            dgrad=back.cell(back.dgrad_s),
            wgrad=Cell(compute_ns=nanoseconds(back.wgrad_s)),
        )


def slots(messages: Messages, ops: Sequence[Operation]) -> Iterator[Slot]:
    """Each ends with a message that SimAI has; computation behind the last joins it."""
    found: list[Slot] = []
    now = Slot()
    for op in ops:
        if isinstance(op, ComputeOp):
            if op.phase is Phase.WGRAD:
                now.wgrad_s += op.time_s or 0.0
            else:
                now.dgrad_s += op.time_s or 0.0
        elif (comm := messages.in_pass(op)) is not None:
            now.comm = comm
            now.num_bytes = messages.num_bytes(op)
            found.append(now)
            now = Slot()
    if found:
        found[-1].dgrad_s += now.dgrad_s
        found[-1].wgrad_s += now.wgrad_s
    elif now.dgrad_s or now.wgrad_s:
        found.append(now)
    yield from found


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
