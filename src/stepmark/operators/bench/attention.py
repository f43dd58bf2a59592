"""Attention by every kernel that torch has, and by the flash-attn package.

B batch, S positions, H heads, G query heads per key head, D head width. Operands are stored
[B, S, H, D], as a model's projections write them; kernels that want heads first get views.
The backward pass is timed by itself, on the retained graph of one forward pass.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from stepmark.cases.record import Check
from stepmark.measuring.verify import compare, finite, merge, poisoned_result, tolerance
from stepmark.model.ops import Attention, Phase, backends
from stepmark.model.ops.backends import Capabilities
from stepmark.operators.bench.call import Call, Impl, normal, set_matmul_precision
from stepmark.operators.bench.elementwise import compiled

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
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


def _sdpa(op: Attention, device: torch.device, backend: SDPBackend) -> Forward:
    mask_SS = None
    if op.window or op.varlen:
        positions = torch.arange(op.seq_q, device=device)
        mask_SS = visible(op, device)(positions[:, None], positions[None, :])
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


def _flex_attention(
    q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, block_mask: Any, enable_gqa: bool
) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BSHD, v_BSHD))
    result = flex_attention.flex_attention(
        q, k, v, block_mask=block_mask, enable_gqa=enable_gqa
    )
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


@functools.lru_cache(maxsize=1)
def _block_mask(op: Attention, device: torch.device) -> Any:
    """Return one mask for all operand sets of a case: another one would recompile."""
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
    block_mask = _block_mask(op, device)
    function = compiled(_flex_attention, op)

    def forward(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
        o = function(q_BSHD, k_BSHD, v_BSHD, block_mask, op.heads != op.kv_heads)
        assert isinstance(o, Tensor)
        return o

    return forward


def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)


def _packed(op: Attention, device: torch.device, kernel: Callable[..., Any]) -> Forward:
    """Adapt a kernel of (q, k, v [T, H, D], offsets of q, of k, longest q, longest k)."""
    lengths_q = op.varlen or (op.seq_q,) * op.batch
    lengths_k = op.varlen or (op.seq_kv,) * op.batch
    offsets_q = _offsets(lengths_q, device)
    offsets_k = _offsets(lengths_k, device)
    longest_q = max(lengths_q)
    longest_k = max(lengths_k)

    def forward(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BSHD, k_BSHD, v_BSHD))
        o_THD: Tensor = kernel(q, k, v, offsets_q, offsets_k, longest_q, longest_k)
        return o_THD.view(op.batch, op.seq_q, op.heads, op.head_dim_v)

    return forward


def _window(op: Attention) -> tuple[int, int]:
    """Return flash-attn's window: keys to the left and right of a query; -1 = all."""
    return (op.window - 1 if op.window else -1, 0 if op.causal else -1)


def _flash_attn(op: Attention, device: torch.device) -> Forward:
    package = importlib.import_module("flash_attn")
    options = {"causal": op.causal, "window_size": _window(op)}
    if op.varlen:
        kernel = functools.partial(package.flash_attn_varlen_func, **options)
        return _packed(op, device, kernel)
    dense: Forward = functools.partial(package.flash_attn_func, **options)
    return dense


def _varlen_options() -> frozenset[str]:
    """Return keyword arguments of torch's varlen_attn, which differ between releases."""
    if importlib.util.find_spec(_VARLEN) is None:
        return frozenset()
    module = importlib.import_module(_VARLEN)
    return frozenset(inspect.signature(module.varlen_attn).parameters)


def _varlen(op: Attention, device: torch.device) -> Forward:
    allowed = _varlen_options()
    options: dict[str, Any] = {}
    if "window_size" in allowed:
        options["window_size"] = _window(op)
    else:
        options["is_causal"] = op.causal
    if "enable_gqa" in allowed:
        options["enable_gqa"] = op.heads != op.kv_heads
    kernel = functools.partial(importlib.import_module(_VARLEN).varlen_attn, **options)
    return _packed(op, device, kernel)


def _unsupported(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    if reason := backends.attention(name, op, capabilities):
        return reason
    if name == "varlen" and not _varlen_options():
        return "this torch has no varlen_attn"
    if name == "varlen" and op.window and "window_size" not in _varlen_options():
        return "this torch's varlen_attn has no window"
    return None


def make(
    op: Attention, device: torch.device, *, name: str, build: Callable[..., Forward]
) -> Call:
    set_matmul_precision(op.dtype)
    is_bwd = op.phase is Phase.BWD
    q, k, v = (
        normal(op.batch, seq, heads, dim, dtype=op.dtype, device=device).requires_grad_(is_bwd)
        for seq, heads, dim in (
            (op.seq_q, op.heads, op.head_dim_qk),
            (op.seq_kv, op.kv_heads, op.head_dim_qk),
            (op.seq_kv, op.kv_heads, op.head_dim_v),
        )
    )
    forward = build(op, device)
    run: Callable[[], Any] = functools.partial(forward, q, k, v)
    do: Tensor | None = None
    if is_bwd:
        o = run()
        do = normal(op.batch, op.seq_q, op.heads, op.head_dim_v, dtype=op.dtype, device=device)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

        run = backward

    def verify() -> Check:
        return check(op, (q, k, v), do, poisoned_result(run))

    return Call(run=run, verify=verify, backend_run=name)


def check(
    op: Attention, qkv: tuple[Tensor, ...], do: Tensor | None, results: tuple[Tensor, ...]
) -> Check:
    """Compare the last key head of the last sequence; check that all else is finite."""
    group = 1
    num_terms = op.seq_kv
    roundings = 4
    if do is not None:
        group = op.heads // op.kv_heads
        roundings = 8
        # Head widths, too: their sums cancel in ds.
        num_terms = op.seq_kv * group + 8 * (op.head_dim_qk + op.head_dim_v)
    allowed = tolerance(op.dtype, length=num_terms, roundings=roundings)
    wide = torch.float32 if op.dtype.itemsize == 2 else torch.float64
    name = f"{wide}, one sequence, {group} heads".replace("torch.", "")
    q, k, v = (tensor.detach()[-1].to(wide) for tensor in _last_heads(qkv, group))
    outs = _last_heads(results, group)
    checks = [finite(out, allowed) for out in results]
    if do is None:
        for part, o in reference_fwd(op, q, k, v):
            checks.append(compare(outs[0][-1, part], o, allowed, name))
        return merge([checks[-1], *checks[:-1]])
    refs = reference_bwd(op, q, k, v, do[-1, :, -group:].to(wide))
    for out, ref in zip(outs, refs, strict=True):
        pairs = zip(out[-1].split(_ROWS), ref.split(_ROWS), strict=True)
        checks += [compare(part, expected, allowed, name) for part, expected in pairs]
    return merge([checks[-1], *checks[:-1]])


def _last_heads(tensors: tuple[Tensor, ...], group: int) -> list[Tensor]:
    """Return the last `group` heads of q (and o), and the last head of k and v."""
    return [t[:, :, -(group if i == 0 else 1) :] for i, t in enumerate(tensors)]


def _probabilities(
    op: Attention, q_SGD: Tensor, k_SD: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield softmax(q @ k.T * scale) of some queries at a time: [G, some, S]."""
    sees = visible(op, q_SGD.device)
    seq_q, group, _ = q_SGD.shape
    keys = torch.arange(op.seq_kv, device=q_SGD.device)
    step = max(1, min(_ROWS, _SCORES // (group * op.seq_kv)))
    for start in range(0, seq_q, step):
        part = slice(start, min(start + step, seq_q))
        queries = torch.arange(part.start, part.stop, device=q_SGD.device)
        scores = q_SGD[part].transpose(0, 1) @ k_SD.t() * op.head_dim_qk**-0.5
        hidden = ~sees(queries[:, None], keys[None, :])
        yield part, scores.masked_fill_(hidden, -torch.inf).softmax(-1)


def reference_fwd(
    op: Attention, q_SGD: Tensor, k_S1D: Tensor, v_S1D: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield o [some, G, D] of some queries at a time."""
    for part, p_GQS in _probabilities(op, q_SGD, k_S1D[:, 0]):
        yield part, (p_GQS @ v_S1D[:, 0]).transpose(0, 1)


def reference_bwd(
    op: Attention, q_SGD: Tensor, k_S1D: Tensor, v_S1D: Tensor, do_SGD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [S, G, D], dk and dv [S, 1, D]."""
    k_SD = k_S1D[:, 0]
    v_SD = v_S1D[:, 0]
    scale = op.head_dim_qk**-0.5
    dq = torch.empty_like(q_SGD)
    dk = torch.zeros_like(k_SD)
    dv = torch.zeros_like(v_SD)
    for part, p_GQS in _probabilities(op, q_SGD, k_SD):
        do_GQD = do_SGD[part].transpose(0, 1)
        dp_GQS = do_GQD @ v_SD.t()
        ds_GQS = p_GQS * (dp_GQS - (p_GQS * dp_GQS).sum(-1, keepdim=True)) * scale
        dq[part] = (ds_GQS @ k_SD).transpose(0, 1)
        dk += torch.einsum("gqs,gqd->sd", ds_GQS, q_SGD[part].transpose(0, 1))
        dv += torch.einsum("gqs,gqd->sd", p_GQS, do_GQD)
    return dq, dk.unsqueeze(1), dv.unsqueeze(1)


_BUILD: dict[str, Callable[..., Forward]] = {
    "flash": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": functools.partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "math": functools.partial(_sdpa, backend=SDPBackend.MATH),
    "flex": _flex,
    "flash-attn": _flash_attn,
    "varlen": _varlen,
}
_EXTRA: dict[str, Callable[[Attention], int]] = {
    # Three score matrices in fp32 (fp64), which torch's math path makes.
    "math": lambda op: (
        3 * max(4, op.dtype.itemsize) * op.batch * op.heads * op.seq_q * op.seq_kv
    ),
    # The whole mask, which create_block_mask makes.
    "flex": lambda op: 4 * op.seq_q * op.seq_kv if op.causal or op.varlen else 0,
}

BACKENDS: dict[str, Impl] = {
    name: Impl(
        make=functools.partial(make, name=name, build=build),
        unsupported=functools.partial(_unsupported, name),
        extra_bytes=_EXTRA.get(name, lambda op: 0),
    )
    for name, build in _BUILD.items()
}
