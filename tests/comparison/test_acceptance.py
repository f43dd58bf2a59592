"""Acceptance of a machine: slow, accepted, or undecided with the launches that would decide."""

import math
import random
from dataclasses import replace

import pytest

from stepmark.comparison.acceptance import (
    LAUNCH_SD,
    MARGIN,
    accept,
    baseline_needed,
    launches_needed,
)
from stepmark.ground.launches import Row, Sample
from stepmark.ground.ratio import Ratio, Verdict
from stepmark.ground.verdicts import judge

LIMIT = 0.03


def slower(by: float, se: float, df: int | None = None) -> Ratio:
    return Ratio(
        speed=1 / (1 + by),
        low=None,
        high=None,
        verdict=Verdict.CANNOT_TELL,
        reason="",
        se_log=se,
        df=df,
    )


def ends(*ratios: Ratio | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    decided = accept(ratios, LIMIT)
    return decided.slow, decided.undecided


def test_the_limits_are_those_of_normal_errors() -> None:
    """One-sided 0.7 % above the limit, and 3 % below limit and margin."""
    se = 0.004
    rejected = math.expm1(math.log1p(LIMIT) + 2.4573 * se)
    accepted = math.expm1(math.log1p(LIMIT + MARGIN) - 1.8808 * se)
    assert ends(slower(rejected + 1e-5, se)) == ((0,), ())
    assert ends(slower(min(rejected, accepted) - 1e-5, se)) == ((), ())
    wide = 0.02
    accepted = math.expm1(math.log1p(LIMIT + MARGIN) - 1.8808 * wide)
    assert ends(slower(accepted + 1e-5, wide)) == ((), (0,))
    assert ends(slower(accepted - 1e-5, wide)) == ((), ())


def test_many_cases_raise_what_one_must_show() -> None:
    se = 0.01
    alone = slower(LIMIT + 0.027, se)
    assert ends(alone)[0] == (0,)
    assert ends(alone, *[slower(0.0, se)] * 45) == ((), (0,))


def test_what_is_not_known_is_undecided() -> None:
    unknown = Ratio(speed=1.0, low=None, high=None, verdict=Verdict.CANNOT_TELL, reason="")
    assert ends(None, unknown, slower(0.0, 0.001)) == ((), (0, 1))


@pytest.mark.parametrize("by", [0.02, 0.07])
def test_the_launches_that_are_needed_decide(by: float) -> None:
    ratio = slower(by, 0.03)
    assert ends(ratio) == ((), (0,))
    count = launches_needed(ratio, LIMIT, base=50, now=2, num_cases=1)
    assert count is not None
    se = 0.03 * math.sqrt((1 / 50 + 1 / count) / (1 / 50 + 1 / 2))
    assert ends(slower(by, se))[1] == ()
    fewer = 0.03 * math.sqrt((1 / 50 + 1 / (count - 1)) / (1 / 50 + 1 / 2))
    assert ends(slower(by, fewer))[1] == (0,)


def test_no_number_of_launches_makes_up_for_a_baseline_of_few() -> None:
    assert launches_needed(slower(0.045, 0.03), LIMIT, base=2, now=2, num_cases=1) is None


def test_launches_do_not_lower_drift() -> None:
    steady = slower(0.045, 0.03)
    drifting = replace(steady, drift=0.0299**2)
    assert launches_needed(steady, LIMIT, base=100, now=2, num_cases=1) is not None
    assert launches_needed(drifting, LIMIT, base=100, now=2, num_cases=1) is None


def test_more_launches_of_a_baseline_decide_on_less_and_on_more_cases() -> None:
    def needed(limit: float, now: int = 5, num_cases: int = 46) -> float:
        return baseline_needed(limit, now=now, num_cases=num_cases) or math.inf

    assert [needed(limit) for limit in (0.1, 0.03, 0.02, 0.01)] == [1, 2, 3, 8]
    assert needed(0.0) == math.inf
    assert needed(0.01, num_cases=1) <= needed(0.01, num_cases=10) <= needed(0.01)
    assert needed(0.01, now=10) < needed(0.01) < needed(0.01, now=3)


def is_equal_accepted(draw: random.Random, base: int) -> bool:
    """Whether 46 cases of an equal machine are accepted; launches vary by 1 %."""
    rows = []
    for _ in range(46):
        logs = [draw.gauss(0, LAUNCH_SD) for _ in range(base + 5)]
        sides = [
            Sample(
                logs={str(n): log for n, log in enumerate(logs) if (n < base) is is_base},
                starts={str(n): float(n) for n in range(base + 5)},
            )
            for is_base in (True, False)
        ]
        rows.append(Row(kind="", base=sides[0], other=sides[1]))
    decided = accept(judge(rows), LIMIT)
    return not decided.undecided and not decided.slow


def test_the_fewest_launches_of_a_baseline_accept_most_equal_machines() -> None:
    draw, base = random.Random(1), baseline_needed(LIMIT, now=5, num_cases=46)
    assert base is not None
    assert sum(is_equal_accepted(draw, base) for _ in range(25)) >= 20
    assert sum(is_equal_accepted(draw, base - 1) for _ in range(25)) < 10


def test_launches_of_both_sides_decide_where_those_of_one_do_not() -> None:
    ratio = slower(0.045, 0.03)
    count = launches_needed(ratio, LIMIT, base=2, now=2, num_cases=1, both=True)
    assert count is not None
    assert ends(slower(0.045, 0.03 * math.sqrt(2 / count)))[1] == ()
    assert ends(slower(0.045, 0.03 * math.sqrt(2 / (count - 1))))[1] == (0,)
