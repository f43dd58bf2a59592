"""A mixture of experts: router, grouped products of the experts chosen, shared experts.

B batch, T tokens, N = B * T, C hidden width, E experts, K experts per token, M = N * K rows,
F width of an expert.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional

from stepmark.bench.training.layers import FeedForward, activate
from stepmark.core.model import ModelConfig, MoeConfig

# (rows_MC, ends_E) -> out_MC; rows of expert e lie from ends_E[e - 1] to ends_E[e].
Compute = Callable[[Tensor, Tensor], Tensor]


class Dispatch(Protocol):
    """How rows reach experts on other ranks and come back: expert parallelism.

    rows_MC are this rank's, sorted by expert; ends_E (int32, on the device) counts all
    experts of the model. An implementation sends each row to the rank of its expert, sorts
    what arrives by local expert, calls compute(rows, ends of the local experts), and returns
    the results in the order of rows_MC. All of it has to be differentiable in rows_MC.
    """

    def __call__(self, rows_MC: Tensor, ends_E: Tensor, compute: Compute) -> Tensor: ...


class Experts(nn.Module):
    """Each token's top_k experts, weighted by the router's softmax over those top_k.

    router_bias enters the choice only and has no gradient: DeepSeek-V3 moves it by hand.
    No token is dropped and no balancing loss is added.
    """

    def __init__(self, model: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden, count = model.hidden_size, moe.num_experts
        self.num_experts, self.top_k = count, moe.top_k
        self.dispatch: Dispatch | None = None  # None: all experts are held here
        self.router = nn.Linear(hidden, count, bias=False)
        self.router_bias = (
            nn.Parameter(torch.empty(count), requires_grad=False) if moe.router_bias else None
        )
        self.held = HeldExperts(model, moe)
        self.shared: FeedForward | None = None
        if moe.num_shared_experts:
            self.shared = FeedForward(
                hidden, moe.shared_ffn_hidden_size, activation=model.activation
            )

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weights_NK, experts_NK = self.route(x_NC)
        order_M, inverse_M, ends_E = sort_by_expert(experts_NK.flatten(), self.num_experts)
        rows_MC = _spread(x_NC, order_M, inverse_M)
        if self.dispatch is None:
            rows_MC = self.held(rows_MC, ends_E)
        else:
            rows_MC = self.dispatch(rows_MC, ends_E, self.held)
        y_NKC = _collect(rows_MC, order_M, inverse_M).unflatten(0, (-1, self.top_k))
        y_NC: Tensor = (y_NKC * weights_NK.to(y_NKC.dtype).unsqueeze(-1)).sum(dim=1)
        if self.shared is not None:
            y_NC = y_NC + self.shared(x_NC)
        return y_NC.view_as(x_BTC)

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (fp32, their sum is 1) and indices of each token's experts, both _NK."""
        scores_NE = self.router(x_NC).float().softmax(dim=-1)
        if self.router_bias is None:
            weights_NK, experts_NK = scores_NE.topk(self.top_k, dim=-1)
        else:
            biased_NE = scores_NE.detach() + self.router_bias
            experts_NK = biased_NE.topk(self.top_k, dim=-1).indices
            weights_NK = scores_NE.gather(1, experts_NK)
        return weights_NK / weights_NK.sum(dim=-1, keepdim=True), experts_NK


class HeldExperts(nn.Module):
    """Weights of routed experts, expert by expert in dimension 0: all, or a rank's share.

    A module of its own, so that it can be sharded over other ranks than the rest.
    """

    def __init__(self, model: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        up = (moe.num_experts, moe.ffn_hidden_size, model.hidden_size)
        is_gated = model.activation == "swiglu"
        self.gate = nn.Parameter(torch.empty(up)) if is_gated else None
        self.up = nn.Parameter(torch.empty(up))
        self.down = nn.Parameter(torch.empty(up[0], up[2], up[1]))

    def forward(self, rows_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert, of which expert e has those before ends_E[e]."""
        gate_MF = None if self.gate is None else multiply(rows_MC, self.gate, ends_E)
        up_MF = multiply(rows_MC, self.up, ends_E)
        return multiply(activate(gate_MF, up_MF), self.down, ends_E)


def sort_by_expert(experts_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order_M that sorts rows by expert, its inverse_M, and ends_E (int32) of the groups.

    All shapes are static and nothing is read by the host.
    """
    sorted_M, order_M = experts_M.sort(stable=True)
    ids_M = torch.arange(len(order_M), device=order_M.device)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, ids_M)
    ids_E = torch.arange(num_experts, device=order_M.device)
    ends_E = torch.searchsorted(sorted_M, ids_E, right=True, out_int32=True)
    return order_M, inverse_M, ends_E


def multiply(rows_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Each group of rows times its expert's weight, transposed as in a linear layer.

    In one kernel for bf16 on a GPU; elsewhere expert by expert, which reads ends_E.
    """
    if isinstance(weight_ENK, DTensor):
        weight_ENK = weight_ENK.to_local()
    weight_ENK = weight_ENK.to(rows_MK.dtype)
    if rows_MK.is_cuda and rows_MK.dtype == torch.bfloat16:
        return grouped(rows_MK, weight_ENK, ends_E)
    return looped(rows_MK, weight_ENK, ends_E)


def grouped(rows_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    return functional.grouped_mm(rows_MK, weight_ENK.transpose(-2, -1), offs=ends_E)


def looped(rows_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    parts = rows_MK.tensor_split(ends_E[:-1].long().cpu())
    pairs = zip(parts, weight_ENK, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in pairs])


class _Spread(Function):
    """Row i of the result is the token of row order[i]; backward adds a token's rows.

    Written out because backward of an index would add with atomics.
    """

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.top_k = len(order_M) // len(x_NC)
        return x_NC.index_select(0, order_M // ctx.top_k)

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor | None, ...]:
        (inverse_M,) = ctx.saved_tensors
        grad_NKC = grad_MC.index_select(0, inverse_M).unflatten(0, (-1, ctx.top_k))
        return grad_NKC.sum(dim=1), None, None


class _Collect(Function):
    """Sorted rows back in the tokens' order."""

    @staticmethod
    def forward(ctx: Any, rows_MC: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return rows_MC.index_select(0, inverse_M)

    @staticmethod
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        return grad_MC.index_select(0, order_M), None, None


_spread: Callable[[Tensor, Tensor, Tensor], Tensor] = _Spread.apply
_collect: Callable[[Tensor, Tensor, Tensor], Tensor] = _Collect.apply
