"""Measurements of several sources, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepmark.ground.ratio import Ratio
from stepmark.ground.variance import Variance
from stepmark.model.model import ModelConfig

# Units of figures that a source prints without a unit: a time as the user states, and unknown.
TIME = "time"
UNKNOWN = ""
# What was measured, apart from its size; None where the source does not say.
# docs/definitions.md lists which fields may differ between sides.
Fields = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One measurement of one side: its values by launch.

    Values are times in seconds (unit "s") or as printed (TIME), or rates.
    `busbw_factor` is that of a collective: size / time x factor is the bus bandwidth. `below`
    bounds a rate that was printed as 0; then there are no values. `starts`: Unix time at which
    launches began, where known. `soak_s`: the shortest soak or load before its samples; None
    where there is none. `busy`: launches in which other work ran on a host. `noise`: of one
    launch, as repeats of such tables on other machines vary; None if unknown. `model`: what is
    trained; the fields have its name alone, which series.named_apart completes. `num_warmup`:
    lines of a training log before those that count.
    """

    fields: Fields
    size_bytes: int | None = None
    unit: str = "s"
    launches: Mapping[str, tuple[float, ...]]
    busbw_factor: float | None = None
    below: float | None = None
    rounding: float = 0.0  # unit of the last printed digit, relative; 0 where not rounded
    starts: Mapping[str, float] = field(default_factory=dict)
    soak_s: float | None = None
    num_warmup: int | None = None
    busy: frozenset[str] = frozenset()
    noise: Variance | None = None
    model: ModelConfig | None = None

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.unit in ("s", TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A source and its name in the comparison."""

    name: str
    series: tuple[Series, ...]
    # Device, versions and variables; differences are noted, not refused.
    context: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # how it was read
    by_round: bool = False  # a launch is a round of a sweep, with its number as name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The value of one side in a line: the centre over launches, in seconds or as a rate.

    series: the side's own, whose fields, size and factor may differ from the baseline's.
    """

    series: Series
    value: float | None
    ratio: Ratio | None = None  # to the baseline; None of the baseline itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A measurement of the baseline and at least one other side. Cells by side's name.

    Fields and size are the baseline's.
    """

    fields: Fields
    size_bytes: int | None
    unit: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """Geometric mean of a side's ratios over a range of sizes (or over all lines)."""

    name: str
    ratio: Ratio
    num_lines: int
    smallest_bytes: int | None
    largest_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Sides against a baseline, the first of `names`. by_round: settings of a sweep."""

    names: tuple[str, ...]
    lines: tuple[Line, ...]
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...] = ()  # what differs, what is unpaired, how sources were read
    by_round: bool = False
    # Lines (by place) and sides that are slower than allowed; None without a limit.
    too_slow: tuple[tuple[int, str], ...] | None = None
    fail_if_slower: float | None = None  # the limit, as a share of the time
