"""One valid operator per family and more that use every option, for laws over all families."""

from dataclasses import replace

from stepmark.ground.dtypes import DType
from stepmark.model.ops import (
    Activation,
    Attention,
    Bmm,
    Cast,
    Copy,
    CrossEntropy,
    EmbeddingBag,
    Gemm,
    GroupedGemm,
    HostCopy,
    Layout,
    Mlp,
    Norm,
    Op,
    Optimizer,
    Phase,
    Rope,
    Scaling,
)

PLAIN: dict[str, Op] = {
    "gemm": Gemm(m=64, n=48, k=32),
    "grouped-gemm": GroupedGemm(num_groups=4, tokens=100, n=24, k=16),
    "bmm": Bmm(batch=3, m=8, n=16, k=24),
    "attention": Attention(
        batch=2, seq_q=64, seq_kv=64, heads=4, kv_heads=2, head_dim_qk=16, head_dim_v=16
    ),
    "mlp": Mlp(layers=3, input=16, hidden=32, output=8, batch=4),
    "embedding-bag": EmbeddingBag(rows=100, dim=8, pooling=3, batch=5),
    "norm": Norm(tokens=16, hidden=32),
    "activation": Activation(tokens=16, width=32),
    "rope": Rope(batch=2, seq=16, heads=4, kv_heads=2, head_dim=8),
    "cross-entropy": CrossEntropy(tokens=16, vocab=50),
    "optimizer": Optimizer(num_params=1000),
    "copy": Copy(num_bytes=4096),
    "host-copy": HostCopy(num_bytes=4096),
}

_ATTENTION = PLAIN["attention"]
OPTIONS: list[Op] = [
    *PLAIN.values(),
    *(Gemm(m=16, n=32, k=48, layout=layout, dtype=DType.FP32) for layout in Layout),
    Gemm(m=16, n=32, k=48, dtype=DType.BF16, out_dtype=DType.FP32),
    Gemm(m=16, n=32, k=48, dtype=DType.TF32),
    Gemm(m=16, n=32, k=48, dtype=DType.FP8_E4M3),
    Gemm(m=16, n=32, k=48, dtype=DType.FP8_E5M2, scaling=Scaling.ROWWISE, cast=Cast.ONLY),
    Gemm(m=16, n=32, k=48, dtype=DType.FP8_E4M3, cast=Cast.INCLUDED, layout=Layout.TN),
    *(
        GroupedGemm(num_groups=4, tokens=100, n=24, k=16, skew=skew, phase=phase)
        for skew in (0.0, 1.0, 0.37, 1e-7)
        for phase in (Phase.FWD, Phase.DGRAD, Phase.WGRAD)
    ),
    Bmm(batch=3, m=8, n=16, k=24, layout=Layout.TN, dtype=DType.FP64),
    replace(_ATTENTION, phase=Phase.BWD),
    replace(_ATTENTION, causal=False, seq_kv=128),
    replace(_ATTENTION, window=7, dtype=DType.FP16),
    replace(_ATTENTION, batch=1, varlen=(30, 33, 1), phase=Phase.BWD),
    replace(_ATTENTION, batch=1, varlen=(64,), head_dim_qk=24),
    replace(_ATTENTION, piece_mean=20, piece_max=48.5, window=7),
    replace(_ATTENTION, causal=False, seq_kv=16, piece_mean=20, piece_max=64),
    replace(_ATTENTION, window=7, sinks=True),
    replace(_ATTENTION, softcap=50, phase=Phase.BWD),
    replace(_ATTENTION, causal=False, sinks=True, softcap=0.37),
    *(
        Mlp(layers=1, input=4, hidden=5, output=6, batch=7, phase=phase, optimizer=optimizer)
        for phase in (Phase.FWD, Phase.BWD, Phase.STEP)
        for optimizer in ("none", "sgd", "adagrad", "adam")
    ),
    EmbeddingBag(rows=9, dim=8, pooling=2, batch=3, alpha=1.05, phase=Phase.BWD),
    EmbeddingBag(rows=9, dim=8, pooling=2, batch=3, alpha=2, dtype=DType.FP16),
    Norm(tokens=4, hidden=8, kind="layernorm", phase=Phase.BWD, dtype=DType.FP32),
    Activation(tokens=4, width=8, kind="gelu", phase=Phase.BWD),
    Rope(batch=1, seq=4, heads=2, kv_heads=1, head_dim=2, phase=Phase.BWD),
    CrossEntropy(tokens=16, vocab=5, chunks=8, phase=Phase.BWD, dtype=DType.FP16),
    Optimizer(num_params=7, kind="sgd", dtype=DType.BF16),
    Optimizer(num_params=7, kind="adam"),
]
