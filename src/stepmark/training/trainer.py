"""One micro-step and one optimizer step of a case, as calls that enqueue work and return.

A pipeline goes through a schedule of torch.distributed.pipelining.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import GradSync
from stepmark.ground.errors import ConfigError
from stepmark.training import precision
from stepmark.training.model_parallel import Meshes
from stepmark.training.optimizer import Update
from stepmark.training.parallelize import Parallelized, parallelize

Mark = Callable[[str], None]


class Plain:
    """Forward and backward on every rank. As in every trainer nothing waits for the device.

    micro_step marks "fwd" and "bwd" where these are separate; the optimizer follows the last
    one. It returns the detached loss; None on ranks without it. roots: the modules it calls.
    """

    def __init__(self, case: TrainCase, built: Parallelized) -> None:
        self.models: list[nn.Module] = [built.model]
        self.roots: tuple[nn.Module, ...] = (built.call,)
        self._case = case
        self._built = built
        self._autocast = precision.autocast(case)
        self._fp8 = precision.fp8_region(case)
        # Graphs write gradients to the addresses of their capture.
        keeps = case.cuda_graph or case.compiles_graphs
        self._update = Update(case, self.models, keeps_gradients=keeps)

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Mark
    ) -> Tensor | None:
        hold = self._case.grad_sync is GradSync.LAST and not is_last
        if self._case.compiles_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self._built.hold_gradients() if hold else contextlib.nullcontext():
            with self._autocast(), self._fp8():
                loss: Tensor = self._built.call(tokens, labels)
            mark("fwd")
            (loss / self._case.grad_accum).backward()
            if not hold:  # else they are yet to be reduced
                self._update.collect()
            mark("bwd")
        return loss.detach()

    def optimizer_step(self) -> None:
        self._update()


class Graphed:
    """Forward and backward replayed from a CUDA graph; the optimizer stays outside."""

    def __init__(self, plain: Plain, case: TrainCase, device: torch.device) -> None:
        self.models = plain.models
        self.roots: tuple[nn.Module, ...] = ()  # a replay calls none
        self._plain = plain
        shape = (case.mbs, case.model.seq_len)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._labels = torch.zeros(shape, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Mark
    ) -> Tensor | None:
        self._tokens.copy_(tokens)
        self._labels.copy_(labels)
        if self._graph is None:
            self._capture(is_last)
        assert self._graph is not None
        self._graph.replay()
        return self._loss

    def optimizer_step(self) -> None:
        self._plain.optimizer_step()

    def _capture(self, is_last: bool) -> None:
        """Capture after three passes on a side stream, as torch's notes on graphs require."""

        def silent(_name: str) -> None:
            """Set no mark: events of a capture hold no times."""

        def once() -> Tensor | None:
            return self._plain.micro_step(
                self._tokens, self._labels, is_last=is_last, mark=silent
            )

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(side)
        for model in self.models:
            model.zero_grad(set_to_none=False)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = once()


class Pipelined:
    """One micro-step is one pass of all microbatches through all stages.

    Phases overlap, so none are marked. The last stage has the loss.
    """

    def __init__(self, case: TrainCase, meshes: Meshes, device: torch.device) -> None:
        mesh = meshes.axis("pp")
        assert mesh is not None
        group = mesh.get_group()
        rank = dist.get_rank(group)
        num_stages = case.num_stages
        own_stages = case.stages_of(rank)
        self._case = case
        self._group = group
        self._is_first = own_stages[0] == 0
        self._is_last = own_stages[-1] == num_stages - 1
        built = [parallelize(case, meshes, device, stage) for stage in own_stages]
        self.models: list[nn.Module] = [stage.model for stage in built]
        self.roots = tuple(stage.call for stage in built)
        self._autocast = precision.autocast(case)
        stages: list[Any] = [
            PipelineStage(stage.call, index, num_stages, device, group=group)
            for index, stage in zip(own_stages, built, strict=True)
        ]
        count = case.num_microbatches
        if case.mbs % count:
            rule = f"a multiple of {count}, because it counts all microbatches of a pipeline"
            raise ConfigError("mbs", case.mbs, rule)

        output = built[-1].model.output

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            assert output is not None, "only the last stage has a loss"
            mean = output.mean_loss(logits.flatten(0, 1), labels.flatten())
            return mean / (case.grad_accum * count)

        # Scaled by torch, gradients of earlier micro-steps would be divided once more.
        options: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        made: Any = get_schedule_class(case.pp_schedule.torch_name)
        is_single = case.pp_schedule.has_one_stage
        self._schedule = made(stages[0] if is_single else stages, count, **options)
        self._update = Update(case, self.models, over_stages=self._sum_over_stages)

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
    ) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if self._is_first else ()
        more: dict[str, Any] = {"target": labels, "losses": losses} if self._is_last else {}
        with self._autocast():
            # As torchtitan: the logits of all micro-batches would be kept and joined.
            self._schedule.step(*inputs, **more, return_outputs=False)
        self._update.collect()
        if not self._is_last:
            return None
        return torch.stack([loss.detach() for loss in losses]).sum() * self._case.grad_accum

    def optimizer_step(self) -> None:
        self._update()

    def _sum_over_stages(self, square: Tensor) -> Tensor:
        dist.all_reduce(square, group=self._group)
        return square


Trainer = Plain | Graphed | Pipelined


def make(case: TrainCase, device: torch.device) -> Trainer:
    """Return the trainer of this rank. Every rank calls it."""
    torch.set_float32_matmul_precision("highest")  # fp32 is not TF32
    meshes = Meshes(case)
    if case.parallel.pp > 1:
        return Pipelined(case, meshes, device)
    built = parallelize(case, meshes, device)
    plain = Plain(case, built)
    return Graphed(plain, case, device) if case.cuda_graph else plain
