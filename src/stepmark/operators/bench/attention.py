"""Attention by every kernel that torch has, and by the flash-attn package.

B batch, S positions, H heads, G query heads per key head, D head width. Operands are stored
[B, S, H, D], as a model's projections write them; kernels that want heads first get views.
The backward pass is timed by itself, on the retained graph of one forward pass.

Sinks [H] are a learned logit per query head, whose exponential is added to the denominators.
No kernel of torch has them. One that returns z, the logarithms of its denominators, computes
the same: with sink s a denominator is exp(z) + exp(s) = exp(z'), and o becomes exp(z - z') o.
This is part of the timed call.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from stepmark.cases.record import Check
from stepmark.measuring.verify import (
    Tolerance,
    compare,
    finite,
    merge,
    poisoned_result,
    tolerance,
)
from stepmark.model.ops import Attention, Phase, backends
from stepmark.model.ops.backends import Capabilities
from stepmark.operators.bench.call import Call, Impl, normal, set_matmul_precision
from stepmark.operators.bench.elementwise import compiled

Forward = Callable[..., Tensor]  # of q, k, v and, where the operator has them, sinks
_SCORES = 2**24  # reference scores at a time
_ROWS = 128  # rows compared at a time: late rows of causal attention are small
_VARLEN = "torch.nn.attention.varlen"


def visible(op: Attention, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a mask function: positions of query and key (broadcast) -> attended or not."""
    lengths = torch.tensor(op.varlen or (op.seq_kv,), device=device)
    sequence_S = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        mask = (key >= 0) & (query >= 0)
        if op.causal:
            mask = mask & (key <= query)
        if op.window:
            mask = mask & (query - key < op.window)
        if op.varlen:
            mask = mask & (sequence_S[query] == sequence_S[key])
        return mask

    return sees


# Backends. Each returns a function of q, k, v in storage order that returns o in that order.


def _mask(op: Attention, device: torch.device) -> Tensor:
    """Return mask [S, S]: attended or not."""
    queries = torch.arange(op.seq_q, device=device)
    keys = torch.arange(op.seq_kv, device=device)
    return visible(op, device)(queries[:, None], keys[None, :])


def _sdpa(op: Attention, device: torch.device, backend: SDPBackend) -> Forward:
    mask_SS = _mask(op, device) if op.window or op.varlen else None
    is_causal = op.causal and mask_SS is None
    enable_gqa = op.heads != op.kv_heads

    def forward(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSHD, v_BSHD))
        with sdpa_kernel(backend):
            o_BHSD = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask_SS, is_causal=is_causal, enable_gqa=enable_gqa
            )
        return o_BHSD.transpose(1, 2)

    return forward


def _math(op: Attention, device: torch.device) -> Forward:
    """Return torch's math path or, as it has neither sinks nor softcap, the same by hand.

    As that path does, products of 16-bit types are in fp32. Models in eager mode concatenate
    sinks to the scores, too.
    """
    if not (op.sinks or op.softcap):
        return _sdpa(op, device, SDPBackend.MATH)
    hidden_SS = ~_mask(op, device)
    group = op.heads // op.kv_heads

    def forward(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, *sinks_H: Tensor) -> Tensor:
        wide = torch.promote_types(q_BSHD.dtype, torch.float32)
        q, k, v = (tensor.transpose(1, 2).to(wide) for tensor in (q_BSHD, k_BSHD, v_BSHD))
        if group > 1:
            k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        scores = (q * op.head_dim_qk**-0.5) @ k.mT
        if op.softcap:
            scores = (scores / op.softcap).tanh() * op.softcap
        scores = scores.masked_fill(hidden_SS, -torch.inf)
        if sinks_H:
            column = sinks_H[0].to(wide).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], -1)
        p = scores.softmax(-1)[..., : op.seq_kv]
        o_BSHD: Tensor = (p @ v).transpose(1, 2).to(q_BSHD.dtype)
        return o_BSHD

    return forward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """A kernel that returns z [..., H, S], the logsumexp of each query's scores.

    forward: of q, k, v -> o, z and what else backward takes. backward: of do, q, k, v, o, z
    and that -> dq, dk, dv. Operands are [..., S, H, D].
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


class _SinkAttention(torch.autograd.Function):
    """Attention with sinks by a kernel without them.

    The kernel's backward pass computes p = exp(score - z) again, and ds = p (dp - do . o).
    With z' and the new o these are the gradients with sinks, as a sink is a score whose value
    vector is 0. Gradients through torch's own graph of such a kernel would be wrong: it
    ignores the gradient of z.
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: _Kernel, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor
    ) -> Tensor:
        o, z, *state = kernel.forward(q, k, v)
        z_with_sink = torch.logaddexp(z, sinks_H.to(z.dtype)[:, None])
        o_with_sink: Tensor = (o * (z - z_with_sink).exp().mT[..., None]).to(o.dtype)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, sinks_H, o_with_sink, z_with_sink, *state)
        return o_with_sink

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = grads
        q, k, v, sinks_H, o, z, *state = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(do, q, k, v, o, z, *state)
        p_sink = (sinks_H.to(z.dtype)[:, None] - z).exp().mT
        dsinks = -(p_sink * (do * o).sum(-1, dtype=z.dtype)).flatten(0, -2).sum(0)
        return None, dq, dk, dv, dsinks.to(sinks_H.dtype)


def _with_sinks(kernel: _Kernel) -> Forward:
    def forward(*operands: Tensor) -> Tensor:
        o = _SinkAttention.apply(kernel, *operands)  # type: ignore[no-untyped-call]
        assert isinstance(o, Tensor)
        return o

    return forward


def _flash(op: Attention, device: torch.device) -> Forward:
    if not op.sinks:
        return _sdpa(op, device, SDPBackend.FLASH_ATTENTION)
    if device.type == "cpu":
        return _with_sinks(_cpu_kernel(op))
    return _with_sinks(_flash_kernel(op, None, None, op.seq_q, op.seq_kv))


def _cpu_kernel(op: Attention) -> _Kernel:
    aten = torch.ops.aten

    def forward(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        heads_first = (tensor.transpose(1, 2) for tensor in qkv)
        o, z = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, is_causal=op.causal
        )
        return o.transpose(1, 2), z

    def backward(do: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        *operands, z = (do, *tensors)
        heads_first = (tensor.transpose(1, 2) for tensor in operands)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, z, 0.0, op.causal
        )
        return tuple(grad.transpose(1, 2) for grad in grads)

    return _Kernel(forward=forward, backward=backward)


def _flash_kernel(op: Attention, *lengths: Any) -> _Kernel:
    """Return torch's flash kernel on a GPU, which both flash and varlen run.

    lengths: offsets of q and k, None for operands of one length, and the longest q and k.
    """
    aten = torch.ops.aten
    left, right = _window(op)
    options = {"window_size_left": left, "window_size_right": right}
    is_causal = op.causal and not op.window  # as varlen_attn calls it

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        o, z, *state, _ = aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, is_causal, False, **options
        )
        return o, z, *state

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, *state: Tensor
    ) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = aten._flash_attention_backward(
            do, q, k, v, o, z, *lengths, 0.0, is_causal, *state, **options
        )
        return grads

    return _Kernel(forward=forward, backward=backward)


def _flex_attention(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    *sinks_H: Tensor,
    block_mask: Any,
    enable_gqa: bool,
    softcap: float,
) -> Tensor:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSHD, v_BSHD))
    call = functools.partial(
        flex_attention.flex_attention,
        *(q, k, v),
        score_mod=cap if softcap else None,
        block_mask=block_mask,
        enable_gqa=enable_gqa,
    )
    if not sinks_H:
        o: Tensor = call()
        return o.transpose(1, 2)
    o, aux = call(return_aux=flex_attention.AuxRequest(lse=True))
    z = aux.lse  # it has a gradient here
    share_BHS = torch.sigmoid(z - sinks_H[0].to(z.dtype)[:, None])
    return (o * share_BHS[..., None]).to(o.dtype).transpose(1, 2)


@functools.lru_cache(maxsize=1)
def _block_mask(op: Attention, device: torch.device) -> Any:
    """Return one mask for all operand sets of a case: another one would recompile.

    Blocks of keys that no query of a block attends to are neither read nor computed.
    """
    if not op.causal and not op.varlen:
        return None
    sees = visible(op, device)
    return flex_attention.create_block_mask(
        lambda b, h, query, key: sees(query, key),
        None,
        None,
        op.seq_q,
        op.seq_kv,
        device=str(device),
    )


def _flex(op: Attention, device: torch.device) -> Forward:
    function = compiled(_flex_attention, op)
    block_mask = _block_mask(op, device)
    enable_gqa = op.heads != op.kv_heads

    def forward(*operands: Tensor) -> Tensor:
        o = function(
            *operands, block_mask=block_mask, enable_gqa=enable_gqa, softcap=op.softcap
        )
        assert isinstance(o, Tensor)
        return o

    return forward


def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)


def _packing(op: Attention, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return offsets of q and of k, and the longest q and k."""
    lengths_q = op.varlen or (op.seq_q,) * op.batch
    lengths_k = op.varlen or (op.seq_kv,) * op.batch
    offsets_q = _offsets(lengths_q, device)
    offsets_k = _offsets(lengths_k, device)
    return offsets_q, offsets_k, max(lengths_q), max(lengths_k)


def _packed(op: Attention, kernel: Forward) -> Forward:
    """Adapt a kernel of q, k, v [T, H, D] and, where the operator has them, sinks."""

    def forward(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, *sinks_H: Tensor) -> Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BSHD, k_BSHD, v_BSHD))
        o_THD = kernel(q, k, v, *sinks_H)
        return o_THD.view(op.batch, op.seq_q, op.heads, op.head_dim_v)

    return forward


def _window(op: Attention) -> tuple[int, int]:
    """Return flash-attn's window: keys to the left and right of a query; -1 = all."""
    return (op.window - 1 if op.window else -1, 0 if op.causal else -1)


def _flash_attn(op: Attention, device: torch.device) -> Forward:
    package = importlib.import_module("flash_attn")
    options: dict[str, Any] = {"causal": op.causal, "window_size": _window(op)}
    if op.softcap:
        options["softcap"] = op.softcap
    if not op.varlen:
        return functools.partial(package.flash_attn_func, **options)
    packing = _packing(op, device)
    return _packed(
        op, lambda q, k, v: package.flash_attn_varlen_func(q, k, v, *packing, **options)
    )


def _arguments(module: str, function: str) -> frozenset[str]:
    """Return the arguments of a function, which differ between releases; none without it."""
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(getattr(imported, function)).parameters)


def _varlen(op: Attention, device: torch.device) -> Forward:
    packing = _packing(op, device)
    if op.sinks:
        return _packed(op, _with_sinks(_flash_kernel(op, *packing)))
    allowed = _arguments(_VARLEN, "varlen_attn")
    options: dict[str, Any] = {}
    if "window_size" in allowed:
        options["window_size"] = _window(op)
    else:
        options["is_causal"] = op.causal
    if "enable_gqa" in allowed:
        options["enable_gqa"] = op.heads != op.kv_heads
    kernel = importlib.import_module(_VARLEN).varlen_attn
    return _packed(op, lambda q, k, v: kernel(q, k, v, *packing, **options))


def _unsupported(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    if reason := backends.attention(name, op, capabilities):
        return reason
    if name == "flash-attn" and op.softcap:
        allowed = _arguments("flash_attn", "flash_attn_func")
        return None if "softcap" in allowed else "this flash-attn lacks softcap; 2.6.2 has it"
    if name == "varlen":
        allowed = _arguments(_VARLEN, "varlen_attn")
        if not allowed:
            return "this torch has no varlen_attn"
        if op.window and "window_size" not in allowed:
            return "this torch's varlen_attn has no window"
    return None


def make(
    op: Attention, device: torch.device, *, name: str, build: Callable[..., Forward]
) -> Call:
    set_matmul_precision(op.dtype)
    op = op.with_lengths()
    is_bwd = op.phase is Phase.BWD
    shapes: list[tuple[int, ...]] = [
        (op.batch, op.seq_q, op.heads, op.head_dim_qk),
        (op.batch, op.seq_kv, op.kv_heads, op.head_dim_qk),
        (op.batch, op.seq_kv, op.kv_heads, op.head_dim_v),
    ]
    if op.sinks:
        shapes.append((op.heads,))
    operands = tuple(
        normal(*shape, dtype=op.dtype, device=device).requires_grad_(is_bwd) for shape in shapes
    )
    run: Callable[[], Any] = functools.partial(build(op, device), *operands)
    do: Tensor | None = None
    if is_bwd:
        o = run()
        do = normal(op.batch, op.seq_q, op.heads, op.head_dim_v, dtype=op.dtype, device=device)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, operands, do, retain_graph=True)

        run = backward

    def verify() -> Check:
        return check(op, operands, do, poisoned_result(run))

    return Call(run=run, verify=verify, backend_run=name)


def check(
    op: Attention,
    operands: tuple[Tensor, ...],
    do: Tensor | None,
    results: tuple[Tensor, ...],
) -> Check:
    """Compare the last key head of the last sequence; check that all else is finite.

    Gradients of sinks are sums over all sequences.
    """
    group = 1
    num_terms = op.seq_kv
    roundings = 4
    if do is not None:
        group = op.heads // op.kv_heads
        roundings = 8
        # Head widths, too: their sums cancel in ds.
        num_terms = op.seq_kv * group + 8 * (op.head_dim_qk + op.head_dim_v)
    of_type = tolerance(op.dtype, length=num_terms, roundings=roundings)
    # Kernels may round partial sums of gradients, whose terms cancel.
    of_gradients = Tolerance(of_type.max_rel_err, of_type.max_rel_err / 4)
    allowed = of_type if do is None else of_gradients
    wide = torch.float32 if op.dtype.itemsize == 2 else torch.float64
    name = f"{wide}, one sequence, {group} heads".replace("torch.", "")
    q, k, v = (tensor.detach().to(wide) for tensor in _last_heads(operands, group))
    sinks_G = operands[3].detach()[-group:].to(wide) if op.sinks else None
    outs = _last_heads(results, group)
    checks = [finite(out, allowed) for out in results]
    if do is None:
        for part, o in reference_fwd(op, q[-1], k[-1], v[-1], sinks_G):
            checks.append(compare(outs[0][-1, part], o, allowed, name))
        return merge([checks[-1], *checks[:-1]])
    terms: list[Tensor] = []  # of the gradients of sinks
    for i in range(0 if op.sinks else op.batch - 1, op.batch):
        do_SGD = do[i, :, -group:].to(wide)
        *refs, terms_GS = reference_bwd(op, q[i], k[i], v[i], do_SGD, sinks_G)
        terms.append(terms_GS)
    for out, ref in zip(outs, refs, strict=True):
        pairs = zip(out[-1].split(_ROWS), ref.split(_ROWS), strict=True)
        checks += [compare(part, expected, allowed, name) for part, expected in pairs]
    if op.sinks:
        terms_GS = torch.cat(terms, 1)
        # They may cancel: the errors of their sum are as large as those of its terms.
        scale_G = terms_GS.square().sum(1).sqrt()
        dsinks_G = results[3][-group:]
        checks.append(compare(dsinks_G, terms_GS.sum(1), allowed, name, least_scale=scale_G))
    return merge([checks[-1], *checks[:-1]])


def _last_heads(tensors: tuple[Tensor, ...], group: int) -> list[Tensor]:
    """Return the last `group` heads of q (and o), and the last head of k and v."""
    return [t[:, :, -(group if i == 0 else 1) :] for i, t in enumerate(tensors[:3])]


def _probabilities(
    op: Attention, q_SGD: Tensor, k_SD: Tensor, sinks_G: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Yield some queries at a time: p = softmax(scores) and d capped / d score [G, some, S],
    and the p of sinks [G, some, 1].
    """
    sees = visible(op, q_SGD.device)
    seq_q, group, _ = q_SGD.shape
    keys = torch.arange(op.seq_kv, device=q_SGD.device)
    step = max(1, min(_ROWS, _SCORES // (group * op.seq_kv)))
    for start in range(0, seq_q, step):
        part = slice(start, min(start + step, seq_q))
        queries = torch.arange(part.start, part.stop, device=q_SGD.device)
        scores = q_SGD[part].transpose(0, 1) @ k_SD.t() * op.head_dim_qk**-0.5
        slope = torch.ones((), dtype=scores.dtype, device=scores.device)
        if op.softcap:
            tanh = (scores / op.softcap).tanh()
            scores = op.softcap * tanh
            slope = 1 - tanh.square()
        scores.masked_fill_(~sees(queries[:, None], keys[None, :]), -torch.inf)
        p_sink = None
        if sinks_G is None:
            p = scores.softmax(-1)
        else:
            sinks = sinks_G[:, None, None]
            z = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)
            p = (scores - z).exp()
            p_sink = (sinks - z).exp()
        yield part, p, slope, p_sink


def reference_fwd(
    op: Attention, q_SGD: Tensor, k_S1D: Tensor, v_S1D: Tensor, sinks_G: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield o [some, G, D] of some queries at a time."""
    for part, p_GQS, *_ in _probabilities(op, q_SGD, k_S1D[:, 0], sinks_G):
        yield part, (p_GQS @ v_S1D[:, 0]).transpose(0, 1)


def reference_bwd(
    op: Attention,
    q_SGD: Tensor,
    k_S1D: Tensor,
    v_S1D: Tensor,
    do_SGD: Tensor,
    sinks_G: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq [S, G, D], dk and dv [S, 1, D], and terms of the gradients of sinks [G, S]."""
    k_SD = k_S1D[:, 0]
    v_SD = v_S1D[:, 0]
    scale = op.head_dim_qk**-0.5
    dq = torch.empty_like(q_SGD)
    dk = torch.zeros_like(k_SD)
    dv = torch.zeros_like(v_SD)
    terms_GS = torch.zeros_like(q_SGD[..., 0].t())
    for part, p_GQS, slope, p_sink in _probabilities(op, q_SGD, k_SD, sinks_G):
        do_GQD = do_SGD[part].transpose(0, 1)
        dp_GQS = do_GQD @ v_SD.t()
        mean_GQ1 = (p_GQS * dp_GQS).sum(-1, keepdim=True)
        ds_GQS = p_GQS * (dp_GQS - mean_GQ1) * slope * scale
        dq[part] = (ds_GQS @ k_SD).transpose(0, 1)
        dk += torch.einsum("gqs,gqd->sd", ds_GQS, q_SGD[part].transpose(0, 1))
        dv += torch.einsum("gqs,gqd->sd", p_GQS, do_GQD)
        if p_sink is not None:
            terms_GS[:, part] = -(p_sink * mean_GQ1)[..., 0]
    return dq, dk.unsqueeze(1), dv.unsqueeze(1), terms_GS


_BUILD: dict[str, Callable[..., Forward]] = {
    "flash": _flash,
    "cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": functools.partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "math": _math,
    "flex": _flex,
    "flash-attn": _flash_attn,
    "varlen": _varlen,
}
_EXTRA: dict[str, Callable[[Attention], int]] = {
    # Score matrices in fp32 (fp64): three of torch's math path, five with sinks or softcap.
    "math": lambda op: (
        (5 if op.sinks or op.softcap else 3)
        * max(4, op.dtype.itemsize)
        * (op.batch * op.heads * op.seq_q * op.seq_kv)
    ),
    # The whole mask, which create_block_mask makes.
    "flex": lambda op: 4 * op.seq_q * op.seq_kv if op.causal or op.varlen else 0,
}


def _extra_bytes(name: str, op: Attention) -> int:
    return _EXTRA[name](op.with_lengths()) if name in _EXTRA else 0


BACKENDS: dict[str, Impl] = {
    name: Impl(
        make=functools.partial(make, name=name, build=build),
        unsupported=functools.partial(_unsupported, name),
        extra_bytes=functools.partial(_extra_bytes, name),
    )
    for name, build in _BUILD.items()
}
