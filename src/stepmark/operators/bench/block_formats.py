"""y_MN = a_MK @ b_KN in MXFP8 and NVFP4, by cuBLAS through torch.

Both operands have their blocks along K, and factors in the tiles of 128 rows x 4 blocks that
cuBLAS reads (cuBLAS documentation, 1D Block Scaling Factors Layout). R rows of an operand, C
blocks of a row. Casts are those of TransformerEngine and torchao: MXFP8's factor is the least
power of two with which no element overflows (Roundup of cuBLAS; torchao 0.18, mx_tensor.py,
_to_mx_rceil); NVFP4's are two, e4m3 of a block over fp32 of the tensor (nvfp4_tensor.py,
nvfp4_quantize; arXiv:2509.25149, appendix B).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from stepmark.cases.record import Check
from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE, poison, product_check, tolerance
from stepmark.model.ops import Gemm
from stepmark.operators.bench.call import Call, normal

_E4M3_MAX = 448.0
_E4M3_MIN = 2.0**-6  # the smallest normal number, as torchao's least factor of a block
_E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8  # bit of an e2m1 number
_E8M0_BIAS = 127
_ROWS, _BLOCKS = 128, 4  # of a tile of factors
_CHUNK = 2**24  # elements cast at a time


class Factors(NamedTuple):
    """Elements [R, K], or [R, K/2] of two in a byte, and the factors [R, C] of blocks."""

    elements: Tensor
    of_blocks: Tensor


def to_mxfp8(x_RK: Tensor) -> Factors:
    """Return e4m3 elements and e8m0 factors of 32 of them along K."""
    blocks_RCB = x_RK.float().unflatten(1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks_RCB.abs().amax(2) / _E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).int()  # 0.5 x 2^e is a power of two already
    exponent = torch.where(mantissa == 0, -_E8M0_BIAS, exponent).clamp(-_E8M0_BIAS, _E8M0_BIAS)
    scaled = torch.ldexp(blocks_RCB, -exponent[..., None])
    elements = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).flatten(1).to(torch.float8_e4m3fn)
    factors = (exponent + _E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Factors(elements, factors)


def to_nvfp4(x_RK: Tensor, of_tensor: Tensor) -> Factors:
    """Return e2m1 elements, two in a byte, and e4m3 factors of 16 of them along K.

    of_tensor: the factor of the tensor in fp32, tensor_factor of all of it.
    """
    blocks_RCB = x_RK.float().unflatten(1, (-1, 16))
    factors = blocks_RCB.abs().amax(2) / _E2M1_MAX / of_tensor
    factors = factors.clamp(_E4M3_MIN, _E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks_RCB * ((1.0 / of_tensor) / factors.float())[..., None]
    return Factors(_packed(_e2m1(scaled.flatten(1))), factors)


def tensor_factor(x_RK: Tensor) -> Tensor:
    """Return the fp32 factor with which the largest factor of a block is the largest e4m3."""
    return x_RK.abs().amax().float() / (_E2M1_MAX * _E4M3_MAX)


def _e2m1(x: Tensor) -> Tensor:
    """Return e2m1 codes, rounded to nearest, a tie to the even code; beyond 6 saturated."""
    codes = torch.zeros_like(x, dtype=torch.uint8)
    size = x.abs()
    for code, (low, high) in enumerate(itertools.pairwise(_E2M1)):
        middle = (low + high) / 2
        codes += size >= middle if code % 2 else size > middle
    return codes + _SIGN * torch.signbit(x).to(torch.uint8)


def _packed(codes_RK: Tensor) -> Tensor:
    """Return two numbers in a byte, the first in its low half."""
    low, high = codes_RK[:, 0::2], codes_RK[:, 1::2]
    return (low | high << 4).view(torch.float4_e2m1fn_x2)


def in_tiles(factors_RC: Tensor) -> Tensor:
    """Return factors as cuBLAS reads them, padded by zeros to whole tiles, flat.

    The factor of row r and block c of a tile is at 16 (r mod 32) + 4 (r / 32) + c.
    """
    rows, blocks = factors_RC.shape
    padding = (0, -blocks % _BLOCKS, 0, -rows % _ROWS)
    padded = functional.pad(factors_RC.view(torch.uint8), padding)
    tiles = padded.unflatten(1, (-1, _BLOCKS)).unflatten(0, (-1, _ROWS // 32, 32))
    flat: Tensor = tiles.permute(0, 3, 2, 1, 4).flatten()
    return flat.view(factors_RC.dtype)


def decoded(factors: Factors) -> Tensor:
    """Return elements times factors of blocks in bf16, which has all of them exactly."""
    elements = factors.elements
    if elements.dtype == torch.float4_e2m1fn_x2:
        codes = elements.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)
        values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
        wide = values[codes.int()]
    else:
        wide = elements.float()
    scales = factors.of_blocks.float()
    block = wide.shape[1] // scales.shape[1]
    scaled: Tensor = wide.unflatten(1, (-1, block)) * scales[..., None]
    return scaled.flatten(1).to(torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An operand with K innermost. scales: as the product takes them, of_tensor last."""

    factors: Factors
    scales: tuple[Tensor, ...]

    @property
    def of_tensor(self) -> Tensor | float:
        return self.scales[1].double() if len(self.scales) > 1 else 1.0


def cast_operand(source_RK: Tensor, dtype: DType) -> Operand:
    """Return a bf16 tensor in a block format, cast some rows at a time."""
    rows = max(1, _CHUNK // source_RK.shape[1])
    of_tensor: tuple[Tensor, ...] = ()
    if dtype is DType.NVFP4:
        of_tensor = (tensor_factor(source_RK),)
        parts = [to_nvfp4(part, *of_tensor) for part in source_RK.split(rows)]
    else:
        parts = [to_mxfp8(part) for part in source_RK.split(rows)]
    joined = Factors(*(_joined(tensors) for tensors in zip(*parts, strict=True)))
    return Operand(factors=joined, scales=(in_tiles(joined.of_blocks), *of_tensor))


def _joined(tensors: tuple[Tensor, ...]) -> Tensor:
    """Return rows of one-byte numbers as one tensor, through bytes, which all devices join."""
    joined = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    return joined.view(tensors[0].dtype)


def product_arguments(a: Operand, b: Operand, dtype: DType) -> tuple[Any, ...]:
    """Return the arguments of torch's scaled product but the last, which are of its result."""
    scalings, swizzles = functional.ScalingType, functional.SwizzleType
    recipe, swizzle = [scalings.BlockWise1x32], [swizzles.SWIZZLE_32_4_4]
    if dtype is DType.NVFP4:
        recipe = [scalings.BlockWise1x16, scalings.TensorWise]
        swizzle = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE]
    kinds = ([each.value for each in recipe], [each.value for each in swizzle])
    b_KN = b.factors.elements.t()
    return (a.factors.elements, b_KN, [*a.scales], *kinds, [*b.scales], *kinds, None)


def make_block_format(op: Gemm, device: torch.device) -> Call:
    """Return the product of one set of operands, which are cast beforehand."""
    a = cast_operand(normal(op.m, op.k, dtype=DType.BF16, device=device), op.dtype)
    b = cast_operand(normal(op.n, op.k, dtype=DType.BF16, device=device), op.dtype)
    out_dtype = TORCH_DTYPE[op.result_dtype]
    y_MN = torch.empty(op.m, op.n, dtype=out_dtype, device=device)
    arguments = product_arguments(a, b, op.dtype)
    scaled_mm: Callable[..., object] = torch.ops.aten._scaled_mm_v2.out

    def run() -> object:
        return scaled_mm(*arguments, out_dtype, out=y_MN)

    def verify() -> Check:
        poison(y_MN)
        run()
        scales = {"scale_M1": a.of_tensor, "scale_1N": b.of_tensor}
        a_MK, b_KN = decoded(a.factors), decoded(b.factors).t()
        return product_check(a_MK, b_KN, y_MN, tolerance(op.dtype, length=op.k), **scales)

    return Call(run=run, verify=verify, backend_run=f"torch scaled_mm {op.dtype}")
