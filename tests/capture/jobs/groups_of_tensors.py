"""Groups whose ranks are read from a tensor, and collectives in them."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def build() -> Callable[[], None]:
    table = torch.arange(dist.get_world_size()).view(2, -1)
    rank = dist.get_rank()
    rows = [dist.new_group(row.tolist()) for row in table]
    columns = [dist.new_group([int(one) for one in column]) for column in table.T]
    row = rows[int((table == rank).nonzero()[0, 0])]
    column = columns[int((table == rank).nonzero()[0, 1])]
    first = dist.get_process_group_ranks(column)[0]

    def step() -> None:
        x = torch.ones(3, 5)
        dist.all_reduce(x, group=row)
        dist.broadcast(x, first, group=column)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x, group=row)
        dist.barrier()

    return step
