"""Workloads from files and to files, in whichever format."""

import contextlib
import errno
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import is_special, written
from stepmark.ground.read_text import open_file
from stepmark.model.ops import Op
from stepmark.step.workload import ComputeOp, Workload
from stepmark.tables.export import is_folder
from stepmark.workloads.formats import FORMATS, Format, find_format, sniff
from stepmark.workloads.formats.loss import losses

AICB_FILLER = "fixed:1ns"
_MOST_BYTES = 2**30  # as of other files
_OTHER_TOOLS = ("simai", "aicb", "param-trace", "chakra")  # rules of their files


def read(
    file: str,
    group_sizes: str | None = None,
    world_size: int | None = None,
    *,
    starts: bool = False,
) -> Workload:
    """Read a workload in any format; "-" is stdin. Raises ConfigError.

    group_sizes (AICB) and world_size (SimAI): facts that such files lack. starts: keep the
    start times of operations, where the format has some (ours always does).
    """
    with _to_read_twice(file) as path:
        kind = sniff(path)
        more: dict[str, object] = {"starts": True} if starts and kind == "param" else {}
        for name, value, of in (
            ("group_sizes", group_sizes, "aicb"),
            ("world_size", world_size, "simai"),
        ):
            if value is None:
                continue
            if kind != of:
                field = name.replace("_", "-")
                raise ConfigError(field, value, f"it has no effect on a file of format {kind}")
            more[name] = _group_sizes(value) if isinstance(value, str) else value
        workload: Workload = FORMATS[kind].load().read(path, **more)
    return workload


def read_notes(workload: Workload) -> tuple[str, ...]:
    """Return the notes that a reader of another tool's file made."""
    return workload.notes if workload.rules in _OTHER_TOOLS else ()


@contextlib.contextmanager
def _to_read_twice(file: str) -> Iterator[Path]:
    """Yield the file, or a copy of stdin or a pipe, which can be read only once."""
    path = Path(file)
    if file != "-" and (not path.exists() or path.is_file() or path.is_dir()):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / ("stdin" if file == "-" else path.name)
        _copy(file, copy)
        try:
            yield copy
        except ConfigError as error:
            texts = (error.field, error.value, error.allowed)
            raise ConfigError(*(text.replace(str(copy), file) for text in texts)) from None


def _copy(file: str, copy: Path) -> None:
    size = 0
    try:
        if file == "-" and sys.stdin is None:
            raise OSError(errno.EBADF, "it is closed")
        stdin = contextlib.nullcontext(sys.stdin.buffer) if file == "-" else None
        with stdin or open_file(Path(file), "workload") as source, copy.open("wb") as stream:
            while chunk := source.read(2**20):
                size += len(chunk)
                if size > _MOST_BYTES:
                    allowed = f"at most {_MOST_BYTES} bytes"
                    raise ConfigError("workload", file, allowed)
                stream.write(chunk)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("workload", file, f"a file that can be read ({reason})") from None


def _group_sizes(text: str) -> dict[str, int]:
    """Read groups and their ranks such as ep=16,tp=2. Raises ConfigError."""
    sizes = {}
    for word in text.split(","):
        name, is_, size = word.partition("=")
        if not is_ or not size.isdecimal() or not 1 <= len(size) <= 7 or not int(size):
            raise ConfigError("group-sizes", text, "groups and their ranks, e.g. ep=16,tp=2")
        sizes[name.strip().removesuffix("_group")] = int(size)
    return sizes


def timed(workload: Workload, source: str | None) -> Workload:
    """Add the times of computation of --compute-from, if it is given."""
    if source is None:
        return workload
    from stepmark.workloads import workload_times  # noqa: PLC0415 - 60 ms

    return workload_times.timed(workload, source)


StageFlag = tuple[str, int]  # the flag that selects a pipeline stage, and the stage


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a workload is written, and the part of it where a format holds only one."""

    to: str | None = None
    out: str | None = None
    rank: int | None = None
    stage: StageFlag | None = None


def check(workload: Workload, target: Target) -> tuple[str, dict[str, int]]:
    """Return the name of the format, and the stage or rank to write in one that holds one.

    Raises ConfigError for what cannot be written.
    """
    name = find_format(target.to or "native", to=True)
    kind = FORMATS[name]
    out = target.out or "-"
    picked = _picked(workload, target, kind, is_whole=name in workload.origin)
    if out != "-" and is_folder(out) and not picked:
        raise ConfigError("out", out, f"a file: all of this workload is one in {name}")
    module: Any = kind.load()
    if hasattr(module, "check"):
        module.check(workload)
    return name, picked


def deliver(
    workload: Workload, target: Target, samples: Mapping[Op, Sequence[float]] | None = None
) -> None:
    """Write a workload, and print on stderr what its format cannot carry.

    samples: seconds of operators that were measured, for a format that carries them.
    """
    name, picked = check(workload, target)
    kind = FORMATS[name]
    out = target.out or "-"
    to_folder = out != "-" and is_folder(out)
    if not picked:
        flags = [(target.stage[0], "stages")] if target.stage else []
        flags += [("rank", "ranks")] if target.rank is not None else []
        for flag, which in flags:
            sys.stderr.write(f"# --{flag}: no effect: {name} holds all {which}\n")
    items = (item for block in workload.blocks.values() for item in block)
    if kind.needs_times and any(
        isinstance(item, ComputeOp) and item.time_s is None and not item.is_wait
        for item in items
    ):
        from stepmark.workloads import workload_times  # noqa: PLC0415 - 60 ms

        workload = workload_times.with_filler(workload)
        sys.stderr.write(
            f"# {name} needs times of computation: {AICB_FILLER} each, AICB's filler, for what "
            "has none; --compute-from gives others\n"
        )
    module: Any = kind.load()
    stages = list(range(len(workload.stages)))
    if picked and (target.stage or target.rank is not None or not to_folder):
        stages = [picked.get("stage", workload.stage_of(picked.get("rank", 0)))]
    for line in [*module.omissions(workload, stages), *_losses(workload, module, name, stages)]:
        sys.stderr.write(f"# {name} cannot carry: {line}\n")
    if to_folder and kind.picks == "rank":
        ranks = None if target.rank is None else [picked["rank"]]
        files = module.files(workload, ranks)
        _write_folder(files, Path(out), kind, workload.world_size if ranks else 0)
    elif to_folder:
        is_part = target.stage is not None or target.rank is not None
        files = (
            (f"stage{stage}{kind.suffix}", module.write(workload, stage=stage))
            for stage in stages
        )
        _write_folder(files, Path(out), kind, len(workload.stages) if is_part else 0)
    else:
        more = {"samples": samples} if kind.takes_samples else {}
        _write_file(workload, module, picked, out, **more)


def _losses(workload: Workload, module: Any, name: str, stages: list[int]) -> Iterator[str]:
    """Yield what files of these stages lack; a file of the format is written again whole."""
    if hasattr(module, "kept") and name not in workload.origin:
        yield from losses(workload, module.kept, stages)
    if len(stages) < len(workload.stages):
        yield f"stages: {stages[0]} of 0 to {len(workload.stages) - 1} is written"


def _write_file(
    workload: Workload, module: Any, picked: dict[str, int], target: str, **more: object
) -> None:
    """Write one file, and the files that are needed to read it."""
    if target != "-" and hasattr(module, "companions") and not is_special(Path(target)):
        for path, chunks in module.companions(workload, Path(target), **picked):
            _write_beside(path, b"".join(_bytes(chunks)))
    has_all = hasattr(module, "encode")
    chunks = () if has_all else _bytes(module.write(workload, **picked, **more))
    size = write_chunks([module.encode(workload)] if has_all else chunks, target)
    if target != "-":
        places = "".join(f", {what} {number} alone" for what, number in picked.items())
        places = places if len(workload.stages) > 1 else ""
        sys.stderr.write(f"wrote {target}: {size:,} bytes{places}\n")


def _write_beside(path: Path, data: bytes) -> int:
    """Write a file, unless one of another workload has its name. Raises ConfigError."""
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
    """Write a file per rank or stage, and the files that belong to all of them.

    number: of how many only some are written, so that the others may exist; 0: all are written.
    """
    entries = list(files)
    _refuse_others(folder, kind, {name for name, _ in entries}, number)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", folder, f"a folder ({error.strerror})") from None
    size = 0
    for name, chunks in entries:
        if number and not _OF_ONE.fullmatch(name):  # it belongs to the files that stay, too
            size += _write_beside(folder / name, b"".join(_bytes(chunks)))
        else:
            size += write_chunks(_bytes(chunks), str(folder / name))
    count = f"{len(entries)} file{'s' if len(entries) != 1 else ''}"
    sys.stderr.write(f"wrote {folder}: {count}, {size:,} bytes\n")


def _refuse_others(folder: Path, kind: Format, names: set[str], number: int) -> None:
    """Refuse a folder with files that would be read as a part of this workload."""
    stay = {path.name for pattern in kind.takes for path in folder.glob(pattern)} - names
    for name in names if number else ():
        if match := _OF_ONE.fullmatch(name):
            stay -= {f"{match[1]}{index}{match[2]}" for index in range(number)}
    if stay:
        more = f" and {len(stay) - 1} more" if len(stay) > 1 else ""
        first = min(stay, key=lambda name: (len(name), name))  # 9.json before 10.json
        allowed = f"a new or empty folder: it holds {first}{more}, "
        raise ConfigError("out", folder, allowed + "which would be taken as of this workload")


_OF_ONE = re.compile(r"(.*?)\d+(\.\w+)")  # name of the file of a rank or stage


def stage_flag(stage: int | None, pp_rank: int | None = None) -> StageFlag | None:
    """Return --stage, or AICB's --pp-rank, of which -1 means none.

    Raises ConfigError where they contradict each other.
    """
    rank = None if pp_rank == -1 else pp_rank
    if None not in (stage, rank) and stage != rank:
        raise ConfigError("stage", stage, "what --pp-rank says, or one flag")
    if rank is not None:
        return "pp-rank", rank
    return None if stage is None else ("stage", stage)


def stage_of(workload: Workload, flag: StageFlag | None) -> int:
    """Return the requested pipeline stage, else 0. Raises ConfigError."""
    name, stage = flag or ("stage", 0)
    return number_below(len(workload.stages), stage, name)


def number_below(count: int, number: int, field: str) -> int:
    """Return the number of a stage or rank if there is one. Raises ConfigError."""
    if not 0 <= number < count:
        allowed = f"from 0 to {count - 1}" if count > 1 else f"0, the only {field}"
        raise ConfigError(field, number, allowed)
    return number


def _picked(
    workload: Workload, target: Target, kind: Format, *, is_whole: bool
) -> dict[str, int]:
    """Return the stage or rank to write in a format that holds only one.

    is_whole: a file of the format was read, and is written again with all that it holds.
    """
    stage = stage_of(workload, target.stage)
    rank = target.rank
    size = workload.world_size // len(workload.stages)
    if rank is not None:
        number_below(workload.world_size, rank, "rank")
    if not kind.picks or is_whole:
        return {}
    if rank is not None:
        if target.stage is not None and workload.stage_of(rank) != stage:
            allowed = f"one of stage {stage}: {stage * size} to {(stage + 1) * size - 1}"
            raise ConfigError("rank", rank, allowed)
        stage = workload.stage_of(rank)
    if kind.picks == "stage":
        return {"stage": stage}
    return {"rank": stage * size if rank is None else rank}


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
