"""One micro-batch recorded op by op with its buckets, and micro-batches folded into blocks.

Asynchronous messages are on one stream, whatever CUDA streams DeepSpeed has: gathers of stage
3 and, with overlap_comm, reductions use one group, whose communicator runs one at a time
(zero/stage3.py: _get_param_partition_group). Stages 1 and 2 then delay computation until the
buckets before are done (zero/stage_1_and_2.py: average_tensor). The host waits for the last
bucket of a backward pass.

Buckets: DeepSpeed 0.19.8, deepspeed/runtime: zero/stage_1_and_2.py
(reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_and_scatter,
allreduce_no_retain), zero/stage3.py (the same, __avg_scatter_grads),
comm/coalesced_collectives.py (reduce_scatter_coalesced), engine.py (allreduce_no_retain).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.ops import Phase
from stepmark.step.module import Module as Leaf
from stepmark.step.workload import Block, CommOp, Item, Operation, Run
from stepmark.workloads.fold import Repeat, fold, unfold
from stepmark.workloads.job import Comms
from stepmark.workloads.rules.deepspeed.modules import Module, Param
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed
from stepmark.workloads.rules.deepspeed.zero3 import Fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of the data-parallel group. elements: of the whole buffer."""

    collective: Collective
    elements: int
    root: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The division of the flat parameters of stages 1 and 2 among ranks.

    starts: of each parameter by its index. The end is padded so that every rank's share has an
    even number of elements (nccl_start_alignment_factor).
    """

    starts: dict[int, int]
    share: int
    ranks: int

    @property
    def total(self) -> int:
        return self.share * self.ranks

    def slices(self, param: Param) -> Iterator[tuple[int, int]]:
        """Yield (rank, elements) of a parameter, which may be divided among ranks."""
        start = self.starts[param.index]
        end = start + param.numel
        while start < end:
            owner = start // self.share
            stop = min(end, (owner + 1) * self.share)
            yield owner, stop - start
            start = stop


def shares(params: Iterable[Param], ranks: int, *, round_robin: bool = False) -> Shares:
    """round_robin: parameters i are sorted by i modulo ranks (_round_robin_reorder)."""
    order = list(params)
    if round_robin:
        order = [param for first in range(ranks) for param in order[first::ranks]]
    starts, total = {}, 0
    for param in order:
        starts[param.index] = total
        total += param.numel
    return Shares(starts=starts, share=-(-total // (2 * ranks)) * 2, ranks=ranks)


def all_reduce_buckets(params: Iterable[Param], at_least: int) -> Iterator[Message]:
    """Yield stage 0's buckets of more than this size (engine.py: allreduce_no_retain)."""
    numel = 0
    for param in params:
        numel += param.numel
        if numel > at_least:
            yield Message(collective=Collective.ALL_REDUCE, elements=numel)
            numel = 0
    if numel:
        yield Message(collective=Collective.ALL_REDUCE, elements=numel)


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Gradients to be reduced together. shares: of stages 1 and 2; None at stage 3.

    A parameter that does not fit sends the bucket before it is added; one larger than the
    bucket is sent alone when the next one is ready.
    """

    settings: DeepSpeed
    ranks: int
    shares: Shares | None
    params: list[Param] = field(default_factory=list)
    elements: int = 0

    def ready(self, param: Param) -> list[Message]:
        """Add a parameter's gradient, and return the messages that are sent before."""
        is_full = self.elements + param.numel > self.settings.reduce_bucket_size
        sent = self.flush() if is_full else []
        self.params.append(param)
        self.elements += param.numel
        return sent

    def flush(self) -> list[Message]:
        """Empty the bucket, and return its messages."""
        if not self.params:
            return []
        if self.shares is None:
            sent = [self._scattered()]
        elif not (self.settings.reduce_scatter and self.settings.contiguous_gradients):
            sent = [Message(collective=Collective.ALL_REDUCE, elements=self.elements)]
        elif self.settings.use_multi_rank_bucket_allreduce:
            sent = list(self._cut(numel for _, numel in self._owned(self.shares)))
        else:
            sent = list(self._to_owners(self.shares))
        self.params.clear()
        self.elements = 0
        return sent

    def _scattered(self) -> Message:
        """Return stage 3's message; a reduce-scatter pads parameters to the ranks."""
        settings = self.settings
        fits = settings.contiguous_gradients and self.elements <= settings.reduce_bucket_size
        if fits and not settings.reduce_scatter:
            return Message(collective=Collective.ALL_REDUCE, elements=self.elements)
        padded = sum(param.padded(self.ranks) for param in self.params)
        return Message(collective=Collective.REDUCE_SCATTER, elements=padded)

    def _owned(self, shares: Shares) -> Iterator[tuple[int, int]]:
        """Yield (owner, elements) of the slices that belong to one rank each."""
        for param in self.params:
            yield from shares.slices(param)

    def _cut(self, numels: Iterable[int], root: int | None = None) -> Iterator[Message]:
        """Yield messages of slices; only a large parameter's slices exceed a bucket."""
        collective = Collective.ALL_REDUCE if root is None else Collective.REDUCE
        elements = 0
        for numel in numels:
            elements += numel
            if elements > self.settings.reduce_bucket_size:
                yield Message(collective=collective, elements=elements, root=root)
                elements = 0
        if elements:
            yield Message(collective=collective, elements=elements, root=root)

    def _to_owners(self, shares: Shares) -> Iterator[Message]:
        by_owner: dict[int, list[int]] = {}
        for owner, numel in self._owned(shares):
            by_owner.setdefault(owner, []).append(numel)
        for owner, numels in by_owner.items():
            yield from self._cut(numels, owner)


_DP = "dp"  # the group, and the stream of its communicator
_GATHER, _REDUCE = "gather", "reduce"  # names on this stream
# Names on the computation's stream: computation, and reductions for which it waits.
_COMPUTED, _REDUCED = "computed", "reduced"


def reduction(comms: Comms, message: Message, dtype: DType) -> tuple[CommOp, ...]:
    """Return a reduction of gradients for which computation waits."""
    ops = comms(message.collective, message.elements, _DP, Phase.BWD, "gradients", dtype)
    return tuple(replace(op, root=message.root) for op in ops)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Recorder of one micro-batch. items: (layer, operation); an operation's own layer is 0.

    follows: there is a micro-batch before, for whose end gathers wait.
    """

    parts: dict[str, Leaf]
    comms: Comms
    overlaps: bool
    divided: bool  # stage 3
    follows: bool = False
    items: list[tuple[int | None, Operation]] = field(default_factory=list)
    gathers: int = 0
    reductions: int = 0  # asynchronous ones
    needed: int | None = None  # the gather that the next computation waits for
    awaited: int | None = None  # it also waits for the reduction so many before the newest
    computed: int | None = None  # place of the newest on the stream of computation
    added: int | None = None  # the same when the newest gradient was added to its bucket
    newest: str = ""  # name of the newest asynchronous message

    def fetch(self, module: Module, phase: Phase, fetch: Fetch) -> None:
        """Record the gathers of a module's hook."""
        for elements in fetch.gathers:
            ops = self.comms(
                Collective.ALL_GATHER,
                elements,
                _DP,
                phase,
                "weights",
                stream=_DP,
                name=_GATHER,
                after=self._before_gather(),
            )
            self._put(module.layer, ops)
            self.gathers += len(ops)
            self.newest = _GATHER if ops else ""
        if fetch.needs is not None and self.gathers:
            self.needed = self.gathers - fetch.needs

    def compute(self, module: Module, phase: Phase) -> None:
        """Record a module's computation, in the backward pass in reverse order."""
        leaves = [self.parts[name] for name in module.parts if name in self.parts]
        if phase is Phase.FWD:
            ops = [op for leaf in leaves for op in leaf.fwd]
        else:
            ops = [op for leaf in reversed(leaves) for op in leaf.bwd]
        if not ops:
            return
        after = []
        if self.needed is not None:
            after.append(_newest(_GATHER, self.gathers - self.needed))
        if self.awaited is not None:
            after.append(_newest(_REDUCE, self.awaited))
        self.needed = self.awaited = None
        ops[0] = replace(ops[0], after=tuple(after))
        self.items += [(module.layer, op) for op in ops]
        self.computed = len(self.items) - 1

    def reduce(self, module: Module, messages: Sequence[Message], dtype: DType) -> None:
        """Record the messages that a gradient's hook sends before it adds the gradient."""
        if not self.overlaps:
            self._waited_for(module.layer, messages, dtype)
            return
        after = self._before_reduction() if messages or self.divided else ()
        for message in messages:
            ops = tuple(
                replace(op, stream=_DP, name=_REDUCE, after=after)
                for op in reduction(self.comms, message, dtype)
            )
            self.reductions += len(ops)
            self._put(module.layer, ops)
            self.newest = _REDUCE if ops else ""
        if messages and not self.divided:
            # To an owner the host waits before each message (allreduce_and_copy).
            distance = len(messages) if messages[0].root is None else 1
            self.awaited = distance if self.reductions > distance else None

    def finish(self, messages: Iterable[Message], dtype: DType) -> None:
        """Record the last bucket of a backward pass."""
        self._waited_for(None, messages, dtype, _REDUCED if self.divided else "")

    def _waited_for(
        self, layer: int | None, messages: Iterable[Message], dtype: DType, name: str = ""
    ) -> None:
        """Record reductions on the computation's stream, after all asynchronous messages."""
        after = (self.newest,) if self.newest else ()
        for message in messages:
            ops = reduction(self.comms, message, dtype)
            if ops:
                self._put(layer, tuple(replace(op, name=name, after=after) for op in ops))
                self.computed = len(self.items) - 1

    def _put(self, layer: int | None, ops: Iterable[CommOp]) -> None:
        inside = None if layer is None else 0
        self.items += [(layer, replace(op, layer=inside, microbatch=0)) for op in ops]

    def _before_gather(self) -> tuple[str, ...]:
        """Return the dependencies; with overlap_comm the end of the previous micro-batch."""
        is_first = not self.gathers if self.overlaps else self.computed is None
        if is_first:
            return (_REDUCED,) if self.follows else ()
        return () if self.overlaps else self._computed()

    def _before_reduction(self) -> tuple[str, ...]:
        """Return the newest computation; at stage 3 that of the bucket's newest gradient.

        There __add_grad_to_ipg_bucket waits, and a bucket is sent before the next gradient.
        """
        added, self.added = self.added, self.computed
        newest = self._computed()
        if not self.divided or added == self.computed:
            return newest
        return () if added is None else (_newest(_COMPUTED, 1),)

    def _computed(self) -> tuple[str, ...]:
        """Name the newest operation on the computation's stream, and return its name."""
        if self.computed is None:
            return ()
        layer, op = self.items[self.computed]
        name = _REDUCED if isinstance(op, CommOp) else _COMPUTED
        self.items[self.computed] = layer, replace(op, name=name)
        return (name,)


def _newest(name: str, before: int) -> str:
    return f"{name}~{before}" if before else name


@dataclass(slots=True, kw_only=True)
class Program:
    """Blocks by name; equal blocks are one."""

    blocks: dict[str, Block] = field(default_factory=dict)
    names: dict[Block, str] = field(default_factory=dict)

    def microbatches(self, recorders: Iterable[tuple[Recorder, int]]) -> Iterator[Item]:
        """Yield a Run for each recorder; equal neighbours are one Run."""
        first = 0
        counts = (
            (self._block(self._folded(recorder), "microbatch"), times)
            for recorder, times in recorders
        )
        for name, group in groupby(counts, key=lambda pair: pair[0]):
            times = sum(count for _, count in group)
            yield Run(block=name, times=times, microbatch=first, microbatch_step=1)
            first += times

    def _block(self, block: Block, kind: str) -> str:
        if block not in self.names:
            count = sum(name.startswith(f"{kind} ") for name in self.blocks)
            self.names[block] = f"{kind} {count + 1}"
            self.blocks[self.names[block]] = block
        return self.names[block]

    def _folded(self, recorder: Recorder) -> Block:
        items: list[Item] = []
        layers: list[tuple[int, str]] = []  # layers one after the other
        for layer, group in groupby(recorder.items, key=lambda item: item[0]):
            block = tuple(op for _, op in group)
            if layer is None:
                items += [*self._layers(layers), *block]
                layers = []
            else:
                layers.append((layer, self._block(block, "layer")))
        return (*items, *self._layers(layers))

    def _layers(self, layers: list[tuple[int, str]]) -> tuple[Item, ...]:
        """Return the Runs of layers, which may go up and then down."""
        items: list[Item] = []
        while layers:
            step = layers[1][0] - layers[0][0] if len(layers) > 1 else 1
            count = 1
            while count < len(layers) and layers[count][0] - layers[count - 1][0] == step:
                count += 1
            names = [name for _, name in layers[:count]]
            items += self._runs(fold(names), layers[0][0], step)
            layers = layers[count:]
        return tuple(items)

    def _runs(
        self, folded: tuple[str | Repeat[str], ...], layer: int, step: int
    ) -> tuple[Item, ...]:
        items: list[Item] = []
        for item in folded:
            if isinstance(item, str):
                items.append(Run(block=item, layer=layer))
                layer += step
                continue
            length = step * len(unfold(item.body))
            name = item.body[0]
            if len(item.body) > 1 or not isinstance(name, str):
                name = self._block(self._runs(item.body, 0, step), "layers")
            items.append(Run(block=name, times=item.times, layer=layer, layer_step=length))
            layer += length * item.times
        return tuple(items)

    def repeats(self, operations: Iterable[Operation]) -> Block:
        """Return operations of no layer, repeats as Runs."""
        return self._repeats(fold(tuple(operations)))

    def _repeats(self, folded: tuple[Operation | Repeat[Operation], ...]) -> Block:
        return tuple(
            Run(block=self._block(self._repeats(item.body), "repeat"), times=item.times)
            if isinstance(item, Repeat)
            else item
            for item in folded
        )
