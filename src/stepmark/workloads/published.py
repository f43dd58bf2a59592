"""Published architectures that are no decoders of data/models: GPT-J and BigBird.

Sizes and registration order: transformers 5, models/gptj and models/big_bird, whose default
configurations are EleutherAI/gpt-j-6b and google/bigbird-roberta-base, with their parameter
counts.
"""

from stepmark.workloads.architecture import (
    Architecture,
    Batch,
    Build,
    Module,
    module,
    stored,
    unit,
)


def gpt_j(
    batch: Batch,
    *,
    name: str = "gpt-j-6b",
    hidden: int = 4096,
    heads: int = 16,
    rotated: int = 64,
    ffn: int = 16384,
    vocab: int = 50400,
    layers: int = 28,
) -> Architecture:
    """Return GPT-J, by default with 6,050,882,784 parameters.

    Attention and MLP of a block share one norm and run in parallel.
    """
    attention = module(
        "attn",
        *(batch.linear(f"attn.{part}_proj", hidden, hidden) for part in "qkv"),
        batch.rope("attn.rope", heads, heads, rotated),
        batch.attention("attn.core", heads, hidden // heads),
        module("attn.attn_dropout"),
        batch.linear("attn.out_proj", hidden, hidden),
        module("attn.resid_dropout"),
        registered=[f"attn.{part}_proj" for part in ("k", "v", "q", "out")],
    )
    mlp = module(
        "mlp",
        batch.linear("mlp.fc_in", ffn, hidden, bias=True),
        module("mlp.act", batch.activation("mlp.gelu", ffn)),
        batch.linear("mlp.fc_out", hidden, ffn, bias=True),
        module("mlp.dropout"),
    )
    block = unit(
        "transformer.h",
        batch.norm("ln_1", hidden),
        attention,
        mlp,
        batch.add("residual.attn", hidden),
        batch.add("residual.mlp", hidden),
        times=layers,
        within="transformer",
    )
    table = unit(
        "embedding",
        batch.embedding("transformer.wte", vocab, hidden),
        module("transformer.drop"),
        within="transformer",
    )
    norm = unit("norm", batch.norm("transformer.ln_f", hidden), within="transformer")
    head = unit(
        "head",
        batch.linear("lm_head", vocab, hidden, bias=True),
        batch.loss("loss", vocab),
    )
    return Architecture(
        name=name,
        units=(table, block, norm, head),
        source="https://huggingface.co/EleutherAI/gpt-j-6b, models/gptj",
    )


def bigbird_roberta_base(batch: Batch) -> Architecture:
    """Return BigBird: 128,111,286 parameters, block-sparse attention, table tied to the head.

    The pooler, which the loss does not use, counts as trained (find_unused_parameters of DDP).
    """
    hidden = 768
    heads = 12
    ffn = 3072
    vocab = 50358
    layers = 12
    linears = [
        batch.linear(f"attention.self.{name}", hidden, hidden, bias=True)
        for name in ("query", "key", "value")
    ]
    block = unit(
        "bert.encoder.layer",
        *linears,
        *_block_sparse(batch, heads, hidden // heads),
        batch.linear("attention.output.dense", hidden, hidden, bias=True),
        batch.add("attention.output.residual", hidden),
        batch.norm("attention.output.LayerNorm", hidden),
        batch.linear("intermediate.dense", ffn, hidden, bias=True),
        batch.activation("intermediate.act", ffn),
        batch.linear("output.dense", hidden, ffn, bias=True),
        batch.add("output.residual", hidden),
        batch.norm("output.LayerNorm", hidden),
        times=layers,
    )
    embedding = unit(
        "bert.embeddings",
        batch.embedding("word_embeddings", vocab, hidden),
        batch.embedding("position_embeddings", 4096, hidden),
        batch.embedding("token_type_embeddings", 2, hidden),
        batch.norm("LayerNorm", hidden),
    )
    head = unit(
        "cls.predictions",
        batch.linear("bert.pooler", hidden, hidden, bias=True, rows=batch.mbs),
        stored("bias", vocab, part="decoder"),
        batch.linear("transform.dense", hidden, hidden, bias=True),
        batch.activation("transform.act", hidden),
        batch.norm("transform.LayerNorm", hidden),
        batch.linear("decoder", vocab, hidden, tied="word_embeddings.weight"),
        batch.loss("loss", vocab),
    )
    return Architecture(
        name="bigbird-roberta-base",
        units=(embedding, block, head),
        source="https://huggingface.co/google/bigbird-roberta-base, models/big_bird",
    )


def _block_sparse(batch: Batch, heads: int, head_dim: int) -> list[Module]:
    """Return attention by blocks of 64 (transformers, bigbird_block_sparse_attention).

    The first and last block attend to all keys; the second and the last but one to 7 blocks;
    the others to a window of 3, both ends and 3 random ones. Short sequences are not sparse.
    """
    block = 64
    num_end_blocks = 4
    if batch.seq_len <= (5 + 2 * 3) * block:
        return [batch.attention("attention.core", heads, head_dim, causal=False)]
    sizes = (
        ("attention.ends", 2 * block, batch.seq_len),
        ("attention.second", 2 * block, 7 * block),
        ("attention.middle", batch.seq_len - num_end_blocks * block, 8 * block),
    )
    return [
        batch.attention(name, heads, head_dim, causal=False, seq_q=queries, seq_kv=keys)
        for name, queries, keys in sizes
    ]


PUBLISHED: dict[str, Build] = {
    "gpt-j-6b": gpt_j,
    "bigbird-roberta-base": bigbird_roberta_base,
}
SEQ_LENS = {"gpt-j-6b": 2048, "bigbird-roberta-base": 4096}  # positions of each
