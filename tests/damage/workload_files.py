"""Workload files of every format that is read, and their messages."""

import gzip
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.damage.mutators import (
    Effect,
    Inputs,
    Lines,
    Mutator,
    Output,
    joined_lines,
    line_within_line,
)
from tests.workloads.formats.export_cases import DENSE, EXPERTS, ExportCase
from tests.workloads.formats.test_exports import sums_of

from stepmark.ground.errors import ConfigError
from stepmark.step.workload import Workload
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.workload_files import read

Fact = tuple[object, ...]
_JOBS = (
    ("megatron", DENSE, (("tp", 2), ("pp", 2), ("dp_shard", 2))),
    ("megatron", EXPERTS, (("ep", 2), ("dp_shard", 4))),
    ("deepspeed", DENSE, (("dp_shard", 4),)),
    ("fsdp", DENSE, (("dp_shard", 2), ("tp", 2))),
    ("pp", DENSE, (("pp", 2),)),
)


FILE = "job.0.et"  # Chakra's reader asks for such a name


@cache
def _outputs(name: str) -> list[Output]:
    """Return the file of rank or stage 0 of every job in this format."""
    outputs = []
    for framework, model, axes in _JOBS:
        case = ExportCase(framework=framework, model=model, axes=axes, settings=())
        workload = case.workload()
        module = FORMATS[name].load()
        if name == "native":
            files = {FILE: module.encode(workload)}
        elif name == "chakra":
            files = {file: _joined(parts) for file, parts in module.files(workload, name="job")}
        else:
            files = {FILE: _joined(module.write(workload))}
        with TemporaryDirectory() as folder:
            for file, content in files.items():
                (Path(folder) / file).write_bytes(content)
            values, refusals = reading(Path(folder) / FILE)
            assert not refusals
        lines = files.pop(FILE).decode("latin-1").split("\n")
        outputs.append(Output(lines=lines, values=values, beside=files))
    return outputs


def _joined(parts: Iterable[str] | Iterable[bytes]) -> bytes:
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def reading(path: Path) -> tuple[Counter[Fact], list[str]]:
    """Return (messages of all ranks, what the reader noted or why it refuses the file)."""
    try:
        workload = read(str(path))
    except ConfigError as error:
        return Counter(), [str(error)]
    return values_of(workload), [one for one in workload.notes if "disagree" in one]


def values_of(workload: Workload) -> Counter[Fact]:
    """Return the messages of all ranks, and the settings."""
    values = Counter[Fact]()
    per_stage = workload.world_size // len(workload.stages)
    for stage in range(len(workload.stages)):
        for key, times in sums_of(workload, stage).items():
            values[key] += times * per_stage
    values["settings", repr(sorted(workload.settings.items()))] = 1
    return values


def _data(lines: Lines) -> bytes:
    return "\n".join(lines).encode("latin-1")


def _compressed(lines: Lines, _: Random) -> bytes:
    return gzip.compress(_data(lines), 1)


def _crlf(lines: Lines, _: Random) -> bytes:
    return _data(lines).replace(b"\n", b"\r\n")


def _byte_order_mark(lines: Lines, _: Random) -> bytes:
    return b"\xef\xbb\xbf" + _data(lines)


def _without_last_newline(lines: Lines, _: Random) -> bytes:
    return _data(lines).rstrip(b"\n")


def _cut_anywhere(lines: Lines, random: Random) -> bytes:
    data = _data(lines)
    return data[: random.randrange(1, len(data) - 2)]


def _bytes_lost(lines: Lines, random: Random) -> bytes:
    data = _data(lines)
    at = random.randrange(len(data))
    return data[:at] + data[at + random.randint(1, 200) :]


def _bytes_twice(lines: Lines, random: Random) -> bytes:
    data = _data(lines)
    at = random.randrange(len(data))
    return data[:at] + data[max(0, at - random.randint(1, 200)) :]


def _bit_changed(lines: Lines, random: Random) -> bytes:
    data = bytearray(_data(lines))
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _row_lost(lines: Lines, random: Random) -> bytes:
    at = random.randrange(1, len(lines) - 1)
    return _data([*lines[:at], *lines[at + 1 :]])


def _row_twice(lines: Lines, random: Random) -> bytes:
    at = random.randrange(1, len(lines) - 1)
    return _data([*lines[:at], lines[at], *lines[at:]])


def _line_cut(lines: Lines, random: Random) -> bytes:
    at = random.randrange(len(lines) - 1)
    return _data([*lines[:at], lines[at][: random.randrange(len(lines[at]))], *lines[at + 1 :]])


# No format has a sum over itself: a number that became another one is that number.
_OF_ALL = (
    Mutator("unchanged", Effect.HARMLESS, lambda lines, _: _data(lines)),
    Mutator("gzip", Effect.HARMLESS, _compressed),
    Mutator("cut anywhere", Effect.DETECTABLE, _cut_anywhere),
    Mutator("bytes lost", Effect.UNDETECTABLE, _bytes_lost),
    Mutator("bytes twice", Effect.UNDETECTABLE, _bytes_twice),
    Mutator("bit changed", Effect.UNDETECTABLE, _bit_changed),
)
_OF_ROWS = (
    Mutator("byte-order mark", Effect.HARMLESS, _byte_order_mark),
    Mutator("crlf", Effect.HARMLESS, _crlf),
    Mutator("no last newline", Effect.HARMLESS, _without_last_newline),
    Mutator("line cut", Effect.DETECTABLE, _line_cut),
    Mutator("lines joined", Effect.DETECTABLE, joined_lines),
    Mutator("line in line", Effect.DETECTABLE, line_within_line),
)


def _rows(effect: Effect) -> tuple[Mutator, ...]:
    return (Mutator("row lost", effect, _row_lost), Mutator("row twice", effect, _row_twice))


_MUTATORS = {
    "simai": (*_OF_ALL, *_OF_ROWS, *_rows(Effect.DETECTABLE)),  # states its number of rows
    "aicb": (*_OF_ALL, *_OF_ROWS, *_rows(Effect.UNDETECTABLE)),
}


@dataclass(frozen=True, slots=True)
class Files(Inputs):
    """The files of one format."""

    name: str

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        return _MUTATORS.get(self.name, _OF_ALL)

    def output(self, random: Random) -> Output:
        return random.choice(_outputs(self.name))

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        return reading(path)
