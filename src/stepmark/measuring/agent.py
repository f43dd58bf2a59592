"""The agent of a host that does not lead: it starts and watches ranks for the leader."""

import socket
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from stepmark.ground.errors import ConfigError
from stepmark.ground.signals import catching
from stepmark.measuring import job as jobs
from stepmark.measuring.channel import (
    Channel,
    Diagnose,
    Diagnosis,
    End,
    ForgedError,
    Interrupted,
    Kill,
    Killed,
    Message,
    SendSignal,
    Start,
    State,
)
from stepmark.measuring.job import Job
from stepmark.measuring.local_ranks import LocalRanks, Ranks, Store, command_of

_POLL_S = 0.05
_RETRY_S = 0.5
_CONNECT_S = 5.0
_MAX_FORGED = 3  # data that is altered on its way once does not end the agent
_STATE_S = 1.0  # a state is sent at each change, and this often


def serve(job: Job) -> int:
    """Start ranks for the leader until it ends the job. Returns its exit code.

    3: the leader is lost. 130, 143: a second signal; the first one is left to the leader. No
    rank outlives the call.
    """
    with catching() as signals, tempfile.TemporaryDirectory(prefix="stepmark-plan-") as folder:
        channel = _join(job, signals)
        if channel is None:
            return 128 + signals[0] if signals else 3
        agent = _Agent(job, channel, Path(folder))
        try:
            while agent.code is None and not channel.lost and len(signals) < 2:
                if len(signals) == 1 and not agent.is_interrupted:
                    agent.is_interrupted = True
                    channel.send(Interrupted(signals[0]))
                agent.step()
                time.sleep(_POLL_S)
            agent.step()  # the last message of a leader that has closed the connection
        except OSError as error:  # no space for the plan, no more processes
            _warn(job, f"ranks cannot be started: {error.strerror or error}")
            return 3
        finally:
            agent.kill()
        if agent.code is None and not signals:
            _warn(job, f"its leader {job.hosts[0]} is lost: {channel.lost}")
        if agent.code is None:
            return 128 + signals[0] if signals else 3
        return agent.code


def _join(job: Job, signals: list[int]) -> Channel | None:
    """Connect to the leader, which may start later. Returns None past the time limit."""
    end_s = time.monotonic() + job.join_s
    problem = ""
    num_forged = 0
    while not signals and time.monotonic() < end_s:
        try:
            connected = socket.create_connection((job.hosts[0], job.port), _CONNECT_S)
            channel = Channel(connected, job)
        except (OSError, EOFError, RuntimeError) as error:
            num_forged += isinstance(error, ForgedError)
            if num_forged == _MAX_FORGED:
                raise ConfigError(jobs.KEY, "given", "the same on all hosts of a job") from None
            problem = getattr(error, "strerror", None) or str(error) or "it closes connections"
            time.sleep(_RETRY_S)
            continue
        if version_error := channel.version_error():
            raise version_error
        return channel
    if not signals:
        where = f"{job.hosts[0]}, port {job.port}"
        _warn(job, f"no leader at {where} within {job.join_s:.0f} s ({problem})")
    return None


def _warn(job: Job, text: str) -> None:
    sys.stderr.write(f"stepmark: host {job.hosts[job.rank]}: {text}\n")
    sys.stderr.flush()


class _Agent:
    def __init__(self, job: Job, channel: Channel, folder: Path) -> None:
        self.code: int | None = None  # that ends the job
        self.is_interrupted = False
        self._job = job
        self._channel = channel
        self._folder = folder
        self._ranks: LocalRanks | None = None
        self._generation = 0
        self._last: State | None = None
        self._sent_s = 0.0
        self._environment = jobs.network_environment(channel.own_address, job.hosts[job.rank])

    def step(self) -> None:
        """Do what the leader asks for, and report the ranks' state."""
        while self._channel.inbox:
            self._handle(self._channel.inbox.popleft())
        self._channel.poll()
        if self._ranks is not None:
            self._report(self._ranks)

    def kill(self) -> None:
        if self._ranks is not None:
            survivors = self._ranks.kill()
            self._ranks = None
            self._channel.send(Killed(self._generation, tuple(survivors)))

    def _handle(self, message: Message) -> None:
        ranks = self._ranks
        match message:
            case Start():
                self.kill()
                plan = self._folder / "plan.jsonl"
                plan.write_text(message.plan, encoding="utf-8")
                self._generation = message.generation
                self._last = None
                end = message.first_rank + message.count
                self._ranks = LocalRanks(
                    command_of(message.entry, plan, message.arguments),
                    Ranks(
                        numbers=range(message.first_rank, end),
                        world_size=message.world_size,
                        first=message.first,
                    ),
                    Store(host=self._channel.other_address, port=message.store_port),
                    self._environment,
                )
            case End(code):
                self.code = code
            case Kill():
                self.kill()
            case SendSignal(number, numbers) if ranks is not None:
                ranks.send(number, numbers)
            case Diagnose(numbers) if ranks is not None:
                stacks, flight = ranks.diagnosis(numbers)
                self._channel.send(Diagnosis(self._generation, stacks, flight))

    def _report(self, ranks: LocalRanks) -> None:
        ranks.poll()
        codes = {rank: ranks.return_code(rank) for rank in ranks.numbers}
        state = State(
            generation=self._generation,
            now_s=0.0,
            beats=tuple(ranks.beats.values()),
            codes={rank: code for rank, code in codes.items() if code is not None},
            pids={rank: ranks.pid(rank) for rank in ranks.numbers},
            states={},
        )
        now_s = time.monotonic()
        if state == self._last and now_s < self._sent_s + _STATE_S:
            return
        self._last = state
        self._sent_s = now_s
        # What is compared has no time, so that equal states compare equal.
        self._channel.send(
            replace(
                state,
                now_s=time.monotonic(),
                states={rank: ranks.state(rank) for rank in ranks.numbers},
            )
        )
