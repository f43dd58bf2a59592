"""Tables of averages as a profiler prints them: rows, impossible figures, communication.

A printed figure is an interval: half a unit of the last digit to each side. Times are
nanoseconds, sizes bytes, shares percent. What the table does not say is None or absent.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.ground.units import format_time

Span = tuple[float, float]  # least and largest value


class RowKind(StrEnum):
    """What a row of the PyTorch profiler counts. Only device rows are work of the device.

    An operator's self device time is that of the kernels it launched, which have rows of their
    own: a sum takes one of both. The device time of a host call, an annotation or a marker is
    no work at all.
    """

    OPERATOR = "operator"
    COLLECTIVE = "collective"  # operator of a communication library
    HOST_CALL = "host call"
    ANNOTATION = "annotation"
    KERNEL = "kernel"
    COMM_KERNEL = "communication kernel"
    COPY = "copy"
    DEVICE_ROW = "kernel or annotation"  # of the device; its name does not say which
    MARKER = "marker"


DEVICE_WORK = (RowKind.KERNEL, RowKind.COMM_KERNEL, RowKind.COPY)


@dataclass(frozen=True, slots=True)
class Figure:
    """A printed number, and the interval of values that are printed so."""

    value: float
    low: float
    high: float
    printed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row. `figures` by column key; of Perftools also the bins of copies by size."""

    line: int  # of the file, from 1
    name: str
    kind: RowKind | None = None
    figures: dict[str, Figure] = field(default_factory=dict)

    def value(self, key: str) -> float | None:
        figure = self.figures.get(key)
        return None if figure is None else figure.value


@dataclass(frozen=True, slots=True)
class Flag:
    """One impossible or doubtful figure. `column` "" is the row as a whole."""

    rule: str
    line: int
    reason: str
    row: str = ""
    column: str = ""
    printed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Whether a table shows a job that is bound by communication, and on what this rests.

    Both times are intervals in ns; None unknown. `bound`: True if communication takes above
    half of the device time, False if it takes less, None if the table cannot tell.
    """

    bound: bool | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    device_low_ns: float | None = None
    device_high_ns: float | None = None
    share_low: float | None = None  # of the device time
    share_high: float | None = None
    reasons: tuple[str, ...] = ()

    @classmethod
    def unknown(cls, reason: str) -> "Communication":
        return cls(reasons=(reason,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerTable:
    """One table. `columns` are headings by column key; `totals` what shares are shares of."""

    file: str
    first_line: int
    title: str
    tool: str  # "PyTorch profiler" or "Perftools"
    columns: dict[str, str]
    rows: tuple[TableRow, ...]
    totals: dict[str, Figure] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    communication: Communication = Communication()


def time_text(low: float, high: float | None = None) -> str:
    """Return an interval of ns as text."""
    times = (format_time(each / 1e9) for each in (low, high) if each is not None)
    return " to ".join(dict.fromkeys(times))
