"""What sends and receives are of: stages of torch.distributed.pipelining tell, else ranks do.

Source: torch 2.13, distributed/pipelining/stage.py (the operations that a stage offers, by
micro-batch) and distributed_c10d.py (a batch of them is one group call on NCCL).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from stepmark.core.message import SEND
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, Group

_OFFERED = {
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
        # By the tensor's identity; it is held so that no other can have the same.
        self._offered: dict[int, tuple[Tensor, Phase, int]] = {}
        self._in_batch = 0  # how many of the batch being issued there were, and 1

    def watched(self) -> Iterator[tuple[tuple[Any, str], Callable[..., Any]]]:
        """Functions of torch to follow, each with what replaces it."""
        for name, phase in _OFFERED.items():
            if hasattr(_PipelineStageBase, name):
                original = getattr(_PipelineStageBase, name)
                yield (_PipelineStageBase, name), self._noting(original, phase)
        original = dist.batch_isend_irecv
        for module in (dist, dist.distributed_c10d):
            yield (module, "batch_isend_irecv"), self._batching(original)

    def told(self, op: CommOp, tensor: Tensor, group: Group, *, outside: bool) -> CommOp:
        """outside: of all modules and backward passes, where no place tells the phase."""
        is_fused = self._in_batch > 1
        self._in_batch += bool(self._in_batch)
        _, phase, microbatch = self._offered.pop(id(tensor), (None, None, op.microbatch))
        if phase is not None:
            return replace(
                op,
                phase=phase,
                module=MODULE,
                layer=None,
                microbatch=microbatch,
                fused=is_fused,
            )
        if outside:
            op = replace(op, phase=self._by_ranks(op, group), module=MODULE)
        return replace(op, fused=is_fused)

    def _by_ranks(self, op: CommOp, group: Group) -> Phase:
        """To later ranks go activations, to earlier ones gradients."""
        own = group.members(self._rank).index(self._rank)
        is_later = (own + (op.peer or 0)) % group.size > own
        return Phase.FWD if is_later is (op.collective == SEND) else Phase.BWD

    def _noting(self, original: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(stage: Any, microbatch: int) -> Any:
            found = original(stage, microbatch)
            for one in found:
                self._offered[id(one.tensor)] = one.tensor, phase, microbatch
            return found

        return call

    def _batching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._batch():
                return original(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        self._in_batch = 1
        try:
            yield
        finally:
            self._in_batch = 0
