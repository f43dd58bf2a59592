"""Streams of FSDP2 and DDP, and dependencies across them.

Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py (streams and events of
FSDPCommContext), _fsdp_state.py (_root_pre_forward) and _fsdp_collectives.py. Streams are those
of step/workload.py: gathers and reductions that share a process group share one. Across groups
torch keeps gathers in order, and reductions; the copy into a reduction's buffer waits for the
previous reduction.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from stepmark.model.collectives import Collective
from stepmark.step.workload import (
    COMPUTE,
    DDP,
    FSDP,
    FSDP_REDUCE,
    FSDP_REPLICATE,
    CommOp,
    ComputeOp,
    Operation,
)

GATHER = "gather"
COPY_OUT = "copy_out"
GRADS = "grads"
REDUCED = "reduced"
BEFORE = "before"  # computation before a forward pass, whose gathers wait for it


class Overlap:
    """Follows a step and gives operations their streams, names and dependencies."""

    def __init__(self) -> None:
        self._stream = COMPUTE
        self._within = ""  # which of FSDP2's calls
        self._issued: Counter[str] = Counter()  # how many operations of a name there were
        self._gathers: dict[int, int] = {}  # the number of each parameter group's gather
        self._copied_forward: int | None = None  # copy-out that the next gather waits for
        self._gather_after: int | None = None
        self._pass_after: tuple[str, int] | None = None  # name and number, for the next gather
        self._main: dict[str, str] = {}  # by kind of stream the first process group on one
        self._gathered_on = ""  # stream of the newest gather
        self._wait_for: set[str] = set()
        self._copying: int | None = None
        self._ddp_reduces = False
        self._apart = False
        self._reducing = False  # FSDP2: since the backward pass began
        self._scattered = 0  # the number of the newest reduce-scatter since then

    @property
    def reduces(self) -> bool:
        """Whether FSDP2 is reducing gradients, which pipelines have it do after all passes."""
        return self._within == "reduce"

    def beginning(self, before: list[Operation]) -> None:
        """FSDPState._root_pre_forward: the next gather waits for computation `before`."""
        at = _newest_computed(before)
        if at is not None:
            name = self._name_of(before, at, BEFORE)
            self._pass_after = name, self._issued[name]

    @contextlib.contextmanager
    def gathering(self, group: int, *, forward: bool) -> Iterator[None]:
        """FSDPParamGroup.unshard: copy-in and gather, concurrent with the computation."""
        if not forward and self._copied_forward is not None:
            self._gather_after = self._copied_forward
            self._copied_forward = None
        before = self._issued[GATHER]
        with self._in("gather", FSDP):
            yield
        if self._issued[GATHER] > before:
            self._gathers[group] = self._issued[GATHER]

    @contextlib.contextmanager
    def copying_out(self, group: int, *, forward: bool) -> Iterator[None]:
        """FSDPParamGroup.wait_for_unshard: computation waits for the gather.

        The next gather waits for this copy, in the forward pass for the one before it.
        """
        self._copying = self._gathers.pop(group, None)
        waited = self._copying is not None
        if waited and forward and self._copied_forward is not None:
            self._gather_after = self._copied_forward
            self._copied_forward = None
        with self._in("copy out", COMPUTE):
            yield
        self._copying = None
        newest = self._issued[COPY_OUT] or None
        if waited and forward:
            self._copied_forward = newest
        elif waited:
            self._gather_after = newest

    @contextlib.contextmanager
    def reducing(self, *, apart: bool = False) -> Iterator[None]:
        """FSDPParamGroup.post_backward: one reduction's buffer is held at a time.

        apart: gradients are scattered over a process group of their own.
        """
        self._apart = apart
        if self._scattered:
            self._wait_for.add(self._reference(REDUCED, self._scattered))
        with self._in("reduce", COMPUTE):
            yield

    def wait_for_reductions(self) -> None:
        """Let the computation after the backward pass wait for all reductions."""
        if self._reducing:
            self._wait_for.add(REDUCED)
        self._reducing = False
        self._scattered = 0

    def computing(self, op: ComputeOp, *, in_node: bool) -> ComputeOp:
        """Return the operation on its stream. in_node: whether a node of autograd runs it."""
        if self._ddp_reduces and not in_node:  # DDP's last callback, or a later operation
            self._ddp_reduces = False
            self._wait_for.add(REDUCED)
        name = ""
        after = list[str]()
        if self._within == "copy out":
            name = COPY_OUT
            self._issued[COPY_OUT] += 1
            if self._copying is not None:
                after.append(self._reference(GATHER, self._copying))
                self._copying = None
        if self._stream == COMPUTE:
            after += sorted(self._wait_for)
            self._wait_for.clear()
        return replace(op, stream=self._stream, name=name, after=tuple(after))

    def sending(self, op: CommOp, before: list[Operation], *, own: bool, ddp: bool) -> CommOp:
        """Return the operation on its stream. Its dependencies get names in `before`.

        own: called by FSDP2 itself if it is active, not by DTensor on its behalf.
        """
        if ddp:
            self._ddp_reduces = True
            return self._reduction(op, before, DDP)
        if not own:
            return op
        if self._within == "gather":
            return self._gather(op)
        if self._within == "reduce" and self._stream == COMPUTE:
            replicates = op.collective == Collective.ALL_REDUCE
            kind = FSDP_REDUCE if self._apart else FSDP
            self._stream = FSDP_REPLICATE if replicates else self._stream_of(op, kind)
            reduction = self._reduction(op, before, self._stream)
            if not replicates:
                self._scattered = self._issued[REDUCED]
            return reduction
        if self._within == "reduce":  # the all-reduce over replicas after a reduce-scatter
            self._stream = FSDP_REPLICATE
            self._issued[REDUCED] += 1
            return replace(op, stream=self._stream, name=REDUCED, after=(REDUCED,))
        return op

    def _gather(self, op: CommOp) -> CommOp:
        after: list[str] = []
        if self._pass_after is not None:
            after.append(self._reference(*self._pass_after))
            self._pass_after = None
        if self._gather_after is not None:
            after.append(self._reference(COPY_OUT, self._gather_after))
        stream = self._stream_of(op, FSDP)
        if self._gathered_on not in ("", stream):
            after.append(GATHER)
        self._gathered_on = stream
        self._issued[GATHER] += 1
        return replace(op, stream=stream, name=GATHER, after=tuple(dict.fromkeys(after)))

    def _stream_of(self, op: CommOp, kind: str) -> str:
        """Return the main process group's stream, or one named after another group."""
        is_main = op.group == self._main.setdefault(kind, op.group)
        return kind if is_main else f"{kind}_{op.group}"

    def _reduction(self, op: CommOp, before: list[Operation], stream: str) -> CommOp:
        """Return a reduction after the newest computation, which writes the gradients."""
        self._issued[REDUCED] += 1
        self._reducing = True
        at = _newest_computed(before)
        after = () if at is None else (self._name_of(before, at, GRADS),)
        return replace(op, stream=stream, name=REDUCED, after=after)

    def _name_of(self, before: list[Operation], at: int, name: str) -> str:
        """Return the name of an operation; set it to `name` if it has none."""
        if not before[at].name:
            self._issued[name] += 1
            before[at] = replace(before[at], name=name)
        return before[at].name

    def _reference(self, name: str, number: int) -> str:
        back = self._issued[name] - number
        return f"{name}~{back}" if back else name

    def _in(self, within: str, stream: str) -> AbstractContextManager[Any]:
        return mock.patch.multiple(self, _within=within, _stream=stream)


def _newest_computed(before: list[Operation]) -> int | None:
    return next(
        (at for at in reversed(range(len(before))) if before[at].stream == COMPUTE), None
    )
