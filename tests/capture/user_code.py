"""Training scripts as users write them, small, for four ranks. None knows of stepmark."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.capture.example import Config, Llama
from tests.capture.example import build as build_llama
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
WIDTH = 24
# Neither 50 nor 36 is a multiple of ranks: parameters are padded.
SMALL = Config(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=36,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=50,
    seq_len=8,
    tp=2,
    num_microbatches=2,
)


def fsdp_tp() -> Step:
    return build_llama(SMALL)


def fsdp() -> Step:
    """Padded parameters, several micro-batches, bf16 weights, fp32 reductions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return _sharded(Llama(SMALL), mesh["dp"], torch.bfloat16)


def hsdp() -> Step:
    """Shards on two ranks, copies on two; layers are computed again."""
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    model = Llama(SMALL)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    return _sharded(model, mesh, torch.float32)


def _sharded(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root keeps its weights.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        for _ in range(SMALL.num_microbatches):
            tokens = torch.randint(SMALL.vocab_size, (2, SMALL.seq_len))
            model(tokens).float().logsumexp(-1).mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.distributed.tensor.DTensor.full_tensor(norm)  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _mlp(num_layers: int) -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers))
    return nn.Sequential(*layers)


def ddp() -> Step:
    """Buckets of few layers, gradients of two micro-batches reduced once, a loss averaged."""
    model = nn.parallel.DistributedDataParallel(
        _mlp(6), bucket_cap_mb=1.2 * WIDTH**2 * 4 / 2**20
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with model.no_sync():
            model(torch.ones(2, WIDTH)).sum().backward()
        loss = model(torch.ones(2, WIDTH)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    return step


class Experts(nn.Module):
    """As many tokens to each expert, one expert on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return exchanged(self.down(torch.relu(self.up(exchanged(tokens)))))


def exchanged(tokens: Tensor) -> Tensor:
    group = dist.distributed_c10d._get_default_group()
    return funcol.all_to_all_single_autograd(tokens, None, None, group)


def moe() -> Step:
    """Expert parallelism; the first layer is computed again in the backward pass."""
    model = nn.ModuleList(Experts() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        tokens = torch.ones(8, WIDTH, requires_grad=True)
        tokens = checkpoint(model[0], tokens, use_reentrant=False)
        model[1](tokens).sum().backward()
        optimizer.step()

    return step


def pp() -> Step:
    """Four stages, 1F1B, six micro-batches."""
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    model = _mlp(1)
    stage = PipelineStage(
        model,
        rank,
        num_stages,
        torch.device("cpu"),
        input_args=(torch.empty(2, WIDTH, requires_grad=rank > 0),),
        output_args=(torch.empty(2, WIDTH, requires_grad=True),),
    )
    schedule = Schedule1F1B(stage, 6, loss_fn=lambda out, _: out.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        if rank == 0:
            schedule.step(torch.ones(12, WIDTH))
        elif rank == num_stages - 1:
            schedule.step(target=torch.ones(12, WIDTH))
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pp_fsdp() -> Step:
    """Two ranks of two stages each, interleaved, sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    models = [_mlp(2) for _ in range(2)]
    stages: list[Any] = []
    for index, model in zip((rank, rank + 2), models, strict=True):
        fully_shard(model, mesh=mesh["dp"])
        given = torch.empty(2, WIDTH, requires_grad=index > 0)
        made = torch.empty(2, WIDTH, requires_grad=True)
        args: dict[str, Any] = {"input_args": (given,), "output_args": (made,), "group": group}
        stages.append(PipelineStage(model, index, 4, torch.device("cpu"), **args))
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=lambda out, _: out.sum())
    parameters = [one for model in models for one in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        if rank == 0:
            schedule.step(torch.ones(8, WIDTH))
        else:
            schedule.step(target=torch.ones(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES = {one.__name__: one for one in (fsdp, fsdp_tp, hsdp, ddp, moe, pp, pp_fsdp)}
PIPELINES = ("pp", "pp_fsdp")
# Steps before all are the same: DDP makes new buckets, pipelines compare shapes.
NUM_WARM_UPS = {"ddp": 2, "pp": 2, "pp_fsdp": 2}
