"""In which order FSDP2 gathers and reduces around the modules of one model, call by call.

The states and hooks of torch 2.13, torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py
(unshard, wait_for_unshard, pre_forward, post_forward, pre_backward, post_backward,
_backward_prefetch), _fsdp_state.py (_pre_forward, _pre_backward,
_root_post_backward_final_callback) and _fsdp_collectives.py (foreach_all_gather,
foreach_reduce). Streams are theirs: gathers on "fsdp", reductions on "fsdp_reduce", those
over replicas on "fsdp_replicate"; copies in and out of their buffers on "compute".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, ComputeOp, Item, Kernel, Run
from stepmark.workload.job import Comms
from stepmark.workload.units import Param

GATHER, REDUCE, REPLICATE = "fsdp", "fsdp_reduce", "fsdp_replicate"
_COPY_OUT = "copy_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Of all groups of a model. gathered, reduced: dtypes on the wire; kept: of shards.

    reshard: ranks to gather over again in the backward pass; 0: as many as the shards, None:
    weights stay. held: a gradient waits over micro-batches, in the dtype it is reduced in.
    """

    comms: Comms
    gathered: DType
    reduced: DType
    reshard: int | None = 0
    prefetch: int = 1
    held: bool = False


@dataclass(slots=True, eq=False)
class Group:
    """Parameters that are gathered and reduced together. layer: the first one's, or None."""

    module: str
    params: tuple[Param, ...]
    layer: int | None = None
    shards: str = "fsdp"
    reshard: int | None = 0
    in_backward: bool = True  # False: its backward pass needs no weights
    ahead: "list[Group]" = field(default_factory=list)  # gathered early, forward
    behind: "list[Group]" = field(default_factory=list)  # and backward
    is_whole: bool = False
    is_pending: bool = False
    is_inner: bool = False  # sharded over fewer ranks since the forward pass
    issued: int = 0  # number of its newest gather
    places: list[int] = field(default_factory=list)  # in the order of forward passes


class Order:
    """Issues what FSDP does, in the order of the calls of these methods."""

    def __init__(self, sharding: Sharding, suffix: str = "") -> None:
        self._how, self._suffix = sharding, suffix
        self._gathers = 0
        self._passed: list[Group] = []
        self.items: list[Item] = []

    def take(self, layer: int = 0) -> tuple[Item, ...]:
        """What was issued since the last call, layers relative to this one."""
        taken = tuple(_shifted(item, -layer) for item in self.items)
        self.items.clear()
        return taken

    def unshard(self, group: Group, phase: Phase, after: tuple[str, ...]) -> None:
        backward = phase is not Phase.FWD
        if group.is_pending or group.is_whole or (backward and not group.in_backward):
            return
        group.is_pending = True
        shards = group.shards
        ranks = self._how.comms.groups[shards].size
        made = self._how.comms(
            Collective.ALL_GATHER,
            sum(one.padded(ranks) for one in group.params),
            f"{shards}_inner" if group.is_inner else shards,
            phase=phase,
            module=group.module,
            dtype=self._how.gathered,
            layer=group.layer,
            microbatch=0,
            stream=GATHER,
            name=self._named(GATHER),
            after=tuple(self._named(one) for one in after),
        )
        if made:
            self._gathers += 1
            group.issued = self._gathers
        self.items += made

    def wait(self, group: Group, phase: Phase) -> None:
        """Weights are copied out of the buffer of the newest gather of this group."""
        if not group.is_pending:
            return
        group.is_pending, group.is_whole = False, True
        ranks = self._how.comms.groups[group.shards].size
        if ranks == 1:
            return
        size = sum(one.padded(ranks) for one in group.params) * self._how.gathered.itemsize
        back = self._gathers - group.issued
        after = self._named(GATHER) + (f"~{back}" if back else "")
        self._copy("fsdp_copy_out", 2 * size, group, phase, after=(after,), name=_COPY_OUT)

    def pre_forward(self, group: Group) -> None:
        # The buffer of the gather before the last is free once it was copied from.
        self.unshard(group, Phase.FWD, (f"{_COPY_OUT}~1",))
        self.wait(group, Phase.FWD)
        for other in group.ahead:
            self.unshard(other, Phase.FWD, (f"{_COPY_OUT}~1",))

    def post_forward(self, group: Group) -> None:
        if group.reshard is not None:
            group.is_whole = False
            group.is_inner = group.reshard > 0
        group.places.append(len(self._passed))
        self._passed.append(group)

    def pre_backward(self, group: Group) -> None:
        self.unshard(group, Phase.BWD, (_COPY_OUT,))
        self.wait(group, Phase.BWD)
        if group.behind:
            for other in group.behind:
                self.unshard(other, Phase.BWD, (_COPY_OUT,))
        elif group.places and (place := group.places.pop()) > 0:
            self.unshard(self._passed[place - 1], Phase.BWD, (_COPY_OUT,))

    def post_backward(self, group: Group, *, reduces: bool = True, keeps: bool = False) -> None:
        """keeps: weights stay, as in a pipeline."""
        if not keeps:
            group.is_whole = group.is_inner = False
        trained = [one for one in group.params if one.is_trained]
        if not reduces or not trained:
            return
        how, comms = self._how, self._how.comms
        for one in trained:
            if one.is_partial:
                self.items += comms(
                    Collective.ALL_REDUCE,
                    one.numel,
                    "tp",
                    phase=Phase.BWD,
                    module=one.part,
                    dtype=how.reduced if how.held else how.gathered,
                    layer=group.layer,
                    microbatch=0,
                )
        ranks = comms.groups[group.shards].size
        whole = sum(one.padded(ranks) for one in trained)
        if ranks * comms.groups["replicate"].size > 1:
            read = sum(one.numel for one in trained) * how.gathered.itemsize
            written = whole * how.reduced.itemsize
            after = (self._named(REDUCE),)
            copied = "reduce_copy_in"
            self._copy(
                "fsdp_reduce_copy_in",
                read + written,
                group,
                Phase.BWD,
                after=after,
                name=copied,
            )
        self._reduce(Collective.REDUCE_SCATTER, whole, group, group.shards, REDUCE)
        self._reduce(Collective.ALL_REDUCE, whole // ranks, group, "replicate", REPLICATE)

    def end(self, groups: Iterable[Group]) -> None:
        """After a backward pass: what was recorded of the forward passes is forgotten."""
        self._passed.clear()
        for group in groups:
            group.places.clear()

    def _reduce(
        self, collective: Collective, elements: int, group: Group, ranks: str, stream: str
    ) -> None:
        how = self._how
        before = (
            REDUCE if stream == REPLICATE and how.comms.groups[group.shards].size > 1 else ""
        )
        self.items += how.comms(
            collective,
            elements,
            ranks,
            phase=Phase.BWD,
            module=group.module,
            dtype=how.reduced,
            layer=group.layer,
            microbatch=0,
            stream=stream,
            name=self._named(stream),
            after=(self._named(before or "reduce_copy_in"),),
        )

    def _copy(
        self,
        kernel: str,
        moved: int,
        group: Group,
        phase: Phase,
        *,
        after: tuple[str, ...],
        name: str,
    ) -> None:
        op = ComputeOp(
            op=Kernel(name=kernel, flops=0, bytes_moved=moved),
            phase=phase,
            module=group.module,
            layer=group.layer,
            microbatch=0,
            name=self._named(name),
            after=after,
        )
        self.items.append(op)

    def _named(self, name: str) -> str:
        stem, mark, back = name.partition("~")
        return f"{stem}{self._suffix}{mark}{back}"


def linked(groups: Sequence[Group], prefetch: int) -> None:
    """Explicit prefetching of groups of blocks; torch gathers one ahead by itself.

    bench/training/parallelize.py: _prefetch.
    """
    if prefetch <= 1:
        return
    for index, group in enumerate(groups):
        group.ahead = list(groups[index + 1 : index + 1 + prefetch])
        group.behind = list(groups[max(0, index - prefetch) : index][::-1])


def _shifted(item: Item, layers: int) -> Item:
    if isinstance(item, CommOp | ComputeOp):
        return item if item.layer is None else replace(item, layer=item.layer + layers)
    return replace(item, layer=item.layer + layers) if isinstance(item, Run) else item
