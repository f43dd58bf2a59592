"""Runs on disk: runs/<run_id>/{run.json, records.jsonl, samples/*.npy}. Append only.

A line is written when its newline is: a last line without one was cut off by a kill, is not
read, and is removed when the run is resumed.
"""

import contextlib
import dataclasses
import errno
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from stepmark.cases.record import Environment, Measured, Record, RunInfo
from stepmark.ground import files
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.read_text import open_file
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import counts_text
from stepmark.store import codec, reader

MAX_SAMPLES_IN_LINE = 4096

# A network file system that is lost for a while reports these, if it does not block.
_MAY_RETURN = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)
_LOST_S = 90.0
_RETRY_S = 1.0
TRACES = "traces"  # folder of a run

# Variables that change no measurement: they describe a job, or name a place that is written to.
_JOB = ("SLURM_", "STEPMARK_")
_PLACES = frozenset(
    (
        *("NCCL_DEBUG_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_TOPO_DUMP_FILE"),
        *("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    )
)

# case_id and launch
Done = tuple[str, int]


class StoreError(StepmarkError):
    """A finished case could not be written. What was written before is kept."""

    exit_code = 3


def new_run_id(now: datetime) -> str:
    """Return e.g. 20261120-221300-ab12, in UTC; ids sort by time, also within a second."""
    part = now.microsecond * 0x10000 // 1_000_000
    return f"{now.astimezone(UTC):%Y%m%d-%H%M%S}-{part:04x}"


class RunWriter(files.Lock):
    """Writer of a run by one process, which locks records.jsonl until it is closed."""

    def __init__(self, path: Path) -> None:
        """Use `begin`, `resume` or `reopen`."""
        self.path = path
        self._differs: tuple[str, ...] = ()  # what is measured now, from the run's environment
        self._torn_at: int | None = None  # where a line begins that could not be removed
        fd = os.open(path / reader.RECORDS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        super().__init__(fd, "run", path, "a run that no other process writes")

    @classmethod
    def begin(cls, path: Path, info: RunInfo) -> "RunWriter":
        """Write to a folder that exists, e.g. one with a plan and no run.json yet."""
        with _config_errors("out", path), contextlib.ExitStack() as on_error:
            writer = on_error.enter_context(cls(path))
            with files.replaced(path / reader.RUN) as stream:
                stream.write(codec.encode_run(info))
            on_error.pop_all()
        return writer

    @classmethod
    def resume(
        cls, path: Path, environment: Environment, *, force: bool = False
    ) -> tuple["RunWriter", set[Done]]:
        """Return the writer, and the cases and launches whose last record is Measured.

        With `force` the environment may differ from the run's: what is measured then says how.
        """
        info = reader.read_info(path)
        changes = differences(info.environment, environment)
        if changes and not force:
            field, *others = changes
            before, now = changes[field]
            more = f", and {', '.join(others)} changed" if others else ""
            allowed = (
                f"it was {before!r} in run {info.run_id}{more}; use --force to resume anyway"
            )
            raise ConfigError(field, now, allowed)
        writer, done = cls.reopen(path)
        writer._differs = difference_texts(changes)
        return writer, done

    @classmethod
    def reopen(cls, path: Path) -> tuple["RunWriter", set[Done]]:
        """As `resume`, to record what was not measured: that cases failed."""
        with _config_errors("resume", path), contextlib.ExitStack() as on_error:
            writer = on_error.enter_context(cls(path))
            file = path / reader.RECORDS
            with open_file(file, "resume") as stream:
                text = stream.read()
            end = text.rfind(b"\n") + 1
            if end < len(text):
                with file.open("rb+") as stream:
                    stream.truncate(end)
                    os.fsync(stream.fileno())
            records = reader.latest(reader.read_records(path))
            on_error.pop_all()
        return writer, {(r.case.case_id, r.launch) for r in records if _is_done(r)}

    def append(self, record: Record) -> None:
        """Write a record to disk. Raises StoreError, and then leaves whole lines only.

        A file system that is lost may come back: it is tried again for 90 s.
        """
        if isinstance(record, Measured) and self._differs:
            record = dataclasses.replace(record, differs=self._differs)
        end_s = time.monotonic() + _LOST_S
        while True:
            try:
                whole = (
                    self._samples_to_file(record) if isinstance(record, Measured) else record
                )
                self._write_line(codec.encode(whole))
            except OSError as error:
                if error.errno in _MAY_RETURN and time.monotonic() < end_s:
                    time.sleep(_RETRY_S)
                    continue
                reason = error.strerror or error
                raise StoreError(f"{self.path}: {reason}; record not written") from error
            return

    def _write_line(self, line: bytes) -> None:
        if self._torn_at is not None:
            os.ftruncate(self._fd, self._torn_at)
            self._torn_at = None
        end = os.fstat(self._fd).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            self._torn_at = end
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
                self._torn_at = None
            raise

    def _samples_to_file(self, record: Measured) -> Measured:
        """Move many samples to a file; the record then has their maxima over ranks."""
        seconds = record.samples.seconds
        if sum(map(len, seconds)) <= MAX_SAMPLES_IN_LINE:
            return record
        import numpy as np  # noqa: PLC0415

        launch = f"-{record.launch}" if record.launch > 1 else ""
        name = f"samples/{record.case.case_id[:16]}{launch}.npy"
        (self.path / "samples").mkdir(exist_ok=True)
        with files.replaced(self.path / name) as stream:
            np.save(stream, np.asarray(seconds, dtype=np.float64), allow_pickle=False)
        maxima = (tuple(slowest_per_sample(seconds)),)
        samples = dataclasses.replace(record.samples, seconds=maxima, file=name)
        return dataclasses.replace(record, samples=samples)


def _is_done(record: Record) -> bool:
    """Return whether a case is measured, and not cut short by Ctrl-C as training may be."""
    training = record.training if isinstance(record, Measured) else None
    return isinstance(record, Measured) and not (training and training.interrupted)


def differences(before: Environment, now: Environment) -> dict[str, tuple[str, str]]:
    """Return what changes a measurement and differs, by its name: its value before and now."""
    old = _fingerprint(before)
    new = _fingerprint(now)
    pairs = {name: (old.get(name, "unset"), new.get(name, "unset")) for name in old | new}
    return {name: values for name, values in pairs.items() if values[0] != values[1]}


def difference_texts(changes: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{name}: {before} -> {now}" for name, (before, now) in changes.items())


def _fingerprint(environment: Environment) -> dict[str, str]:
    devices = environment.devices
    variables = {
        name: value
        for name, value in environment.variables.items()
        if name not in _PLACES and not name.startswith(_JOB)
    }
    return {
        "device": counts_text(device.name for device in devices) or "none",
        "ranks per host": str(sorted(Counter(device.host for device in devices).values())),
        "torch": environment.torch,
        **environment.versions,
        "power limit": counts_text(f"{device.power_limit_w} W" for device in devices) or "none",
        "clocks": ", ".join(
            dict.fromkeys(
                f"{clock_hz / 1e6:.0f} MHz"
                for device in devices
                for clock_hz in (device.max_sm_clock_hz, device.max_memory_clock_hz)
                if clock_hz is not None
            )
        ),
        "stepmark commit": environment.git_commit or f"version {environment.stepmark}",
        **variables,
    }


@contextlib.contextmanager
def _config_errors(field: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one line about the folder that was asked for."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, path, f"a usable folder ({error.strerror or error})") from None
