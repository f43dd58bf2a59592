"""A model or a pipeline stage's part of it, pass by pass, with FSDP2 around its modules.

fully_shard is called on the embedding and the output, or the root has both; on every
blocks_per_group blocks; and with expert parallelism on the experts of each block before it
(bench/training/parallelize.py: _fsdp). Without a Sharding the same passes run plain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stepmark.core.module import Param
from stepmark.core.ops import Phase
from stepmark.core.training import Recompute
from stepmark.core.workload import Block, Item, Run
from stepmark.workload.architecture import Unit
from stepmark.workload.pipeline import PASSED, in_layer
from stepmark.workload.rules.pytorch.fsdp_order import UNSHARDED, Group, Order, linked
from stepmark.workload.rules.pytorch.technique import Technique, again, ahead

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
        self._order = Order(sharding or UNSHARDED, suffix)
        self._unsharding = False  # all at once, ahead of a pass
        reshard = sharding.reshard if sharding else None
        ends = [unit for unit in (embedding, output) if unit]
        self._root = self._first = self._last = None
        if sharding and how.together and ends:
            params = tuple(one for unit in ends for one in unit.params)
            self._root = Group(module="root", params=params, reshard=None)
        elif sharding and not how.together:
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
        parts = [self.layers[at : at + size] for at in range(0, len(self.layers), size)]
        groups = [
            Group(
                module="blocks",
                params=tuple(
                    param
                    for one in part
                    for param in (one.unit.others if one.experts else one.unit.params)
                ),
                layer=part[0].index,
                reshard=reshard,
            )
            for part in (parts if sharding else ())
        ]
        linked(groups, sharding.prefetch if sharding else 1)
        of_parts = (groups[at] if groups else None for at in range(len(parts)))
        self._groups = list(zip(of_parts, parts, strict=True))
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
        return self._technique.sharding is not None

    def state(self) -> tuple[object, ...]:
        """Of FSDP: equal before two passes means that these are equal."""
        return self._order.state(self._all_groups())

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
        self._order.passed(times)

    def forward(self) -> Block:
        order, segments = self._order, [(self._opened(Phase.FWD), 0)]
        order.begin()
        order.pre_forward(self._root)
        segments += self._forward(self.embedding, self._first)
        for group, members in self._groups:
            order.pre_forward(group)
            segments.append((tuple(self._passes(members, "fwd")), members[0].index))
            order.post_forward(group)
        segments += self._forward(self.output, self._last)
        order.post_forward(self._root)
        return folded(segments, self.blocks, f"fwd{self._suffix}")

    def _forward(self, unit: Unit | None, group: Group | None) -> Iterator[tuple[Block, int]]:
        """One end of the model."""
        if unit:
            self._order.pre_forward(group)
            yield (*self._order.take(), _run(unit, "fwd")), 0
            self.passed()
            self._order.post_forward(group)

    def backward(self, *, reduces: bool = True, keeps: bool = False) -> Block:
        """keeps: as in a pipeline, weights stay gathered and the step has more passes."""
        order, segments = self._order, [(self._opened(Phase.BWD), 0)]
        leave = partial(order.post_backward, reduces=reduces, keeps=keeps)
        order.pre_backward(self._root)
        order.pre_backward(self._last)
        if self.output:
            segments.append(((*order.take(), _run(self.output, "bwd")), 0))
            self.passed()
            leave(self._last)
        segments.append((order.take(), 0))
        for group, members in reversed(self._groups):
            base = members[0].index
            order.pre_backward(group)
            passes = tuple(self._passes(members, "bwd", leave))
            leave(group)
            segments.append(((*passes, *order.take(base)), base))
        order.pre_backward(self._first)
        if self.embedding:
            segments.append(((*order.take(), _run(self.embedding, "bwd")), 0))
        leave(self._first)
        leave(self._root)
        segments.append((order.take(), 0))
        if not keeps:
            order.end(self._all_groups(), reduces=reduces)
            segments.append((order.take(), 0))
        return folded(segments, self.blocks, f"bwd{self._suffix}")

    def gather(self) -> Block:
        """All weights, ahead of the passes that need them: a pipeline's UNSHARD."""
        self._unsharding = True
        with self._order.of_all():
            for group in self._all_groups():
                self._order.unshard(group, Phase.FWD, (PASSED,))
        return self._order.take()

    def release(self) -> None:
        """Weights given back between passes: a pipeline's RESHARD."""
        for group in self._all_groups():
            group.is_whole = group.is_inner = False

    def _opened(self, phase: Phase) -> Block:
        """What was gathered ahead is waited for as a whole (_assert_unsharded)."""
        if self._unsharding:
            for group in self._all_groups():
                self._order.wait(group, phase)
        self._unsharding = False
        return self._order.take()

    def reduce(self) -> Block:
        """All gradients, in the order of the modules: perform_reduce_grad of a stage."""
        segments: list[tuple[Block, int]] = []
        for group in self._all_groups():
            with self._order.of_all():
                self._order.post_backward(group)
            segments.append((self._order.take(group.layer or 0), group.layer or 0))
        self._order.end(self._all_groups())
        segments.append((self._order.take(), 0))
        return folded(segments, self.blocks, f"reduce{self._suffix}")

    def _with_experts(self, layer: Layer, reshard: int | None) -> Layer:
        if layer.unit.experts_at is None or not self.is_sharded:
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
        inside = (
            one
            for group, members in self._groups
            for one in (group, *(layer.experts for layer in members))
        )
        return [one for one in (self._root, self._first, *inside, self._last) if one]

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
                marked = (replace(one, name=PASSED) for one in piece[-1:])
                self.blocks[name] = (*piece[:-1], *marked) if is_end else piece

    def _passes(
        self,
        members: Sequence[Layer],
        way: str,
        leave: Callable[[Group | None], None] = lambda group: None,
    ) -> Iterator[Item]:
        """Blocks one after the other, the last one first if backward."""
        base = members[0].index
        yield from self._order.take(base)
        for one in members if way == "fwd" else reversed(members):
            ways = ["again", "rest"] if way == "bwd" and one.is_checkpointed else [way]
            for each in ways:
                yield from self._pieces(one, each, base, leave)

    def _pieces(
        self, one: Layer, way: str, base: int, leave: Callable[[Group | None], None]
    ) -> Iterator[Item]:
        """leave: what is called behind experts in the backward pass."""
        unit, order = one.unit, self._order
        is_backward = way in ("bwd", "rest")
        pieces = unit.bwd if is_backward else unit.fwd
        for index in range(len(pieces)):
            experts = one.experts if index == unit.experts_at else None
            (order.pre_backward if is_backward else order.pre_forward)(experts)
            yield from order.take(base)
            yield _run(unit, way, index, len(pieces), one.index - base)
            if way == "fwd":
                order.post_forward(experts)
            elif is_backward:
                leave(experts)
            yield from order.take(base)
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


def _name(unit: Unit, way: str, index: int, pieces: int) -> str:
    return f"{unit.name}.{way}" if pieces == 1 else f"{unit.name}.{way}.{index}"


def _run(unit: Unit, way: str, index: int = 0, pieces: int = 1, layer: int = 0) -> Run:
    return Run(block=_name(unit, way, index, pieces), layer=layer)
