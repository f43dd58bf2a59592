"""AICB's per-operation CSV: what rank 0 (of each stage, in older files) does, line by line.

Lines up to the first epoch_end are the set-up, then each iteration ends in one. A file that is
read and written again is the same bytes. A physical run's log has the same columns with times:
it is read as one step of median times, and is written without them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from stepmark.core.errors import ConfigError
from stepmark.core.workload import Operation, Workload
from stepmark.workload.formats import aicb_names
from stepmark.workload.formats.aicb_line import EPOCH_END, HEADER, no_setup
from stepmark.workload.formats.aicb_reader import FORMAT, Reader, line_of
from stepmark.workload.formats.repeated_text import RepeatedText
from stepmark.workload.formats.source_file import in_file, read_lines


class _Section(msgspec.Struct):
    """One rank's lines: the line before its header, and its iterations by block."""

    before: str
    epochs: list[str]


class _Origin(msgspec.Struct):
    """lines: as they were, by what we would write ("name|line")."""

    end: str
    sections: list[_Section]
    lines: dict[str, str]
    ends: dict[str, str]  # of iterations that end in another line than usual


def read(path: Path, *, group_sizes: Mapping[str, int] | None = None) -> Workload:
    """Raises ConfigError, with the line's number, for what is no such file.

    group_sizes: {"ep": 16} where no line tells, as for AICB's experts.
    """
    lines = read_lines(path, "AICB workload")
    end = "\n" if lines[-1] == "" else ""
    with in_file(path):
        reader = Reader(lines[:-1] if end else lines, dict(group_sizes or {}))
        workload = reader.workload(path.name.partition(".")[0], end)
        workload.check()
    return workload


def write(workload: Workload, *, stage: int = 0, computation: bool = True) -> Iterator[str]:
    """The text in pieces; of a generated workload, one stage's.

    computation: with lines of matrix products. Raises ConfigError for a broken origin.
    """
    if FORMAT in workload.origin:
        yield from _write_again(workload)
        return
    chosen = workload.stages[stage]
    yield HEADER + "\n"
    init = aicb_names.Lines(workload, computation=computation, setup=True)
    before = RepeatedText(workload.blocks, init)
    setup = "".join(before.chunks(chosen.setup)) if chosen.setup else ""
    yield setup or no_setup(workload.world_size)
    yield EPOCH_END + "\n"
    line = aicb_names.Lines(workload, computation=computation)
    yield from RepeatedText(workload.blocks, line).chunks(chosen.step)
    yield EPOCH_END + "\n"


def lost(workload: Workload) -> list[str]:
    """What the CSV cannot say of this workload, a line each."""
    if FORMAT not in workload.origin:
        return aicb_names.lost(workload)
    ops = (item for block in workload.blocks.values() for item in block)
    timed = any(getattr(op, "time_s", None) is not None for op in ops)
    return ["times: a workload of AICB has none, only its log of a run"] if timed else []


def _write_again(workload: Workload) -> Iterator[str]:
    try:
        origin = msgspec.convert(workload.origin[FORMAT], type=_Origin)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"origin.{FORMAT}", "unreadable", f"it does not decode: {error}"
        ) from None

    def line(op: Operation) -> str:
        ours = line_of(op, workload.groups)
        return origin.lines.get(f"{op.name}|{ours}", ours)

    text = RepeatedText(workload.blocks, line)
    last = ""
    for section in origin.sections:
        yield last + section.before + HEADER + "\n"
        last = ""
        for name in section.epochs:
            if name not in workload.blocks:
                raise ConfigError(f"origin.{FORMAT}", name, "one of the blocks")
            yield last
            yield from text.chunks(name)
            last = origin.ends.get(name, EPOCH_END) + "\n"
    yield last if origin.end else last.removesuffix("\n")
