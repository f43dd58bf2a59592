"""The attention kernel of a layer on one rank, and what comes before it."""

from dataclasses import replace

from stepmark.model.layers import IndexerConfig, Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention, Phase
from stepmark.model.ops.attention import masked_pairs
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import Inputs
from stepmark.step.module import Module, Param, between
from stepmark.step.workload import Kernel


def attention_core(
    model: ModelConfig, layer: Layer, inputs: Inputs, axes: ParallelConfig
) -> Attention:
    """Return softmax(q k.T) v of a layer's keys. model: with the widths of the layer.

    Under context parallelism it stands for a rank's two chunks (TreeBuilder._scores). With a
    window each of their queries has as many keys as one has on average, to the nearest.
    """
    cp = axes.cp
    heads = model.num_heads // axes.tp
    batch, seq_q, window = inputs.mbs, inputs.seq_len // cp, layer.window
    seq_kv = inputs.seq_len // 2 if cp > 1 else 0
    if cp > 1 and window:
        seq_kv = round(masked_pairs(inputs.seq_len, window) / inputs.seq_len)
        window = 0
    if model.mla and model.mla.indexer:  # as many pairs as in a window of this size
        window = model.mla.indexer.top_k
    packing = model.packing
    if packing is not None:  # a rank of cp has an equal part of each piece
        packing = packing.scaled(1 / cp)
    varlen: tuple[int, ...] = ()
    if 0 < layer.chunk < seq_q:  # chunks are sequences of their own
        whole, rest = divmod(seq_q, layer.chunk)
        if rest:
            varlen = (*(layer.chunk,) * whole, rest) * batch
            batch, seq_q = 1, batch * seq_q
        else:
            batch, seq_q = batch * whole, layer.chunk
    return Attention(
        batch=batch,
        seq_q=seq_q,
        seq_kv=seq_kv or seq_q,
        heads=heads,
        kv_heads=heads if model.mla else max(1, model.num_kv_heads // axes.tp),
        head_dim_qk=model.d_qk,
        head_dim_v=model.d_v,
        causal=cp == 1,
        window=window if window < seq_q else 0,
        varlen=varlen,
        piece_mean=packing.mean if packing else 0.0,
        piece_max=packing.longest if packing else 0.0,
        sinks=model.has_sinks,
        softcap=model.softcap,
        dtype=inputs.plain_dtype,
    )


def head_norm_params(model: ModelConfig, weight: Param, num_heads: int) -> tuple[Param, ...]:
    """Return the parameters of a norm of queries or keys. weight: one over what it norms."""
    match model.qk_norm_kind:
        case "unit":
            return ()
        case "all":
            return (replace(weight, is_partial=False),)
        case "layernorm_each":
            return (replace(weight, shape=(num_heads, model.head_dim), is_partial=False),)
        case "layernorm":
            return weight, replace(weight, name=weight.name.replace("weight", "bias"))
        case _:
            return (weight,)


def index_scores(indexer: IndexerConfig, inputs: Inputs, tokens: int) -> Module:
    """Return the scores by which an indexer chooses keys. tokens: of the rank.

    Scores of all earlier keys are products; its own loss, which trains it, has twice as many
    backward (arXiv:2512.02556, section 2.1). Inputs are detached.
    """
    pairs = inputs.mbs * (inputs.seq_len**2 // 2)
    flops = 2 * pairs * indexer.num_heads * indexer.head_dim
    elements = tokens * (indexer.num_heads + 1) * (indexer.head_dim + 1) + pairs
    size = elements * inputs.plain_dtype.itemsize
    scores = Kernel(name="index_scores", flops=flops, bytes_moved=size)
    back = Kernel(name="index_scores_backward", flops=2 * flops, bytes_moved=2 * size)
    return between("attention.index_scores", (Phase.FWD, scores), (Phase.BWD, back))
