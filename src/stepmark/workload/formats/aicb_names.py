"""A generated workload in AICB's words: its groups, and its names of what runs."""

from collections.abc import Mapping

from stepmark.core.collectives import Collective
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Gemm, Phase
from stepmark.core.workload import CommOp, ComputeOp, Operation, Workload
from stepmark.workload.formats.aicb_line import COLLECTIVES, text_of

GROUPS: Mapping[str, str] = {
    "tp": "tp_group",
    **dict.fromkeys(("dp", "dp_cp", "intra_dp_cp", "dp_shard", "dp_replicate"), "dp_group"),
    "pp": "pp_group",
    "ep": "ep_group",
    **dict.fromkeys(("expt_dp", "intra_expt_dp"), "ep_dp_group"),
    "tp_ep": "ep_tp_group",
    "embd": "embedding_group",
    "world": "all",
}
_CARRIED = {*COLLECTIVES.values(), str(Collective.ALL_TO_ALL_V)}
_COLUMN = ("qkv", "q", "kv", "gate_up", "up", "norm", "core")
_ROW = ("out", "down", "residual")


class Lines:
    """The line of an operation, "" for what AICB has none for."""

    def __init__(self, workload: Workload, *, computation: bool) -> None:
        self._sizes = {name: group.size for name, group in workload.groups.items()}
        self._computation = computation
        self._known: dict[Operation, str] = {}

    def __call__(self, op: Operation) -> str:
        if op not in self._known:
            self._known[op] = self._line(op)
        return self._known[op]

    def _line(self, op: Operation) -> str:
        if not is_carried(op) or (isinstance(op, ComputeOp) and not self._computation):
            return ""
        if isinstance(op, ComputeOp):
            return text_of(op, stage_name(op), "", 0)
        return text_of(op, stage_name(op), GROUPS[op.group], self._sizes[op.group])


def is_carried(op: Operation) -> bool:
    if isinstance(op, ComputeOp):
        return isinstance(op.op, Gemm)
    return op.group in GROUPS and op.collective in _CARRIED


def stage_name(op: Operation) -> str:
    """AICB's stage: the pass and its class of the module, e.g. forward.MegatronRowLinear."""
    part, _, role = op.module.partition(".")
    forward = op.phase is Phase.FWD and not op.recompute
    if op.phase in (Phase.OPTIM, Phase.STEP):
        return f"step.{_plain(op.module)}"
    if isinstance(op, CommOp) and op.collective in (SEND, RECV):
        return "forward_step" if forward else "backward_step"
    word = "forward" if forward else "backward"
    return f"{word}{_class_name(op, part, role, forward=forward)}"


def _class_name(op: Operation, part: str, role: str, *, forward: bool) -> str:
    classes = {"loss": "_step._VocabParallelCrossEntropy", "embedding": ".MegatronEmbedding"}
    kind = {**dict.fromkeys(_COLUMN, "Column"), **dict.fromkeys(_ROW, "Row")}.get(role)
    if part not in ("attention", "mlp") or kind is None:
        return classes.get(part, f".{_plain(op.module)}")
    if isinstance(op, CommOp):
        return f".Megatron{kind}Linear"
    # AICB leaves the dot out of a row linear's backward.
    dot = "" if kind == "Row" and not forward else "."
    return f".Megatron{kind}Linear{dot}{part}_{kind.lower()}"


def _plain(module: str) -> str:
    """Without what would end a field."""
    return "".join(" " if char in ",\r\n" else char for char in module)


def lost(workload: Workload) -> list[str]:
    """What the CSV cannot say of this workload, a line each."""
    found = [
        "overlap: every line waits for the one before it; streams go",
        "layers and micro-batches: lines follow each other without them",
        "element types and times: sizes are bytes",
    ]
    if len(workload.stages) > 1:
        found.append("stages: one is written")
    ops = {op for stage in range(len(workload.stages)) for op in workload.tally(stage)}
    uneven = any(getattr(op, "collective", "") == Collective.ALL_TO_ALL_V for op in ops)
    if uneven:
        found.append("uneven parts of all_to_all_v: written as all_to_all of the average")
    left = {
        f"{op.collective} of {op.group}"
        if isinstance(op, CommOp)
        else f"{type(op.op).__name__.lower()} ({op.module}): only matrix products have lines"
        for op in ops
        if not is_carried(op)
    }
    return [*found, *(f"left out: {one}" for one in sorted(left))]
