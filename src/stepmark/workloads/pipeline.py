"""Actions of a pipeline stage, tick by tick, and how they become the Runs of a program.

A tick is at most one forward, one backward, and transfers around them. Ticks that repeat are
Spans, so a step costs the same memory whatever the number of micro-batches.

1F1B and interleaved 1F1B are as Megatron-LM runs them (megatron-core 0.16.1,
megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_without_interleaving,
forward_backward_pipelining_with_interleaving, get_pp_rank_microbatches, get_schedule_table;
p2p_communication.py: _batched_p2p_ops, _p2p_ops). The wait for an overlapped send after the
next one was issued is left out: the send is long done by then.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    BACKWARD_INPUT = "backward_input"  # gradients of what a chunk receives, not of its weights
    BACKWARD_WEIGHT = "backward_weight"  # the rest of a backward pass
    COMBINED = "combined"  # a forward pass and a backward pass, layer by layer in turns
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
    """edge: a chunk's first forward or last backward of the step. variant: of a pass, by the
    rules' own numbers.

    backward_chunk, backward_microbatch: of a combined action, whose others are the forward's.
    """

    act: Act
    chunk: int = 0
    microbatch: int = 0
    edge: bool = False
    variant: int = 0
    fused: bool = False  # in one call with the transfer before it
    after: tuple[str, ...] = ()
    backward_chunk: int = 0
    backward_microbatch: int = 0


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
    overlap_p2p_comm); else one batched call waits for all. combines: passes of the steady state
    run in turns, for which each stage is one forward pass further ahead (Megatron's
    overlap_moe_expert_parallel_comm). group_size: micro-batches that a chunk runs in a row;
    None: as many as stages. Raises ConfigError.
    """

    num_stages: int = 1
    num_microbatches: int = 1
    num_chunks: int = 1
    overlap: bool = True
    combines: bool = False
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_chunks == 1:
            return
        pp = self.num_stages
        count = self.num_microbatches
        near = near_multiples(count, pp)
        group = self.group_size or 0
        name = "microbatch_group_size_per_vp_stage"
        refuse_first(
            (pp == 1, "vpp", self.num_chunks, "1 where there is one pipeline stage"),
            (
                pp == 2 and not self.overlap,
                "pp",
                2,
                "more than 2 for vpp without overlap_p2p_comm",
            ),
            (
                group and not pp <= group <= count,
                name,
                group,
                f"from pp ({pp}) to the number of micro-batches ({count})",
            ),
            (
                group and 0 < count % group < pp,
                "micro-batches",
                count,
                f"a multiple of {name} ({group}), or pp ({pp}) or more above one",
            ),
            (
                not group and count % pp,
                "micro-batches",
                count,
                f"a multiple of pp ({pp}) where vpp > 1, e.g. {near}",
            ),
        )

    @property
    def group(self) -> int:
        """Micro-batches that a chunk of an interleaved stage runs in a row."""
        return self.group_size or self.num_stages

    def num_warmup(self, stage: int) -> int:
        """Forward passes of a stage before its first backward."""
        warmup = self.num_stages - stage - 1
        if self.num_chunks > 1:
            warmup = 2 * warmup + (self.num_chunks - 1) * self.group
        warmup += self.combines
        return min(warmup, self.num_microbatches * self.num_chunks)


TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD)
SENDS = (Act.SEND_FORWARD, Act.SEND_BACKWARD)
FORWARD_TRANSFERS = (Act.SEND_FORWARD, Act.RECV_FORWARD)
WITH_NEXT_STAGE = (Act.SEND_FORWARD, Act.RECV_BACKWARD)
PASSES = (Act.FORWARD, Act.BACKWARD, Act.BACKWARD_INPUT, Act.BACKWARD_WEIGHT)
WITH_MICROBATCH = (*PASSES, Act.COMBINED, *TRANSFERS)


def moved(action: Action, microbatches: int) -> Action:
    """Return an action of micro-batches so many further on."""
    if action.act not in WITH_MICROBATCH:
        return action
    action = replace(action, microbatch=action.microbatch + microbatches)
    if action.act is not Act.COMBINED:
        return action
    return replace(action, backward_microbatch=action.backward_microbatch + microbatches)


def combined(forward: Action, backward: Action) -> Action:
    return replace(
        forward,
        act=Act.COMBINED,
        backward_chunk=backward.chunk,
        backward_microbatch=backward.microbatch,
    )


Lower = Callable[[Action], tuple[Item, ...]]


def program(
    spans: tuple[Span, ...], lower: Lower, blocks: dict[str, Block], prefix: str
) -> Block:
    """Return spans as Runs of blocks, which are added to `blocks` under names with this prefix.

    lower: returns an action's items; its micro-batch is relative to its tick's first one.
    """
    names: dict[Tick, str] = {}
    num_periods = 0
    items: list[Item] = []
    waiting: list[tuple[str, int, int]] = []  # block, first micro-batch, times

    def name_of(tick: Tick, base: int) -> str:
        relative = tuple(moved(action, -base) for action in tick)
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
        name = f"{prefix}period{num_periods or ''}"
        num_periods += 1
        blocks[name] = flush()
        items.append(Run(block=name, times=span.times, microbatch_step=span.step))
    items += flush()
    return tuple(items)


Pass = tuple[int, int, bool]  # chunk, micro-batch, whether it is a forward one


def passes_of(spans: Iterable[Span]) -> Iterator[Pass]:
    """Yield all passes in order."""
    for span in spans:
        actions = [action for tick in span.ticks for action in tick if action.act in PASSES]
        for index in range(span.times):
            for action in actions:
                yield _pass(action, index * span.step)


def _pass(action: Action, microbatches: int) -> Pass:
    return action.chunk, action.microbatch + microbatches, action.act is Act.FORWARD


def with_variants(spans: Iterable[Span], number_of: Callable[[Pass], int]) -> Iterator[Span]:
    """Yield spans whose passes have these variants; repeats with others are spans apart."""
    for span in spans:
        actions = [action for tick in span.ticks for action in tick if action.act in PASSES]
        numbers = [
            tuple(number_of(_pass(action, index * span.step)) for action in actions)
            for index in range(span.times)
        ]
        for variants, repeats in itertools.groupby(range(span.times), numbers.__getitem__):
            first, *others = repeats
            ticks = tuple(
                tuple(moved(action, first * span.step) for action in tick)
                for tick in span.ticks
            )
            left = iter(variants)
            ticks = tuple(
                tuple(
                    replace(action, variant=next(left)) if action.act in PASSES else action
                    for action in tick
                )
                for tick in ticks
            )
            yield replace(span, ticks=ticks, times=1 + len(others))


def schedule(
    pipeline: Pipeline, stage: int, *, gathers: bool = False, reduces: bool = False
) -> tuple[Span, ...]:
    """Return a stage's ticks in order.

    gathers, reduces: the schedule itself gathers the chunks' parameters and reduces their
    gradients (param_sync_func, grad_sync_func). Plain 1F1B never gathers: its schedule does not
    call param_sync_func.
    """
    if pipeline.num_chunks > 1:
        return _Interleaved(pipeline, stage, gathers, reduces).spans()
    return tuple(_plain(pipeline, stage, reduces))


def passes(pipeline: Pipeline, stage: int) -> Iterator[tuple[int, bool]]:
    """Yield the chunk of each pass of a stage in order, and whether it is a forward one.

    Of a steady state there are only as many as decide how much memory is needed.
    """
    if pipeline.num_chunks == 1:
        warmup = pipeline.num_warmup(stage)
        yield from [(0, True)] * warmup
        if warmup < pipeline.num_microbatches:
            yield from ((0, True), (0, False))
        yield from [(0, False)] * warmup
        return
    yield from _Interleaved(pipeline, stage, gathers=False, reduces=False).passes()


def _plain(pipeline: Pipeline, stage: int, reduces: bool) -> Iterator[Span]:
    """Yield 1F1B; with one stage it alternates between forward and backward."""
    first = stage == 0
    last = stage == pipeline.num_stages - 1
    total = pipeline.num_microbatches
    warmup = pipeline.num_warmup(stage)
    remaining = total - warmup

    def prev(sent: int | None, received: int | None) -> Tick:
        places = {"send_backward": _only(sent), "recv_forward": _only(received)}
        return () if first else _transfers(places)

    def next_(sent: int | None, received: int | None) -> Tick:
        places = {"send_forward": _only(sent), "recv_backward": _only(received)}
        return () if last else _transfers(places)

    def steady(index: int) -> Tick:
        newest = warmup + index
        following = newest + 1 if index + 1 < remaining else None
        forward = Action(act=Act.FORWARD, microbatch=newest, edge=newest == 0)
        backward = Action(act=Act.BACKWARD, microbatch=index, edge=index == total - 1)
        if pipeline.combines:  # there is one stage
            return (combined(forward, backward),)
        return (forward, *next_(newest, index), backward, *prev(index, following))

    for index in range(warmup):
        forward = Action(act=Act.FORWARD, microbatch=index, edge=index == 0)
        yield Span(ticks=((*prev(None, index), forward, *next_(index, None)),))
    if remaining and not first:
        yield Span(ticks=(prev(None, warmup),))
    if remaining:
        yield Span(ticks=(steady(0),))
    if remaining > 2:
        yield Span(ticks=(steady(1),), times=remaining - 2)
    if remaining > 1:
        yield Span(ticks=(steady(remaining - 1),))
    for index in range(remaining, total):
        backward = Action(act=Act.BACKWARD, microbatch=index, edge=index == total - 1)
        yield Span(ticks=((*next_(None, index), backward, *prev(index, None)),))
    if reduces:
        yield Span(ticks=((Action(act=Act.REDUCE),),))


# Batched calls have the previous stage first, as in _batched_p2p_ops. Single calls depend on
# the stage's parity, so that of two neighbours one sends while the other receives (_p2p_ops).
_BATCHED = (Act.SEND_BACKWARD, Act.RECV_FORWARD, Act.SEND_FORWARD, Act.RECV_BACKWARD)
_SINGLE = (
    (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD),
    (Act.RECV_FORWARD, Act.SEND_FORWARD, Act.RECV_BACKWARD, Act.SEND_BACKWARD),
)


def _transfers(
    places: Mapping[str, tuple[int, int] | None], *, batched: bool = True, parity: int = 0
) -> Tick:
    """Return transfers of (chunk, micro-batch) by the names of their acts; None: no transfer.

    batched: in one call; else in the order of a stage whose number is even, or odd.
    """
    order = _BATCHED if batched else _SINGLE[parity]
    transfers = [(act, where) for act in order if (where := places.get(act)) is not None]
    return tuple(
        Action(act=act, chunk=chunk, microbatch=microbatch, fused=batched and index > 0)
        for index, (act, (chunk, microbatch)) in enumerate(transfers)
    )


def _only(microbatch: int | None) -> tuple[int, int] | None:
    """Return the place of a micro-batch in a stage's only chunk."""
    return None if microbatch is None else (0, microbatch)


@dataclass(frozen=True, slots=True)
class _Interleaved:
    """Interleaved 1F1B. A number is an index into get_schedule_table: (chunk, micro-batch)."""

    pipeline: Pipeline
    stage: int
    gathers: bool
    reduces: bool

    @property
    def total(self) -> int:
        return self.pipeline.num_microbatches * self.pipeline.num_chunks

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline.num_stages - 1

    def spans(self) -> tuple[Span, ...]:
        period = self.period
        warmup = self.pipeline.num_warmup(self.stage)
        remaining = self.total - warmup
        regular, rest = self.bounds
        periods = (rest - regular) // period
        spans = [Span(ticks=(tick,)) for tick in self.opening()]
        spans += [Span(ticks=(self.warm(number),)) for number in range(warmup)]
        spans += [Span(ticks=(self.steady(number),)) for number in range(regular)]
        if periods:
            ticks = tuple(self.steady(regular + number) for number in range(period))
            spans.append(Span(ticks=ticks, times=periods, step=self.pipeline.group))
        spans += [Span(ticks=(self.steady(number),)) for number in range(rest, remaining)]
        spans += [Span(ticks=(self.cool(n),)) for n in range(remaining, self.total)]
        if self.reduces and not self.is_first:  # aligned with the last passes of earlier stages
            spans.append(Span(ticks=((Action(act=Act.REDUCE, chunk=0),),)))
        return tuple(span for span in spans if any(span.ticks))

    def passes(self) -> Iterator[tuple[int, bool]]:
        warmup = self.pipeline.num_warmup(self.stage)
        remaining = self.total - warmup
        regular, rest = self.bounds
        steady = (*range(min(rest, regular + 2 * self.period)), *range(rest, remaining))
        for number in range(warmup):
            yield self.place(number, forward=True)[0], True
        for number in steady:
            yield self.place(number + warmup, forward=True)[0], True
            yield self.place(number, forward=False)[0], False
        for number in range(remaining, self.total):
            yield self.place(number, forward=False)[0], False

    @property
    def period(self) -> int:
        """Numbers of a group of micro-batches."""
        return self.pipeline.group * self.pipeline.num_chunks

    @property
    def bounds(self) -> tuple[int, int]:
        """Numbers of the steady state before its periods, and with them.

        Before them the leading stage receives nothing, or not yet as regularly as then, and
        chunks run their first passes. A smaller last group is behind them.
        """
        pipeline = self.pipeline
        remaining = self.total - pipeline.num_warmup(self.stage)
        is_default = pipeline.group == pipeline.num_stages
        first = max(1, pipeline.num_stages - 1) if is_default else self.period
        regular = min(remaining, first)
        end = remaining
        if pipeline.num_microbatches % pipeline.group:
            end -= pipeline.num_microbatches % pipeline.group * pipeline.num_chunks
        periods = max(0, end - 1 - regular) // self.period
        return regular, regular + periods * self.period

    def place(self, number: int, *, forward: bool) -> tuple[int, int]:
        """Return (chunk, micro-batch) of a number. The last group may be smaller."""
        pipeline = self.pipeline
        chunks = pipeline.num_chunks
        group, inside = divmod(number, self.period)
        first = group * pipeline.group
        size = min(pipeline.group, pipeline.num_microbatches - first)
        chunk, index = divmod(inside, size)
        return (chunk if forward else chunks - 1 - chunk), first + index

    def arriving(self, number: int, *, forward: bool) -> tuple[int, int] | None:
        """Return the place of the input of the next number, received during this number.

        The leading stage of a direction receives from the last one, whose chunk is one before.
        """
        chunks = self.pipeline.num_chunks
        if not (self.is_first if forward else self.is_last):
            return self.place(number + 1, forward=forward)
        source = number - (self.pipeline.num_stages - 1)
        if source < 0:
            return None
        chunk, microbatch = self.place(source, forward=forward)
        if chunk == (chunks - 1 if forward else 0):
            return None
        return (chunk + 1 if forward else chunk - 1), microbatch

    def leaving(self, number: int, *, forward: bool) -> tuple[int, int] | None:
        """Return the place of the output sent after this number; the model's end sends none."""
        chunk, microbatch = self.place(number, forward=forward)
        if forward:
            is_end = self.is_last and chunk == self.pipeline.num_chunks - 1
        else:
            is_end = self.is_first and chunk == 0
        return None if is_end else (chunk, microbatch)

    def transfers(self, *, batched: bool, **places: tuple[int, int] | None) -> Tick:
        return _transfers(places, batched=batched, parity=self.stage % 2)

    def awaited(self, **places: tuple[int, int] | None) -> Tick:
        """Return transfers for which the stage waits at once."""
        moves = self.transfers(batched=not self.pipeline.overlap, **places)
        if not self.pipeline.overlap or not moves:
            return moves
        return (*moves, Action(act=Act.WAIT, after=tuple(str(move.act) for move in moves)))

    def opening(self) -> Iterator[Tick]:
        if self.gathers:
            yield (Action(act=Act.GATHER, chunk=0), Action(act=Act.GATHER, chunk=1))
        if not self.is_first:
            yield self.awaited(recv_forward=(0, 0))

    def warm(self, number: int) -> Tick:
        last = number == self.pipeline.num_warmup(self.stage) - 1
        goes_on = last and number < self.total - 1
        arriving = self.arriving(number, forward=True) if number < self.total - 1 else None
        gradient = (self.pipeline.num_chunks - 1, 0) if goes_on and not self.is_last else None
        sent = self.leaving(number, forward=True)
        tick = (*self.gather_at(number), self.forward(number))
        if not self.pipeline.overlap:
            return (
                *tick,
                *self.awaited(send_forward=sent, recv_forward=arriving, recv_backward=gradient),
            )
        moves = self.awaited(send_forward=sent, recv_forward=arriving)
        return (*tick, *moves, *self.transfers(batched=False, recv_backward=gradient))

    def steady(self, number: int) -> Tick:
        forward_number = number + self.pipeline.num_warmup(self.stage)
        arriving = (
            self.arriving(forward_number, forward=True)
            if forward_number < self.total - 1
            else None
        )
        gradient = self.arriving(number, forward=False)
        sent = self.leaving(forward_number, forward=True)
        gradient_sent = self.leaving(number, forward=False)
        passes: Tick = (self.forward(forward_number), self.backward(number))
        if self.pipeline.combines:
            passes = (combined(*passes),)
        if not self.pipeline.overlap:
            return (
                *passes,
                *self.reduce_at(number),
                *self.transfers(
                    batched=True,
                    send_backward=gradient_sent,
                    recv_forward=arriving,
                    send_forward=sent,
                    recv_backward=gradient,
                ),
            )
        waits = self.input_wait(number)
        if self.pipeline.combines:
            return (
                *waits,
                *self.gradient_wait(number),
                *passes,
                *self.transfers(batched=False, send_forward=sent, recv_forward=arriving),
                *self.reduce_at(number),
                *self.transfers(
                    batched=False, send_backward=gradient_sent, recv_backward=gradient
                ),
            )
        return (
            *waits,
            self.forward(forward_number),
            *self.transfers(batched=False, send_forward=sent, recv_forward=arriving),
            *self.gradient_wait(number),
            self.backward(number),
            *self.reduce_at(number),
            *self.transfers(batched=False, send_backward=gradient_sent, recv_backward=gradient),
        )

    def cool(self, number: int) -> Tick:
        remaining = self.total - self.pipeline.num_warmup(self.stage)
        gradient = self.arriving(number, forward=False) if number < self.total - 1 else None
        waits: Tick = ()
        if number == 0 and not self.is_last:  # all forwards were warm-up
            waits = self.awaited(recv_backward=self.place(0, forward=False))
        elif number == remaining and self.pipeline.overlap:
            waits = self.last_gradient_wait(number)
        return (
            *waits,
            self.backward(number),
            *self.reduce_at(number),
            *self.awaited(
                send_backward=self.leaving(number, forward=False), recv_backward=gradient
            ),
        )

    def input_wait(self, number: int) -> Tick:
        """Return the wait before a forward pass of the steady state."""
        forward_number = number + self.pipeline.num_warmup(self.stage)
        begins = self.is_first and self.place(forward_number, forward=True)[0] == 0
        if self.pipeline.group == self.pipeline.num_stages:
            return () if begins or number == 0 else (_wait(Act.RECV_FORWARD),)
        pending = self.pending(number, forward=True)
        return () if begins or not pending else (_wait(Act.RECV_FORWARD, pending - 1),)

    def gradient_wait(self, number: int) -> Tick:
        """Return the wait before a backward pass of the steady state."""
        chunk, _ = self.place(number, forward=False)
        is_end = self.is_last and chunk == self.pipeline.num_chunks - 1
        if self.pipeline.group == self.pipeline.num_stages:
            return () if is_end else (_wait(Act.RECV_BACKWARD),)
        pending = self.pending(number, forward=False)
        return () if is_end or not pending else (_wait(Act.RECV_BACKWARD, pending - 1),)

    def last_gradient_wait(self, number: int) -> Tick:
        """Return the wait for all gradients that the steady state receives."""
        if self.pipeline.group == self.pipeline.num_stages:
            return self.gradient_wait(number)
        return (_wait(Act.RECV_BACKWARD),) if self.pending(number, forward=False) else ()

    def pending(self, number: int, *, forward: bool) -> int:
        """Return the receipts of one direction in flight before a number of the steady state.

        A larger group lets the leading stage receive what it needs much later. Each pass waits
        for the oldest receipt in flight (recv_prev_wait_handles.pop(0)), those of the model's
        ends for none. Receipts of the warm-up are awaited at once.
        """
        warmup = self.pipeline.num_warmup(self.stage)
        regular, rest = self.bounds
        ends = (self.is_first, 0) if forward else (self.is_last, self.pipeline.num_chunks - 1)
        # The last forward pass of the warm-up begins to receive the first gradient.
        count = 0 if forward or self.is_last else 1
        before_rest = range(regular) if number >= rest else range(number)
        for earlier in (*before_rest, *range(rest, number)):
            index = earlier + warmup if forward else earlier
            chunk, _ = self.place(index, forward=forward)
            if count and not (ends[0] and chunk == ends[1]):
                count -= 1
            goes_on = not forward or index < self.total - 1
            if goes_on and self.arriving(index, forward=forward) is not None:
                count += 1
        return count

    def forward(self, number: int) -> Action:
        chunk, microbatch = self.place(number, forward=True)
        return Action(act=Act.FORWARD, chunk=chunk, microbatch=microbatch, edge=microbatch == 0)

    def backward(self, number: int) -> Action:
        chunk, microbatch = self.place(number, forward=False)
        edge = microbatch == self.pipeline.num_microbatches - 1
        return Action(act=Act.BACKWARD, chunk=chunk, microbatch=microbatch, edge=edge)

    def gather_at(self, number: int) -> Tick:
        """Return the gather of a chunk, which all stages do at the same time."""
        aligned = number + self.stage
        if not self.gathers or aligned >= self.total:
            return ()
        chunk, microbatch = self.place(aligned, forward=True)
        if microbatch or not 1 < chunk + 1 < self.pipeline.num_chunks:
            return ()
        return (Action(act=Act.GATHER, chunk=chunk + 1),)

    def reduce_at(self, number: int) -> Tick:
        """Return the reduction of a chunk, which all stages do at the same time."""
        aligned = number - self.stage
        if not self.reduces or aligned < 0:
            return ()
        chunk, microbatch = self.place(aligned, forward=False)
        if microbatch != self.pipeline.num_microbatches - 1:
            return ()
        return (Action(act=Act.REDUCE, chunk=chunk),)


def _wait(act: Act, back: int = 0) -> Action:
    """Return the wait for a transfer. back: how many of its kind were issued after it."""
    return Action(act=Act.WAIT, after=(f"{act}~{back}" if back else str(act),))
