"""Count wrong and missing verdicts of comparisons on simulated launches whose truth is known.

    python validation/verdicts.py             # all experiments, fixed seeds: 90 minutes
    python validation/verdicts.py --only tables --scale 0.1

It calls the function that judges the rows of `stepmark compare`. docs/definitions.md has the
table that it prints.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from simulated_launches import (
    NOISES,
    ROWS,
    SD,
    Noise,
    bimodal,
    blocks,
    heavy,
    lognormal,
    normal,
    percent,
    rounds,
    row,
    simulate,
)
from simulated_sweeps import short_sweeps, sweeps

from stepmark.comparison.acceptance import accept, baseline_needed, launches_needed
from stepmark.ground.launches import Row
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import judge


def is_verdict(ratio: Ratio) -> bool:
    return ratio.verdict in (Verdict.FASTER, Verdict.SLOWER)


def half_width(ratio: Ratio) -> float:
    assert ratio.high is not None
    assert ratio.low is not None
    return math.log(ratio.high / ratio.low) / 2


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


def rows_with_verdict(rows: Sequence[Row]) -> set[int]:
    return {index for index, ratio in enumerate(judge(rows)) if is_verdict(ratio)}


def tables(scale: float) -> Iterator[Sequence[str]]:
    """Tables of 68 rows: any false verdict, and the share of changed rows that is seen.

    Seen of rows that are quiet (no noisier than the median) and have no states. Against: tables
    of which a row is slower, where all are faster.
    """
    yield (
        "rows",
        "A/A: tables with a false verdict",
        "all +3 %: seen",
        "against",
        "all +5 %: seen",
        "against",
        "one +3 %, n = 3",
        "one +3 %, n = 6",
        "one +5 %, n = 3",
        "half +3 %: false share",
        "rows with states: two states",
    )
    count = int(200 * scale)
    for noise in NOISES:
        draw = random.Random(2)
        false, named = _unmoved(draw, noise, 5 * count)
        ones = ((3, 0.03), (6, 0.03), (3, 0.05))
        yield (
            noise.name,
            percent(false),
            *_all_moved(draw, noise, 0.03, count // 2),
            *_all_moved(draw, noise, 0.05, count // 2),
            *(
                _one_moved(draw, noise, launches, change, count) if noise.launches == 3 else "-"
                for launches, change in ones
            ),
            percent(_false_share(draw, noise, count // 2)),
            "-" if named is None else percent(named, 1),
        )


def _unmoved(draw: random.Random, noise: Noise, count: int) -> tuple[float, float | None]:
    """Return the share of tables with a false verdict, and of rows with states so named."""
    false = named = with_states = 0
    for _ in range(count):
        ratios = judge(simulate(draw, noise, {}).rows)
        false += any(map(is_verdict, ratios))
        if noise.states:
            named += sum("two states" in ratio.reason for ratio in ratios[::10])
            with_states += len(ratios[::10])
    return false / count, named / with_states if with_states else None


def _all_moved(draw: random.Random, noise: Noise, change: float, count: int) -> tuple[str, str]:
    """Return the share of quiet rows that are seen, and of tables with a wrong direction."""
    seen = counted = against = 0
    for _ in range(count):
        table = simulate(draw, noise, dict.fromkeys(range(ROWS), change))
        ratios = judge(table.rows)
        seen += sum(ratios[index].verdict is Verdict.FASTER for index in table.counted)
        counted += len(table.counted)
        against += any(ratio.verdict is Verdict.SLOWER for ratio in ratios)
    return percent(seen / counted, 1), percent(against / count, 1)


def _one_moved(
    draw: random.Random, noise: Noise, launches: int, change: float, count: int
) -> str:
    """Return how often the only row that changed is seen, if it is a quiet one."""
    seen = counted = 0
    for _ in range(count):
        table = simulate(draw, noise, {1: change}, launches=launches)
        if 1 in table.counted:
            seen += judge(table.rows)[1].verdict is Verdict.FASTER
            counted += 1
    return percent(seen / counted, 1)


def _false_share(draw: random.Random, noise: Noise, count: int) -> float:
    """Return the mean share of wrong verdicts where the first half of the rows is faster."""
    half = dict.fromkeys(range(ROWS // 2), 0.03)
    shares = []
    for _ in range(count):
        ratios = judge(simulate(draw, noise, half).rows)
        verdicts = [index for index, ratio in enumerate(ratios) if is_verdict(ratio)]
        right = sum(i in half and ratios[i].verdict is Verdict.FASTER for i in verdicts)
        shares.append(1 - right / len(verdicts) if verdicts else 0.0)
    return sum(shares) / count


def quiet_history(scale: float) -> Iterator[Sequence[str]]:
    """One launch a side, history of two runs of five launches: tables with a false verdict."""
    yield ("history", "A/A", "a quarter of the rows +5 %: false", "seen")
    count = int(1000 * scale)
    for factor in (1, 3):
        draw, cells = random.Random(3), []
        for moved in ({}, dict.fromkeys(range(ROWS // 4), 0.05)):
            wrong = right = 0
            for _ in range(count):
                rows = []
                for index in range(ROWS):
                    past = [[draw.gauss(0, SD / factor) for _ in range(5)] for _ in range(2)]
                    faster = math.log1p(moved.get(index, 0.0))
                    rows.append(row([draw.gauss(0, SD)], [draw.gauss(-faster, SD)], past))
                verdicts = rows_with_verdict(rows)
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


EXPERIMENTS = (
    *(acceptance, baselines, sweeps, short_sweeps),
    *(single_rows, tables, quiet_history, drift, wild),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {function.__name__.replace("_", "-"): function for function in EXPERIMENTS}
    parser.add_argument("--only", choices=[*names], help="one experiment")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the simulations")
    options = parser.parse_args()
    for name, function in names.items():
        if options.only in (None, name):
            print(f"\n{function.__doc__}\n")
            for place, cells in enumerate(function(options.scale)):
                print(f"| {' | '.join(cells)} |", flush=True)
                if place == 0:
                    print(f"|{'---|' * len(cells)}", flush=True)


if __name__ == "__main__":
    main()
