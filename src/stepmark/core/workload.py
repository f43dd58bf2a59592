"""What one training step computes and communicates, op by op, as a program per stage.

A program is a block of items; an item is an operation or a Run of another block, so many times.
A step of 2048 micro-batches is therefore as small as one of 2. `expand` walks it in issue
order; `tally` counts without walking.

Layer and micro-batch of an operation are relative: each Run adds its own, and what it has
stepped, to those inside. Streams are in order by themselves; across streams an operation says
after which others it starts, by name: "gather" is the newest issue of the operation of that
name, "gather~1" the one before it, as git counts. A collective on the stream "compute" is one
that the computation waits for.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stepmark.core.collectives import Collective, RedOp, busbw_factor, num_parts
from stepmark.core.dtypes import MESSAGE_DTYPES, DType
from stepmark.core.errors import ConfigError
from stepmark.core.message import RECV, SEND
from stepmark.core.model import ModelConfig
from stepmark.core.ops import Op, Phase

COMPUTE = "compute"  # the stream of computation
# Streams of what PyTorch sends beside it. FSDP2 gathers and scatters over one process group,
# whose communicator does one collective at a time whatever CUDA streams they are on (torch
# 2.13, _fully_shard.py: set_separate_reduce_scatter_group, after which they are apart). The sum
# over the replicas of HSDP is of another group.
FSDP, FSDP_REDUCE, FSDP_REPLICATE, DDP = "fsdp", "fsdp_reduce", "fsdp_replicate", "dp"
COMMUNICATIONS = (*(str(one) for one in Collective), SEND, RECV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Computation that is none of the operators: its name elsewhere and what it costs.

    None: not known.
    """

    name: str
    flops: int | None = None
    bytes_moved: int | None = None

    @property
    def is_wait(self) -> bool:
        """Whether it only stands for waiting: it computes and moves nothing."""
        return self.flops == 0 and self.bytes_moved == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Which ranks communicate: those that differ in these digits of their number.

    A digit of size n and stride s of a rank r is r // s % n. Of the group of r the members are
    all ranks with r's other digits; the first digit varies fastest.
    """

    digits: tuple[tuple[int, int], ...]  # (size, stride)

    def __post_init__(self) -> None:
        if any(size < 1 or stride < 1 for size, stride in self.digits):
            raise ConfigError("group", self.digits, "sizes and strides of 1 or more")

    @property
    def size(self) -> int:
        return math.prod(size for size, _ in self.digits)

    def members(self, rank: int) -> tuple[int, ...]:
        """World ranks of the group that rank is in, in the order of their group ranks."""
        base = rank - sum(rank // stride % size * stride for size, stride in self.digits)
        found = [base]
        for size, stride in self.digits:
            found = [one + index * stride for index in range(size) for one in found]
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOp:
    """Computation on one rank, after sharding."""

    op: Op | Kernel
    phase: Phase
    module: str  # e.g. "attention.qkv", "mlp.down", "head"
    layer: int | None = None
    microbatch: int | None = None
    stream: str = COMPUTE
    name: str = ""  # for those that wait for it
    after: tuple[str, ...] = ()  # operations of other streams it starts after
    recompute: bool = False  # a forward operation that the backward pass runs again
    time_s: float | None = None  # filled from a run, a file or a model; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOp:
    """One rank's part in a collective, or one side of a transfer between two stages.

    count: as nccl-tests': elements per rank where the buffer is split among ranks, else of the
    buffer. Of an all_to_all_v it is the average part, which is what balanced routing sends.
    """

    collective: str  # of Collective, or send, recv
    dtype: DType
    count: int
    group: str  # of Workload.groups
    phase: Phase
    module: str
    layer: int | None = None
    microbatch: int | None = None
    stream: str = COMPUTE
    name: str = ""
    after: tuple[str, ...] = ()
    redop: RedOp = RedOp.NONE
    root: int | None = None  # group rank
    peer: int | None = None  # of send and recv: by how many group ranks ahead, modulo the size
    fused: bool = False  # issued in one group call with the operation before it
    recompute: bool = False
    time_s: float | None = None

    def __post_init__(self) -> None:
        if self.collective not in COMMUNICATIONS:
            raise ConfigError(
                "collective", self.collective, f"one of {', '.join(COMMUNICATIONS)}"
            )
        if self.dtype not in MESSAGE_DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(MESSAGE_DTYPES)}")
        if not 0 <= self.count < 2**63:
            raise ConfigError("count", self.count, "from 0 to 2**63 - 1 elements")
        if (self.collective in (SEND, RECV)) is (self.peer is None):
            raise ConfigError("peer", self.peer, "given for send and recv, and only there")

    def message_bytes(self, group: Group) -> int:
        """The largest buffer of any rank, as nccl-tests counts."""
        parts = 1
        if self.collective not in (SEND, RECV):
            parts = num_parts(Collective(self.collective), group.size)
        return parts * self.count * self.dtype.itemsize

    def call_bytes(self) -> int:
        """What the call's count says on one rank."""
        return self.count * self.dtype.itemsize

    def bus_bytes(self, group: Group) -> float:
        """What crosses a rank's link: message_bytes times the factor of busbw."""
        if self.collective in (SEND, RECV):
            return float(self.message_bytes(group))
        return self.message_bytes(group) * busbw_factor(Collective(self.collective), group.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A block, so many times, one after the other."""

    block: str
    times: int = 1
    layer: int = 0  # added to the layers inside
    layer_step: int = 0  # and this per time before
    microbatch: int = 0
    microbatch_step: int = 0

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ConfigError("times", self.times, "1 or more")


Operation = ComputeOp | CommOp
Item = Operation | Run
Block = tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the ranks of one pipeline stage do; all of them the same."""

    step: str  # block of one optimizer step
    setup: str = ""  # block of what runs once, before the first step
    layers: tuple[int, ...] = ()  # of the model, in the order they run
    has_embedding: bool = False
    has_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step of all ranks: programs by stage, and what they are of.

    settings: what was asked for, in the rules' own names. origin: what a foreign file said that
    only its own format can say again, by format.
    """

    name: str
    rules: str  # e.g. "megatron", or "capture", or a format's name
    source: str = ""  # whose behaviour the rules follow, with version
    world_size: int = 1
    num_microbatches: int = 1
    model: ModelConfig | None = None
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()  # what the reader should know, e.g. a split that was chosen
    origin: Mapping[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError where parts contradict each other (workload_check)."""
        from stepmark.core.workload_check import check  # noqa: PLC0415 - it has these types

        check(self)

    def stage_of(self, rank: int) -> int:
        """Pipeline stages are the slowest digit of a rank's number."""
        return rank * len(self.stages) // self.world_size

    def expand(self, stage: int = 0, *, setup: bool = False) -> Iterator[Operation]:
        """What a rank of this stage does, in issue order, with layers and micro-batches."""
        chosen = self.stages[stage]
        block = chosen.setup if setup else chosen.step
        if block:
            yield from self._expand(block, 0, 0)

    def _expand(self, block: str, layer: int, microbatch: int) -> Iterator[Operation]:
        for item in self.blocks[block]:
            if isinstance(item, Run):
                for index in range(item.times):
                    yield from self._expand(
                        item.block,
                        layer + item.layer + index * item.layer_step,
                        microbatch + item.microbatch + index * item.microbatch_step,
                    )
            elif (layer and item.layer is not None) or (
                microbatch and item.microbatch is not None
            ):
                yield replace(
                    item,
                    layer=None if item.layer is None else item.layer + layer,
                    microbatch=None
                    if item.microbatch is None
                    else item.microbatch + microbatch,
                )
            else:
                yield item

    def tally(self, stage: int = 0, *, setup: bool = False) -> Counter[Operation]:
        """How often each operation runs, relative layers and micro-batches as they stand."""
        chosen = self.stages[stage]
        block = chosen.setup if setup else chosen.step
        return Counter(self._tally(block, {})) if block else Counter()

    def _tally(self, block: str, known: dict[str, Counter[Operation]]) -> Counter[Operation]:
        if block not in known:
            found: Counter[Operation] = Counter()
            for item in self.blocks[block]:
                if isinstance(item, Run):
                    for operation, count in self._tally(item.block, known).items():
                        found[operation] += count * item.times
                else:
                    found[item] += 1
            known[block] = found
        return known[block]

    def num_operations(self, stage: int = 0) -> int:
        """Of one step, without walking it."""
        return sum(self.tally(stage).values())
