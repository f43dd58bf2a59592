"""One set of ranks under a launcher, from its start to its end."""

import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepmark.launch import agent, letters, processes
from stepmark.launch.letters import Beat, Letters
from stepmark.launch.processes import Process
from stepmark.launch.torchrun import EXIT_FILE

_KILL_S = 10.0  # a driver may take seconds to tear a killed process down
# The launcher only starts ranks and hosts their store. If it watched them too, it would answer
# one death with SIGTERM to all and a wait of 30 s, and bury our message under its own; and as
# it reaps nobody, /proc tells how a rank ended, and no rank's pid is used again.
_NEVER_S = 1_000_000


class Crew:
    """The processes of one start and the folder in which they leave letters."""

    def __init__(
        self,
        arguments: Sequence[str],
        num_ranks: int,
        *,
        module: str,
        first: int = 0,
        run: Path | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.letters = Letters.new()
        folder = self.letters.folder
        self._mark = f"{letters.WATCH}={folder}"
        if run is not None:
            self.letters.leave(letters.RUN, str(run))
        options = [f"--monitor-interval={_NEVER_S}", f"--log-dir={folder / 'torchrun'}"]
        more = {
            letters.WATCH: str(folder),
            letters.FIRST: str(first),
            EXIT_FILE: str(folder / letters.EXIT),
        }
        self.started_s = time.monotonic()
        self.agent = agent.start(
            agent.command(arguments, num_ranks, module=module, options=options),
            agent.environment(num_ranks, more),
            death=signal.SIGKILL,
        )
        if seen := processes.look(self.agent.pid):
            self.letters.leave(letters.AGENT, f"{seen.pid} {seen.started}")
        self.beats: dict[int, Beat] = {}
        self.ranks: dict[int, Process] = {}  # as last seen; of a rank that is gone, before that
        self.gone: set[int] = set()
        self._unnamed: dict[int, Process] = {}  # children that were not seen to be a rank

    def look(self) -> None:
        """See what has happened since the last look."""
        self.beats = self.letters.beats(self.num_ranks)
        if len(self.ranks) < self.num_ranks:
            self._find_ranks()
        for rank, process in self.ranks.items():
            now = processes.look_again(process)
            if now is None:
                self.gone.add(rank)
            else:
                self.ranks[rank] = now

    def _find_ranks(self) -> None:
        """By their beats; before these, among the launcher's children."""
        known = {process.pid for process in self.ranks.values()}
        pids = {beat.pid: rank for rank, beat in self.beats.items()}
        for pid in {*processes.children(self.agent.pid), *pids} - known:
            process = processes.look(pid)
            words = processes.environment(pid)
            named = [word for word in words if word.startswith("RANK=")]
            if process is None:
                continue
            if self._mark in words and named:
                self.ranks[int(named[0].removeprefix("RANK="))] = process
            elif pid in pids:
                self.ranks[pids[pid]] = process
            elif process.ended:
                self._unnamed[pid] = process

    def is_over(self, rank: int) -> bool:
        return rank in self.gone or self.ranks[rank].ended

    def working(self) -> list[int]:
        """Ranks whose process lives."""
        return [rank for rank in self.ranks if not self.is_over(rank)]

    def stillborn(self) -> list[Process]:
        """Children of the launcher that failed before they could say which rank they are."""
        return [process for process in self._unnamed.values() if process.wait_status]

    @property
    def exit_code(self) -> int | None:
        """Rank 0's; None until it says."""
        return self.letters.read_number(letters.EXIT)

    @property
    def goes_on_at(self) -> int | None:
        return self.letters.read_number(letters.GO_ON)

    @property
    def run(self) -> Path | None:
        text = self.letters.read(letters.RUN)
        return Path(text) if text else None

    def send(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            processes.send(self.ranks[rank], number)

    def kill(self) -> list[Process]:
        """SIGKILL whatever this start brought up. Returns what survives that for 10 s."""
        end_s = time.monotonic() + _KILL_S
        hit = {one.pid: one for rank, one in self.ranks.items() if not self.is_over(rank)}
        while True:
            found = [one for one in processes.marked(self._mark) if not one.ended]
            for process in found:
                hit[process.pid] = process
                processes.send(process, signal.SIGKILL)
            self.agent.poll()  # reaps it
            left = [process for process in hit.values() if processes.is_alive(process)]
            if not (found or left) or time.monotonic() > end_s:
                return left
            time.sleep(0.02)
