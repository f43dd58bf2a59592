"""One micro-batch written down op by op, and many of them folded into blocks.

Streams as DeepSpeed has them: stage 3 gathers on a stream of its own; with overlap_comm
gradients are reduced on one too, and stages 1 and 2 then hold computation until the bucket
before is done (zero/stage_1_and_2.py: average_tensor). The last bucket of a backward pass is
waited for on the host.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.core.collectives import Collective
from stepmark.core.dtypes import DType
from stepmark.core.ops import Phase
from stepmark.core.workload import Block, CommOp, Item, Operation, Run
from stepmark.workload.decoder import Part
from stepmark.workload.fold import Repeat, fold, unfold
from stepmark.workload.job import Comms
from stepmark.workload.rules.deepspeed.buckets import Message
from stepmark.workload.rules.deepspeed.modules import Module
from stepmark.workload.rules.deepspeed.zero3 import Fetch

_DONE = "computed"  # name of computation that something waits for


def reduction(comms: Comms, message: Message, dtype: DType) -> tuple[CommOp, ...]:
    """Of gradients, waited for by computation."""
    made = comms(
        message.collective,
        message.elements,
        "dp",
        phase=Phase.BWD,
        module="gradients",
        dtype=dtype,
    )
    return tuple(replace(op, root=message.root) for op in made)


@dataclass(slots=True, kw_only=True)
class Tape:
    """items: (layer, operation), the operation's own layer being 0 where it has one."""

    parts: dict[str, Part]
    comms: Comms
    overlaps: bool
    holds: bool  # computation waits for the reduction before
    items: list[tuple[int | None, Operation]] = field(default_factory=list)
    gathers: int = 0
    reductions: int = 0  # beside computation
    needed: int | None = None  # the gather that the next computation waits for
    held: bool = False
    computed: int | None = None  # place of the newest computation

    def fetch(self, module: Module, phase: Phase, fetch: Fetch) -> None:
        """Gathers of a module's hook, and what its computation waits for."""
        for elements in fetch.gathers:
            made = self.comms(
                Collective.ALL_GATHER,
                elements,
                "dp",
                phase=phase,
                module="weights",
                stream="gather",
                name="gather",
                after=() if self.overlaps else self._computed(),
            )
            self._put(module.layer, made)
            self.gathers += len(made)
        if fetch.needs is not None and self.gathers:
            self.needed = self.gathers - fetch.needs

    def compute(self, module: Module, phase: Phase) -> None:
        """A module's computation; backward the other way round."""
        found = [self.parts[name] for name in module.parts if name in self.parts]
        if phase is Phase.FWD:
            ops = [op for part in found for op in part.fwd]
        else:
            ops = [op for part in reversed(found) for op in part.bwd]
        if not ops:
            return
        after = []
        if self.needed is not None:
            after.append(_newest("gather", self.gathers - self.needed))
        if self.held:
            after.append(_newest("reduce", 1))
        self.needed, self.held = None, False
        ops[0] = replace(ops[0], after=tuple(after))
        self.items += [(module.layer, op) for op in ops]
        self.computed = len(self.items) - 1

    def reduce(self, module: Module, messages: Iterable[Message], dtype: DType) -> None:
        """Buckets that a hook of gradients sends."""
        for message in messages:
            made = reduction(self.comms, message, dtype)
            if self.overlaps:
                after = self._computed()
                made = tuple(
                    replace(op, stream="reduce", name="reduce", after=after) for op in made
                )
                self.reductions += len(made)
                self.held = self.holds and self.reductions > 1
            self._put(module.layer, made)

    def finish(self, messages: Iterable[Message], dtype: DType) -> None:
        """The last bucket of a backward pass."""
        for message in messages:
            made = reduction(self.comms, message, dtype)
            after = ("reduce",) if self.reductions else ()
            self._put(None, tuple(replace(op, after=after) for op in made))

    def _put(self, layer: int | None, made: Iterable[CommOp]) -> None:
        inside = None if layer is None else 0
        self.items += [(layer, replace(op, layer=inside, microbatch=0)) for op in made]

    def _computed(self) -> tuple[str, ...]:
        """The newest computation, which gets a name by this."""
        if self.computed is None:
            return ()
        layer, op = self.items[self.computed]
        self.items[self.computed] = layer, replace(op, name=_DONE)
        return (_DONE,)


def _newest(name: str, before: int) -> str:
    return f"{name}~{before}" if before else name


@dataclass(slots=True, kw_only=True)
class Program:
    """Blocks by name; equal ones are one."""

    blocks: dict[str, Block] = field(default_factory=dict)
    names: dict[Block, str] = field(default_factory=dict)

    def microbatches(self, tapes: Iterable[tuple[Tape, int]]) -> Iterator[Item]:
        """Runs of each tape so many times; equal neighbours are one Run."""
        at = 0
        counts = (
            (self._block(self._folded(tape), "microbatch"), times) for tape, times in tapes
        )
        for name, group in groupby(counts, key=lambda one: one[0]):
            times = sum(count for _, count in group)
            yield Run(block=name, times=times, microbatch=at, microbatch_step=1)
            at += times

    def _block(self, block: Block, kind: str) -> str:
        if block not in self.names:
            count = sum(name.startswith(f"{kind} ") for name in self.blocks)
            self.names[block] = f"{kind} {count + 1}"
            self.blocks[self.names[block]] = block
        return self.names[block]

    def _folded(self, tape: Tape) -> Block:
        found: list[Item] = []
        passed: list[tuple[int, str]] = []  # layers one after the other
        for layer, group in groupby(tape.items, key=lambda item: item[0]):
            block = tuple(op for _, op in group)
            if layer is None:
                found += [*self._layers(passed), *block]
                passed = []
            else:
                passed.append((layer, self._block(block, "layer")))
        return (*found, *self._layers(passed))

    def _layers(self, passed: list[tuple[int, str]]) -> tuple[Item, ...]:
        """Layers may turn round: a model may end with one."""
        found: list[Item] = []
        while passed:
            step = passed[1][0] - passed[0][0] if len(passed) > 1 else 1
            count = 1
            while count < len(passed) and passed[count][0] - passed[count - 1][0] == step:
                count += 1
            names = [name for _, name in passed[:count]]
            found += self._runs(fold(names), passed[0][0], step)
            passed = passed[count:]
        return tuple(found)

    def _runs(
        self, folded: tuple[str | Repeat[str], ...], at: int, step: int
    ) -> tuple[Item, ...]:
        found: list[Item] = []
        for one in folded:
            if isinstance(one, str):
                found.append(Run(block=one, layer=at))
                at += step
                continue
            length = step * len(unfold(one.body))
            only = one.body[0]
            if len(one.body) > 1 or not isinstance(only, str):
                only = self._block(self._runs(one.body, 0, step), "layers")
            found.append(Run(block=only, times=one.times, layer=at, layer_step=length))
            at += length * one.times
        return tuple(found)

    def repeats(self, operations: Iterable[Operation]) -> Block:
        """Operations of no layer, what repeats as a Run."""
        return self._repeats(fold(tuple(operations)))

    def _repeats(self, folded: tuple[Operation | Repeat[Operation], ...]) -> Block:
        return tuple(
            Run(block=self._block(self._repeats(one.body), "repeat"), times=one.times)
            if isinstance(one, Repeat)
            else one
            for one in folded
        )
