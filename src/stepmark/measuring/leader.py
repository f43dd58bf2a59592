"""The leading agent of a job: it has the agents of the other hosts start and watch ranks."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.signals import catching
from stepmark.ground.waiting import wait_until
from stepmark.measuring import job as jobs
from stepmark.measuring.channel import (
    Alive,
    Channel,
    Diagnose,
    Diagnosis,
    End,
    ForgedError,
    Kill,
    Killed,
    SendSignal,
    Start,
    State,
)
from stepmark.measuring.heartbeat import Heartbeat
from stepmark.measuring.job import Job

_POLL_S = 0.05
_ALIVE_S = 2.0
_MAX_PENDING = 128  # connections that have not proved to have the key; a thread waits for each
_MAX_STRANGERS = 10
_DIAGNOSIS_S = 5.0  # what an agent needs, and the way there and back
_KILL_S = 12.0
_INTERRUPTED_S = 3.0  # others get the signal, too
_END_S = 30.0  # for agents that are still importing when the leader ends


class JoinInterrupted(Exception):  # noqa: N818, no error
    """A signal came while hosts were joining."""


class LostHostError(StepmarkError):
    """Hosts of the job that are missing or lost; finished cases are kept."""

    exit_code = 3


@cache
def leader() -> "Leader | None":
    """Return the leader of this job; None outside of a job of several hosts."""
    job = jobs.current()
    return Leader(job) if job is not None and job.num_hosts > 1 and job.leads else None


class RemoteRanks:
    """Ranks of another host, as its agent last reported them."""

    def __init__(self, channel: Channel, name: str, start: Start) -> None:
        self.name = name
        self.numbers = range(start.first_rank, start.first_rank + start.count)
        self.beats: dict[int, Heartbeat] = {}
        self._channel = channel
        self._generation = start.generation
        self._state: State | None = None
        self._diagnosis: Diagnosis | None = None
        self._killed: Killed | None = None
        self._wait_until_s = 0.0
        channel.send(start)

    @property
    def lost(self) -> str:
        return self._channel.lost

    def poll(self) -> None:
        while self._channel.inbox:
            message = self._channel.inbox.popleft()
            if getattr(message, "generation", None) != self._generation:
                continue  # of earlier ranks
            match message:
                case State():
                    # Deadlines on our clock; the message's way here makes them later.
                    shift_s = time.monotonic() - message.now_s
                    self._state = message
                    self.beats = {beat.rank: _shifted(beat, shift_s) for beat in message.beats}
                case Diagnosis():
                    self._diagnosis = message
                case Killed():
                    self._killed = message
        self._channel.poll()

    def pid(self, rank: int) -> int:
        return self._state.pids[rank] if self._state else 0

    def return_code(self, rank: int) -> int | None:
        return self._state.codes.get(rank) if self._state else None

    def state(self, rank: int) -> str:
        return self._state.states.get(rank, "") if self._state else ""

    def send(self, number: int, ranks: Iterable[int]) -> None:
        self._channel.send(SendSignal(number, tuple(ranks)))

    def begin_diagnosis(self, ranks: Sequence[int]) -> None:
        self._channel.send(Diagnose(tuple(ranks)))
        self._wait_until_s = time.monotonic() + _DIAGNOSIS_S

    def diagnosis(self, ranks: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        self._wait(lambda: self._diagnosis is not None)
        answer = self._diagnosis
        return (answer.stacks, answer.flight) if answer else ({}, {})

    def begin_kill(self) -> None:
        self._channel.send(Kill())
        self._wait_until_s = time.monotonic() + _KILL_S

    def kill(self) -> list[int]:
        self._wait(lambda: self._killed is not None)
        return list(self._killed.survivors) if self._killed else []

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for an answer. The time limit runs for all hosts at once, from the request."""
        self.poll()
        while not is_done() and not self.lost and time.monotonic() < self._wait_until_s:
            time.sleep(_POLL_S)
            self.poll()


def _shifted(beat: Heartbeat, shift_s: float) -> Heartbeat:
    return replace(
        beat,
        since_s=beat.since_s + shift_s,
        deadline_s=None if beat.deadline_s is None else beat.deadline_s + shift_s,
    )


class Leader:
    """The agent of the first host: it waits for the others, and has them start ranks."""

    def __init__(self, job: Job) -> None:
        """Listen for agents, which join in the background. Raises ConfigError."""
        self.job = job
        self.environment: dict[str, str] = {}  # what ranks of this host need
        self._began_s = time.monotonic()
        self._channels: dict[int, Channel] = {}
        self._generation = 0
        self._remote: list[RemoteRanks] = []
        self._problem: ConfigError | None = None
        self._pending: dict[socket.socket, str] = {}  # addresses, the oldest connection first
        self._strangers: set[str] = set()  # addresses that did not know the key
        self._ended = threading.Event()
        self._listener = jobs.listen(job.port)
        threading.Thread(target=self._accept, name="join", daemon=True).start()
        threading.Thread(target=self._keep_alive, name="alive", daemon=True).start()

    @property
    def interrupted(self) -> int | None:
        return next(
            (c.interrupted for c in list(self._channels.values()) if c.interrupted), None
        )

    def wait_for_all(self, signals: Sequence[int]) -> None:
        """Wait until every host has joined.

        Raises LostHostError, ConfigError, and JoinInterrupted once there is a signal.
        """
        end_s = self._began_s + self.job.join_s
        while (missing := self._missing()) or self._problem:
            if signals or self.interrupted:
                raise JoinInterrupted
            if self._problem:
                raise self._problem
            if time.monotonic() > end_s:
                names = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
                count = f"{len(missing)} of {self.job.num_hosts} hosts"
                text = f"{count} did not join within {self.job.join_s:.0f} s: {names}"
                if self._strangers:
                    text += f"; another {jobs.KEY} has {', '.join(sorted(self._strangers))}"
                raise LostHostError(text)
            time.sleep(_POLL_S)
        for rank, channel in self._channels.items():
            if channel.lost:
                raise LostHostError(f"host {self.job.hosts[rank]} is lost: {channel.lost}")
        if self._generation:
            return  # not for the first ranks
        address = next(iter(self._channels.values())).own_address
        self.environment = jobs.network_environment(address, self.job.hosts[0])

    def start(
        self,
        entry: str,
        plan: Path,
        arguments: Sequence[str],
        *,
        per_host: int,
        first: int,
        store_port: int,
    ) -> list[RemoteRanks]:
        """Have all other agents start their ranks, which meet at a store of this host."""
        self._generation += 1
        text = plan.read_text(encoding="utf-8")
        self._remote = []
        for host in range(1, self.job.num_hosts):
            start = Start(
                generation=self._generation,
                entry=entry,
                arguments=tuple(arguments),
                plan=text,
                first_rank=host * per_host,
                count=per_host,
                world_size=per_host * self.job.num_hosts,
                first=first,
                store_port=store_port,
            )
            self._remote.append(RemoteRanks(self._channels[host], self.job.hosts[host], start))
        return self._remote

    def end(self, code: int) -> None:
        """Tell all agents that the job has ended, those too that join now."""
        limit_s = _INTERRUPTED_S if code in (130, 143) else _END_S
        join_s = self._began_s + self.job.join_s - time.monotonic()
        with catching() as signals:
            wait_until(lambda: signals or not self._missing(), min(limit_s, join_s))
            self._ended.set()
            for channel in list(self._channels.values()):
                channel.send(End(code))
            self._listener.close()

    def _missing(self) -> list[str]:
        return [
            name
            for host, name in enumerate(self.job.hosts)
            if host and host not in self._channels
        ]

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connected, name = self._listener.accept()
            except OSError:  # closed, or one connection failed
                time.sleep(_POLL_S)
                continue
            self._pending[connected] = str(name[0]).removeprefix("::ffff:")
            if len(self._pending) > _MAX_PENDING:
                self._drop_pending()
            try:
                threading.Thread(target=self._add, args=(connected,), daemon=True).start()
            except RuntimeError:  # no more threads; an agent connects again
                self._pending.pop(connected, None)
                connected.close()

    def _drop_pending(self) -> None:
        """Close a connection of the address that has most of them.

        An agent needs milliseconds to authenticate, so the oldest is most likely none.
        """
        pending = dict(self._pending)
        counts = Counter(pending.values())
        oldest = max(pending, key=lambda connected: counts[pending[connected]])
        if self._pending.pop(oldest, None):
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # ends the thread that reads it

    def _add(self, connected: socket.socket) -> None:
        """Add the agent that has connected; refuse whatever does not have the key."""
        address = self._pending.get(connected, "")
        try:
            channel = Channel(connected, self.job)
        except ForgedError:
            if len(self._strangers) < _MAX_STRANGERS:
                self._strangers.add(address)
            return
        except (OSError, EOFError, RuntimeError):  # also: no more threads
            return
        finally:
            is_pending = self._pending.pop(connected, None)
        if not is_pending:  # dropped while it authenticated
            channel.close()
            return
        channel.send(Alive())  # the agent has joined
        host = channel.other.host_rank
        if 0 < host < self.job.num_hosts and host not in self._channels:
            self._problem = self._problem or channel.version_error()
            self._channels[host] = channel
            return
        channel.close()

    def _keep_alive(self) -> None:
        while not self._ended.wait(_ALIVE_S):
            for channel in list(self._channels.values()):
                if not channel.lost:
                    channel.send(Alive())
