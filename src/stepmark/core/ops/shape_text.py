"""Shapes of operators as text."""

from stepmark.core.ops import (
    Activation,
    Attention,
    Bmm,
    Copy,
    CrossEntropy,
    EmbeddingBag,
    Gemm,
    GroupedGemm,
    Mlp,
    Norm,
    Op,
    Optimizer,
    Rope,
)
from stepmark.core.units import format_bytes


def shape_text(op: Op) -> str:  # noqa: PLR0911, one return per family lets mypy see a missing one
    """The shape as one reads it aloud, without dtype, layout and pass."""
    match op:
        case Gemm(m=m, n=n, k=k):
            return f"{m}x{n}x{k}"
        case Bmm(batch=batch, m=m, n=n, k=k):
            return f"{batch} of {m}x{n}x{k}"
        case GroupedGemm():
            skew = f" skew {op.skew:g}" if op.skew else ""
            return f"{op.num_groups} groups, {op.tokens}x{op.n}x{op.k}{skew}"
        case Attention():
            return _attention_text(op)
        case Mlp():
            widths = f"{op.input}-{op.hidden}-{op.output}"
            return f"b{op.batch} {op.layers} layers {widths} {op.optimizer}"
        case EmbeddingBag():
            zipf = f" zipf {op.alpha:g}" if op.alpha else ""
            return f"b{op.batch} pool {op.pooling} of {op.rows}x{op.dim}{zipf}"
        case Norm():
            return f"{op.kind} {op.tokens}x{op.hidden}"
        case Activation():
            return f"{op.kind} {op.tokens}x{op.width}"
        case Rope():
            return f"b{op.batch} s{op.seq} h{op.heads}/{op.kv_heads} d{op.head_dim}"
        case CrossEntropy():
            chunks = f" in {op.chunks} chunks" if op.chunks > 1 else ""
            return f"{op.tokens}x{op.vocab}{chunks}"
        case Optimizer():
            return f"{op.kind} {op.num_params} params"
        case Copy():
            return format_bytes(op.num_bytes)


def _attention_text(op: Attention) -> str:
    seq = f"s{op.seq_q}" if op.seq_q == op.seq_kv else f"s{op.seq_q}/{op.seq_kv}"
    words = [f"b{op.batch} {seq} h{op.heads}/{op.kv_heads} d{op.head_dim_qk}/{op.head_dim_v}"]
    words += ["causal"] if op.causal else []
    words += [f"window {op.window}"] if op.window else []
    words += [f"packed {len(op.varlen)}"] if op.varlen else []
    return " ".join(words)
