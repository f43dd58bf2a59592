"""Tables of averages as a profiler prints them: rows, impossible figures, communication.

A printed figure is an interval: half a unit of the last digit to each side. Times are integer
nanoseconds, sizes bytes, shares percent. What the table does not say is None or absent.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from stepmark.core.units import KIB, MIB


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
    MARKER = "marker"


# Least bytes of the bins in which Perftools counts copies by size.
COPY_EDGES = (0, 16, 256, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
DEVICE_WORK = frozenset({RowKind.KERNEL, RowKind.COMM_KERNEL, RowKind.COPY})


@dataclass(frozen=True, slots=True)
class Figure:
    """A printed number and half a unit of its last digit."""

    value: float
    half: float
    printed: str

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row. `figures` by column key; of Perftools also the bins of copies by size."""

    line: int  # of the file, from 1
    name: str
    kind: RowKind | None = None
    level: int = 0  # below Perftools' total; rows of level 1 hold those below them
    words: dict[str, str] = field(default_factory=dict)  # shapes, source
    figures: dict[str, Figure] = field(default_factory=dict)

    def value(self, key: str) -> float | None:
        figure = self.figures.get(key)
        return None if figure is None else figure.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One impossible or doubtful figure. `column` "" is the row as a whole."""

    rule: str
    line: int
    row: str
    column: str
    printed: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Whether a table shows a job that is bound by communication, and on what this rests.

    Both times are intervals in ns; None unknown. `bound`: True if communication takes above
    half of the device time, False if it takes less, None if the table cannot tell.
    """

    bound: bool | None
    low_ns: float | None = None
    high_ns: float | None = None
    device_low_ns: float | None = None
    device_high_ns: float | None = None
    definition: str = ""  # of the device time
    steps: int | None = None
    steps_ns: float | None = None  # of these steps, on the host
    reasons: tuple[str, ...] = ()
    largest: str = ""  # collective

    @property
    def share_low(self) -> float | None:
        """Return the least share of the device time."""
        if self.low_ns is None or not self.device_high_ns:
            return None
        return min(1.0, self.low_ns / self.device_high_ns)

    @property
    def share_high(self) -> float | None:
        """Return the largest share of the device time."""
        if self.high_ns is None or not self.device_low_ns:
            return None
        return min(1.0, self.high_ns / self.device_low_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerTable:
    """One table. `columns` are headings by column key; `totals` the sums below the table."""

    file: str
    index: int = 0  # in its file, from 1
    first_line: int
    last_line: int
    title: str
    tool: str  # "PyTorch profiler" or "Perftools"
    device: str = ""  # CUDA, XPU, ...; "" without columns of a device
    columns: dict[str, str]
    sorted_by: tuple[str, ...] = ()  # keys of columns in which no row is above the one before
    rows: tuple[TableRow, ...]
    totals: dict[str, Figure] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    communication: Communication | None = None
