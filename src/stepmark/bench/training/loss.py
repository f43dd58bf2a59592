"""Cross-entropy of the next token, whole or without ever holding all logits.

N tokens, C hidden width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn import functional

IGNORED = -100  # label of a token that does not count

# (head, x_NC, labels_N) -> fp32 sum over the labels that count
SummedLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def mean_loss(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Over the labels that count, in fp32."""
    return functional.cross_entropy(logits_NV.float(), labels_N, ignore_index=IGNORED)


def summed_loss(head: nn.Module, x_NC: Tensor, labels_N: Tensor) -> Tensor:
    logits_NV: Tensor = head(x_NC)
    return functional.cross_entropy(
        logits_NV.float(), labels_N, ignore_index=IGNORED, reduction="sum"
    )


def chunked_loss(
    head: nn.Module,
    x_NC: Tensor,
    labels_N: Tensor,
    *,
    num_chunks: int,
    summed: SummedLoss = summed_loss,
) -> Tensor:
    """mean_loss(head(x_NC), labels_N), chunk by chunk; any head that maps rows to rows.

    Gradients are taken in the forward pass, while a chunk's logits are there, so that
    the head is multiplied as often as without chunks. Those of the head's parameters
    are summed over chunks in the parameters' own dtype.
    """
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    return _in_chunks(head, summed, num_chunks, x_NC, labels_N, *weights)


class _ChunkedLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        summed: SummedLoss,
        num_chunks: int,
        x_NC: Tensor,
        labels_N: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        num_labels = (labels_N != IGNORED).sum()
        total = torch.zeros((), device=x_NC.device)
        grad_x_NC = torch.empty_like(x_NC)
        sums: list[Tensor] = []
        rows = zip(x_NC.chunk(num_chunks), grad_x_NC.chunk(num_chunks), strict=True)
        for (part, grad_part), labels in zip(rows, labels_N.chunk(num_chunks), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                loss = summed(head, leaf, labels) / num_labels
            grad_leaf, *grads = torch.autograd.grad(loss, (leaf, *weights))
            total += loss.detach()
            grad_part.copy_(grad_leaf)
            if sums:
                torch._foreach_add_(sums, grads)
            else:
                sums = [grad.clone() for grad in grads]
        ctx.save_for_backward(grad_x_NC, *sums)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NC, *sums = ctx.saved_tensors
        scaled = (total * grad.to(total.dtype) for total in sums)
        return None, None, None, grad_x_NC * grad.to(grad_x_NC.dtype), None, *scaled


# Gradients are taken inside, which is no part of a graph; what it calls may be compiled.
_in_chunks: Callable[..., Tensor] = torch.compiler.disable(_ChunkedLoss.apply)
