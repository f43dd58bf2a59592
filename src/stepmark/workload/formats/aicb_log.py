"""The log of a physical AICB run: the lines of its workload with the time each took on rank 0.

Times are milliseconds between two CUDA events around a call that the host waited for; rates
are GiB/s, which the tool prints as GB. A log is written back as it was read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.workload.formats.aicb_line import HEADER, NONE, Line, number, parse
from stepmark.workload.formats.source_file import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """An operation and what was measured of it. None: the log has no figure."""

    line: Line
    algbw_gib_s: float | None
    busbw_gib_s: float | None
    count: int

    @property
    def elapsed_s(self) -> float | None:
        return None if self.line.elapsed_ms is None else self.line.elapsed_ms * 1e-3


def read_log(path: Path) -> tuple[LogLine, ...]:
    """Raises ConfigError, with the line's number, for what is no such file."""
    header, *lines = read_lines(path, "AICB log")
    if header != HEADER:
        raise ConfigError("line 1", header, HEADER)
    if lines and lines[-1] == "":
        lines.pop()
    return tuple(_log_line(text, f"line {place}") for place, text in enumerate(lines, start=2))


def write_log(lines: Iterable[LogLine]) -> Iterator[str]:
    """The text, a line at a time."""
    yield HEADER + "\n"
    for one in lines:
        line = one.line
        kind = f"CommType.{line.kind}"
        group = f"CommGroup.{line.group}" if line.group else NONE
        fields = [kind, group, line.group_size, line.size, line.stage, line.dst, line.src]
        rates = [line.additional, line.elapsed_ms, one.algbw_gib_s, one.busbw_gib_s, one.count]
        yield ",".join(str(field) for field in (*fields, *rates)) + "\n"


def _log_line(text: str, where: str) -> LogLine:
    line = parse(text, where)
    algbw, busbw, count = text.split(",")[9:]
    if not (count.isascii() and count.isdecimal() and len(count) < 10):
        raise ConfigError(f"{where}, count", count, "a whole number")
    return LogLine(
        line=line,
        algbw_gib_s=None if algbw == NONE else number(algbw, f"{where}, algbw"),
        busbw_gib_s=None if busbw == NONE else number(busbw, f"{where}, busbw"),
        count=int(count),
    )
