"""All implementations of operators: family -> backend -> implementation."""

from stepmark.cases.case import OpCase
from stepmark.model.ops import Custom
from stepmark.operators.bench import attention, custom, elementwise, matmul, recommender
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


def impl_of(case: OpCase) -> Impl | None:
    """Return the implementation that a case names; None: there is none of this name."""
    if isinstance(case.op, Custom):
        return custom.impl(case.backend)
    return IMPLS[case.family].get(case.backend)
