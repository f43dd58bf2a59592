"""Collectives of torch as operations of a workload."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepmark.bench.capture.groups import Groups
from stepmark.bench.capture.modules import Place
from stepmark.bench.training.messages import group_of, kinds
from stepmark.core.collectives import FACTS, Collective, RedOp
from stepmark.core.dtypes import MESSAGE_DTYPES, DType
from stepmark.core.ops import Phase
from stepmark.core.workload import COMMUNICATIONS, CommOp

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_PAIRS = ("send", "recv_", "isend", "irecv")
_BATCH = "batch_p2p_ops"
_ROOTED = ("broadcast_", "reduce_", "gather_", "scatter_")
_REDUCTIONS = {
    dist.ReduceOp.SUM: RedOp.SUM,
    dist.ReduceOp.AVG: RedOp.AVG,
    dist.ReduceOp.PRODUCT: RedOp.PROD,
    dist.ReduceOp.MIN: RedOp.MIN,
    dist.ReduceOp.MAX: RedOp.MAX,
    dist.ReduceOp.PREMUL_SUM: RedOp.MULSUM,
}
_BY_NUMBER = {int(one.value): redop for one, redop in _REDUCTIONS.items()}
_BY_WORD = {
    "sum": RedOp.SUM,
    "avg": RedOp.AVG,
    "product": RedOp.PROD,
    "min": RedOp.MIN,
    "max": RedOp.MAX,
}


def communicated(
    name: str, values: Sequence[Any], result: Any, groups: Groups, phase: Phase, place: Place
) -> Iterator[CommOp]:
    """The messages of one operator of torch; none in a group of one rank.

    What has no name here is left out, and noted in groups.notes.
    """
    group = next((found for value in values if (found := group_of(value))), None)
    found = list(kinds(name, values, result, ""))
    if group is None or group.size() == 1:
        return
    for kind, peer in zip(found, _peers(name, values, group, len(found)), strict=True):
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
            module=place.module,
            layer=place.layer,
            microbatch=place.microbatch,
            redop=_redop(kind.collective, values),
            root=int(_numbers(values)[0]) if name in _ROOTED else None,
            peer=peer,
        )


def _peers(name: str, values: Sequence[Any], group: Any, count: int) -> Sequence[int | None]:
    if name == _BATCH:
        return [(int(one) - group.rank()) % group.size() for one in values[1]]
    if name in _PAIRS:
        return [(_numbers(values)[0] - group.rank()) % group.size()]
    return [None] * count


def _numbers(values: Sequence[Any]) -> list[int]:
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _redop(collective: str, values: Sequence[Any]) -> RedOp:
    if collective not in list(Collective) or not FACTS[Collective(collective)].reduces:
        return RedOp.NONE
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            return _BY_NUMBER.get(int(value.op()), RedOp.SUM)  # type: ignore[attr-defined]
        if isinstance(value, str) and value in _BY_WORD:
            return _BY_WORD[value]
    return RedOp.SUM
