"""The rank of this process, and agreement between ranks.

Control messages go over gloo, never over the communicator that is measured. A step succeeds on
all ranks or on none: where one fails, every rank gets its number and the reason.
"""

import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from stepmark.cases.record import AnyCase, Failed
from stepmark.ground.errors import StepmarkError, sentence_of
from stepmark.measuring.channel import ForgedError, add_mac, check_mac
from stepmark.measuring.job import KEY
from stepmark.measuring.nvidia import pci_bus_id

# From the agreement on a moment to that moment: longer than the message takes to all ranks.
_LEAD_S = 300e-6


class LostPeersError(StepmarkError):
    """Raised where another rank cannot be reached: ranks can no longer agree on anything."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among its peers. One rank alone needs no process group.

    offset_s is this host's monotonic clock minus rank 0's, offset_error_s its uncertainty:
    both 0 on rank 0's own host. group: the process group of these ranks, None for the default
    group.
    """

    rank: int
    num_ranks: int
    local_rank: int
    device: torch.device
    offset_s: float = 0.0
    offset_error_s: float = 0.0
    group: Any = None

    def first(self, count: int) -> "Ranks | None":
        """Return the first `count` ranks as ranks of their own; None on the others.

        Every rank calls it.
        """
        if count == self.num_ranks:
            return self
        group: Any = None
        if count > 1:
            group = _reach(lambda: dist.new_group(list(range(count)), backend="gloo"))
        return replace(self, num_ranks=count, group=group) if self.rank < count else None

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank, by rank. Raises LostPeersError."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        _reach(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Return rank 0's decision, on every rank. Raises LostPeersError."""
        if self.num_ranks == 1:
            return decision()
        box = [decision() if self.rank == 0 else None]
        _reach(lambda: dist.broadcast_object_list(box, src=0, group=self.group))
        return box[0]

    def barrier(self) -> None:
        if self.num_ranks > 1:
            _reach(lambda: dist.barrier(group=self.group))

    def align(self) -> None:
        """Return on all ranks at one moment, as far as their clocks agree.

        Ranks leave a barrier up to some 100 us apart, so they agree on a later moment and wait
        for it.
        """
        if self.num_ranks == 1:
            return
        moment = torch.tensor([self.now() + _LEAD_S], dtype=torch.float64)
        _reach(lambda: dist.all_reduce(moment, dist.ReduceOp.MAX, group=self.group))
        target = float(moment.item())
        while self.now() < target:
            pass

    def now(self) -> float:
        """Return seconds on rank 0's monotonic clock."""
        return time.monotonic() - self.offset_s

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(device_type: str, *, for_meshes: bool = False) -> Ranks:
    """Join the ranks that RANK, LOCAL_RANK and WORLD_SIZE describe; alone without them.

    Ranks meet at the store that our own parent names, else at MASTER_ADDR and MASTER_PORT.
    for_meshes: device meshes will be made from the default group. It then has NCCL for device
    tensors, while agreement stays on the CPU; and a single rank with RANK set has a default
    group, too.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        if os.environ.get("STEPMARK_BIND") == "closest":
            _bind_to_cores_near(device)
    if key := os.environ.get(KEY):
        _authenticate_objects(key.encode())
    if num_ranks > 1 or (for_meshes and "RANK" in os.environ):
        backend = "cpu:gloo,cuda:nccl" if for_meshes and device_type == "cuda" else "gloo"
        if (store := _store_of_parent(num_ranks)) is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    is_alone = num_ranks == 1
    offset_s, error_s = (0.0, 0.0) if is_alone else clock_offset(rank, num_ranks, _boot_id())
    return Ranks(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        device=device,
        offset_s=offset_s,
        offset_error_s=error_s,
    )


class _Pickler:
    """Pickle with a MAC. torch's object collectives call it as Pickler and as Unpickler."""

    def __init__(self, key: bytes, file: IO[bytes]) -> None:
        self._key = key
        self._file = file

    def dump(self, value: object) -> None:
        self._file.write(add_mac(self._key, pickle.dumps(value), b"object"))

    def load(self) -> Any:
        return pickle.loads(check_mac(self._key, self._file.read(), b"object"))


def _authenticate_objects(key: bytes) -> None:
    """Unpickle only what ranks with this key have pickled: a pickle runs code.

    torch exchanges objects in our agreements, and itself between the stages of a pipeline.
    """
    names = ("_pickler", "_unpickler")
    assert all(hasattr(c10d, name) for name in names), "torch exchanges objects in another way"
    for name in names:
        setattr(c10d, name, partial(_Pickler, key))


def _bind_to_cores_near(device: torch.device) -> None:
    """Run this process on the cores closest to its device, as the kernel lists them.

    Threads that start later inherit it. Without a list, or where the job has none of these
    cores, nothing changes.
    """
    place = pci_bus_id(device.index).lower()
    try:
        text = Path(f"/sys/bus/pci/devices/{place}/local_cpulist").read_text(encoding="ascii")
    except OSError:
        return
    if near := cores_of(text) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def cores_of(text: str) -> set[int]:
    """Return the cores of a kernel's list such as 0-3,8."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {n for low, _, high in spans for n in range(int(low), int(high or low) + 1)}


def _store_of_parent(num_ranks: int) -> Store | None:
    """Return the parent's store; None under an outer launcher. Names: local_ranks.py."""
    if file := os.environ.get("STEPMARK_STORE_FILE"):
        return FileStore(file, num_ranks)
    if port := os.environ.get("STEPMARK_STORE_PORT"):
        # Only rank 0 has the socket on which the parent listens.
        listener = os.environ.get("STEPMARK_STORE_SOCKET")
        return TCPStore(
            os.environ["STEPMARK_STORE_HOST"],
            int(port),
            num_ranks,
            is_master=listener is not None,
            master_listen_fd=None if listener is None else int(listener),
        )
    return None


def clock_offset(
    rank: int, num_ranks: int, host: str, *, rounds: int = 20
) -> tuple[float, float]:
    """Return this rank's monotonic clock minus rank 0's, and the error of that, in seconds.

    Every rank calls it. Ranks of rank 0's host share its clock. One rank of each other host
    exchanges time stamps with rank 0 as NTP does (RFC 5905, section 8): the shortest round trip
    counts, half of it is the error.
    """
    hosts: list[Any] = [None] * num_ranks
    _reach(lambda: dist.all_gather_object(hosts, host))
    offsets: dict[str, tuple[float, float]] = {hosts[0]: (0.0, 0.0)}
    for name in dict.fromkeys(hosts):
        if name in offsets:
            continue
        speaker = hosts.index(name)
        box = [_exchange(rank, speaker, rounds) if rank in (0, speaker) else (0.0, 0.0)]
        _reach(lambda: dist.broadcast_object_list(box, src=speaker))  # noqa: B023
        offsets[name] = box[0]
    return offsets[host]


def _exchange(rank: int, speaker: int, rounds: int) -> tuple[float, float]:
    """Exchange time stamps between rank 0 and the speaker; the speaker's result counts."""
    best = (0.0, float("inf"))
    for _ in range(rounds):
        stamps = torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            _reach(lambda: dist.recv(stamps, src=speaker))  # noqa: B023  called at once
            stamps[0] = time.monotonic()
            _reach(lambda: dist.send(stamps, dst=speaker))  # noqa: B023
            continue
        sent = time.monotonic()
        _reach(lambda: dist.send(stamps, dst=0))  # noqa: B023
        _reach(lambda: dist.recv(stamps, src=0))  # noqa: B023
        back = time.monotonic()
        error = (back - sent) / 2
        if error < best[1]:
            best = ((sent + back) / 2 - float(stamps.item()), error)
    return best


def _boot_id() -> str:
    """Return the running kernel's id: ranks with the same one share CLOCK_MONOTONIC."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def dump_flight_recorder() -> str:
    """Return the flight recorder of this rank's process groups as JSON; "" without one."""
    inner: Any = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(Exception):
            text = getattr(inner, name)()
            return text.decode() if isinstance(text, bytes) else str(text)
    return ""


def _reach(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except (RuntimeError, ForgedError) as error:  # gloo: connection closed, timed out
        first = str(error).strip().split("\n", maxsplit=1)[0]
        raise LostPeersError(f"a rank cannot be reached: {first}") from error


T = TypeVar("T")


class CaseFailedError(Exception):
    """Raised on every rank where some rank failed, with its number and the reason."""

    def __init__(self, cause: str, message: str, ranks: tuple[int, ...], trace: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.ranks = ranks
        self.trace = trace

    def record(self, run_id: str, case: AnyCase, launch: int) -> Failed:
        return Failed(
            run_id=run_id,
            case=case,
            cause=self.cause,
            message=self.message,
            ranks=self.ranks,
            traceback=self.trace,
            launch=launch,
        )


def agreed(ranks: Ranks, step: Callable[[], T]) -> T:
    """Run a step on every rank; if it fails on any, all raise CaseFailedError together."""
    result: T | None = None
    problem: tuple[str, str, str] | None = None
    try:
        result = step()
    except LostPeersError:
        raise
    except Exception as error:  # noqa: BLE001  a broken case is a record, not the end
        problem = cause_of(error)
    problems = ranks.gather(problem)
    failed = tuple(rank for rank, other in enumerate(problems) if other)
    if failed:
        cause, message, trace = problems[failed[0]]
        raise CaseFailedError(cause, message, failed, trace)
    return result  # type: ignore[return-value]


def measured_by(world: Ranks, members: Ranks | None, measure: Callable[[Ranks], T]) -> T:
    """Let some ranks measure while the others wait; all get rank 0's result.

    members: these ranks among themselves, rank 0 always one of them; None on the others.
    Raises CaseFailedError on all ranks of the world together.
    """
    if members is world:
        return measure(world)
    result: T | None = None
    problem: tuple[str, str, tuple[int, ...], str] | None = None
    if members is not None:
        try:
            result = measure(members)
        except CaseFailedError as error:
            problem = error.cause, error.message, error.ranks, error.trace
    result, problem = world.decide(lambda: (result, problem))
    if problem:
        raise CaseFailedError(*problem)
    return result


def cause_of(error: Exception) -> tuple[str, str, str]:
    """Return the cause for Failed, the first line of the message, and a useful traceback."""
    text = str(error).strip()
    first = text.split("\n", maxsplit=1)[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        return "oom", first, ""
    memory = isinstance(error, MemoryError) or "out of memory" in text.lower()
    memory = memory or "can't allocate memory" in text.lower()
    trace = "".join(traceback.format_exception(error))
    if not memory:
        first = sentence_of(error) or first
    return "oom" if memory else "error", first, trace
