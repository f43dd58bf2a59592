"""Bubbles of torch's pipeline schedules: executed on gloo ranks that sleep, and simulated.

A stage sleeps in its forward pass, in the backward pass of its input and in that of its weights
(PipelineStage's dw_builder). The simulated step is of the workload of the same schedule, whose
layers, one in each stage, take these times; messages take none. Its share of waiting is

    1 - computation of a rank / step time,

of the executed step with the time that the first rank really slept.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import ComputeOp, Item, Workload
from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import Costs, OpCost
from stepmark.workloads.job import Job
from stepmark.workloads.rules.pytorch import rule
from stepmark.workloads.rules.pytorch.settings import PyTorch


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A schedule with the seconds of a stage's passes."""

    schedule: PipelineSchedule
    pp: int
    num_microbatches: int
    stages_per_rank: int = 2
    forward_s: float
    input_s: float
    weight_s: float

    @property
    def num_chunks(self) -> int:
        return self.schedule.num_chunks(self.stages_per_rank)

    @property
    def busy_s(self) -> float:
        passes = self.num_microbatches * self.num_chunks
        return passes * (self.forward_s + self.input_s + self.weight_s)


def simulated_s(drill: Drill) -> float:
    """Return the step time of the workload of the schedule."""
    num_stages = drill.pp * drill.num_chunks
    model = replace(find_model("llama-3.1-8b").tiny(), num_layers=num_stages)
    settings = PyTorch(
        pp_schedule=drill.schedule,
        pp_stages=drill.stages_per_rank,
        pp_split=StageSplit.EVEN,
    )
    parallel = ParallelConfig(pp=drill.pp)
    job = Job(model=model, parallel=parallel, mbs=1, gbs=drill.num_microbatches)
    times = {
        "block.fwd": drill.forward_s,
        "block.bwd": drill.input_s + drill.weight_s,
        "block.input": drill.input_s,
        "block.weight": drill.weight_s,
    }
    workload: Workload = rule.workload(job, settings)
    blocks = {
        name: timed(items, times.get(name, 0.0)) for name, items in workload.blocks.items()
    }
    costs = Costs(compute=cost, comm=lambda _op, _group: 0.0)
    return simulate(replace(workload, blocks=blocks), costs).step_s


def timed(items: tuple[Item, ...], time_s: float) -> tuple[Item, ...]:
    """Give the first operation this time, and the others none."""
    new: list[Item] = []
    for item in items:
        if isinstance(item, ComputeOp):
            new.append(replace(item, time_s=time_s))
            time_s = 0.0
        else:
            new.append(item)
    return tuple(new)


def cost(op: ComputeOp) -> OpCost:
    return OpCost(time_s={Work.MATMUL: op.time_s or 0.0})


class Slept:
    """Seconds that this rank slept."""

    total_s = 0.0


def sleep(time_s: float) -> None:
    begin = time.perf_counter()
    time.sleep(time_s)
    Slept.total_s += time.perf_counter() - begin


class Sleep(torch.autograd.Function):
    """A pass that takes time and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, forward_s: float, input_s: float
    ) -> Tensor:
        ctx.input_s = input_s
        sleep(forward_s)
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        sleep(ctx.input_s)
        return grad, grad.sum(), None, None


class Sleeping(nn.Module):
    def __init__(self, drill: Drill, *, is_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        # The first stage has no input with a gradient: it computes all in the second part.
        self.later_s = drill.weight_s + (drill.input_s if is_first else 0.0)
        self._forward_s = drill.forward_s
        self._input_s = 0.0 if is_first else drill.input_s

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x, self.weight, self._forward_s, self._input_s)
        return slept

    def build(self) -> Callable[[], None]:
        return lambda: sleep(self.later_s)


def run_rank(rank: int, drills: list[Drill], store: str, out: str) -> None:
    """Write the share of waiting in the shortest of three steps of each drill."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=drills[0].pp
    )
    torch.set_num_threads(1)
    measured = []
    for drill in drills:
        num_stages = drill.pp * drill.num_chunks
        own = drill.schedule.stages(rank, drill.pp, drill.num_chunks)
        stages: list[Any] = []
        for index in own:
            module = Sleeping(drill, is_first=index == 0)
            stages.append(
                PipelineStage(
                    module, index, num_stages, torch.device("cpu"), dw_builder=module.build
                )
            )
        made: Any = get_schedule_class(drill.schedule.torch_name)
        schedule = made(
            stages[0] if drill.schedule.has_one_stage else stages,
            drill.num_microbatches,
            loss_fn=lambda output, _target: (output * output).sum(),
        )
        x = torch.zeros(drill.num_microbatches, 4)
        inputs = (x,) if own[0] == 0 else ()
        more = {"target": x} if own[-1] == num_stages - 1 else {}
        steps: list[tuple[float, float]] = []
        for _ in range(4):  # the first one also finds the shapes
            dist.barrier()
            begin = time.perf_counter()
            before_s = Slept.total_s
            schedule.step(*inputs, **more)
            dist.barrier()
            step_s = time.perf_counter() - begin
            steps.append((step_s, 1 - (Slept.total_s - before_s) / step_s))
        measured.append(min(steps[1:])[1])
    if rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(measured, file)
    dist.destroy_process_group()


def drills(pp: int, unit_s: float) -> list[Drill]:
    """Every schedule with passes of equal and of unequal length."""
    shapes = (1.0, 1.0, 1.0), (1.0, 1.3, 0.7)
    return [
        Drill(
            schedule=schedule,
            pp=pp,
            num_microbatches=2 * pp + 2 if schedule.is_v else 3 * pp,
            stages_per_rank=stages,
            forward_s=unit_s * forward,
            input_s=unit_s * of_input,
            weight_s=unit_s * of_weight,
        )
        for schedule in PipelineSchedule
        for stages in ((1, 2) if schedule is PipelineSchedule.ZB1P else (2,))
        for forward, of_input, of_weight in shapes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--unit-s", type=float, default=0.03, help="seconds of a pass")
    parser.add_argument("--out", help="JSON file of the rows")
    options = parser.parse_args()
    of_all = drills(options.pp, options.unit_s)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "measured.json")
        arguments = (of_all, os.path.join(folder, "store"), out)
        multiprocessing.spawn(run_rank, arguments, nprocs=options.pp)
        with open(out, encoding="utf-8") as file:
            measured = json.load(file)
    rows = []
    sys.stdout.write("schedule     stages  passes F, I, W     executed  simulated\n")
    for drill, executed in zip(of_all, measured, strict=True):
        shares = executed, 1 - drill.busy_s / simulated_s(drill)
        passes = [
            each / options.unit_s for each in (drill.forward_s, drill.input_s, drill.weight_s)
        ]
        rows.append(asdict(drill) | {"executed": shares[0], "simulated": shares[1]})
        words = ", ".join(f"{each:.1f}" for each in passes)
        sys.stdout.write(
            f"{drill.schedule:12} {drill.num_chunks:6}  {words:15} "
            f"{100 * shares[0]:9.1f}% {100 * shares[1]:9.1f}%\n"
        )
    worst = max(abs(row["executed"] - row["simulated"]) for row in rows)
    sys.stdout.write(f"largest difference {100 * worst:.1f} % of a step\n")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
