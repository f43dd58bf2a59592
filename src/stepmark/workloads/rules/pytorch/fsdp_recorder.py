"""Operations of FSDP2's gathers and reductions, with their streams and dependencies.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard: _fsdp_collectives.py
(foreach_all_gather, foreach_reduce) and the waits of _fsdp_param_group.py. Gathers and
reductions of a process group are on one stream, named after it, though torch has two: a group
runs one at a time (step/workload.py). `after` gives torch's order of gathers, whatever their
group; that of reductions follows from the copies into their buffers, each of which waits for
the reduction before it. Copies in and out of buffers are on "compute".
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.module import Param
from stepmark.step.workload import FSDP_REPLICATE, ComputeOp, Group, Item, Kernel
from stepmark.workloads.job import Comms
from stepmark.workloads.pipeline import COMPUTE_DONE, in_layer, wait
from stepmark.workloads.rules.pytorch.fsdp_order import FsdpEvents, ParamGroup

# names for `after`
GATHER = "fsdp"
REDUCE = "fsdp_reduce"
REPLICATE = "fsdp_replicate"
_COPY_IN = "reduce_copy_in"
_COPY_OUT = "copy_out"
# A gather waits for a copy out of the buffer that it reuses: in the forward pass that of the
# gather before the last; between passes for the computation.
_GATHER_AFTER = {Phase.FWD: (_COPY_OUT, 1), Phase.BWD: (_COPY_OUT, 0), None: (COMPUTE_DONE, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of all groups of a model. gathered, reduced: dtypes of messages.

    narrow: dtype in which weights of narrow products are gathered; None: as all others.
    reshard: ranks to gather over again in the backward pass; 0: all shards, None: weights stay.
    accumulates: unsharded gradients accumulate over micro-batches, in the reduced dtype.
    """

    comms: Comms
    gathered: DType
    reduced: DType
    narrow: DType | None = None
    reshard: int | None = 0
    accumulates: bool = False


_ALONE = dict.fromkeys(("fsdp", "replicate"), Group(digits=((1, 1),)))
UNSHARDED = Sharding(comms=Comms(groups=_ALONE), gathered=DType.FP32, reduced=DType.FP32)


class FsdpRecorder(FsdpEvents[Param]):
    """Receiver of FSDP's events that records operations."""

    def __init__(self, sharding: Sharding, suffix: str = "") -> None:
        self._sharding = sharding
        self._suffix = suffix
        self._issued: dict[ParamGroup[Param], int] = {}  # number of the newest gather
        self._gathers = 0
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

    def drain(self, layer: int = 0) -> tuple[Item, ...]:
        """Return the operations since the last call, layers relative to this one."""
        items = tuple(in_layer(item, -layer) for item in self.items)
        self.items.clear()
        return items

    def begin(self) -> None:
        """Begin a forward pass, whose gathers wait for earlier computation (_root_pre_forward).

        That includes copies out of all gathers so far.
        """
        self._begins = self._sharding.comms.groups["fsdp"].size > 1
        self._num_compute_done = 0
        self._gathered_on = ""

    def count_compute_done(self, times: int = 1) -> None:
        """Count operations named COMPUTE_DONE."""
        self._num_compute_done += times

    def state(self, groups: Sequence[ParamGroup[Param]]) -> tuple[object, ...]:
        """Return the state on which dependencies of later operations depend."""
        may_gather = self._begins and not all(group.is_whole for group in groups)
        num_done = self._num_compute_done if may_gather else -1
        distances = [self._distance(group) for group in groups if group.is_pending]
        return self._begins, num_done, self._gathered_on, *distances

    def gather(self, group: ParamGroup[Param], phase: Phase | None) -> None:
        after = [self._name_event(*_GATHER_AFTER[phase])]
        stream = f"{group.shards}_inner" if group.is_inner else group.shards
        if self._begins and phase is not None:
            after.append(self._name_event(COMPUTE_DONE, self._num_compute_done))
        if self._gathered_on not in ("", stream):
            after.append(self._name_event(GATHER))
        elements, dtype = self._gathered(group)
        ops = self._sharding.comms(
            Collective.ALL_GATHER,
            elements,
            stream,
            phase=phase or Phase.FWD,
            module=group.module,
            dtype=dtype,
            layer=group.layer,
            microbatch=self._microbatch,
            stream=stream,
            name=self._name_event(GATHER),
            after=tuple(after),
        )
        if ops:
            self._gathers += 1
            self._issued[group] = self._gathers
            self._gathered_on = stream
            self._begins = False
        self.items += ops

    def _gathered(self, group: ParamGroup[Param]) -> tuple[int, DType]:
        """Return elements and dtype of a gather: bytes where weights have different dtypes.

        _fsdp_collectives.py: _get_all_gather_input_metadatas.
        """
        sharding = self._sharding
        ranks = sharding.comms.groups[group.shards].size
        sizes = {sharding.gathered: 0}
        for param in group.params:
            dtype = (param.is_narrow and sharding.narrow) or sharding.gathered
            sizes[dtype] = sizes.get(dtype, 0) + param.padded(ranks)
        present = {dtype: size for dtype, size in sizes.items() if size}
        if len(present) > 1:
            return sum(size * dtype.itemsize for dtype, size in present.items()), DType.UINT8
        return next(((size, dtype) for dtype, size in present.items()), (0, sharding.gathered))

    def copy_out(self, group: ParamGroup[Param], phase: Phase) -> None:
        ranks = self._sharding.comms.groups[group.shards].size
        if ranks == 1:
            return
        elements, dtype = self._gathered(group)
        size = elements * dtype.itemsize
        size += self._across(group.params, ranks) * dtype.itemsize
        after = self._name_event(GATHER, self._distance(group))
        self._copy("fsdp_copy_out", 2 * size, group, phase, after=(after,), name=_COPY_OUT)

    def collect_grads(self, group: ParamGroup[Param], *, reduces: bool) -> None:
        trained = [param for param in group.params if param.is_trained]
        if not reduces or not trained:
            return
        sharding = self._sharding
        comms = self._sharding.comms
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
            read = sum(param.numel for param in trained) + 2 * self._across(trained, ranks)
            read *= sharding.gathered.itemsize
            written = padded * sharding.reduced.itemsize
            # Torch waits for the scattered gradients, not for their sum over the replicas.
            after = (self._name_event(REDUCE),) if comms.groups["fsdp"].size > 1 else ()
            kernel = "fsdp_reduce_copy_in"
            self._copy(kernel, read + written, group, Phase.BWD, after=after, name=_COPY_IN)
        self._reduce(Collective.REDUCE_SCATTER, padded, group)
        self._reduce(Collective.ALL_REDUCE, padded // ranks, group)

    def finalize(self, *, reduces: bool) -> None:
        """Let the computation continue when all gradients are reduced."""
        streams = {"fsdp": REDUCE, "replicate": REPLICATE}
        ranks = self._sharding.comms.groups
        names = [
            self._name_event(name) for kind, name in streams.items() if ranks[kind].size > 1
        ]
        if names and reduces:
            self.items.append(wait(tuple(names), Phase.BWD))

    def _reduce(self, collective: Collective, elements: int, group: ParamGroup[Param]) -> None:
        """Scatter over the shards, or sum the scattered part over the replicas."""
        sharding = self._sharding
        scatters = collective is Collective.REDUCE_SCATTER
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
            name=self._name_event(REDUCE if scatters else REPLICATE),
            after=(self._name_event(REDUCE if is_second else _COPY_IN),),
        )

    @staticmethod
    def _across(params: Iterable[Param], ranks: int) -> int:
        """Return the elements that are copied once more, as shards are not whole rows."""
        return sum(param.numel for param in params if param.shard_dim(ranks))

    def _copy(
        self,
        kernel: str,
        num_bytes: int,
        group: ParamGroup[Param],
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
            name=self._name_event(name),
            after=after,
        )
        self.items.append(op)

    def _distance(self, group: ParamGroup[Param]) -> int:
        """Count the gathers since this group's newest one."""
        return self._gathers - self._issued.get(group, 0)

    def _name_event(self, name: str, distance: int = 0) -> str:
        """Refer to the operation of this name that is so many before the newest one."""
        suffix = "" if name == COMPUTE_DONE else self._suffix
        return f"{name}{suffix}~{distance}" if distance else f"{name}{suffix}"
