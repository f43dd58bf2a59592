"""What a process of a search does: estimate a share of the layouts, simulate one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layout_space import Axes
from stepmark.layouts.least_memory import least_bytes
from stepmark.layouts.stage_costs import Estimator
from stepmark.predictions.prediction_grid import Row, row_of
from stepmark.timeline.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """A layout that may fit. least_bytes: that it needs at least."""

    candidate: Candidate
    step_s: float
    least_bytes: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A simulated layout. figures and notes: of its prediction."""

    candidate: Candidate
    row: Row
    ledger: Ledger
    figures: Mapping[str, Any]
    notes: Sequence[str]

    @property
    def time_s(self) -> float:
        """Return the seconds of the step: measured ones, or else predicted ones."""
        return float(self.row["measured_s"] or self.row["step_s"])


@dataclass(frozen=True, kw_only=True)
class Share:
    """The layouts of some axes.

    too_large: layouts that cannot fit, with the bytes that they need at least. refused: the
    first reason of a framework, which are no layouts. errors: of layouts whose step has no
    time.
    """

    estimated: Sequence[Estimated]
    too_large: Sequence[tuple[float, Candidate]]
    num_layouts: int
    refused: ConfigError | None
    errors: Sequence[ConfigError]


@dataclass
class Searcher:
    """Estimates and simulates layouts."""

    cluster: Cluster

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator(self.cluster.seconds, self.cluster.send_s)

    def share(self, axes: Sequence[Axes]) -> Share:
        """Return the layouts with these axes, estimated where they may fit."""
        cluster = self.cluster
        space = cluster.space
        estimated: list[Estimated] = []
        errors: list[ConfigError] = []
        too_large: list[tuple[float, Candidate]] = []
        num_layouts = 0
        for candidate in space.layouts(axes):
            num_layouts += 1
            needed = least_bytes(candidate)
            if needed > cluster.most_bytes:
                too_large.append((needed, candidate))
                continue
            try:
                step_s = self._estimator.step_s(candidate)
            except ConfigError as error:  # as messages that do not divide
                errors.append(error)
                continue
            estimated.append(Estimated(candidate=candidate, step_s=step_s, least_bytes=needed))
        return Share(
            estimated=estimated,
            too_large=too_large,
            num_layouts=num_layouts,
            refused=next(iter(space.refused), None),
            errors=errors,
        )

    def simulated(self, layout: Estimated) -> Simulated | ConfigError | None:
        """Return a layout as `stepmark predict` simulates it, or why there is no such step.

        None: it needs more memory than allowed.
        """
        candidate = layout.candidate
        try:
            if candidate.needed_bytes > self.cluster.most_bytes:
                return None
            prediction = self.cluster.predicted(candidate)
            figures = prediction.figures()
        except ConfigError as error:  # as messages that do not divide
            return error
        row = {
            "gpus": self.cluster.num_gpus,
            **candidate.row,
            **row_of(figures),
            "estimated_s": layout.step_s,
            "measured_s": self.cluster.measured_s(candidate),
        }
        return Simulated(
            candidate=candidate,
            row=row,
            ledger=prediction.step.ledger,
            figures=figures,
            notes=prediction.notes,
        )
