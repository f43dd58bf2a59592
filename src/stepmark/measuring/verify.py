"""Verify results: compare with a reference of higher precision, and poison the output before.

max_rel_err = max |out - ref| / max(|ref|, rms(ref)): relative where an element is large, and
relative to the tensor where cancellation made it small. rms_err = rms(out - ref) / rms(ref)
without what storing the exact result costs: a wrong factor or constant has a small error in
every element, which the tolerance of the largest one admits.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepmark.cases.record import Check
from stepmark.ground.dtypes import DType

# Half a unit in the last place: the largest relative error of one rounding to nearest.
# TF32 keeps 10 bits of each factor, and some hardware truncates instead of rounding.
UNIT_ROUNDOFF = {
    DType.FP64: 2.0**-53,
    DType.FP32: 2.0**-24,
    DType.TF32: 2.0**-10,
    DType.BF16: 2.0**-8,
    DType.FP16: 2.0**-11,
    DType.FP8_E4M3: 2.0**-4,
    DType.FP8_E5M2: 2.0**-3,
    DType.MXFP8: 2.0**-4,
    DType.NVFP4: 2.0**-2,
}
TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.INT32: torch.int32,
    DType.UINT32: torch.uint32,
    DType.INT64: torch.int64,
    DType.UINT64: torch.uint64,
}
INT_POISON = 0x5A  # repeated in every byte
SAMPLES = 64
_CHUNK = 2**24  # elements converted to fp64 at a time


_MIN_ELEMENTS = 1000  # of which errors average out, so that their rms is judged


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest errors that are right: of an element, and of the root of the mean square."""

    max_rel_err: float
    rms_err: float = math.inf


def tolerance(dtype: DType, *, length: int = 1, roundings: int = 1) -> Tolerance:
    """Return the allowed errors of a result in `dtype` that sums `length` products.

    max_rel_err: 4 roundoffs per rounding on the way (4: the worst of millions of elements,
    whose errors scatter by one), and 8 sqrt(length) roundoffs of the accumulator. rms_err:
    independent roundings add up by their squares, each at most a roundoff; half of the sum's.
    fp8 products accumulate in about 14 bits on Hopper (DeepSeek-V3 report, section 3.5.2) and
    are stored as bf16.
    """
    accumulator = UNIT_ROUNDOFF[DType.FP64 if dtype is DType.FP64 else DType.FP32]
    stored = UNIT_ROUNDOFF[dtype]
    if dtype.is_narrow and length > 1:
        accumulator = 2.0**-14
        stored = UNIT_ROUNDOFF[DType.BF16]
    return Tolerance(
        4 * roundings * stored + 8 * math.sqrt(length) * accumulator,
        math.sqrt(roundings) * stored + 4 * math.sqrt(length) * accumulator,
    )


def poison(tensor: Tensor) -> None:
    """Fill with NaN (integers: 0x5A in every byte), to detect a result that is not written."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor.detach().fill_(math.nan)
    elif tensor.is_floating_point():
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in e4m3fn and in e5m2
    else:
        tensor.fill_(int.from_bytes(bytes([INT_POISON] * tensor.element_size()), "little"))


def poisoned_result(run: Callable[[], object]) -> tuple[Tensor, ...]:
    """Return the result of an operator that allocates it: poison one, free it, run again.

    The allocator reuses the memory, so that a kernel that writes nothing cannot return the
    right values of an earlier call.
    """
    for tensor in tensors_of(run()):
        poison(tensor)
    del tensor
    return tensors_of(run())


def tensors_of(result: object) -> tuple[Tensor, ...]:
    """Return the tensors of what a call returns: one, or some of several values."""
    values = result if isinstance(result, tuple | list) else (result,)
    return tuple(value for value in values if isinstance(value, Tensor))


def compare(
    out: Tensor,
    ref: Tensor,
    tolerance: Tolerance | float,
    reference_name: str,
    *,
    least_scale: Tensor | float = 0.0,
) -> Check:
    """Check all elements of `out`. One that is not finite is wrong, with an infinite error.

    Where rms_err exceeds its tolerance, all elements are wrong. tolerance: a number is that of
    the largest error alone. least_scale: of an error; the root of the sum of squares where few
    sums cancel.
    """
    assert out.shape == ref.shape, (out.shape, ref.shape)
    limit = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance)
    out64 = out.detach().double()
    ref64 = ref.detach().double()
    least = torch.as_tensor(least_scale, dtype=torch.float64).to(ref64.device)
    scale = ref64.abs().clamp_min(ref64.square().mean().sqrt()).maximum(least)
    error = (out64 - ref64).abs()
    relative = torch.where(error == 0, 0.0, error / scale)
    relative = torch.where(out64.isfinite() & ref64.isfinite(), relative, math.inf)
    is_judged = relative.numel() >= _MIN_ELEMENTS and limit.rms_err < math.inf
    rms_err = _rms_err(out, ref64, error, least) if is_judged else None
    is_off = rms_err is not None and rms_err > limit.rms_err
    return Check(
        max_rel_err=float(relative.max()) if relative.numel() else 0.0,
        tolerance=limit.max_rel_err,
        num_wrong=relative.numel() if is_off else int((relative > limit.max_rel_err).sum()),
        num_compared=relative.numel(),
        reference=reference_name,
        rms_err=rms_err,
        rms_tolerance=limit.rms_err if is_judged else None,
    )


def _rms_err(out: Tensor, ref64: Tensor, error: Tensor, least: Tensor) -> float:
    """Return the error beyond that of the exact result, rounded to the type of `out`."""
    # fp8 has no direct conversion to fp64 everywhere.
    storing = (ref64.float().to(out.dtype).float().double() - ref64).abs()
    storing = torch.where(storing.isfinite(), storing, error)  # a value beyond the type's range
    excess = float((error.square() - storing.square()).mean())
    # The last: of a reference that is 0 throughout.
    scale = max(float(ref64.square().mean()), float(least.square().mean()), 1e-300)
    return math.sqrt(max(0.0, excess) / scale) if math.isfinite(excess) else math.inf


def finite(out: Tensor, tolerance: Tolerance) -> Check:
    """Count elements that are not finite as wrong; compare no value."""
    parts = out.detach().flatten().split(_CHUNK)
    wrong = sum(int((~part.isfinite()).sum()) for part in parts)
    return Check(
        max_rel_err=math.inf if wrong else 0.0,
        tolerance=tolerance.max_rel_err,
        num_wrong=wrong,
        num_compared=0,
        reference="",
    )


def merge(checks: Iterable[Check]) -> Check:
    """Return all checks as one. The first names the reference; tolerances are the loosest."""
    parts = list(checks)
    of_rms = [(part.rms_err, part.rms_tolerance) for part in parts]
    rms_err, rms_tolerance = (
        max((value for value in values if value is not None), default=None)
        for values in zip(*of_rms, strict=True)
    )
    return Check(
        max_rel_err=max(part.max_rel_err for part in parts),
        tolerance=max(part.tolerance for part in parts),
        num_wrong=sum(part.num_wrong for part in parts),
        num_compared=sum(part.num_compared for part in parts),
        reference=parts[0].reference,
        rms_err=rms_err,
        rms_tolerance=rms_tolerance,
        remarks=tuple(dict.fromkeys(remark for part in parts for remark in part.remarks)),
    )


def sample(length: int, device: torch.device, count: int = SAMPLES) -> Tensor:
    """Return up to `count` evenly spaced positions in [0, length), first and last included."""
    steps = min(count, length)
    positions = torch.linspace(0, length - 1, steps, dtype=torch.float64, device=device)
    return positions.round().long()


def select_index(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return index_select in fp64; through bytes for fp8, which has no index_select."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        picked = tensor.view(torch.uint8).index_select(dim, index).view(tensor.dtype)
        return picked.float().double()
    return tensor.index_select(dim, index).double()


def product_check(
    a_MK: Tensor,
    b_KN: Tensor,
    y_MN: Tensor,
    tolerance: Tolerance,
    *,
    scale_M1: Tensor | float = 1.0,
    scale_1N: Tensor | float = 1.0,
) -> Check:
    """Check y = scale_M1 * (a @ b) * scale_1N in fp64: sampled rows and columns, all finite."""
    rows = sample(y_MN.shape[0], y_MN.device)
    columns = sample(y_MN.shape[1], y_MN.device)
    y_RN = select_index(y_MN, 0, rows)
    y_MC = select_index(y_MN, 1, columns)
    ref_RN = _product(select_index(a_MK, 0, rows), b_KN) * scale_1N
    ref_MC = _product(select_index(b_KN, 1, columns).t(), a_MK.t()).t() * scale_M1
    ref_RN *= scale_M1[rows] if isinstance(scale_M1, Tensor) else scale_M1
    ref_MC *= scale_1N[:, columns] if isinstance(scale_1N, Tensor) else scale_1N
    name = f"fp64, {len(rows)} rows and {len(columns)} columns"
    return merge(
        [
            compare(y_RN, ref_RN, tolerance, name),
            compare(y_MC, ref_MC, tolerance, name),
            finite(y_MN, tolerance),
        ]
    )


def _product(a_RK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a @ b in fp64, converting a slice of b's columns at a time."""
    width = max(1, _CHUNK // max(1, b_KN.shape[0]))
    parts = b_KN.split(width, dim=1)
    # fp8 has no direct conversion to fp64 everywhere.
    narrow = b_KN.element_size() == 1
    return torch.cat([a_RK @ (part.float() if narrow else part).double() for part in parts], 1)
