"""The search of a layout: what may fit is estimated, and the best are simulated."""

import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice

from stepmark.ground.errors import ConfigError
from stepmark.ground.grouping import group_by
from stepmark.ground.options import argv
from stepmark.ground.units import format_bytes
from stepmark.ground.waiting import Waiting
from stepmark.ground.workers import Workers, cores
from stepmark.layouts.candidate import Candidate, place
from stepmark.layouts.cluster import Cluster
from stepmark.layouts.layout_space import Axes
from stepmark.layouts.layout_work import Estimated, Searcher, Share, Simulated
from stepmark.layouts.plan_options import PlanOptions
from stepmark.predictions.factors import Anchored
from stepmark.predictions.framework_job import FrameworkJob
from stepmark.predictions.prediction_grid import Row
from stepmark.predictions.sheet_errors import chance_faster

# How far estimates are above their simulations, which 99 % of a framework's do not exceed
# (validation/plan_estimates.py: 4.0 % of 609, 12.3 % of 328).
_ABOVE = {"megatron": 0.04, "pytorch": 0.123}
_MOST_SIMULATED = 200
_MOST_UNITS = 16  # hosts by which other numbers of GPUs are apart
_IN_PLACE = 8  # shares of axes that one process estimates faster than several


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """Layouts for a number of GPUs that were simulated, the fastest first.

    Measured ones, of anchors, are in the place of their measured times.
    neighbours: layouts that differ from the best in one axis each, of each axis the fastest;
    that of another framework may differ in the others, too.
    estimates: of all layouts that may fit: seconds and least bytes. num_layouts: of all;
    num_too_large: of those, layouts that need more memory than allowed, as far as they were
    looked at. errors: of layouts whose step has no time.
    """

    cluster: Cluster
    simulated: Sequence[Simulated]
    neighbours: Mapping[str, Simulated]
    estimates: Sequence[Estimated]
    num_layouts: int
    num_too_large: int
    errors: Sequence[ConfigError]
    took_s: float

    @cached_property
    def rows(self) -> list[Row]:
        """The simulated layouts. is_pareto: no faster one needs less memory.

        chance_faster: than the first, by data sheet.
        """
        rows = [each.row for each in self.simulated]
        least = [math.inf, *accumulate((row["reserved_bytes"] for row in rows), min)]
        ratios = [each.time_s / self.best.time_s for each in self.simulated[1:]]
        chances = [None, *map(self._chance_faster, ratios)]
        return [
            row | {"is_pareto": row["reserved_bytes"] < before, "chance_faster": chance}
            for row, before, chance in zip(rows, least, chances, strict=False)
        ]

    def _chance_faster(self, ratio: float) -> float | None:
        anchored = self.cluster.anchored
        has_factors = anchored is not None and bool(anchored.factors)
        is_by_sheet = not (self.cluster.options.calibration or has_factors)
        return chance_faster(ratio) if is_by_sheet else None

    @property
    def best_measured(self) -> Simulated | None:
        """The fastest layout among the anchors."""
        return next((each for each in self.simulated if each.row["measured_s"]), None)

    @property
    def best(self) -> Simulated:
        return self.simulated[0]

    def job(self, number: int) -> FrameworkJob:
        """Return the options of `stepmark predict` of a simulated layout."""
        return self.cluster.job(self.simulated[number].candidate)

    @property
    def command(self) -> str:
        """Return the command that predicts the best layout."""
        return f"stepmark predict {shlex.join(argv(self.job(0)))}"


def search(
    options: PlanOptions, num_gpus: int, anchored: Anchored | None = None
) -> LayoutSearch:
    """Return the best layouts for a number of GPUs. Raises ConfigError."""
    began_s = time.monotonic()
    cluster = Cluster(options, num_gpus, anchored)
    assert cluster.most_bytes  # raises ConfigError for another device
    # Layouts of a share have steps of few layers in common.
    shares = group_by(cluster.space.axes(), lambda axes: (axes.tp, axes.cp, axes.ep, axes.mbs))
    count = options.jobs or cores()
    with Workers(count if len(shares) > _IN_PLACE else 1, Searcher(cluster)) as workers:
        try:
            own = _Search(options=options, cluster=cluster, workers=workers)
            own.estimate([*shares.values()])
            own.simulate()
            neighbours = own.neighbours()
        except BrokenProcessPool:
            allowed = "as many as there is memory for: a process of the search ended"
            raise ConfigError("jobs", count, allowed) from None
    return LayoutSearch(
        cluster=cluster,
        simulated=own.simulated,
        neighbours=neighbours,
        estimates=own.estimated,
        num_layouts=own.num_layouts,
        num_too_large=own.num_too_large,
        errors=own.errors,
        took_s=time.monotonic() - began_s,
    )


@dataclass(kw_only=True)
class _Search:
    """The state of a search. estimated: the fastest first; a position is of this list."""

    options: PlanOptions
    cluster: Cluster
    workers: Workers[Searcher]
    estimated: list[Estimated] = field(default_factory=list)
    num_layouts: int = 0
    num_too_large: int = 0
    _results: dict[int, Simulated | ConfigError | None] = field(default_factory=dict)
    _bounds: list[tuple[float, Candidate]] = field(default_factory=list)  # of all memory
    errors: list[ConfigError] = field(default_factory=list)

    @property
    def simulated(self) -> list[Simulated]:
        """Return the simulated layouts, the fastest first."""
        own = [each for each in self._results.values() if isinstance(each, Simulated)]
        return sorted(own, key=lambda each: each.time_s)

    def estimate(self, axes: Sequence[Sequence[Axes]]) -> None:
        """Estimate all layouts. Raises ConfigError where there is none."""
        results = self.workers.map(Searcher.share, axes)
        shares: list[Share] = []
        began_s = time.monotonic()
        with Waiting(f"estimating layouts of {self.cluster.num_gpus} GPUs") as waiting:
            for share in results:
                shares.append(share)
                # The first groups, of the smallest degrees, have the most layouts.
                left_s = (time.monotonic() - began_s) * (len(axes) / len(shares) - 1)
                waiting.progress = (
                    f"{len(shares)} of {len(axes)} groups, at most about {left_s / 60:.0f} "
                    "min more before the best are simulated"
                )
        self.num_layouts = sum(share.num_layouts for share in shares)
        self._bounds = [each for share in shares for each in share.too_large]
        self.num_too_large = len(self._bounds)
        if not self.num_layouts:
            refused = [share.refused for share in shares if share.refused]
            raise self._unsuitable(refused[0]) if refused else self._no_batch()
        self.estimated = sorted(
            (each for share in shares for each in share.estimated), key=lambda own: own.step_s
        )
        self._bounds += [(each.least_bytes, each.candidate) for each in self.estimated]
        self.errors = [error for share in shares for error in share.errors]

    def simulate(self) -> None:
        """Simulate while another layout may be the best. Raises ConfigError if none fits."""
        with Waiting("simulating the best layouts") as waiting:
            position = 0
            while worth := self._worth(position):
                self._simulate(worth)
                waiting.progress = f"{len(self._results)} so far"
                position = worth[-1] + 1
            self._simulate(self._front())
            self._simulate(
                position
                for position, each in enumerate(self.estimated)
                if self.cluster.measured_s(each.candidate)
            )
        if not self.simulated:
            raise self._none() if self.num_too_large else self.errors[0]

    def _worth(self, first: int) -> list[int]:
        """Return the next positions, of layouts that are shown or may be the best."""
        done = self.simulated
        best_s = float(done[0].row["step_s"]) if done else math.inf
        size = max(self.workers.count, self.options.top - len(done))
        last = min(first + size, len(self.estimated))
        if len(done) >= max(self.options.top, _MOST_SIMULATED):
            return []
        return [
            position
            for position in range(first, last)
            if len(done) + position - first < self.options.top
            or _least_s(self.estimated[position]) <= best_s
        ]

    def _simulate(self, positions: Iterable[int]) -> None:
        """Simulate layouts that are not simulated yet."""
        new = [position for position in positions if position not in self._results]
        layouts = [self.estimated[position] for position in new]
        results = self.workers.map(Searcher.simulated, layouts)
        self._results |= zip(new, results, strict=True)
        for position in new:
            result = self._results[position]
            if result is None:
                self.num_too_large += 1
            elif isinstance(result, ConfigError):
                self.errors.append(result)

    def _front(self) -> Iterator[int]:
        """Yield layouts than which no other one is faster with less memory, by estimate."""
        least = math.inf
        for position, layout in enumerate(self.estimated):
            if layout.least_bytes < least:
                least = layout.least_bytes
                yield position

    def neighbours(self) -> dict[str, Simulated]:
        """Return the fastest layout that differs from the best in one axis, by this axis.

        That of another framework may differ in all: each has its own best degrees.
        """
        best = self.simulated[0].candidate.axes
        waiting: dict[str, list[int]] = defaultdict(list)
        for position, layout in enumerate(self.estimated):
            own = layout.candidate.axes
            changed = [axis for axis, value in best.items() if own[axis] != value]
            if len(changed) == 1 or "framework" in changed[:1]:
                waiting[changed[0]].append(position)
        neighbours: dict[str, Simulated] = {}
        with Waiting("simulating layouts like the best"):
            while waiting:
                self._simulate(positions[0] for positions in waiting.values())
                for axis, positions in [*waiting.items()]:
                    result = self._results[positions.pop(0)]
                    if isinstance(result, Simulated):
                        neighbours[axis] = result
                    if axis in neighbours or not positions:
                        del waiting[axis]
        return neighbours

    def _no_batch(self) -> ConfigError:
        """Return that the batch is not divided by any layout."""
        allowed = (
            f"one that layouts of {self.cluster.num_gpus} GPUs divide: a multiple of the data "
            "ranks and micro-batches of one of them"
        )
        return ConfigError("gbs", self.options.gbs, allowed)

    def _unsuitable(self, refused: ConfigError) -> ConfigError:
        """Return why a given degree has no layout, or near numbers of GPUs that have one."""
        if getattr(self.options, refused.field, None):
            return refused
        count = self.cluster.num_gpus
        unit = min(self.cluster.gpus_per_host, count)
        first = max(unit, (count // unit - _MOST_UNITS) * unit)
        others = range(first, count + _MOST_UNITS * unit, unit)
        near = sorted(others, key=lambda other: abs(other - count))
        spaces = ((other, Cluster(self.options, other).space) for other in near)
        fit = (str(other) for other, own in spaces if any(own.layouts([*own.axes()])))
        words = " or ".join(islice(fit, 2))
        allowed = f"a number that has layouts with --gbs {self.options.gbs}, such as {words}"
        return ConfigError("gpus", count, allowed) if words else refused

    def _none(self) -> ConfigError:
        """Return that no layout fits, with the one that needs the least memory."""
        bounds = sorted(self._bounds, key=lambda own: own[0])
        best = bounds[0][1]
        for bound, candidate in bounds:
            if bound >= best.needed_bytes:
                break
            best = min(best, candidate, key=lambda own: own.needed_bytes)
        sizes = [format_bytes(round(x)) for x in (best.needed_bytes, self.cluster.most_bytes)]
        allowed = (
            f"more GPUs, or ones with more memory: no layout needs less than {sizes[0]} of a "
            f"GPU ({place(best.row)}), which may give {sizes[1]}"
        )
        return ConfigError("gpus", self.cluster.num_gpus, allowed)


def _least_s(layout: Estimated) -> float:
    """Return the seconds below which the simulation of a layout is in 1 % of all."""
    return layout.step_s / (1 + _ABOVE[layout.candidate.framework])
