"""What a stage of torch.distributed.pipelining does: passes, and transfers between them.

torch 2.13, torch/distributed/pipelining/stage.py (get_fwd_recv_ops and its siblings,
backward_maybe_with_nosync, perform_reduce_grad) and schedules.py. Under FSDP weights that a
backward pass gathered stay until the last one, after which all gradients are reduced. What
FSDP gathers depends on the passes before, so passes are gone through one by one until nothing
changes any more; the rest of a span is the same again.
"""

from collections.abc import Iterator, Sequence

from stepmark.core.message import RECV, SEND
from stepmark.core.ops import Phase
from stepmark.core.workload import Block, Item, Run
from stepmark.workload.job import Comms, Job
from stepmark.workload.pipeline import PASSED, Act, Action, Span, Tick, wait
from stepmark.workload.rules.pytorch.chunk import BLOCKS, Chunk
from stepmark.workload.rules.pytorch.schedules import MOVED

_NEXT = (Act.SEND_FORWARD, Act.RECV_BACKWARD)  # to or from the next stage
_SENDS = (Act.SEND_FORWARD, Act.SEND_BACKWARD)
_FORWARD = (Act.SEND_FORWARD, Act.RECV_FORWARD)


class Stage:
    """Issues a schedule's actions of one rank of pp; chunks: the parts of the model it has.

    Bodies are put into `blocks` under names that begin with "stage" and the rank.
    """

    def __init__(
        self, job: Job, chunks: Sequence[Chunk], rank: int, *, comms: Comms, blocks: BLOCKS
    ) -> None:
        self._job, self._chunks, self._rank = job, chunks, rank
        self._comms, self._blocks = comms, blocks
        self._names: dict[Block, str] = {}
        self._passes: dict[tuple[Act, int], Block] = {}  # where they are always the same

    def program(self, spans: Sequence[Span]) -> Block:
        """One pass of micro-batches through the pipeline."""
        found: list[Run] = []
        for span in spans:
            for run in self._runs(span):
                _add(found, run)
        return tuple(found)

    def _runs(self, span: Span) -> Iterator[Run]:
        ticks = [one for tick in span.ticks for one in tick if one.act in MOVED]
        base = min((one.microbatch for one in ticks), default=0)
        at = 0
        while at < span.times:
            state, counts = self._state(), self._open_passes()
            items = tuple(item for tick in span.ticks for item in self._items(tick, base))
            more = 0
            if at + 1 < span.times and self._state() == state:
                more = self._skipped(counts, span.times - at - 1)
            if items:
                yield Run(
                    block=self._named("tick", items),
                    times=1 + more,
                    microbatch=base + at * span.step,
                    microbatch_step=span.step if more else 0,
                )
            at += 1 + more

    def _state(self) -> list[tuple[object, ...]]:
        return [chunk.state() for chunk in self._chunks]

    def _open_passes(self) -> list[list[int]]:
        return [chunk.open_passes() for chunk in self._chunks]

    def _skipped(self, before: list[list[int]], most: int) -> int:
        """How many more times the same happens; forward passes that lie open run out."""
        now = self._open_passes()
        changes = [
            [new - old for new, old in zip(news, olds, strict=True)]
            for news, olds in zip(now, before, strict=True)
        ]
        left = [
            (count - 1) // -change
            for counts, changed in zip(now, changes, strict=True)
            for count, change in zip(counts, changed, strict=True)
            if change < 0
        ]
        times = min([most, *left])
        for chunk, changed in zip(self._chunks, changes, strict=True):
            chunk.open_more([times * change for change in changed])
        return times

    def _items(self, tick: Tick, base: int) -> Iterator[Item]:
        """Micro-batches are relative to base."""
        for action in tick:
            items = tuple(self._done(action, base))
            count = self._passed(items)
            is_pass = action.act in (Act.FORWARD, Act.BACKWARD)
            for index, chunk in enumerate(self._chunks):
                if not (is_pass and index == action.chunk):  # it counts its own passes
                    chunk.passed(count)
            yield from items

    def _passed(self, items: Block) -> int:
        """How many operations are named PASSED."""
        return sum(
            one.times * self._passed(self._blocks[one.block])
            if isinstance(one, Run)
            else one.name == PASSED
            for one in items
        )

    def _done(self, action: Action, base: int) -> Iterator[Item]:
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
            made = chunk.forward()
        else:
            made = chunk.backward(reduces=False, keeps=True)
        if not chunk.is_sharded:
            self._passes[key] = made
        return made

    def _transfer(self, action: Action, microbatch: int) -> tuple[Item, ...]:
        """Hidden states of a micro-batch, or their gradients: this rank's part of both.

        NCCL has a communicator for each pair, batches go over that of all stages; these are
        waited for at once. What is received so, the next gathers wait for, too.
        """
        job, ahead = self._job, action.act in _NEXT
        is_pair = job.parallel.pp == 2
        waited = "" if action.act in _SENDS else PASSED
        return self._comms(
            SEND if action.act in _SENDS else RECV,
            job.tokens // job.parallel.tp * job.model.hidden_size,
            "pp",
            Phase.FWD if action.act in _FORWARD else Phase.BWD,
            "pipeline",
            microbatch=microbatch,
            stream=("pp.next" if ahead or is_pair else "pp.prev")
            if action.after
            else "compute",
            name=f"{action.act}.{action.chunk}" if action.after else waited,
            after=action.after,
            peer=1 if ahead else -1,
            fused=action.fused,
        )

    def _named(self, what: str, items: Block) -> str:
        """Of equal blocks there is one."""
        if items not in self._names:
            name = f"stage{self._rank}.{what}.{len(self._names)}"
            self._names[items] = name
            self._blocks[name] = items
        return self._names[items]


def _add(found: list[Run], run: Run) -> None:
    """Behind the others, or as one more time of the last."""
    if found and found[-1].block == run.block and run.times == 1:
        last = found[-1]
        step = last.microbatch_step if last.times > 1 else run.microbatch - last.microbatch
        if run.microbatch == last.microbatch + last.times * step and step >= 0:
            found[-1] = Run(
                block=last.block,
                times=last.times + 1,
                microbatch=last.microbatch,
                microbatch_step=step,
            )
            return
    found.append(run)
