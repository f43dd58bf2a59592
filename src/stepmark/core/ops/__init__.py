"""Operators: shape on one rank, FLOPs and bytes, without torch and times.

Every family is one frozen dataclass. Its fields are its flags on the command line, its keys
in a file and its identity in a record, so a shape is described in one place only.

`flops` counts executed matrix-multiply operations (a multiply and an add are two).
`bytes_moved` is the compulsory traffic: every input read once, every output written once.
`memory_bytes` is the size of one set of operands and results on the device.
`shape_text` is the shape as text, without dtype, layout and pass.
"""

from stepmark.core.ops import elementwise, matmul, recommender
from stepmark.core.ops.attention import Attention
from stepmark.core.ops.elementwise import (
    Activation,
    Copy,
    CrossEntropy,
    ElementwiseOp,
    Norm,
    Optimizer,
    Rope,
)
from stepmark.core.ops.fields import Phase
from stepmark.core.ops.matmul import Bmm, Cast, Gemm, GroupedGemm, Layout, MatmulOp, Scaling
from stepmark.core.ops.recommender import EmbeddingBag, Mlp, RecommenderOp

Op = MatmulOp | Attention | RecommenderOp | ElementwiseOp

FAMILIES: dict[str, type[Op]] = {
    **matmul.FAMILIES,
    "attention": Attention,
    **recommender.FAMILIES,
    **elementwise.FAMILIES,
}

FAMILY_OF: dict[type[Op], str] = {kind: name for name, kind in FAMILIES.items()}

__all__ = [
    "FAMILIES",
    "FAMILY_OF",
    "Activation",
    "Attention",
    "Bmm",
    "Cast",
    "Copy",
    "CrossEntropy",
    "EmbeddingBag",
    "Gemm",
    "GroupedGemm",
    "Layout",
    "Mlp",
    "Norm",
    "Op",
    "Optimizer",
    "Phase",
    "Rope",
    "Scaling",
]
