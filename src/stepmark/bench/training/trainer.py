"""One micro-step and one optimizer step of a case, as calls that enqueue work and return."""

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from stepmark.bench.training import pipeline, precision
from stepmark.bench.training.mesh import Meshes
from stepmark.bench.training.optimizer import Update
from stepmark.bench.training.parallelize import Parallelized, parallelize
from stepmark.core.train_case import TrainCase
from stepmark.core.training import GradSync

Mark = Callable[[str], None]


class Trainer(Protocol):
    """What the loop calls. Nothing in it waits for the device."""

    models: list[nn.Module]

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Mark
    ) -> Tensor | None:
        """Forward and backward; marks "fwd" and "bwd" where these can be told apart.

        is_last: the optimizer follows. Returns the loss (detached); None on ranks without it.
        """

    def optimizer_step(self) -> None:
        """Clip, update, and forget the gradients."""


def make(case: TrainCase, device: torch.device) -> Trainer:
    """The trainer of this rank. Every rank calls it."""
    torch.set_float32_matmul_precision("highest")  # fp32 is not TF32
    meshes = Meshes(case)
    if case.parallel.pp > 1:
        return pipeline.Pipelined(case, meshes, device)
    built = parallelize(case, meshes, device)
    plain = Plain(case, built)
    return Graphed(plain, case, device) if case.cuda_graph else plain


class Plain:
    """Forward and backward on every rank."""

    def __init__(self, case: TrainCase, built: Parallelized) -> None:
        self.models: list[nn.Module] = [built.model]
        self._case, self._built = case, built
        self._autocast = precision.autocast(case)
        self._fp8 = precision.fp8_region(case)
        # Graphs write gradients where they were when captured.
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
        """After three passes aside, as torch's notes on CUDA graphs ask for."""

        def silent(_name: str) -> None:
            """No marks: events of a capture hold no times."""

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
