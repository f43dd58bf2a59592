"""Which rank this process is, and how ranks agree. Control goes over gloo, never over the
communicator that is measured."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among its peers. One rank alone needs no process group."""

    rank: int
    num_ranks: int
    local_rank: int
    device: torch.device

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, by rank."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Rank 0's decision, on every rank."""
        if self.num_ranks == 1:
            return decision()
        box = [decision() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def close(self) -> None:
        if self.num_ranks > 1:
            dist.destroy_process_group()


def join(device_type: str) -> Ranks:
    """Read RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them; alone without them."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group("gloo")
    return Ranks(rank=rank, num_ranks=num_ranks, local_rank=local_rank, device=device)
