"""The operators of one transformer layer, the head, the loss and the optimizer, on one rank.

After sharding: tensor parallelism divides heads, MLP width and vocabulary, and (as sequence
parallelism) the tokens of norms and residuals; expert parallelism divides the experts and
brings each rank the tokens of its peers, so that with balanced routing a rank computes
tokens x top_k rows over its num_experts / ep experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stepmark.core.case import Label
from stepmark.core.dtypes import DType
from stepmark.core.model import ModelConfig
from stepmark.core.ops import (
    Activation,
    Attention,
    Cast,
    CrossEntropy,
    Gemm,
    GroupedGemm,
    Layout,
    Norm,
    Op,
    Optimizer,
    Phase,
    Rope,
    Scaling,
)
from stepmark.core.parallel import ParallelConfig

GEMM_PHASES = (Phase.FWD, Phase.DGRAD, Phase.WGRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What shapes a layer: the model, how it is spread, how many tokens, in which types."""

    model: ModelConfig
    parallel: ParallelConfig
    mbs: int
    seq_len: int
    dtype: DType = DType.BF16
    skew: float = 0.0  # of tokens over experts
    scaling: Scaling = Scaling.NONE
    cast: Cast = Cast.NONE

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq_len

    @property
    def activation_dtype(self) -> DType:
        """fp8 is for matrix products; everything else then runs in bf16."""
        return DType.BF16 if self.dtype.is_fp8 else self.dtype

    @property
    def plain_dtype(self) -> DType:
        """TF32 is a mode of matrix units, not a storage type."""
        kept = self.activation_dtype
        return DType.FP32 if kept is DType.TF32 else kept


Placed = tuple[Label, Op]


def linear(
    shape: LayerShape, role: str, m: int, n: int, k: int, *, count: int = 1
) -> Iterator[Placed]:
    """A linear layer's three products. y[m,n] = x[m,k] w[n,k].T; dx = dy w; dw = dy.T x."""
    sizes = {
        Phase.FWD: (m, n, k, Layout.NT),
        Phase.DGRAD: (m, k, n, Layout.NN),
        Phase.WGRAD: (n, k, m, Layout.TN),
    }
    for phase, (rows, columns, inner, layout) in sizes.items():
        # fp8 units take 16-wide rows; a layer that has none stays in bf16, as in torchao.
        fits = not shape.dtype.is_fp8 or (columns % 16 == 0 and inner % 16 == 0)
        fp8 = shape.dtype.is_fp8 and fits
        cast = shape.cast if fp8 else Cast.NONE
        yield (
            _label(shape, role, phase, count),
            Gemm(
                m=rows,
                n=columns,
                k=inner,
                dtype=shape.dtype if fits else DType.BF16,
                # Pre-cast fp8 operands lie as the unit wants them, whatever the pass.
                layout=Layout.NT if fp8 and cast is Cast.NONE else layout,
                scaling=shape.scaling if fp8 else Scaling.NONE,
                cast=cast,
            ),
        )


def _label(shape: LayerShape, role: str, phase: Phase, count: int = 1) -> Label:
    return Label(model=shape.model.name, role=role, phase=phase, count=count, mbs=shape.mbs)


def attention_linears(shape: LayerShape) -> Iterator[Placed]:
    """Projections into and out of attention."""
    model, tp, tokens = shape.model, shape.parallel.tp, shape.tokens
    heads = model.num_heads // tp
    if (mla := model.mla) is None:
        kv_heads = model.num_kv_heads // tp
        width = (heads + 2 * kv_heads) * model.head_dim
        yield from linear(shape, "qkv", tokens, width, model.hidden_size)
        yield from linear(shape, "out", tokens, model.hidden_size, heads * model.head_dim)
        return
    d_qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    # The down projections are replicated over tp: their results are shared by all heads.
    if mla.q_lora_rank is None:
        yield from linear(shape, "q", tokens, heads * d_qk, model.hidden_size)
    else:
        yield from linear(shape, "q_down", tokens, mla.q_lora_rank, model.hidden_size)
        yield from linear(shape, "q_up", tokens, heads * d_qk, mla.q_lora_rank)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield from linear(shape, "kv_down", tokens, latent, model.hidden_size)
    width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from linear(shape, "kv_up", tokens, width, mla.kv_lora_rank)
    yield from linear(shape, "out", tokens, model.hidden_size, heads * mla.v_head_dim)


def mlp_linears(shape: LayerShape) -> Iterator[Placed]:
    """The dense MLP, and the router and shared experts of an MoE layer."""
    model, tp, tokens = shape.model, shape.parallel.tp, shape.tokens
    gates = 2 if model.activation == "swiglu" else 1
    up = "gate_up" if gates == 2 else "up"

    def pair(prefix: str, width: int) -> Iterator[Placed]:
        yield from linear(shape, prefix + up, tokens, gates * width // tp, model.hidden_size)
        yield from linear(shape, prefix + "down", tokens, model.hidden_size, width // tp)

    if model.num_dense_layers:
        yield from pair("", model.ffn_hidden_size)
    if (moe := model.moe) is not None:
        yield from linear(shape, "router", tokens, moe.num_experts, model.hidden_size)
        if moe.shared_ffn_hidden_size:
            yield from pair("shared_", moe.shared_ffn_hidden_size)


def head_linear(shape: LayerShape) -> Iterator[Placed]:
    model = shape.model
    columns = model.vocab_size // shape.parallel.tp
    yield from linear(shape, "head", shape.tokens, columns, model.hidden_size)


def gemms(shape: LayerShape) -> Iterator[Placed]:
    """Every dense product of a layer and the head."""
    yield from attention_linears(shape)
    yield from mlp_linears(shape)
    yield from head_linear(shape)


def grouped_gemms(shape: LayerShape) -> Iterator[Placed]:
    """The routed experts of this rank. Nothing for a dense model."""
    model, moe = shape.model, shape.model.moe
    if moe is None:
        return
    gates = 2 if model.activation == "swiglu" else 1
    sizes = {
        "experts_gate_up" if gates == 2 else "experts_up": (
            gates * moe.ffn_hidden_size,
            model.hidden_size,
        ),
        "experts_down": (model.hidden_size, moe.ffn_hidden_size),
    }
    for role, (n, k) in sizes.items():
        for phase in GEMM_PHASES:
            yield (
                _label(shape, role, phase),
                GroupedGemm(
                    num_groups=moe.num_experts // shape.parallel.ep,
                    tokens=shape.tokens * moe.top_k,
                    n=n,
                    k=k,
                    skew=shape.skew,
                    dtype=shape.plain_dtype,
                    phase=phase,
                ),
            )


def attentions(shape: LayerShape) -> Iterator[Placed]:
    model, tp = shape.model, shape.parallel.tp
    heads = model.num_heads // tp
    for phase in (Phase.FWD, Phase.BWD):
        yield (
            _label(shape, "attention", phase),
            Attention(
                batch=shape.mbs,
                seq_q=shape.seq_len,
                seq_kv=shape.seq_len,
                heads=heads,
                kv_heads=heads if model.mla else model.num_kv_heads // tp,
                head_dim_qk=model.d_qk,
                head_dim_v=model.d_v,
                dtype=shape.plain_dtype,
                phase=phase,
            ),
        )


def norms(shape: LayerShape) -> Iterator[Placed]:
    """Two norms of the residual stream a layer, and those inside attention."""
    model, tp = shape.model, shape.parallel.tp
    heads = model.num_heads // tp
    found = [("norm", shape.tokens // tp or 1, model.hidden_size, 2)]
    if model.qk_norm:
        found.append(("q_norm", shape.tokens * heads, model.head_dim, 1))
        kv_rows = shape.tokens * (model.num_kv_heads // tp)
        found.append(("k_norm", kv_rows, model.head_dim, 1))
    if (mla := model.mla) is not None:
        if mla.q_lora_rank is not None:
            found.append(("q_norm", shape.tokens, mla.q_lora_rank, 1))
        found.append(("kv_norm", shape.tokens, mla.kv_lora_rank, 1))
    for role, tokens, hidden, times in found:
        for phase in (Phase.FWD, Phase.BWD):
            op = Norm(
                tokens=tokens,
                hidden=hidden,
                kind=model.norm,
                dtype=shape.plain_dtype,
                phase=phase,
            )
            yield _label(shape, role, phase, times), op


def activations(shape: LayerShape) -> Iterator[Placed]:
    model, tp = shape.model, shape.parallel.tp
    found = []
    if model.num_dense_layers:
        found.append(("activation", shape.tokens, model.ffn_hidden_size // tp))
    if (moe := model.moe) is not None:
        found.append(("experts_activation", shape.tokens * moe.top_k, moe.ffn_hidden_size))
        if moe.shared_ffn_hidden_size:
            width = moe.shared_ffn_hidden_size // tp
            found.append(("shared_activation", shape.tokens, width))
    for role, tokens, width in found:
        for phase in (Phase.FWD, Phase.BWD):
            op = Activation(
                tokens=tokens,
                width=width,
                kind=model.activation,
                dtype=shape.plain_dtype,
                phase=phase,
            )
            yield _label(shape, role, phase), op


def ropes(shape: LayerShape) -> Iterator[Placed]:
    """Rotation of q and k. MLA rotates one key head shared by all, and the rope part of q."""
    model, tp = shape.model, shape.parallel.tp
    if model.max_positions:
        return
    mla = model.mla
    for phase in (Phase.FWD, Phase.BWD):
        op = Rope(
            batch=shape.mbs,
            seq=shape.seq_len,
            heads=model.num_heads // tp,
            kv_heads=1 if mla else model.num_kv_heads // tp,
            head_dim=mla.qk_rope_head_dim if mla else model.head_dim,
            dtype=shape.plain_dtype,
            phase=phase,
        )
        yield _label(shape, "rope", phase), op


def losses(shape: LayerShape) -> Iterator[Placed]:
    vocab = shape.model.vocab_size // shape.parallel.tp
    for chunks, role in ((1, "loss"), (8, "loss_chunked")):
        if chunks > shape.tokens:
            continue
        for phase in (Phase.FWD, Phase.BWD):
            op = CrossEntropy(
                tokens=shape.tokens,
                vocab=vocab,
                chunks=chunks,
                dtype=shape.plain_dtype,
                phase=phase,
            )
            yield _label(shape, role, phase), op


def optimizers(shape: LayerShape) -> Iterator[Placed]:
    """AdamW over this rank's share of one layer, and of the embedding and head."""
    model, parallel = shape.model, shape.parallel
    shared = parallel.tp * parallel.dp_shard
    sizes = {}
    if model.num_dense_layers:
        sizes["optimizer_layer"] = model.layer_params(moe=False) / shared
    if (moe := model.moe) is not None:
        gates = 3 if model.activation == "swiglu" else 2
        experts = gates * moe.num_experts * moe.ffn_hidden_size * model.hidden_size
        others = model.layer_params(moe=True) - experts
        # ep borrows the shard axis; what is left of it shards each expert.
        expert_shards = max(parallel.ep, parallel.dp_shard)
        sizes["optimizer_moe_layer"] = others / shared + experts / expert_shards
    sizes["optimizer_ends"] = (model.num_embedding_params + model.head_params) / shared
    for role, num_params in sizes.items():
        op = Optimizer(num_params=max(1, round(num_params)), kind="adamw", dtype=DType.FP32)
        yield Label(model=model.name, role=role, phase=Phase.OPTIM, mbs=shape.mbs), op


# Families that a model shapes, in the order of `op all`.
BY_FAMILY = {
    "gemm": gemms,
    "grouped-gemm": grouped_gemms,
    "attention": attentions,
    "norm": norms,
    "activation": activations,
    "rope": ropes,
    "cross-entropy": losses,
    "optimizer": optimizers,
}
