"""All implementations of operators: family -> backend -> implementation."""

from stepmark.operators.bench import attention, elementwise, matmul, recommender
from stepmark.operators.bench.call import Impl

IMPLS: dict[str, dict[str, Impl]] = {
    "gemm": {"torch": matmul.GEMM},
    "grouped-gemm": {"torch": matmul.GROUPED, "loop": matmul.LOOP},
    "attention": attention.BACKENDS,
    "bmm": {"torch": matmul.BMM},
    "mlp": {"torch": recommender.MLP},
    "embedding-bag": {"torch": recommender.EMBEDDING_BAG},
    "norm": elementwise.NORM,
    "activation": elementwise.ACTIVATION,
    "rope": elementwise.ROPE,
    "cross-entropy": elementwise.CROSS_ENTROPY,
    "optimizer": {"torch": elementwise.OPTIMIZER},
    "copy": elementwise.COPY,
    "host-copy": elementwise.HOST_COPY,
}
