"""Experts divided over ranks of the data-parallel shard axis, which their tokens travel to.

A rank holds num_experts / ep experts; what FSDP shards of these it shards over the ranks
that hold the same ones (torchtitan's rule: ep borrows from dp_shard).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from stepmark.bench.training.experts import Compute, Experts
from stepmark.bench.training.mesh import Meshes
from stepmark.bench.training.transformer import Transformer
from stepmark.core.train_case import TrainCase


def apply(model: Transformer, meshes: Meshes) -> None:
    """Keep this rank's experts, in place."""
    mesh = meshes.experts()["ep"]
    for experts in _of(model):
        for name, weight in list(experts.held.named_parameters()):
            shard = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            experts.held.register_parameter(name, nn.Parameter(shard))
        experts.dispatch = AllToAll(mesh.get_group())


def shard_experts(model: Transformer, case: TrainCase, meshes: Meshes, **options: Any) -> None:
    """FSDP of the experts held, over the ranks that hold the same. Call before their blocks."""
    whole = meshes.experts()
    mesh: DeviceMesh = (
        whole["dp_replicate", "dp_shard_same"]
        if case.parallel.dp_replicate > 1
        else whole["dp_shard_same"]
    )
    for experts in _of(model):
        held: Any = fully_shard(experts.held, mesh=mesh, **options)
        # Gradients here are sums over the tokens of ep ranks; all others are means over all.
        held.set_gradient_divide_factor(float(case.parallel.gradient_ranks))
        # gloo cannot scale while it sums. Over one rank there is no sum, and torch would divide
        # twice.
        if case.backend == "gloo" and whole["dp_shard_same"].size() > 1:
            held.set_force_sum_reduction_for_comms(True)


def _of(model: Transformer) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


class AllToAll:
    """A Dispatch: rows to the ranks of their experts and back.

    The host reads how many rows go where, as NCCL needs to be told: one wait per layer.
    Dynamo would compile these numbers anew for every layer, until it gives up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num_ranks = group, dist.get_world_size(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, rows_MC: Tensor, ends_E: Tensor, compute: Compute) -> Tensor:
        sent_RL = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).view(self._num_ranks, -1)
        got_RL = torch.empty_like(sent_RL)
        dist.all_to_all_single(got_RL, sent_RL, group=self._group)
        there, here = torch.stack((sent_RL.sum(1), got_RL.sum(1))).tolist()
        arrived = all_to_all_single_autograd(rows_MC, here, there, self._group)
        # They come by sender; the products want them by expert.
        experts = torch.arange(got_RL.shape[1], device=got_RL.device).repeat(self._num_ranks)
        order = experts.repeat_interleave(got_RL.flatten(), output_size=sum(here)).argsort(
            stable=True
        )
        ends_L = got_RL.sum(0).cumsum(0, dtype=torch.int32)
        done = compute(arrived[order], ends_L)
        back = torch.empty_like(done).index_copy(0, order, done)
        result: Tensor = all_to_all_single_autograd(back, there, here, self._group)
        return result
