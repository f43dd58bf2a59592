"""Tables of measured values as other tools print them, in SI units, with their line.

Unknown is None. A value printed as 0 because it was rounded is censored: None here, with an
upper bound in its place.
"""

from dataclasses import dataclass
from operator import attrgetter

OUT_OF_PLACE = "out-of-place"
IN_PLACE = "in-place"
MEASUREMENT = attrgetter("label", "size_bytes", "dtype", "redop", "root", "placement", "column")


# Not frozen: a table of 10 MB has 170,000, and a frozen one takes five times as long to make.
@dataclass(slots=True, kw_only=True)
class Reading:
    """One value of a table: one placement of a row, or one cell. Nothing changes it.

    A collective has size_bytes and time_s; where a table holds bandwidth alone, rate is the bus
    bandwidth in bytes/s. Anything else (samples/s, images/s) is a rate with a label.
    """

    line: int  # of the file, from 1
    label: str = ""  # of a row that is no message size, e.g. "16 nodes, 128 ranks"
    column: str = ""  # of a table with a column per setting, e.g. "With Plugin"
    size_bytes: int | None = None  # as nccl-tests counts: the largest buffer of any rank
    count: int | None = None  # elements, as printed
    dtype: str = ""  # as ground/dtypes names it where it knows it
    redop: str = ""  # as model/collectives.RedOp; "" where not printed
    root: int | None = None
    placement: str = ""  # OUT_OF_PLACE, IN_PLACE or "" where unknown
    time_s: float | None = None
    algbw_bytes_per_s: float | None = None  # as printed
    busbw_bytes_per_s: float | None = None  # as printed
    rate: float | None = None  # more is better; of tables without times
    num_calls: int | None = None  # whose average or sum the figure is, where the file says it
    rate_below: float | None = None  # printed as 0: somewhere under half of the last digit
    num_wrong: int | None = None
    cycle: int = 0  # which repeat of the whole sweep (-N), from 0
    samples_s: tuple[float, ...] = ()  # of single iterations, where the file holds them
    # time, algbw and busbw as they stand in a text, for checks that know of rounding.
    printed: tuple[str, str, str] | None = None

    @property
    def measurement(self) -> tuple[str | int | None, ...]:
        """Return what was measured; readings of one table that share it are repeats."""
        return MEASUREMENT(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a file, and how each fact that it does not state was inferred.

    `..._from` states how a value is known ("8 rank lines"); "" when it is not.
    """

    file: str
    index: int = 0  # in its file, from 1: `FILE:2` names the second
    first_line: int
    last_line: int
    title: str  # heading or command found near it; "" when there is none
    tool: str  # "nccl-tests", "rccl-tests", "stepmark", "trainer", "values"
    version: str = ""  # of the tool
    unit: str = ""  # of `rate`: "busbw", "samples/s", ...; "" for tables with times
    collective: str = ""  # as model/collectives names it; of others the metric's name
    collective_from: str = ""
    num_ranks: int | None = None
    num_ranks_from: str = ""
    num_hosts: int | None = None  # by the rank lines
    device: str = ""  # as torch and NCCL name it; "" if not stated or if GPUs differ
    gpus_per_thread: int = 1  # on which one thread launches in turn
    # How it was timed: "nccl-tests queued", "nccl-tests graph", "nccl-tests blocking 1", ...;
    # "" if the file does not say.
    method: str = ""
    readings: tuple[Reading, ...] = ()
    columns: tuple[str, ...] = ()  # of a table with a column per setting
    notes: tuple[str, ...] = ()  # what is unusual about it, and how it was read
