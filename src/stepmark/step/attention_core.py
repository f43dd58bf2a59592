"""The attention kernel of a layer on one rank."""

from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention
from stepmark.model.parallel import ParallelConfig
from stepmark.step.layout import Inputs


def attention_core(
    model: ModelConfig, layer: Layer, inputs: Inputs, axes: ParallelConfig
) -> Attention:
    """Return softmax(q k.T) v of a layer's keys. model: with the widths of the layer.

    Under context parallelism it stands for a rank's two chunks (TreeBuilder._scores).
    """
    cp = axes.cp
    heads = model.num_heads // axes.tp
    batch, seq_q, window = inputs.mbs, inputs.seq_len // cp, layer.window
    if model.mla and model.mla.indexer:  # as many pairs as in a window of this size
        window = model.mla.indexer.top_k
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
        seq_kv=inputs.seq_len // 2 if cp > 1 else seq_q,
        heads=heads,
        kv_heads=heads if model.mla else max(1, model.num_kv_heads // axes.tp),
        head_dim_qk=model.d_qk,
        head_dim_v=model.d_v,
        causal=cp == 1,
        window=window if window < seq_q else 0,
        varlen=varlen,
        sinks=model.has_sinks,
        softcap=model.softcap,
        dtype=inputs.plain_dtype,
    )
