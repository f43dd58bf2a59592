"""One case of communication on this rank: buffers, check, clock."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.cases.record import Check
from stepmark.collectives.bench import data, issue_loop, nccl, timing
from stepmark.collectives.bench.communicators import Communicator
from stepmark.measuring.context import MeasureContext
from stepmark.measuring.verify import TORCH_DTYPE, merge
from stepmark.model.collectives import Collective, Mode, Registration

if TYPE_CHECKING:
    from stepmark.collectives.bench.concurrent_compute import ConcurrentCompute

Pair = tuple[torch.Tensor, torch.Tensor]


def needed_bytes(case: CommCase, index: int) -> int:
    """Return the bytes of one operand set on the rank with this index in its communicator."""
    sent = case.send_count(index)
    received = case.recv_count(index)
    elements = max(sent, received) if case.in_place else sent + received
    return elements * case.dtype.itemsize


def allocate_buffers(
    case: CommCase, index: int, allocate: Callable[[int, bool], torch.Tensor]
) -> Pair:
    """Return flat send and recv buffers; in place they share storage as in nccl-tests.

    allocate(count, receives): returns a buffer of this many elements of the case's type.
    """
    sent = case.send_count(index)
    received = case.recv_count(index)

    def empty(count: int, *, receives: bool) -> torch.Tensor:
        return allocate(case.unalign + count, receives)[case.unalign :]

    if not case.in_place:
        return empty(sent, receives=False), empty(received, receives=True)
    buffer = empty(max(sent, received), receives=True)
    part = slice(index * case.count, (index + 1) * case.count)
    match case.collective:
        case Collective.ALL_GATHER:
            return buffer[part], buffer
        case Collective.REDUCE_SCATTER:
            return buffer, buffer[part]
        case _:
            return buffer, buffer


# NCCL_WIN_REQUIRED_ALIGNMENT of NCCL 2.30, src/nccl.h.in.
_ALIGN_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Arena:
    """Memory that is registered as a whole, with the same offsets of buffers on all ranks."""

    memory: torch.Tensor
    stride: int
    num_buffers: int = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return the next buffer, as bytes."""
        start = self.num_buffers * self.stride
        self.num_buffers += 1
        return self.memory[start : start + num_bytes]


def arena_strides(case: CommCase) -> dict[bool, int]:
    """Return bytes from a buffer to the next, equal on all ranks, by whether they receive."""
    indices = range(case.num_ranks)
    sent = max(map(case.send_count, indices))
    received = max(map(case.recv_count, indices))
    counts = {True: max(sent, received)} if case.in_place else {False: sent, True: received}
    return {
        receives: -(-max(1, (count + case.unalign) * case.dtype.itemsize) // _ALIGN_BYTES)
        * _ALIGN_BYTES
        for receives, count in counts.items()
    }


# Minimum sample duration, which amortizes timer overhead. Ranks also end a call some
# microseconds apart in varying order, which the slowest rank of a short sample counts as time:
# on 4 x H200 single calls of 0.3 to 1.2 ms read 0.5 to 1.5 % too long.
_SAMPLE_S = 5e-3
_MOST_CALLS = 500
_MOST_SAMPLES = 1000  # of a batch
_FEWEST_GRAPHS = 5
_MAX_SETS = 128
NOT_CHECKED = Check(
    max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=0, reference="not checked"
)


def local_case(case: CommCase, rank: int) -> tuple[CommCase, int] | None:
    """Return the case of this rank's communicator alone, and the rank's index in that."""
    for members in case.communicators:
        if rank in members:
            alone = dataclasses.replace(case, split="", world_size=case.num_ranks)
            return alone, members.index(rank)
    return None


class CaseOnRank:
    """One rank's part of a case. Outside the communicator each step does nothing."""

    def __init__(
        self,
        case: CommCase,
        context: MeasureContext,
        communicator: Communicator | None,
        how: CommHow,
    ) -> None:
        self._context = context
        self._communicator = communicator
        self._how = how
        self._world_case = case
        self._local = local_case(case, context.ranks.rank)
        self._sets: list[Pair] = []
        self._calls: list[Callable[[], object]] = []
        self._arenas: dict[bool, Arena] = {}  # by whether their buffers receive

    def reserve(self, num_sets: int) -> None:
        """Allocate the memory of all sets, where it is to be registered."""
        if self._local is None or self._world_case.registration is Registration.NONE:
            return
        assert isinstance(self._communicator, nccl.Communicator)
        for receives, stride in arena_strides(self._local[0]).items():
            memory = self._communicator.allocate(num_sets * stride)
            self._arenas[receives] = Arena(memory=memory, stride=stride)

    def register(self) -> None:
        """Register the memory: NCCL wants every rank to do so at the same time."""
        for arena in self._arenas.values():
            assert isinstance(self._communicator, nccl.Communicator)
            self._communicator.register(arena.memory, self._world_case.registration)

    def release(self) -> None:
        """Free registered memory; every rank calls it when no call is under way."""
        if self._arenas:
            assert isinstance(self._communicator, nccl.Communicator)
            self._sets = []
            self._calls = []
            self._arenas = {}
            self._communicator.unregister()

    def allocate(self, num_sets: int) -> None:
        """Allocate operand sets, filled with the data of a check."""
        if self._local is None:
            return
        case, index = self._local
        device = self._context.ranks.device
        dtype = TORCH_DTYPE[case.dtype]

        def allocate(count: int, receives: bool) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        def from_arena(count: int, receives: bool) -> torch.Tensor:
            return self._arenas[receives].allocate(count * case.dtype.itemsize).view(dtype)

        for _ in range(num_sets):
            send, recv = allocate_buffers(case, index, from_arena if self._arenas else allocate)
            data.poison(recv)
            data.fill(case, index, send, 0)
            self._sets.append((send, recv))

    def sets_that_fit(self) -> int:
        """Return how many sets exceed twice the cache together, within half of free memory."""
        if self._local is None:
            return _MAX_SETS
        set_bytes = max(needed_bytes(*self._local), 1)
        needed = math.ceil(2 * self._context.cache_bytes / set_bytes) + 1
        fitting = self._context.free_bytes() // 2 // set_bytes
        return max(1, min(needed, fitting, _MAX_SETS))

    def check(self) -> Check:
        """Check every element that the call delivers, in `how.checks` rounds."""
        if self._local is None or not self._sets:
            return NOT_CHECKED
        # Grouped calls on one set would reduce it several times.
        case = dataclasses.replace(self._local[0], calls_per_group=1)
        index = self._local[1]
        send, recv = self._sets[0]
        call = self._bound(case, index, (send, recv))
        checks = list[Check]()
        if self._world_case.mode is Mode.GRAPH:
            call()  # makes connections, which cannot be captured
            self._wait()
            call = timing.capture(call, 1).replay
        for turn in range(self._how.checks):
            data.poison(recv)
            data.fill(case, index, send, turn)
            call()
            self._wait()
            checks.append(data.check(case, index, recv, turn))
        return merge(checks) if checks else NOT_CHECKED

    def bind(self) -> None:
        if self._local is not None:
            case, index = self._local
            self._calls = [self._bound(case, index, pair) for pair in self._sets]

    def _bound(self, case: CommCase, index: int, pair: Pair) -> Callable[[], object]:
        assert self._communicator is not None
        return self._communicator.bind(case, index, *pair)

    def warm_up(self) -> None:
        for i in range(self._how.warmups if self._calls else 0):
            self._calls[i % len(self._calls)]()
        self._wait()

    def estimate(self) -> float:
        """Return approximate seconds per call. Every rank makes as many calls, or some wait."""
        if not self._calls:
            return 0.0
        call: Callable[[], object] = timing.Rotation(self._calls)
        count = 1
        turns = 3
        if self._world_case.mode is Mode.GRAPH:
            # Issued one by one, short calls would be bound by the host.
            call = timing.capture(call, 20).replay
            count = 20
            turns = 2
            call()
            self._wait()
        begin = time.perf_counter()
        for _ in range(turns):
            call()
        self._wait()
        return (time.perf_counter() - begin) / turns / count

    def compiles_loop(self) -> bool:
        """Return whether a compiled loop can issue the calls of this rank, if it has any."""
        return self._local is None or issue_loop.load() is not None

    def timer(self, estimate_s: float, *, is_compiled: bool = False) -> timing.Timer:
        """Return the timer of the case. Equal estimates give all ranks the same k.

        is_compiled: every rank's calls are issued by the compiled loop.
        """
        case = self._world_case
        ranks = self._context.ranks
        name = "blocking-free" if case.mode is Mode.BLOCKING and not case.aligned else case.mode
        name = "queued-compiled" if is_compiled else name
        if self._local is None:
            return timing.IdleTimer(ranks, f"{name}/{timing.VERSION}", name == "blocking")
        calls = self._calls
        # Ranks arrive after the first one, evenly spaced.
        wait_s = case.skew_s * self._local[1] / max(1, case.num_ranks - 1)
        k = self._calls_per_sample(estimate_s)
        if case.device == "cpu":
            return timing.HostTimer(calls, ranks, k, name=name, wait_s=wait_s)
        match case.mode:
            case Mode.QUEUED | Mode.AHEAD:
                rotation: timing.Rotation | issue_loop.CompiledRotation
                rotation = timing.Rotation(calls)
                if is_compiled:
                    bound = [call for call in calls if isinstance(call, nccl.BoundCall)]
                    rotation = issue_loop.CompiledRotation(bound, issue_loop.load())
                return timing.StreamTimer(rotation, ranks, k, name=name, wait_s=wait_s)
            case Mode.GRAPH:
                return timing.GraphTimer(calls, ranks, k, wait_s=wait_s)
            case Mode.BLOCKING:
                return timing.BlockingTimer(calls, ranks, aligned=case.aligned, wait_s=wait_s)

    def concurrent_compute(self) -> "ConcurrentCompute | None":
        """Return the concurrent compute; only then are all operators imported."""
        if self._local is None or not self._world_case.beside:
            return None
        from stepmark.collectives.bench.concurrent_compute import make  # noqa: PLC0415

        return make(self._world_case.beside, self._context)

    @property
    def operations_per_call(self) -> int:
        """Divisor of a call's time: operations in a group, both directions of a ping-pong."""
        both_ways = 2 if self._world_case.collective is Collective.PING_PONG else 1
        return both_ways * self._world_case.calls_per_group

    def _calls_per_sample(self, estimate_s: float) -> int:
        case = self._world_case
        is_timed_alone = case.mode is Mode.BLOCKING or case.skew_s or self._how.per_call
        if is_timed_alone and case.mode is not Mode.GRAPH:
            return 1
        iterations = self._how.iterations
        k = max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_S / max(estimate_s, 1e-9))))
        if case.mode is Mode.GRAPH:
            # As nccl-tests: -n calls are captured, and the graph is launched several times.
            return min(_MOST_CALLS, iterations or k)
        k = min(k, self._most_calls)
        # Few calls still give enough samples to show their spread.
        return k if iterations is None else min(k, max(1, iterations // 5))

    def samples(self, calls_per_sample: int) -> tuple[int | None, int]:
        """Return the samples of -n, or None to sample until they suffice; and those of a batch.

        calls_per_sample: k of all ranks.
        """
        iterations = self._how.iterations
        most = max(1, min(_MOST_SAMPLES, self._most_calls // calls_per_sample))
        if iterations is None:
            return None, most
        if self._world_case.mode is Mode.GRAPH:
            return max(_FEWEST_GRAPHS, self._how.graphs), most
        return math.ceil(iterations / calls_per_sample), most

    @property
    def _most_calls(self) -> int:
        """Return how many calls may be enqueued together."""
        if self._world_case.mode is not Mode.AHEAD:
            return _MOST_CALLS * _MOST_SAMPLES
        return max(1, timing.MOST_AHEAD // self.operations_per_call)

    def _wait(self) -> None:
        if self._context.ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def backend_run(case: CommCase) -> str:
    """Return the library that carried the messages, with its version."""
    if case.backend != "nccl":
        return case.backend
    name = "rccl" if torch.version.hip else "nccl"
    version = torch.cuda.nccl.version()
    return f"{name} {'.'.join(map(str, version))}" if isinstance(version, tuple) else name
