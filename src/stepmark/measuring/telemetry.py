"""Clock, power, energy, temperature and throttle reasons while samples run.

The load of the host is from /proc: the run queue, and the CPU time that a hypervisor took.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from stepmark.cases.record import HostLoad, Telemetry
from stepmark.measuring import amd, nvidia
from stepmark.measuring.nvidia import IDLE, MHZ

GPU_INTERVAL_S = 0.02
# Reading the clocks of all cores holds the interpreter, which delays the timed work.
CPU_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 2.0
GLOO_THREADS = 3  # of a rank: two workers (ProcessGroupGloo's default) and its device's loop

# A driver's binding may raise these when a card disappears; the sampler then ends early.
LOST = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def open_gpu(index: int) -> amd.AmdGpu | nvidia.NvidiaGpu | None:
    """Return the card of a torch device index, or None where no library reports it."""
    return amd.find(index) if torch.version.hip else nvidia.find(index)


def cpu_reading() -> Telemetry:
    """Return the mean clock of the cores; empty in most containers."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        frequency = None
    if frequency is None or not frequency.current:
        return Telemetry()
    return Telemetry(sm_clock_hz=frequency.current * MHZ, num_readings=1)


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


class HostReadings:
    """Readings of one measurement: `HostReadings()` before it, `read()` meanwhile."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._during: list[int] = []
        counts = [num_runnable(proc)]
        for pause in _PAUSES_S:  # threads of a warm-up may only just be ending
            time.sleep(pause)
            counts.append(num_runnable(proc))
        self._before = min((count for count in counts if count is not None), default=None)
        self._ticks = cpu_ticks(proc)

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


class Sampler:
    """Reads one device from a daemon thread inside `with sampler:`.

    The thread only queries the management library: no torch call, no device sync. The last
    reading, after the work, gives the temperature and is in no median.
    """

    def __init__(
        self,
        device_index: int | None,
        *,
        read: Callable[[], Telemetry] | None = None,
        energy_j: Callable[[], float | None] = lambda: None,
        interval_s: float | None = None,
        more_threads: int = 0,
    ) -> None:
        """read and energy_j replace the device's own.

        more_threads: number of data loaders, or of threads of concurrent compute.
        """
        gpu = open_gpu(device_index) if device_index is not None and read is None else None
        on_cpu = device_index is None
        self._read = read or (gpu.reading if gpu else cpu_reading if on_cpu else Telemetry)
        self._energy_j = gpu.energy_j if gpu else energy_j
        self._interval_s = interval_s or (CPU_INTERVAL_S if on_cpu else GPU_INTERVAL_S)
        # GPU work has one thread per rank that issues it.
        self._own_threads = (torch.get_num_threads() if on_cpu else 1) + more_threads
        if on_cpu and dist.is_initialized():
            self._own_threads += GLOO_THREADS
        self._has_source = read is None
        self._readings: list[Telemetry] = []
        # (moment, energy) of the first reading, and of the first and the last change after it.
        self._energies: list[tuple[float, float]] = []
        self._host: HostReadings | None = None
        self._load: HostLoad | None = None
        self._after = Telemetry()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Sampler":
        assert self._thread is None, "a sampler runs once at a time"
        self._readings = []
        self._energies = []
        self._after = Telemetry()
        self._host = HostReadings() if self._has_source else None
        self._load = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._load = self._host.load(self._own_threads) if self._host else None
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)  # a hung driver must not hang the run
            self._thread = None

    def _run(self) -> None:
        stop = self._stop
        host = self._host
        try:
            while True:
                readings, energies = self._readings, self._energies  # `forget` replaces them
                if host is not None:
                    host.read()
                # What the counter shows between two changes is out of date.
                energy_j = self._energy_j()
                if energy_j is not None and (not energies or energies[-1][1] != energy_j):
                    energies[2:] = [(time.monotonic(), energy_j)]
                reading = self._read()
                if reading.num_readings:
                    readings.append(reading)
                if stop.wait(self._interval_s):
                    break
            self._after = self._read()
        except LOST:
            return

    def is_limited(self) -> bool:
        """Return whether anything has slowed the device since `with` or `forget`."""
        return any(word != IDLE for reading in self._readings for word in reading.throttle)

    def forget(self) -> None:
        """Leave out what was read until now."""
        self._readings = []
        self._energies = []

    def temperature_c(self) -> float | None:
        """Return the device's temperature of this moment; None where it is not known."""
        try:
            return self._read().temperature_c
        except LOST:
            return None

    def telemetry(self) -> Telemetry:
        """Return the state during the last `with` block, with all throttle reasons seen."""
        readings = tuple(self._readings)
        energies = self._energies
        clocks = [r.sm_clock_hz for r in readings if r.sm_clock_hz is not None]
        powers = [r.power_w for r in readings if r.power_w is not None]
        span_s = None
        energy_j = None
        if len(energies) > 2:
            span_s, energy_j = (b - a for a, b in zip(energies[1], energies[2], strict=True))
        return Telemetry(
            sm_clock_hz=statistics.median(clocks) if clocks else None,
            mean_clock_hz=statistics.fmean(clocks) if clocks else None,
            power_w=statistics.median(powers) if powers else None,
            temperature_c=self._after.temperature_c,
            throttle=tuple(sorted({w for r in readings for w in r.throttle} - {IDLE})),
            num_readings=len(readings),
            energy_j=energy_j,
            span_s=span_s,
            host=self._load,
        )
