"""Element types in torch's words, and random operands of a type."""

import itertools

import torch
from torch import Tensor

from stepmark.core.dtypes import DType

TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP8_E4M3: torch.float8_e4m3fn,
    DType.FP8_E5M2: torch.float8_e5m2,
}

_seeds = itertools.count(1)


def generator(device: torch.device) -> torch.Generator:
    """A generator with a seed no earlier call had: every operand set differs."""
    return torch.Generator(device=device).manual_seed(next(_seeds))


def normal(*shape: int, dtype: DType, device: torch.device) -> Tensor:
    """Standard normal values. Constants would draw less power and run faster."""
    torch_dtype = TORCH_DTYPE[dtype]
    drawn = torch.bfloat16 if dtype.is_fp8 else torch_dtype
    return torch.randn(shape, dtype=drawn, device=device, generator=generator(device)).to(
        torch_dtype
    )


def set_matmul_precision(dtype: DType) -> None:
    """TF32 units for TF32, true fp32 otherwise.

    This is global state of torch, set when operands are made: cases run one at a time.
    """
    torch.set_float32_matmul_precision("high" if dtype is DType.TF32 else "highest")
