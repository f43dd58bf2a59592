"""Simulated launches for validation/verdicts.py: their noise, and rows of two sides."""

import math
import random
from collections.abc import Callable, Sequence

from stepmark.ground.launches import Row, Sample

SD = 0.01  # of a launch, unless said otherwise
Draw = Callable[[random.Random, float], float]


def normal(draw: random.Random, sd: float) -> float:
    """Return the logarithm of a time that is normally distributed."""
    return math.log(max(0.5, 1 + draw.gauss(0, sd)))


def lognormal(draw: random.Random, sd: float) -> float:
    return draw.gauss(0, sd)


def bimodal(draw: random.Random, sd: float) -> float:
    """One launch in five is 4 % slower."""
    return draw.gauss(0, sd) + (0.04 if draw.random() < 0.2 else 0.0)


def heavy(draw: random.Random, sd: float) -> float:
    """Student's t with three degrees of freedom, of this standard deviation."""
    chi_square = sum(draw.gauss(0, 1) ** 2 for _ in range(3)) / 3
    return sd * draw.gauss(0, 1) / math.sqrt(chi_square * 3)


def row(a: Sequence[float], b: Sequence[float], past: Sequence[Sequence[float]] = ()) -> Row:
    """Return a row of launches in no order."""
    runs = tuple({str(n): log for n, log in enumerate(run)} for run in past)
    return Row(
        kind="",
        base=Sample(logs={f"a{n}": log for n, log in enumerate(a)}, past=runs),
        other=Sample(logs={f"b{n}": log for n, log in enumerate(b)}, past=runs),
    )


def blocks(a: Sequence[float], b: Sequence[float]) -> Row:
    """Return a row whose first side was measured before the second."""
    logs = [{f"{s}{n}": log for n, log in enumerate(v)} for s, v in (("a", a), ("b", b))]
    starts = [{name: float(n + i * len(a)) for n, name in enumerate(logs[i])} for i in (0, 1)]
    return Row(
        kind="",
        base=Sample(logs=logs[0], starts=starts[0]),
        other=Sample(logs=logs[1], starts=starts[1]),
    )


def rounds(a: Sequence[float], b: Sequence[float]) -> Row:
    return Row(
        kind="",
        base=Sample(logs={str(n): log for n, log in enumerate(a)}),
        other=Sample(logs={str(n): log for n, log in enumerate(b)}),
        by_round=True,
    )


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"
