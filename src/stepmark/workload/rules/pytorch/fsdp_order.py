"""In which order FSDP2 gathers and reduces around the modules of one model, call by call.

The states and hooks of torch 2.13, torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py
(unshard, wait_for_unshard, pre_forward, post_forward, pre_backward, post_backward,
_backward_prefetch), _fsdp_state.py (_pre_forward, _pre_backward,
_root_post_backward_final_callback) and _fsdp_collectives.py (foreach_all_gather,
foreach_reduce). Gathers and reductions of a process group are on one stream, named after it,
though torch has two: a group does one at a time (core/workload.py). Torch's own order of
gathers, whatever their group, is told by `after`; that of reductions follows from the copies
into their buffers, each of which waits for the reduction before it. Copies in and out of
buffers are on "compute".
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.module import Param
from stepmark.core.ops import Phase
from stepmark.core.workload import FSDP_REPLICATE, ComputeOp, Item, Kernel
from stepmark.core.workload import Group as RankGroup
from stepmark.workload.job import Comms
from stepmark.workload.pipeline import PASSED, in_layer, wait

GATHER, REDUCE, REPLICATE = "fsdp", "fsdp_reduce", "fsdp_replicate"  # what others wait for
_COPY_IN, _COPY_OUT = "reduce_copy_in", "copy_out"


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


_ALONE = dict.fromkeys(("fsdp", "replicate"), RankGroup(digits=((1, 1),)))
UNSHARDED = Sharding(comms=Comms(groups=_ALONE), gathered=DType.FP32, reduced=DType.FP32)


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
    # By forward pass without its backward one: the group before, and how often in a row.
    before: "list[tuple[Group | None, int]]" = field(default_factory=list)

    def pushed(self, other: "Group | None") -> None:
        """After a forward pass that came behind the other one's."""
        last, count = self.before[-1] if self.before else (None, 0)
        if count and last is other:
            self.before[-1] = other, count + 1
        else:
            self.before.append((other, 1))

    def popped(self) -> "Group | None":
        """What came before in the newest forward pass, which is forgotten."""
        if not self.before:
            return None
        other, count = self.before.pop()
        if count > 1:
            self.before.append((other, count - 1))
        return other


class Order:
    """Issues what FSDP does, in the order of the calls of these methods; nothing for None."""

    def __init__(self, sharding: Sharding, suffix: str = "") -> None:
        self._how, self._suffix = sharding, suffix
        self._gathers = 0
        self._newest: Group | None = None  # whose forward pass was the last
        self._begins = False  # a forward pass began, and no gather has waited for that yet
        self._passed = 0  # how many PASSED since then
        self._gathered_on = ""  # stream of the newest gather, if it may be under way
        self._microbatch: int | None = 0
        self.items: list[Item] = []

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """What is issued inside belongs to no micro-batch, but to all of them."""
        self._microbatch = None
        try:
            yield
        finally:
            self._microbatch = 0

    def take(self, layer: int = 0) -> tuple[Item, ...]:
        """What was issued since the last call, layers relative to this one."""
        taken = tuple(in_layer(item, -layer) for item in self.items)
        self.items.clear()
        return taken

    def begin(self) -> None:
        """A forward pass: gathers wait for what was computed before (_root_pre_forward).

        That includes copies out of all gathers so far.
        """
        self._begins = self._how.comms.groups["fsdp"].size > 1
        self._passed, self._gathered_on = 0, ""

    def passed(self, times: int = 1) -> None:
        """So many operations named PASSED were issued."""
        self._passed += times

    def state(self, groups: Iterable[Group]) -> tuple[object, ...]:
        """All that later calls depend on, but for how often passes lie open."""
        groups = tuple(groups)
        may_gather = self._begins and not all(one.is_whole for one in groups)
        passed = self._passed if may_gather else -1
        found: list[object] = [self._newest, self._begins, passed, self._gathered_on]
        for one in groups:
            back = self._gathers - one.issued if one.is_pending else -1
            others = tuple(other for other, _ in one.before)
            found.append((one.is_whole, one.is_inner, back, others))
        return tuple(found)

    def unshard(self, group: Group, phase: Phase, after: tuple[str, ...]) -> None:
        backward = phase is not Phase.FWD
        if group.is_pending or group.is_whole or (backward and not group.in_backward):
            return
        group.is_pending = True
        ranks = self._how.comms.groups[group.shards].size
        stream = f"{group.shards}_inner" if group.is_inner else group.shards
        if self._begins and PASSED not in after:
            after = (*after, f"{PASSED}~{self._passed}" if self._passed else PASSED)
        if self._gathered_on not in ("", stream):
            after = (*after, GATHER)
        made = self._how.comms(
            Collective.ALL_GATHER,
            sum(one.padded(ranks) for one in group.params),
            stream,
            phase=phase,
            module=group.module,
            dtype=self._how.gathered,
            layer=group.layer,
            microbatch=self._microbatch,
            stream=stream,
            name=self._named(GATHER),
            after=tuple(self._named(one) for one in after),
        )
        if made:
            self._gathers += 1
            group.issued = self._gathers
            self._gathered_on, self._begins = stream, False
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

    def pre_forward(self, group: Group | None) -> None:
        if group is None:
            return
        # The buffer of the gather before the last is free once it was copied from.
        self.unshard(group, Phase.FWD, (f"{_COPY_OUT}~1",))
        self.wait(group, Phase.FWD)
        for other in group.ahead:
            self.unshard(other, Phase.FWD, (f"{_COPY_OUT}~1",))

    def post_forward(self, group: Group | None) -> None:
        if group is None:
            return
        if group.reshard is not None:
            group.is_whole = False
            group.is_inner = group.reshard > 0
        group.pushed(self._newest)
        self._newest = group

    def pre_backward(self, group: Group | None) -> None:
        if group is None:
            return
        self.unshard(group, Phase.BWD, (_COPY_OUT,))
        self.wait(group, Phase.BWD)
        if group.behind:
            for other in group.behind:
                self.unshard(other, Phase.BWD, (_COPY_OUT,))
        elif (before := group.popped()) is not None:
            self.unshard(before, Phase.BWD, (_COPY_OUT,))

    def post_backward(
        self, group: Group | None, *, reduces: bool = True, keeps: bool = False
    ) -> None:
        """keeps: weights stay, as in a pipeline."""
        if group is None:
            return
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
                    Phase.BWD,
                    one.part,
                    how.reduced if how.held else how.gathered,
                    layer=group.layer,
                    microbatch=self._microbatch,
                )
        ranks = comms.groups[group.shards].size
        whole = sum(one.padded(ranks) for one in trained)
        if ranks * comms.groups["replicate"].size > 1:
            read = sum(one.numel for one in trained) * how.gathered.itemsize
            written = whole * how.reduced.itemsize
            # Torch waits for what is scattered, and not for its sum over the replicas.
            after = (self._named(REDUCE),) if comms.groups["fsdp"].size > 1 else ()
            kernel = "fsdp_reduce_copy_in"
            self._copy(kernel, read + written, group, Phase.BWD, after=after, name=_COPY_IN)
        self._reduce(Collective.REDUCE_SCATTER, whole, group)
        self._reduce(Collective.ALL_REDUCE, whole // ranks, group)

    def end(self, groups: Iterable[Group], *, reduces: bool = True) -> None:
        """After the last backward pass: what was recorded of forward passes is forgotten.

        The computation goes on when all gradients are reduced (finalize_backward).
        """
        self._newest = None
        for group in groups:
            group.is_pending = False
            group.before.clear()
        streams, ranks = {"fsdp": REDUCE, "replicate": REPLICATE}, self._how.comms.groups
        names = [self._named(name) for one, name in streams.items() if ranks[one].size > 1]
        if names and reduces:
            self.items.append(wait(tuple(names), Phase.BWD))

    def _reduce(self, collective: Collective, elements: int, group: Group) -> None:
        """Scattered over the shards, or what was scattered summed over the replicas."""
        how, scatters = self._how, collective is Collective.REDUCE_SCATTER
        is_second = not scatters and how.comms.groups[group.shards].size > 1
        self.items += how.comms(
            collective,
            elements,
            group.shards if scatters else "replicate",
            Phase.BWD,
            group.module,
            how.reduced,
            layer=group.layer,
            microbatch=self._microbatch,
            stream=group.shards if scatters else FSDP_REPLICATE,
            name=self._named(REDUCE if scatters else REPLICATE),
            after=(self._named(REDUCE if is_second else _COPY_IN),),
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
            microbatch=self._microbatch,
            name=self._named(name),
            after=after,
        )
        self.items.append(op)

    def _named(self, name: str) -> str:
        stem, mark, back = name.partition("~")
        if stem == PASSED:  # whatever it is a pass of
            return name
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
