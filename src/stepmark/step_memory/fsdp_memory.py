"""What FSDP gathers and reduces, as torch 2.11 does: _fully_shard/_fsdp_param_group.py."""

from stepmark.cases.train_case import TrainCase
from stepmark.step_memory.allocator import Allocator, Block
from stepmark.step_memory.step_tensors import FP32, Formats, Group, Unit

_GATHER, _REDUCE = 1, 2  # streams


class FsdpMemory:
    """FSDP's tensors other than shards of weights; none where no unit has groups."""

    def __init__(self, case: TrainCase, heap: Allocator, units: list[Unit]) -> None:
        self._case, self._heap, self._formats = case, heap, Formats(case)
        self._groups = self._make_groups(units) if self._formats.is_fsdp else []
        self._last_buffer: Block | None = None  # freed after the next copy-out
        self._last_reduced: Block | None = None  # freed before the next reduction

    def _make_groups(self, units: list[Unit]) -> list[Group]:
        """Group parameters as training/parallelize.py does."""
        case, groups = self._case, list[Group]()
        reshards, is_apart = case.reshard != "no", case.parallel.ep > 1
        blocks = [unit for unit in units if unit.name == "block"]
        ends = [unit for unit in units if unit.name != "block"]

        def add(units: list[Unit], reshards: bool, in_backward: bool = True) -> None:
            weights = {id(x): x for unit in units for x in unit.all_weights}.values()
            experts = [x for x in weights if is_apart and x.param.is_expert]
            others = [x for x in weights if not (is_apart and x.param.is_expert)]
            for members in filter(None, (others, experts)):
                has_blocks = units[0].name == "block"
                group = Group(members, len(units), has_blocks, reshards, in_backward)
                groups.append(group)
                for unit in units:
                    unit.groups.append(group)

        is_tied = case.model.tied_embeddings and len(ends) == 2
        if not is_tied and ends and ends[0].name == "embedding":
            add(ends[:1], reshards, in_backward=False)
        for first in range(0, len(blocks), case.blocks_per_group):
            add(blocks[first : first + case.blocks_per_group], reshards)
        if ends and ends[-1].name == "output":  # tied ones end their forward pass with the head
            add(ends if is_tied else ends[-1:], reshards=False)
        return groups

    def _unshard(self, group: Group) -> None:
        if group.whole or group.buffer:
            return
        own: list[Block] = []
        plain = 0
        for weight in group.weights:
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
        sizes = [weight.numel * weight.gathered_itemsize for weight in group.weights]
        group.buffer = self._heap.allocate(sum(sizes), "gathered", _GATHER)
        self._heap.free(*own)

    def _copy_out(self, group: Group) -> None:
        assert group.buffer is not None
        group.whole = [
            self._heap.allocate(weight.numel * weight.gathered_itemsize, "gathered")
            for weight in group.weights
        ]

    def _ahead(self, group: Group, step: int) -> list[Group]:
        """Return the next groups, or the previous ones, that are gathered ahead of time."""
        index = self._groups.index(group)
        if step < 0:
            return self._groups[max(0, index - self._case.prefetch) : index][::-1]
        if self._case.prefetch == 1 or not group.has_blocks:
            return []  # each is gathered as it begins
        others = self._groups[index + 1 : index + 1 + self._case.prefetch]
        return [other for other in others if other.has_blocks]

    def gather(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.whole:
                continue
            self._unshard(group)
            if self._last_buffer:
                self._heap.free(self._last_buffer)
            self._copy_out(group)
            self._last_buffer, group.buffer = group.buffer, None
            for other in self._ahead(group, 1):
                self._unshard(other)

    def reshard(self, unit: Unit) -> None:
        for group in unit.groups:
            group.units_done += 1
            if group.units_done == group.num_units:
                group.units_done = 0
                if group.reshards:
                    self._heap.free(*group.whole)
                    group.whole = []
                    if self._case.reshard.isdecimal():
                        part = sum(weight.numel for weight in group.weights)
                        part = part * self._formats.itemsize // int(self._case.reshard)
                        group.partial = self._heap.allocate(part, "gathered")

    def gather_again(self, unit: Unit) -> None:
        for group in reversed(unit.groups):
            if not group.whole and group.in_backward:
                self._unshard(group)
                self._copy_out(group)
                assert group.buffer is not None
                self._heap.free(group.buffer)
                group.buffer = None
            for other in self._ahead(group, -1):
                if other.in_backward:
                    self._unshard(other)

    def reduce(self, unit: Unit, *, reduces: bool, reshards: bool) -> None:
        size = self._case.reduce_dtype.itemsize
        for group in unit.groups:
            group.units_done += 1
            if group.units_done < group.num_units:
                continue
            group.units_done = 0
            if reshards:
                self._heap.free(*group.whole)
                group.whole = []
            if group.partial:
                self._heap.free(group.partial)
                group.partial = None
            if reduces:
                self._reduce_scatter(group)
                continue
            for weight in group.weights:  # its gradient waits in the dtype of the reduction
                assert weight.grad is not None
                waiting = weight.numel * size
                grad, weight.grad = weight.grad, self._heap.allocate(waiting, "gathered")
                self._heap.free(grad)

    def end_forward(self) -> None:
        if self._last_buffer:
            self._heap.free(self._last_buffer)
            self._last_buffer = None

    def end_backward(self) -> None:
        if self._last_reduced:
            self._heap.free(self._last_reduced)
            self._last_reduced = None

    def drop_grads(self) -> None:
        for group in self._groups:
            if group.sharded_grad:
                self._heap.free(group.sharded_grad)
                group.sharded_grad = None

    def _reduce_scatter(self, group: Group) -> None:
        size = self._case.reduce_dtype.itemsize
        if self._last_reduced:
            self._heap.free(self._last_reduced)
        numel = sum(weight.numel for weight in group.weights)
        self._last_reduced = self._heap.allocate(numel * size, "gathered")
        grads: list[Block] = []
        for weight in group.weights:
            assert weight.grad is not None
            grads.append(weight.grad)
            weight.grad = None
        *grads, last_grad = grads  # a variable in foreach_reduce refers to the last one
        self._heap.free(*grads)
        stored = sum(weight.stored for weight in group.weights)
        output = self._heap.allocate(stored * size, "gradients", _REDUCE)
        if size != self._formats.stored_itemsize:
            cast = self._heap.allocate(
                stored * self._formats.stored_itemsize, "gradients", _REDUCE
            )
            self._heap.free(output)
            output = cast
        if group.sharded_grad:
            self._heap.free(output)
        else:
            group.sharded_grad = output
        self._heap.free(last_grad)
