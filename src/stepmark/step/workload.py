"""Workload: the operations and messages of one training step, as one program per stage.

A program is a block of items; an item is an operation or a Run, which repeats another block.
A step of 2048 micro-batches is therefore as small as one of 2. `expand` yields operations in
issue order; `tally` counts them without expanding.

Layer and micro-batch of an operation are relative: each Run adds its offset and its steps to
those inside. Operations of one stream run in order. Across streams, an operation names those
after which it starts: "gather" is the most recent operation of that name, "gather~1" the one
before it, as in git. Computation waits for a collective on the stream "compute".
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.model.collectives import Collective, RedOp, busbw_factor, num_parts
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Op, Phase

COMPUTE = "compute"  # the stream of computation
# Streams of PyTorch's overlapped communication. FSDP2 gathers and scatters over one process
# group, whose communicator runs one collective at a time on any CUDA stream (torch 2.13,
# _fully_shard.py: set_separate_reduce_scatter_group separates them). HSDP's sum over replicas
# uses another group.
FSDP = "fsdp"
FSDP_REDUCE = "fsdp_reduce"
FSDP_REPLICATE = "fsdp_replicate"
DDP = "dp"
COMMUNICATIONS = (*map(str, Collective), SEND, RECV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Computation that is not one of the operators, with its cost. None: unknown."""

    name: str
    flops: int | None = None
    bytes_moved: int | None = None

    @property
    def executed_flops(self) -> int | None:
        return self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate, given by mesh dimensions (size, stride).

    The coordinate of rank r in a dimension is r // stride % size. The group of r has all ranks
    that differ from r only in these coordinates; the first dimension varies fastest.
    """

    digits: tuple[tuple[int, int], ...]  # (size, stride)

    def __post_init__(self) -> None:
        if any(size < 1 or stride < 1 for size, stride in self.digits):
            raise ConfigError("group", self.digits, "sizes and strides of 1 or more")

    @property
    def size(self) -> int:
        return math.prod(size for size, _ in self.digits)

    @property
    def reach(self) -> int:
        """Return the last world rank of a group minus its first."""
        return sum((size - 1) * stride for size, stride in self.digits)

    def first(self, rank: int) -> int:
        """Return the first world rank of the group of a rank."""
        return rank - sum(rank // stride % size * stride for size, stride in self.digits)

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the world ranks of the group of a rank, in the order of their group ranks."""
        ranks = [self.first(rank)]
        for size, stride in self.digits:
            ranks = [first + index * stride for index in range(size) for first in ranks]
        return tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOp:
    """Computation on one rank, after sharding."""

    op: Op | Kernel
    phase: Phase
    module: str  # e.g. "attention.qkv", "mlp.down", "head"
    layer: int | None = None
    microbatch: int | None = None
    stream: str = COMPUTE
    name: str = ""  # `after` of other operations refers to it
    after: tuple[str, ...] = ()  # operations of other streams after which it starts
    recompute: bool = False  # a forward operation that the backward pass recomputes
    time_s: float | None = None  # from a run, a file or a model; None: unknown
    start_s: float | None = None  # in the trace, since the step began; None: unknown

    @property
    def is_wait(self) -> bool:
        """Return whether the operation only waits: it computes and moves nothing."""
        return isinstance(self.op, Kernel) and self.op.flops == 0 == self.op.bytes_moved


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOp:
    """One rank's part of a collective, or one side of a transfer between two stages.

    count is that of nccl-tests: elements per rank if the buffer is split among ranks, else of
    the buffer. For an all_to_all_v it is the average part, as in balanced routing, or that of
    the fullest rank.
    """

    collective: str  # a Collective, or send, recv
    dtype: DType
    count: int
    group: str  # name in Workload.groups
    phase: Phase
    module: str
    layer: int | None = None
    microbatch: int | None = None
    stream: str = COMPUTE
    name: str = ""
    after: tuple[str, ...] = ()
    redop: RedOp = RedOp.NONE
    root: int | None = None  # group rank
    peer: int | None = None  # send and recv: distance in group ranks, modulo the size
    fused: bool = False  # issued in one group call with the previous operation
    recompute: bool = False
    time_s: float | None = None
    start_s: float | None = None

    def __post_init__(self) -> None:
        if self.collective not in COMMUNICATIONS:
            raise not_one_of("collective", self.collective, COMMUNICATIONS)
        if self.dtype not in MESSAGE_DTYPES:
            raise not_one_of("dtype", self.dtype, MESSAGE_DTYPES)
        if not 0 <= self.count < 2**63:
            raise ConfigError("count", self.count, "from 0 to 2**63 - 1 elements")
        if (self.collective in (SEND, RECV)) is (self.peer is None):
            raise ConfigError("peer", self.peer, "given for send and recv, and only there")

    def message_bytes(self, group: Group) -> int:
        """Return the largest buffer of any rank, as in nccl-tests."""
        parts = 1
        if self.collective not in (SEND, RECV):
            parts = num_parts(Collective(self.collective), group.size)
        return parts * self.count * self.dtype.itemsize

    def call_bytes(self) -> int:
        """Return the bytes of the call's count on one rank."""
        return self.count * self.dtype.itemsize

    def bus_bytes(self, group: Group) -> float:
        """Return the bytes over a rank's link: message_bytes times the factor of busbw."""
        if self.collective in (SEND, RECV):
            return float(self.message_bytes(group))
        return self.message_bytes(group) * busbw_factor(Collective(self.collective), group.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Repetition of a block."""

    block: str
    times: int = 1
    layer: int = 0  # added to the layers inside
    layer_step: int = 0  # added once more per repetition
    microbatch: int = 0
    microbatch_step: int = 0

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ConfigError("times", self.times, "1 or more")

    def places(self, layer: int, microbatch: int) -> Iterator[tuple[int, int]]:
        """Yield layer and micro-batch of each repetition of a run inside this place."""
        for index in range(self.times):
            yield (
                layer + self.layer + index * self.layer_step,
                microbatch + self.microbatch + index * self.microbatch_step,
            )


Operation = ComputeOp | CommOp
Item = Operation | Run
Block = tuple[Item, ...]


def shifted(op: Operation, layer: int, microbatch: int) -> Operation:
    """Return the operation with these added to its layer and micro-batch, where it has them."""
    new_layer = None if op.layer is None else op.layer + layer
    new_microbatch = None if op.microbatch is None else op.microbatch + microbatch
    if (new_layer, new_microbatch) == (op.layer, op.microbatch):
        return op
    return replace(op, layer=new_layer, microbatch=new_microbatch)


_PASS = {
    Phase.FWD: "forward",
    Phase.DGRAD: "backward",
    Phase.WGRAD: "backward",
    Phase.BWD: "backward",
    Phase.OPTIM: "optimizer",
    Phase.STEP: "step",
}


def pass_of(op: Operation) -> str:
    """Return forward, backward (with recomputed forwards), optimizer or step."""
    return "backward" if op.recompute else _PASS[op.phase]


def parse_after(text: str) -> tuple[str, int]:
    """Return the name in an entry of `after` and how many occurrences to go back.

    "gather" is ("gather", 0), "gather~1" is ("gather", 1).
    """
    name, mark, back = text.rpartition("~")
    return (name, int(back)) if mark and back.isdecimal() else (text, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Program of one pipeline stage, which all its ranks run."""

    step: str  # block of one optimizer step
    setup: str = ""  # block that runs once, before the first step
    layers: tuple[int, ...] = ()  # layers of the model, in the order in which they run
    has_embedding: bool = False
    has_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step of all ranks: a program per stage, with model, groups and settings.

    settings use the rules' own names. origin: by format, content of another tool's file that
    only that format can express.
    """

    name: str
    rules: str  # e.g. "megatron", or "capture", or a format's name
    source: str = ""  # software that the rules follow, with version
    world_size: int = 1
    num_microbatches: int = 1
    model: ModelConfig | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()  # remarks, e.g. a split that was chosen
    origin: Mapping[str, object] = field(default_factory=dict)

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the notes, and what the step lacks of the published model; each once."""
        unmodelled = self.model.unmodelled if self.model else ()
        return tuple(dict.fromkeys((*self.notes, *unmodelled)))

    @property
    def micro_batch(self) -> int | None:
        """Return the sequences of a micro-batch; None where the file does not tell."""
        return self._whole("mbs", "micro_batch_size")

    @property
    def tokens(self) -> int | None:
        """Return the tokens of the step; None where the file does not tell its batch."""
        sequences = self.num_sequences
        if sequences is None or self.model is None:
            return None
        return sequences * self.model.seq_len

    @property
    def num_sequences(self) -> int | None:
        """Return the sequences of the step; None where the file does not tell."""
        return self._whole("gbs", "global_batch_size")

    def _whole(self, *names: str) -> int | None:
        """Return the setting of the first of these names, if it is a whole number above 0."""
        values = (self.settings[name] for name in names if name in self.settings)
        value = next(values, None)
        return value if isinstance(value, int) and value > 0 else None

    def check(self) -> None:
        """Raise ConfigError if parts contradict each other (workload_check)."""
        from stepmark.step.workload_check import check  # noqa: PLC0415 - it has these types

        check(self)

    def numbers(self, unit: Literal["layer", "microbatch"]) -> bool:
        """Return whether operations have this number; those of other tools mostly do not."""
        return any(
            not isinstance(item, Run) and getattr(item, unit) is not None
            for block in self.blocks.values()
            for item in block
        )

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank, the slowest-varying mesh dimension."""
        return rank * len(self.stages) // self.world_size

    def expand(self, stage: int = 0, *, setup: bool = False) -> Iterator[Operation]:
        """Yield a rank's operations in issue order, with absolute layers and micro-batches."""
        if block := self._program(stage, setup):
            yield from self._expand(block, 0, 0)

    def _program(self, stage: int, setup: bool) -> str:
        return self.stages[stage].setup if setup else self.stages[stage].step

    def _expand(self, block: str, layer: int, microbatch: int) -> Iterator[Operation]:
        for item in self.blocks[block]:
            if isinstance(item, Run):
                for place in item.places(layer, microbatch):
                    yield from self._expand(item.block, *place)
            else:
                yield shifted(item, layer, microbatch)

    def tally(self, stage: int = 0, *, setup: bool = False) -> Counter[Operation]:
        """Count the runs of each operation, with relative layers and micro-batches."""
        block = self._program(stage, setup)
        return _counted(self._tally(block, {}).values() if block else ())

    def _tally(self, block: str, tallies: "_Tallies") -> "_Tally":
        """Count by identity, since operations take long to compare."""
        if block not in tallies:
            counts = tallies[block] = {}
            for item in self.blocks[block]:
                if isinstance(item, Run):
                    _add(counts, self._tally(item.block, tallies).values(), item.times)
                else:
                    _add(counts, ((item, 1),), 1)
        return tallies[block]

    def issued(self) -> Counter[Operation]:
        """Count the runs of each operation over all stages; mere waits do not count."""
        tallies: _Tallies = {}
        counts: _Tally = {}
        for stage in self.stages:
            _add(counts, self._tally(stage.step, tallies).values(), 1)
        return _counted(
            (op, count)
            for op, count in counts.values()
            if isinstance(op, CommOp) or not op.is_wait
        )

    def num_operations(self, stage: int = 0) -> int:
        """Return the number of operations of one step, without expanding it."""
        return sum(self.tally(stage).values())


_Tally = dict[int, tuple[Operation, int]]  # by identity
_Tallies = dict[str, _Tally]  # by block


def _add(counts: _Tally, inside: Iterable[tuple[Operation, int]], times: int) -> None:
    for op, count in inside:
        _, before = counts.get(id(op), (op, 0))
        counts[id(op)] = op, before + times * count


def _counted(counts: Iterable[tuple[Operation, int]]) -> Counter[Operation]:
    total = Counter[Operation]()
    for op, count in counts:
        total[op] += count
    return total
