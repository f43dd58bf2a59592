"""stepmark whose rank 1 breaks: while it makes the model of mbs 2, in a backward pass of mbs 3.

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
    return made


def _broken(
    tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
) -> Tensor:
    raise RuntimeError("broken in the backward pass")


if __name__ == "__main__":
    if not torchrun.is_rank():
        of_tests = functools.partial(supervise.supervise, module="tests.cli.failing")
        supervise.supervise = of_tests
    elif not torchrun.is_first():
        trainer.make = make
    main()
