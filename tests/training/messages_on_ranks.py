"""What test_messages runs on two gloo ranks."""

from collections.abc import Callable
from itertools import chain
from operator import add

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from stepmark.cases.message import summed
from stepmark.measuring.ranks import Ranks
from stepmark.model.collectives import Collective, num_parts
from stepmark.training.messages import MessageRecorder

WIDTH = 16
LAYER = WIDTH * WIDTH + WIDTH
F32, BF16 = 4, 2
Row = tuple[str, str, str, str, int, int | None, int]


def record(work: Callable[[MessageRecorder], object]) -> list[Row]:
    """(collective, dtype, group, phase, call bytes, message bytes, calls) in order."""
    with MessageRecorder() as recorder:
        work(recorder)
    for kind, tally in recorder.histogram():
        assert kind.num_ranks == 2, kind
        assert tally.ranks == 1
        if kind.collective not in ("send", "recv"):
            parts = num_parts(Collective(kind.collective), 2)
            assert kind.message_bytes == parts * kind.call_bytes, kind
    return [
        (k.collective, k.dtype, k.group, k.phase, k.call_bytes, k.message_bytes, t.calls)
        for k, t in recorder.histogram()
    ]


def sums(rows: list[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """(calls, message bytes) by collective and phase."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for collective, _, _, phase, _, size, calls in rows:
        old = found.get((collective, phase), (0, 0))
        found[collective, phase] = (old[0] + calls, old[1] + (size or 0) * calls)
    return found


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def step(model: nn.Module, recorder: MessageRecorder) -> None:
    recorder.phase = "forward"
    loss = model(torch.ones(3, WIDTH)).square().mean()
    recorder.phase = "backward"
    loss.backward()
    recorder.phase = "optimizer"
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm.full_tensor()


def each_call_of_torch_distributed(rank: int) -> None:
    four, eight = torch.ones(4), torch.ones(8)
    halves = [torch.ones(4), torch.ones(4)]
    only = halves if rank == 0 else None
    default = "default_pg"

    def row(collective: str, call: int, size: int, dtype: str = "fp32") -> list[Row]:
        return [(collective, dtype, default, "", call, size, 1)]

    expected: list[tuple[Callable[[], object], list[Row]]] = [
        (lambda: dist.all_reduce(four), row("all_reduce", 16, 16)),
        (lambda: dist.all_reduce(four.bfloat16()), row("all_reduce", 8, 8, "bf16")),
        (lambda: dist.all_reduce(four.long()), row("all_reduce", 32, 32, "int64")),
        (lambda: dist.broadcast(four, 0), row("broadcast", 16, 16)),
        (lambda: dist.reduce(four, 0), row("reduce", 16, 16)),
        (lambda: dist.all_gather(halves, four), row("all_gather", 16, 32)),
        (lambda: dist.reduce_scatter(four, halves), row("reduce_scatter", 16, 32)),
        (lambda: dist.gather(four, only, 0), row("gather", 16, 32)),
        (lambda: dist.scatter(four, only, 0), row("scatter", 16, 32)),
        (lambda: dist.all_to_all_single(eight, eight + 1), row("all_to_all", 16, 32)),
        (dist.barrier, [("barrier", "", default, "", 0, 0, 1)]),
        (lambda: _gather_into(eight, four), row("all_gather", 16, 32)),
        (lambda: _scatter_into(four, eight), row("reduce_scatter", 16, 32)),
        (lambda: _coalesced(four), row("all_gather", 32, 64)),
    ]
    for call, rows in expected:
        assert record(lambda _, call=call: call()) == rows, rows  # type: ignore[misc]
    splits = ([3, 1], [3, 1]) if rank == 0 else ([1, 3], [1, 3])
    assert record(
        lambda _: dist.all_to_all_single(torch.ones(4), four, *_matching(rank, splits))
    ) == [("all_to_all_v", "fp32", default, "", 8, 16, 1)]


def _matching(rank: int, splits: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Rank 0 sends 3 to itself and 1; rank 1 sends 1 and 3 to itself."""
    del rank
    return splits


def _gather_into(out: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_gather_into_tensor(out, part)


def _scatter_into(part: torch.Tensor, whole: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(part, whole)


def _coalesced(part: torch.Tensor) -> None:
    """Two gathers as one call: its sizes are their sum."""
    with dist.distributed_c10d._coalescing_manager(async_ops=False):
        for _ in range(2):
            dist.all_gather_into_tensor(torch.ones(8), part)


def pairs(rank: int) -> None:
    """Rank 0 sends 16 bytes alone and 20 in a batch, in which it also receives 24."""

    def exchange(recorder: MessageRecorder) -> None:
        recorder.phase = "forward"
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
        mine, other = torch.ones(5 + rank), torch.ones(6 - rank)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        )
        for work in works:
            work.wait()

    def row(side: str, size: int) -> Row:
        return (side, "fp32", "default_pg", "forward", size, size, 1)

    if rank == 0:
        assert record(exchange) == [row("send", 16), row("send", 20), row("recv", 24)]
    else:
        assert record(exchange) == [row("recv", 16), row("send", 24), row("recv", 20)]


def ddp() -> None:
    """All gradients once, in fp32, in the backward pass; by the reducer's own calls."""
    model = nn.parallel.DistributedDataParallel(layers())
    for _ in range(2):  # the second one agrees on new buckets, in the order seen
        step(model, MessageRecorder())
    found = record(lambda recorder: step(model, recorder))
    assert {row[1] for row in found} == {"fp32"}
    assert sums(found) == {("all_reduce", "backward"): (1, 2 * LAYER * F32)}, found
    with model.no_sync():
        assert record(lambda recorder: step(model, recorder)) == []


def fsdp(*, reshard: bool) -> None:
    """Weights gathered forward, and backward where they were given back; gradients once."""
    model = layers()
    for layer in (model[0], model[2]):
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    params = 2 * LAYER * F32
    expected = {
        ("all_gather", "forward"): (2, params),
        ("all_gather", "backward"): (2, params),
        ("reduce_scatter", "backward"): (2, params),
    }
    if not reshard:
        del expected["all_gather", "backward"]
    found = sums(record(lambda recorder: step(model, recorder)))
    # Of the norm: one number, or one of each of four tensors, as DTensor's release sees fit.
    assert found.pop(("all_reduce", "optimizer")) in {(1, F32), (1, 4 * F32)}, found
    assert found == expected, found


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed() -> None:
    """A block computed again in the backward pass needs no further gather."""
    model = Checkpointed()
    fully_shard(model, reshard_after_forward=True)
    found = sums(record(lambda recorder: step(model, recorder)))
    assert found["all_gather", "forward"] == (1, 2 * LAYER * F32), found
    assert found["all_gather", "backward"] == (1, 2 * LAYER * F32), found
    assert found["reduce_scatter", "backward"] == (1, 2 * LAYER * F32), found


def tensor_parallel(mesh: DeviceMesh) -> None:
    """One all-reduce of the activations each way: after the rows, before the columns."""
    model = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def work(recorder: MessageRecorder) -> None:
        recorder.phase = "forward"
        y = model(torch.ones(3, WIDTH, requires_grad=True))
        recorder.phase = "backward"
        y.sum().backward()

    activations = 3 * WIDTH * F32
    found = record(work)
    assert found == [
        ("all_reduce", "fp32", "mesh_tp", "forward", activations, activations, 1),
        ("all_reduce", "fp32", "mesh_tp", "backward", activations, activations, 1),
    ], found


def _summed(tensor: DTensor) -> torch.Tensor:
    total = tensor.sum()
    assert isinstance(total, DTensor)
    return total.full_tensor()


def dtensors(mesh: DeviceMesh) -> None:
    sharded = distribute_tensor(torch.ones(4, 4, dtype=torch.bfloat16), mesh, [Shard(0)])

    def row(collective: str, call: int, size: int) -> list[Row]:
        return [(collective, "bf16", "mesh_tp", "", call, size, 1)]

    assert record(lambda _: sharded.redistribute(mesh, [Replicate()])) == row(
        "all_gather", 4 * 2 * BF16, 4 * 4 * BF16
    )
    assert record(lambda _: _summed(sharded)) == row("all_reduce", BF16, BF16)
    plain = torch.ones(4, dtype=torch.bfloat16)
    assert record(lambda _: funcol.reduce_scatter_tensor(plain, "sum", 0, mesh)) == row(
        "reduce_scatter", 2 * BF16, 4 * BF16
    )
    assert record(lambda _: funcol.all_to_all_single(plain, None, None, mesh)) == row(
        "all_to_all", 2 * BF16, 4 * BF16
    )


def compiled(mesh: DeviceMesh) -> None:
    """Compiled code is not run eagerly instead, and its own collectives are seen."""

    def reduced(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = funcol.all_reduce(x * 2, "sum", mesh)
        return total + 1

    ran: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        def run(*inputs: torch.Tensor) -> object:
            ran.append(True)
            return graph(*inputs)

        return run

    function = torch.compile(reduced, backend=backend)
    function(torch.ones(4))
    ran.clear()
    found = record(lambda _: function(torch.ones(4)))
    assert ran == [True]
    assert found == [("all_reduce", "fp32", "mesh_tp", "", 16, 16, 1)]


def check_all(ranks: Ranks) -> None:
    each_call_of_torch_distributed(ranks.rank)
    pairs(ranks.rank)
    ddp()
    fsdp(reshard=True)
    fsdp(reshard=False)
    recomputed()
    group = dist.new_group([0, 1], group_desc="mesh_tp")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    tensor_parallel(mesh)
    dtensors(mesh)
    compiled(mesh)
    with MessageRecorder() as recorder:
        dist.all_reduce(torch.ones(1))
    by_rank = ranks.gather(recorder.histogram())
    ((kind, tally),) = summed(chain.from_iterable(by_rank), ranks=add).items()
    assert (kind.collective, tally.calls, tally.ranks) == ("all_reduce", 2, 2)
