"""What a process of a search does: estimate a share of the layouts, simulate one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layout_space import Axes, LayoutSpace
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

    @property
    def row(self) -> Row:
        """What it differs in from others."""
        return {**self.candidate.axes, "dp": self.candidate.parallel.data_ranks}


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A simulated layout. figures and notes: of its prediction."""

    candidate: Candidate
    row: Row
    ledger: Ledger
    figures: Mapping[str, Any]
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """A layout that needs more memory than allowed."""

    needed_bytes: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """The layouts of some axes.

    refused: the first reason of a framework, which are no layouts. errors: of layouts whose
    step has no time. least_bytes: of those that cannot fit, infinite without one.
    """

    estimated: Sequence[Estimated]
    num_layouts: int
    num_too_large: int
    least_bytes: float
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
        space = LayoutSpace(
            options=cluster.options,
            num_gpus=cluster.num_gpus,
            gpus_per_host=cluster.gpus_per_host,
        )
        estimated: list[Estimated] = []
        errors: list[ConfigError] = []
        too_large: list[float] = []
        num_layouts = 0
        for candidate in space.layouts(axes):
            num_layouts += 1
            needed = least_bytes(candidate)
            if needed > cluster.most_bytes:
                too_large.append(needed)
                continue
            try:
                step_s = self._estimator.step_s(candidate)
            except ConfigError as error:  # as messages that do not divide
                errors.append(error)
                continue
            estimated.append(Estimated(candidate=candidate, step_s=step_s, least_bytes=needed))
        return Share(
            estimated=estimated,
            num_layouts=num_layouts,
            num_too_large=len(too_large),
            least_bytes=min(too_large, default=float("inf")),
            refused=next(iter(space.refused), None),
            errors=errors,
        )

    def simulated(self, layout: Estimated) -> Simulated | TooLarge | ConfigError:
        """Return a layout as `stepmark predict` simulates it, or why there is no such step."""
        candidate = layout.candidate
        try:
            if candidate.needed_bytes > self.cluster.most_bytes:
                return TooLarge(needed_bytes=candidate.needed_bytes)
            prediction = self.cluster.predicted(candidate)
            figures = prediction.figures()
        except ConfigError as error:  # as messages that do not divide
            return error
        row = {
            "gpus": self.cluster.num_gpus,
            **layout.row,
            **row_of(figures),
            "estimated_s": layout.step_s,
        }
        return Simulated(
            candidate=candidate,
            row=row,
            ledger=prediction.step.ledger,
            figures=figures,
            notes=prediction.notes,
        )
