"""Rank 1 breaks: while it makes the model of mbs 2, in a backward pass of mbs 3.

From mbs 8 on it runs out of memory in a forward pass. Ranks import this before they begin.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepmark.cases.train_case import TrainCase
from stepmark.training import trainer

_make = trainer.make


def make(case: TrainCase, device: torch.device) -> Any:
    made: Any = _make(case, device)
    if case.mbs == 2:
        raise RuntimeError("broken while it is made")
    if case.mbs == 3:
        made.micro_step = _broken
    if case.mbs >= 8:
        made.micro_step = _too_large
    return made


def _broken(
    tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
) -> Tensor:
    raise RuntimeError("broken in the backward pass")


def _too_large(
    tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


if os.environ.get("RANK") == "1":
    trainer.make = make
