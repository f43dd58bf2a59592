"""Which collectives run beside the computation is told by whose calls they are."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.bench.capture.user_code import WIDTH
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.flop_counter import FlopCounterMode

from stepmark.bench.capture.overlap import Overlap
from stepmark.bench.capture.run import capture
from stepmark.core.dtypes import DType
from stepmark.core.ops import Gemm, Phase
from stepmark.core.workload import COMPUTE, CommOp, ComputeOp, Operation


@pytest.mark.parametrize("newest", ["compute", "fsdp"])
def test_a_reduction_waits_for_the_newest_operation_of_the_computation(newest: str) -> None:
    """Be it communication; what was issued on another stream since then does not count."""
    product = ComputeOp(
        op=Gemm(m=8, n=8, k=8, dtype=DType.FP32), phase=Phase.WGRAD, module="mlp"
    )
    summed = replace(message("tp"), stream=newest)
    before: list[Operation] = [product, summed]
    sent = Overlap().sending(message("dp"), before, own=True, ddp=True)
    assert (sent.stream, sent.after) == ("dp", ("grads",))
    names = ["", "grads"] if newest == COMPUTE else ["grads", ""]
    assert [one.name for one in before] == names
    again = Overlap().sending(message("dp"), before, own=True, ddp=True)
    assert again.after == ("grads",)


def message(group: str) -> CommOp:
    return CommOp(
        collective="all_reduce",
        dtype=DType.FP32,
        count=8,
        group=group,
        phase=Phase.BWD,
        module="mlp",
    )


@pytest.mark.parametrize("way", ["plain", "hook", "mode"])
def test_of_collectives_under_ddp_only_those_of_its_reducer_are_its_own(way: str) -> None:
    """One that a hook of the user's calls and waits for is on the stream of computation."""
    made = capture(functools.partial(with_own_sum, way), 4)
    sent = [one for one in made.expand() if isinstance(one, CommOp)]
    own = [one for one in sent if one.count == 2 * WIDTH]
    assert [(one.stream, one.phase, one.name) for one in own] == [(COMPUTE, Phase.BWD, "")]
    buckets = [one for one in sent if one.count != 2 * WIDTH]
    assert sum(one.count for one in buckets) == 6 * (WIDTH + 1) * WIDTH
    assert {(one.stream, one.name) for one in buckets} == {("dp", "reduced")}
    assert {one.dtype for one in buckets} == {DType.FP16 if way == "hook" else DType.FP32}


def with_own_sum(way: str) -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), bucket_cap_mb=0.002
    )
    if way == "hook":  # gradients are written to the buckets in fp16
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        mode = FlopCounterMode(display=False) if way == "mode" else contextlib.nullcontext()
        with mode:
            out = model(torch.ones(2, WIDTH))
            out.register_hook(dist.all_reduce)
            out.sum().backward()
        optimizer.step()

    return step


def test_reductions_over_a_group_of_their_own_are_beside_the_gathers() -> None:
    made = capture(scattered_apart, 4)
    sent = {
        (one.collective, one.stream)
        for one in made.expand()
        if isinstance(one, CommOp) and one.phase is not Phase.OPTIM
    }
    assert sent == {("all_gather", "fsdp"), ("reduce_scatter", "fsdp_reduce")}


def scattered_apart() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    vars(FSDPModule)["set_separate_reduce_scatter_group"](model)
    return lambda: model(torch.ones(2, WIDTH)).sum().backward()
