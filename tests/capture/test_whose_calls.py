"""Which collectives run beside the computation is told by whose calls they are."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.capture.user_code import WIDTH
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.flop_counter import FlopCounterMode

from stepmark.capture.overlap import Overlap
from stepmark.capture.run import capture
from stepmark.ground.dtypes import DType
from stepmark.model.ops import Gemm, Phase
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Operation


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


def test_gathers_of_another_group_are_on_another_stream_after_the_gather_before() -> None:
    """As of experts, whose group is smaller: torch has one stream for all gathers."""
    found = list(capture(lambda: sharded((4,), inner=2), 4).expand())
    for name in ("gather", "reduced"):
        sent = [one for one in found if one.name == name]
        streams = {one.group: one.stream for one in sent if isinstance(one, CommOp)}
        assert len(streams) == 2
        assert len(set(streams.values())) == 2
        assert "fsdp" in streams.values()
        if name == "gather":
            for first, second in pairwise(sent):
                assert ("gather" in second.after) is (first.stream != second.stream)


def test_a_reduction_waits_for_no_sum_over_replicas() -> None:
    """Torch's event for the next one is recorded ahead of the sum."""
    found = list(capture(lambda: sharded((4, 1)), 4).expand())
    sums = [at for at, one in enumerate(found) if one.name == "reduced"]
    assert len(sums) == 3
    assert {found[at].stream for at in sums} == {"fsdp_replicate"}
    assert not any("reduced" in str(one.after) for one in found)


def test_a_forward_pass_gathers_after_what_was_computed_before_it() -> None:
    """Also where no reduction was waited for."""
    found = list(capture(lambda: sharded((4,), passes=3), 4).expand())
    gathers = [
        at for at, one in enumerate(found) if (one.name, one.phase) == ("gather", Phase.FWD)
    ]
    microbatches = [found[at].microbatch for at in gathers]
    starts = [gathers[microbatches.index(one)] for one in range(3)]
    for at in starts[1:]:
        newest = max(i for i in range(at) if found[i].stream == COMPUTE)
        assert found[newest].name in found[at].after


def sharded(mesh: tuple[int, ...], *, inner: int = 0, passes: int = 1) -> Callable[[], None]:
    """Gradients are reduced after the last of so many passes.

    inner: the ranks that the second of three layers is sharded over.
    """
    names = ("replicate", "shard")[-len(mesh) :]
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    if inner:
        whole = init_device_mesh("cpu", (4 // inner, inner), mesh_dim_names=("ep", "expert"))
        fully_shard(model[1], mesh=whole["expert"])
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for module in model:
        if not isinstance(module, FSDPModule):
            fully_shard(module, mesh=devices)
    outer = fully_shard(model, mesh=devices)

    def step() -> None:
        for index in range(passes):
            outer.set_requires_gradient_sync(index + 1 == passes)
            outer.set_is_last_backward(index + 1 == passes)
            model(torch.ones(2, WIDTH)).sum().backward()

    return step
