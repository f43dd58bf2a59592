"""Simulated sweeps for validation/verdicts.py: the product's own functions race and confirm."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from simulated_launches import SD, Draw, bimodal, heavy, normal, percent, rounds, slow

from stepmark.cases.sweep import MIN_GAIN
from stepmark.comparison.comparison import Cell, Comparison, Line, Series
from stepmark.comparison.racing import LEAST_FRESH, fresh_rounds, standing
from stepmark.comparison.recommendation import Advice, advise, confirm
from stepmark.ground.launches import Row
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.variance import Variance
from stepmark.ground.verdicts import judge

Log = dict[str, list[list[float]]]  # of a setting: its rounds by size


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is swept. rounds: at most. fresh: rounds that the budget has room for.

    repeats: variance of a launch on other machines, if known.
    """

    settings: int = 8
    sizes: int = 20
    rounds: int = 5
    fresh: int = 5
    least_fresh: int = LEAST_FRESH
    repeats: Variance | None = None


WHOLE = Extent()
# Three sizes, and a budget of a round of three settings and a fresh one of two.
SHORT = Extent(
    settings=2, sizes=3, rounds=1, fresh=1, least_fresh=1, repeats=Variance(SD**2, 5)
)


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A simulated sweep: what it selects and confirms, and its launches.

    verdicts: faster and slower of the rounds that select, after the setting.
    """

    selection: Advice
    confirmed: Advice
    dropped: set[str]
    verdicts: list[str]
    race: int
    fresh: int


def sweeps(scale: float) -> Iterator[Sequence[str]]:
    """Eight settings beside the default, 20 sizes, five rounds, sd 1 %: raced and confirmed."""
    yield (
        "noise",
        "settings",
        "a faster one recommended",
        "one that is not faster recommended",
        "faster ones dropped",
        "confirmed gains: coverage in fresh rounds",
        "in the rounds that selected",
        "launches that select",
        "without a race",
        "fresh launches",
    )
    others = range(1, WHOLE.settings)
    scenarios = {
        "all equal": {},
        "one +5 %": {0: 0.05},
        "one +3 %": {0: 0.03},
        "all +3 %": dict.fromkeys(range(WHOLE.settings), 0.03),
        "one +5 %, others -5 %": {0: 0.05, **dict.fromkeys(others, -0.05)},
        "all -5 %": dict.fromkeys(range(WHOLE.settings), -0.05),
    }
    noises = {
        "normal": (normal, 0.0),
        "bimodal": (bimodal, 0.0),
        "half common to a launch": (normal, 0.5),
    }
    count = int(400 * scale)
    for noise, (shape, common) in noises.items():
        for name, gains in scenarios.items():
            launch = partial(launch_logs, random.Random(6), shape, common, WHOLE.sizes)
            swept = [simulate_sweep(launch, gains, WHOLE) for _ in range(count)]
            yield (noise, name, *_shares(swept, gains))


def short_sweeps(scale: float) -> Iterator[Sequence[str]]:
    """Two settings beside the default, 3 sizes, one round and one fresh one, by repeats."""
    yield (
        "noise, of which the repeats show sd 1 %",
        "equal: any false verdict",
        "equal: one recommended",
        "one is 41 % slower: seen at all sizes",
        "one is 41 % faster: recommended",
        "coverage of its gain",
        "one is 20 % faster: recommended",
    )
    count = int(2000 * scale)
    for noise, (shape, common, factor) in SHORT_NOISES.items():
        launch = partial(launch_logs, random.Random(7), shape, common, SHORT.sizes, factor)
        equal, slower, fast, faster = (
            [simulate_sweep(launch, {0: gain}, SHORT) for _ in range(count)]
            for gain in (0.0, 1 / 1.41 - 1, 0.41, 0.2)
        )
        held = [
            _covers(pick.ratio, 1.41)
            for sweep in fast
            for pick in sweep.confirmed.picks
            if pick.winner == "0" and pick.ratio
        ]
        yield (
            noise,
            percent(sum(bool(sweep.verdicts) for sweep in equal) / count),
            percent(sum(sweep.confirmed.single is not None for sweep in equal) / count),
            percent(sum(s.verdicts.count("0 slower") == SHORT.sizes for s in slower) / count),
            percent(sum(sweep.confirmed.single == "0" for sweep in fast) / count),
            percent(sum(held) / max(1, len(held)), 1),
            percent(sum(sweep.confirmed.single == "0" for sweep in faster) / count),
        )


# Shape, share that is common to a launch, and by how much noisier this machine is.
SHORT_NOISES = {
    "normal": (normal, 0.0, 1.0),
    "common to a launch": (normal, 1.0, 1.0),
    "bimodal": (bimodal, 0.5, 1.0),
    "heavy tails": (heavy, 0.5, 1.0),
    "twice as noisy": (normal, 0.5, 2.0),
    "one launch in five 10 % slower": (slow, 1.0, 1.0),
}


def _shares(sweeps: Sequence[Swept], gains: Mapping[int, float]) -> Iterator[str]:
    """Yield shares of sweeps, shares of confirmed gains that the interval holds, launches."""
    count = len(sweeps)
    faster = {str(setting) for setting, gain in gains.items() if gain > 0}
    right = sum(sweep.confirmed.single in faster for sweep in sweeps)
    yield percent(right / count, 1) if faster else "-"
    yield percent(sum(bool(set(s.confirmed.selected) - faster) for s in sweeps) / count)
    yield percent(sum(faster <= sweep.dropped for sweep in sweeps) / count) if faster else "-"
    fresh, selecting = [], []
    for sweep in sweeps:
        for first, pick in zip(sweep.selection.picks, sweep.confirmed.picks, strict=True):
            if pick.winner and pick.ratio and first.ratio:
                true = 1 + gains.get(int(pick.winner), 0.0)
                fresh.append(_covers(pick.ratio, true))
                selecting.append(_covers(first.ratio, true))
    for covers in (fresh, selecting):
        yield percent(sum(covers) / len(covers), 1) if covers else "-"
    yield f"{sum(sweep.race for sweep in sweeps) / count:.1f}"
    yield f"{(WHOLE.settings + 1) * WHOLE.rounds}"
    yield f"{sum(sweep.fresh for sweep in sweeps) / count:.1f}"


def _covers(ratio: Ratio, true: float) -> bool:
    return (ratio.low or 0.0) <= true <= (ratio.high or math.inf)


def launch_logs(
    draw: random.Random, shape: Draw, common: float, sizes: int, factor: float = 1.0
) -> list[float]:
    """Return the logarithms of one launch's times by size. common: share of the variance."""
    sd = factor * SD
    level = math.sqrt(common) * shape(draw, sd)
    return [level + math.sqrt(1 - common) * shape(draw, sd) for _ in range(sizes)]


def simulate_sweep(
    launch: Callable[[], list[float]], gains: Mapping[int, float], extent: Extent
) -> Swept:
    """Race and confirm as the product does; settings are numbers from 0."""
    names = ["default", *map(str, range(extent.settings))]
    logs: Log = {name: [[] for _ in range(extent.sizes)] for name in names}
    dropped: set[str] = set()
    race = number = 0
    is_decided = False
    while number < extent.rounds and not is_decided:
        number += 1
        race += _measure(launch, gains, {n: logs[n] for n in names if n not in dropped})
        left = {n: _rows(logs, n, extent.repeats) for n in names[1:] if n not in dropped}
        state = standing(left, rounds=number, num_settings=extent.settings, gain=MIN_GAIN)
        dropped |= state.dropped
        is_decided = state.is_decided
    raced = _comparison(logs, extent.repeats)
    selection = advise(raced, min_gain=MIN_GAIN, dropped=dropped)
    fresh: Log = {
        name: [[] for _ in range(extent.sizes)] for name in ("default", *selection.selected)
    }
    chosen = [pick.ratio for pick in selection.picks if pick.winner and pick.ratio]
    count = 0
    if chosen:
        least, most = extent.least_fresh, extent.fresh
        count = fresh_rounds(chosen, rounds=number, least=least, most=most)
    launches = sum(_measure(launch, gains, fresh) for _ in range(count))
    comparison = _comparison(fresh, extent.repeats) if count else None
    return Swept(
        selection=selection,
        confirmed=confirm(selection, comparison, count),
        dropped=dropped,
        verdicts=[
            f"{name} {cell.ratio.verdict}"
            for line in raced.lines
            for name, cell in line.cells.items()
            if cell.ratio and cell.ratio.verdict in (Verdict.FASTER, Verdict.SLOWER)
        ],
        race=race,
        fresh=launches,
    )


def _measure(launch: Callable[[], list[float]], gains: Mapping[int, float], logs: Log) -> int:
    """Add a round to these settings. Returns its launches."""
    for name, sizes in logs.items():
        gain = 0.0 if name == "default" else math.log1p(gains.get(int(name), 0.0))
        for values, log in zip(sizes, launch(), strict=True):
            values.append(log - gain)
    return len(logs)


def _rows(logs: Log, name: str, repeats: Variance | None) -> dict[int, Row]:
    pairs = zip(logs["default"], logs[name], strict=True)
    return {size: rounds(a[: len(b)], b, repeats) for size, (a, b) in enumerate(pairs)}


def _comparison(logs: Log, repeats: Variance | None) -> Comparison:
    cells: list[dict[str, Cell]] = [{"default": cell(None)} for _ in logs["default"]]
    for name in logs:
        if name != "default":
            ratios = judge(list(_rows(logs, name, repeats).values()))
            for row, ratio in zip(cells, ratios, strict=True):
                row[name] = cell(ratio)
    lines = [
        Line(fields={}, size_bytes=2**place, unit="s", cells=row)
        for place, row in enumerate(cells)
    ]
    return Comparison(names=tuple(logs), lines=tuple(lines))


def cell(ratio: Ratio | None) -> Cell:
    return Cell(series=Series(fields={}, launches={}), value=1.0, ratio=ratio)
