"""The modules of Hugging Face's decoders, for DeepSpeed.

transformers 5.23, models/llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3,
gpt2: modeling_*.py. A SwiGLU model is Llama's family, any other GPT-2's. Parameters are
numbered in the order of named_parameters(), which is that of a module's __init__, not of its
calls.
"""

from dataclasses import replace

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.step.module import Module
from stepmark.step.tree import TreeBuilder
from stepmark.step.workload import Kernel
from stepmark.workloads.architecture import Architecture, Unit, module, unit
from stepmark.workloads.job import Job

_LATENT = "q_down q_norm q_up q kv_down kv_norm kv_up"  # as called
_GROUPED = "q q_norm k k_norm v"
_LATENT_REGISTERED = "q q_down q_norm q_up kv_down kv_norm kv_up out"
_GROUPED_REGISTERED = "q k v out q_norm k_norm"


def is_llama(model: ModelConfig) -> bool:
    """Return whether q, k and v, and gate and up, are separate linear layers."""
    return model.is_gated


def architecture(job: Job) -> Architecture:
    """Return the whole model as Hugging Face builds it."""
    model = job.model
    check(model)
    tree = job.tree("huggingface" if is_llama(model) else "train", sequence_parallel=False)
    embed, *positions = tree.embedding().inside
    # Llama's family computes its rotary table here, GPT-2 has a dropout.
    last = module("rotary", in_backward=False) if is_llama(model) else module("drop")
    units = [unit("embedding", embed, *positions, last, within="model")]
    names = set[str]()
    for first, end, layer in model.layer_runs(0, model.num_layers):
        stem = "moe" if layer.has_experts else "layer"
        name = f"{stem}.{first}" if stem in names else stem
        names.add(name)
        units.append(replace(_layers(model, tree, layer, name), times=end - first))
    norm, head, loss = (_product(leaf) for leaf in tree.output().inside)
    if model.tied_embeddings:
        head = replace(head, params=(), uses=(embed.params[0].name,))
    units += [unit("norm", norm, within="model"), unit("head", head, loss)]
    return Architecture(name=model.name, units=tuple(units))


def check(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose modules this does not know."""
    unknown = {
        "a layer without attention or without FFN": any(
            layer.mixer != "attention" or not layer.ffn for layer in model.layers
        ),
        "norms behind attention and FFN": model.norm_placement != "pre",
        "attention beside the FFN": model.is_parallel,
        "a norm of the embedding": model.embedding_norm,
        "gates of attention": bool(model.gate),
        "sinks": model.has_sinks,
        "an indexer": model.mla is not None and model.mla.indexer is not None,
        "gates, norms or latent widths of experts": model.moe is not None
        and (model.moe.shared_gate or model.moe.has_norms or model.moe.latent_size > 0),
        "normed values, or values that are keys": model.v_norm
        or any(model.of_layer(layer).shares_kv for layer in model.pattern),
        "layer norms of queries and keys": model.qk_norm
        and model.qk_norm_kind.startswith("layernorm"),
        "xIELU": model.activation == "xielu",
        "scaled layers": model.layer_scale,
        "rotated widths of single layers": any(layer.rotary_dim for layer in model.pattern),
        "embeddings per layer": model.per_layer_width > 0,
        "layers that share keys and values": not all(layer.has_kv for layer in model.pattern),
        "values of another width than keys": model.value_head_dim > 0,
        "scaled embeddings, values, residuals or logits": any(
            factor != 1
            for factor in (
                *(model.embedding_multiplier, model.value_multiplier),
                *(model.residual_multiplier, model.logit_multiplier),
            )
        ),
        "capped logits": model.logit_softcap > 0,
        "multi-token prediction": model.num_mtp_layers > 0,
    }
    if words := [what for what, is_there in unknown.items() if is_there]:
        allowed = f"a model without {' or '.join(words)} for deepspeed"
        raise ConfigError("model", model.name, allowed)


def _layers(model: ModelConfig, tree: TreeBuilder, layer: Layer, name: str) -> Unit:
    """Return one layer of a kind."""
    # By name: "input_norm", "q", "gate", "shared_up", "attention.residual".
    leaves: dict[str, Module] = {}
    for leaf in tree.block(layer).walk():
        if leaf.role:
            part = leaf.role.partition(".")[2]
            if part in ("residual", "activation"):
                part = leaf.role
            part = {"attention.norm": "input_norm", "mlp.norm": "mlp_norm"}.get(leaf.role, part)
            leaves[part] = replace(_product(leaf), name=part)
    make = _llama if is_llama(model) else _gpt2
    attention, mlp = make(model, leaves)
    order = ("attention", "mlp", "input_norm", "mlp_norm")
    return unit(
        name,
        leaves["input_norm"],
        attention,
        leaves["attention.residual"],
        leaves["mlp_norm"],
        mlp,
        leaves["mlp.residual"],
        times=1,
        registered=order if is_llama(model) else (),
        within="model",
    )


def _product(leaf: Module) -> Module:
    """Leave out the sums of the input's gradients, of q, k and v as of gate and up."""
    if not leaf.is_linear:
        return leaf
    return replace(leaf, work=tuple(op for op in leaf.work if not isinstance(op.op, Kernel)))


def _llama(model: ModelConfig, leaves: dict[str, Module]) -> tuple[Module, Module]:
    called = _LATENT if model.mla else _GROUPED
    registered = _LATENT_REGISTERED if model.mla else _GROUPED_REGISTERED
    attention = module(
        "attention",
        *(leaves[name] for name in called.split() if name in leaves),
        *(leaves[name] for name in ("rope", "core") if name in leaves),
        leaves["out"],
        registered=[name for name in registered.split() if name in leaves],
    )
    if "router" not in leaves:
        return attention, _gated("mlp", leaves, "")
    inside = [leaves["router"], _experts(leaves)]
    if "shared_gate" in leaves:
        inside.append(_gated("shared", leaves, "shared_"))
    is_mixtral = not (model.qk_norm or (model.moe and model.moe.shared_ffn_hidden_size))
    routed = ("router", "experts") if is_mixtral else ("experts", "router")
    order = (*routed, "shared")[: len(inside)]
    return attention, module("mlp", *inside, registered=order)


def _experts(leaves: dict[str, Module]) -> Module:
    """Return all experts as one module with two parameters."""
    steps = [leaves[f"experts_{name}"] for name in ("gate_up", "activation", "down")]
    fwd = [op for leaf in steps for op in leaf.fwd]
    bwd = [op for leaf in reversed(steps) for op in leaf.bwd]
    return Module(
        name="experts",
        role="experts",
        work=(*fwd, *bwd),
        params=tuple(param for leaf in steps for param in leaf.params),
        inside=(module("act"),),
    )


def _gated(name: str, leaves: dict[str, Module], prefix: str) -> Module:
    gate, up, down = (leaves[prefix + part] for part in ("gate", "up", "down"))
    activation = leaves[f"{prefix}activation" if prefix else "mlp.activation"]
    return module(name, gate, module("act"), up, activation, down)


def _gpt2(model: ModelConfig, leaves: dict[str, Module]) -> tuple[Module, Module]:
    core = [leaves[name] for name in ("rope", "core") if name in leaves]
    attention = module("attention", leaves["qkv"], *core, leaves["out"], module("drop"))
    activation = replace(leaves["mlp.activation"], name="act", is_module=True)
    return attention, module("mlp", leaves["up"], activation, leaves["down"], module("drop"))
