"""Fold a long list of operations into blocks that repeat: layers, then micro-batches.

The shortest repeat that saves enough is folded first, then repeats of the remaining items and
repeats inside blocks. Two repetitions are equal if their layers, and their micro-batches, all
differ by the same step. `Workload.expand` of the result gives the list again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stepmark.model.ops import Phase
from stepmark.step.workload import Block, Item, Operation, Run

# Items that a repeat must save to be worth a block.
LEAST_SAVED = 4
# Later occurrences of an operation that are tried as the next repetition.
LOOK_AHEAD = 48


@dataclass(frozen=True, slots=True)
class _Node:
    """Item without its layer and micro-batch. key: equal for items that are otherwise equal."""

    item: Item
    key: int
    layer: int | None
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class _Repeat:
    start: int
    period: int
    times: int
    layer_step: int
    microbatch_step: int


def fold(operations: Iterable[Operation], name: str) -> dict[str, Block]:
    """Return blocks by name; block `name` runs the others.

    A block is named after what repeats ("step.layer.fwd"), uniquely under `name`.
    """
    return _Folder(name).fold(operations)


class _Folder:
    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[Item, int] = {}
        self._names: dict[Block, str] = {}  # names of the blocks so far

    def fold(self, operations: Iterable[Operation]) -> dict[str, Block]:
        nodes = [self._node(item, item.layer, item.microbatch) for item in operations]
        step = _placed(self._shortened(nodes), 0, 0)
        return self._blocks() | {self._name: step}

    def _shortened(self, nodes: list[_Node]) -> list[_Node]:
        while len(shorter := self._pass(nodes)) < len(nodes):
            nodes = shorter
        return nodes

    def _node(self, item: Item, layer: int | None, microbatch: int | None) -> _Node:
        if isinstance(item, Run):
            placeless: Item = replace(item, layer=0, microbatch=0)
        else:
            placeless = replace(
                item,
                layer=None if layer is None else 0,
                microbatch=None if microbatch is None else 0,
            )
        key = self._keys.setdefault(placeless, len(self._keys))
        return _Node(placeless, key, layer, microbatch)

    def _pass(self, nodes: list[_Node]) -> list[_Node]:
        """Return the nodes with each repeat replaced by one node."""
        keys = [node.key for node in nodes]
        following = _next_alike(keys)
        folded: list[_Node] = []
        at = 0
        while at < len(nodes):
            repeat = _repeat_at(nodes, keys, following, at)
            if repeat is None:
                folded.append(nodes[at])
                at += 1
                continue
            folded.extend(nodes[at : repeat.start])
            folded.append(self._run(nodes, repeat))
            at = repeat.start + repeat.period * repeat.times
        return folded

    def _run(self, nodes: list[_Node], repeat: _Repeat) -> _Node:
        turn = nodes[repeat.start : repeat.start + repeat.period]
        layer = next((node.layer for node in turn if node.layer is not None), None)
        microbatch = next(
            (node.microbatch for node in turn if node.microbatch is not None), None
        )
        block = _placed(self._shortened(turn), layer or 0, microbatch or 0)
        run = Run(
            block=self._name_block(block, repeat),
            times=repeat.times,
            layer_step=repeat.layer_step,
            microbatch_step=repeat.microbatch_step,
        )
        return self._node(run, layer, microbatch)

    def _name_block(self, block: Block, repeat: _Repeat) -> str:
        if block in self._names:
            return self._names[block]
        phases = self._phases(block)
        kind = "microbatch" if repeat.microbatch_step else "repeat"
        if repeat.layer_step:
            kind = "layer"
        phase = f".{next(iter(phases))}" if len(phases) == 1 else ""
        stem = name = f"{self._name}.{kind}{phase}"
        names = set(self._names.values())
        number = 1
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        self._names[block] = name
        return name

    def _blocks(self) -> dict[str, Block]:
        return {name: block for block, name in self._names.items()}

    def _phases(self, block: Block) -> set[str]:
        """Return the phases in a block: fwd, bwd (including dgrad and wgrad), optim."""
        blocks = self._blocks()
        phases: set[str] = set()
        for item in block:
            if isinstance(item, Run):
                phases |= self._phases(blocks[item.block])
            else:
                back = item.phase in (Phase.DGRAD, Phase.WGRAD, Phase.BWD) or item.recompute
                phases.add("bwd" if back else str(item.phase))
        return phases


def _next_alike(keys: Sequence[int]) -> list[int]:
    """Return for each index the next one with the same key, or the length."""
    last: dict[int, int] = {}
    following = [len(keys)] * len(keys)
    for at in range(len(keys) - 1, -1, -1):
        following[at] = last.get(keys[at], len(keys))
        last[keys[at]] = at
    return following


def _repeat_at(
    nodes: list[_Node], keys: list[int], following: list[int], at: int
) -> _Repeat | None:
    """Return the shortest period that repeats from here and saves enough, or None."""
    other = following[at]
    for _ in range(LOOK_AHEAD):
        period = other - at
        if other + period > len(nodes):
            return None
        steps = _steps(nodes, keys, at, period)
        if steps is not None:
            times = 2
            while _steps(nodes, keys, at + (times - 1) * period, period) == steps:
                times += 1
            if period * (times - 1) >= LEAST_SAVED:
                return _aligned(nodes, keys, _Repeat(at, period, times, *steps))
        other = following[other]
    return None


def _steps(nodes: list[_Node], keys: list[int], at: int, period: int) -> tuple[int, int] | None:
    """Return the steps of layer and micro-batch to the next repetition; None if not equal."""
    other = at + period
    # Comparing the slices is slow, and most pairs differ early.
    if keys[at : at + 4][:period] != keys[other : other + 4][:period]:
        return None
    if keys[at:other] != keys[other : other + period]:
        return None
    layer_step: int | None = None
    microbatch_step: int | None = None
    for node, after in zip(nodes[at:other], nodes[other : other + period], strict=True):
        if node.layer is not None and after.layer is not None:
            step = after.layer - node.layer
            layer_step = step if layer_step is None else layer_step
            if step != layer_step:
                return None
        if node.microbatch is not None and after.microbatch is not None:
            step = after.microbatch - node.microbatch
            microbatch_step = step if microbatch_step is None else microbatch_step
            if step != microbatch_step:
                return None
    return layer_step or 0, microbatch_step or 0


def _aligned(nodes: list[_Node], keys: list[int], repeat: _Repeat) -> _Repeat:
    """Shift the repeat to where a repetition has the fewest layers, which is a layer's start.

    Operations before the first layer may look like the end of one.
    """
    if not repeat.layer_step or repeat.times == 2:
        return repeat
    best = repeat
    fewest = _num_layers(nodes, repeat)
    for start in range(repeat.start + 1, repeat.start + repeat.period):
        shifted = replace(repeat, start=start)
        last = start + (repeat.times - 2) * repeat.period
        if last + 2 * repeat.period > len(nodes) or _steps(
            nodes, keys, last, repeat.period
        ) != (repeat.layer_step, repeat.microbatch_step):
            shifted = replace(shifted, times=repeat.times - 1)
        if (number := _num_layers(nodes, shifted)) < fewest:
            best = shifted
            fewest = number
    return best


def _num_layers(nodes: list[_Node], repeat: _Repeat) -> int:
    turn = nodes[repeat.start : repeat.start + repeat.period]
    return len({node.layer for node in turn if node.layer is not None})


def _placed(nodes: Sequence[_Node], layer: int, microbatch: int) -> Block:
    """Return items with layer and micro-batch relative to these."""
    return tuple(_at(node, layer, microbatch) for node in nodes)


def _at(node: _Node, layer: int, microbatch: int) -> Item:
    new_layer = None if node.layer is None else node.layer - layer
    new_microbatch = None if node.microbatch is None else node.microbatch - microbatch
    if isinstance(node.item, Run):
        return replace(node.item, layer=new_layer or 0, microbatch=new_microbatch or 0)
    return replace(node.item, layer=new_layer, microbatch=new_microbatch)
