"""The update of a step: clip, AdamW or Muon, and gradients set to zero."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import OptimizerKind, Precision
from stepmark.measuring.environment import HAS_TRITON
from stepmark.training import precision
from stepmark.training.layers import triton_kernels


class Update:
    """Clip, optimizer, zero."""

    def __init__(
        self,
        case: TrainCase,
        models: Sequence[nn.Module],
        *,
        keeps_gradients: bool = False,
        over_stages: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._case = case
        self._models = models
        self._keeps = keeps_gradients
        self._over_stages = over_stages
        named = [
            (name, parameter)
            for model in models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self._parameters = [parameter for _, parameter in named]
        has_masters = case.precision is Precision.MASTER
        self._masters = Masters(self._parameters) if has_masters else None
        self._updated = self._masters.weights if self._masters else self._parameters
        self._optimizers = build_optimizers(
            case, list(zip((name for name, _ in named), self._updated, strict=True))
        )
        self._after = precision.after_optimizer(case)
        if keeps_gradients:
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)

    def collect(self) -> None:
        """Add the gradients of a backward pass to the fp32 ones, where the case has these."""
        if self._masters:
            self._masters.collect()

    def __call__(self) -> None:
        if self._case.clip:
            clip_gradients(self._updated, self._case.clip, self._over_stages)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._masters:
            self._masters.publish()
        else:
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=not self._keeps)
        if self._after:
            for model in self._models:
                self._after(model)


def build_optimizers(
    case: TrainCase, named: Sequence[tuple[str, Tensor]]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update the tensors, in the order in which they run.

    named: with the names of the model's parameters. Muon updates the blocks' matrices, with
    steps of AdamW's size (adjust_lr_fn), so that both have one learning rate.
    """
    matrices = list[Tensor]()
    if case.optimizer is OptimizerKind.MUON:
        matrices = [p for name, p in named if "blocks" in name.split(".") and p.ndim == 2]
    ids = set(map(id, matrices))
    others = [tensor for _, tensor in named if id(tensor) not in ids]
    optimizers = list[torch.optim.Optimizer]()
    if matrices:
        muon = torch.optim.Muon(
            matrices, lr=case.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    if others:
        options: dict[str, Any] = {"lr": case.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        if case.optimizer is OptimizerKind.ADAMW8BIT:
            from torchao.optim import AdamW8bit  # noqa: PLC0415  # optional, slow to import

            optimizers.append(AdamW8bit(others, **options))
        else:
            optimizers.append(torch.optim.AdamW(others, **options, fused=True))
    return optimizers


class Masters:
    """fp32 weights and gradients beside a model's bf16 ones (Megatron-LM's main parameters)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.weights = [parameter.detach().float() for parameter in parameters]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def collect(self) -> None:
        """Add the model's gradients to the fp32 ones, and free them."""
        pairs = [
            (master.grad, parameter.grad)
            for master, parameter in zip(self.weights, self._parameters, strict=True)
            if parameter.grad is not None
        ]
        sums, grads = zip(*pairs, strict=True)
        _add_all(_local(sums), _local(_like(sums, grads)))
        for parameter in self._parameters:
            parameter.grad = None

    def publish(self) -> None:
        """Copy the updated weights into the model, and set the gradients to zero."""
        torch._foreach_copy_(_local(self._parameters), _local(self.weights))
        torch._foreach_zero_(_local([weight.grad for weight in self.weights]))


def _add_all(sums: list[Tensor], grads: list[Tensor]) -> None:
    """Add grads to sums. For two dtypes torch's kernels reach half of memory bandwidth only."""
    small: list[tuple[Tensor, Tensor]] = []
    for total, grad in zip(sums, grads, strict=True):
        # Large enough not to gain from sharing a launch with others.
        is_large = total.is_cuda and total.numel() >= 2**18 and total.is_contiguous()
        if HAS_TRITON and is_large and grad.is_contiguous():
            triton_kernels().add_into(total, grad)
        else:
            small.append((total, grad))
    if small:
        torch._foreach_add_(*zip(*small, strict=True))


def _like(references: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Return grads with the references' placements: those of a tp-sharded table differ."""
    return [
        grad.redistribute(placements=reference.placements)
        if isinstance(grad, DTensor) and grad.placements != reference.placements
        else grad
        for reference, grad in zip(references, grads, strict=True)
    ]


def _local(tensors: Sequence[Any]) -> list[Tensor]:
    with torch.no_grad():  # written to in place, so no view in a graph
        return [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            for tensor in tensors
        ]


def clip_gradients(
    parameters: Iterable[Tensor], most: float, more: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale gradients to a norm of at most `most`; return the norm before that.

    Tensors of two meshes have no common norm; those of two dtypes no factor in one kernel.
    more: sums the squared norms of ranks with other parameters. Nothing waits for the device.
    """
    groups: dict[tuple[Any, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault((mesh, grad.dtype), []).append(grad)
    squares: list[Tensor] = []
    for grads in groups.values():
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        squares.append(norm.float() ** 2)
    square = torch.stack(squares).sum()
    norm = (more(square) if more else square).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for (_, dtype), grads in groups.items():
        torch._foreach_mul_(_local(grads), factor.to(dtype))
    return norm
