"""Stages of torch.distributed.pipelining: passes, and transfers between them.

torch 2.13, torch/distributed/pipelining/stage.py (get_fwd_recv_ops and similar,
backward_maybe_with_nosync, perform_reduce_grad) and schedules.py. Under FSDP weights that a
backward pass gathered stay until the last one, after which all gradients are reduced. FSDP's
gathers depend on the passes before, so passes are computed one by one until nothing changes
any more; the rest of a span repeats.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepmark.cases.message import RECV, SEND
from stepmark.model.ops import Phase
from stepmark.step.workload import Block, Item, Run
from stepmark.workloads.job import Comms, Job
from stepmark.workloads.pipeline import (
    COMPUTE_DONE,
    FORWARD_TRANSFERS,
    SENDS,
    WITH_MICROBATCH,
    WITH_NEXT_STAGE,
    Act,
    Action,
    Span,
    Tick,
    wait,
)
from stepmark.workloads.rules.pytorch.chunk import Blocks, Chunk


class Stage:
    """A schedule's actions on one pp rank. chunks: the parts of the model on this rank.

    Bodies are added to `blocks` under names that begin with "stage" and the rank.
    """

    def __init__(
        self, job: Job, chunks: Sequence[Chunk], rank: int, *, comms: Comms, blocks: Blocks
    ) -> None:
        self._job, self._chunks, self._rank = job, chunks, rank
        self._comms, self._blocks = comms, blocks
        self._names: dict[Block, str] = {}
        self._passes: dict[tuple[Act, int], Block] = {}  # where they are always the same

    def program(self, spans: Sequence[Span]) -> Block:
        """Return one pass of micro-batches through the pipeline."""
        runs: list[Run] = []
        for span in spans:
            for run in self._runs(span):
                _add(runs, run)
        return tuple(runs)

    def _runs(self, span: Span) -> Iterator[Run]:
        ticks = [
            action for tick in span.ticks for action in tick if action.act in WITH_MICROBATCH
        ]
        base = min((action.microbatch for action in ticks), default=0)
        repeat = 0
        while repeat < span.times:
            state, counts = self._state(), self._open_passes()
            items = tuple(item for tick in span.ticks for item in self._items(tick, base))
            more = 0
            if repeat + 1 < span.times and self._state() == state:
                more = self._skipped(counts, span.times - repeat - 1)
            if items:
                yield Run(
                    block=self._named("tick", items),
                    times=1 + more,
                    microbatch=base + repeat * span.step,
                    microbatch_step=span.step if more else 0,
                )
            repeat += 1 + more

    def _state(self) -> list[tuple[object, ...]]:
        return [chunk.state() for chunk in self._chunks]

    def _open_passes(self) -> list[list[int]]:
        return [chunk.open_passes() for chunk in self._chunks]

    def _skipped(self, before: list[list[int]], most: int) -> int:
        """Return how often the same repeats; forward passes without a backward run out."""
        open_passes = self._open_passes()
        changes = [
            [new - old for new, old in zip(news, olds, strict=True)]
            for news, olds in zip(open_passes, before, strict=True)
        ]
        repeats = [
            (count - 1) // -change
            for counts, changed in zip(open_passes, changes, strict=True)
            for count, change in zip(counts, changed, strict=True)
            if change < 0
        ]
        times = min([most, *repeats])
        for chunk, changed in zip(self._chunks, changes, strict=True):
            chunk.open_more([times * change for change in changed])
        return times

    def _items(self, tick: Tick, base: int) -> Iterator[Item]:
        """Yield a tick's items, micro-batches relative to base."""
        for action in tick:
            items = tuple(self._lower(action, base))
            count = self._num_compute_done(items)
            is_pass = action.act in (Act.FORWARD, Act.BACKWARD)
            for index, chunk in enumerate(self._chunks):
                if not (is_pass and index == action.chunk):  # a chunk counts its own passes
                    chunk.count_compute_done(count)
            yield from items

    def _num_compute_done(self, items: Block) -> int:
        """Count the operations that are named COMPUTE_DONE."""
        return sum(
            item.times * self._num_compute_done(self._blocks[item.block])
            if isinstance(item, Run)
            else item.name == COMPUTE_DONE
            for item in items
        )

    def _lower(self, action: Action, base: int) -> Iterator[Item]:
        chunk = self._chunks[action.chunk]
        match action.act:
            case Act.FORWARD | Act.BACKWARD:
                name = self._named(f"{action.act}{action.chunk}", self._pass(action))
                yield Run(block=name, microbatch=action.microbatch - base)
            case Act.WAIT:
                yield wait(action.after, Phase.FWD, "pipeline")
            case Act.GATHER:
                yield from chunk.gather()
            case Act.RELEASE:
                chunk.release()
            case Act.REDUCE:
                yield from chunk.reduce()
            case _:
                yield from self._transfer(action, action.microbatch - base)

    def _pass(self, action: Action) -> Block:
        chunk, key = self._chunks[action.chunk], (action.act, action.chunk)
        if key in self._passes:
            return self._passes[key]
        if action.act is Act.FORWARD:
            block = chunk.forward()
        else:
            block = chunk.backward(reduces=False, keeps=True)
        if not chunk.is_sharded:
            self._passes[key] = block
        return block

    def _transfer(self, action: Action, microbatch: int) -> tuple[Item, ...]:
        """Return a transfer of this rank's hidden states of a micro-batch, or their gradients.

        NCCL has a communicator for each pair; batches use that of all stages, and the stage
        waits for them at once. The next gathers wait for what a batch received, too.
        """
        job, act = self._job, action.act
        to_next = act in WITH_NEXT_STAGE
        stream, name = "compute", "" if act in SENDS else COMPUTE_DONE
        if action.after:
            stream = "pp.next" if to_next or job.parallel.pp == 2 else "pp.prev"
            name = f"{act}.{action.chunk}"
        return self._comms(
            SEND if act in SENDS else RECV,
            job.tokens // job.parallel.tp * job.model.hidden_size,
            "pp",
            Phase.FWD if act in FORWARD_TRANSFERS else Phase.BWD,
            "pipeline",
            microbatch=microbatch,
            stream=stream,
            name=name,
            after=action.after,
            peer=1 if to_next else -1,
            fused=action.fused,
        )

    def _named(self, stem: str, items: Block) -> str:
        """Add a block, unless an equal one exists, and return its name."""
        if items not in self._names:
            name = f"stage{self._rank}.{stem}.{len(self._names)}"
            self._names[items] = name
            self._blocks[name] = items
        return self._names[items]


def _add(runs: list[Run], run: Run) -> None:
    """Append a run, or repeat the last one once more."""
    if runs and runs[-1].block == run.block and run.times == 1:
        last = runs[-1]
        step = last.microbatch_step if last.times > 1 else run.microbatch - last.microbatch
        if run.microbatch == last.microbatch + last.times * step and step >= 0:
            runs[-1] = replace(last, times=last.times + 1, microbatch_step=step)
            return
    runs.append(run)
