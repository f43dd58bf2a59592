"""The only reader of runs. It leaves out what cannot be read, counts it and reports it.

A record counts as damaged if its line is no record of a known schema, if its samples are
missing from their file, or if a sample is impossible: times of a call are finite and above 0,
and every rank has as many.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.cases.record import Environment, Measured, Record, RunInfo
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_npy, read_whole
from stepmark.store import codec
from stepmark.store.commands import command_of
from stepmark.store.sweeps import is_sweep

RUN = "run.json"
RECORDS = "records.jsonl"
PLAN = "plan.jsonl"
WATCHED = "watch.json"  # of a job under `watch`, in a folder that is no run
_MAX_DAMAGED = 10_000  # lines of a file; one with more is no file of records


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as far as it can be read."""

    path: Path
    info: RunInfo
    is_known: bool  # whether `info` is that of run.json
    records: list[Record]  # in the order written, samples as in their lines
    lines: list[bytes]  # of these records
    notes: tuple[str, ...]  # what could not be read, or was measured otherwise; sentences

    @property
    def latest(self) -> list[Record]:
        """Return the last record of each case and launch."""
        return latest(self.records)


def read(path: Path) -> Run:
    """Read a run. Raises ConfigError where the folder holds none."""
    if not is_run(path):
        raise ConfigError("run", path, f"a folder with {RUN}, {RECORDS} or {PLAN}")
    notes = []
    try:
        info = read_info(path)
        is_known = True
    except ConfigError as error:
        info = _unknown(path)
        is_known = False
        why = f"it has a plan and no {RUN}: nothing was measured yet"
        if (path / RUN).exists():
            why = f"{RUN} cannot be read ({error}); where it was measured is unknown"
        elif (path / RECORDS).exists():
            why = f"it has no {RUN}; where it was measured is unknown"
        notes.append(f"run {path.name}: {why}")
    records, lines, damaged = _read_lines(path)
    if damaged:
        count = f"{len(damaged)} of {len(damaged) + len(records)} records"
        notes.append(f"run {path.name}: {count} cannot be read and are left out; {damaged[0]}")
    notes += mixed_environments(path.name, latest(records))
    if notes:
        warnings = (*info.environment.warnings, *notes)
        environment = dataclasses.replace(info.environment, warnings=warnings)
        info = dataclasses.replace(info, environment=environment)
    return Run(
        path=path,
        info=info,
        is_known=is_known,
        records=records,
        lines=lines,
        notes=tuple(notes),
    )


def mixed_environments(name: str, records: Sequence[Record]) -> Iterator[str]:
    """Yield how many records were measured otherwise than the run began, and in what."""
    for differs, count in Counter(record.differs for record in records).items():
        if differs:
            what = f"{count} of {len(records)} records were measured in another environment"
            yield f"run {name}: {what} (resume --force): {'; '.join(differs)}"


def read_info(path: Path) -> RunInfo:
    """Read run.json. Raises ConfigError where it cannot be read."""
    return codec.decode_run(read_whole(path / RUN, "run"))


def read_records(path: Path) -> list[Record]:
    """Read the records of a run that has just been written."""
    return _read_lines(path)[0]


def with_all_samples(path: Path, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records with the samples of every rank, which may lie in files."""
    for record in records:
        if not isinstance(record, Measured) or not record.samples.file:
            yield record
            continue
        samples = dataclasses.replace(record.samples, seconds=_matrix(path, record))
        yield dataclasses.replace(record, samples=samples)


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of each case and launch, in the order of first appearance."""
    return list({(record.case.case_id, record.launch): record for record in records}.values())


def list_runs(root: Path) -> list[Path]:
    """Return run folders below `root`, at any depth, by name, which begins with the time."""
    if not root.is_dir():
        return []
    runs = []
    visited: set[str] = set()
    for folder, names, _ in os.walk(root, followlinks=True):
        path = Path(folder)
        if (real := os.path.realpath(path)) in visited:
            names.clear()
            continue
        visited.add(real)
        if path != root and is_run(path):
            runs.append(path)
            names.clear()
        names[:] = [name for name in names if not name.startswith(".")]
    return sorted(runs, key=lambda path: (path.name, path))


def find_run(root: Path, name: str) -> Path:
    """Find a run by its path, its id, the unique beginning of one, or "latest"."""
    for path in (Path(name), root / name):
        if name and is_run(path):
            return path
        if name and is_sweep(path):
            rule = f"it is a sweep: stepmark sweep --resume {path} shows its result; "
            raise ConfigError("run", name, f"{rule}its runs are in {path / 'runs'}")
        if name and os.path.isfile(path / WATCHED):  # False also for a name that is too long
            rule = (
                f"it is a watched job and no run: `stepmark logs {path}` reads its output and "
                f"logs, `stepmark trace breakdown {path}` its profile"
            )
            raise ConfigError("run", name, rule)
    runs = list_runs(root)
    if name == "latest":
        matches = runs[-1:]
    else:
        same = [path for path in runs if path.name == name]
        matches = same or [path for path in runs if name and path.name.startswith(name)]
    if not matches and Path(name).is_file():
        rule = (
            f"it is a file and no run: `stepmark logs {name}` reads logs and tables of "
            f"results, `stepmark trace breakdown {name}` profiler traces"
        )
        raise ConfigError("run", name, rule)
    if not matches:
        names = ", ".join(path.name for path in runs[-3:]) or "none"
        raise ConfigError(
            "run", name, f"a path, an id or 'latest'; in the folder {root}: {names}"
        )
    if len(matches) > 1:
        paths = ", ".join(str(path.relative_to(root)) for path in matches[:3])
        raise ConfigError("run", name, f"one run, not {len(matches)}: {paths}")
    return matches[0]


def is_run(path: Path) -> bool:
    """Whether a folder holds a run, with a result or without."""
    try:
        return any((path / name).is_file() for name in (RUN, RECORDS, PLAN))
    except (OSError, ValueError):  # too long a name; a NUL
        return False


def _unknown(path: Path) -> RunInfo:
    """Return the info that replaces an unreadable run.json; the run's notes mention it."""
    environment = Environment(
        host="unknown",
        os="unknown",
        kernel="unknown",
        cpu="unknown",
        python="unknown",
        torch="unknown",
        num_cores=0,
        memory_bytes=0,
        versions={},
        devices=(),
        git_commit="",
        stepmark="unknown",
        variables={},
    )
    return RunInfo(
        run_id=path.name, created_at="", command="", environment=environment, num_cases=0
    )


def _read_lines(path: Path) -> tuple[list[Record], list[bytes], list[str]]:
    """Return records, their lines, and a sentence for each line that is none."""
    file = path / RECORDS
    if not file.exists():
        return [], [], []
    try:
        text = read_whole(file, "run")
    except ConfigError as error:
        return [], [], [str(error)]
    *complete, rest = text.split(b"\n")
    records = []
    lines = []
    damaged: list[str] = []
    for number, line in enumerate(complete, 1):
        if len(damaged) > _MAX_DAMAGED:
            damaged[0] += f"; lines from {number} on are not read"
            damaged += [""] * (len(complete) - number + 1)
            break
        try:
            record = codec.decode(line)
            if wrong := _impossible(path, record):
                raise ConfigError("samples", command_of(record.case), wrong)
        except ConfigError as error:
            damaged.append(f"{RECORDS}:{number}: {error}")
        else:
            records.append(record)
            lines.append(line)
    if rest:
        damaged.append(f"{RECORDS}:{len(complete) + 1}: the last line was cut off")
    return records, lines, damaged


def _impossible(path: Path, record: Record) -> str:
    """Return what a record needs that this one lacks; "" if there is nothing."""
    if not isinstance(record, Measured):
        return ""
    seconds = record.samples.seconds
    arrivals = record.arrivals
    is_sound = _is_sound(seconds)
    if record.samples.file:
        try:
            seconds = _matrix(path, record)
        except ConfigError as error:
            return error.allowed
        is_sound &= _is_sound(seconds) and len(seconds[0]) == len(record.samples.seconds[0])
    if not is_sound:
        return "as many finite times above 0 from every rank"
    by_rank = (arrivals.late_s, arrivals.issue_s) if arrivals else ()
    if any(len(values) not in (0, len(seconds)) for values in by_rank):
        return f"a value of each of {len(seconds)} ranks"
    if record.training and record.training.cycle < 1:
        return "an optimizer step in 1 or more samples"
    batches = record.samples.batches
    is_whole = not batches or sum(batches) == len(seconds[0] if seconds else ())
    return "" if is_whole else f"the {sum(batches)} samples of its batches"


def _is_sound(seconds: Sequence[Sequence[float]]) -> bool:
    return len({len(values) for values in seconds}) <= 1 and all(
        math.isfinite(value) and value > 0 for values in seconds for value in values
    )


def _matrix(path: Path, record: Measured) -> tuple[tuple[float, ...], ...]:
    """Read seconds[rank][sample] from the file that a record names."""
    file = path / record.samples.file
    try:
        return tuple(tuple(map(float, row)) for row in read_npy(file, "samples"))
    except (ValueError, TypeError) as error:
        raise ConfigError("samples", file, f"a readable .npy ({error})") from None
