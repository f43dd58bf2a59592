"""Rates of wrong and seen verdicts on simulated tables, by the noise of their rows.

validation/verdicts.py counts them on many more tables. Bounds leave room for chance: a rate of
2.5 % gives more than two of 25 tables once in 40.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from validation.simulated_launches import NOISES, ROWS, Noise, row, simulate

from stepmark.ground.launches import Row
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import judge

CERTAIN = (Verdict.FASTER, Verdict.SLOWER)
TABLES = 25
BY_NAME = {noise.name: noise for noise in NOISES}
STATES = BY_NAME["one in ten with two states 6 % apart, sd 0.3 %"]
SLOW = BY_NAME["two launches, each 4 % slower in all rows with 0.2, sd 0.3 %"]


def judged(draw: random.Random, noise: Noise, moved: Mapping[int, float]) -> list[Ratio]:
    return judge(simulate(draw, noise, moved).rows)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
def test_tables_of_equal_sides_are_rarely_wrong(noise: Noise) -> None:
    draw = random.Random(71)
    wrong = sum(
        any(ratio.verdict in CERTAIN for ratio in judged(draw, noise, {}))
        for _ in range(TABLES)
    )
    assert wrong <= 2


@pytest.mark.parametrize(
    ("name", "change", "least"),
    [
        ("alike, sd 1 %", 0.03, 0.8),
        ("a quarter sd 4 %, the rest 0.5 %", 0.03, 0.85),
        ("sds lognormal 0.6", 0.03, 0.75),
        ("sds lognormal 1.0", 0.03, 0.75),
        (STATES.name, 0.03, 0.75),
        ("one launch, history of ten runs, sd 1 %", 0.05, 0.5),
    ],
)
def test_a_change_of_all_rows_is_seen_in_quiet_ones(
    name: str, change: float, least: float
) -> None:
    draw, seen, counted, against = random.Random(72), 0, 0, 0
    for _ in range(10):
        table = simulate(draw, BY_NAME[name], dict.fromkeys(range(ROWS), change))
        ratios = judge(table.rows)
        seen += sum(ratios[place].verdict is Verdict.FASTER for place in table.counted)
        counted += len(table.counted)
        against += any(ratio.verdict is Verdict.SLOWER for ratio in ratios)
    assert seen >= least * counted
    assert against <= 1


@pytest.mark.parametrize("change", [0.0, 0.03])
def test_two_states_are_named_and_judged_by_nobody(change: float) -> None:
    draw, named, count = random.Random(73), 0, 0
    for _ in range(10):
        ratios = judged(draw, STATES, dict.fromkeys(range(ROWS), change))[::10]
        named += sum("two states" in ratio.reason for ratio in ratios)
        count += len(ratios)
        assert not any(ratio.verdict is Verdict.SLOWER for ratio in ratios)
    # Some rows have all launches in one state.
    assert named >= 0.8 * count


def test_a_row_that_differs_alone_is_no_state_without_others() -> None:
    """The same change of one row, in tables of which other rows have states or not."""
    seen = {}
    for noise in (STATES, Noise(name="no states", sd=STATES.sd)):
        draw = random.Random(74)
        ratios = [judged(draw, noise, {1: 0.06})[1] for _ in range(10)]
        seen[noise.name] = sum(ratio.verdict is Verdict.FASTER for ratio in ratios)
        doubted = [ratio for ratio in ratios if ratio.reason.startswith("two states, as")]
        assert bool(doubted) is (noise is STATES)
    assert seen["no states"] == 10
    assert seen[STATES.name] <= 1


def test_one_row_with_states_leaves_the_others_alone() -> None:
    rows = list(simulate(random.Random(78), Noise(name="", sd=STATES.sd), {1: 0.06}).rows)
    states = (0.0, 0.06, 0.06, 0.0, 0.0, 0.06)
    logs = [log + states[n] for n, log in enumerate([0.001, -0.002, 0.0, 0.002, -0.001, 0.0])]
    rows[5] = row(logs[:3], logs[3:])
    ratios = judge(rows)
    assert ratios[5].reason == "two states"
    assert ratios[1].verdict is Verdict.FASTER


def test_single_slow_launches_of_other_rows_do_not_explain_a_row_that_differs() -> None:
    """States of three against three launches, where one of six is in the slow state."""
    rows = list(simulate(random.Random(79), Noise(name="", sd=STATES.sd), {1: 2.2}).rows)
    for place, slow in ((5, 0.7), (6, 2.3), (7, 3.8)):
        rows[place] = row([0.001, -0.002, 0.0], [0.002, slow, -0.001])
    ratios = judge(rows)
    assert {ratios[place].reason for place in (5, 6, 7)} == {"two states"}
    assert ratios[1].verdict is Verdict.FASTER


def test_rounded_values_are_no_states() -> None:
    """Values that differ by the unit of their last digit, and by twenty of it."""
    (ratio,) = judge([coarse(row([0.0, 0.0, 0.1], [0.0, 0.1, 0.1]))])
    assert "states" not in ratio.reason
    (ratio,) = judge([coarse(row([0.0, 0.0, 2.0], [0.0, 2.0, 2.0]))])
    assert ratio.reason == "two states"


def coarse(exact: Row) -> Row:
    sides = [replace(side, rounding=0.1) for side in (exact.base, exact.other)]
    return replace(exact, base=sides[0], other=sides[1])


def test_two_launches_do_not_tell_a_change_that_slow_launches_explain() -> None:
    """All rows are 4 % faster, or a third."""
    for change, is_seen in ((0.04, False), (0.33, True)):
        draw = random.Random(75)
        quiet = Noise(name="quiet", launches=2, sd=SLOW.sd)
        ratios = judged(draw, quiet, dict.fromkeys(range(ROWS), change))
        faster = [ratio.verdict for ratio in ratios].count(Verdict.FASTER)
        assert faster > 0.9 * ROWS if is_seen else faster == 0
    # A third launch a side tells.
    three = Noise(name="three", launches=3, sd=SLOW.sd)
    ratios = judged(random.Random(76), three, dict.fromkeys(range(ROWS), 0.04))
    assert [ratio.verdict for ratio in ratios].count(Verdict.FASTER) > 0.9 * ROWS


def test_a_run_against_itself_is_the_same() -> None:
    rows = simulate(random.Random(77), BY_NAME["sds lognormal 1.0"], {}).rows
    equal = [type(row)(kind="", base=row.base, other=row.base) for row in rows]
    ratios = judge([*equal, *rows])
    for ratio in ratios[:ROWS]:
        assert (ratio.verdict, ratio.speed, ratio.reason) == (
            Verdict.SAME,
            1.0,
            "the same launches",
        )
        assert ratio.p_slower(0.0) == 1.0
    assert all(ratio.reason != "the same launches" for ratio in ratios[ROWS:])
