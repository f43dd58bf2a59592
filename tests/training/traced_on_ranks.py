"""What test_traced_messages runs on two gloo ranks: a job that is profiled and recorded."""

from pathlib import Path

import torch
import torch.distributed as dist
from tests.training.messages_on_ranks import layers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from stepmark.cases.message import MessageKind, Tally
from stepmark.measuring.ranks import Ranks
from stepmark.training.messages import MessageRecorder

STEPS = 2


def profiled(ranks: Ranks, folder: str) -> list[tuple[MessageKind, Tally]]:
    """Write the trace of two steps, and return the messages of them by the dispatcher."""
    replica = DistributedDataParallel(layers())
    sharded = layers()
    fully_shard(sharded[0])
    fully_shard(sharded)
    path = Path(folder) / f"rank{ranks.rank}.json"
    recorder = MessageRecorder()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        _step(ranks.rank, replica, sharded)  # builds what is built once
        profiler.step()
        with recorder:
            for _ in range(STEPS):
                _step(ranks.rank, replica, sharded)
                profiler.step()
    return recorder.histogram()


def _step(rank: int, replica: nn.Module, sharded: nn.Module) -> None:
    for model in (replica, sharded):
        model(torch.ones(3, 16)).square().mean().backward()
    four, eight = torch.ones(4), torch.ones(8)
    halves = [torch.ones(4), torch.ones(4)]
    dist.all_reduce(four.bfloat16())
    dist.all_reduce(four.long())
    dist.all_gather(halves, four)
    dist.all_gather_into_tensor(eight, four)
    dist.reduce_scatter_tensor(four, eight)
    dist.broadcast(four, 0)
    dist.reduce(four, 1)
    dist.gather(four, halves if rank == 0 else None, 0)
    dist.all_to_all_single(eight, eight + 1)
    splits = [3, 1] if rank == 0 else [1, 3]
    dist.all_to_all_single(torch.ones(4 + 2 * (1 - 2 * rank)), four, [splits[0]] * 2, [3, 1])
    dist.barrier()
    if rank == 0:
        dist.send(four, 1)
    else:
        dist.recv(four, 0)
    mine, other = torch.ones(5 + rank), torch.ones(6 - rank)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
    ):
        work.wait()
