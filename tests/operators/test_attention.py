"""Attention with windows, packed sequences, sinks and softcap: each backend, and the check."""

import functools
import math
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.ops import Attention, Phase
from stepmark.model.ops.backends import BACKENDS, unsupported
from stepmark.operators.bench import IMPLS, attention
from stepmark.operators.bench.call import normal

from .test_operators import BWD, CPU, FWD, HOPPER, NO_COMPILER, attend


def runs(**changes: Any) -> set[str]:
    """Backends of attention that a GPU runs."""
    with_package = replace(HOPPER, modules=frozenset({"flash_attn"}))
    op = attend(**changes)
    names = BACKENDS["attention"]
    return {name for name in names if not unsupported("attention", name, op, with_package)}


def test_which_backends_have_windows_sinks_and_softcap() -> None:
    assert runs() == set(BACKENDS["attention"])
    assert runs(window=20) == {"math", "flex", "flash-attn", "varlen"}
    assert runs(sinks=True) == {"math", "flex", "flash", "varlen"}
    assert runs(sinks=True, window=20) == {"math", "flex", "varlen"}
    assert runs(softcap=50) == {"math", "flex", "flash-attn"}
    assert runs(softcap=50, window=20) == {"math", "flex", "flash-attn"}
    assert runs(softcap=50, sinks=True) == {"math", "flex"}
    pieces = {"piece_mean": 20.0, "piece_max": 32.0}
    assert runs(**pieces) == runs(varlen=(40, 8), batch=1, seq_q=48, seq_kv=48)
    assert runs(**pieces, causal=False) == set()


@pytest.mark.parametrize("phase", [FWD, BWD])
def test_packed_sequences_are_measured_as_one_choice_of_them(phase: Phase) -> None:
    """The check masks the same pieces: with others the results would be wrong."""
    op = attend(piece_mean=20.0, piece_max=32.0, dtype=DType.FP32, phase=phase)
    impl = IMPLS["attention"]["math"]
    verdict = impl.make(op, CPU).verify()
    assert verdict.num_wrong == 0
    chosen = op.with_lengths()
    assert impl.extra_bytes(op) == impl.extra_bytes(chosen)
    assert len(chosen.varlen) > op.batch


def test_an_older_flash_attn_without_softcap_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with_package = replace(HOPPER, modules=frozenset({"flash_attn"}))
    why_not = IMPLS["attention"]["flash-attn"].unsupported

    def older(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: Any) -> Tensor:
        return q

    def newer(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: Any, softcap: float
    ) -> Tensor:
        assert (causal, window_size, softcap) == (True, (19, 0), 50.0)
        return q

    package.flash_attn_func = older  # type: ignore[attr-defined]
    assert why_not(attend(window=20), with_package) is None
    assert "softcap" in str(why_not(attend(softcap=50), with_package))
    package.flash_attn_func = newer  # type: ignore[attr-defined]
    assert why_not(attend(softcap=50), with_package) is None
    call = IMPLS["attention"]["flash-attn"].make(attend(softcap=50, window=20), CPU)
    assert isinstance(call.run(), Tensor)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 20},
    {"sinks": True},
    {"sinks": True, "causal": False, "seq_kv": 70},
    {"sinks": True, "window": 20},
    {"softcap": 0.5},
    {"softcap": 2, "sinks": True, "batch": 1, "varlen": (100, 50)},
]


def plainly(op: Attention, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
    """Attention of operands [B, S, H, D] by its definition: a softmax of each query."""
    group = op.heads // op.kv_heads
    lengths = op.varlen or (op.seq_q,)
    sequence = [number for number, length in enumerate(lengths) for _ in range(length)]
    o = torch.zeros(op.batch, op.seq_q, op.heads, op.head_dim_v, dtype=q.dtype)
    for head in range(op.heads):
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, head // group])
        scores = scores / math.sqrt(op.head_dim_qk)
        if op.softcap:
            scores = op.softcap * torch.tanh(scores / op.softcap)
        for query in range(op.seq_q):
            first = max(0, query - op.window + 1) if op.window else 0
            last = query if op.causal else op.seq_kv - 1
            seen = list(range(first, last + 1))
            if op.varlen:
                seen = [key for key in seen if sequence[key] == sequence[query]]
            weights = scores[:, query, seen].exp()
            total = weights.sum(-1, keepdim=True)
            if op.sinks:
                total = total + sinks[0][head].exp()
            p = (weights / total)[..., None]
            o[:, query, head] = (p * v[:, seen, head // group]).sum(1)
    return o


def operands_of(op: Attention, device: torch.device = CPU) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [
        (op.batch, op.seq_q, op.heads, op.head_dim_qk),
        (op.batch, op.seq_kv, op.kv_heads, op.head_dim_qk),
        (op.batch, op.seq_kv, op.kv_heads, op.head_dim_v),
        *([(op.heads,)] if op.sinks else []),
    ]
    dtype = TORCH_DTYPE[op.dtype]
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def with_gradients(forward: Any, operands: list[Tensor], do: Tensor) -> list[Tensor]:
    o = forward(*operands)
    return [o, *torch.autograd.grad(o, operands, do)]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_attention_is_a_plain_softmax_forward_and_backward(
    changes: dict[str, Any],
) -> None:
    """The backends of a CPU, and the reference of all checks."""
    torch.manual_seed(0)
    op = attend(dtype=DType.FP64, kv_heads=2, phase=BWD, **changes)
    operands = operands_of(op)
    do = torch.randn(op.batch, op.seq_q, op.heads, op.head_dim_v, dtype=torch.float64)
    expected = with_gradients(functools.partial(plainly, op), operands, do)
    for name, impl in IMPLS["attention"].items():
        if impl.unsupported(op, NO_COMPILER):
            continue
        forward = impl.make.keywords["build"](op, CPU)  # type: ignore[attr-defined]
        for result, ref in zip(with_gradients(forward, operands, do), expected, strict=True):
            torch.testing.assert_close(result, ref, msg=lambda text: f"{name}: {text}")  # noqa: B023
    o, *grads = (tensor.detach() for tensor in expected)
    check = attention.check(op, tuple(operands), None, (o,))
    assert check.num_wrong == 0, check
    check = attention.check(op, tuple(operands), do, tuple(grads))
    assert check.num_wrong == 0, check


def test_gradients_of_sinks_are_checked_over_all_sequences() -> None:
    op = attend(dtype=DType.FP64, kv_heads=2, phase=BWD, sinks=True)
    operands = operands_of(op)
    do = torch.randn(op.batch, op.seq_q, op.heads, op.head_dim_v, dtype=torch.float64)
    _, *grads = with_gradients(functools.partial(plainly, op), operands, do)
    assert attention.check(op, tuple(operands), do, tuple(grads)).num_wrong == 0
    grads[3] = grads[3] * (1 + 1e-6)
    assert attention.check(op, tuple(operands), do, tuple(grads)).num_wrong == 2
    without_first = do.clone()
    without_first[0] = 0
    _, *others = with_gradients(functools.partial(plainly, op), operands, without_first)
    grads[3] = others[3]
    assert attention.check(op, tuple(operands), do, tuple(grads)).num_wrong == 2


@pytest.mark.filterwarnings("ignore")  # of torch, that flex attention is not compiled
@pytest.mark.parametrize("changes", VARIANTS[4:], ids=str)
def test_flex_attention_computes_the_same_uncompiled(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU compiles. torch computes gradients on a CPU, too, but refuses them."""
    monkeypatch.setattr(attention, "compiled", lambda function, key: function)
    module = "torch.nn.attention.flex_attention._validate_device"
    monkeypatch.setattr(module, lambda *tensors: None)
    for phase in (FWD, BWD):
        torch._dynamo.reset()
        op = attend(dtype=DType.FP32, kv_heads=2, phase=phase, **changes)
        call = IMPLS["attention"]["flex"].make(op, CPU)
        assert call.verify().num_wrong == 0


@pytest.mark.parametrize("name", ["flash", "varlen"])
def test_kernels_with_sinks_take_the_arguments_of_torch(name: str) -> None:
    """By the shapes that torch's own operators derive without computing."""
    meta = torch.device("meta")
    variants = VARIANTS[2:4] if name == "flash" else [*VARIANTS[2:5], {"varlen": (100, 50)}]
    for changes in variants:
        batch = 1 if "varlen" in changes else 2
        op = attend(kv_heads=2, batch=batch, **{"sinks": True, **changes})
        operands = operands_of(op, meta)
        do = torch.empty_like(operands[0])
        forward = IMPLS["attention"][name].make.keywords["build"](op, meta)  # type: ignore[attr-defined]
        o, *grads = with_gradients(forward, operands, do)
        assert o.shape == (batch, 150, 4, 16)
        assert [grad.shape for grad in grads] == [tensor.shape for tensor in operands]


def test_varlen_equals_separate_sequences() -> None:
    q, k, v = (normal(1, 150, 4, 16, dtype=DType.FP32, device=CPU) for _ in range(3))
    packed = attend(batch=1, varlen=(100, 50))
    build = attention.BACKENDS["math"].make.keywords["build"]  # type: ignore[attr-defined]
    together = build(packed, CPU)(q, k, v)
    start = 0
    for length in packed.varlen:
        part = slice(start, start + length)
        alone = attend(batch=1, seq_q=length, seq_kv=length)
        o = build(alone, CPU)(q[:, part], k[:, part], v[:, part])
        torch.testing.assert_close(together[:, part], o)
        start += length
