"""Actions of a pipeline stage, tick by tick, and how they become the Runs of a program.

A tick is at most one forward, one backward, and transfers around them. Ticks that repeat are
Spans, so a step costs the same memory whatever the number of micro-batches. The orders of
ticks are in pipeline_schedules.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from stepmark.model.ops import Phase
from stepmark.step.workload import Block, ComputeOp, Item, Kernel, Run
from stepmark.workloads.job import near_multiples, refuse_first

T = TypeVar("T", bound=Item)
# Name of the newest computation that ends a block or a pass, or of a wait.
COMPUTE_DONE = "passed"


def wait(after: Iterable[str], phase: Phase, module: str = "gradients") -> ComputeOp:
    """Return an operation that takes no time and only waits for others."""
    return ComputeOp(
        op=Kernel(name="wait", flops=0, bytes_moved=0),
        phase=phase,
        module=module,
        name=COMPUTE_DONE,
        after=tuple(after),
        time_s=0.0,
    )


def in_layer(item: T, layers: int) -> T:
    """Return an item moved on by so many layers; an item of no layer stays."""
    return item if item.layer is None else replace(item, layer=item.layer + layers)


class Act(StrEnum):
    """An action of a stage for a model chunk and a micro-batch. Transfers: of its tensor."""

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
    """Ticks that repeat; each time the micro-batches are `step` further on."""

    ticks: tuple[Tick, ...]
    times: int = 1
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline's stages, micro-batches and model chunks per stage.

    overlap: transfers of interleaved stages overlap with computation (Megatron's
    overlap_p2p_comm); else one batched call waits for all. Raises ConfigError.
    """

    num_stages: int = 1
    num_microbatches: int = 1
    num_chunks: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.num_chunks == 1:
            return
        pp, count = self.num_stages, self.num_microbatches
        near = near_multiples(count, pp)
        refuse_first(
            (pp == 1, "vpp", self.num_chunks, "1 where there is one pipeline stage"),
            (
                pp == 2 and not self.overlap,
                "pp",
                2,
                "more than 2 for vpp without overlap_p2p_comm",
            ),
            (
                count % pp,
                "micro-batches",
                count,
                f"a multiple of pp ({pp}) where vpp > 1, e.g. {near}",
            ),
        )

    def num_warmup(self, stage: int) -> int:
        """Forward passes of a stage before its first backward."""
        warmup = self.num_stages - stage - 1
        if self.num_chunks > 1:
            warmup = 2 * warmup + (self.num_chunks - 1) * self.num_stages
        return min(warmup, self.num_microbatches * self.num_chunks)


TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD)
SENDS = (Act.SEND_FORWARD, Act.SEND_BACKWARD)
FORWARD_TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD)
WITH_NEXT_STAGE = (Act.SEND_FORWARD, Act.RECV_BACKWARD)
WITH_MICROBATCH = (Act.FORWARD, Act.BACKWARD, *TRANSFERS)
Lower = Callable[[Action], tuple[Item, ...]]


def program(
    spans: tuple[Span, ...], lower: Lower, blocks: dict[str, Block], prefix: str
) -> Block:
    """Return spans as Runs of blocks, which are added to `blocks` under names with this prefix.

    lower: returns an action's items; its micro-batch is relative to its tick's first one.
    """
    names: dict[Tick, str] = {}
    items: list[Item] = []
    waiting: list[tuple[str, int, int]] = []  # block, first micro-batch, times

    def name_of(tick: Tick, base: int) -> str:
        relative = tuple(
            replace(action, microbatch=action.microbatch - base)
            if action.act in WITH_MICROBATCH
            else action
            for action in tick
        )
        if relative not in names:
            names[relative] = f"{prefix}tick{len(names)}"
            blocks[names[relative]] = tuple(
                item for action in relative for item in lower(action)
            )
        return names[relative]

    def add(tick: Tick, times: int) -> None:
        base = next((action.microbatch for action in tick if action.act in WITH_MICROBATCH), 0)
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
        items += flush()
        for tick in span.ticks:
            add(tick, 1)
        name = f"{prefix}period"
        blocks[name] = flush()
        items.append(Run(block=name, times=span.times, microbatch_step=span.step))
    items += flush()
    return tuple(items)
