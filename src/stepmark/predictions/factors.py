"""Factors on the costs of a prediction: one per kind of work, and per tier of messages."""

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import log
from statistics import median
from typing import Any

from stepmark.ground.units import format_time
from stepmark.predictions.interval import Interval, signed_interval
from stepmark.timeline.ledger import Work


class Part(StrEnum):
    """Costs of a step that have a factor in common.

    PRODUCTS has computation that a workload file does not divide by kind, too.
    """

    PRODUCTS = "products"
    ATTENTION = "attention"
    MEMORY = "memory-bound work"
    IN_HOST = "messages in a host"
    BETWEEN_HOSTS = "messages between hosts"
    GAPS = "launch gaps"
    HOST = "host time"


Factors = Mapping[Part, float]  # missing: 1
_LARGE_FACTOR = 2.0
_FEWEST_FOR_OUTLIERS = 3  # rows: of two neither is the odd one
_LEAST_OUTLYING = 1.25  # factor that rows may be apart, whatever the spread
_OUTLYING = 4.5  # median deviations, 3 standard deviations of a normal distribution
_PARTS = {
    Work.MATMUL: Part.PRODUCTS,
    Work.FILE: Part.PRODUCTS,
    Work.ATTENTION: Part.ATTENTION,
}


def part_of(work: Work) -> Part:
    """Return the part of a step that computation of this kind belongs to."""
    return _PARTS.get(work, Part.MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRow:
    """Seconds of a measured step. left_out_s: predicted by factors of the other ones.

    where: its name with its layout. model: that of a row of a table.
    """

    name: str
    measured_s: float
    predicted_s: float
    left_out_s: float
    where: str = ""
    model: str = ""

    @property
    def left_out_log(self) -> float:
        """Return the logarithm of measured over predicted seconds, by the other factors."""
        return log(self.measured_s / self.left_out_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """Factors that were fitted to measured steps. model: how many there are, in words.

    left_out: axes that are 1 in rows without a cell of theirs. table_notes: of reading rows.
    model_name: of the predicted step. measured_s: seconds by job and settings, of a plan.
    """

    source: str
    model: str
    factors: Factors
    rows: tuple[AnchorRow, ...]
    left_out: tuple[str, ...] = ()
    table_notes: tuple[str, ...] = ()
    model_name: str = ""
    measured_s: Mapping[Hashable, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Return the median error of predictions without factors."""
        return median(abs(row.predicted_s / row.measured_s - 1) for row in self.rows)

    @property
    def left_out_error(self) -> float:
        """Return the median error of predictions by the factors of the other steps."""
        return median(abs(row.left_out_s / row.measured_s - 1) for row in self.rows)

    def interval(self, predicted_s: float) -> Interval:
        """Return the interval of a prediction by these factors."""
        errors = [row.left_out_log for row in self.rows]
        return signed_interval(errors, predicted_s, f"anchors of {self.source}")

    @property
    def outliers(self) -> list[AnchorRow]:
        """Return the rows that are far from the others, such as with a unit mistyped."""
        if len(self.rows) < _FEWEST_FOR_OUTLIERS:
            return []
        logs = [row.left_out_log for row in self.rows]
        middle = median(logs)
        spread = median(abs(own - middle) for own in logs)
        most = max(log(_LEAST_OUTLYING), _OUTLYING * spread)
        return [row for row in self.rows if abs(row.left_out_log - middle) > most]

    @property
    def notes(self) -> list[str]:
        """Return reasons to doubt the rows, or the step that they are compared with."""
        notes = [
            f"{row.where} is far from the other anchors: it took {format_time(row.measured_s)} "
            f"and is predicted as {format_time(row.left_out_s)} by them; check its value, its "
            "unit and its layout"
            for row in self.outliers
        ]
        notes += [
            f"{row.name} is of another model: {row.model}"
            for row in self.rows
            if self.model_name and row.model not in ("", self.model_name)
        ]
        large = [
            f"{part} {factor:.3g}"
            for part, factor in self.factors.items()
            if not 1 / _LARGE_FACTOR <= factor <= _LARGE_FACTOR
        ]
        if len(large) == len(Part) and len({*self.factors.values()}) == 1:
            large = [f"{self.factors[Part.PRODUCTS]:.3g} for all costs"]
        if large:
            notes.append(
                f"factors above {_LARGE_FACTOR:g} or below {1 / _LARGE_FACTOR:g}: "
                f"{', '.join(large)}; check that the anchors are the steps that their rows say"
            )
        if self.left_out:
            values = ", ".join(f"{axis} 1" for axis in self.left_out)
            notes.insert(
                0, f"steps whose rows do not state {', '.join(self.left_out)} have {values}"
            )
        return [*notes, *self.table_notes]

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "source": self.source,
            "model": self.model,
            "factors": {str(part): factor for part, factor in self.factors.items()},
            "error_pct": 100 * self.error,
            "left_out_error_pct": 100 * self.left_out_error,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
        }
