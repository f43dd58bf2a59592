"""Llama as Hugging Face builds it, written down by hand for `stepmark workload generate`.

    stepmark workload generate --model examples/llama_workload.py:llama_7b \
        --framework deepspeed --world-size 128 --gbs 512 --seq-len 4096

Modules are in the order they run; `registered` is the order of the constructor where it
differs. docs/howto/custom-models.md explains each word.
"""

from stepmark.workloads.architecture import Architecture, Batch, Module, module, unit


def llama_7b(batch: Batch) -> Architecture:
    """6,738,415,616 parameters."""
    return llama(
        batch, name="llama-7b", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000
    )


def llama(
    batch: Batch, *, name: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int
) -> Architecture:
    """Any width; as many key and value heads as query heads."""
    decoder_layer = unit(
        "layers",
        batch.norm("attention.norm", hidden, kind="rmsnorm"),
        attention(batch, hidden, heads),
        batch.add("attention.residual", hidden),
        batch.norm("mlp.norm", hidden, kind="rmsnorm"),
        mlp(batch, hidden, ffn),
        batch.add("mlp.residual", hidden),
        times=layers,
        registered=("attention", "mlp", "attention.norm", "mlp.norm"),
        within="model",
    )
    embed_tokens = unit(
        "embed_tokens",
        batch.embedding("embedding", vocab, hidden),
        module("rotary", in_backward=False),
        within="model",
    )
    norm = unit("norm", batch.norm("head.norm", hidden, kind="rmsnorm"), within="model")
    lm_head = unit("lm_head", batch.linear("head", vocab, hidden), batch.loss("loss", vocab))
    return Architecture(name=name, units=(embed_tokens, decoder_layer, norm, lm_head))


def attention(batch: Batch, hidden: int, heads: int) -> Module:
    head_dim = hidden // heads
    return module(
        "attention",
        batch.linear("attention.q", hidden, hidden),
        batch.linear("attention.k", hidden, hidden),
        batch.linear("attention.v", hidden, hidden),
        batch.rope("attention.rope", heads, heads, head_dim),
        batch.attention("attention.core", heads, head_dim),
        batch.linear("attention.out", hidden, hidden),
    )


def mlp(batch: Batch, hidden: int, ffn: int) -> Module:
    return module(
        "mlp",
        batch.linear("mlp.gate", ffn, hidden),
        module("mlp.silu"),
        batch.linear("mlp.up", ffn, hidden),
        batch.activation("mlp.activation", ffn, kind="swiglu"),
        batch.linear("mlp.down", hidden, ffn),
    )
