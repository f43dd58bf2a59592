"""stepmark whose rank 1 breaks: while it makes the model of mbs 2, in a backward pass of mbs 3.

From mbs 8 on it runs out of memory in a forward pass.

python -m tests.cli.failing train ...
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepmark.bench.training import trainer
from stepmark.cli.main import main
from stepmark.core.train_case import TrainCase
from stepmark.launch import supervise, torchrun

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


if __name__ == "__main__":
    if not torchrun.is_rank():
        of_tests = functools.partial(supervise.supervise, module="tests.cli.failing")
        supervise.supervise = of_tests
    elif not torchrun.is_first():
        trainer.make = make
    main()
