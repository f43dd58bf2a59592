"""Loss and gradients equal those of Hugging Face transformers with the same weights.

fp32 on CPU. Both sides sum in their own order, so that gradients agree to a relative error
of 1e-5 (norm of the difference over the norm), the loss to 1e-6. transformers takes as long to
import as torch, so that only its tests do.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.models import apart, batch, gradients, made
from torch import Tensor, nn

from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model

Named = dict[str, Tensor]


def gpt2(model: ModelConfig) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.max_positions,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn_hidden_size,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def settings(model: ModelConfig) -> dict[str, Any]:
    """What all configurations after Llama's call alike."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.seq_len,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "pad_token_id": None,
    }


def llama(model: ModelConfig) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings(model)))


def qwen2(model: ModelConfig) -> nn.Module:
    import transformers

    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings(model)))


def qwen3(model: ModelConfig) -> nn.Module:
    import transformers

    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings(model)))


def mixtral(model: ModelConfig) -> nn.Module:
    import transformers

    assert model.moe
    config = transformers.MixtralConfig(
        **settings(model) | {"intermediate_size": model.moe.ffn_hidden_size},
        num_local_experts=model.moe.num_experts,
        num_experts_per_tok=model.moe.top_k,
    )
    return transformers.MixtralForCausalLM(config)


def deepseek(model: ModelConfig) -> nn.Module:
    """Without experts: its router is not a softmax."""
    import transformers

    assert model.mla
    config = transformers.DeepseekV3Config(
        **settings(model) | {"head_dim": model.mla.qk_rope_head_dim},
        q_lora_rank=model.mla.q_lora_rank,
        kv_lora_rank=model.mla.kv_lora_rank,
        qk_nope_head_dim=model.mla.qk_nope_head_dim,
        qk_rope_head_dim=model.mla.qk_rope_head_dim,
        v_head_dim=model.mla.v_head_dim,
        first_k_dense_replace=model.num_layers,
        rope_interleave=False,
    )
    made = transformers.DeepseekV3ForCausalLM(config)
    for name, part in made.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            part.variance_epsilon = 1e-5  # 1e-6 there, whatever the configuration says
    return made


def fused(parts: tuple[Tensor, Tensor, Tensor], model: ModelConfig) -> Tensor:
    """Rows of q, k and v as qkv has them: by KV head its queries, its key, its value."""
    shape = (model.num_kv_heads, -1, model.head_dim, *parts[0].shape[1:])
    return torch.cat([part.view(shape) for part in parts], dim=1).flatten(0, 2)


def from_gpt2(theirs: Named, model: ModelConfig) -> Named:
    """Their linear layers are stored transposed."""
    ours = {
        "embedding.tokens.weight": theirs["transformer.wte.weight"],
        "embedding.positions.weight": theirs["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        ours[f"output.norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(model.num_layers):
            here, there = f"blocks.{layer}", f"transformer.h.{layer}"
            q, k, v = theirs[f"{there}.attn.c_attn.{kind}"].t().chunk(3)
            ours |= {
                f"{here}.attention_norm.{kind}": theirs[f"{there}.ln_1.{kind}"],
                f"{here}.attention.qkv.{kind}": fused((q, k, v), model),
                f"{here}.attention.out.{kind}": theirs[f"{there}.attn.c_proj.{kind}"].t(),
                f"{here}.ffn_norm.{kind}": theirs[f"{there}.ln_2.{kind}"],
                f"{here}.ffn.up.{kind}": theirs[f"{there}.mlp.c_fc.{kind}"].t(),
                f"{here}.ffn.down.{kind}": theirs[f"{there}.mlp.c_proj.{kind}"].t(),
            }
    return ours


# Theirs in a layer -> ours in a block.
LLAMA = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.o_proj.weight": "attention.out.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.q_proj.weight": "attention.q.weight",  # of latent attention; else fused
    "self_attn.q_a_proj.weight": "attention.q.down.weight",
    "self_attn.q_a_layernorm.weight": "attention.q.norm.weight",
    "self_attn.q_b_proj.weight": "attention.q.up.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.kv_down.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.kv_up.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn.gate.weight",
    "mlp.up_proj.weight": "ffn.up.weight",
    "mlp.down_proj.weight": "ffn.down.weight",
    "mlp.gate.weight": "ffn.router.weight",
    "mlp.experts.down_proj": "ffn.held.down",
}


def from_llama(theirs: Named, model: ModelConfig) -> Named:
    ours = {
        "embedding.tokens.weight": theirs["model.embed_tokens.weight"],
        "output.norm.weight": theirs["model.norm.weight"],
    }
    if not model.tied_embeddings:
        ours["output.head.weight"] = theirs["lm_head.weight"]
    for layer in range(model.num_layers):
        here, there = f"blocks.{layer}", f"model.layers.{layer}"
        left = {
            name.removeprefix(there + "."): value
            for name, value in theirs.items()
            if name.startswith(there + ".")
        }
        for kind in ("weight", "bias"):
            names = [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
            if names[1] in left:
                q, k, v = (left.pop(name) for name in names)
                ours[f"{here}.attention.qkv.{kind}"] = fused((q, k, v), model)
        if "mlp.experts.gate_up_proj" in left:
            gate, up = left.pop("mlp.experts.gate_up_proj").chunk(2, dim=1)
            ours |= {f"{here}.ffn.held.gate": gate, f"{here}.ffn.held.up": up}
        ours |= {f"{here}.{LLAMA[name]}": value for name, value in left.items()}
    return ours


Case = tuple[
    ModelConfig, Callable[[ModelConfig], nn.Module], Callable[[Named, ModelConfig], Named]
]


def tiny(name: str) -> ModelConfig:
    return find_model(name).tiny()


CASES: dict[str, Case] = {
    "gpt2": (replace(tiny("gpt2-125m"), num_kv_heads=4), gpt2, from_gpt2),
    "llama": (tiny("llama-3.1-8b"), llama, from_llama),
    "llama tied": (replace(tiny("llama-2-7b"), tied_embeddings=True), llama, from_llama),
    "qwen2": (replace(tiny("llama-3.1-8b"), qkv_bias=True), qwen2, from_llama),
    "qwen3": (tiny("qwen3-8b"), qwen3, from_llama),
    "mixtral": (tiny("mixtral-8x7b"), mixtral, from_llama),
    "deepseek-v3 dense": (replace(tiny("deepseek-v3"), moe=None), deepseek, from_llama),
    "deepseek-v2-lite dense": (
        replace(tiny("deepseek-v2-lite"), moe=None),
        deepseek,
        from_llama,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name: str) -> None:
    model, reference, mapped = CASES[name]
    theirs, ours = reference(model), made(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
        values = mapped(dict(theirs.named_parameters()), model)
        for key, parameter in ours.named_parameters():
            parameter.copy_(values.pop(key))
    assert not values, "weights of theirs that ours do not have"

    tokens_BT, labels_BT = batch(model)
    loss = ours(tokens_BT, labels_BT)
    expected = theirs(input_ids=tokens_BT, labels=tokens_BT).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)

    loss.backward()
    expected.backward()
    grads = {key: weight.grad for key, weight in theirs.named_parameters()}
    wanted = mapped({key: grad for key, grad in grads.items() if grad is not None}, model)
    got = gradients(ours)
    assert got.keys() == wanted.keys()
    errors = {key: apart(got[key], wanted[key]) for key in got}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
