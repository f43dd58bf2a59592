"""Dumps of four real gloo ranks, each job with a known fault.

    python -m tests.job_logs.gloo_faults FOLDER

Ranks are forked from this process, which has imported torch. A rank counts the calls that it
has begun; when no count has changed for a while, every rank writes its dump and ends.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._inductor  # which a dump imports, for a second: here, not in every rank
import torch.distributed as dist
from torch._C import _distributed_c10d

SIZE = 4
SETTLED_S, LIMIT_S = 3.0, 20.0
# Groups of which each rank is in several; group 0 is all ranks.
GROUPS = ((0, 1, 2, 3), (0, 1, 2), (2, 3), (1, 3))


class Rank:
    """One rank: makes calls and counts them."""

    def __init__(self, rank: int, counts: mmap.mmap) -> None:
        self.rank, self._counts = rank, counts
        self._groups = [dist.new_group(list(ranks)) for ranks in GROUPS]

    def _begin(self) -> None:
        self._counts[self.rank] = self._counts[self.rank] + 1

    def reduce(
        self, group: int = 0, elements: int = 8, dtype: torch.dtype = torch.float
    ) -> None:
        if self.rank in GROUPS[group]:
            self._begin()
            data = torch.ones(elements, dtype=dtype)
            dist.all_reduce(data, group=self._groups[group])

    def broadcast(self, root: int = 0) -> None:
        self._begin()
        dist.broadcast(torch.ones(8), src=root, group=self._groups[0])

    def exchange(self, splits: list[int]) -> None:
        self._begin()
        received = torch.ones(SIZE)
        dist.all_to_all_single(
            received, torch.ones(sum(splits)), [1] * SIZE, splits, group=self._groups[0]
        )

    def receive(self, source: int) -> None:
        self._begin()
        dist.recv(torch.ones(8), source)

    def stop(self) -> None:
        self._begin()
        time.sleep(LIMIT_S)

    def each_group(self) -> None:
        for group in range(len(GROUPS)):
            self.reduce(group)


def healthy(rank: Rank) -> None:
    rank.each_group()


def missing(rank: Rank) -> None:
    """Rank 2 does not join; the others wait in group 0."""
    if rank.rank == 2:
        rank.stop()
    rank.reduce()


def sub_group(rank: Rank) -> None:
    """Rank 3 stops before group 2. Rank 2 waits there, rank 1 in group 3, rank 0 in group 1."""
    if rank.rank == 3:
        rank.stop()
    rank.reduce(2)
    rank.reduce(3)
    rank.reduce(1)
    rank.reduce()


def size(rank: Rank) -> None:
    rank.reduce(elements=16 if rank.rank == 1 else 8)
    rank.reduce()


def dtype(rank: Rank) -> None:
    rank.reduce(dtype=torch.int32 if rank.rank == 1 else torch.float)
    rank.reduce()


def order(rank: Rank) -> None:
    """Rank 3 makes two calls in the other order."""
    if rank.rank == 3:
        rank.broadcast()
        rank.reduce()
    else:
        rank.reduce()
        rank.broadcast()
    rank.reduce()


def group_order(rank: Rank) -> None:
    """Rank 2 uses groups 1 and 0 in the other order."""
    groups = (0, 1) if rank.rank == 2 else (1, 0)
    for group in groups:
        rank.reduce(group)


def skip(rank: Rank) -> None:
    """Rank 1 leaves out one of three equal calls, and ends."""
    for _ in range(2 if rank.rank == 1 else 3):
        rank.reduce()
    if rank.rank == 1:
        rank.stop()


def splits(rank: Rank) -> None:
    rank.exchange([2, 1, 1, 1] if rank.rank == 1 else [1, 1, 1, 1])


def pair(rank: Rank) -> None:
    """Rank 0 receives from rank 1, which stops; the others wait for both. Not recorded."""
    if rank.rank == 0:
        dist.send(torch.ones(8), 1)
        rank.reduce()
        rank.receive(1)
    elif rank.rank == 1:
        dist.recv(torch.ones(8), 0)
        rank.reduce()
        rank.stop()
    else:
        rank.reduce()
    rank.reduce()


FAULTS: tuple[Callable[[Rank], None], ...] = (
    *(healthy, missing, sub_group, size, dtype, order, group_order, skip, splits, pair),
)


def _run_rank(
    rank: int, fault: Callable[[Rank], None], folder: Path, store: str, counts: mmap.mmap
) -> None:
    """Run one rank of a job until the parent asks for the dump. Never returns."""

    def write_dump() -> None:
        while counts[SIZE] == 0:
            time.sleep(0.01)
        path = folder / f"{fault.__name__}_rank{rank}"
        path.write_bytes(_distributed_c10d._dump_fr_trace(True, True, False))
        os._exit(0)

    threading.Thread(target=write_dump).start()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, SIZE),
            rank=rank,
            world_size=SIZE,
            timeout=timedelta(seconds=2 * LIMIT_S),
        )
        member = Rank(rank, counts)
        member.each_group()
        fault(member)
    except RuntimeError as error:
        sys.stderr.write(f"{fault.__name__}: rank {rank}: {str(error)[:100]}\n")
    time.sleep(LIMIT_S)


def _run(fault: Callable[[Rank], None], folder: Path) -> None:
    counts = mmap.mmap(-1, SIZE + 1)
    with tempfile.TemporaryDirectory() as scratch:
        ranks = []
        for rank in range(SIZE):
            pid = os.fork()
            if pid == 0:
                _run_rank(rank, fault, folder, f"{scratch}/store", counts)
            ranks.append(pid)
        before, since, start = b"", time.monotonic(), time.monotonic()
        while time.monotonic() - start < LIMIT_S:
            now = counts[:SIZE]
            if now != before or 0 in now:
                before, since = now, time.monotonic()
            if time.monotonic() - since > SETTLED_S:
                break
            time.sleep(0.02)
        counts[SIZE] = 1
        for pid in ranks:
            os.waitpid(pid, 0)


def _forked(fault: Callable[[Rank], None], folder: Path) -> int:
    """Run a job in a process of its own; return its pid."""
    pid = os.fork()
    if pid == 0:
        _run(fault, folder)
        os._exit(0)
    return pid


if __name__ == "__main__":
    # Two at once: a job mostly waits until it has settled.
    for jobs in zip(FAULTS[::2], FAULTS[1::2], strict=True):
        for process in [_forked(job, Path(sys.argv[1])) for job in jobs]:
            os.waitpid(process, 0)
