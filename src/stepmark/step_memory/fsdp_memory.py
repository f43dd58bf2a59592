"""Tensors of FSDP2, which come and go with the events of its order.

Streams and lifetimes: torch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and
_fsdp_param.py.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from stepmark.cases.train_case import TrainCase
from stepmark.model.ops import Phase
from stepmark.step_memory.allocator import Allocator, Block
from stepmark.step_memory.step_tensors import FP32, Formats, Unit, Weight
from stepmark.workloads.rules.pytorch.fsdp_order import (
    FsdpEvents,
    FsdpGroups,
    ParamGroup,
    group_params,
)

_GATHER, _REDUCE = 1, 2  # streams
_RESHARD = {"yes": 0, "no": None}  # ranks to reshard over, as ParamGroup has it


@dataclass(slots=True, eq=False)
class _GroupTensors:
    """Tensors of a group. inner_shard: what resharding over fewer ranks leaves."""

    buffer: Block | None = None
    whole: list[Block] = field(default_factory=list)
    inner_shard: Block | None = None
    sharded_grad: Block | None = None


class FsdpMemory(FsdpEvents[Weight]):
    """Receiver of FSDP's events that allocates and frees all but the shards of weights."""

    def __init__(self, case: TrainCase, heap: Allocator) -> None:
        self._heap, self._formats = heap, Formats(case)
        self._reduced_itemsize = case.reduce_dtype.itemsize
        self._tensors = defaultdict[ParamGroup[Weight], _GroupTensors](_GroupTensors)
        self._last_reduced: Block | None = None  # freed before the next reduction

    def gather(self, group: ParamGroup[Weight], phase: Phase | None) -> None:
        own: list[Block] = []
        plain = 0
        for weight in group.params:
            if weight.is_gathered_fp8:  # torchao scales in fp32 before it casts
                scaled = [
                    self._heap.allocate(weight.stored * FP32, "gathered", _GATHER)
                    for _ in range(2)
                ]
                own.append(self._heap.allocate(weight.stored, "gathered", _GATHER))
                self._heap.free(*scaled)
            else:
                plain += weight.stored * self._formats.itemsize
        if plain:
            own.append(self._heap.allocate(plain, "gathered", _GATHER))
        sizes = [weight.numel * weight.gathered_itemsize for weight in group.params]
        buffer = self._heap.allocate(sum(sizes), "gathered", _GATHER)
        self._tensors[group].buffer = buffer
        self._heap.free(*own)

    def copy_out(self, group: ParamGroup[Weight], phase: Phase) -> None:
        tensors = self._tensors[group]
        tensors.whole = [
            self._heap.allocate(weight.numel * weight.gathered_itemsize, "gathered")
            for weight in group.params
        ]
        self._free_inner_shard(tensors)  # FSDPParam.to_unsharded

    def free_buffer(self, group: ParamGroup[Weight]) -> None:
        tensors = self._tensors[group]
        assert tensors.buffer is not None
        self._heap.free(tensors.buffer)
        tensors.buffer = None

    def reshard(self, group: ParamGroup[Weight]) -> None:
        tensors = self._tensors[group]
        self._heap.free(*tensors.whole)
        tensors.whole = []
        self._free_inner_shard(tensors)
        if group.is_inner and group.reshard:  # FSDPParam.to_sharded_post_forward
            size = sum(weight.numel for weight in group.params) * self._formats.itemsize
            tensors.inner_shard = self._heap.allocate(size // group.reshard, "gathered")

    def keep_grads(self, group: ParamGroup[Weight]) -> None:
        """Keep gradients in the dtype of their reduction."""
        for weight in group.params:
            assert weight.grad is not None
            waiting = weight.numel * self._reduced_itemsize
            grad, weight.grad = weight.grad, self._heap.allocate(waiting, "gathered")
            self._heap.free(grad)

    def reduce(self, group: ParamGroup[Weight]) -> None:
        size = self._reduced_itemsize
        self._free_last_reduced()
        numel = sum(weight.numel for weight in group.params)
        self._last_reduced = self._heap.allocate(numel * size, "gathered")
        grads: list[Block] = []
        for weight in group.params:
            assert weight.grad is not None
            grads.append(weight.grad)
            weight.grad = None
        *grads, last_grad = grads  # a variable in foreach_reduce refers to the last one
        self._heap.free(*grads)
        stored = sum(weight.stored for weight in group.params)
        output = self._heap.allocate(stored * size, "gradients", _REDUCE)
        if size != self._formats.stored_itemsize:
            cast = self._heap.allocate(
                stored * self._formats.stored_itemsize, "gradients", _REDUCE
            )
            self._heap.free(output)
            output = cast
        tensors = self._tensors[group]
        if tensors.sharded_grad:
            self._heap.free(output)
        else:
            tensors.sharded_grad = output
        self._heap.free(last_grad)

    def finalize(self, *, reduces: bool) -> None:
        self._free_last_reduced()

    def drop_grads(self) -> None:
        for tensors in self._tensors.values():
            if tensors.sharded_grad:
                self._heap.free(tensors.sharded_grad)
                tensors.sharded_grad = None

    def _free_inner_shard(self, tensors: _GroupTensors) -> None:
        if tensors.inner_shard:
            self._heap.free(tensors.inner_shard)
            tensors.inner_shard = None

    def _free_last_reduced(self) -> None:
        if self._last_reduced:
            self._heap.free(self._last_reduced)
            self._last_reduced = None


def group_weights(case: TrainCase, units: list[Unit]) -> FsdpGroups[Weight]:
    """Return the groups of a stage's units, at which their forward passes begin and end."""
    if not Formats(case).is_fsdp:
        return FsdpGroups()
    is_apart, size = case.parallel.ep > 1, case.blocks_per_group
    blocks = [unit for unit in units if unit.name == "block"]
    ends = {unit.name: tuple(unit.all_weights) for unit in units if unit.name != "block"}
    is_tied = case.model.tied_embeddings and len(ends) == 2
    if is_tied:
        ends["output"] = tuple(x for x in ends["output"] if x not in ends["embedding"])
    groups = group_params(
        [
            (
                tuple(x for x in unit.all_weights if not (is_apart and x.param.is_expert)),
                tuple(x for x in unit.all_weights if is_apart and x.param.is_expert) or None,
            )
            for unit in blocks
        ],
        embedding=ends.get("embedding"),
        output=ends.get("output"),
        reshard=int(case.reshard) if case.reshard.isdecimal() else _RESHARD[case.reshard],
        prefetch=case.prefetch,
        blocks_per_group=size,
        root_has_ends=is_tied,
    )
    members: list[tuple[ParamGroup[Weight] | None, list[Unit]]] = [
        (groups.root, units),
        (groups.embedding, units[:1]),
        *(
            (group, blocks[at * size : (at + 1) * size])
            for at, group in enumerate(groups.blocks)
        ),
        *((group, [unit]) for group, unit in zip(groups.experts, blocks, strict=True)),
        (groups.output, units[-1:]),
    ]
    for group, inside in members:
        if group:
            inside[0].begins.append(group)
            inside[-1].ends.insert(0, group)
    return groups
