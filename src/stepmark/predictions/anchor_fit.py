"""Factors on costs that bring predicted steps near measured ones, chosen by leaving one out.

A step takes as long as its device, or as its host where that is slower. The device's time is
the sum of its critical path by part, in proportion to the factors.

The logarithm of a factor is a common one plus its own deviation. Errors count by Cauchy's
loss, since a step that waits for what is not modelled, such as an allocator that frees its
cache, says nothing of costs; a ridge keeps deviations near 0. No factor, one for all costs, and
several with a weaker or a stronger ridge are compared by this loss of steps that are left out.
The best is used where its mean gain over no factor is above 0 by Student's t: a few steps that
wait for the same would else give all others a factor that makes them worse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stepmark.ground.ratio import t_quantile
from stepmark.predictions.factors import Factors, Part

# Of logarithms: an error that is large, and standard deviations that are expected of the common
# factor and of deviations from it.
_LARGE = 0.1
_COMMON = 1.0
_DEVIATIONS = (0.1, 0.3, 1.0)
# The host's factor does not change a step that its device bounds: larger ones are tried, too.
_HOST_STARTS = (1.0, 3.0, 9.0)
_START_SHARES = (0.2, 0.5)  # of steps that are slower by a common factor
_MOST_ROUNDS = 50
_CLOSE = 1e-6
_HALVINGS = 8
_FEWEST = 4  # anchors that can tell several factors
_SIMPLER = 0.98  # more factors must lower the error to this share
_PROBABILITY = 0.95  # of the one-sided test of a gain

_Array = npt.NDArray[np.float64]
_PARTS = tuple(Part)
_HOST = _PARTS.index(Part.HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorStep:
    """A measured step and what its predicted time is made of, in seconds without factors.

    parts_s: of the device's critical path. host_s: the host's work.
    scale: of the time predicted with the last factors over the one by these sums.
    """

    measured_s: float
    parts_s: Factors
    host_s: float = 0.0
    scale: float = 1.0

    def time_s(self, factors: Factors) -> float:
        """Return the predicted seconds with factors."""
        work_s = sum(factors.get(part, 1.0) * time_s for part, time_s in self.parts_s.items())
        host_s = factors.get(Part.HOST, 1.0) * self.host_s
        return self.scale * max(work_s, host_s)

    def scaled(self, factors: Factors, predicted_s: float) -> "AnchorStep":
        """Return the step with the scale by which it is predicted with these factors."""
        return replace(self, scale=self.scale * predicted_s / self.time_s(factors))


class FactorModel(NamedTuple):
    """How many factors there are. deviation: expected of each from the common one."""

    name: str
    has_common: bool = True
    deviation: float = 0.0


_NONE = FactorModel("none is shown to lower the error of steps left out", has_common=False)
_ONE = FactorModel("one for all costs")
_SEVERAL = tuple(FactorModel("one per kind of cost", True, own) for own in _DEVIATIONS)


def choose(steps: Sequence[AnchorStep]) -> FactorModel:
    """Return the model of the least error of steps left out; the simplest of equal ones."""
    without = _losses(steps, left_out_s(_NONE, steps))
    best, best_losses = _NONE, without
    for model in (_ONE, *(_SEVERAL if len(steps) >= _FEWEST else ())):
        losses = _losses(steps, left_out_s(model, steps))
        if np.mean(losses) < _SIMPLER * np.mean(best_losses):
            best, best_losses = model, losses
    return best if _is_shown(without - best_losses) else _NONE


def _is_shown(gains: _Array) -> bool:
    """Return whether the mean of gains is above 0 by more than chance makes it."""
    if len(gains) < 2:
        return False
    error = np.std(gains, ddof=1) / sqrt(len(gains))
    return bool(np.mean(gains) > t_quantile(_PROBABILITY, len(gains) - 1) * error)


def left_out_s(model: FactorModel, steps: Sequence[AnchorStep]) -> list[float]:
    """Return the seconds of each step by the factors of all others."""
    times_s = []
    for index, step in enumerate(steps):
        others = [*steps[:index], *steps[index + 1 :]]
        times_s.append(step.time_s(fitted(model, others)))
    return times_s


def _losses(steps: Sequence[AnchorStep], times_s: Sequence[float]) -> _Array:
    """Return Cauchy's loss of each step's predicted seconds."""
    measured_s = np.array([step.measured_s for step in steps])
    logs = np.log(measured_s / np.array(times_s))
    losses: _Array = np.log1p((logs / _LARGE) ** 2)
    return losses


def fitted(model: FactorModel, steps: Sequence[AnchorStep]) -> Factors:
    """Return the factors of the model by measured steps."""
    if not model.has_common or not steps:
        return {}
    problem = _Problem(model, steps)
    best = min(map(problem.solution, problem.starts()), key=problem.loss)
    logs = problem.basis @ best
    return {part: float(np.exp(own)) for part, own in zip(_PARTS, logs, strict=True)}


class _Problem:
    """Minimization over the common logarithm and, of several factors, each one's deviation.

    basis: logarithms of factors by unknowns.
    """

    def __init__(self, model: FactorModel, steps: Sequence[AnchorStep]) -> None:
        size = len(_PARTS)
        self.basis: _Array = np.ones((size, 1))
        spread = [_COMMON]
        if model.deviation:
            self.basis = np.hstack([self.basis, np.eye(size)])
            spread += [model.deviation] * size
        self._precision: _Array = np.array(spread) ** -2.0
        self._parts: _Array = np.array(
            [[own.parts_s.get(part, 0.0) for part in _PARTS] for own in steps]
        )
        self._host: _Array = np.array([own.host_s for own in steps])
        self._scale: _Array = np.log([own.scale for own in steps])
        self._measured: _Array = np.log([own.measured_s for own in steps])

    def _predicted(self, unknowns: _Array) -> tuple[_Array, _Array]:
        """Return logarithms of predicted seconds, and their slopes by those of factors."""
        factors = np.exp(self.basis @ unknowns)
        works = self._parts * factors
        device = works.sum(axis=1)
        host = self._host * factors[_HOST]
        is_late = host > device
        shares = works / device[:, None]
        shares[is_late] = 0.0
        shares[is_late, _HOST] = 1.0
        return self._scale + np.log(np.maximum(device, host)), shares

    def loss(self, unknowns: _Array) -> float:
        """Return the loss of the errors and the ridge of the unknowns."""
        predicted, _ = self._predicted(unknowns)
        return self._loss(predicted, unknowns)

    def _loss(self, predicted: _Array, unknowns: _Array) -> float:
        errors = (self._measured - predicted) / _LARGE
        return float(np.sum(np.log1p(errors**2)) + self._precision @ unknowns**2)

    def starts(self) -> Iterator[_Array]:
        """Yield unknowns to begin with, since the loss has several minima.

        They are common factors of some steps, with a host that is ahead or late.
        """
        unknowns: _Array = np.zeros(self.basis.shape[1])
        predicted, _ = self._predicted(unknowns)
        has_host = len(unknowns) > 1 and bool(np.any(self._host))
        for share in _START_SHARES:
            for host in _HOST_STARTS if has_host else _HOST_STARTS[:1]:
                start = unknowns.copy()
                start[0] = np.quantile(self._measured - predicted, share)
                if has_host:
                    start[1 + _HOST] = log(host)
                yield start

    def solution(self, unknowns: _Array) -> _Array:
        """Return the minimum near these unknowns by reweighted least squares."""
        for _ in range(_MOST_ROUNDS):
            predicted, shares = self._predicted(unknowns)
            before = self._loss(predicted, unknowns)
            errors = self._measured - predicted
            weights = 1.0 / (_LARGE**2 + errors**2)
            slopes = shares @ self.basis
            matrix = (slopes.T * weights) @ slopes + np.diag(self._precision)
            gradient = slopes.T @ (weights * errors) - self._precision * unknowns
            change = np.linalg.solve(matrix, gradient)
            for _ in range(_HALVINGS):
                if self.loss(unknowns + change) <= before:
                    break
                change = change / 2
            else:
                break
            unknowns = unknowns + change
            if np.max(np.abs(change)) < _CLOSE:
                break
        return unknowns
