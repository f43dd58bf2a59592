"""Variances of rows that are alike: what is known of each, and of how much."""

import math
import random
from collections.abc import Sequence

import pytest

from stepmark.ground.launches import residuals as residuals_of
from stepmark.ground.spread import Part, Spread, spread_of
from stepmark.ground.variance import Prior, Variance, prior_of, total


def sample(draw: random.Random, n: int, sd: float) -> Variance:
    """Return the variance that n values show."""
    values = residuals_of(draw.gauss(0, sd) for _ in range(n))
    return Variance(sum(x * x for x in values) / (n - 1), n - 1)


def prior(variances: Sequence[Variance]) -> Prior:
    known = prior_of(variances)
    assert known is not None
    return known


def launches(rows: Sequence[Sequence[float]]) -> Spread:
    """Return the spread of rows of one side, whose values are by launch."""
    spread = spread_of([[Part(runs=[{f"{n}": x for n, x in enumerate(row)}])] for row in rows])
    assert spread is not None
    return spread


def test_rows_of_one_variance_share_it() -> None:
    draw = random.Random(1)
    like = prior([sample(draw, 5, 0.01) for _ in range(200)])
    assert math.sqrt(like.variance) == pytest.approx(0.01, rel=0.1)
    assert like.df > 20
    assert like.seen_df == 800


@pytest.mark.parametrize("prior_df", [1.5, 4.0, 12.0])
def test_the_prior_is_that_of_the_rows(prior_df: float) -> None:
    """Smyth's model: s0^2 d0 / chi-square(d0)."""
    draw, rows = random.Random(2), []
    for _ in range(1500):
        chi_square = draw.gammavariate(prior_df / 2, 2)
        rows.append(sample(draw, 4, 0.01 * math.sqrt(prior_df / chi_square)))
    like = prior(rows)
    assert like.df == pytest.approx(prior_df, rel=0.35)
    assert math.sqrt(like.variance) == pytest.approx(0.01, rel=0.05)
    own = like.moderated(Variance(0.04**2, 3))
    expected = (like.df * like.variance + 3 * 0.04**2) / (like.df + 3)
    assert own == Variance(expected, like.df + 3)


def test_quiet_rows_stay_quiet_beside_noisy_ones() -> None:
    """Every fourth row varies by 4 %, the others by 0.5 %: each is known to a factor of two."""
    draw = random.Random(5)
    sds = [0.04 if n % 4 == 0 else 0.005 for n in range(68)]
    rows = [sample(draw, 5, sd) for sd in sds]
    like = prior(rows)
    ratios = [
        math.sqrt(like.moderated(row).value) / sd for row, sd in zip(rows, sds, strict=True)
    ]
    assert sum(0.5 < ratio < 2 for ratio in ratios) > 60


def test_what_a_launch_has_in_common_counts_once() -> None:
    """68 rows of three launches, each launch with one value for all: two degrees of freedom."""
    draw = random.Random(3)
    common = [draw.gauss(0, 0.01) for _ in range(3)]
    spread = launches([[x + draw.gauss(0, 1e-4) for x in common] for _ in range(68)])
    assert spread.common.df == 2
    squares = sum(x * x for x in residuals_of(common))
    assert spread.common.value == pytest.approx(squares / 2, rel=0.02)
    assert math.sqrt(spread.own[0].value) == pytest.approx(1e-4, rel=0.2)
    assert spread.of_launch(0).df == pytest.approx(2, rel=0.01)


def test_quiet_rows_show_what_launches_have_in_common() -> None:
    """All rows share 0.5 %, which the noisy ones would hide."""
    draw, ratios = random.Random(6), []
    for _ in range(40):
        common = [draw.gauss(0, 0.005) for _ in range(3)]
        sds = [0.04 if n % 4 == 0 else 0.001 for n in range(40)]
        spread = launches([[x + draw.gauss(0, sd) for x in common] for sd in sds])
        ratios.append(spread.common.value * 2 / sum(x * x for x in residuals_of(common)))
    assert sum(0.7 < ratio < 1.4 for ratio in ratios) >= 36


def test_sides_of_other_numbers_of_launches_count_by_them() -> None:
    """Two noisy launches beside eight quiet ones: Welch's variance of the difference."""
    parts = [
        Part(runs=[{"a": -0.01, "b": 0.01}], weight=1 / 2),
        Part(runs=[{f"{n}": 0.001 * (-1) ** n for n in range(8)}], weight=1 / 8),
    ]
    spread = spread_of([parts])
    assert spread is not None
    variances = [2 * 0.01**2, 8 / 7 * 0.001**2]
    error = variances[0] / 2 + variances[1] / 8
    assert spread.own[0].value * (1 / 2 + 1 / 8) == pytest.approx(error)
    squares_by_df = (variances[0] / 2) ** 2 / 1 + (variances[1] / 8) ** 2 / 7
    assert spread.own[0].df == pytest.approx(error**2 / squares_by_df)


def test_few_rows_stand_for_themselves() -> None:
    spread = launches([[-0.01, 0.01], [-0.03, 0.0, 0.03], [0.0]])
    assert spread.own[0] == Variance(pytest.approx(0.0002), 1)
    assert spread.own[1] == Variance(pytest.approx(0.0009), 2)
    assert spread.own[2].value == pytest.approx((0.0002 + 0.0018) / 3)  # what the others show
    assert spread_of([]) is None
    assert spread_of([[Part(runs=[{"a": 1.0}])]]) is None


def test_a_sum_has_satterthwaites_degrees_of_freedom() -> None:
    assert total([Variance(1.0, 4), Variance(1.0, 4)]) == Variance(2.0, 8)
    assert total([Variance(1.0, 4), Variance(0.0, 2)]) == Variance(1.0, 4)


def test_rare_states_widen_and_never_narrow() -> None:
    quiet, wild = Variance(1e-8, 4), Variance(0.09, 2)
    assert quiet.widened(0.995).value == pytest.approx((4e-8 + 4 * 0.02**2) / 8)
    assert quiet.widened(0.995, 400.0).value < 1e-5
    assert wild.widened(0.995) == wild


@pytest.mark.parametrize(("count", "df"), [(2, 4), (3, 1), (5, 1)])
def test_few_variances_have_no_prior(count: int, df: int) -> None:
    """Fewer than three, or than six degrees of freedom: each row stands for itself."""
    quiet = Variance(0.001**2, df)
    assert prior([quiet] + [Variance(0.02**2, df)] * (count - 1)).moderated(quiet) == quiet


@pytest.mark.parametrize(("count", "df"), [(3, 2), (6, 1)])
def test_a_quiet_row_is_less_quiet_beside_noisy_ones(count: int, df: int) -> None:
    quiet = Variance(0.001**2, df)
    own = prior([quiet] + [Variance(0.02**2, df)] * (count - 1)).moderated(quiet)
    assert own.value > quiet.value
    assert own.df > quiet.df


def test_rows_of_equal_variance_share_it_whatever_one_shows() -> None:
    like = prior([Variance(0.01**2, 2)] * 20)
    # The floor of small variances leaves the estimate a little above the rows' own.
    assert like.variance == pytest.approx(0.01**2, rel=0.01)
    for shown in (0.0, 0.03):
        assert like.moderated(Variance(shown**2, 2)) == Variance(like.variance, 40)


def test_a_prior_of_many_degrees_of_freedom_is_not_cut_off() -> None:
    """Rows that vary a little, as 200 degrees of freedom do: each keeps a part of its own."""
    draw, rows = random.Random(4), []
    for _ in range(200):
        true, shown = (draw.gammavariate(100, 1 / 100) for _ in range(2))
        rows.append(Variance(0.01**2 / true * shown, 200))
    like = prior(rows)
    assert 150 < like.df < 270
    assert like.moderated(Variance(0.0, 200)).value < 0.7 * like.variance
