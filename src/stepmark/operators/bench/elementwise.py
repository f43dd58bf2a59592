"""Functions of rows, forwards and backwards, copies, and one step of a fused optimizer.

SwiGLU and GELU, norms, rotary embedding, token loss. T tokens, W width, H hidden, V vocabulary;
B batch, S sequence, D head width. The gate and up halves of SwiGLU lie in one tensor, as one
product made them. Rope rotates halves as in Llama.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional

from stepmark.cases.record import Check
from stepmark.measuring.verify import (
    Tolerance,
    compare,
    finite,
    merge,
    poison,
    poisoned_result,
    sample,
    tolerance,
)
from stepmark.model.ops import (
    Activation,
    Copy,
    CrossEntropy,
    HostCopy,
    Norm,
    Optimizer,
    Phase,
    Rope,
    backends,
)
from stepmark.operators.bench.call import Call, Impl, generator, normal

Function = Callable[..., Tensor | tuple[Tensor, ...]]
_CHUNK = 2**24  # elements of fp64 reference at a time


@functools.cache
def compiled(function: Function, key: object) -> Function:
    """Compile once per key (an operator), for all its operand sets.

    Each key gets its own code object: torch.compile keeps few versions of one and then runs
    eagerly without notice. Backward passes repeat on one graph, so buffers are not donated.
    """
    functorch_config.donated_buffer = False
    code = function.__code__.replace()
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(own, dynamic=False, fullgraph=True)


def rows_call(
    op: Any,
    function: Function,
    rows: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    *,
    is_compiled: bool,
    constants: tuple[Tensor, ...] = (),
) -> Call:
    """Time function(*rows, *shared, *constants), or its gradients on a retained graph.

    Tensors in `rows` have independent rows along dim 0; gradients flow to `rows` and `shared`.
    The reference is the same function in fp64, a slice of rows at a time.
    """
    timed = compiled(function, op) if is_compiled else function
    is_bwd = op.phase is Phase.BWD
    inputs = tuple(tensor.requires_grad_(is_bwd) for tensor in rows + shared)
    grads: tuple[Tensor, ...] = ()

    def forward() -> tuple[Tensor, ...]:
        result = timed(*inputs, *constants)
        return (result,) if isinstance(result, Tensor) else result

    run: Callable[[], tuple[Tensor, ...]] = forward
    if is_bwd:
        outputs = forward()
        grads = tuple(normal(*out.shape, dtype=op.dtype, device=out.device) for out in outputs)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

        run = backward

    def verify() -> Check:
        results = poisoned_result(run)
        allowed = tolerance(op.dtype, length=rows[0].shape[0], roundings=4)
        return _check_rows(function, (rows, shared, constants), grads, results, allowed)

    name = "torch.compile" if is_compiled else "torch eager"
    return Call(run=run, verify=verify, backend_run=name)


def _check_rows(
    function: Function,
    inputs: tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]],
    grads: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    allowed: Tolerance,
) -> Check:
    """Compare with the function in fp64, or with its gradients where `grads` are given."""
    rows, shared, constants = inputs
    shared = tuple(t.detach().double().requires_grad_(t.requires_grad) for t in shared)
    wide_constants = [tensor.double() for tensor in constants]
    count = len(rows) if grads else len(results)
    sums = [torch.zeros_like(tensor) for tensor in shared]
    checks = []
    step = max(1, _CHUNK // rows[0][0].numel())
    for start in range(0, rows[0].shape[0], step):
        part = slice(start, start + step)
        parts = [t[part].detach().double().requires_grad_(t.requires_grad) for t in rows]
        refs = function(*parts, *shared, *wide_constants)
        refs = (refs,) if isinstance(refs, Tensor) else refs
        if grads:
            wide_grads = tuple(grad[part].double() for grad in grads)
            refs = torch.autograd.grad(refs, [*parts, *shared], wide_grads)
        for out, ref in zip(results[:count], refs, strict=False):
            checks.append(compare(out[part], ref, allowed, "fp64, all elements"))
        for total, ref in zip(sums, refs[count:], strict=False):
            total.add_(ref)
    for out, total in zip(results[count:], sums, strict=False):
        checks.append(compare(out, total, allowed, "fp64, all elements"))
    return merge(checks)


def swiglu(x_T2W: Tensor) -> Tensor:
    gate_TW, up_TW = x_T2W.chunk(2, dim=-1)
    return functional.silu(gate_TW) * up_TW


def geglu(x_T2W: Tensor) -> Tensor:
    gate_TW, up_TW = x_T2W.chunk(2, dim=-1)
    return gelu(gate_TW) * up_TW


def clamped_swiglu(x_T2W: Tensor) -> Tensor:
    gate_TW, up_TW = x_T2W.chunk(2, dim=-1)
    gate_TW = gate_TW.clamp(max=7.0)
    return (up_TW.clamp(-7.0, 7.0) + 1) * gate_TW * torch.sigmoid(1.702 * gate_TW)


def gelu(x_TW: Tensor) -> Tensor:
    return functional.gelu(x_TW, approximate="tanh")


def squared_relu(x_TW: Tensor) -> Tensor:
    return functional.relu(x_TW).square()


def xielu(x_TW: Tensor) -> Tensor:
    """alpha_p x^2 + beta x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x below."""
    below_TW = torch.expm1(x_TW.clamp(max=-1e-6)) - x_TW
    return torch.where(x_TW > 0, 0.8 * x_TW * x_TW + 0.5 * x_TW, 0.8 * below_TW + 0.5 * x_TW)


_ACTIVATIONS: dict[str, Function] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
    "gelu": gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": squared_relu,
    "xielu": xielu,
}


def make_activation(op: Activation, device: torch.device, *, is_compiled: bool = False) -> Call:
    function = _ACTIVATIONS[op.kind]
    x = normal(op.tokens, op.width * (2 if op.is_gated else 1), dtype=op.dtype, device=device)
    if op.kind == "clamped_swiglu":
        x *= 4  # some values are beyond the clamp
    return rows_call(op, function, (x,), (), is_compiled=is_compiled)


EPS = 1e-5


def rmsnorm(x_TH: Tensor, weight_H: Tensor) -> Tensor:
    return functional.rms_norm(x_TH, weight_H.shape, weight_H, EPS)


def layernorm(x_TH: Tensor, weight_H: Tensor, bias_H: Tensor) -> Tensor:
    return functional.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, EPS)


def make_norm(op: Norm, device: torch.device, *, is_compiled: bool = False) -> Call:
    x_TH = normal(op.tokens, op.hidden, dtype=op.dtype, device=device)
    vectors = 1 if op.kind == "rmsnorm" else 2
    shared = tuple(normal(op.hidden, dtype=op.dtype, device=device) for _ in range(vectors))
    function = rmsnorm if op.kind == "rmsnorm" else layernorm
    return rows_call(op, function, (x_TH,), shared, is_compiled=is_compiled)


BASE = 10_000.0


def tables(seq: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin [S, 1, D] in fp32, computed in fp64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    positions = torch.arange(seq, dtype=torch.float64, device=device)
    angles_SD = torch.outer(positions, BASE ** (-half / head_dim)).repeat(1, 2)
    return angles_SD.cos().float().unsqueeze(1), angles_SD.sin().float().unsqueeze(1)


def rotate(x_BSHD: Tensor, cos_S1D: Tensor, sin_S1D: Tensor) -> Tensor:
    first, second = x_BSHD.chunk(2, dim=-1)
    turned_BSHD = torch.cat((-second, first), dim=-1)
    return x_BSHD * cos_S1D.to(x_BSHD.dtype) + turned_BSHD * sin_S1D.to(x_BSHD.dtype)


def rope(q_BSHD: Tensor, k_BSHD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q_BSHD, cos, sin), rotate(k_BSHD, cos, sin)


def make_rope(op: Rope, device: torch.device, *, is_compiled: bool = False) -> Call:
    q_BSHD, k_BSHD = (
        normal(op.batch, op.seq, heads, op.head_dim, dtype=op.dtype, device=device)
        for heads in (op.heads, op.kv_heads)
    )
    constants = tables(op.seq, op.head_dim, device)
    return rows_call(
        op, rope, (q_BSHD, k_BSHD), (), is_compiled=is_compiled, constants=constants
    )


def make_copy(op: Copy, device: torch.device) -> Call:
    x = normal(op.num_bytes // 4, dtype=op.dtype, device=device)
    y = torch.empty_like(x)

    def verify() -> Check:
        poison(y)
        y.copy_(x)
        pairs = zip(y.split(2**24), x.split(2**24), strict=True)
        return merge(compare(out, ref, 0.0, "the source") for out, ref in pairs)

    return Call(run=lambda: y.copy_(x), verify=verify, backend_run="torch copy_")


def make_host_copy(op: HostCopy, device: torch.device) -> Call:
    on_device = normal(op.num_bytes // 4, dtype=op.dtype, device=device)
    on_host = on_device.to("cpu").pin_memory()
    out, source = (on_device, on_host) if op.direction == "h2d" else (on_host, on_device)

    def verify() -> Check:
        expected = on_device.clone()
        poison(out)
        out.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        pairs = zip(out.to(device).split(2**24), expected.split(2**24), strict=True)
        return merge(compare(part, ref, 0.0, "the source") for part, ref in pairs)

    run = functools.partial(out.copy_, source, non_blocking=True)
    return Call(run=run, verify=verify, backend_run="torch copy_, pinned")


def with_compile(make: Callable[..., Call]) -> dict[str, Impl]:
    """Return the backends of a function that torch.compile can fuse."""
    compiled_make = functools.partial(make, is_compiled=True)
    return {
        "torch": Impl(make=make),
        "compile": Impl(make=compiled_make, unsupported=backends.needs_compiler),
    }


LOSS_SCALE = 256.0  # times tokens: keeps 1 / vocab a normal number in fp16


def mean_loss(logits_TV: Tensor, targets_T: Tensor, chunks: int) -> Tensor:
    tokens = logits_TV.shape[0]
    size = math.ceil(tokens / chunks)
    total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
    pairs = zip(logits_TV.split(size), targets_T.split(size), strict=True)
    for logits, targets in pairs:
        wide = logits.double() if logits.dtype is torch.float64 else logits.float()
        total = total + functional.cross_entropy(wide, targets, reduction="sum")
    return total / tokens


def make_cross_entropy(
    op: CrossEntropy, device: torch.device, *, is_compiled: bool = False
) -> Call:
    is_bwd = op.phase is Phase.BWD
    logits_TV = normal(op.tokens, op.vocab, dtype=op.dtype, device=device)
    logits_TV.requires_grad_(is_bwd)
    targets_T = torch.randint(
        op.vocab, (op.tokens,), device=device, generator=generator(device)
    )
    function = compiled(mean_loss, op) if is_compiled else mean_loss

    def forward() -> Tensor:
        loss = function(logits_TV, targets_T, op.chunks)
        assert isinstance(loss, Tensor)
        return loss

    graph_loss = forward() if is_bwd else None
    scale = torch.full((), LOSS_SCALE * op.tokens, device=device)

    def backward() -> tuple[Tensor, ...]:
        assert graph_loss is not None
        return torch.autograd.grad(
            graph_loss, logits_TV, scale.to(graph_loss.dtype), retain_graph=True
        )

    run, check = (backward, _check_grad) if is_bwd else (forward, _check_loss)

    def verify() -> Check:
        (result,) = poisoned_result(run)
        return check(op, logits_TV.detach(), targets_T, result)

    name = "torch.compile" if is_compiled else "torch eager"
    return Call(run=run, verify=verify, backend_run=f"{name}, {op.chunks} chunks")


def _check_loss(op: CrossEntropy, logits: Tensor, targets: Tensor, loss: Tensor) -> Check:
    step = max(1, _CHUNK // op.vocab)
    pairs = zip(logits.split(step), targets.split(step), strict=True)
    total = sum(functional.cross_entropy(x.double(), t, reduction="sum") for x, t in pairs)
    assert isinstance(total, Tensor)
    # The loss is fp32 whatever the logits are; a sum over classes, then one over tokens.
    allowed = tolerance(op.dtype, length=op.vocab) if op.dtype.itemsize >= 4 else 1e-5
    return compare(loss, total / op.tokens, allowed, "fp64, all tokens")


def _check_grad(op: CrossEntropy, logits: Tensor, targets: Tensor, grad: Tensor) -> Check:
    """Check softmax - onehot: entries at the targets apart from the many small others."""
    step = max(1, _CHUNK // op.vocab)
    allowed = tolerance(op.dtype, length=op.vocab, roundings=2)
    checks = []
    for start in range(0, op.tokens, step):
        part = slice(start, start + step)
        ref = logits[part].double().softmax(-1) * LOSS_SCALE
        out = grad[part].double()
        at = targets[part].unsqueeze(1)
        hit = ref.gather(1, at) - LOSS_SCALE
        checks.append(compare(out.gather(1, at), hit, allowed, "fp64, all elements"))
        checks.append(compare(out.scatter(1, at, 0.0), ref.scatter(1, at, 0.0), allowed, ""))
    return merge([*checks, finite(grad, allowed)])


LR = 0.1  # large enough for one step to change bf16 values
BETA1 = 0.9
BETA2 = 0.999
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01
NUM_PARAMS = 4096


def build_fused(kind: str, params: list[Tensor], device: torch.device) -> torch.optim.Optimizer:
    """Return a fused optimizer; `capturable` keeps its step count on the device, for graphs."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=LR, fused=True)
    family = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return family(
        params,
        lr=LR,
        betas=(BETA1, BETA2),
        eps=ADAM_EPS,
        weight_decay=WEIGHT_DECAY if kind == "adamw" else 0.0,
        fused=True,
        capturable=device.type == "cuda",
    )


def updated(kind: str, step: int, p: Tensor, g: Tensor, *moments: Tensor) -> list[Tensor]:
    """Apply the update rules of the papers (Kingma and Ba; Loshchilov and Hutter), in fp64."""
    if kind == "sgd":
        return [p - LR * g]
    m = BETA1 * moments[0] + (1 - BETA1) * g
    v = BETA2 * moments[1] + (1 - BETA2) * g * g
    decayed = p * (1 - LR * WEIGHT_DECAY) if kind == "adamw" else p
    root = v.sqrt() / math.sqrt(1 - BETA2**step) + ADAM_EPS
    return [decayed - LR / (1 - BETA1**step) * m / root, m, v]


def make_optimizer(op: Optimizer, device: torch.device) -> Call:
    """Return one step over one flat parameter."""
    p = normal(op.num_params, dtype=op.dtype, device=device).requires_grad_()
    p.grad = normal(op.num_params, dtype=op.dtype, device=device)
    optimizer = build_fused(op.kind, [p], device)
    optimizer.step()  # allocates the moments

    def verify() -> Check:
        """Check a step from new random state: the update is in place, so none is poisoned."""
        state = optimizer.state[p]
        values = [p.detach()]
        values += [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]
        for value in values:
            value.copy_(normal(op.num_params, dtype=op.dtype, device=device))
        values[-1].abs_().add_(0.5)  # a second moment is positive; a parameter may be
        at = sample(op.num_params, device, NUM_PARAMS)
        before = [value[at].double() for value in values]
        optimizer.step()
        assert p.grad is not None
        step = int(state["step"]) if "step" in state else 0
        refs = updated(op.kind, step, before[0], p.grad[at].double(), *before[1:])
        # No rms: all elements share the rounding of 1 - beta2^step, which cancels.
        allowed = Tolerance(tolerance(op.dtype, roundings=4).max_rel_err)
        name = f"fp64, {len(at)} parameters"
        checks = [
            compare(v[at], ref, allowed, name) for v, ref in zip(values, refs, strict=True)
        ]
        return merge([*checks, finite(p, allowed)])

    return Call(run=optimizer.step, verify=verify, backend_run=f"torch {op.kind}, fused")


ACTIVATION = with_compile(make_activation)
NORM = with_compile(make_norm)
ROPE = with_compile(make_rope)
COPY = {"torch": Impl(make=make_copy, unsupported=backends.copy)}
HOST_COPY = {
    "torch": Impl(make=make_host_copy, unsupported=backends.host_copy, capturable=False)
}
CROSS_ENTROPY = with_compile(make_cross_entropy)
OPTIMIZER = Impl(make=make_optimizer, unsupported=backends.optimizer)
