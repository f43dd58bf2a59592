"""Logits and gradients of families equal those of Hugging Face transformers.

The model is what the reader of config.json makes of the family's own configuration, with the
same weights. fp32 on CPU. transformers takes as long to import as torch, so that only its tests
do. Their epsilons are set to ours: they are constants of a norm.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.training.models import apart, batch, gradients, made
from torch import Tensor, nn

from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.training.layers import EPS
from stepmark.training.scans import Lightning
from stepmark.workloads.formats.huggingface.families import FAMILIES
from stepmark.workloads.formats.huggingface.keys import Keys

Named = dict[str, Tensor]

# Names of a module in a layer, theirs and ours, of most families.
NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.sinks": "attention.sinks",
    "self_attn.q_a_proj": "attention.q.down",
    "self_attn.q_a_layernorm": "attention.q.norm",
    "self_attn.q_b_proj": "attention.q.up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "linear_attn.in_proj_qkvz": "attention.qkvz",
    "linear_attn.in_proj_ba": "attention.ba",
    "linear_attn.conv1d": "attention.conv",
    "linear_attn.norm": "attention.gate_norm",
    "linear_attn.out_proj": "attention.out",
    "linear_attn": "attention",
    "mamba.in_proj": "attention.ssm_in",
    "mamba.conv1d": "attention.ssm_conv",
    "mamba.norm": "attention.ssm_norm",
    "mamba.out_proj": "attention.ssm_out",
    "mamba": "attention",
    "mlp.gate": "ffn.router",
    "mlp.router": "ffn.router",
    "mlp.experts.down_proj": "ffn.held.down",
    "mlp.experts.down_proj_bias": "ffn.held.down_bias",
    "mlp.shared_expert_gate": "ffn.shared_weight",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
    "mlp": "ffn",
}
NAMES |= {
    f"mlp.{shared}.{name}_proj": f"ffn.shared.{name}"
    for shared in ("shared_expert", "shared_experts")
    for name in ("gate", "up", "down")
}
GEMMA = {
    "post_attention_layernorm": "attention_norm_after",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_norm_after",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A configuration, and how its parameters differ from most families'.

    shifted: its norms multiply by 1 + weight. swapped: rotary pairs lie next to each other.
    """

    cls: str
    settings: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    shifted: tuple[str, ...] = ()
    swapped: bool = False
    transposed: bool = False  # experts' weights are [in, out]
    prefix: str = "model.layers"


COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPES = {
    kind: {"rope_type": "default", "rope_theta": 500_000.0}
    for kind in ("sliding_attention", "full_attention")
}
MAMBA = {"mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2}
FAMILY_CASES = {
    "gemma2": Family(
        cls="Gemma2",
        settings={"sliding_window": 8, "query_pre_attn_scalar": 25},
        names=GEMMA,
        shifted=("norm",),
    ),
    "gemma3_text": Family(
        cls="Gemma3Text",
        settings={
            "sliding_window": 8,
            "rope_parameters": ROPES,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        names=GEMMA,
        shifted=("norm",),
    ),
    "gpt_oss": Family(
        cls="GptOss",
        settings={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        transposed=True,
    ),
    "olmo2": Family(
        cls="Olmo2",
        names={
            "post_attention_layernorm": "attention_norm",
            "post_feedforward_layernorm": "ffn_norm",
        },
    ),
    "qwen3_next": Family(
        cls="Qwen3Next",
        settings=EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "partial_rotary_factor": 0.5,
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
        shifted=("attention_norm", "ffn_norm", "q_norm", "k_norm", "output.norm"),
    ),
    "qwen2_moe": Family(
        cls="Qwen2Moe",
        settings=EXPERTS
        | {
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "head_dim": 8,
        },
    ),
    "cohere": Family(cls="Cohere", settings={"head_dim": 8, "use_qk_norm": True}, swapped=True),
    "gpt_neox": Family(
        cls="GPTNeoX",
        settings={
            "head_dim": 8,
            "num_key_value_heads": 4,
            "hidden_act": "gelu_new",
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.25},
        },
        names={
            "attention.dense": "attention.out",
            "attention.query_key_value": "attention.qkv",
            "mlp.dense_h_to_4h": "ffn.up",
            "mlp.dense_4h_to_h": "ffn.down",
        },
        prefix="gpt_neox.layers",
    ),
    "glm4": Family(
        cls="Glm4",
        settings={
            "attention_bias": True,
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
        names={
            "post_self_attn_layernorm": "attention_norm_after",
            "post_mlp_layernorm": "ffn_norm_after",
        },
        swapped=True,
    ),
    "granite": Family(
        cls="Granite",
        settings={
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.2,
        },
    ),
    "deepseek_v3": Family(
        cls="DeepseekV3",
        settings=EXPERTS
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "rope_interleave": False,
        },
    ),
    # Dense layers with positions: those without have no norms there.
    "llama4_text": Family(
        cls="Llama4Text",
        settings={
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
            "moe_layers": [],
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        names={
            "feed_forward.gate_proj": "ffn.gate",
            "feed_forward.up_proj": "ffn.up",
            "feed_forward.down_proj": "ffn.down",
        },
        swapped=True,
    ),
    "smollm3": Family(
        cls="SmolLM3", settings={"head_dim": 8, "no_rope_layers": [1, 0], "layer_types": None}
    ),
    "falcon_h1": Family(
        cls="FalconH1",
        settings=MAMBA
        | {"mamba_d_ssm": 32, "mamba_d_state": 8, "mamba_chunk_size": 8, "head_dim": 8},
        names={
            "feed_forward.gate_proj": "ffn.gate",
            "feed_forward.up_proj": "ffn.up",
            "feed_forward.down_proj": "ffn.down",
        },
    ),
    "nemotron_h": Family(
        cls="NemotronH",
        settings={
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "mlp_hidden_act": "relu2",
        },
        names={
            "mixer.in_proj": "attention.ssm_in",
            "mixer.conv1d": "attention.ssm_conv",
            "mixer.norm": "attention.ssm_norm",
            "mixer.out_proj": "attention.ssm_out",
            "mixer.o_proj": "attention.out",
            "mixer.up_proj": "ffn.up",
            "mixer.down_proj": "ffn.down",
            "mixer": "attention",
        },
    ),
}


def reference(name: str) -> tuple[nn.Module, ModelConfig]:
    import transformers

    family = FAMILY_CASES[name]
    config = getattr(transformers, f"{family.cls}Config")(**COMMON | family.settings)
    raw = {
        key: value
        for key, value in config.to_dict().items()
        if value is not None and key[0] != "_"
    }
    fields = FAMILIES[name](Keys(raw, ""))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for part in theirs.modules():
        for attribute in ("variance_epsilon", "eps"):
            if hasattr(part, attribute):
                setattr(part, attribute, EPS)
        if hasattr(part, "time_step_limit"):  # Nemotron-H bounds its steps from below
            part.time_step_limit = (0.0, float("inf"))
    return theirs, replace(ModelConfig(name=name, **fields), seq_len=32)


def paired(x: Tensor, width: int, model: ModelConfig, swapped: bool) -> Tensor:
    """Rows of heads of this width, those of rotary pairs as halves."""
    heads = x.unflatten(0, (-1, width))
    if swapped:
        rotary = model.rotary_dim or width
        order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, width)]
        heads = heads[:, order]
    return heads


def fused(parts: list[Tensor], model: ModelConfig, swapped: bool) -> Tensor:
    """Rows of qkv: per KV head its queries, their gates, its key, its value."""
    q, k, v = parts
    width = model.head_dim
    by_head = [
        paired(k, width, model, swapped),
        v.unflatten(0, (-1, width)),
    ]
    if model.gate:  # theirs has the gate after each query
        queries, gates = q.unflatten(0, (model.num_heads, 2, width)).unbind(1)
        by_head = [queries, gates, *by_head]
    else:
        by_head = [paired(q, width, model, swapped), *by_head]
    shape = (model.num_kv_heads, -1, *k.shape[1:])
    return torch.cat([part.reshape(shape) for part in by_head], dim=1).flatten(0, 1)


def of_layer(left: Named, family: Family, model: ModelConfig) -> Named:
    """Parameters of one layer under our names."""
    mapped = {}
    for kind in ("weight", "bias"):
        for prefix in ("self_attn", "mixer"):
            names = [f"{prefix}.{part}_proj.{kind}" for part in "qkv"]
            if names[1] in left:
                parts = [left.pop(name) for name in names]
                mapped[f"attention.qkv.{kind}"] = fused(parts, model, family.swapped)
    for end in ("", "_bias"):
        if (both := left.pop(f"mlp.experts.gate_up_proj{end}", None)) is not None:
            if family.transposed:  # and gate and up lie next to each other
                gate, up = both[..., ::2], both[..., 1::2]
                gate, up = (x if end else x.mT for x in (gate, up))
            else:
                gate, up = both.chunk(2, dim=1)
            mapped |= {f"ffn.held.gate{end}": gate, f"ffn.held.up{end}": up}
    if (both := left.pop("mlp.gate_up_proj.weight", None)) is not None:
        mapped["ffn.gate.weight"], mapped["ffn.up.weight"] = both.chunk(2)
    names = NAMES | family.names
    for name, value in left.items():
        ours = names.get(name)
        if ours is None:
            module, _, kind = name.rpartition(".")
            ours = f"{names[module]}.{kind}"
        mapped[ours] = as_ours(value, ours, family, model)
    return mapped


def as_ours(value: Tensor, name: str, family: Family, model: ModelConfig) -> Tensor:
    """A parameter in our layout."""
    if family.swapped and name.endswith(("q_norm.weight", "k_norm.weight")):
        rows = paired(value.flatten(), model.head_dim, model, family.swapped)
        return rows.reshape(value.shape)
    if "conv" in name and name.endswith("weight"):
        return value.squeeze(1)
    return value.mT if family.transposed and name == "ffn.held.down" else value


ROUTER_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
ENDS = {
    "embed_tokens": "embedding.tokens",
    "embeddings": "embedding.tokens",
    "embed_in": "embedding.tokens",
    "lm_head": "output.head",
}


def from_theirs(theirs: Named, name: str, model: ModelConfig, one: float) -> Named:
    """Parameters or, with one = 0, gradients under our names."""
    family = FAMILY_CASES[name]
    ours: Named = {}
    layers: dict[str, Named] = {}
    for full, value in theirs.items():
        if full.startswith(family.prefix):
            index, _, rest = full.removeprefix(f"{family.prefix}.").partition(".")
            layers.setdefault(index, {})[rest] = value
        else:
            *_, module, kind = full.split(".")
            ours[f"{ENDS.get(module, 'output.norm')}.{kind}"] = value
    for index, left in layers.items():
        ffn = model.layers[int(index)].ffn
        norm = "ffn_norm" if ffn else "attention_norm"  # Nemotron-H has one a layer
        family = replace(family, names=family.names | {"norm": norm})
        for key, value in of_layer(left, family, model).items():
            ours[f"blocks.{index}.{key}"] = value
    if model.tied_embeddings:
        ours.pop("output.head.weight", None)
    for key, value in ours.items():
        owner = key.rpartition(".")[0].removesuffix("_after")
        if any(owner.endswith(end) for end in family.shifted):
            ours[key] = value + one
    return ours


@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")  # of Gemma's own code
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_logits_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    theirs, model = reference(name)
    ours = made(model)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
        values = from_theirs(dict(theirs.named_parameters()), name, model, 1.0)
        for key, parameter in ours.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values.pop(key))
            else:
                bias = theirs.get_buffer(ROUTER_BIAS.format(key.split(".")[1]))
                parameter.copy_(bias.normal_())
    assert not values, "weights of theirs that ours do not have"

    tokens_BT, _ = batch(model)
    got, expected = ours(tokens_BT), theirs(input_ids=tokens_BT).logits
    assert apart(got, expected) < 1e-5

    scale = torch.randn_like(got)
    (got * scale).sum().backward()
    (expected * scale).sum().backward()
    grads = {
        key: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for key, weight in theirs.named_parameters()
    }
    wanted = from_theirs(grads, name, model, 0.0)
    errors = {key: apart(grad, wanted[key]) for key, grad in gradients(ours).items()}
    assert errors.keys() == wanted.keys()
    assert max(errors.values()) < 1e-4, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("length", [16, 40])
def test_lightning(length: int) -> None:
    """By itself: the residual stream of MiniMax's blocks begins after their norms."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    layer = Layer(mixer="lightning", has_rope=False)
    model = replace(find_model("llama-3.1-8b").tiny(), pattern=(layer,), num_layers=3)
    config = MiniMaxConfig(
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        head_dim=model.head_dim,
        block_size=16,
    )
    theirs = MiniMaxLightningAttention(config, layer_idx=1)
    theirs.norm.variance_epsilon = EPS
    ours = Lightning(model, 1, layer)
    names = {
        "scan_in": "qkv_proj",
        "gate": "output_gate",
        "gate_norm": "norm",
        "out": "out_proj",
    }
    with torch.no_grad():
        for name, reference_name in names.items():
            weight = theirs.get_parameter(f"{reference_name}.weight").add_(0.1)
            ours.get_parameter(f"{name}.weight").copy_(weight)
    x_BTC = torch.randn(2, length, model.hidden_size)
    expected, *_ = theirs(x_BTC, position_embeddings=None, attention_mask=None)
    assert apart(ours(x_BTC), expected) < 1e-5
