"""Every way to run every operator: family -> backend -> implementation."""

from stepmark.bench.operators import (
    attention,
    cross_entropy,
    elementwise,
    embedding_bag,
    gemm,
    grouped_gemm,
    mlp,
    optimizer,
)
from stepmark.bench.operators.call import Impl

IMPLS: dict[str, dict[str, Impl]] = {
    "gemm": {"torch": gemm.TORCH},
    "grouped-gemm": {"torch": grouped_gemm.TORCH, "loop": grouped_gemm.LOOP},
    "attention": attention.BACKENDS,
    "bmm": {"torch": gemm.BMM},
    "mlp": {"torch": mlp.TORCH},
    "embedding-bag": {"torch": embedding_bag.TORCH},
    "norm": elementwise.NORM,
    "activation": elementwise.ACTIVATION,
    "rope": elementwise.ROPE,
    "cross-entropy": cross_entropy.BACKENDS,
    "optimizer": {"torch": optimizer.TORCH},
    "copy": elementwise.COPY,
}
