"""Simulated launches for validation/verdicts.py: their noise, and rows of two sides."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepmark.ground.launches import Row, Sample
from stepmark.ground.variance import Variance

SD = 0.01  # of a launch, unless said otherwise
ROWS = 68
Draw = Callable[[random.Random, float], float]


def normal(draw: random.Random, sd: float) -> float:
    """Return the logarithm of a time that is normally distributed."""
    return math.log(max(0.5, 1 + draw.gauss(0, sd)))


def lognormal(draw: random.Random, sd: float) -> float:
    return draw.gauss(0, sd)


def bimodal(draw: random.Random, sd: float) -> float:
    """One launch in five is 4 % slower."""
    return draw.gauss(0, sd) + (0.04 if draw.random() < 0.2 else 0.0)


def slow(draw: random.Random, sd: float) -> float:
    """One launch in five is 10 % slower."""
    return draw.gauss(0, sd) + (0.1 if draw.random() < 0.2 else 0.0)


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


def rounds(a: Sequence[float], b: Sequence[float], repeats: Variance | None = None) -> Row:
    """Return a row of a sweep. repeats: variance of a launch on other machines."""
    return Row(
        kind="",
        base=Sample(logs={str(n): log for n, log in enumerate(a)}),
        other=Sample(logs={str(n): log for n, log in enumerate(b)}),
        by_round=True,
        repeats=repeats,
    )


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the launches of a table vary. Standard deviations are of logarithms.

    sd: median over rows. sd_of_sd: of the logarithm of rows' sd. noisy: sd of every fourth row.
    common: share of a row's variance that all rows of a launch share. level: sd that all rows
    of a launch have in common beside their own. states: distance of the two states of every
    tenth row, in either of which a launch is. slow: probability that a launch is 4 % slower in
    all rows. heavy: Student's t with three degrees of freedom. past: runs of history, of one
    launch each. kinds: whether rows say whether they are noisy.
    """

    name: str
    launches: int = 3
    sd: float = SD
    sd_of_sd: float = 0.0
    noisy: float = 0.0
    common: float = 0.0
    level: float = 0.0
    states: float = 0.0
    slow: float = 0.0
    heavy: bool = False
    past: int = 0
    kinds: bool = False

    def counted(self, index: int, sd: float) -> bool:
        """Return whether the row is one of those whose changes should be seen."""
        has_states = bool(self.states) and index % 10 == 0
        return not has_states and sd <= self.sd * (1 + 1e-9)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Simulated rows, and the places of those whose changes should be seen."""

    rows: Sequence[Row]
    counted: frozenset[int]


def simulate(
    draw: random.Random,
    noise: Noise,
    moved: Mapping[int, float],
    *,
    launches: int | None = None,
    num_rows: int = ROWS,
) -> Table:
    """Return a table of which these rows are faster by these shares on the other side."""
    count = launches or noise.launches
    sds = [_sd_of_row(draw, noise, index) for index in range(num_rows)]
    runs = [_launch(draw, noise, sds) for _ in range(2 * count + noise.past)]
    past = tuple({f"past{number}": runs[2 * count + number]} for number in range(noise.past))
    rows = []
    for index, sd in enumerate(sds):
        faster = math.log1p(moved.get(index, 0.0))
        of_row = tuple({name: logs[index] for name, logs in run.items()} for run in past)
        rows.append(
            Row(
                kind=sd > noise.sd if noise.kinds else "",
                base=Sample(
                    logs={f"a{n}": runs[n][index] for n in range(count)},
                    past=of_row,
                ),
                other=Sample(
                    logs={f"b{n}": runs[count + n][index] - faster for n in range(count)},
                    past=of_row,
                ),
            )
        )
    counted = (index for index, sd in enumerate(sds) if noise.counted(index, sd))
    return Table(rows=rows, counted=frozenset(counted))


def _sd_of_row(draw: random.Random, noise: Noise, index: int) -> float:
    if noise.noisy and index % 4 == 0:
        return noise.noisy
    return noise.sd * math.exp(draw.gauss(0, noise.sd_of_sd))


def _launch(draw: random.Random, noise: Noise, sds: Sequence[float]) -> list[float]:
    """Return the logarithms of the times of one launch, by row."""
    level = draw.gauss(0, 1)
    slower = draw.gauss(0, noise.level) + (0.04 if draw.random() < noise.slow else 0.0)
    logs = []
    for index, sd in enumerate(sds):
        own = heavy(draw, 1.0) if noise.heavy else draw.gauss(0, 1)
        log = sd * (math.sqrt(noise.common) * level + math.sqrt(1 - noise.common) * own)
        if noise.states and index % 10 == 0 and draw.random() < 0.5:
            log += noise.states
        logs.append(log + slower)
    return logs


NOISES = (
    Noise(name="alike, sd 1 %"),
    Noise(name="a quarter sd 4 %, the rest 0.5 %", sd=0.005, noisy=0.04),
    Noise(name="the same, which rows say", sd=0.005, noisy=0.04, kinds=True),
    Noise(name="sds lognormal 0.3", sd_of_sd=0.3),
    Noise(name="sds lognormal 0.6", sd_of_sd=0.6),
    Noise(name="sds lognormal 1.0", sd_of_sd=1.0),
    Noise(name="one in ten with two states 6 % apart, sd 0.3 %", sd=0.003, states=0.06),
    Noise(
        name="two launches, each 4 % slower in all rows with 0.2, sd 0.3 %",
        launches=2,
        sd=0.003,
        slow=0.2,
    ),
    Noise(name="one launch, history of ten runs, sd 1 %", launches=1, past=10),
    Noise(name="heavy tails, sd 1 %", heavy=True),
    Noise(name="half the variance common", common=0.5),
    Noise(name="9/10 of the variance common", common=0.9),
    Noise(
        name="a quarter sd 4 %, the rest 0.5 %; 0.5 % common", sd=0.005, noisy=0.04, level=0.005
    ),
)
