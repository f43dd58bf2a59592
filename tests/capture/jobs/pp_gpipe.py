"""Four stages of a pipeline, GPipe."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

WARM_UPS = 2


def build() -> Callable[[], None]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(8, 8)
    given = torch.empty(2, 8, requires_grad=rank > 0)
    stage = PipelineStage(
        model,
        rank,
        stages,
        torch.device("cpu"),
        input_args=(given,),
        output_args=(torch.empty(2, 8, requires_grad=True),),
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum())

    def step() -> None:
        inputs = (torch.ones(4, 8),) if rank == 0 else ()
        target = {"target": torch.ones(4, 8)} if rank == stages - 1 else {}
        schedule.step(*inputs, **target)

    return step
