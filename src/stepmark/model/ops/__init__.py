"""Operators: shape on one rank, FLOPs and bytes, without torch and times.

Every family is one frozen dataclass. Its fields are its flags on the command line, its keys
in a file and its identity in a record, so a shape is described in one place only.

`flops` counts executed matrix-multiply operations (a multiply and an add are two).
`bytes_moved` is the compulsory traffic: every input read once, every output written once.
`memory_bytes` is the size of one set of operands and results on the device.
`shape_text` is the shape as text, without dtype, layout and pass.
"""

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import MIB, parse_bytes
from stepmark.model.ops import elementwise, matmul, recommender
from stepmark.model.ops.attention import Attention
from stepmark.model.ops.custom import CUSTOM, Custom
from stepmark.model.ops.elementwise import (
    Activation,
    Copy,
    CrossEntropy,
    ElementwiseOp,
    HostCopy,
    Norm,
    Optimizer,
    Rope,
)
from stepmark.model.ops.fields import Phase
from stepmark.model.ops.matmul import Bmm, Cast, Gemm, GroupedGemm, Layout, MatmulOp, Scaling
from stepmark.model.ops.recommender import EmbeddingBag, Mlp, RecommenderOp

Op = MatmulOp | Attention | RecommenderOp | ElementwiseOp | Custom

# Families whose fields are flags of the command line, and keys of a file of shapes.
FAMILIES: dict[str, type[Op]] = {
    **matmul.FAMILIES,
    "attention": Attention,
    **recommender.FAMILIES,
    **elementwise.FAMILIES,
}

# All families, with a user's own function.
ALL_FAMILIES: dict[str, type[Op]] = {**FAMILIES, CUSTOM: Custom}
FAMILY_OF: dict[type[Op], str] = {kind: name for name, kind in ALL_FAMILIES.items()}

__all__ = [
    "ALL_FAMILIES",
    "CUSTOM",
    "FAMILIES",
    "FAMILY_OF",
    "Activation",
    "Attention",
    "Bmm",
    "Cast",
    "Copy",
    "CrossEntropy",
    "Custom",
    "EmbeddingBag",
    "Gemm",
    "GroupedGemm",
    "HostCopy",
    "Layout",
    "Mlp",
    "Norm",
    "Op",
    "Optimizer",
    "Phase",
    "Rope",
    "Scaling",
    "from_shorthand",
]

_ALLOWED = "gemm:N, gemm:MxNxK, copy, copy:256M, attention, or attention:BATCHxSEQxHEADSxDIM"


def from_shorthand(text: str, dtype: DType, field: str = "with") -> Gemm | Copy | Attention:
    """Return the operator of e.g. "gemm:8192"; products and attention use `dtype`.

    Raise ConfigError. By default copy moves 256 MiB, and attention is causal 2x4096x32x128.
    """
    name, _, shape = text.strip().lower().partition(":")
    if name == "copy":
        num_bytes = parse_bytes(shape, field) if shape else 256 * MIB
        if num_bytes < 4:
            raise ConfigError(field, text, "a copy of 4 bytes or more")
        return Copy(num_bytes=num_bytes // 4 * 4)
    if name == "gemm":
        dims = _numbers(text, shape, (1, 3), field)
        m, n, k = dims * 3 if len(dims) == 1 else dims
        return Gemm(m=m, n=n, k=k, dtype=dtype)
    if name == "attention":
        batch, seq, heads, width = _numbers(text, shape or "2x4096x32x128", (4,), field)
        return Attention(
            batch=batch,
            seq_q=seq,
            seq_kv=seq,
            heads=heads,
            kv_heads=heads,
            head_dim_qk=width,
            head_dim_v=width,
            dtype=dtype,
        )
    raise ConfigError(field, text, _ALLOWED)


def _numbers(text: str, shape: str, counts: tuple[int, ...], field: str) -> list[int]:
    words = shape.split("x")
    if len(words) not in counts or not all(w.isdecimal() and int(w) > 0 for w in words):
        raise ConfigError(field, text, _ALLOWED)
    return [int(word) for word in words]
