"""The ranks of one launch, on this host and the other hosts of its job."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from stepmark.ground.errors import ConfigError
from stepmark.measuring import job as jobs
from stepmark.measuring.heartbeat import Heartbeat
from stepmark.measuring.leader import leader
from stepmark.measuring.local_ranks import LocalRanks, Ranks, Store, command_of


class _HostRanks(Protocol):
    """Ranks of one host, as of the last `poll`. Methods take ranks of the whole job."""

    name: str
    numbers: range
    beats: dict[int, Heartbeat]

    @property
    def lost(self) -> str: ...
    def poll(self) -> None: ...
    def pid(self, rank: int) -> int: ...
    def return_code(self, rank: int) -> int | None: ...
    def state(self, rank: int) -> str: ...
    def send(self, number: int, ranks: Iterable[int]) -> None: ...
    def begin_diagnosis(self, ranks: Sequence[int]) -> None: ...
    def diagnosis(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]: ...
    def begin_kill(self) -> None: ...
    def kill(self) -> list[int]: ...


class Workers:
    """A process per rank. Consecutive ranks share a host; one rank alone runs on this host."""

    def __init__(
        self,
        entry: str,
        plan: Path,
        arguments: Sequence[str],
        num_ranks: int,
        *,
        first: int = 0,
        signals: Sequence[int] = (),
    ) -> None:
        """Start an entry of ENTRIES for each rank, on every host of the job.

        signals: those of `catching`. Raises ConfigError for ranks that hosts cannot share
        evenly, LostHostError, and JoinInterrupted.
        """
        self.num_ranks = num_ranks
        self.beats: dict[int, Heartbeat] = {}
        self._leader = leader()
        command = command_of(entry, plan, arguments)
        if self._leader is None or num_ranks == 1:
            ranks = Ranks(numbers=range(num_ranks), world_size=num_ranks, first=first)
            self.started_s = time.monotonic()
            self._own = LocalRanks(command, ranks, None, {})
            self._hosts: list[_HostRanks] = [self._own]
            self._per_host = num_ranks
            return
        job = self._leader.job
        self._per_host, rest = divmod(num_ranks, job.num_hosts)
        if rest:
            raise ConfigError("nproc", num_ranks, f"a multiple of {job.num_hosts} hosts")
        self._leader.wait_for_all(signals)
        self.started_s = time.monotonic()
        listener = jobs.listen(0)
        port = listener.getsockname()[1]
        remote = self._leader.start(
            entry, plan, arguments, per_host=self._per_host, first=first, store_port=port
        )
        ranks = Ranks(numbers=range(self._per_host), world_size=num_ranks, first=first)
        store = Store(host="127.0.0.1", port=port, listener=listener)
        self._own = LocalRanks(command, ranks, store, self._leader.environment)
        self._hosts = [self._own, *remote]

    def _host(self, rank: int) -> _HostRanks:
        return self._hosts[rank // self._per_host]

    @property
    def interrupted(self) -> int | None:
        """Signal that the agent of another host got."""
        return self._leader.interrupted if self._leader else None

    def poll(self) -> None:
        """Update exit codes and beats."""
        for host in self._hosts:
            host.poll()
        self.beats = {rank: beat for host in self._hosts for rank, beat in host.beats.items()}

    def lost_hosts(self) -> dict[str, str]:
        """Return the names of lost hosts, and why each is lost."""
        return {host.name: host.lost for host in self._hosts if host.lost}

    def lost_ranks(self) -> tuple[int, ...]:
        return tuple(rank for host in self._hosts if host.lost for rank in host.numbers)

    def process(self, rank: int) -> str:
        """Return the text that names the process of a rank."""
        host = self._host(rank)
        return f"pid {host.pid(rank)}{f' on {host.name}' if host.name else ''}"

    def return_code(self, rank: int) -> int | None:
        """Return None while the process lives; negative for a signal, as of the last `poll`."""
        return self._host(rank).return_code(rank)

    def working(self) -> list[int]:
        """Return the ranks whose process lives, as far as is known."""
        lost = self.lost_ranks()
        return [
            rank
            for rank in range(self.num_ranks)
            if self.return_code(rank) is None and rank not in lost
        ]

    def state(self, rank: int) -> str:
        """Return psutil's name for the state of a living rank, else ""."""
        return self._host(rank).state(rank)

    @property
    def exit_code(self) -> int | None:
        """Exit code of rank 0; None until it has reported that its work is done."""
        return self.beats[0].exit_code if 0 in self.beats else None

    @property
    def restart_at(self) -> int | None:
        return self.beats[0].restart_at if 0 in self.beats else None

    def stop(self) -> None:
        """Ask the ranks to stop after the present case."""
        self._own.stop()

    def send(self, number: int, ranks: Sequence[int]) -> None:
        for host in self._hosts:
            if own := [rank for rank in ranks if rank in host.numbers]:
                host.send(number, own)

    def diagnosis(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return stacks and flight recorders of these ranks, of those that answer.

        Ranks then abort communicators. It takes up to 5 s.
        """
        stacks: dict[int, str] = {}
        flight: dict[int, str] = {}
        own_ranks = [
            (host, [rank for rank in ranks if rank in host.numbers])
            for host in self._hosts
            if not host.lost
        ]
        for host, own in own_ranks:
            host.begin_diagnosis(own)
        for host, own in own_ranks:
            new_stacks, new_flight = host.diagnosis(own)
            stacks |= new_stacks
            flight |= new_flight
        return stacks, flight

    def kill(self) -> list[int]:
        """SIGKILL the ranks and their children. Return the pids that survive 10 s."""
        for host in self._hosts:
            host.begin_kill()
        return [pid for host in self._hosts for pid in host.kill()]
