"""Attention by heads on real ranks: each exchange is one call of gloo, which is counted.

B batch, S sequence, T tokens of a rank, H heads, D width of a head, C ranks.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from stepmark.measuring.ranks import Ranks

Calls = Counter[tuple[str, str, int]]  # phase, collective, elements of a rank's buffer


def attend(qkv_BSHD: Iterable[Tensor], sinks_H: Tensor, window: int) -> Tensor:
    """Return causal attention in a window (0: none), with a logit more per head."""
    q, k, v = (tensor.transpose(1, 2) for tensor in qkv_BSHD)
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    length = q.shape[2]
    back_SS = torch.arange(length)[:, None] - torch.arange(length)
    hidden_SS = (back_SS < 0) | (back_SS >= (window or length))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden_SS, -torch.inf)
    column = sinks_H.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (p @ v).transpose(1, 2)


class _Exchange(torch.autograd.Function):
    """Send parts [C, ...] to their ranks, and the gradients of what came back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, calls: Calls) -> Tensor:
        ctx.calls = calls
        calls["fwd", "all_to_all", parts.numel()] += 1
        result = torch.empty_like(parts)
        distributed.all_to_all_single(result, parts.contiguous())
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        ctx.calls["bwd", "all_to_all", grad.numel()] += 1
        result = torch.empty_like(grad)
        distributed.all_to_all_single(result, grad.contiguous())
        return result, None


class _OwnHeads(torch.autograd.Function):
    """Return a rank's part of all sinks, whose gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, sinks_H: Tensor, rank: int, count: int, calls: Calls) -> Tensor:
        ctx.count, ctx.calls = count, calls
        return sinks_H.chunk(count)[rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        ctx.calls["bwd", "all_gather", ctx.count * grad.numel()] += 1
        whole = grad.new_empty(ctx.count * grad.numel())
        distributed.all_gather_into_tensor(whole, grad.contiguous())
        return whole, None, None, None


def _tokens(rank: int, count: int, length: int) -> Tensor:
    """Return positions of a rank: a chunk of the first half, and one of the second."""
    chunks = torch.arange(length).chunk(2 * count)
    return torch.cat([chunks[rank], chunks[2 * count - 1 - rank]])


def by_heads(ranks: Ranks, case: dict[str, int]) -> tuple[float, dict[Any, int]]:
    """Return the largest error of result and gradients, and the calls of this rank."""
    rank, count = ranks.rank, ranks.num_ranks
    torch.manual_seed(1)
    shape = (case["batch"], case["seq"])
    heads, kv_heads, width = case["heads"], case["kv_heads"], case["head_dim"]
    whole = [
        torch.randn(*shape, number, width, dtype=torch.float64, requires_grad=True)
        for number in (heads, kv_heads, kv_heads)
    ]
    sinks_H = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    expected = attend(whole, sinks_H, case["window"])
    grads = torch.autograd.grad(expected.square().sum(), [*whole, sinks_H])

    own = _tokens(rank, count, shape[1])
    order = torch.cat([_tokens(each, count, shape[1]) for each in range(count)]).argsort()
    mine = [tensor.detach()[:, own].requires_grad_() for tensor in whole]
    calls: Calls = Counter()

    def to_heads(tensor: Tensor) -> Tensor:  # [B, T, H, D] -> [B, S, H / C, D]
        parts = _Exchange.apply(torch.stack(tensor.chunk(count, 2)), calls)  # type: ignore[no-untyped-call]
        return torch.cat([*parts], 1)[:, order]

    local_H = _OwnHeads.apply(sinks_H, rank, count, calls)  # type: ignore[no-untyped-call]
    result = attend(map(to_heads, mine), local_H, case["window"])
    parts = torch.stack(result[:, order.argsort()].chunk(count, 1))
    back = torch.cat([*_Exchange.apply(parts, calls)], 2)  # type: ignore[no-untyped-call]
    own_grads = torch.autograd.grad(back.square().sum(), [*mine, sinks_H])
    errors = [(back - expected[:, own]).abs().max()]
    errors += [(a - b[:, own]).abs().max() for a, b in zip(own_grads, grads[:3], strict=False)]
    errors.append((own_grads[3] - grads[3]).abs().max())
    return max(map(float, errors)), dict(calls)
