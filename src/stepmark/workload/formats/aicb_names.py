"""A generated workload in AICB's words: its groups, and its names of what runs."""

import math
from collections.abc import Mapping

from stepmark.core.collectives import Collective
from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Gemm, Phase
from stepmark.core.workload import COMPUTE, CommOp, ComputeOp, Group, Operation, Workload
from stepmark.workload.formats.aicb_line import COLLECTIVES, direction, text_of

# Names of Megatron-LM's, DeepSpeed's and PyTorch's rules and of captures.
_DATA = (
    *("dp", "dp_cp", "intra_dp_cp", "instances", "dp_shard", "dp_replicate"),
    *("fsdp", "ddp", "replicate"),
)
_EXPERT_DATA = ("expt_dp", "intra_expt_dp", "ep_dp", "expert_fsdp")
_GROUPS: Mapping[str, str] = {
    "tp": "tp_group",
    **dict.fromkeys(_DATA, "dp_group"),
    "pp": "pp_group",
    "ep": "ep_group",
    **dict.fromkeys(_EXPERT_DATA, "ep_dp_group"),
    **dict.fromkeys(("tp_ep", "ep_tp"), "ep_tp_group"),
    **dict.fromkeys(("embd", "embedding"), "embedding_group"),
    "world": "all",
}
_CARRIED = {*COLLECTIVES.values(), str(Collective.ALL_TO_ALL_V)}
_COLUMN = ("qkv", "q", "kv", "gate_up", "up", "norm", "core")
_ROW = ("out", "down", "residual")
_PLAIN = {
    "data": "forward_step",
    "gradients.norms": "step._allreduce_layernorm_grads",
}
_CLASSES = {"loss": "_step._VocabParallelCrossEntropy", "embedding": ".MegatronEmbedding"}


def group_names(workload: Workload) -> dict[str, str]:
    """AICB's name of each group that it has one for: by our name, or by the same ranks."""
    found = {name: _GROUPS[name] for name in workload.groups if name in _GROUPS}
    same = {_ranks(workload.groups[name]): theirs for name, theirs in reversed(found.items())}
    same.setdefault(((workload.world_size, 1),), "all")
    for name, group in workload.groups.items():
        if name not in found and _ranks(group) in same:
            found[name] = same[_ranks(group)]
    return found


def _ranks(group: Group) -> tuple[tuple[int, int], ...]:
    """Equal for groups of the same ranks in the same order."""
    merged: list[tuple[int, int]] = []
    for size, stride in group.digits:
        if size == 1:
            continue
        if merged and math.prod(merged[-1]) == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


class Lines:
    """The line of an operation, "" for what AICB has none for."""

    def __init__(self, workload: Workload, *, computation: bool, setup: bool = False) -> None:
        self._names = group_names(workload)
        self._sizes = {name: group.size for name, group in workload.groups.items()}
        self._computation = computation
        self._stage = init_name if setup else stage_name
        self._known: dict[Operation, str] = {}

    def __call__(self, op: Operation) -> str:
        if op not in self._known:
            self._known[op] = self._line(op) if self.carries(op) else ""
        return self._known[op]

    def _line(self, op: Operation) -> str:
        if isinstance(op, ComputeOp):
            return text_of(op, self._stage(op), "", 0) if self._computation else ""
        return text_of(op, self._stage(op), self._names[op.group], self._sizes[op.group])

    def carries(self, op: Operation) -> bool:
        """Matrix products, and communication in a group that AICB has a name of.

        A transfer goes to the next or the previous stage.
        """
        if isinstance(op, ComputeOp):
            return isinstance(op.op, Gemm)
        if op.collective in (SEND, RECV):
            near = direction(op.peer or 0, self._sizes[op.group]) is not None
            return near and self._names.get(op.group) == "pp_group"
        return op.group in self._names and op.collective in _CARRIED


def init_name(op: Operation) -> str:
    """AICB's stage of what runs before the first step."""
    return "init" if op.module == "setup" else f"init.{_plain(op.module)}"


def stage_name(op: Operation) -> str:
    """AICB's stage: the pass and its class of the module, e.g. forward.MegatronRowLinear."""
    if op.module in _PLAIN:
        return _PLAIN[op.module]
    part, _, role = op.module.partition(".")
    forward = op.phase is Phase.FWD and not op.recompute
    if op.module in ("gradients", "parameters") and _is_last(op):
        reduced = getattr(op, "collective", "") == Collective.ALL_REDUCE
        return "step.finish_grad_sync" if reduced else "step"
    if op.phase in (Phase.OPTIM, Phase.STEP):
        return f"step.{_plain(op.module)}"
    if isinstance(op, CommOp) and op.collective in (SEND, RECV):
        return "forward_step" if forward else "backward_step"
    word = "forward" if forward else "backward"
    if part in ("attention", "mlp", "head"):
        return word + _linear(op, part, role, forward=forward)
    return word + _CLASSES.get(part, f".{_plain(op.module)}")


def _is_last(op: Operation) -> bool:
    """After the last backward pass, not beside it."""
    return op.stream == COMPUTE and op.microbatch is None and op.phase is not Phase.FWD


def _linear(op: Operation, part: str, role: str, *, forward: bool) -> str:
    """AICB's class of a linear layer; the head is the one that it calls final_column."""
    if role in _ROW:
        kind = "Row"
    elif role in _COLUMN or op.module == "head":
        kind = "Column"
    else:
        return f".{_plain(op.module)}"
    if isinstance(op, CommOp):
        return f".Megatron{kind}Linear"
    # AICB leaves the dot out of a row linear's backward.
    dot = "" if kind == "Row" and not forward else "."
    name = "final" if part == "head" else part
    return f".Megatron{kind}Linear{dot}{name}_{kind.lower()}"


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
    line = Lines(workload, computation=True)
    ops = {
        op
        for stage in range(len(workload.stages))
        for setup in (False, True)
        for op in workload.tally(stage, setup=setup)
    }
    if any(getattr(op, "collective", "") == Collective.ALL_TO_ALL_V for op in ops):
        found.append("uneven parts of all_to_all_v: written as all_to_all of the average")
    left = {
        f"{op.collective} of {op.group}"
        if isinstance(op, CommOp)
        else f"{type(op.op).__name__.lower()} ({op.module}): only matrix products have lines"
        for op in ops
        if not line.carries(op)
    }
    return [*found, *(f"left out: {one}" for one in sorted(left))]
