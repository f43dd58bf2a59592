"""Workloads to files: one, or a folder of one per rank or stage, that appear whole or not."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stepmark.cli.options import Values
from stepmark.cli.workload_files import AICB_FILLER, timed
from stepmark.core.errors import ConfigError
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.formats import FORMATS, Format, find_format


def deliver(workload: Workload, values: Values) -> None:
    """Write it in the format asked for, and say on stderr what that format cannot carry."""
    name = find_format(values.get("to") or "native", to=True)
    kind = FORMATS[name]
    target = values.get("out") or "-"
    picked = _picked(workload, values, kind)
    _say_unused(values, name, kind)
    if kind.needs_times and _lacks_times(workload):
        workload = timed(workload, AICB_FILLER)
        sys.stderr.write(
            f"# {name} needs times of computation: {AICB_FILLER} each, AICB's filler; "
            "--compute-from gives others\n"
        )
    module: Any = kind.load()
    for line in module.lost(workload):
        sys.stderr.write(f"# {name} cannot carry: {line}\n")
    if kind.first and (target.endswith("/") or Path(target).is_dir()):
        ranks = None if values.get("rank") is None else [picked["rank"]]
        _write_folder(module.files(workload, ranks), Path(target))
        return
    size = write_chunks(_chunks(module, workload, picked), target)
    if target != "-":
        held = "".join(f", {what} {number} alone" for what, number in picked.items())
        held = held if len(workload.stages) > 1 else ""
        sys.stderr.write(f"wrote {target}: {size:,} bytes{held}\n")


def _write_folder(files: Iterable[tuple[str, Iterable[str | bytes]]], folder: Path) -> None:
    """A file per rank, and what goes with them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", folder, f"a folder ({error.strerror})") from None
    count = size = 0
    for name, chunks in files:
        size += write_chunks(_bytes(chunks), str(folder / name))
        count += 1
    sys.stderr.write(f"wrote {folder}: {count} files, {size:,} bytes\n")


def _say_unused(values: Values, name: str, kind: Format) -> None:
    """--stage and --rank change nothing where all are written."""
    # The stage of generate is ZeRO's.
    for flag in ("pp_rank" if "pp_rank" in values else "stage", "rank"):
        used = kind.picks == "rank" or (kind.picks == "stage" and flag != "rank")
        if values.get(flag) not in (None, -1) and not used:
            which = "stages" if flag != "rank" else "ranks"
            said = f"{name} holds all {which}" if not kind.picks else f"{name} is of a stage"
            sys.stderr.write(f"# --{flag.replace('_', '-')}: no effect: {said}\n")


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
    return _bytes(module.write(workload, **picked))


def _bytes(chunks: Iterable[str | bytes]) -> Iterator[bytes]:
    return (chunk if isinstance(chunk, bytes) else chunk.encode() for chunk in chunks)


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
