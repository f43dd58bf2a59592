"""What the figures show is what the rows say."""

import math
from collections.abc import Sequence

import pytest
from tests.tables.records import (
    RUN_ID,
    full_run,
    gemm,
    made_up_device,
    measured,
    run_info,
)

from stepmark.cases.record import Record
from stepmark.operators.op_columns import rows
from stepmark.operators.op_figures import bandwidth, figures, roofline, time_breakdown
from stepmark.tables.columns import Row, number
from stepmark.tables.figures import Kind


def table(records: list[Record] | None = None) -> list[Row]:
    return rows(records or full_run(), run_info(), device=made_up_device())


def numbers(values: Sequence[object]) -> list[float]:
    return [float(str(value)) for value in values]


def test_roof_is_the_lower_of_peak_and_bandwidth() -> None:
    figure = roofline(table(), run_info(), made_up_device())
    (roof,) = [series for series in figure.series if series.kind is Kind.LINE]
    assert roof.name == "bf16 peak, memory peak"
    for x, y in zip(numbers(roof.x), numbers(roof.y), strict=True):
        assert y == pytest.approx(min(1000.0, x * 4.0))
    assert 250.0 in roof.x  # the ridge: 1,000 TFLOP/s over 4 TB/s


def test_unknown_device_draws_measured_roofs() -> None:
    drawn = rows(full_run(), run_info())
    figure = roofline(drawn, run_info(), None)
    (roof,) = [series for series in figure.series if series.kind is Kind.LINE]
    assert roof.name == "bf16 measured ceiling, measured copy"
    best = max(number(row, "tflops") or 0.0 for row in drawn if row["status"] == "measured")
    assert max(numbers(roof.y)) == pytest.approx(best)


def test_every_right_product_is_a_point_and_no_wrong_one() -> None:
    figure = roofline(table(), run_info(), made_up_device())
    points = {s.name: len(s.x) for s in figure.series if s.kind is Kind.POINTS}
    assert points == {"gemm": 3, "attention": 2}
    hover = figure.series[1].hover[0]
    assert RUN_ID in hover


def test_bandwidth_is_in_percent_of_memory() -> None:
    figure = bandwidth(table(), run_info(), made_up_device())
    shares = {series.name: list(series.x) for series in figure.series}
    assert shares["copy"] == [pytest.approx(100 * 2 * 2**30 / 600e-6 / 4e12)]
    assert len(shares["norm"]) == 2
    measured_only = bandwidth(rows(full_run(), run_info()), run_info(), None)
    # The copy is the ceiling: it has no share of itself.
    assert {series.name for series in measured_only.series} == {"norm"}
    assert "measured" in measured_only.x.title


def test_breakdown_multiplies_time_by_count_once_per_rank() -> None:
    figure = time_breakdown(table(), run_info())
    total_ms = math.fsum(x for series in figure.series for x in numbers(series.x))
    # gemm 0.3 (the faster of two shapes of one role), attention 1 + 2.8, norm 2 x 0.15 x 2
    assert total_ms == pytest.approx(0.3 + 1.0 + 2.8 + 4 * 0.15)


def test_nothing_measured_draws_nothing() -> None:
    slow = rows([measured(gemm(), 1e-3, num_wrong=1)], run_info())
    assert figures(slow, run_info(), None) == []
    assert figures([], run_info(), None) == []
