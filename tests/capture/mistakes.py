"""Training scripts with one mistake each. The line that fails says "here"."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

Step = Callable[[], object]


def raises() -> Step:
    steps: dict[str, Step] = {}
    return steps["no such key"]  # here


def raises_in_step() -> Step:
    def step() -> None:
        raise ValueError("two\nlines")  # here

    return step


def returns_nothing() -> None:
    """Forgets its return."""


def idle() -> Step:
    return lambda: None


def makes_a_larger_mesh() -> Step:
    init_device_mesh("cpu", (8, 2))  # here
    return lambda: None


def makes_a_smaller_mesh() -> Step:
    mesh = init_device_mesh("cpu", (2,))
    return lambda: dist.all_reduce(torch.ones(4), group=mesh.get_group())


def picks_by_values() -> Step:
    model = nn.Linear(4, 4)

    def step() -> None:
        x = model(torch.ones(2, 4))
        x[x > 0].sum().backward()  # here

    return step


def reads_as_numpy() -> Step:
    model = nn.Linear(4, 4)

    def step() -> None:
        model(torch.ones(2, 4)).detach().numpy()  # here

    return step


def joins_again() -> Step:
    dist.init_process_group("gloo")  # here
    return lambda: None


def gives_no_shapes() -> Step:
    stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), 4, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum())
    return lambda: schedule.step(torch.ones(4, 4))  # here


def exits() -> Step:
    raise SystemExit(3)  # here


def needs_argument(size: int) -> Step:
    return lambda: torch.ones(size)


def wants_cuda() -> Step:
    model = nn.Linear(4, 4).cuda()
    return lambda: model(torch.ones(2, 4))


def reads_its_loss() -> Step:
    model = nn.Linear(4, 4)

    def step() -> None:
        loss = model(torch.ones(2, 4)).square().mean()
        if loss.item() > 0:  # here
            loss.backward()
        print("loss", float(loss))  # noqa: T201

    return step
