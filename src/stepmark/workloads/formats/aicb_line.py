"""One line of AICB's CSV: an operation of rank 0, or the end of an iteration.

Source: aliyun/aicb, log_analyzer/log.py (LogItem) and utils/utils.py (CommType, CommGroup).
Sizes are bytes of the full tensor; of a computation, shapes of its two factors.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Gemm, Layout, Phase
from stepmark.step.workload import (
    COMPUTE,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Workload,
)

HEADER = (
    "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,"
    "_elapsed_time,algbw,busbw,count"
)
COLUMNS = HEADER.split(",")
EPOCH_END = "CommType.epoch_end,None,None,0,,None,None,,None,None,None,1"
NONE = "None"
END = "epoch_end"
COMPUTATION = "computation"
COLLECTIVES = {
    "all_reduce": str(Collective.ALL_REDUCE),
    "isend": SEND,
    "irecv": RECV,
    "broadcast": str(Collective.BROADCAST),
    "all_gather": str(Collective.ALL_GATHER),
    "reduce_scatter": str(Collective.REDUCE_SCATTER),
    "barrier": str(Collective.BARRIER),
    "reduce": str(Collective.REDUCE),
    "all_to_all": str(Collective.ALL_TO_ALL),
    "reduce_scatter_tensor": str(Collective.REDUCE_SCATTER),
    "all_gather_into_tensor": str(Collective.ALL_GATHER),
}
GROUPS = {
    "tp_group": "tp",
    "dp_group": "dp",
    "pp_group": "pp",
    "ep_group": "ep",
    "ep_dp_group": "ep_dp",
    "ep_tp_group": "ep_tp",
    "embedding_group": "embedding",
    "all": "world",
}
_SHAPES = re.compile(r"\(\(([\d ]+)\) \(([\d ]+)\)\)")
_LAYOUTS = {Phase.FWD: Layout.NT, Phase.DGRAD: Layout.NN, Phase.WGRAD: Layout.TN}
_PHASES = (("forward", Phase.FWD), ("backward", Phase.BWD), ("step", Phase.OPTIM))
_REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce")
_PEERS = {"next": 1, "prev": -1}
TRANSFERS = ("isend", "irecv")
PIPELINE = "pp_group"
_GROUP_NAMES = {ours: name for name, ours in GROUPS.items()}
_TYPE_OF = {ours: name for name, ours in reversed(COLLECTIVES.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Fields of a line; kind and group without their class names."""

    kind: str
    group: str  # "" of a computation and an end
    group_size: int | None  # None: not in the line
    size: str
    stage: str
    dst: int | None
    src: int | None
    additional: str
    elapsed_ms: float | None


def parse(text: str, where: str) -> Line:
    """Parse a line. Raise ConfigError that starts with `where`."""
    fields = text.rstrip("\r").split(",")
    if len(fields) != len(COLUMNS):
        allowed = f"{len(COLUMNS)} columns: {HEADER}"
        raise ConfigError(where, f"{len(fields)} columns", allowed)
    kind = fields[0].removeprefix("CommType.")
    group = fields[1].removeprefix("CommGroup.")
    kinds = (*COLLECTIVES, COMPUTATION, END)
    if kind not in kinds or not fields[0].startswith("CommType."):
        raise ConfigError(
            f"{where}, comm_type", fields[0], f"CommType. and one of {', '.join(kinds)}"
        )
    if kind in (COMPUTATION, END):
        group = ""
    elif group not in GROUPS:
        raise ConfigError(
            f"{where}, comm_group", fields[1], f"CommGroup. and one of {', '.join(GROUPS)}"
        )
    return Line(
        kind=kind,
        group=group,
        group_size=_whole(fields[2], f"{where}, comm_group_size"),
        size=fields[3],
        stage=fields[4],
        dst=_whole(fields[5], f"{where}, dst", low=0),
        src=_whole(fields[6], f"{where}, src", low=0),
        additional=fields[7],
        elapsed_ms=None if fields[8] == NONE else number(fields[8], f"{where}, _elapsed_time"),
    )


def _whole(text: str, where: str, low: int = 1) -> int | None:
    if text == NONE:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= low):
        raise ConfigError(where, text, f"None or a whole number, {low} or more")
    return int(text)


def number(text: str, where: str) -> float:
    """Parse a finite number of 0 or more. Raise ConfigError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 2**60:  # NaN is in no range
        raise ConfigError(where, text, "a number, 0 or more")
    return value


def group_of(line: Line, groups: Mapping[str, Group]) -> str:
    """Return our name of a line's group: "dp", or "dp_4" if most of this name differ in size.

    AICB gives transfers a group of one rank.
    """
    name = GROUPS[line.group]
    other = f"{name}_{line.group_size}"
    return name if line.kind in TRANSFERS or other not in groups else other


def aicb_group(name: str) -> str:
    """Return AICB's name of a group that group_of named."""
    return _GROUP_NAMES[name if name in _GROUP_NAMES else name.rpartition("_")[0]]


def operation(line: Line, groups: Mapping[str, Group], where: str) -> Operation:
    """Return a line's operation. Raise ConfigError that starts with `where`."""
    phases = (phase for start, phase in _PHASES if line.stage.startswith(start))
    phase = next(phases, Phase.STEP)
    if line.kind == COMPUTATION:
        return _computation(line, phase)
    group = group_of(line, groups)
    if group not in groups:
        allowed = f"known: no line tells the size of {line.group} (--group-sizes {group}=N)"
        raise ConfigError(f"{where}, comm_group_size", NONE, allowed)
    collective = COLLECTIVES[line.kind]
    peer = None
    if collective in (SEND, RECV):
        peer = _PEERS.get(line.additional.partition("_")[2])
        if peer is None:
            allowed = "send_next, send_prev, recv_next or recv_prev"
            raise ConfigError(f"{where}, additional", line.additional, allowed)
    op = CommOp(
        collective=collective,
        dtype=DType.UINT8,
        count=1,
        group=group,
        phase=phase,
        module=line.stage,
        redop=RedOp.SUM if line.kind in _REDUCING else RedOp.NONE,
        root=line.dst if collective == "reduce" else line.src,
        peer=peer,
    )
    num_bytes = math.ceil(number(line.size, f"{where}, msg_size"))
    parts = op.message_bytes(groups[group])
    return replace(op, count=-(-num_bytes // parts))


def is_transfer(op: Operation) -> TypeGuard[CommOp]:
    return isinstance(op, CommOp) and op.peer is not None


def column_excess(ops: Iterable[Operation], tp: int) -> int:
    """Return by what AICB multiplies the products of column-parallel layers; 1: they are right.

    With sequence parallelism it gives them tp times the rows of row-parallel layers. Both
    kinds have all tokens of a micro-batch.
    """
    rows = {"forward.MegatronColumnLinear": set[int](), "forward.MegatronRowLinear": set[int]()}
    for op in ops:
        layer = op.module.rpartition(".")[0]
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm) and layer in rows:
            rows[layer].add(op.op.m)
    columns, others = rows.values()
    return tp if columns and columns == {tp * num for num in others} else 1


def _computation(line: Line, phase: Phase) -> ComputeOp:
    """Return a matrix product if the line has shapes as AICB prints, else a named kernel."""
    shapes = _SHAPES.fullmatch(line.size)
    if shapes and len(line.size) < 200:
        first, second = ([int(dim) for dim in shape.split()] for shape in shapes.groups())
        if phase is Phase.BWD:
            phase = Phase.WGRAD if len(first) == 2 else Phase.DGRAD
        if len(second) == 2 and first[-1:] == second[:1] and all((*first[:-1], *second)):
            op = Gemm(
                m=math.prod(first[:-1]),
                k=second[0],
                n=second[1],
                layout=_LAYOUTS.get(phase, Layout.NT),
            )
            return ComputeOp(op=op, phase=phase, module=line.stage)
    return ComputeOp(op=Kernel(name=line.size), phase=phase, module=line.stage)


def text_of(op: Operation, stage: str, group: str, size: int) -> str:
    """Return the line of an operation. stage, group: in AICB's words; size: of the group.

    Raise ConfigError for an operation without a line in AICB.
    """
    if isinstance(op, ComputeOp):
        shapes = _shapes(op)
        return f"CommType.computation,None,None,{shapes},{stage},None,None,,None,None,None,1\n"
    if op.collective not in _TYPE_OF and op.collective != Collective.ALL_TO_ALL_V:
        raise not_one_of("collective", op.collective, _TYPE_OF)
    kind = _TYPE_OF.get(op.collective, "all_to_all")
    additional = ""
    dst, src = (op.root, None) if op.collective == Collective.REDUCE else (None, op.root)
    if op.collective in (SEND, RECV):
        where = direction(op.peer or 0, size)
        if where is None:
            raise ConfigError("peer", op.peer, "1 or -1: a neighbour in the pipeline")
        additional = f"{op.collective}_{where}"
    num_bytes = op.message_bytes(Group(digits=((size, 1),)))
    return (
        f"CommType.{kind},CommGroup.{group},{size},{num_bytes},{stage},{dst},{src},"
        f"{additional},None,None,None,1\n"
    )


def no_setup(world_size: int) -> str:
    """Return a line to begin with: AICB's reader of mocked workloads drops the first one.

    Source: aliyun/aicb, visualize/generate.py (custom_csv_reader, only_workload).
    """
    return f"CommType.barrier,CommGroup.all,{world_size},0,init,None,None,,None,None,None,1\n"


def direction(peer: int, size: int) -> str | None:
    """Return next or prev in a group of this size; None: the peer is no neighbour."""
    for near in (peer, peer - size, peer + size):
        if near in (1, -1):
            return "next" if near == 1 else "prev"
    return None


def _shapes(op: ComputeOp) -> str:
    if isinstance(op.op, Kernel):
        return op.op.name
    if not isinstance(op.op, Gemm):
        raise ConfigError("operator", op.module, "a matrix product")
    m = op.op.m
    n = op.op.n
    k = op.op.k
    first = f"({m} {k})" if op.phase is Phase.WGRAD else f"({m} 1 {k})"
    return f"({first} ({k} {n}))"


# Names of Megatron-LM's, DeepSpeed's and PyTorch's rules and of captures.
_DATA = (
    *("dp", "dp_cp", "intra_dp_cp", "instances", "dp_shard", "dp_replicate"),
    *("fsdp", "ddp", "replicate"),
)
_EXPERT_DATA = ("expt_dp", "intra_expt_dp", "ep_dp", "dp_ep", "expert_fsdp")
_GROUP_OF: Mapping[str, str] = {
    "tp": "tp_group",
    **dict.fromkeys(_DATA, "dp_group"),
    "pp": PIPELINE,
    "ep": "ep_group",
    **dict.fromkeys(_EXPERT_DATA, "ep_dp_group"),
    **dict.fromkeys(("tp_ep", "ep_tp"), "ep_tp_group"),
    **dict.fromkeys(("embd", "embedding"), "embedding_group"),
    "world": "all",
}
_CARRIED = {*COLLECTIVES.values(), str(Collective.ALL_TO_ALL_V)}
_COLUMN = ("qkv", "q", "kv", "gate_up", "up", "norm", "core")
_ROW = ("out", "down", "residual")
_PLAIN = {"data": "forward_step", "gradients.norms": "step._allreduce_layernorm_grads"}
_CLASSES = {"loss": "_step._VocabParallelCrossEntropy", "embedding": ".MegatronEmbedding"}


def group_names(workload: Workload) -> dict[str, str]:
    """Return AICB's names of groups, by our name of them or by the same ranks."""
    names = {name: _GROUP_OF[name] for name in workload.groups if name in _GROUP_OF}
    groups = workload.groups
    same = {ranks_of(groups[name]): aicb_name for name, aicb_name in reversed(names.items())}
    same.setdefault(((workload.world_size, 1),), "all")
    for name, group in groups.items():
        if name not in names and ranks_of(group) in same:
            names[name] = same[ranks_of(group)]
    return names


def ranks_of(group: Group) -> tuple[tuple[int, int], ...]:
    """Return dimensions that are equal for groups of the same ranks in the same order."""
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
    """Lines of operations; "" for one without a line in AICB."""

    def __init__(self, workload: Workload, *, computation: bool, setup: bool = False) -> None:
        self._names = group_names(workload)
        self._groups = workload.groups
        self._pipeline = next((n for n in self._names if self._names[n] == PIPELINE), "")
        self._computation = computation
        self._setup = setup
        self._lines: dict[Operation, str] = {}

    def __call__(self, op: Operation) -> str:
        if op not in self._lines:
            own = self.in_pipeline(op) if isinstance(op, CommOp) else op
            self._lines[op] = self._line(own) if self._carries(own) else ""
        return self._lines[op]

    def _line(self, op: Operation) -> str:
        stage = stage_name(op)
        if self._setup:  # what runs before the first step
            stage = "init" if op.module == "setup" else f"init.{_plain(op.module)}"
        if isinstance(op, ComputeOp):
            return text_of(op, stage, "", 0) if self._computation else ""
        return text_of(op, stage, self._names[op.group], self._groups[op.group].size)

    def label(self, op: CommOp) -> str:
        """Return AICB's name of a message's group, or ours if it has none."""
        return self._names.get(self.in_pipeline(op).group, op.group)

    def in_pipeline(self, op: CommOp) -> CommOp:
        """Return a transfer between stages as one in the group of the pipeline.

        Megatron-LM uses the group of all ranks for one direction of two interleaved stages.
        """
        own = ranks_of(self._groups[op.group])
        stages = ranks_of(self._groups[self._pipeline]) if self._pipeline else ()
        is_alike = len(own) == len(stages) == 1 and math.prod(own[0]) == math.prod(stages[0])
        if op.peer is None or not is_alike:
            return op
        ahead, inside = divmod(op.peer * own[0][1], stages[0][1])
        return op if inside else replace(op, group=self._pipeline, peer=ahead)

    def _carries(self, op: Operation) -> bool:
        """Return whether it has a line: a product, or a message in a group that AICB names."""
        if isinstance(op, ComputeOp):
            return isinstance(op.op, Gemm)
        if op.peer is not None:  # to the next or the previous stage only
            near = direction(op.peer, self._groups[op.group].size) is not None
            return near and op.group == self._pipeline
        return op.group in self._names and op.collective in _CARRIED


def stage_name(op: Operation) -> str:
    """Return AICB's stage: pass and class of the module, e.g. forward.MegatronRowLinear."""
    if op.module in _PLAIN:
        return _PLAIN[op.module]
    part, _, role = op.module.partition(".")
    forward = op.phase is Phase.FWD and not op.recompute
    # After the last backward pass, not beside it.
    is_last = op.stream == COMPUTE and op.microbatch is None and op.phase is not Phase.FWD
    if op.module in ("gradients", "parameters") and is_last:
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


def _linear(op: Operation, part: str, role: str, *, forward: bool) -> str:
    """Return AICB's class of a linear layer; the head is its final_column."""
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
    """Return a name without characters that would end a field."""
    return "".join(" " if char in ",\r\n" else char for char in module)
