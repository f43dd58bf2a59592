"""A long list of operations as blocks that run several times: layers, then micro-batches.

Repeats are found where they begin, the shortest that saves something first; then in what they
left, and inside them. Operations of two turns are the same if their layers, and micro-batches,
all differ by one step. `Workload.expand` of the result is the list again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stepmark.core.ops import Phase
from stepmark.core.workload import Block, Item, Operation, Run

# A repeat must save as many items, or its block would not pay for its name.
LEAST_SAVED = 4
# Of how many later occurrences of an operation one may be its next turn.
LOOK_AHEAD = 48


@dataclass(frozen=True, slots=True)
class _Node:
    """An item without its place. key: the same for items that are alike but for the place."""

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
    """Blocks by name; `name` is the one that runs the others.

    Names of blocks tell what they repeat ("step.layer.fwd"), and are unique under `name`.
    """
    return _Folder(name).fold(operations)


class _Folder:
    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[Item, int] = {}
        self._names: dict[Block, str] = {}  # of the blocks made so far

    def fold(self, operations: Iterable[Operation]) -> dict[str, Block]:
        nodes = [self._node(one, one.layer, one.microbatch) for one in operations]
        step = _placed(self._shortened(nodes), 0, 0)
        blocks = {named: block for block, named in self._names.items()}
        return blocks | {self._name: step}

    def _shortened(self, nodes: list[_Node]) -> list[_Node]:
        while len(shorter := self._pass(nodes)) < len(nodes):
            nodes = shorter
        return nodes

    def _node(self, item: Item, layer: int | None, microbatch: int | None) -> _Node:
        if isinstance(item, Run):
            alike: Item = replace(item, layer=0, microbatch=0)
        else:
            alike = replace(
                item,
                layer=None if layer is None else 0,
                microbatch=None if microbatch is None else 0,
            )
        key = self._keys.setdefault(alike, len(self._keys))
        return _Node(alike, key, layer, microbatch)

    def _pass(self, nodes: list[_Node]) -> list[_Node]:
        """Repeats in their order, each as one node."""
        keys = [node.key for node in nodes]
        following = _next_alike(keys)
        found: list[_Node] = []
        at = 0
        while at < len(nodes):
            repeat = _repeat_at(nodes, keys, following, at)
            if repeat is None:
                found.append(nodes[at])
                at += 1
                continue
            found.extend(nodes[at : repeat.start])
            found.append(self._run(nodes, repeat))
            at = repeat.start + repeat.period * repeat.times
        return found

    def _run(self, nodes: list[_Node], repeat: _Repeat) -> _Node:
        turn = nodes[repeat.start : repeat.start + repeat.period]
        layer = next((one.layer for one in turn if one.layer is not None), None)
        microbatch = next((one.microbatch for one in turn if one.microbatch is not None), None)
        block = _placed(self._shortened(turn), layer or 0, microbatch or 0)
        run = Run(
            block=self._named(block, repeat),
            times=repeat.times,
            layer_step=repeat.layer_step,
            microbatch_step=repeat.microbatch_step,
        )
        return self._node(run, layer, microbatch)

    def _named(self, block: Block, repeat: _Repeat) -> str:
        if block in self._names:
            return self._names[block]
        phases = self._phases(block)
        what = "microbatch" if repeat.microbatch_step else "repeat"
        if repeat.layer_step:
            what = "layer"
        phase = f".{next(iter(phases))}" if len(phases) == 1 else ""
        wanted = name = f"{self._name}.{what}{phase}"
        taken, number = set(self._names.values()), 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        self._names[block] = name
        return name

    def _phases(self, block: Block) -> set[str]:
        """fwd, bwd (also for dgrad and wgrad), optim."""
        inside = {name: made for made, name in self._names.items()}
        found: set[str] = set()
        for item in block:
            if isinstance(item, Run):
                found |= self._phases(inside[item.block])
            else:
                back = item.phase in (Phase.DGRAD, Phase.WGRAD, Phase.BWD) or item.recompute
                found.add("bwd" if back else str(item.phase))
        return found


def _next_alike(keys: Sequence[int]) -> list[int]:
    """Of each place the next one with the same key; the length where there is none."""
    last: dict[int, int] = {}
    found = [len(keys)] * len(keys)
    for at in range(len(keys) - 1, -1, -1):
        found[at] = last.get(keys[at], len(keys))
        last[keys[at]] = at
    return found


def _repeat_at(
    nodes: list[_Node], keys: list[int], following: list[int], at: int
) -> _Repeat | None:
    """The shortest period that repeats from here and saves enough; None if there is none."""
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
                return _well_begun(nodes, keys, _Repeat(at, period, times, *steps))
        other = following[other]
    return None


def _steps(nodes: list[_Node], keys: list[int], at: int, period: int) -> tuple[int, int] | None:
    """By how much layers and micro-batches of the next turn differ; None if it is no turn."""
    other = at + period
    # The slices are costly, and most pairs differ soon.
    if keys[at : at + 4][:period] != keys[other : other + 4][:period]:
        return None
    if keys[at:other] != keys[other : other + period]:
        return None
    layer_step: int | None = None
    microbatch_step: int | None = None
    for one, two in zip(nodes[at:other], nodes[other : other + period], strict=True):
        if one.layer is not None and two.layer is not None:
            step = two.layer - one.layer
            layer_step = step if layer_step is None else layer_step
            if step != layer_step:
                return None
        if one.microbatch is not None and two.microbatch is not None:
            step = two.microbatch - one.microbatch
            microbatch_step = step if microbatch_step is None else microbatch_step
            if step != microbatch_step:
                return None
    return layer_step or 0, microbatch_step or 0


def _well_begun(nodes: list[_Node], keys: list[int], repeat: _Repeat) -> _Repeat:
    """The same repeat from where a turn has the fewest layers: where a layer begins.

    What stands before the first layer may look like the end of one.
    """
    if not repeat.layer_step or repeat.times == 2:
        return repeat
    best, fewest = repeat, _num_layers(nodes, repeat)
    for start in range(repeat.start + 1, repeat.start + repeat.period):
        moved = replace(repeat, start=start)
        last = start + (repeat.times - 2) * repeat.period
        if last + 2 * repeat.period > len(nodes) or _steps(
            nodes, keys, last, repeat.period
        ) != (repeat.layer_step, repeat.microbatch_step):
            moved = replace(moved, times=repeat.times - 1)
        if (number := _num_layers(nodes, moved)) < fewest:
            best, fewest = moved, number
    return best


def _num_layers(nodes: list[_Node], repeat: _Repeat) -> int:
    turn = nodes[repeat.start : repeat.start + repeat.period]
    return len({one.layer for one in turn if one.layer is not None})


def _placed(nodes: Sequence[_Node], layer: int, microbatch: int) -> Block:
    """Items with their places, relative to these."""
    return tuple(_at(node, layer, microbatch) for node in nodes)


def _at(node: _Node, layer: int, microbatch: int) -> Item:
    own_layer = None if node.layer is None else node.layer - layer
    own_microbatch = None if node.microbatch is None else node.microbatch - microbatch
    if isinstance(node.item, Run):
        return replace(node.item, layer=own_layer or 0, microbatch=own_microbatch or 0)
    return replace(node.item, layer=own_layer, microbatch=own_microbatch)
