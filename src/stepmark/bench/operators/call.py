"""What an operator's implementation gives to the runner."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stepmark.core.ops.backends import Capabilities
from stepmark.core.record import Check

__all__ = ["Call", "Capabilities", "Impl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One set of operands, allocated, and what to do with it.

    `run` is the timed region and nothing else: no synchronization, no allocation that the
    operator's API lets us avoid. `verify` poisons the result, runs once and compares with a
    reference of higher precision. `backend_run` is what really ran.
    """

    run: Callable[[], object]
    verify: Callable[[], Check]
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
