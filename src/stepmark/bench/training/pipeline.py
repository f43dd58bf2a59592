"""A pipeline of stages through torch.distributed.pipelining: 1F1B, or interleaved."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional

from stepmark.bench.training import precision
from stepmark.bench.training.mesh import Meshes
from stepmark.bench.training.optimizer import Update
from stepmark.bench.training.parallelize import parallelize
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Blocks by stage, as even as can be; the first stages get what is left over."""
    small, rest = divmod(num_layers, num_stages)
    ends = [0]
    for index in range(num_stages):
        ends.append(ends[-1] + small + (index < rest))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


class Pipelined:
    """One micro-step is one pass of all microbatches through all stages.

    Phases overlap, so none are marked. The last stage has the loss.
    """

    def __init__(self, case: TrainCase, meshes: Meshes, device: torch.device) -> None:
        mesh = meshes.axis("pp")
        assert mesh is not None
        group = mesh.get_group()
        rank, num_ranks = dist.get_rank(group), case.parallel.pp
        per_rank = 2 if case.pp_schedule == "interleaved" else 1
        num_stages = num_ranks * per_rank
        layers = stage_layers(case.model.num_layers, num_stages)
        self._case, self._group = case, group
        self._is_first = rank == 0
        self._is_last = rank == num_ranks - 1
        mine = range(rank, num_stages, num_ranks)
        built = [parallelize(case, meshes, device, layers[stage]) for stage in mine]
        self.models: list[nn.Module] = [stage.model for stage in built]
        self._autocast = precision.autocast(case)
        stages: list[Any] = [
            PipelineStage(stage.call, index, num_stages, device, group=group)
            for index, stage in zip(mine, built, strict=True)
        ]
        count = case.pp_microbatches or num_stages
        if case.mbs % count:
            raise ConfigError("mbs", case.mbs, f"a multiple of {count} pipeline microbatches")

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            flat = logits.flatten(0, 1).float()
            mean = functional.cross_entropy(flat, labels.flatten())
            return mean / (case.grad_accum * count)

        # Scaled by torch, gradients of earlier micro-steps would be divided once more.
        how: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        if per_rank == 1:
            self._schedule: Any = Schedule1F1B(stages[0], count, **how)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, count, **how)
        self._update = Update(case, self.models, over_stages=self._sum_over_stages)

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
    ) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if self._is_first else ()
        more: dict[str, Any] = {"target": labels, "losses": losses} if self._is_last else {}
        with self._autocast():
            self._schedule.step(*inputs, **more)
        self._update.collect()
        if not self._is_last:
            return None
        return torch.stack([loss.detach() for loss in losses]).sum() * self._case.grad_accum

    def optimizer_step(self) -> None:
        self._update()

    def _sum_over_stages(self, square: Tensor) -> Tensor:
        dist.all_reduce(square, group=self._group)
        return square
