"""How busy the host is, from /proc: its run queue, and the CPU time that a hypervisor took."""

import os
import statistics
import time
from pathlib import Path

from stepmark.cases.record import HostLoad

PROC = Path("/proc")
_PAUSES_S = (1e-3, 2e-3, 4e-3)


def num_runnable(proc: Path = PROC) -> int | None:
    """Return the host's runnable threads but for the one that asks; None if unknown."""
    try:
        count = int((proc / "loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return None
    return count - 1 if count > 0 else None  # some sandboxes print 0


def cpu_ticks(proc: Path = PROC) -> tuple[int, int] | None:
    """Return stolen and all ticks of all cores since boot; None if unknown."""
    try:
        with (proc / "stat").open() as file:
            name, *words = file.readline().split()
        ticks = list(map(int, words[:8]))  # user to steal; guests are part of user
    except (OSError, ValueError):
        return None
    return (ticks[7], sum(ticks)) if name == "cpu" and len(ticks) == 8 else None


def _settled(proc: Path) -> int | None:
    """Return the least of a few readings: threads of a warm-up may only just be ending."""
    counts = [num_runnable(proc)]
    for pause in _PAUSES_S:
        time.sleep(pause)
        counts.append(num_runnable(proc))
    return min((count for count in counts if count is not None), default=None)


class HostReadings:
    """Readings of one measurement: `HostReadings()` before it, `read()` meanwhile."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before, self._ticks = _settled(proc), cpu_ticks(proc)
        self._during: list[int] = []

    def read(self) -> None:
        if (count := num_runnable(self._proc)) is not None:
            self._during.append(count)

    def load(self, own_threads: int) -> HostLoad | None:
        """Return the load until now; None where /proc reports nothing."""
        runnable = statistics.median(self._during) if self._during else None
        steal = None
        if self._ticks and (ticks := cpu_ticks(self._proc)):
            stolen, total = (now - then for now, then in zip(ticks, self._ticks, strict=True))
            steal = stolen / total if total > 0 else None
        if self._before is None and runnable is None and steal is None:
            return None
        return HostLoad(
            num_cores=os.cpu_count() or 1,
            own_threads=own_threads,
            runnable_before=self._before,
            runnable=runnable,
            steal=steal,
        )
