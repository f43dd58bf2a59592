"""What a pipeline stage does, tick by tick, and how its ticks become the Runs of a program.

A tick is at most one forward, one backward, and transfers around them. Ticks that repeat are
Spans, so a step costs the same memory whatever the number of micro-batches. The orders of
ticks are in pipeline_schedules.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from stepmark.core.errors import ConfigError
from stepmark.core.ops import Phase
from stepmark.core.workload import Block, ComputeOp, Item, Kernel, Run

T = TypeVar("T", bound=Item)
PASSED = "passed"  # name of the newest computation that ends a block or a pass, or of a wait


def wait(after: Iterable[str], phase: Phase, module: str = "gradients") -> ComputeOp:
    """The computation goes on when these are done; it takes no time itself."""
    return ComputeOp(
        op=Kernel(name="wait", flops=0, bytes_moved=0),
        phase=phase,
        module=module,
        name=PASSED,
        after=tuple(after),
        time_s=0.0,
    )


def in_layer(item: T, layers: int) -> T:
    """An item so many layers further on; one of no layer stays."""
    return item if item.layer is None else replace(item, layer=item.layer + layers)


class Act(StrEnum):
    """What a stage does for a model chunk and a micro-batch. Transfers: of its tensor."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    WAIT = "wait"  # for the transfers named in `after`
    GATHER = "gather"  # of a chunk's parameters
    REDUCE = "reduce"  # of a chunk's gradients
    RELEASE = "release"  # of a chunk's gathered parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """edge: a chunk's first forward or last backward of the step."""

    act: Act
    chunk: int = 0
    microbatch: int = 0
    edge: bool = False
    fused: bool = False  # in one call with the transfer before it
    after: tuple[str, ...] = ()


Tick = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ticks, so many times, the micro-batches of each time `step` further."""

    ticks: tuple[Tick, ...]
    times: int = 1
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How long, how many micro-batches, and how many model chunks each stage has.

    overlap: transfers of interleaved stages run beside the computation (Megatron's
    overlap_p2p_comm); else one batched call waits for all. Raises ConfigError.
    """

    num_stages: int = 1
    num_microbatches: int = 1
    num_chunks: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.num_chunks == 1:
            return
        if self.num_stages == 1:
            raise ConfigError("vpp", self.num_chunks, "1 where there is one pipeline stage")
        if self.num_stages == 2 and not self.overlap:
            raise ConfigError("pp", 2, "more than 2 where vpp goes without overlap_p2p_comm")
        if self.num_microbatches % self.num_stages:
            below = self.num_microbatches // self.num_stages * self.num_stages
            near = " or ".join(str(n) for n in (below, below + self.num_stages) if n)
            raise ConfigError(
                "micro-batches",
                self.num_microbatches,
                f"a multiple of pp ({self.num_stages}) where vpp > 1, e.g. {near}",
            )

    def num_warmup(self, stage: int) -> int:
        """Forward passes of a stage before its first backward."""
        warmup = self.num_stages - stage - 1
        if self.num_chunks > 1:
            warmup = 2 * warmup + (self.num_chunks - 1) * self.num_stages
        return min(warmup, self.num_microbatches * self.num_chunks)


TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD)
# No micro-batch of their own.
_OF_NONE = (Act.WAIT, Act.GATHER, Act.REDUCE, Act.RELEASE)
Lower = Callable[[Action], tuple[Item, ...]]


def program(
    spans: tuple[Span, ...], lower: Lower, blocks: dict[str, Block], prefix: str
) -> Block:
    """Spans as Runs of blocks that are put into `blocks`, under names that begin with prefix.

    lower: what an action is as items; its micro-batch is relative to its tick's first one.
    """
    names: dict[Tick, str] = {}
    found: list[Item] = []
    waiting: list[tuple[str, int, int]] = []  # block, first micro-batch, times

    def name_of(tick: Tick, base: int) -> str:
        relative = tuple(
            replace(one, microbatch=one.microbatch - base) if one.act not in _OF_NONE else one
            for one in tick
        )
        if relative not in names:
            names[relative] = f"{prefix}tick{len(names)}"
            blocks[names[relative]] = tuple(item for one in relative for item in lower(one))
        return names[relative]

    def add(tick: Tick, times: int) -> None:
        base = next((one.microbatch for one in tick if one.act not in _OF_NONE), 0)
        name = name_of(tick, base)
        if waiting and waiting[-1][0] == name and sum(waiting[-1][1:]) == base:
            waiting[-1] = (name, waiting[-1][1], waiting[-1][2] + times)
        else:
            waiting.append((name, base, times))

    def flush() -> tuple[Item, ...]:
        runs = tuple(
            Run(block=name, times=times, microbatch=base, microbatch_step=int(times > 1))
            for name, base, times in waiting
        )
        waiting.clear()
        return runs

    for span in spans:
        if len(span.ticks) == 1:
            add(span.ticks[0], span.times)
            continue
        found += flush()
        for tick in span.ticks:
            add(tick, 1)
        name = f"{prefix}period"
        blocks[name] = flush()
        found.append(Run(block=name, times=span.times, microbatch_step=span.step))
    found += flush()
    return tuple(found)
