"""A model or a pipeline stage's part of it, pass by pass, with FSDP2 around its modules.

fully_shard wraps the embedding and the output, or the root has both; every blocks_per_group
blocks; and before that, with expert parallelism, the experts of each block
(training/parallelize.py: _fsdp). Without a Sharding the passes have no FSDP operations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from stepmark.cases.training import Recompute
from stepmark.model.ops import Phase
from stepmark.step.module import Param
from stepmark.step.workload import Block, Item, Run
from stepmark.workloads.architecture import Unit
from stepmark.workloads.pipeline import COMPUTE_DONE, in_layer
from stepmark.workloads.rules.pytorch.async_tp import in_pieces
from stepmark.workloads.rules.pytorch.fsdp_order import (
    FsdpGroups,
    FsdpOrder,
    ParamGroup,
    group_params,
)
from stepmark.workloads.rules.pytorch.fsdp_recorder import UNSHARDED, FsdpRecorder
from stepmark.workloads.rules.pytorch.split_backward import input_part, weight_part
from stepmark.workloads.rules.pytorch.technique import Technique, before_recompute, recomputed

Blocks = dict[str, Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A block at its place. experts: their own group, if they are sharded by themselves."""

    unit: Unit
    index: int
    is_checkpointed: bool = False
    experts: ParamGroup[Param] | None = None


class Chunk:
    """Passes of the modules in `layers`, and of those before and after them.

    blocks: the bodies of modules are added to it, once for all chunks.
    """

    def __init__(
        self,
        technique: Technique,
        layers: Sequence[Layer],
        *,
        blocks: Blocks,
        embedding: Unit | None = None,
        output: Unit | None = None,
        suffix: str = "",
    ) -> None:
        self._technique = technique
        self.blocks = blocks
        self._suffix = suffix
        self.embedding = embedding
        self.output = output
        sharding = technique.sharding
        self._recorder = FsdpRecorder(sharding or UNSHARDED, suffix)
        self._groups: FsdpGroups[Param] = FsdpGroups()
        if sharding:
            self._groups = group_params(
                [
                    (layer.unit.params, None)
                    if layer.unit.experts_at is None
                    else (layer.unit.others, layer.unit.experts)
                    for layer in layers
                ],
                embedding=self.embedding.params if self.embedding else None,
                output=self.output.params if self.output else None,
                first_layer=layers[0].index if layers else 0,
                reshard=sharding.reshard,
                prefetch=technique.settings.prefetch,
                blocks_per_group=technique.settings.blocks_per_group,
                root_has_ends=technique.root_has_ends,
                regathers_table=technique.settings.embedding_in_backward,
            )
        self._order = FsdpOrder(self._groups, self._recorder)
        self.layers = [
            replace(layer, experts=experts)
            for layer, experts in zip_longest(layers, self._groups.experts)
        ]
        size = technique.settings.blocks_per_group
        parts = [
            self.layers[index : index + size] for index in range(0, len(self.layers), size)
        ]
        # Without a sharding the parts have no group.
        self._parts = list(zip_longest(self._groups.blocks, parts))
        end_units = [unit for unit in (embedding, output) if unit]
        for unit in end_units:
            self._register(unit)
        for unit in {layer.unit.name: layer.unit for layer in self.layers}.values():
            self._register(unit, is_layer=True)

    @property
    def params(self) -> tuple[Param, ...]:
        """Parameters of all modules, a tied table once."""
        units = (self.embedding, *(layer.unit for layer in self.layers), self.output)
        return tuple(param for unit in units if unit for param in unit.params)

    @property
    def is_sharded(self) -> bool:
        return self._technique.sharding is not None

    def state(self) -> tuple[object, ...]:
        """FSDP's state. Passes that start from equal states are equal."""
        return self._order.state, self._recorder.state(self._order.groups)

    def open_passes(self) -> list[int]:
        """Count forward passes without a backward by group, and by the group before them."""
        return [count for group in self._order.groups for _, count in group.before]

    def open_more(self, counts: Sequence[int]) -> None:
        """Add open passes, as if more passes had run that leave the state as it is."""
        more = iter(counts)
        for group in self._order.groups:
            group.before = [(other, count + next(more)) for other, count in group.before]

    def count_compute_done(self, times: int = 1) -> None:
        """Count operations named COMPUTE_DONE of this chunk or another."""
        self._recorder.count_compute_done(times)

    def forward(self) -> Block:
        order = self._order
        groups = self._groups
        order.wait_for_unshard(Phase.FWD)
        segments = [(self._recorder.drain(), 0)]
        self._recorder.begin()
        order.pre_forward(groups.root)
        segments += self._forward(self.embedding, groups.embedding)
        for group, members in self._parts:
            order.pre_forward(group)
            segments.append((tuple(self._passes(members, "fwd")), members[0].index))
            order.post_forward(group)
        segments += self._forward(self.output, groups.output)
        order.post_forward(groups.root)
        order.end_forward()
        return folded(segments, self.blocks, f"fwd{self._suffix}")

    def _forward(
        self, unit: Unit | None, group: ParamGroup[Param] | None
    ) -> Iterator[tuple[Block, int]]:
        """Yield the forward pass of one end of the model."""
        if unit:
            self._order.pre_forward(group)
            yield (*self._recorder.drain(), _run(unit, "fwd")), 0
            self.count_compute_done()
            self._order.post_forward(group)

    def backward(
        self, *, reduces: bool = True, keeps: bool = False, of_inputs: bool = False
    ) -> Block:
        """keeps: weights stay gathered, because the step of a pipeline has more passes.

        of_inputs: without the gradients of weights.
        """
        way = "input" if of_inputs else "bwd"
        recorder = self._recorder
        order = self._order
        groups = self._groups
        order.wait_for_unshard(Phase.BWD)
        segments = [(recorder.drain(), 0)]
        leave = partial(order.post_backward, reduces=reduces, keeps=keeps)
        order.pre_backward(groups.root)
        order.pre_backward(groups.output)
        if self.output:
            segments.append(((*recorder.drain(), _run(self.output, way)), 0))
            self.count_compute_done()
            leave(groups.output)
        segments.append((recorder.drain(), 0))
        for group, members in reversed(self._parts):
            base = members[0].index
            order.pre_backward(group)
            passes = tuple(self._passes(members, way, leave))
            leave(group)
            segments.append(((*passes, *recorder.drain(base)), base))
        has_grad = self.embedding is not None and any(self.embedding.bwd)
        if has_grad:  # no hook of a frozen table's output runs
            order.pre_backward(groups.embedding)
        if self.embedding and has_grad:
            segments.append(((*recorder.drain(), _run(self.embedding, "bwd")), 0))
        leave(groups.embedding)
        leave(groups.root)
        segments.append((recorder.drain(), 0))
        if not keeps:
            order.finalize(reduces=reduces)
            segments.append((recorder.drain(), 0))
        return folded(segments, self.blocks, f"{way}{self._suffix}")

    def backward_input(self) -> Block:
        """Return the part of a backward pass that the stage before waits for."""
        if self.embedding:
            self._order.wait_for_unshard(Phase.BWD)
            return self._recorder.drain()
        return self.backward(reduces=False, keeps=True, of_inputs=True)

    def backward_weight(self) -> Block:
        """Return the rest of a backward pass, of the model's first stage all of it."""
        if self.embedding:
            return self.backward(reduces=False, keeps=True)
        self._order.wait_for_unshard(Phase.BWD)
        segments = [(self._recorder.drain(), 0)]
        for layer in self.layers:
            segments.append(((_run(layer.unit, "weight"),), layer.index))
            self.count_compute_done()
        if self.output:
            segments.append(((_run(self.output, "weight"),), 0))
            self.count_compute_done()
        return folded(segments, self.blocks, f"weight{self._suffix}")

    def gather(self) -> Block:
        """Return the gather of all weights before a pass: a pipeline's UNSHARD."""
        with self._recorder.of_all():
            self._order.unshard()
        return self._recorder.drain()

    def release(self) -> None:
        """Release weights between passes: a pipeline's RESHARD."""
        self._order.reshard()

    def reduce(self) -> Block:
        """Reduce all gradients in the order of the modules: a stage's perform_reduce_grad."""
        segments: list[tuple[Block, int]] = []
        for group in self._order.groups:
            with self._recorder.of_all():
                self._order.post_backward(group)
            segments.append((self._recorder.drain(group.layer or 0), group.layer or 0))
        self._order.finalize()
        segments.append((self._recorder.drain(), 0))
        return folded(segments, self.blocks, f"reduce{self._suffix}")

    def _register(self, unit: Unit, *, is_layer: bool = False) -> None:
        ways = {"fwd": unit.fwd, "bwd": unit.bwd}
        tp_pieces = self._technique.tp_pieces if is_layer else 1
        if is_layer and self._technique.settings.recompute is not Recompute.NONE:
            # A compiled backward pass is one graph, whose gathers are not cut off.
            skipped = before_recompute(unit) if tp_pieces == 1 else 0
            (first, *others) = recomputed(unit, self._technique.settings.recompute)
            ways["again"] = ((*unit.bwd[0][:skipped], *first), *others)
            ways["rest"] = (unit.bwd[0][skipped:], *unit.bwd[1:])
        if self._technique.schedule.splits_backward:
            ways["input"] = tuple(map(input_part, unit.bwd))
            ways["weight"] = (weight_part(unit),)
        biased = {param.part for param in unit.params if param.name.endswith(".bias")}
        for way, pieces in ways.items():
            for index, ops in enumerate(pieces if any(pieces) else ()):
                piece = in_pieces(ops, tp_pieces, biased) if tp_pieces > 1 else ops
                is_end = (
                    self._technique.names_ends and way != "again" and index + 1 == len(pieces)
                )
                name = _name(unit, way, index, len(pieces))
                marked = (replace(op, name=COMPUTE_DONE) for op in piece[-1:])
                self.blocks[name] = (*piece[:-1], *marked) if is_end else piece

    def _passes(
        self,
        members: Sequence[Layer],
        way: str,
        leave: Callable[[ParamGroup[Param] | None], None] = lambda group: None,
    ) -> Iterator[Item]:
        """Yield the passes of blocks, the last one first if backward."""
        base = members[0].index
        yield from self._recorder.drain(base)
        for layer in members if way == "fwd" else reversed(members):
            ways = ["again", "rest"] if way == "bwd" and layer.is_checkpointed else [way]
            for each in ways:
                yield from self._pieces(layer, each, base, leave)

    def _pieces(
        self,
        layer: Layer,
        way: str,
        base: int,
        leave: Callable[[ParamGroup[Param] | None], None],
    ) -> Iterator[Item]:
        """leave: is called after experts in the backward pass."""
        unit = layer.unit
        recorder = self._recorder
        order = self._order
        is_backward = way in ("bwd", "rest", "input")
        pieces = unit.bwd if is_backward else unit.fwd
        for index in range(len(pieces)):
            experts = layer.experts if index == unit.experts_at else None
            (order.pre_backward if is_backward else order.pre_forward)(experts)
            yield from recorder.drain(base)
            yield _run(unit, way, index, len(pieces), layer.index - base)
            if way == "fwd":
                order.post_forward(experts)
            elif is_backward:
                leave(experts)
            yield from recorder.drain(base)
        if way == "again":
            order.end_forward()
        else:
            self.count_compute_done()


def folded(segments: Sequence[tuple[Block, int]], blocks: Blocks, way: str) -> Block:
    """Replace equal segments of evenly spaced layers with one Run of a block in `blocks`."""
    items: list[Item] = []
    index = 0
    while index < len(segments):
        segment, first = segments[index]
        step = segments[index + 1][1] - first if index + 1 < len(segments) else 0
        times = 1
        while step and segments[index + times : index + times + 1] == [
            (segment, first + step * times)
        ]:
            times += 1
        if times == 1:
            items += [in_layer(item, first) for item in segment]
        else:
            name = next((name for name, block in blocks.items() if block == segment), "")
            name = name or f"{way}.{len(blocks)}"
            blocks[name] = segment
            items.append(Run(block=name, times=times, layer=first, layer_step=step))
        index += times
    return tuple(items)


def _name(unit: Unit, way: str, index: int, pieces: int) -> str:
    return f"{unit.name}.{way}" if pieces == 1 else f"{unit.name}.{way}.{index}"


def _run(unit: Unit, way: str, index: int = 0, pieces: int = 1, layer: int = 0) -> Run:
    return Run(block=_name(unit, way, index, pieces), layer=layer)
