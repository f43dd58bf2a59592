"""Factors on the costs of a prediction: one per kind of work, and per tier of messages."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import log
from statistics import median
from typing import Any

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
    """Seconds of a measured step. left_out_s: predicted by factors of the other ones."""

    name: str
    measured_s: float
    predicted_s: float
    left_out_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """Factors that were fitted to measured steps. model: how many there are, in words."""

    source: str
    model: str
    factors: Factors
    rows: tuple[AnchorRow, ...]

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
        errors = [log(row.measured_s / row.left_out_s) for row in self.rows]
        return signed_interval(errors, predicted_s, f"anchors of {self.source}")

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "source": self.source,
            "model": self.model,
            "factors": {str(part): factor for part, factor in self.factors.items()},
            "error_pct": 100 * self.error,
            "left_out_error_pct": 100 * self.left_out_error,
            "rows": [asdict(row) for row in self.rows],
        }
