"""Every way to run every operator: family -> backend -> implementation."""

from stepmark.bench.operators import (
    activation,
    attention,
    bmm,
    copy,
    cross_entropy,
    embedding_bag,
    gemm,
    grouped_gemm,
    mlp,
    norm,
    optimizer,
    rope,
)
from stepmark.bench.operators.call import Impl

IMPLS: dict[str, dict[str, Impl]] = {
    "gemm": {"torch": gemm.TORCH},
    "grouped-gemm": {"torch": grouped_gemm.TORCH, "loop": grouped_gemm.LOOP},
    "attention": attention.BACKENDS,
    "bmm": {"torch": bmm.TORCH},
    "mlp": {"torch": mlp.TORCH},
    "embedding-bag": {"torch": embedding_bag.TORCH},
    "norm": {"torch": norm.TORCH, "compile": norm.COMPILE},
    "activation": {"torch": activation.TORCH, "compile": activation.COMPILE},
    "rope": {"torch": rope.TORCH, "compile": rope.COMPILE},
    "cross-entropy": {"torch": cross_entropy.TORCH, "compile": cross_entropy.COMPILE},
    "optimizer": {"torch": optimizer.TORCH},
    "copy": {"torch": copy.TORCH},
}
