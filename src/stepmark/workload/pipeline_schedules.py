"""In which order a pipeline stage works through its micro-batches, and what it sends when.

1F1B and interleaved 1F1B as Megatron-LM runs them (megatron-core 0.16.1,
megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_without_interleaving,
forward_backward_pipelining_with_interleaving, get_pp_rank_microbatches, get_schedule_table;
p2p_communication.py: _batched_p2p_ops, _p2p_ops). The micro-batch group of a virtual stage is
as large as the pipeline, Megatron's default. That an overlapped send is waited for when the
next one has been issued is left out: it is long done by then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stepmark.workload.pipeline import Act, Action, Pipeline, Span, Tick


def schedule(
    pipeline: Pipeline, stage: int, *, gathers: bool = False, reduces: bool = False
) -> tuple[Span, ...]:
    """A stage's ticks in order.

    gathers, reduces: with the places where parameters of chunks are gathered and gradients
    reduced along with the schedule (param_sync_func, grad_sync_func). Plain 1F1B gathers
    nothing, whatever is asked: its schedule does not call param_sync_func.
    """
    if pipeline.num_chunks > 1:
        return _Interleaved(pipeline, stage, gathers, reduces).spans()
    return tuple(_plain(pipeline, stage, reduces))


def _plain(pipeline: Pipeline, stage: int, reduces: bool) -> Iterator[Span]:
    """1F1B; without stages one forward and one backward after the other."""
    first, last = stage == 0, stage == pipeline.num_stages - 1
    total, warmup = pipeline.num_microbatches, pipeline.num_warmup(stage)
    remaining = total - warmup

    def prev(sent: int | None, received: int | None) -> Tick:
        own = {"send_backward": _only(sent), "recv_forward": _only(received)}
        return () if first else _moves(own)

    def next_(sent: int | None, received: int | None) -> Tick:
        own = {"send_forward": _only(sent), "recv_backward": _only(received)}
        return () if last else _moves(own)

    def steady(index: int) -> Tick:
        ahead = warmup + index
        following = ahead + 1 if index + 1 < remaining else None
        return (
            Action(act=Act.FORWARD, microbatch=ahead, edge=ahead == 0),
            *next_(ahead, index),
            Action(act=Act.BACKWARD, microbatch=index, edge=index == total - 1),
            *prev(index, following),
        )

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


# With the previous stage first, as _batched_p2p_ops; single calls by the stage's parity, so
# that of two neighbours one sends while the other receives, as _p2p_ops.
_BATCHED = (Act.SEND_BACKWARD, Act.RECV_FORWARD, Act.SEND_FORWARD, Act.RECV_BACKWARD)
_SINGLE = (
    (Act.SEND_FORWARD, Act.RECV_FORWARD, Act.SEND_BACKWARD, Act.RECV_BACKWARD),
    (Act.RECV_FORWARD, Act.SEND_FORWARD, Act.RECV_BACKWARD, Act.SEND_BACKWARD),
)


def _moves(
    wanted: Mapping[str, tuple[int, int] | None], *, batched: bool = True, parity: int = 0
) -> Tick:
    """Transfers of (chunk, micro-batch), by the names of their acts. None: not this one.

    batched: in one call; else in the order of a stage whose number is even, or odd.
    """
    order = _BATCHED if batched else _SINGLE[parity]
    found = [(act, where) for act in order if (where := wanted.get(act)) is not None]
    return tuple(
        Action(act=act, chunk=chunk, microbatch=microbatch, fused=batched and index > 0)
        for index, (act, (chunk, microbatch)) in enumerate(found)
    )


def _only(microbatch: int | None) -> tuple[int, int] | None:
    """Of the one chunk that a stage has."""
    return None if microbatch is None else (0, microbatch)


@dataclass(frozen=True, slots=True)
class _Interleaved:
    """Numbers count (chunk, micro-batch) pairs in the order of get_schedule_table."""

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
        size = self.pipeline.num_stages
        period = size * self.pipeline.num_chunks
        warmup = self.pipeline.num_warmup(self.stage)
        remaining = self.total - warmup
        # Before it the leading stage has nothing to receive, and chunks run their first.
        regular = min(remaining, max(1, size - 1))
        periods = max(0, remaining - 1 - regular) // period
        rest = regular + periods * period
        found = [Span(ticks=(tick,)) for tick in self.opening()]
        found += [Span(ticks=(self.warm(number),)) for number in range(warmup)]
        found += [Span(ticks=(self.steady(number),)) for number in range(regular)]
        if periods:
            ticks = tuple(self.steady(regular + number) for number in range(period))
            found.append(Span(ticks=ticks, times=periods, step=size))
        found += [Span(ticks=(self.steady(number),)) for number in range(rest, remaining)]
        found += [Span(ticks=(self.cool(n),)) for n in range(remaining, self.total)]
        if self.reduces and not self.is_first:  # aligned with what earlier stages still do
            found.append(Span(ticks=((Action(act=Act.REDUCE, chunk=0),),)))
        return tuple(span for span in found if any(span.ticks))

    def place(self, number: int, *, forward: bool) -> tuple[int, int]:
        """(chunk, micro-batch) of a number."""
        size, chunks = self.pipeline.num_stages, self.pipeline.num_chunks
        group, inside = divmod(number, size * chunks)
        chunk, index = divmod(inside, size)
        return (chunk if forward else chunks - 1 - chunk), group * size + index

    def arriving(self, number: int, *, forward: bool) -> tuple[int, int] | None:
        """What is received beside this number: the input of the next one.

        The leading stage of a direction gets it of the ending one, whose chunk is one before.
        """
        chunks = self.pipeline.num_chunks
        if not (self.is_first if forward else self.is_last):
            return self.place(number + 1, forward=forward)
        made = number - (self.pipeline.num_stages - 1)
        if made < 0:
            return None
        chunk, microbatch = self.place(made, forward=forward)
        if chunk == (chunks - 1 if forward else 0):
            return None
        return (chunk + 1 if forward else chunk - 1), microbatch

    def leaving(self, number: int, *, forward: bool) -> tuple[int, int] | None:
        """What is sent on after this number; the end of the model sends nothing."""
        chunk, microbatch = self.place(number, forward=forward)
        if forward:
            ends = self.is_last and chunk == self.pipeline.num_chunks - 1
        else:
            ends = self.is_first and chunk == 0
        return None if ends else (chunk, microbatch)

    def moves(self, *, batched: bool, **wanted: tuple[int, int] | None) -> Tick:
        return _moves(wanted, batched=batched, parity=self.stage % 2)

    def awaited(self, **wanted: tuple[int, int] | None) -> Tick:
        """Transfers that the stage waits for at once."""
        moves = self.moves(batched=not self.pipeline.overlap, **wanted)
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
        return (*tick, *moves, *self.moves(batched=False, recv_backward=gradient))

    def steady(self, number: int) -> Tick:
        ahead = number + self.pipeline.num_warmup(self.stage)
        arriving = self.arriving(ahead, forward=True) if ahead < self.total - 1 else None
        gradient = self.arriving(number, forward=False)
        sent = self.leaving(ahead, forward=True)
        back = self.leaving(number, forward=False)
        if not self.pipeline.overlap:
            return (
                self.forward(ahead),
                self.backward(number),
                *self.reduce_at(number),
                *self.moves(
                    batched=True,
                    send_backward=back,
                    recv_forward=arriving,
                    send_forward=sent,
                    recv_backward=gradient,
                ),
            )
        begins = self.is_first and self.place(ahead, forward=True)[0] == 0
        return (
            *(() if begins or number == 0 else (_wait(Act.RECV_FORWARD),)),
            self.forward(ahead),
            *self.moves(batched=False, send_forward=sent, recv_forward=arriving),
            *self.gradient_wait(number),
            self.backward(number),
            *self.reduce_at(number),
            *self.moves(batched=False, send_backward=back, recv_backward=gradient),
        )

    def cool(self, number: int) -> Tick:
        remaining = self.total - self.pipeline.num_warmup(self.stage)
        gradient = self.arriving(number, forward=False) if number < self.total - 1 else None
        early: Tick = ()
        if number == 0 and not self.is_last:  # all forwards were warm-up
            early = self.awaited(recv_backward=self.place(0, forward=False))
        elif number == remaining and self.pipeline.overlap:
            early = self.gradient_wait(number)
        return (
            *early,
            self.backward(number),
            *self.reduce_at(number),
            *self.awaited(
                send_backward=self.leaving(number, forward=False), recv_backward=gradient
            ),
        )

    def gradient_wait(self, number: int) -> Tick:
        chunk, _ = self.place(number, forward=False)
        ends = self.is_last and chunk == self.pipeline.num_chunks - 1
        return () if ends else (_wait(Act.RECV_BACKWARD),)

    def forward(self, number: int) -> Action:
        chunk, microbatch = self.place(number, forward=True)
        return Action(act=Act.FORWARD, chunk=chunk, microbatch=microbatch, edge=microbatch == 0)

    def backward(self, number: int) -> Action:
        chunk, microbatch = self.place(number, forward=False)
        edge = microbatch == self.pipeline.num_microbatches - 1
        return Action(act=Act.BACKWARD, chunk=chunk, microbatch=microbatch, edge=edge)

    def gather_at(self, number: int) -> Tick:
        """All stages gather a chunk's parameters at the same time."""
        aligned = number + self.stage
        if not self.gathers or aligned >= self.total:
            return ()
        chunk, microbatch = self.place(aligned, forward=True)
        if microbatch or not 1 < chunk + 1 < self.pipeline.num_chunks:
            return ()
        return (Action(act=Act.GATHER, chunk=chunk + 1),)

    def reduce_at(self, number: int) -> Tick:
        """All stages reduce a chunk's gradients at the same time."""
        aligned = number - self.stage
        if not self.reduces or aligned < 0:
            return ()
        chunk, microbatch = self.place(aligned, forward=False)
        if microbatch != self.pipeline.num_microbatches - 1:
            return ()
        return (Action(act=Act.REDUCE, chunk=chunk),)


def _wait(act: Act) -> Action:
    return Action(act=Act.WAIT, after=(str(act),))
