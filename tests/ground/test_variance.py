"""Variances of rows that are alike: what is known of each, and of how much."""

import math
import random

import pytest

from stepmark.ground.variance import Variance, pool_of, total


def residuals(draw: random.Random, n: int, sd: float) -> list[float]:
    values = [draw.gauss(0, sd) for _ in range(n)]
    return [value - sum(values) / n for value in values]


def test_rows_of_one_variance_share_it() -> None:
    draw = random.Random(1)
    groups = [[residuals(draw, 3, 0.01) for _ in range(200)] for _ in range(2)]
    pool = pool_of(groups)
    assert pool is not None
    assert math.sqrt(pool.variance) == pytest.approx(0.01, rel=0.1)
    assert pool.df > 20
    assert 400 < pool.most_df <= 800  # 400 rows of two degrees of freedom


@pytest.mark.parametrize("prior_df", [4.0, 12.0])
def test_the_prior_is_that_of_the_rows(prior_df: float) -> None:
    """Smyth's model: s0^2 d0 / chi-square(d0)."""
    draw, rows = random.Random(2), []
    for _ in range(1500):
        chi_square = draw.gammavariate(prior_df / 2, 2)
        rows.append(residuals(draw, 4, 0.01 * math.sqrt(prior_df / chi_square)))
    pool = pool_of([rows])
    assert pool is not None
    assert pool.df == pytest.approx(prior_df, rel=0.35)
    assert math.sqrt(pool.variance) == pytest.approx(0.01, rel=0.05)
    squares, df = 3 * 0.04**2, 3
    own = pool.moderated(squares, df)
    expected = (pool.df * pool.variance + squares) / (pool.df + df)
    assert own == Variance(expected, pool.df + df)


def test_rows_that_move_together_count_once() -> None:
    """68 rows of three launches, each launch with one value for all: two degrees of freedom."""
    common = residuals(random.Random(3), 3, 0.01)
    pool = pool_of([[common] * 68])
    assert pool is not None
    assert pool.most_df == pytest.approx(2)
    assert pool.variance == pytest.approx(sum(x * x for x in common) / 2)


def test_few_rows_stand_for_themselves() -> None:
    pool = pool_of([[[-0.01, 0.01]], [[-0.03, 0.0, 0.03]]])
    assert pool is not None
    assert pool.moderated(0.0018, 2) == Variance(0.0009, 2)
    # One launch: what the others show.
    assert pool.moderated(0.0, 0).value == pytest.approx((0.0002 + 0.0018) / 3)
    assert pool_of([]) is None


def test_a_sum_has_satterthwaites_degrees_of_freedom() -> None:
    assert total([Variance(1.0, 4), Variance(1.0, 4)]) == Variance(2.0, 8)
    assert total([Variance(1.0, 4), Variance(0.0, 2)]) == Variance(1.0, 4)


def test_rare_states_widen_and_never_narrow() -> None:
    quiet, wild = Variance(1e-8, 4), Variance(0.09, 2)
    assert quiet.widened(0.995).value == pytest.approx((4e-8 + 4 * 0.02**2) / 8)
    assert quiet.widened(0.995, 400.0).value < 1e-5
    assert wild.widened(0.995) == wild


def test_fewer_than_six_variances_stand_for_themselves() -> None:
    """From six on a row shares what the others show, so that a quiet one is less quiet."""
    quiet, wild = [-0.001, 0.0, 0.001], [-0.02, 0.0, 0.02]
    for count in (5, 6):
        pool = pool_of([[row] for row in (quiet, *[wild] * (count - 1))])
        assert pool is not None
        own = pool.moderated(2 * 0.001**2, 2)
        assert (own.value == pytest.approx(0.001**2)) is (count < 6)
        assert own.value >= 0.001**2


def alternating(num_launches: int, variance: float) -> list[float]:
    """Return residuals of launches that have this variance."""
    signs = [(-1) ** n for n in range(num_launches - num_launches % 2)]
    size = math.sqrt(variance * (num_launches - 1) / len(signs))
    return [size * sign for sign in signs] + [0.0] * (num_launches % 2)


def test_rows_of_equal_variance_share_it_whatever_one_shows() -> None:
    pool = pool_of([[alternating(3, 0.01**2)] for _ in range(20)])
    assert pool is not None
    # The floor of small variances leaves the estimate a little above the rows' own.
    assert pool.variance == pytest.approx(0.01**2, rel=0.01)
    for shown in (0.0, 0.03):
        assert pool.moderated(2 * shown**2, 2).value == pool.variance


def test_a_prior_of_many_degrees_of_freedom_is_not_cut_off() -> None:
    """Rows that vary a little, as 200 degrees of freedom do: each keeps a part of its own."""
    draw, rows = random.Random(4), []
    for _ in range(200):
        true, shown = (draw.gammavariate(100, 1 / 100) for _ in range(2))
        rows.append([alternating(201, 0.01**2 / true * shown)])
    pool = pool_of(rows)
    assert pool is not None
    assert 150 < pool.df < 270
    assert pool.moderated(0.0, 200).value < 0.7 * pool.variance
