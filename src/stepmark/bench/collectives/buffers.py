"""What a rank sends from and receives into, once per operand set."""

import torch

from stepmark.bench.collectives.data import TORCH_OF
from stepmark.core.collectives import Collective
from stepmark.core.comm_case import CommCase

Pair = tuple[torch.Tensor, torch.Tensor]


def needed_bytes(case: CommCase, index: int) -> int:
    """Of one set, on the rank at this place of its communicator."""
    sent, received = case.send_count(index), case.recv_count(index)
    elements = max(sent, received) if case.in_place else sent + received
    return elements * case.dtype.itemsize


def allocate(case: CommCase, index: int, device: torch.device) -> Pair:
    """send and recv, flat; in place they share storage as nccl-tests lays them out."""
    sent, received = case.send_count(index), case.recv_count(index)
    dtype = TORCH_OF[case.dtype]
    if not case.in_place:
        return (
            torch.empty(sent, dtype=dtype, device=device),
            torch.empty(received, dtype=dtype, device=device),
        )
    whole = torch.empty(max(sent, received), dtype=dtype, device=device)
    part = slice(index * case.count, (index + 1) * case.count)
    match case.collective:
        case Collective.ALL_GATHER:
            return whole[part], whole
        case Collective.REDUCE_SCATTER:
            return whole, whole[part]
        case _:
            return whole, whole
