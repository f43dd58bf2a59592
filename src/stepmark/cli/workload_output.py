"""Workloads to files: one, or a folder of one per rank or stage, that appear whole or not."""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stepmark.cli.options import Values
from stepmark.cli.workload_files import AICB_FILLER, timed
from stepmark.core.errors import ConfigError
from stepmark.core.workload import ComputeOp, Workload
from stepmark.store.files import is_special, written
from stepmark.workload.formats import FORMATS, Format, find_format


def deliver(workload: Workload, values: Values) -> None:
    """Write it in the format asked for, and say on stderr what that format cannot carry."""
    name = find_format(values.get("to") or "native", to=True)
    kind = FORMATS[name]
    target = values.get("out") or "-"
    picked = _picked(workload, values, kind)
    is_folder = target != "-" and (target.endswith("/") or Path(target).is_dir())
    if is_folder and (not kind.picks or name in workload.origin):
        raise ConfigError("out", target, f"a file: all of this workload is one in {name}")
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
    if is_folder and kind.picks == "rank":
        one = None if values.get("rank") is None else picked["rank"]
        files = module.files(workload, None if one is None else [one])
        _write_folder(files, Path(target), kind, workload.world_size if one is not None else 0)
    elif is_folder:
        asked = _asked_stage(values) is not None or values.get("rank") is not None
        stages = [picked["stage"]] if asked else list(range(len(workload.stages)))
        files = (
            (f"stage{stage}{kind.suffix}", module.write(workload, stage=stage))
            for stage in stages
        )
        _write_folder(files, Path(target), kind, len(workload.stages) if asked else 0)
    else:
        _write_file(workload, module, picked, target)


def _write_file(workload: Workload, module: Any, picked: dict[str, int], target: str) -> None:
    """One file, and beside it what is needed to read it."""
    if target != "-" and hasattr(module, "beside") and not is_special(Path(target)):
        for path, chunks in module.beside(workload, Path(target), **picked):
            _write_beside(path, b"".join(_bytes(chunks)))
    size = write_chunks(_chunks(module, workload, picked), target)
    if target != "-":
        held = "".join(f", {what} {number} alone" for what, number in picked.items())
        held = held if len(workload.stages) > 1 else ""
        sys.stderr.write(f"wrote {target}: {size:,} bytes{held}\n")


def _write_beside(path: Path, data: bytes) -> int:
    """Never over another's: a file of that name may be of the workload beside it."""
    try:
        if path.exists() and path.read_bytes() != data:
            allowed = f"a folder without {path.name} of another workload"
            raise ConfigError("out", path.parent, allowed)
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError("out", path, allowed) from None
    return write_chunks(iter((data,)), str(path))


def _write_folder(
    files: Iterable[tuple[str, Iterable[str | bytes]]],
    folder: Path,
    kind: Format,
    number: int,
) -> None:
    """A file per rank or stage, and what goes with them.

    number: only some of so many are written, the others may be there; 0: all are.
    """
    given = list(files)
    _refuse_others(folder, kind, {name for name, _ in given}, number)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", folder, f"a folder ({error.strerror})") from None
    size = 0
    for name, chunks in given:
        if number and not _OF_ONE.fullmatch(name):  # of all ranks, also of those that stay
            size += _write_beside(folder / name, b"".join(_bytes(chunks)))
        else:
            size += write_chunks(_bytes(chunks), str(folder / name))
    count = f"{len(given)} file{'s' if len(given) != 1 else ''}"
    sys.stderr.write(f"wrote {folder}: {count}, {size:,} bytes\n")


def _refuse_others(folder: Path, kind: Format, names: set[str], number: int) -> None:
    """Files that stay and would be read as a part of what is written."""
    stay = {one.name for pattern in kind.takes for one in folder.glob(pattern)} - names
    for name in names if number else ():
        if of_one := _OF_ONE.fullmatch(name):
            stay -= {f"{of_one[1]}{one}{of_one[2]}" for one in range(number)}
    if stay:
        more = f" and {len(stay) - 1} more" if len(stay) > 1 else ""
        allowed = f"a new or empty folder: it holds {min(stay, key=_in_order)}{more}, "
        raise ConfigError("out", folder, allowed + "which would be taken as of this workload")


_OF_ONE = re.compile(r"(.*?)\d+(\.\w+)")  # the file of a rank or stage


def _in_order(name: str) -> tuple[int, str]:
    """9.json before 10.json."""
    return len(name), name


def _say_unused(values: Values, name: str, kind: Format) -> None:
    """--stage and --rank change nothing where all are written."""
    for flag in () if kind.picks else (*_stage_flags(values), "rank"):
        if values.get(flag) not in (None, -1):
            which = "ranks" if flag == "rank" else "stages"
            sys.stderr.write(f"# --{_shown(flag)}: no effect: {name} holds all {which}\n")


# Of generate, AICB's name and ours; --stage of show and convert.
_STAGES = ("pp_rank", "pipeline_stage", "stage")


def _stage_flags(values: Values) -> tuple[str, ...]:
    return _STAGES[:2] if "pp_rank" in values else _STAGES  # --stage may be ZeRO's there


def _shown(flag: str) -> str:
    return "stage" if flag == "pipeline_stage" else flag.replace("_", "-")


def _asked_stage(values: Values) -> tuple[str, int] | None:
    """The flag that says it, and what; of --pp-rank -1 is AICB's default and says nothing.

    Raises ConfigError where two say different things.
    """
    given = {
        name: int(values[name])
        for name in _stage_flags(values)
        if values.get(name) is not None and (name, values[name]) != ("pp_rank", -1)
    }
    if len(set(given.values())) > 1:
        raise ConfigError("stage", values["pipeline_stage"], "what --pp-rank says, or one flag")
    return next(iter(given.items()), None)


def pipeline_stage(workload: Workload, values: Values) -> int:
    """--stage, or of generate --pp-rank, too; 0 unless given. Raises ConfigError."""
    name, stage = _asked_stage(values) or ("stage", 0)
    if not 0 <= stage < len(workload.stages):
        raise ConfigError(_shown(name), stage, f"from 0 to {len(workload.stages) - 1}")
    return stage


def _picked(workload: Workload, values: Values, kind: Format) -> dict[str, int]:
    """Which stage or rank a format of one holds."""
    if not kind.picks:
        return {}
    stage, rank = pipeline_stage(workload, values), values.get("rank")
    size = workload.world_size // len(workload.stages)
    if rank is not None:
        if not 0 <= rank < workload.world_size:
            raise ConfigError("rank", rank, f"from 0 to {workload.world_size - 1}")
        if _asked_stage(values) is not None and workload.stage_of(rank) != stage:
            allowed = f"one of stage {stage}: {stage * size} to {(stage + 1) * size - 1}"
            raise ConfigError("rank", rank, allowed)
        stage = workload.stage_of(rank)
    if kind.picks == "stage":
        return {"stage": stage}
    return {"rank": stage * size if rank is None else rank}


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
    """Write to a file or to stdout ("-"); return the number of bytes."""
    size = 0
    with written(target, "out") as stream:
        for chunk in chunks:
            size += len(chunk)
            stream.write(chunk)
    return size
