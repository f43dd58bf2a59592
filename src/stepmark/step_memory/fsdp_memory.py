"""Tensors of FSDP2, which come and go with the events of its order.

Streams and lifetimes: torch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and
_fsdp_param.py.
"""

from dataclasses import dataclass, field

from stepmark.cases.train_case import TrainCase
from stepmark.model.ops import Phase
from stepmark.step_memory.allocator import Allocator, Block
from stepmark.step_memory.step_tensors import FP32, Formats, FsdpUnit, Weight
from stepmark.workloads.rules.pytorch.fsdp_order import (
    FsdpEvents,
    FsdpGroups,
    FsdpOrder,
    ParamGroup,
    group_params,
    reshard_ranks,
)

# streams
_GATHER = 1
_REDUCE = 2


@dataclass(slots=True, eq=False)
class _GroupTensors:
    """Tensors of a group. inner_shard: what resharding over fewer ranks leaves."""

    buffer: list[Block] = field(default_factory=list)
    whole: list[Block] = field(default_factory=list)
    inner_shard: list[Block] = field(default_factory=list)
    sharded_grad: list[Block] = field(default_factory=list)


class FsdpMemory(FsdpEvents[Weight]):
    """Receiver of FSDP's events that allocates and frees all but the shards of weights."""

    def __init__(self, case: TrainCase, heap: Allocator, units: list[FsdpUnit]) -> None:
        self._heap, self._formats = heap, Formats(case)
        self._reduced_itemsize = case.reduce_dtype.itemsize
        groups = _group_weights(case, units) if self._formats.is_fsdp else FsdpGroups()
        self.order = FsdpOrder(groups, self)
        self._tensors = {group: _GroupTensors() for group in self.order.groups}
        self._last_reduced: list[Block] = []  # freed before the next reduction

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
        size = sum(weight.padded * weight.gathered_itemsize for weight in group.params)
        self._tensors[group].buffer = [self._heap.allocate(size, "gathered", _GATHER)]
        self._heap.free(*own)

    def copy_out(self, group: ParamGroup[Weight], phase: Phase) -> None:
        whole: list[Block] = []
        copied: list[Block] = []
        for weight in group.params:
            for blocks in (whole, copied) if weight.is_across else (whole,):
                size = weight.padded * weight.gathered_itemsize
                blocks.append(self._heap.allocate(size, "gathered"))
        self._free(copied)
        self._tensors[group].whole = whole
        self._free(self._tensors[group].inner_shard)  # FSDPParam.to_unsharded

    def free_buffer(self, group: ParamGroup[Weight]) -> None:
        self._free(self._tensors[group].buffer)

    def reshard(self, group: ParamGroup[Weight]) -> None:
        tensors = self._tensors[group]
        self._free(tensors.whole)
        self._free(tensors.inner_shard)
        if group.is_inner and group.reshard:  # FSDPParam.to_sharded_post_forward
            size = sum(weight.padded for weight in group.params) * self._formats.itemsize
            tensors.inner_shard = [self._heap.allocate(size // group.reshard, "gathered")]

    def collect_grads(self, group: ParamGroup[Weight], *, reduces: bool) -> None:
        size = self._reduced_itemsize
        stored_size = self._formats.stored_itemsize
        for weight in group.params:
            if weight.fresh is not None:
                self._heap.free(weight.fresh)
                weight.fresh = None
        for weight in () if reduces else group.params:  # it waits in the reduction's dtype
            if weight.grad is None:  # the weights' part of a split pass comes later
                continue
            waiting = self._heap.allocate(weight.numel * size, "gathered")
            self._heap.free(weight.grad)
            weight.grad = waiting
        if not reduces:
            return
        self._free(self._last_reduced)
        for weight in group.params:
            if weight.is_across and weight.grad:
                copied = self._heap.allocate(weight.grad.requested, "gathered")
                self._heap.free(weight.grad)
                weight.grad = copied
        numel = sum(weight.padded for weight in group.params)
        self._last_reduced = [self._heap.allocate(numel * size, "gathered")]
        # A variable in foreach_reduce refers to the last gradient.
        *grads, last_grad = [weight.grad for weight in group.params if weight.grad]
        self._heap.free(*grads)
        for weight in group.params:
            weight.grad = None
        stored = sum(weight.stored for weight in group.params)
        output = self._heap.allocate(stored * size, "gradients", _REDUCE)
        if size != stored_size:
            cast = self._heap.allocate(stored * stored_size, "gradients", _REDUCE)
            self._heap.free(output)
            output = cast
        sharded_grad = self._tensors[group].sharded_grad
        if sharded_grad:
            self._heap.free(output)
        else:
            sharded_grad.append(output)
        self._heap.free(last_grad)

    def finalize(self, *, reduces: bool) -> None:
        self._free(self._last_reduced)

    def drop_grads(self) -> None:
        for tensors in self._tensors.values():
            self._free(tensors.sharded_grad)

    def _free(self, blocks: list[Block]) -> None:
        if blocks:
            self._heap.free(*blocks)
            blocks.clear()


def _group_weights(case: TrainCase, units: list[FsdpUnit]) -> FsdpGroups[Weight]:
    """Return the groups of a stage, and let units have those that begin and end with them."""
    has_experts = case.parallel.ep > 1
    size = case.blocks_per_group
    blocks = [unit for unit in units if unit.name == "block"]
    ends = {unit.name: unit.all_weights for unit in units if unit.name != "block"}
    table = ends.get("embedding")
    output = ends.get("output")
    groups = group_params(
        [
            (
                [x for x in unit.all_weights if not (has_experts and x.param.is_expert)],
                [x for x in unit.all_weights if has_experts and x.param.is_expert] or None,
            )
            for unit in blocks
        ],
        embedding=table,
        output=output and [x for x in output if x not in (table or ())],
        reshard=reshard_ranks(case.reshard),
        prefetch=case.prefetch,
        blocks_per_group=size,
        root_has_ends=case.model.tied_embeddings and len(ends) == 2,
        regathers_table=case.embedding_in_backward,
    )
    for group, inside in [
        (groups.root, units),
        (groups.embedding, units[:1]),
        *((x, blocks[at * size : (at + 1) * size]) for at, x in enumerate(groups.blocks)),
        *((experts, [unit]) for experts, unit in zip(groups.experts, blocks, strict=True)),
        (groups.output, units[-1:]),
    ]:
        if group:
            inside[0].begins.append(group)
            inside[-1].ends.insert(0, group)
    return groups
