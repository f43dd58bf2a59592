"""A model or a pipeline stage's part of it, pass by pass, with FSDP2 around its modules.

fully_shard is called on the embedding and the output, or the root has both; on every
blocks_per_group blocks; and with expert parallelism on the experts of each block before it
(bench/training/parallelize.py: _fsdp). Without a Sharding the same passes run plain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stepmark.core.module import Param
from stepmark.core.ops import Phase
from stepmark.core.training import Recompute
from stepmark.core.workload import Block, Item, Operation, Run
from stepmark.workload.architecture import Unit
from stepmark.workload.pipeline import PASSED, in_layer
from stepmark.workload.rules.pytorch.fsdp_order import (
    Group,
    Order,
    linked,
)
from stepmark.workload.rules.pytorch.recompute import again, ahead
from stepmark.workload.rules.pytorch.technique import Technique

BLOCKS = dict[str, Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A block at its place, and what of its experts is sharded apart."""

    unit: Unit
    index: int
    is_checkpointed: bool = False
    experts: Group | None = None


class Chunk:
    """Issues passes of the modules in `layers`, and of those before and after them.

    blocks: where the bodies of modules are put, once for all chunks.
    """

    def __init__(
        self,
        how: Technique,
        layers: Sequence[Layer],
        *,
        blocks: BLOCKS,
        embedding: Unit | None = None,
        output: Unit | None = None,
        suffix: str = "",
    ) -> None:
        self._technique, self.blocks, self._suffix = how, blocks, suffix
        self.embedding, self.output = embedding, output
        sharding = how.sharding
        self._order = Order(sharding, suffix) if sharding else None
        self._unsharding = False  # all at once, ahead of a pass
        reshard = sharding.reshard if sharding else None
        ends = [unit for unit in (embedding, output) if unit]
        self._root = self._first = self._last = None
        if how.together and ends:
            params = tuple(one for unit in ends for one in unit.params)
            self._root = Group(module="root", params=params, reshard=None)
        elif not how.together:
            if embedding:
                self._first = Group(
                    module="embedding",
                    params=embedding.params,
                    reshard=reshard,
                    in_backward=how.table_again,
                )
            if output:
                self._last = Group(module="output", params=output.params, reshard=None)
        self.layers = [self._with_experts(one, reshard) for one in layers]
        size = how.blocks_per_group
        self._groups: list[tuple[Group, list[Layer]]] = []
        for first in range(0, len(self.layers), size):
            members = self.layers[first : first + size]
            group = Group(
                module="blocks",
                params=tuple(p for one in members for p in self._own(one)),
                layer=members[0].index,
                reshard=reshard,
            )
            self._groups.append((group, members))
        linked([group for group, _ in self._groups], sharding.prefetch if sharding else 1)
        for unit in ends:
            self._register(unit)
        for unit in {one.unit.name: one.unit for one in self.layers}.values():
            self._register(unit, is_layer=True)

    @property
    def params(self) -> tuple[Param, ...]:
        """Of all modules. A tied table once."""
        units = (self.embedding, *(one.unit for one in self.layers), self.output)
        return tuple(param for unit in units if unit for param in unit.params)

    @property
    def is_sharded(self) -> bool:
        return self._order is not None

    def state(self) -> tuple[object, ...]:
        """Of FSDP: equal before two passes means that these are equal."""
        return self._order.state(self._all_groups()) if self._order else ()

    def open_passes(self) -> list[int]:
        """How many forward passes of each group lie open, by what came before them."""
        return [count for group in self._all_groups() for _, count in group.before]

    def open_more(self, counts: Sequence[int]) -> None:
        """As if more passes had run that leave the state as it is."""
        more = iter(counts)
        for group in self._all_groups():
            group.before = [(other, count + next(more)) for other, count in group.before]

    def passed(self, times: int = 1) -> None:
        """So many operations named PASSED were issued, in this chunk or another."""
        if self._order:
            self._order.passed(times)

    def forward(self) -> Block:
        segments = [(self._opened(Phase.FWD), 0), *self._forward()]
        return folded(segments, self.blocks, f"fwd{self._suffix}")

    def backward(self, *, reduces: bool = True, keeps: bool = False) -> Block:
        """keeps: as in a pipeline, weights stay gathered and the step has more passes."""
        segments = [(self._opened(Phase.BWD), 0)]
        segments += self._backward(reduces=reduces, keeps=keeps)
        if self._order and not keeps:
            self._order.end(self._all_groups(), reduces=reduces)
            segments.append((self._take(), 0))
        return folded(segments, self.blocks, f"bwd{self._suffix}")

    def gather(self) -> Block:
        """All weights, ahead of the passes that need them: a pipeline's UNSHARD."""
        if self._order:
            self._unsharding = True
            with self._order.of_all():
                for group in self._all_groups():
                    self._order.unshard(group, Phase.FWD, (PASSED,))
        return self._take()

    def release(self) -> None:
        """Weights given back between passes: a pipeline's RESHARD."""
        for group in self._all_groups():
            group.is_whole = group.is_inner = False

    def _opened(self, phase: Phase) -> Block:
        """What was gathered ahead is waited for as a whole (_assert_unsharded)."""
        if self._order and self._unsharding:
            for group in self._all_groups():
                self._order.wait(group, phase)
        self._unsharding = False
        return self._take()

    def reduce(self) -> Block:
        """All gradients, in the order of the modules: perform_reduce_grad of a stage."""
        segments: list[tuple[Block, int]] = []
        if self._order:
            for group in self._all_groups():
                with self._order.of_all():
                    self._order.post_backward(group)
                segments.append((self._take(group.layer or 0), group.layer or 0))
            self._order.end(self._all_groups())
            segments.append((self._take(), 0))
        return folded(segments, self.blocks, f"reduce{self._suffix}")

    def _own(self, layer: Layer) -> tuple[Param, ...]:
        return layer.unit.others if layer.experts else layer.unit.params

    def _with_experts(self, layer: Layer, reshard: int | None) -> Layer:
        if layer.unit.experts_at is None:
            return layer
        group = Group(
            module="experts",
            params=layer.unit.experts,
            layer=layer.index,
            shards="expert_fsdp",
            reshard=reshard,
        )
        return replace(layer, experts=group)

    def _all_groups(self) -> list[Group]:
        """As named_modules meets them."""
        found = [one for one in (self._root, self._first) if one]
        for group, members in self._groups:
            found.append(group)
            found += [one.experts for one in members if one.experts]
        return [*found, self._last] if self._last else found

    def _register(self, unit: Unit, *, is_layer: bool = False) -> None:
        ways = {"fwd": unit.fwd, "bwd": unit.bwd}
        if is_layer and self._technique.recompute is not Recompute.NONE:
            early, (first, *others) = ahead(unit), again(unit, self._technique.recompute)
            ways["again"] = ((*unit.bwd[0][:early], *first), *others)
            ways["rest"] = (unit.bwd[0][early:], *unit.bwd[1:])
        for way, pieces in ways.items():
            for index, piece in enumerate(pieces):
                is_end = self._technique.marked and way != "again" and index + 1 == len(pieces)
                name = _name(unit, way, index, len(pieces))
                self.blocks[name] = _marked(piece) if is_end else piece

    def _take(self, layer: int = 0) -> Block:
        return self._order.take(layer) if self._order else ()

    def _forward(self) -> Iterator[tuple[Block, int]]:
        order = self._order
        if order:
            order.begin()
        self._enter(self._root)
        if self.embedding:
            self._enter(self._first)
            yield (*self._take(), _run(self.embedding, "fwd")), 0
            self.passed()
            self._leave(self._first)
        for group, members in self._groups:
            self._enter(group)
            yield self._passes(members, group, "fwd"), members[0].index
            self._leave(group)
        if self.output:
            self._enter(self._last)
            yield (*self._take(), _run(self.output, "fwd")), 0
            self.passed()
            self._leave(self._last)
        self._leave(self._root)

    def _enter(self, group: Group | None) -> None:
        if self._order and group:
            self._order.pre_forward(group)

    def _leave(self, group: Group | None) -> None:
        if self._order and group:
            self._order.post_forward(group)

    def _backward(self, *, reduces: bool, keeps: bool) -> Iterator[tuple[Block, int]]:
        order = self._order

        def leave(group: Group | None) -> None:
            if order and group:
                order.post_backward(group, reduces=reduces, keeps=keeps)

        for group in (self._root, self._last):
            if order and group:
                order.pre_backward(group)
        if self.output:
            yield (*self._take(), _run(self.output, "bwd")), 0
            self.passed()
            leave(self._last)
        before = self._take()
        if before:
            yield before, 0
        for group, members in reversed(self._groups):
            base = members[0].index
            if order:
                order.pre_backward(group)
            passes = self._passes(members, group, "bwd", reduces=reduces, keeps=keeps)
            leave(group)
            yield (*passes, *self._take(base)), base
        if order and self._first:
            order.pre_backward(self._first)
        if self.embedding:
            yield (*self._take(), _run(self.embedding, "bwd")), 0
        leave(self._first)
        leave(self._root)
        yield self._take(), 0

    def _passes(
        self,
        members: Sequence[Layer],
        group: Group,
        way: str,
        *,
        reduces: bool = True,
        keeps: bool = False,
    ) -> Block:
        """Blocks one after the other, the last one first if backward."""
        base = members[0].index
        found = [*self._take(base)]
        for one in members if way == "fwd" else reversed(members):
            layer = one.index - base
            mine = way
            if way == "bwd" and one.is_checkpointed:
                found += self._pieces(one, "again", layer, base)
                mine = "rest"
            found += self._pieces(one, mine, layer, base, reduces=reduces, keeps=keeps)
        return tuple(found)

    def _pieces(
        self,
        one: Layer,
        way: str,
        layer: int,
        base: int,
        *,
        reduces: bool = True,
        keeps: bool = False,
    ) -> Iterator[Item]:
        unit, order, experts = one.unit, self._order, one.experts
        is_backward = way in ("bwd", "rest")
        pieces = unit.bwd if is_backward else unit.fwd
        for index in range(len(pieces)):
            is_inside = index == unit.experts_at
            if order and experts and is_inside:
                if is_backward:
                    order.pre_backward(experts)
                else:
                    order.pre_forward(experts)
                yield from self._take(base)
            yield _run(unit, way, index, len(pieces), layer)
            if order and experts and is_inside:
                if way == "fwd":
                    order.post_forward(experts)
                elif is_backward:
                    order.post_backward(experts, reduces=reduces, keeps=keeps)
                yield from self._take(base)
        if way != "again":
            self.passed()


def folded(segments: Sequence[tuple[Block, int]], blocks: BLOCKS, way: str) -> Block:
    """Equal segments of evenly spaced layers as one Run, of a block put into `blocks`."""
    found: list[Item] = []
    at = 0
    while at < len(segments):
        segment, first = segments[at]
        step = segments[at + 1][1] - first if at + 1 < len(segments) else 0
        times = 1
        while step and segments[at + times : at + times + 1] == [
            (segment, first + step * times)
        ]:
            times += 1
        if times == 1:
            found += [in_layer(item, first) for item in segment]
        else:
            name = next((name for name, block in blocks.items() if block == segment), "")
            name = name or f"{way}.{len(blocks)}"
            blocks[name] = segment
            found.append(Run(block=name, times=times, layer=first, layer_step=step))
        at += times
    return tuple(found)


def _marked(piece: tuple[Operation, ...]) -> tuple[Operation, ...]:
    return (*piece[:-1], *(replace(one, name=PASSED) for one in piece[-1:]))


def _name(unit: Unit, way: str, index: int, pieces: int) -> str:
    return f"{unit.name}.{way}" if pieces == 1 else f"{unit.name}.{way}.{index}"


def _run(unit: Unit, way: str, index: int = 0, pieces: int = 1, layer: int = 0) -> Run:
    return Run(block=_name(unit, way, index, pieces), layer=layer)
