"""Rank 1 flips one bit of what it received, after every call. Ranks import this first."""

import os

import torch

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench.communicators import Issue, TorchCommunicator

_bind = TorchCommunicator.bind


def bind(
    self: TorchCommunicator, case: CommCase, index: int, send: torch.Tensor, recv: torch.Tensor
) -> Issue:
    call = _bind(self, case, index, send, recv)

    def spoiled() -> None:
        call()
        recv.view(torch.uint8)[0] ^= 1

    return spoiled if os.environ["RANK"] == "1" else call


if "RANK" in os.environ:
    TorchCommunicator.bind = bind  # type: ignore[method-assign]
