"""FSDP2's parameter groups, and the order of what it does around the modules of one model.

FsdpOrder is called as the hooks of modules are, and calls a receiver with the events that
follow: a gather is issued, weights are copied out of its buffer, freed, and so on.
fsdp_recorder.py makes operations of them, step_memory/fsdp_memory.py allocations.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py (unshard,
wait_for_unshard, pre_forward, post_forward, pre_backward, post_backward, _backward_prefetch,
finalize_backward) and _fsdp_state.py (_pre_forward, _post_forward, _pre_backward,
_root_post_backward_final_callback).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stepmark.model.ops import Phase

P = TypeVar("P")  # a parameter


@dataclass(slots=True, eq=False)
class ParamGroup(Generic[P]):
    """Parameters that are gathered and reduced together. layer: the first one's.

    reshard: ranks to gather over again in the backward pass; 0: all shards, None: weights stay.
    """

    module: str
    params: Sequence[P]
    layer: int | None = None
    shards: str = "fsdp"
    reshard: int | None = 0
    in_backward: bool = True  # False: its backward pass needs no weights
    ahead: "list[ParamGroup[P]]" = field(default_factory=list)  # gathered early, forward
    behind: "list[ParamGroup[P]]" = field(default_factory=list)  # and backward
    is_whole: bool = False
    is_pending: bool = False
    is_inner: bool = False  # sharded over fewer ranks since the forward pass
    # For forward passes without a backward: the group before, and how often in a row.
    before: "list[tuple[ParamGroup[P] | None, int]]" = field(default_factory=list)

    def push(self, other: "ParamGroup[P] | None") -> None:
        """Record a forward pass that came after the other group's."""
        last, count = self.before[-1] if self.before else (None, 0)
        if count and last is other:
            self.before[-1] = other, count + 1
        else:
            self.before.append((other, 1))

    def pop(self) -> "list[ParamGroup[P]]":
        """Remove the newest forward pass, and return the group before it, if there is one."""
        if not self.before:
            return []
        other, count = self.before.pop()
        if count > 1:
            self.before.append((other, count - 1))
        return [other] if other else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroups(Generic[P]):
    """Groups of a model or of a pipeline stage, and all of them in the order of named_modules.

    blocks: each of blocks_per_group blocks. experts: by block, if they have their own.
    """

    all: tuple[ParamGroup[P], ...] = ()
    root: ParamGroup[P] | None = None
    embedding: ParamGroup[P] | None = None
    blocks: tuple[ParamGroup[P], ...] = ()
    experts: tuple[ParamGroup[P] | None, ...] = ()
    output: ParamGroup[P] | None = None


def reshard_ranks(text: str) -> int | None:
    """Return the ranks to reshard over. 0: all shards; None: no resharding."""
    return int({"yes": "0"}.get(text, text)) if text != "no" else None


def group_params(
    blocks: Sequence[tuple[Sequence[P], Sequence[P] | None]],
    *,
    embedding: Sequence[P] | None,
    output: Sequence[P] | None,
    first_layer: int = 0,
    reshard: int | None = 0,
    prefetch: int = 1,
    blocks_per_group: int = 1,
    root_has_ends: bool = False,
    regathers_table: bool = False,
) -> FsdpGroups[P]:
    """Return the groups of a model that is wrapped as in training/parallelize.py: _fsdp.

    blocks: parameters of each, and those of experts that are sharded by themselves.
    """
    root = first = last = None
    ends = [params for params in (embedding, output) if params is not None]
    if ends and root_has_ends:
        params = tuple(param for params in ends for param in params)
        root = ParamGroup(module="root", params=params, reshard=None)
    if embedding is not None and not root_has_ends:
        first = ParamGroup(
            module="embedding", params=embedding, reshard=reshard, in_backward=regathers_table
        )
    if output is not None and not root_has_ends:
        # Its backward pass comes first, so resharding would be undone at once.
        last = ParamGroup(module="output", params=output, reshard=None)
    parts = [
        ParamGroup(
            module="blocks",
            params=[x for others, _ in blocks[at : at + blocks_per_group] for x in others],
            layer=first_layer + at,
            reshard=reshard,
        )
        for at in range(0, len(blocks), blocks_per_group)
    ]
    if prefetch > 1:  # torch gathers one group ahead by itself
        _link(parts, prefetch)
    experts = [
        ParamGroup(
            module="experts", params=params, layer=layer, shards="expert_fsdp", reshard=reshard
        )
        if params is not None
        else None
        for layer, (_, params) in enumerate(blocks, first_layer)
    ]
    inside = (
        group
        for at, part in enumerate(parts)
        for group in (part, *experts[at * blocks_per_group : (at + 1) * blocks_per_group])
    )
    return FsdpGroups(
        all=tuple(group for group in (root, first, *inside, last) if group),
        root=root,
        embedding=first,
        blocks=tuple(parts),
        experts=tuple(experts),
        output=last,
    )


def _link(parts: list[ParamGroup[P]], prefetch: int) -> None:
    """Set up explicit prefetching (training/parallelize.py: _prefetch)."""
    for index, part in enumerate(parts):
        part.ahead = parts[index + 1 : index + 1 + prefetch]
        part.behind = parts[max(0, index - prefetch) : index][::-1]


class FsdpEvents(Generic[P]):
    """Receiver of events, which does nothing about those that it does not define.

    phase: the pass whose hook it is; None: between passes.
    """

    def gather(self, group: ParamGroup[P], phase: Phase | None) -> None:
        """Issue a gather into a new buffer."""

    def copy_out(self, group: ParamGroup[P], phase: Phase) -> None:
        """Copy weights out of the buffer into tensors of their own."""

    def free_buffer(self, group: ParamGroup[P]) -> None:
        """Free the buffer of a gather."""

    def reshard(self, group: ParamGroup[P]) -> None:
        """Free gathered weights, all but this rank's share of them if the group is inner."""

    def collect_grads(self, group: ParamGroup[P], *, reduces: bool) -> None:
        """Issue the reduction of gradients, or let them wait for a later one."""

    def finalize(self, *, reduces: bool) -> None:
        """End the last backward pass, and wait for its reductions."""


class FsdpOrder(Generic[P]):
    """FSDP's states, as the hooks of the modules of one model change them."""

    def __init__(self, groups: FsdpGroups[P], events: FsdpEvents[P]) -> None:
        self.groups = groups.all
        self._events = events
        self._newest: ParamGroup[P] | None = None  # of the newest forward pass
        self._copied: ParamGroup[P] | None = None  # its buffer is freed before the next copy
        self._is_unsharding = False  # all weights were gathered at once before a pass

    @property
    def state(self) -> tuple[object, ...]:
        """Return the state on which later calls depend, without the number of open passes."""
        return self._newest, *(
            (group.is_whole, group.is_pending, group.is_inner, *(o for o, _ in group.before))
            for group in self.groups
        )

    def unshard(self) -> None:
        """Gather all weights between passes: a pipeline's UNSHARD."""
        self._is_unsharding = True
        for group in self.groups:
            self._unshard(group, None)

    def wait_for_unshard(self, phase: Phase) -> None:
        """Begin a pass with all weights that `unshard` gathered (_assert_unsharded)."""
        if self._is_unsharding:
            for group in self.groups:
                self._wait(group, phase)
        self._is_unsharding = False

    def reshard(self) -> None:
        """Free weights between passes: a pipeline's RESHARD."""
        for group in self.groups:
            self._reshard(group)

    def pre_forward(self, group: ParamGroup[P] | None) -> None:
        if group:
            self._begin(group, Phase.FWD, group.ahead)

    def post_forward(self, group: ParamGroup[P] | None) -> None:
        if group:
            if group.reshard is not None:
                self._reshard(group, is_inner=group.reshard > 0)
            group.push(self._newest)
            self._newest = group

    def end_forward(self) -> None:
        """End a forward pass of the whole model (_post_forward of the root)."""
        if self._copied:
            self._events.free_buffer(self._copied)
            self._copied = None

    def pre_backward(self, group: ParamGroup[P] | None) -> None:
        if group:
            self._begin(group, Phase.BWD, group.behind or group.pop())

    def post_backward(
        self, group: ParamGroup[P] | None, *, reduces: bool = True, keeps: bool = False
    ) -> None:
        """keeps: weights stay gathered, as in a pipeline."""
        if group:
            if not keeps:
                self._reshard(group)
            self._events.collect_grads(group, reduces=reduces)

    def finalize(self, *, reduces: bool = True) -> None:
        """End the last backward pass and forget the forward passes."""
        self._newest = None
        for group in self.groups:
            if group.is_pending:
                self._events.free_buffer(group)
            group.is_pending = False
            group.before.clear()
        self._events.finalize(reduces=reduces)

    def _begin(
        self, group: ParamGroup[P], phase: Phase, others: Sequence[ParamGroup[P]]
    ) -> None:
        """Let a module have its weights, and gather others ahead of time."""
        self._unshard(group, phase)
        self._wait(group, phase, keeps_buffer=phase is Phase.FWD)
        for other in others:
            self._unshard(other, phase)

    def _unshard(self, group: ParamGroup[P], phase: Phase | None) -> None:
        is_unused = phase is Phase.BWD and not group.in_backward
        if not (group.is_pending or group.is_whole or is_unused):
            group.is_pending = True
            self._events.gather(group, phase)

    def _wait(self, group: ParamGroup[P], phase: Phase, *, keeps_buffer: bool = False) -> None:
        """keeps_buffer: until the next such copy, which thus overlaps with the next gather."""
        if not group.is_pending:
            return
        if keeps_buffer:
            self.end_forward()
        self._events.copy_out(group, phase)
        group.is_pending = False
        group.is_whole = True
        if keeps_buffer:
            self._copied = group
        else:
            self._events.free_buffer(group)

    def _reshard(self, group: ParamGroup[P], *, is_inner: bool = False) -> None:
        group.is_whole = False
        group.is_inner = is_inner
        self._events.reshard(group)
