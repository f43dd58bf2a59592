"""The interface of an operator's implementation, and random operands for it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepmark.cases.record import Check
from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.ops.backends import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One set of allocated operands, and the calls on it.

    `run` is the timed region and nothing else: no synchronization, no allocation that the
    operator's API lets us avoid. `verify` poisons the result, runs once and compares with a
    reference of higher precision; `verify_again` does after the samples, where a call may not
    be what it was: its check stands for both (None: the first stands). `backend_run` names
    the implementation that ran.
    """

    run: Callable[[], object]
    verify: Callable[[], Check]
    verify_again: Callable[[], Check | None] = lambda: None
    backend_run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One backend of one family.

    `unsupported` returns the reason why an operator cannot run, or None; it looks at its
    arguments alone, so that all ranks agree. `make` allocates one operand set.
    `extra_bytes` is memory beyond op.memory_bytes, e.g. the score matrix of math attention.
    """

    make: Callable[[Any, torch.device], Call]
    unsupported: Callable[[Any, Capabilities], str | None] = lambda op, capabilities: None
    extra_bytes: Callable[[Any], int] = lambda op: 0
    # False where a call synchronizes or allocates in a way a CUDA graph cannot hold.
    capturable: bool = True


_CPU_PERIOD = 2**20 - 3
_seeds = itertools.count(1)


def generator(device: torch.device) -> torch.Generator:
    """Return a generator with a seed that no earlier call had: every operand set differs."""
    return torch.Generator(device=device).manual_seed(next(_seeds))


def normal(*shape: int, dtype: DType, device: torch.device) -> Tensor:
    """Return standard normal values. Constants would draw less power and run faster.

    A CPU core draws some 200 million values per second: seconds for operands that exceed a
    large cache. There values repeat after a prime number, so that rows of a matrix differ.
    """
    torch_dtype = TORCH_DTYPE[dtype]
    count = math.prod(shape)
    values = torch.randn(
        min(count, _CPU_PERIOD) if device.type == "cpu" else count,
        dtype=torch.bfloat16 if dtype.is_fp8 else torch_dtype,
        device=device,
        generator=generator(device),
    )
    if count > len(values):
        whole = values.new_empty(count)
        for part in whole.split(len(values)):
            part.copy_(values[: len(part)])
        values = whole
    return values.view(shape).to(torch_dtype)


def set_matmul_precision(dtype: DType) -> None:
    """Use TF32 units for TF32, true fp32 otherwise.

    This is global state of torch, set when operands are made: cases run one at a time.
    """
    torch.set_float32_matmul_precision("high" if dtype is DType.TF32 else "highest")
