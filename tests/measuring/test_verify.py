"""Laws of the check: what is wrong is seen, what is rounded is allowed."""

import math
from collections.abc import Callable

import pytest
import torch

from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.measuring.verify import (
    UNIT_ROUNDOFF,
    Tolerance,
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
    assert finite(out, Tolerance(0.1)).num_wrong == 1
    assert finite(ref, Tolerance(0.1)).num_wrong == 0


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
    assert error < tolerance(dtype).max_rel_err


def test_tolerance_orders_types_and_grows_with_length_and_roundings() -> None:
    order = (DType.FP64, DType.FP32, DType.FP16, DType.TF32, DType.BF16, DType.FP8_E4M3)
    values = [tolerance(dtype).max_rel_err for dtype in order]
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    for dtype in OPERATOR_DTYPES:
        for error in ("max_rel_err", "rms_err"):
            short, long, two = (
                getattr(tolerance(dtype, length=length, roundings=roundings), error)
                for length, roundings in ((2**14, 1), (2**16, 1), (2**14, 2))
            )
            assert short < long < 1
            assert short < two


NORM = (1024, 256)


def rmsnorm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def softmax(x: torch.Tensor) -> torch.Tensor:
    exponents = torch.exp(x - x.amax(-1, keepdim=True))
    return exponents / exponents.sum(-1, keepdim=True)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@pytest.mark.parametrize("function", [rmsnorm, softmax, gelu])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_chains_of_roundings_are_within_the_tolerance(
    dtype: DType, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(NORM).to(ROUNDED[dtype])
    allowed = tolerance(dtype, length=NORM[1], roundings=4)
    for out in (function(x), function(x.float()).to(x.dtype)):
        assert compare(out, function(x.double()), allowed, "fp64").num_wrong == 0


WRONG = {
    "factor": lambda x: rmsnorm(x) * 1.02,
    "larger factor": lambda x: rmsnorm(x) * 1.04,
    "epsilon": lambda x: rmsnorm(x, 0.05),
    "small values": lambda x: rmsnorm(x).where(rmsnorm(x).abs() > 0.2, 0.0),
}


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize("dtype", list(ROUNDED))
def test_a_small_error_of_all_elements_is_wrong(dtype: DType, name: str) -> None:
    """Each is within the tolerance of the largest error in 16 bits, and of one fp8 rounding."""
    x = torch.randn(NORM).to(torch.bfloat16)
    stored = ROUNDED[dtype]
    allowed = tolerance(dtype, length=NORM[1], roundings=4)
    check = compare(WRONG[name](x.float()).to(stored), rmsnorm(x.double()), allowed, "fp64")
    assert check.rms_err is not None
    assert check.rms_tolerance is not None
    assert check.rms_err > check.rms_tolerance
    assert check.num_wrong == check.num_compared
    right = compare(rmsnorm(x.float()).to(stored), rmsnorm(x.double()), allowed, "fp64")
    assert right.rms_err is not None
    assert right.rms_err < 0.1 * check.rms_tolerance


def test_few_elements_and_a_given_tolerance_are_judged_by_the_largest_error() -> None:
    ref = torch.randn(2000, dtype=torch.float64)
    allowed = tolerance(DType.BF16, roundings=4)
    assert compare(ref * 1.02, ref, allowed, "few").num_wrong == 2000
    assert compare(ref[:999] * 1.02, ref[:999], allowed, "few").num_wrong == 0
    check = compare(ref * 1.02, ref, allowed.max_rel_err, "given")
    assert (check.num_wrong, check.rms_err, check.rms_tolerance) == (0, None, None)


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
    assert product_check(a, b, y, Tolerance(1e-5)).num_wrong == 0
    y[39] += 1
    assert product_check(a, b, y, Tolerance(1e-5)).num_wrong > 50
    y[39] -= 1
    y[:, 49] = 0
    assert product_check(a, b, y, Tolerance(1e-5)).num_wrong > 40
