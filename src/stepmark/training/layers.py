"""Norms, activations, the dense MLP of a block, and a mixture of experts.

Before an FP8 product every number is read several times: for the scale, for the cast, for the
gradient of a bias. Inductor recomputes it for each of them, and three times an activation's
gradient takes an H200 longer than to read its inputs. `settled` gradients are written once, by
an operator that Inductor cannot fuse.

B batch, T tokens, N = B * T, C hidden width, E experts, K experts per token, M = N * K rows,
F width of an expert.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional

from stepmark.measuring.environment import HAS_TRITON
from stepmark.model import model as core_model
from stepmark.model.layers import EXPERTS, Layer, MoeConfig
from stepmark.model.model import NORM_VECTORS, Activation, ModelConfig

EPS = 1e-5


class Norm(nn.Module):
    """Norm of the last dimension, in fp32 inside the kernel, with the input's dtype as output.

    Autocast alone would return fp32 and double what the next layer reads.
    """

    def __init__(self, kind: core_model.Norm | Literal["unit"], width: int) -> None:
        """kind: "unit" is an RMSNorm without a weight."""
        super().__init__()
        self.is_rms = kind in ("rmsnorm", "unit")
        num_vectors = NORM_VECTORS.get(kind, 0)
        self.weight = nn.Parameter(torch.empty(width)) if num_vectors else None
        self.bias = nn.Parameter(torch.empty(width)) if num_vectors > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        with torch.autocast(x.device.type, enabled=False):
            # Fused kernels take one dtype for all; a mixed call would run in parts.
            weight = None if self.weight is None else self.weight.to(x.dtype)
            if self.is_rms:
                return functional.rms_norm(x, shape, weight, EPS)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return functional.layer_norm(x, shape, weight, bias, EPS)


def linear_layers(model: ModelConfig, layer: Layer, prefix: str) -> dict[str, nn.Linear]:
    """Return the products of a layer that begin with a prefix, by the rest of their names."""
    return {
        linear.name.removeprefix(prefix): nn.Linear(
            linear.width, linear.out, bias=linear.has_bias
        )
        for linear in model.linears(layer)
        if linear.name.startswith(prefix) and not linear.is_routed
    }


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), down(gelu(up(x))), or with another activation."""

    def __init__(
        self, hidden_size: int, width: int, *, activation: Activation, bias: bool = False
    ) -> None:
        super().__init__()
        is_gated = activation not in _PLAIN
        self.activation = activation
        self.settles_gradients = False  # True pays off where they are cast to FP8
        self.gate = nn.Linear(hidden_size, width, bias=bias) if is_gated else None
        self.up = nn.Linear(hidden_size, width, bias=bias)
        self.down = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        up = self.up(x)
        y: Tensor = self.down(
            activate(gate, up, self.activation, settled=self.settles_gradients)
        )
        return y


# GELU's tanh form is 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), and
# 0.5 (1 + tanh(u)) = sigmoid(2 u): 2 u = x (LINEAR + CUBIC x^2).
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


# gpt-oss's (arXiv:2508.10925; modeling_gpt_oss.py of transformers 5.23).
_SLOPE = 1.702
_LIMIT = 7.0


def activate(
    gate: Tensor | None, up: Tensor, kind: Activation = "swiglu", *, settled: bool = False
) -> Tensor:
    """Return the activation of that kind; of up alone, where gate is None, GELU for SwiGLU.

    Gradients are settled for SwiGLU and GELU only.
    """
    if gate is None and kind in ("swiglu", "gelu"):
        return _settled_gelu(up) if settled else gelu(up)
    if gate is None:
        return _PLAIN[kind](up)
    if kind == "swiglu":
        return _settled_swiglu(gate, up) if settled else functional.silu(gate) * up
    if kind == "geglu":
        return gelu(gate) * up
    gate = gate.clamp(max=_LIMIT)
    up = up.clamp(-_LIMIT, _LIMIT)
    return (up + 1) * gate * torch.sigmoid(_SLOPE * gate)


def gelu(x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return functional.gelu(x, approximate="tanh")
    # One exponential. Inductor's tanh is the device library's, whose instructions take longer
    # than the kernel's memory traffic.
    x_fp32 = x.float()
    twice_u = x_fp32 * (LINEAR + CUBIC * x_fp32 * x_fp32)
    return (x_fp32 * torch.sigmoid(twice_u)).to(x.dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": _squared_relu,
}


def triton_kernels() -> Any:
    """Return the module, which is imported late: triton is slow, and fails without a driver."""
    from stepmark.training import triton_kernels  # noqa: PLC0415

    return triton_kernels


@torch.library.custom_op("stepmark::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of gelu's input."""
    if x.is_cuda and HAS_TRITON:
        dx: Tensor = triton_kernels().gelu_backward(grad.contiguous(), x.contiguous())
        return dx
    dx = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return dx.contiguous()


@gelu_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("stepmark::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of silu(gate) * up."""
    if gate.is_cuda and HAS_TRITON:
        grads: tuple[Tensor, Tensor] = triton_kernels().swiglu_backward(
            grad.contiguous(), gate.contiguous(), up.contiguous()
        )
        return grads
    gate_grad: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
    return gate_grad.contiguous(), (grad * functional.silu(gate)).contiguous()


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


class _SettledGelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = gelu_backward(grads[0], x)
        return dx


class _SettledSwiglu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dx: tuple[Tensor, Tensor] = swiglu_backward(grads[0], gate, up)
        return dx


_settled_gelu: Callable[[Tensor], Tensor] = _SettledGelu.apply
_settled_swiglu: Callable[[Tensor, Tensor], Tensor] = _SettledSwiglu.apply


# (rows_MC, ends_E) -> out_MC; rows of expert e lie from ends_E[e - 1] to ends_E[e].
Compute = Callable[[Tensor, Tensor], Tensor]


class Dispatch(Protocol):
    """Dispatch of rows to experts on other ranks, and their return: expert parallelism.

    rows_MC are this rank's, sorted by expert; ends_E (int32, on the device) counts all
    experts of the model. An implementation sends each row to the rank of its expert, sorts
    what arrives by local expert, calls compute(rows, ends of the local experts), and returns
    the results in the order of rows_MC. All of it has to be differentiable in rows_MC.
    """

    def __call__(self, rows_MC: Tensor, ends_E: Tensor, compute: Compute) -> Tensor: ...


class Experts(nn.Module):
    """Each token's top_k experts, weighted by the router's softmax over those top_k.

    With sigmoids the weights are divided by their sum; that of one expert is its own. Experts
    may be limited to the best groups: by the sum of their two best scores with sigmoids
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), by the best with softmax (DeepSeek-V2,
    arXiv:2405.04434, section 2.2.2). router_bias only affects the choice and has no gradient:
    DeepSeek-V3 updates it by a rule of its own. No token is dropped and no balancing loss is
    added.
    """

    def __init__(self, model: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden = model.hidden_size
        count = moe.num_experts
        self.num_experts = count
        self.moe = moe
        self.top_k = moe.top_k
        self.dispatch: Dispatch | None = None  # None: all experts are held here
        linears = linear_layers(model, EXPERTS, "ffn.")
        self.router = linears["router"]
        self.router_bias = (
            nn.Parameter(torch.empty(count), requires_grad=False) if moe.router_bias else None
        )
        self.to_latent = linears.get("to_latent")
        self.held = LocalExperts(model, moe)
        self.from_latent = linears.get("from_latent")
        self.shared: FeedForward | None = None
        if moe.num_shared_experts:
            self.shared = FeedForward(
                hidden,
                moe.shared_ffn_hidden_size,
                activation=model.activation,
                bias="mlp" in model.biases,
            )
        self.shared_weight = linears.get("shared_weight")

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weights_NK, experts_NK = self.route(x_NC)
        order_M, inverse_M, ends_E = sort_by_expert(experts_NK.flatten(), self.num_experts)
        routed_NC = x_NC if self.to_latent is None else self.to_latent(x_NC)
        rows_MC = _spread(routed_NC, order_M, inverse_M)
        if self.dispatch is None:
            rows_MC = self.held(rows_MC, ends_E)
        else:
            rows_MC = self.dispatch(rows_MC, ends_E, self.held)
        y_NKC = _collect(rows_MC, order_M, inverse_M).unflatten(0, (-1, self.top_k))
        weighted_NKC = y_NKC * weights_NK.to(y_NKC.dtype).unsqueeze(-1)
        # Autocast on a GPU would return fp32, in which experts are no grouped product.
        y_NC: Tensor = weighted_NKC.sum(dim=1, dtype=y_NKC.dtype)
        if self.from_latent is not None:
            y_NC = self.from_latent(y_NC)
        if self.shared is not None:
            y_NC = y_NC + self._shared_result(self.shared, x_NC)
        return y_NC.view_as(x_BTC)

    def _shared_result(self, shared: FeedForward, x_NC: Tensor) -> Tensor:
        y_NC: Tensor = shared(x_NC)
        if self.shared_weight is not None:
            y_NC = y_NC * self.shared_weight(x_NC).sigmoid()
        return y_NC

    def route(self, x_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (fp32, with sum 1) and indices of each token's experts, both _NK."""
        logits_NE = self.router(x_NC).float()
        is_sigmoid = self.moe.scoring == "sigmoid"
        scores_NE = logits_NE.sigmoid() if is_sigmoid else logits_NE.softmax(dim=-1)
        has_groups = self.moe.top_groups < self.moe.num_groups
        if self.router_bias is None and not has_groups:
            weights_NK, experts_NK = scores_NE.topk(self.top_k, dim=-1)
        else:
            choice_NE = scores_NE.detach()
            if self.router_bias is not None:
                choice_NE = choice_NE + self.router_bias
            if has_groups:
                choice_NE = self._in_best_groups(choice_NE)
            experts_NK = choice_NE.topk(self.top_k, dim=-1).indices
            weights_NK = scores_NE.gather(1, experts_NK)
        if is_sigmoid and self.top_k == 1:  # divided by itself it would have no gradient
            return weights_NK, experts_NK
        return weights_NK / weights_NK.sum(dim=-1, keepdim=True), experts_NK

    def _in_best_groups(self, choice_NE: Tensor) -> Tensor:
        """Return scores with those outside each token's best groups at minus infinity."""
        choice_NGE = choice_NE.unflatten(1, (self.moe.num_groups, -1))
        num_best = min(2, choice_NGE.shape[-1]) if self.moe.scoring == "sigmoid" else 1
        group_scores_NG = choice_NGE.topk(num_best, dim=-1).values.sum(dim=-1)
        best_NG = group_scores_NG.topk(self.moe.top_groups, dim=-1).indices
        is_out_NG = torch.ones_like(group_scores_NG, dtype=torch.bool)
        is_out_NG = is_out_NG.scatter(1, best_NG, False)
        limited_NGE: Tensor = choice_NGE.masked_fill(is_out_NG[..., None], float("-inf"))
        return limited_NGE.flatten(1)


class LocalExperts(nn.Module):
    """Weights of routed experts, expert by expert in dimension 0: all, or a rank's share.

    It is a separate module, so that it can be sharded over other ranks than the other weights.
    """

    def __init__(self, model: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.activation = model.activation
        self.up: nn.Parameter
        self.down: nn.Parameter
        self.gate: nn.Parameter | None = None
        self.gate_bias: nn.Parameter | None = None
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        for linear in model.linears(EXPERTS):
            if not linear.is_routed:
                continue
            name = linear.name.removeprefix("ffn.held.")
            shape = (moe.num_experts, linear.out, linear.width)
            setattr(self, name, nn.Parameter(torch.empty(shape)))
            if linear.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.empty(shape[:2])))

    def forward(self, rows_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Apply experts to rows sorted by expert, which end at ends_E[e] for expert e."""
        gate_MF = None
        if self.gate is not None:
            gate_MF = _with_bias(multiply(rows_MC, self.gate, ends_E), self.gate_bias, ends_E)
        up_MF = _with_bias(multiply(rows_MC, self.up, ends_E), self.up_bias, ends_E)
        inner_MF = activate(gate_MF, up_MF, self.activation)
        return _with_bias(multiply(inner_MF, self.down, ends_E), self.down_bias, ends_E)


def _with_bias(rows_MF: Tensor, bias_EF: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return rows with the bias of their expert added.

    A product with a row of each one's expert, since the gradient of an index adds up rows one
    by one: rows sorted by expert all meet on few elements.
    """
    if bias_EF is None:
        return rows_MF
    if isinstance(bias_EF, DTensor):
        bias_EF = bias_EF.to_local()
    ids_M = torch.arange(len(rows_MF), device=rows_MF.device, dtype=ends_E.dtype)
    experts_M = torch.searchsorted(ends_E, ids_M, right=True)
    ids_E = torch.arange(len(ends_E), device=rows_MF.device)
    is_own_ME = (experts_M.unsqueeze(1) == ids_E).to(rows_MF.dtype)
    return torch.addmm(rows_MF, is_own_ME, bias_EF.to(rows_MF.dtype))


def sort_by_expert(experts_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return order_M that sorts rows by expert, its inverse_M, and ends_E (int32) of groups.

    All shapes are static and nothing is read by the host.
    """
    sorted_M, order_M = experts_M.sort(stable=True)
    ids_M = torch.arange(len(order_M), device=order_M.device)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, ids_M)
    ids_E = torch.arange(num_experts, device=order_M.device)
    ends_E = torch.searchsorted(sorted_M, ids_E, right=True, out_int32=True)
    return order_M, inverse_M, ends_E


def multiply(rows_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group of rows by its expert's weight, transposed as in a linear layer.

    It is one kernel for bf16 on a GPU, else one per expert, for which the host reads ends_E.
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
