"""Laws of conformal intervals."""

import random

import pytest

from stepmark.predictions.interval import COVERAGE, PastPrediction, interval

STRATUM = ("device", "fsdp", "compiled")


def past(errors: list[float], stratum: tuple[str, str, str] = STRATUM) -> list[PastPrediction]:
    return [
        PastPrediction(stratum=stratum, predicted_s=1.0, measured_s=1 + error)
        for error in errors
    ]


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_too_few_rows_have_no_interval(count: int) -> None:
    made = interval(past([0.01] * count), STRATUM, 0.4)
    assert (made.low_s, made.high_s) == (None, None)
    assert str(made) == f"no interval: {count} past predictions like it, 9 needed"


def test_nine_rows_give_the_largest_error() -> None:
    made = interval(past([0.01] * 8 + [0.05]), STRATUM, 0.4)
    assert made.high_s == pytest.approx(0.4 * 1.05)
    assert made.low_s == pytest.approx(0.4 / 1.05)
    assert str(made) == "90% interval 381.0 to 420.0 ms"


def test_rows_of_other_strata_do_not_count() -> None:
    rows = past([0.3] * 20, ("host", "fsdp", "compiled")) + past([0.01] * 9)
    assert interval(rows, STRATUM, 1.0).high_s == pytest.approx(1.01)


def test_coverage_of_exchangeable_rows() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(2000):
        *known, new = (rng.gauss(0, 0.02) for _ in range(15))
        made = interval(past(known), STRATUM, 1.0)
        assert made.low_s is not None
        assert made.high_s is not None
        covered += made.low_s <= 1 + new <= made.high_s
    assert covered / 2000 >= COVERAGE - 0.02
