"""Several sources of the same measurements, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepmark.core.ratio import Ratio

# What a series is of, beside its size: a value may be text, a number, a flag, or None where its
# source does not say. docs/definitions.md says which may differ between sides.
# Units of figures that a source prints without saying what they are: less is better (as told),
# and unknown.
TIME, UNKNOWN = "time", ""
Fields = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One thing that one side measured: its values by launch.

    Times in seconds (unit "s") or as printed (TIME), or rates, of which more is better.
    `busbw_factor` is that of a collective: size / time x factor is the bus bandwidth. `below`
    bounds a rate that was printed as 0; then there are no values.
    """

    fields: Fields
    size_bytes: int | None = None
    unit: str = "s"
    launches: Mapping[str, tuple[float, ...]]
    busbw_factor: float | None = None
    below: float | None = None
    rounding: float = 0.0  # unit of the last printed digit, relative; 0 where not rounded

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.unit in ("s", TIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A source under the name that it has in the comparison."""

    name: str
    series: tuple[Series, ...]
    # What it ran on and under (device, versions, variables); a difference is said, not refused.
    context: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # how it was read


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one side has of a row. `value` is the centre over launches: seconds, or a rate."""

    value: float | None
    below: float | None = None
    num_launches: int = 1
    num_values: int = 1
    ratio: Ratio | None = None  # to the baseline; None of the baseline itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the baseline and at least one other side measured. Cells by side's name."""

    fields: Fields
    size_bytes: int | None
    unit: str
    busbw_factor: float | None
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
    """Sides against a baseline, the first of `names`."""

    names: tuple[str, ...]
    lines: tuple[Line, ...]
    overall: tuple[Overall, ...] = ()
    notes: tuple[str, ...] = ()  # what differs, what had no partner, how sources were read
    # Lines (by place) and sides that are slower than allowed; None where nothing was asked.
    too_slow: tuple[tuple[int, str], ...] | None = None
    fail_if_slower: float | None = None  # the limit, as a share of the time
