"""Collectives, sends and receives of torch as operations of a workload, and their groups.

Source of the names of pipeline stages: torch 2.13, distributed/pipelining/stage.py (the
operations that a stage issues, by micro-batch) and distributed_c10d.py (a batch of them is
one group call on NCCL).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from stepmark.capture.fake import around
from stepmark.capture.modules import ModulePosition
from stepmark.cases.message import SEND
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.model.collectives import FACTS, Collective, RedOp
from stepmark.model.ops import Phase
from stepmark.step.workload import COMMUNICATIONS, CommOp, Group
from stepmark.training.messages import BATCH_P2P, PAIRS, group_of, kinds

_ROOTED = ("broadcast_", "reduce_", "gather_", "scatter_")
_REDOPS = {  # by the lower-case name in torch.distributed.ReduceOp
    "sum": RedOp.SUM,
    "avg": RedOp.AVG,
    "product": RedOp.PROD,
    "min": RedOp.MIN,
    "max": RedOp.MAX,
    "premul_sum": RedOp.MULSUM,
}
_BY_NUMBER = {
    int(getattr(dist.ReduceOp, word.upper()).value): redop for word, redop in _REDOPS.items()
}


class Groups:
    """The groups recorded so far, by their names in the workload."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._names: dict[str, str] = {}  # by the process group's own name, which is unique
        self.groups: dict[str, Group] = {}
        self.notes: list[str] = []

    def name(self, group: Any) -> str:
        """Return a group's name: that of its mesh axis, "world" for the default group."""
        if group.group_name not in self._names:
            stem = str(group.group_desc).removeprefix("mesh_")
            if stem == "default_pg":
                stem = "world"
            elif stem in ("", "undefined"):
                stem = f"group_{group.group_name}"
            ranks = tuple(dist.get_process_group_ranks(group))
            self._names[group.group_name] = self._new(stem, ranks)
        return self._names[group.group_name]

    def _new(self, stem: str, ranks: tuple[int, ...]) -> str:
        """Return the name of a group; groups of the same ranks and purpose are one."""
        for number in itertools.count(1):
            name = stem if number == 1 else f"{stem}-{number}"
            if self._ranks.setdefault(name, ranks) == ranks:
                break
        if name in self.groups:
            return name
        self.groups[name] = Group(digits=digits(ranks))
        if self.groups[name].members(self._rank) != ranks:
            self.groups[name] = Group(digits=((len(ranks), 1),))
            numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            self.notes.append(
                f"group {name} is ranks {numbers}, which no digits of a rank's number tell:"
                f" {len(ranks)} neighbours stand for it"
            )
        return name


def digits(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of each digit that differs, fastest first, if there are digits."""
    pairs: list[tuple[int, int]] = []
    left = [rank - ranks[0] for rank in ranks]
    while len(left) > 1:
        stride = left[1]
        if stride < 1:
            break
        size = next((at for at, rank in enumerate(left) if rank != at * stride), len(left))
        pairs.append((size, stride))
        left = left[::size]
    return tuple(pairs) or ((1, 1),)


def comm_ops(
    name: str,
    values: Sequence[Any],
    result: Any,
    groups: Groups,
    phase: Phase,
    at: ModulePosition,
) -> Iterator[CommOp]:
    """Yield the messages of one operator of torch; none in a group of one rank.

    Operators without a name here are left out, and noted in groups.notes.
    """
    group = next(filter(None, map(group_of, values)), None)
    messages = list(kinds(name, values, result, ""))
    if group is None or group.size() == 1:
        return
    for kind, peer in zip(messages, _peers(name, values, group, len(messages)), strict=True):
        if kind.collective not in COMMUNICATIONS:
            note = f"torch's {kind.collective} has no name here: it is left out"
            groups.notes += [] if note in groups.notes else [note]
            continue
        dtype = DType(kind.dtype) if kind.dtype in list(MESSAGE_DTYPES) else DType.UINT8
        yield CommOp(
            collective=kind.collective,
            dtype=dtype,
            count=kind.call_bytes // dtype.itemsize,
            group=groups.name(group),
            phase=phase,
            module=at.module,
            layer=at.layer,
            microbatch=at.microbatch,
            redop=redop(kind.collective, values),
            root=int(_numbers(values)[0]) if name in _ROOTED else None,
            peer=peer,
        )


def _peers(name: str, values: Sequence[Any], group: Any, count: int) -> Sequence[int | None]:
    if name == BATCH_P2P:
        return [(int(rank) - group.rank()) % group.size() for rank in values[1]]
    if name in PAIRS:
        return [(_numbers(values)[0] - group.rank()) % group.size()]
    return [None] * count


def _numbers(values: Sequence[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def redop(collective: str, values: Sequence[Any]) -> RedOp:
    if collective not in list(Collective) or not FACTS[Collective(collective)].reduces:
        return RedOp.NONE
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            return _BY_NUMBER.get(int(value.op()), RedOp.SUM)  # type: ignore[attr-defined]
        if isinstance(value, str) and value in _REDOPS:
            return _REDOPS[value]
    return RedOp.SUM


_STAGE_OPS = {
    "get_fwd_recv_ops": Phase.FWD,
    "get_fwd_send_ops": Phase.FWD,
    "get_bwd_recv_ops": Phase.BWD,
    "get_bwd_send_ops": Phase.BWD,
}
MODULE = "pipeline"


class Pairs:
    """Phases, micro-batches and group calls of sends and receives."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # By the tensor's id; the reference keeps the id unique.
        self._stage_ops: dict[int, tuple[Tensor, Phase, int]] = {}
        self._in_batch = 0  # 1 + number of operations issued of the current batch; 0: no batch

    def patches(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """Yield functions of torch to patch, each with its replacement."""
        for name, phase in _STAGE_OPS.items():
            if hasattr(_PipelineStageBase, name):
                original = getattr(_PipelineStageBase, name)
                yield (_PipelineStageBase, name), self._recording(original, phase)
        batching = around(
            dist.batch_isend_irecv, lambda *_: mock.patch.object(self, "_in_batch", 1)
        )
        for module in (dist, dist.distributed_c10d):
            yield (module, "batch_isend_irecv"), batching

    def describe(self, op: CommOp, tensor: Tensor, group: Group, *, outside: bool) -> CommOp:
        """Add phase and micro-batch. outside: of all modules and backward passes."""
        is_fused = self._in_batch > 1
        self._in_batch += bool(self._in_batch)
        _, phase, microbatch = self._stage_ops.pop(id(tensor), (None, None, op.microbatch))
        if phase is not None:
            return replace(
                op,
                phase=phase,
                module=MODULE,
                layer=None,
                microbatch=microbatch,
                fused=is_fused,
            )
        if outside:  # activations are sent to later ranks, gradients to earlier ones
            own = group.members(self._rank).index(self._rank)
            is_later = (own + (op.peer or 0)) % group.size > own
            is_forward = is_later is (op.collective == SEND)
            op = replace(op, phase=Phase.FWD if is_forward else Phase.BWD, module=MODULE)
        return replace(op, fused=is_fused)

    def _recording(self, original: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(stage: Any, microbatch: int) -> Any:
            ops = original(stage, microbatch)
            for op in ops:
                self._stage_ops[id(op.tensor)] = op.tensor, phase, microbatch
            return ops

        return call
