"""Simulated sweeps for validation/verdicts.py: the product's own functions race and confirm."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from simulated_launches import SD, Draw, bimodal, normal, percent, rounds

from stepmark.cases.sweep import MIN_GAIN
from stepmark.comparison.comparison import Cell, Comparison, Line, Series
from stepmark.comparison.racing import fresh_rounds, standing
from stepmark.comparison.recommendation import Advice, advise, confirm
from stepmark.ground.launches import Row
from stepmark.ground.ratio import Ratio
from stepmark.ground.verdicts import judge

SETTINGS, SIZES, REPEATS = 8, 20, 5
Log = dict[str, list[list[float]]]  # of a setting: its rounds by size


@dataclass(frozen=True, kw_only=True)
class Swept:
    """A simulated sweep: what it selects and confirms, and its launches."""

    selection: Advice
    confirmed: Advice
    dropped: set[str]
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
    others = range(1, SETTINGS)
    scenarios = {
        "all equal": {},
        "one +5 %": {0: 0.05},
        "one +3 %": {0: 0.03},
        "all +3 %": dict.fromkeys(range(SETTINGS), 0.03),
        "one +5 %, others -5 %": {0: 0.05, **dict.fromkeys(others, -0.05)},
        "all -5 %": dict.fromkeys(range(SETTINGS), -0.05),
    }
    noises = {
        "normal": (normal, 0.0),
        "bimodal": (bimodal, 0.0),
        "half common to a launch": (normal, 0.5),
    }
    count = int(400 * scale)
    for noise, (shape, common) in noises.items():
        for name, gains in scenarios.items():
            launch = partial(_launch, random.Random(6), shape, common)
            yield (noise, name, *_shares([_sweep(launch, gains) for _ in range(count)], gains))


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
    yield f"{(SETTINGS + 1) * REPEATS}"
    yield f"{sum(sweep.fresh for sweep in sweeps) / count:.1f}"


def _covers(ratio: Ratio, true: float) -> bool:
    return (ratio.low or 0.0) <= true <= (ratio.high or math.inf)


def _launch(draw: random.Random, shape: Draw, common: float) -> list[float]:
    """Return the logarithms of one launch's times by size. common: share of the variance."""
    level = math.sqrt(common) * shape(draw, SD)
    return [level + math.sqrt(1 - common) * shape(draw, SD) for _ in range(SIZES)]


def _sweep(launch: Callable[[], list[float]], gains: Mapping[int, float]) -> Swept:
    """Race and confirm as the product does; settings are 0 to 7."""
    names = ["default", *map(str, range(SETTINGS))]
    logs: Log = {name: [[] for _ in range(SIZES)] for name in names}
    dropped: set[str] = set()
    race = number = 0
    is_decided = False
    while number < REPEATS and not is_decided:
        number += 1
        race += _measure(launch, gains, {n: logs[n] for n in names if n not in dropped})
        left = {n: _rows(logs, n) for n in names[1:] if n not in dropped}
        state = standing(left, rounds=number, num_settings=SETTINGS, gain=MIN_GAIN)
        dropped |= state.dropped
        is_decided = state.is_decided
    selection = advise(_comparison(logs), min_gain=MIN_GAIN, dropped=dropped)
    fresh: Log = {n: [[] for _ in range(SIZES)] for n in ("default", *selection.selected)}
    chosen = [pick.ratio for pick in selection.picks if pick.winner and pick.ratio]
    count = fresh_rounds(chosen, rounds=number, most=REPEATS) if chosen else 0
    launches = sum(_measure(launch, gains, fresh) for _ in range(count))
    comparison = _comparison(fresh) if count else None
    return Swept(
        selection=selection,
        confirmed=confirm(selection, comparison, count),
        dropped=dropped,
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


def _rows(logs: Log, name: str) -> dict[int, Row]:
    pairs = zip(logs["default"], logs[name], strict=True)
    return {size: rounds(a[: len(b)], b) for size, (a, b) in enumerate(pairs)}


def _comparison(logs: Log) -> Comparison:
    cells: list[dict[str, Cell]] = [{"default": cell(None)} for _ in range(SIZES)]
    for name in logs:
        if name != "default":
            ratios = judge(list(_rows(logs, name).values()))
            for row, ratio in zip(cells, ratios, strict=True):
                row[name] = cell(ratio)
    lines = [
        Line(fields={}, size_bytes=2**place, unit="s", cells=row)
        for place, row in enumerate(cells)
    ]
    return Comparison(names=tuple(logs), lines=tuple(lines))


def cell(ratio: Ratio | None) -> Cell:
    return Cell(series=Series(fields={}, launches={}), value=1.0, ratio=ratio)
