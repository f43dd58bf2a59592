"""FSDP2's gathers and reductions around the modules of one model, call by call.

They follow the states and hooks of torch 2.13, torch/distributed/fsdp/_fully_shard:
_fsdp_param_group.py (unshard, wait_for_unshard, pre_forward, post_forward, pre_backward,
post_backward, _backward_prefetch), _fsdp_state.py (_pre_forward, _pre_backward,
_root_post_backward_final_callback) and _fsdp_collectives.py (foreach_all_gather,
foreach_reduce). Gathers and reductions of a process group are on one stream, named after it,
though torch has two: a group runs one at a time (step/workload.py). `after` gives torch's order
of gathers, whatever their group; that of reductions follows from the copies into their buffers,
each of which waits for the reduction before it. Copies in and out of buffers are on "compute".
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.module import Param
from stepmark.step.workload import FSDP_REPLICATE, ComputeOp, Group, Item, Kernel
from stepmark.workloads.job import Comms
from stepmark.workloads.pipeline import COMPUTE_DONE, in_layer, wait

GATHER, REDUCE, REPLICATE = "fsdp", "fsdp_reduce", "fsdp_replicate"  # names for `after`
_COPY_IN, _COPY_OUT = "reduce_copy_in", "copy_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of all groups of a model. gathered, reduced: dtypes of messages.

    reshard: ranks to gather over again in the backward pass; 0: all shards, None: weights stay.
    accumulates: unsharded gradients accumulate over micro-batches, in the reduced dtype.
    """

    comms: Comms
    gathered: DType
    reduced: DType
    reshard: int | None = 0
    prefetch: int = 1
    accumulates: bool = False


_ALONE = dict.fromkeys(("fsdp", "replicate"), Group(digits=((1, 1),)))
UNSHARDED = Sharding(comms=Comms(groups=_ALONE), gathered=DType.FP32, reduced=DType.FP32)


@dataclass(slots=True, eq=False)
class ParamGroup:
    """Parameters that are gathered and reduced together. layer: the first one's."""

    module: str
    params: tuple[Param, ...]
    layer: int | None = None
    shards: str = "fsdp"
    reshard: int | None = 0
    in_backward: bool = True  # False: its backward pass needs no weights
    ahead: "list[ParamGroup]" = field(default_factory=list)  # gathered early, forward
    behind: "list[ParamGroup]" = field(default_factory=list)  # and backward
    is_whole: bool = False
    is_pending: bool = False
    is_inner: bool = False  # sharded over fewer ranks since the forward pass
    issued: int = 0  # number of its newest gather
    # For forward passes without a backward: the group before, and how often in a row.
    before: "list[tuple[ParamGroup | None, int]]" = field(default_factory=list)

    def push(self, other: "ParamGroup | None") -> None:
        """Record a forward pass that came after the other group's."""
        last, count = self.before[-1] if self.before else (None, 0)
        if count and last is other:
            self.before[-1] = other, count + 1
        else:
            self.before.append((other, 1))

    def pop(self) -> "ParamGroup | None":
        """Remove the newest forward pass, and return the group before it."""
        if not self.before:
            return None
        other, count = self.before.pop()
        if count > 1:
            self.before.append((other, count - 1))
        return other


class FsdpRecorder:
    """Recorder of FSDP's operations, in the order of these calls; None records nothing."""

    def __init__(self, sharding: Sharding, suffix: str = "") -> None:
        self._sharding, self._suffix = sharding, suffix
        self._gathers = 0
        self._newest: ParamGroup | None = None  # of the newest forward pass
        self._begins = False  # a forward pass began, and no gather has waited for it yet
        self._num_compute_done = 0  # number of COMPUTE_DONE since then
        self._gathered_on = ""  # stream of the newest gather that may still run
        self._microbatch: int | None = 0
        self.items: list[Item] = []

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """Record operations that belong to all micro-batches."""
        self._microbatch = None
        try:
            yield
        finally:
            self._microbatch = 0

    def take(self, layer: int = 0) -> tuple[Item, ...]:
        """Return the operations since the last call, layers relative to this one."""
        items = tuple(in_layer(item, -layer) for item in self.items)
        self.items.clear()
        return items

    def begin(self) -> None:
        """Begin a forward pass, whose gathers wait for earlier computation (_root_pre_forward).

        That includes copies out of all gathers so far.
        """
        self._begins = self._sharding.comms.groups["fsdp"].size > 1
        self._num_compute_done, self._gathered_on = 0, ""

    def count_compute_done(self, times: int = 1) -> None:
        """Count operations named COMPUTE_DONE."""
        self._num_compute_done += times

    def state(self, groups: Iterable[ParamGroup]) -> tuple[object, ...]:
        """Return the state on which later calls depend, without the number of open passes."""
        groups = tuple(groups)
        may_gather = self._begins and not all(group.is_whole for group in groups)
        num_done = self._num_compute_done if may_gather else -1
        state: list[object] = [self._newest, self._begins, num_done, self._gathered_on]
        for group in groups:
            distance = self._gathers - group.issued if group.is_pending else -1
            others = tuple(other for other, _ in group.before)
            state.append((group.is_whole, group.is_inner, distance, others))
        return tuple(state)

    def unshard(self, group: ParamGroup, phase: Phase, after: tuple[str, ...]) -> None:
        backward = phase is not Phase.FWD
        if group.is_pending or group.is_whole or (backward and not group.in_backward):
            return
        group.is_pending = True
        ranks = self._sharding.comms.groups[group.shards].size
        stream = f"{group.shards}_inner" if group.is_inner else group.shards
        if self._begins and COMPUTE_DONE not in after:
            after = (
                *after,
                f"{COMPUTE_DONE}~{self._num_compute_done}"
                if self._num_compute_done
                else COMPUTE_DONE,
            )
        if self._gathered_on not in ("", stream):
            after = (*after, GATHER)
        ops = self._sharding.comms(
            Collective.ALL_GATHER,
            sum(param.padded(ranks) for param in group.params),
            stream,
            phase=phase,
            module=group.module,
            dtype=self._sharding.gathered,
            layer=group.layer,
            microbatch=self._microbatch,
            stream=stream,
            name=self._named(GATHER),
            after=tuple(self._named(name) for name in after),
        )
        if ops:
            self._gathers += 1
            group.issued = self._gathers
            self._gathered_on, self._begins = stream, False
        self.items += ops

    def wait(self, group: ParamGroup, phase: Phase) -> None:
        """Copy weights out of the buffer of the newest gather of this group."""
        if not group.is_pending:
            return
        group.is_pending, group.is_whole = False, True
        ranks = self._sharding.comms.groups[group.shards].size
        if ranks == 1:
            return
        size = (
            sum(param.padded(ranks) for param in group.params)
            * self._sharding.gathered.itemsize
        )
        distance = self._gathers - group.issued
        after = self._named(GATHER) + (f"~{distance}" if distance else "")
        self._copy("fsdp_copy_out", 2 * size, group, phase, after=(after,), name=_COPY_OUT)

    def pre_forward(self, group: ParamGroup | None) -> None:
        if group is None:
            return
        # The buffer of the gather before the last is free once its copy is done.
        self.unshard(group, Phase.FWD, (f"{_COPY_OUT}~1",))
        self.wait(group, Phase.FWD)
        for other in group.ahead:
            self.unshard(other, Phase.FWD, (f"{_COPY_OUT}~1",))

    def post_forward(self, group: ParamGroup | None) -> None:
        if group is None:
            return
        if group.reshard is not None:
            group.is_whole = False
            group.is_inner = group.reshard > 0
        group.push(self._newest)
        self._newest = group

    def pre_backward(self, group: ParamGroup | None) -> None:
        if group is None:
            return
        self.unshard(group, Phase.BWD, (_COPY_OUT,))
        self.wait(group, Phase.BWD)
        if group.behind:
            for other in group.behind:
                self.unshard(other, Phase.BWD, (_COPY_OUT,))
        elif (before := group.pop()) is not None:
            self.unshard(before, Phase.BWD, (_COPY_OUT,))

    def post_backward(
        self, group: ParamGroup | None, *, reduces: bool = True, keeps: bool = False
    ) -> None:
        """keeps: weights stay gathered, as in a pipeline."""
        if group is None:
            return
        if not keeps:
            group.is_whole = group.is_inner = False
        trained = [param for param in group.params if param.is_trained]
        if not reduces or not trained:
            return
        sharding, comms = self._sharding, self._sharding.comms
        for param in trained:
            if param.is_partial:
                self.items += comms(
                    Collective.ALL_REDUCE,
                    param.numel,
                    "tp",
                    Phase.BWD,
                    param.part,
                    sharding.reduced if sharding.accumulates else sharding.gathered,
                    layer=group.layer,
                    microbatch=self._microbatch,
                )
        ranks = comms.groups[group.shards].size
        padded = sum(param.padded(ranks) for param in trained)
        if ranks * comms.groups["replicate"].size > 1:
            read = sum(param.numel for param in trained) * sharding.gathered.itemsize
            written = padded * sharding.reduced.itemsize
            # Torch waits for the scattered gradients, not for their sum over the replicas.
            after = (self._named(REDUCE),) if comms.groups["fsdp"].size > 1 else ()
            kernel = "fsdp_reduce_copy_in"
            self._copy(kernel, read + written, group, Phase.BWD, after=after, name=_COPY_IN)
        self._reduce(Collective.REDUCE_SCATTER, padded, group)
        self._reduce(Collective.ALL_REDUCE, padded // ranks, group)

    def end(self, groups: Iterable[ParamGroup], *, reduces: bool = True) -> None:
        """End the last backward pass and forget the forward passes.

        The computation continues when all gradients are reduced (finalize_backward).
        """
        self._newest = None
        for group in groups:
            group.is_pending = False
            group.before.clear()
        streams, ranks = {"fsdp": REDUCE, "replicate": REPLICATE}, self._sharding.comms.groups
        names = [self._named(name) for kind, name in streams.items() if ranks[kind].size > 1]
        if names and reduces:
            self.items.append(wait(tuple(names), Phase.BWD))

    def _reduce(self, collective: Collective, elements: int, group: ParamGroup) -> None:
        """Scatter over the shards, or sum the scattered part over the replicas."""
        sharding, scatters = self._sharding, collective is Collective.REDUCE_SCATTER
        is_second = not scatters and sharding.comms.groups[group.shards].size > 1
        self.items += sharding.comms(
            collective,
            elements,
            group.shards if scatters else "replicate",
            Phase.BWD,
            group.module,
            sharding.reduced,
            layer=group.layer,
            microbatch=self._microbatch,
            stream=group.shards if scatters else FSDP_REPLICATE,
            name=self._named(REDUCE if scatters else REPLICATE),
            after=(self._named(REDUCE if is_second else _COPY_IN),),
        )

    def _copy(
        self,
        kernel: str,
        num_bytes: int,
        group: ParamGroup,
        phase: Phase,
        *,
        after: tuple[str, ...],
        name: str,
    ) -> None:
        op = ComputeOp(
            op=Kernel(name=kernel, flops=0, bytes_moved=num_bytes),
            phase=phase,
            module=group.module,
            layer=group.layer,
            microbatch=self._microbatch,
            name=self._named(name),
            after=after,
        )
        self.items.append(op)

    def _named(self, name: str) -> str:
        stem, mark, distance = name.partition("~")
        if stem == COMPUTE_DONE:  # the name has no suffix
            return name
        return f"{stem}{self._suffix}{mark}{distance}"


def link_prefetch(groups: Sequence[ParamGroup], prefetch: int) -> None:
    """Set up explicit prefetching; torch gathers one group ahead by itself.

    training/parallelize.py: _prefetch.
    """
    if prefetch <= 1:
        return
    for index, group in enumerate(groups):
        group.ahead = list(groups[index + 1 : index + 1 + prefetch])
        group.behind = list(groups[max(0, index - prefetch) : index][::-1])
