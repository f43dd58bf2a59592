"""Workloads from files, in whichever format, and times of computation for them."""

import contextlib
import errno
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from stepmark.cli.options import Values
from stepmark.core.case import OpCase
from stepmark.core.errors import ConfigError
from stepmark.core.ops import Op
from stepmark.core.workload import ComputeOp, Workload
from stepmark.workload.formats import FORMATS, sniff

if TYPE_CHECKING:
    from stepmark.workload.durations import Measured, Profile

AICB_FILLER = "fixed:1ns"
_MOST_BYTES = 2**30  # as of other files


def read(file: str, values: Values = MappingProxyType({})) -> Workload:
    """The workload in a file, whatever its format; "-" is stdin. Raises ConfigError.

    values: what the file leaves out, by --group-sizes (AICB) and --world-size (SimAI).
    """
    with _to_read_twice(file) as path:
        kind = sniff(path)
        more: dict[str, object] = {}
        for name, of in (("group_sizes", "aicb"), ("world_size", "simai")):
            if (value := values.get(name)) is None:
                continue
            if kind != of:
                field = name.replace("_", "-")
                raise ConfigError(field, value, f"it has no effect on a file of format {kind}")
            more[name] = _group_sizes(value) if name == "group_sizes" else value
        found: Workload = FORMATS[kind].load().read(path, **more)
    return found


@contextlib.contextmanager
def _to_read_twice(file: str) -> Iterator[Path]:
    """The file, or a copy of what comes from stdin or a pipe, which give it once."""
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
            field, shown, allowed = (
                text.replace(str(copy), file)
                for text in (error.field, error.shown, error.allowed)
            )
            raise ConfigError(field, shown, allowed) from None


def _copy(file: str, copy: Path) -> None:
    size = 0
    try:
        if file == "-" and sys.stdin is None:
            raise OSError(errno.EBADF, "it is closed")
        stdin = contextlib.nullcontext(sys.stdin.buffer) if file == "-" else None
        with stdin or Path(file).open("rb") as source, copy.open("wb") as stream:
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
    """ep=16,tp=2."""
    found = {}
    for word in text.split(","):
        name, is_, size = word.partition("=")
        if not is_ or not size.isdecimal() or not 1 <= len(size) <= 7 or not int(size):
            raise ConfigError("group-sizes", text, "groups and their ranks, e.g. ep=16,tp=2")
        found[name.strip().removesuffix("_group")] = int(size)
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


def timed_as_aicb(workload: Workload, profile: str) -> Workload:
    """With times of an AIOB profile. What it does not time takes AICB's filler, named."""
    from stepmark.workload.durations import Fixed, fill, parse_source  # noqa: PLC0415

    filler = parse_source(AICB_FILLER)
    assert isinstance(filler, Fixed)
    found = fill(workload, _opened(profile), filler)
    filled = {
        item.module: None
        for block in found.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and item.time_s == filler.time_s
    }
    if filled:
        said = f"{AICB_FILLER} each, AICB's filler, for what {Path(profile).name} does not time"
        sys.stderr.write(f"# {said}: {', '.join(filled)}\n")
    return found


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
    from stepmark.app.view import read_aloud  # noqa: PLC0415
    from stepmark.core.record import Measured as Record  # noqa: PLC0415
    from stepmark.core.stats import slowest_per_sample, summarize  # noqa: PLC0415
    from stepmark.store.reader import find_run  # noqa: PLC0415
    from stepmark.workload.durations import Measured  # noqa: PLC0415

    path = find_run(Path("runs"), text)
    times: dict[Op, float] = {}
    for record in read_aloud(path).latest:
        if not isinstance(record, Record) or not isinstance(record.case, OpCase):
            continue
        if record.num_wrong or not record.samples.seconds:
            continue
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        op = record.operator.op
        times[op] = min(time_s, times.get(op, time_s))
    return Measured(times=times, name=f"run {path.name}")
