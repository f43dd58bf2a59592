"""Count wrong and missing verdicts of comparisons on simulated launches whose truth is known.

    python recipes/verdicts.py                 # all experiments, fixed seeds: about 25 minutes
    python recipes/verdicts.py --only tables --scale 0.1

It calls the function that judges the rows of `stepmark compare`. docs/definitions.md has the
table that it prints.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stepmark.core.acceptance import accept, baseline_needed, launches_needed
from stepmark.core.comparison import Cell, Comparison, Line
from stepmark.core.launches import Row, Sample
from stepmark.core.racing import fresh_rounds, standing
from stepmark.core.ratio import Ratio, Verdict
from stepmark.core.sweep import MIN_GAIN
from stepmark.core.verdicts import judge
from stepmark.report.recommendation import Advice, advise, confirm

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


def is_verdict(ratio: Ratio) -> bool:
    return ratio.verdict in (Verdict.FASTER, Verdict.SLOWER)


def half_width(ratio: Ratio) -> float:
    assert ratio.high is not None
    assert ratio.low is not None
    return math.log(ratio.high / ratio.low) / 2


def percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def single_rows(scale: float) -> Iterator[Sequence[str]]:
    """One row alone: false verdicts and coverage of the 99 % interval."""
    yield ("launches", "sd", *(f"n = {n}" for n in (1, 2, 3, 5, 10)))
    pairs = int(10_000 * scale)
    for shape in (normal, lognormal, bimodal, heavy):
        for sd in (0.003, 0.01, 0.03):
            draw, cells = random.Random(1), []
            for n in (1, 2, 3, 5, 10):
                wrong = covered = 0
                for _ in range(pairs):
                    past = [[shape(draw, sd) for _ in range(5)] for _ in range(4)]
                    a, b = ([shape(draw, sd) for _ in range(n)] for _ in range(2))
                    (ratio,) = judge([row(a, b, past if n == 1 else ())])
                    wrong += is_verdict(ratio)
                    covered += (ratio.low or 0.0) <= 1 <= (ratio.high or math.inf)
                cells.append(f"{percent(wrong / pairs)}; {percent(covered / pairs, 1)}")
            yield (shape.__name__, percent(sd, 1), *cells)


def table(
    draw: random.Random,
    n: int,
    moved: Mapping[int, float] | None = None,
    *,
    rows: int = ROWS,
    sd: float = SD,
    sd_of_sd: float = 0.0,
    common: float = 0.0,
) -> list[tuple[list[float], list[float]]]:
    """Return rows of n launches a side. moved: change of rows. common: share of the variance
    that is common to all rows of a launch. sd_of_sd: of the logarithm of rows' sd.
    """
    shared, alone = math.sqrt(common), math.sqrt(1 - common)
    launches = [[draw.gauss(0, 1) for _ in range(n)] for _ in range(2)]
    table_rows = []
    for index in range(rows):
        own = sd * math.exp(draw.gauss(0, sd_of_sd))
        a, b = (
            [own * (shared * level + alone * draw.gauss(0, 1)) for level in side]
            for side in launches
        )
        change = (moved or {}).get(index, 0.0)
        table_rows.append((a, [value - math.log1p(change) for value in b]))
    return table_rows


def rows_with_verdict(rows: Sequence[Row]) -> set[int]:
    return {index for index, ratio in enumerate(judge(rows)) if is_verdict(ratio)}


def tables(scale: float) -> Iterator[Sequence[str]]:
    """Tables of 68 rows: any false verdict, and the share of moved rows that is seen."""
    yield (
        "rows",
        "A/A: tables with a false verdict",
        "all +3 %: seen",
        "one +3 %, n = 3",
        "one +3 %, n = 6",
        "one +5 %, n = 3",
        "half +3 %: false share",
    )
    count = int(1000 * scale)
    variants: dict[str, dict[str, float]] = {
        "sd 1 %": {},
        "sds lognormal 0.3": {"sd_of_sd": 0.3},
        "half the variance common": {"common": 0.5},
        "9/10 of the variance common": {"common": 0.9},
    }
    for name, variant in variants.items():
        draw = random.Random(2)

        def simulated(n: int, moved: Mapping[int, float], number: int) -> Iterator[set[int]]:
            for _ in range(number):
                pairs = table(draw, n, moved, **variant)  # type: ignore[arg-type]  # noqa: B023
                yield rows_with_verdict([row(a, b) for a, b in pairs])

        wrong = sum(map(bool, simulated(3, {}, 4 * count))) / (4 * count)
        every = sum(map(len, simulated(3, dict.fromkeys(range(ROWS), 0.03), count)))
        one = [
            sum(0 in verdicts for verdicts in simulated(n, {0: change}, count)) / count
            for n, change in ((3, 0.03), (6, 0.03), (3, 0.05))
        ]
        half = dict.fromkeys(range(ROWS // 2), 0.03)
        shares = [
            sum(index not in half for index in verdicts) / max(1, len(verdicts))
            for verdicts in simulated(3, half, count)
        ]
        yield (
            name,
            percent(wrong),
            percent(every / count / ROWS, 1),
            *(percent(share, 1) for share in one),
            percent(sum(shares) / count),
        )


def quiet_history(scale: float) -> Iterator[Sequence[str]]:
    """One launch a side, history of two runs of five launches: tables with a false verdict."""
    yield ("history", "A/A", "a quarter of the rows +5 %: false", "seen")
    count = int(1000 * scale)
    for factor in (1, 3):
        draw, cells = random.Random(3), []
        for moved in ({}, dict.fromkeys(range(ROWS // 4), 0.05)):
            wrong = right = 0
            for _ in range(count):
                past = [table(draw, 5, sd=SD / factor) for _ in range(2)]
                verdicts = rows_with_verdict(
                    [
                        row(a, b, [run[index][0] for run in past])
                        for index, (a, b) in enumerate(table(draw, 1, moved))
                    ]
                )
                wrong += any(index not in moved for index in verdicts)
                right += sum(index in moved for index in verdicts)
            cells.append(percent(wrong / count))
        cells.append(percent(right / count / len(moved), 1))
        yield (f"{factor} x too quiet" if factor > 1 else "right", *cells)


def drift(scale: float) -> Iterator[Sequence[str]]:
    """AR(1) with sd 1 %, and 0.2 % of each row's own: side A before side B, or in rounds."""
    yield ("phi", "n", "one row: false", "68 rows: tables with a false verdict", "half-width")
    pairs = int(1000 * scale)
    for phi in (0.5, 0.9, 0.97, 0.99):
        for n in (3, 5, 10, 30):
            draw, wrong, wrong_tables, narrower = random.Random(4), 0, 0, []
            for index in range(pairs):
                levels = _ar1(draw, phi, 2 * n, SD)

                def noisy(values: Sequence[float]) -> list[float]:
                    return [value + draw.gauss(0, 0.002) for value in values]  # noqa: B023

                wrong += bool(rows_with_verdict([blocks(noisy(levels[:n]), noisy(levels[n:]))]))
                if index % 10 == 0:
                    sides = [(noisy(levels[:n]), noisy(levels[n:])) for _ in range(ROWS)]
                    block_ratios = judge([blocks(a, b) for a, b in sides])
                    wrong_tables += any(map(is_verdict, block_ratios))
                    pairs_of = [(noisy(levels[::2]), noisy(levels[1::2])) for _ in range(ROWS)]
                    in_rounds = judge([rounds(a, b) for a, b in pairs_of])
                    narrower.append(half_width(in_rounds[0]) / half_width(block_ratios[0]))
            tables_count = len(narrower)
            yield (
                f"{phi}",
                f"{n}",
                percent(wrong / pairs),
                percent(wrong_tables / tables_count, 1),
                f"{100 * sum(narrower) / tables_count - 100:+.0f} %",
            )


def wild(scale: float) -> Iterator[Sequence[str]]:
    """Sd 30 %, as small collectives whose launches the host bounds."""
    yield ("n", "verdicts", "median of the launches that would tell")
    for n in (3, 5, 10):
        draw, needed, wrong = random.Random(5), [], 0
        for _ in range(int(1000 * scale)):
            a, b = ([draw.gauss(0, 0.3) for _ in range(n)] for _ in range(2))
            (ratio,) = judge([row(a, b)])
            wrong += is_verdict(ratio)
            needed.append(ratio.launches or math.inf)
        middle = sorted(needed)[len(needed) // 2]
        yield (f"{n}", percent(wrong / len(needed)), f"{middle:g}")


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
    return Cell(fields={}, size_bytes=None, busbw_factor=None, value=1.0, ratio=ratio)


def acceptance(scale: float) -> Iterator[Sequence[str]]:
    """`check` of 46 cases, five launches of a baseline: with the launches that it asks for."""
    yield ("sd", "order", "now", "slow", "accepted", "undecided", "median launches")
    machines = int(500 * scale)
    changes = {
        "equal": {},
        "all +3 %": dict.fromkeys(range(46), 0.03),
        "one +6 %": {0: 0.06},
        "all +6 %": dict.fromkeys(range(46), 0.06),
        "one +8 %": {0: 0.08},
    }
    for sd in (0.003, 0.01, 0.03):
        for order, make in (("unknown", row), ("before, AR(1) 0.9", blocks)):
            for name, moved in changes.items():
                draw, ends, launches = random.Random(11), Counter[str](), []
                for _ in range(machines):
                    drift = _ar1(draw, 0.9, 110, SD) if make is blocks else [0.0] * 110
                    end, count = _checked(draw, sd, moved, drift, make)
                    ends[end] += 1
                    launches.append(count)
                yield (
                    percent(sd, 1),
                    order,
                    name,
                    *(
                        percent(ends[e] / machines, 1)
                        for e in ("slow", "accepted", "undecided")
                    ),
                    f"{sorted(launches)[machines // 2]}",
                )


def _checked(
    draw: random.Random,
    sd: float,
    moved: Mapping[int, float],
    drift: Sequence[float],
    make: Callable[[Sequence[float], Sequence[float]], Row],
) -> tuple[str, int]:
    """Return how a check ends, and its launches, of which it may ask for more once."""
    slower = [math.log1p(moved.get(case, 0.0)) for case in range(46)]
    base = [[x + draw.gauss(0, sd) for x in drift[:5]] for _ in slower]
    now = [[x + more + draw.gauss(0, sd) for x in drift[5:10]] for more in slower]
    count = 5
    while True:
        ratios = judge([make(a, b) for a, b in zip(base, now, strict=True)])
        decided = accept(ratios, 0.03)
        if decided.slow or not decided.undecided or count > 5:
            break
        needed = [
            launches_needed(ratios[place], 0.03, base=5, now=5, num_cases=46)
            for place in decided.undecided
        ]
        count = max((n for n in needed if n), default=0)
        if not count or None in needed:
            count = 5
            break
        for case, more in enumerate(slower):
            now[case] += [x + more + draw.gauss(0, sd) for x in drift[10 : 5 + count]]
    end = "slow" if decided.slow else "undecided" if decided.undecided else "accepted"
    return end, count


def baselines(scale: float) -> Iterator[Sequence[str]]:
    """`check` of equal machines, sd 1 %, floor 3 %, five launches: accepted at once."""
    yield ("cases", "launches needed", "drift", *(f"baseline of {n}" for n in (1, 2, 3, 5)))
    checks = int(500 * scale)
    for cases in (1, 46):
        needed = baseline_needed(0.03, now=5, num_cases=cases)
        for sd, name in ((0.0, "none"), (SD, "AR(1) 0.9 of sd 1 %")):
            draw, cells = random.Random(12), []
            for base in (1, 2, 3, 5):
                accepted = 0
                for _ in range(checks):
                    levels = _ar1(draw, 0.9, base + 5, sd)
                    logs = [[x + draw.gauss(0, SD) for x in levels] for _ in range(cases)]
                    decided = accept(judge([blocks(x[:base], x[base:]) for x in logs]), 0.03)
                    accepted += not decided.slow and not decided.undecided
                cells.append(percent(accepted / checks, 1))
            yield (f"{cases}", f"{needed}", name, *cells)


def _ar1(draw: random.Random, phi: float, count: int, sd: float) -> list[float]:
    levels = [draw.gauss(0, sd)]
    while len(levels) < count:
        levels.append(phi * levels[-1] + draw.gauss(0, sd * math.sqrt(1 - phi**2)))
    return levels


EXPERIMENTS = (acceptance, baselines, sweeps, single_rows, tables, quiet_history, drift, wild)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {function.__name__.replace("_", "-"): function for function in EXPERIMENTS}
    parser.add_argument("--only", choices=[*names], help="one experiment")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the simulations")
    options = parser.parse_args()
    for name, function in names.items():
        if options.only in (None, name):
            print(f"\n{function.__doc__}\n")  # noqa: T201
            for place, cells in enumerate(function(options.scale)):
                print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201
                if place == 0:
                    print(f"|{'---|' * len(cells)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
