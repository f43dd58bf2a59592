"""Laws of the check: what is wrong is seen, what is rounded is allowed."""

import math

import pytest
import torch

from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.measuring.verify import (
    UNIT_ROUNDOFF,
    compare,
    finite,
    merge,
    poison,
    poisoned_result,
    product_check,
    sample,
    tolerance,
)

ROUNDED = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
}


def test_equal_tensors_have_no_error() -> None:
    x = torch.randn(100, dtype=torch.float64)
    check = compare(x, x.clone(), 0.0, "itself")
    assert (check.max_rel_err, check.num_wrong, check.num_compared) == (0.0, 0, 100)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_one_wrong_element(bad: float) -> None:
    ref = torch.randn(100, dtype=torch.float64)
    out = ref.clone()
    out[17] = bad
    check = compare(out, ref, 0.1, "itself")
    assert check.num_wrong == 1
    assert check.max_rel_err == math.inf
    assert finite(out, 0.1).num_wrong == 1
    assert finite(ref, 0.1).num_wrong == 0


@pytest.mark.parametrize("dtype", list(ROUNDED))
def test_poison_is_seen_in_every_type(dtype: DType) -> None:
    out = torch.zeros(64).to(ROUNDED[dtype])
    poison(out)
    assert compare(out.float(), torch.zeros(64), 1.0, "zeros").num_wrong == 64


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_poisoned_integers_hold_the_pattern(dtype: torch.dtype) -> None:
    out = torch.zeros(4, dtype=dtype)
    poison(out)
    assert set(out.view(torch.uint8).tolist()) == {0x5A}


def test_the_error_is_relative_to_the_element_or_to_the_tensor() -> None:
    ref = torch.tensor([10.0, 0.0, 0.0, 0.0])  # rms 5
    out = torch.tensor([11.0, 0.0, 0.0, 1.0])
    check = compare(out, ref, 0.15, "by hand")
    assert check.max_rel_err == pytest.approx(1 / 5)
    assert check.num_wrong == 1


def test_a_sum_that_cancels_may_be_compared_with_its_terms() -> None:
    ref = torch.tensor([0.01])
    out = torch.tensor([0.012])
    assert compare(out, ref, 0.01, "by hand").num_wrong == 1
    check = compare(out, ref, 0.01, "by hand", least_scale=torch.tensor([0.5]))
    assert check.max_rel_err == pytest.approx(0.002 / 0.5)
    assert compare(out * 2, ref, 0.01, "by hand", least_scale=0.5).num_wrong == 1
    assert compare(out, ref * 100, 0.01, "by hand", least_scale=0.5).max_rel_err > 0.98


@pytest.mark.parametrize("dtype", list(ROUNDED))
def test_one_rounding_is_within_its_unit_and_the_tolerance(dtype: DType) -> None:
    exact = torch.rand(10_000, dtype=torch.float64) + 1
    rounded = exact.to(ROUNDED[dtype])
    error = compare(rounded.float(), exact, tolerance(dtype), "fp64").max_rel_err
    assert 0.5 * UNIT_ROUNDOFF[dtype] < error <= UNIT_ROUNDOFF[dtype]
    assert error < tolerance(dtype)


def test_tolerance_orders_types_and_grows_with_length_and_roundings() -> None:
    order = (DType.FP64, DType.FP32, DType.FP16, DType.TF32, DType.BF16, DType.FP8_E4M3)
    values = [tolerance(dtype) for dtype in order]
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    for dtype in OPERATOR_DTYPES:
        assert tolerance(dtype, length=2**14) < tolerance(dtype, length=2**16) < 1
        assert tolerance(dtype, roundings=1) < tolerance(dtype, roundings=2)


def test_a_result_never_written_shows() -> None:
    kept = torch.ones(1000)

    def lazy() -> torch.Tensor:
        return kept  # an operator that leaves what was there

    (result,) = poisoned_result(lazy)
    assert compare(result, torch.ones(1000), 0.1, "ones").num_wrong == 1000


def test_merged_checks_add_up() -> None:
    ref = torch.ones(10)
    parts = [compare(ref, ref, 0.1, "first"), compare(ref * 2, ref, 0.2, "second")]
    check = merge(parts)
    assert (check.num_wrong, check.num_compared) == (10, 20)
    assert (check.max_rel_err, check.tolerance, check.reference) == (1.0, 0.2, "first")


@pytest.mark.parametrize("length", [1, 5, 64, 65, 4096, 2**31 + 1])
def test_samples_hold_the_first_and_the_last_and_no_position_twice(length: int) -> None:
    positions = sample(length, torch.device("cpu")).tolist()
    assert positions[0] == 0
    assert positions[-1] == length - 1
    assert len(set(positions)) == len(positions) == min(64, length)


def test_a_product_with_one_wrong_row_or_column_is_wrong() -> None:
    a, b = torch.randn(40, 30), torch.randn(30, 50)
    y = a @ b
    assert product_check(a, b, y, 1e-5).num_wrong == 0
    y[39] += 1
    assert product_check(a, b, y, 1e-5).num_wrong > 50
    y[39] -= 1
    y[:, 49] = 0
    assert product_check(a, b, y, 1e-5).num_wrong > 40
