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
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from stepmark.cases.record import Environment, Measured, Record, RunInfo
from stepmark.ground import files
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.read_text import open_file
from stepmark.ground.stats import slowest_per_sample
from stepmark.store import codec, reader

MAX_SAMPLES_IN_LINE = 4096

# A network file system that is lost for a while reports these, if it does not block.
_MAY_RETURN = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)
_LOST_S = 90.0
_RETRY_S = 1.0
TRACES = "traces"  # folder of a run

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
        self._torn_at: int | None = None  # where a line begins that could not be removed
        fd = os.open(path / reader.RECORDS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        super().__init__(fd, "run", path, "a run that no other process writes")

    @classmethod
    def begin(cls, path: Path, info: RunInfo) -> "RunWriter":
        """Write to a folder that exists, e.g. one with a plan and no run.json yet."""
        with _config_errors("out", path), contextlib.ExitStack() as on_error:
            writer = on_error.enter_context(cls(path))
            _write_run(path, info)
            on_error.pop_all()
        return writer

    @classmethod
    def resume(
        cls, path: Path, environment: Environment, *, force: bool = False
    ) -> tuple["RunWriter", set[Done]]:
        """Return the writer, and the cases and launches whose last record is Measured."""
        info = reader.read_info(path)
        old = _fingerprint(info.environment)
        new = _fingerprint(environment)
        changes = [(name, old[name], new[name]) for name in old if old[name] != new[name]]
        if changes and not force:
            field, before, now = changes[0]
            allowed = f"it was {before!r} in run {info.run_id}; use --force to resume anyway"
            raise ConfigError(field, now, allowed)
        writer, done = cls.reopen(path)
        if changes:
            with _config_errors("resume", path), contextlib.ExitStack() as on_error:
                on_error.enter_context(writer)
                # Noted in the settings, because a forced resume mixes environments.
                texts = [f"{name}: {before} -> {now}" for name, before, now in changes]
                earlier = info.settings.get("forced_resume")
                forced = "; ".join([earlier, *texts] if earlier else texts)
                settings = {**info.settings, "forced_resume": forced}
                _write_run(path, dataclasses.replace(info, settings=settings))
                on_error.pop_all()
        return writer, done

    @classmethod
    def reopen(cls, path: Path) -> tuple["RunWriter", set[Done]]:
        """As `resume`, where nothing can have changed: for the next ranks of the same run."""
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


def _fingerprint(environment: Environment) -> dict[str, str]:
    devices = environment.devices
    return {
        "device": _counted(device.name for device in devices),
        "ranks per host": str(sorted(Counter(device.host for device in devices).values())),
        "torch": environment.torch,
        "driver": environment.versions.get("driver", "unknown"),
        "power limit": _counted(f"{device.power_limit_w} W" for device in devices),
        "stepmark commit": environment.git_commit or f"version {environment.stepmark}",
    }


def _counted(names: Iterable[str]) -> str:
    """Return e.g. "2 x a, 1 x b" for a, a, b."""
    counts = Counter(names)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _write_run(path: Path, info: RunInfo) -> None:
    with files.replaced(path / reader.RUN) as stream:
        stream.write(codec.encode_run(info))


@contextlib.contextmanager
def _config_errors(field: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one line about the folder that was asked for."""
    try:
        yield
    except OSError as error:
        raise ConfigError(field, path, f"a usable folder ({error.strerror or error})") from None
