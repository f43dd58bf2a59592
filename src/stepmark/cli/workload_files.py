"""Workloads from files and to files, in whichever format."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli.options import Values
from stepmark.core.case import Case
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Op
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.formats import FORMATS, Format, find_format, sniff

if TYPE_CHECKING:
    from stepmark.workload.durations import Measured, Profile

AICB_FILLER = "fixed:1ns"


def read(file: str) -> Workload:
    """The workload in a file, whatever its format. Raises ConfigError."""
    path = Path(file)
    found: Workload = FORMATS[sniff(path)].load().read(path)
    return found


def timed(workload: Workload, source: str | None) -> Workload:
    """With times of computation from --compute-from: several, comma-separated, in this order.

    Raises ConfigError, naming them, where operations are left without a time.
    """
    if source is None:
        return workload
    from stepmark.workload.durations import Named, fill, parse_source  # noqa: PLC0415

    found = [parse_source(word) for word in source.split(",")]
    opened = [_opened(one.text) if isinstance(one, Named) else one for one in found]
    return fill(workload, *opened)


def _opened(text: str) -> "Measured | Profile":
    """A profile of AIOB, or a run of stepmark."""
    path = Path(text)
    if path.is_file():
        from stepmark.workload.durations import Profile  # noqa: PLC0415
        from stepmark.workload.formats import aiob  # noqa: PLC0415

        # AICB takes the mean over iterations, too.
        sections = {name: part.avg_s for name, part in aiob.read(path).parts.items()}
        return Profile(sections=sections, name=f"AIOB profile {path.name}")
    return _of_run(text)


def _of_run(text: str) -> "Measured":
    """The median of the slowest rank, by operator; of several backends the fastest."""
    from stepmark.core.record import Measured as Record  # noqa: PLC0415
    from stepmark.core.stats import slowest_per_sample, summarize  # noqa: PLC0415
    from stepmark.store.runs import find_run, latest, read_records  # noqa: PLC0415
    from stepmark.workload.durations import Measured  # noqa: PLC0415

    path = find_run(Path("runs"), text)
    times: dict[Op, float] = {}
    for record in latest(read_records(path)):
        if not isinstance(record, Record) or not isinstance(record.case, Case):
            continue
        if record.num_wrong or not record.samples.seconds:
            continue
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        op = record.operator.op
        times[op] = min(time_s, times.get(op, time_s))
    return Measured(times=times, name=f"run {path.name}")


def deliver(workload: Workload, values: Values) -> None:
    """Write it in the format asked for, and say on stderr what that format cannot carry."""
    name = find_format(values.get("to") or "native", to=True)
    kind = FORMATS[name]
    target = values.get("out") or "-"
    picked = _picked(workload, values, kind)
    if kind.needs_times and _lacks_times(workload):
        workload = timed(workload, AICB_FILLER)
        sys.stderr.write(
            f"# {name} needs times of computation: {AICB_FILLER} each, AICB's filler; "
            "--compute-from gives others\n"
        )
    module: Any = kind.load()
    for line in module.lost(workload):
        sys.stderr.write(f"# {name} cannot carry: {line}\n")
    size = write_chunks(_chunks(module, workload, picked), target)
    if target != "-":
        held = "".join(f", {what} {number} alone" for what, number in picked.items())
        held = held if len(workload.stages) > 1 else ""
        sys.stderr.write(f"wrote {target}: {size:,} bytes{held}\n")


def pipeline_stage(workload: Workload, values: Values) -> int:
    """--stage, or of generate --pp-rank, whose -1 is AICB's default. Raises ConfigError."""
    name = "pp_rank" if "pp_rank" in values else "stage"
    asked = values.get(name)
    stage = 0 if asked is None or (asked == -1 and name == "pp_rank") else int(asked)
    if not 0 <= stage < len(workload.stages):
        field = name.replace("_", "-")
        raise ConfigError(field, stage, f"from 0 to {len(workload.stages) - 1}")
    return stage


def _picked(workload: Workload, values: Values, kind: Format) -> dict[str, int]:
    """Which stage or rank a format of one holds."""
    if not kind.picks:
        return {}
    stage = pipeline_stage(workload, values)
    if kind.picks == "stage":
        return {"stage": stage}
    rank = values.get("rank")
    if rank is None:
        rank = stage * workload.world_size // len(workload.stages)
    if not 0 <= rank < workload.world_size:
        raise ConfigError("rank", rank, f"from 0 to {workload.world_size - 1}")
    return {"rank": rank}


def _lacks_times(workload: Workload) -> bool:
    return any(
        isinstance(one, ComputeOp) and one.time_s is None
        for block in workload.blocks.values()
        for one in block
    )


def _chunks(module: Any, workload: Workload, picked: dict[str, int]) -> Iterable[bytes]:
    if hasattr(module, "encode"):
        return iter((module.encode(workload),))
    found = module.write(workload, **picked)
    return (chunk if isinstance(chunk, bytes) else chunk.encode() for chunk in found)


def write_chunks(chunks: Iterable[bytes], target: str) -> int:
    """To a file that appears whole or not at all, or to stdout; how many bytes it was."""
    if target == "-":
        sys.stdout.flush()
        return _pour(chunks, sys.stdout.buffer)
    path = Path(target)
    with _written_whole(path) as partial, partial.open("wb") as stream:
        return _pour(chunks, stream)


def _pour(chunks: Iterable[bytes], stream: Any) -> int:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        stream.write(chunk)
    stream.flush()
    return size


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` that becomes it; a device or a pipe is written as it is."""
    special = path.exists() and not path.is_file()
    partial = path if special else path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield partial
        if not special:
            partial.replace(path)
    except OSError as error:
        raise ConfigError(
            "out", path, f"a file that can be written ({error.strerror or error})"
        ) from None
    finally:
        if not special:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
