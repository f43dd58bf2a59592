"""The modules of Hugging Face's decoders, which users train with DeepSpeed.

transformers 5.23, models/llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3,
gpt2: modeling_*.py. A SwiGLU model is Llama's family, any other GPT-2's. Parameters are
numbered in the order of named_parameters(), which is that of a module's __init__, not of its
calls. Over 250 lines because trees and sizes go by the same names.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from stepmark.core.model import ModelConfig
from stepmark.core.ops import Phase
from stepmark.core.workload import ComputeOp
from stepmark.workload import decoder, layers
from stepmark.workload.decoder import Part
from stepmark.workload.job import Job
from stepmark.workload.rules.deepspeed.modules import Module, Param, as_leaf

Registered = dict[str, tuple[Param, ...]]
_Leaf = Callable[..., tuple["Module", ...]]


def parts_of(job: Job) -> dict[str, Part]:
    """Computation by module of dense and MoE layers, embedding and head.

    Query, key and value, and gate and up, are linear layers of their own in Llama's family.
    """
    model = job.model
    found: list[Part] = []
    for is_moe, count in ((False, model.num_dense_layers), (True, model.num_moe_layers)):
        if count:
            found += decoder.layer(job, moe=is_moe, sequence_parallel=False)
    found += [decoder.embedding(job), *decoder.head(job, sequence_parallel=False)]
    parts = {part.module: part for part in found}
    if model.activation != "swiglu":
        return parts
    pieces = {"mlp.gate_up": ("gate", "up"), "mlp.shared_gate_up": ("shared_gate", "shared_up")}
    shared = model.moe.shared_ffn_hidden_size if model.moe else 0
    widths = {"mlp.gate_up": model.ffn_hidden_size, "mlp.shared_gate_up": shared}
    for fused, names in pieces.items():
        if parts.pop(fused, None) is not None:
            for name in names:
                parts[f"mlp.{name}"] = _linear(job, f"mlp.{name}", widths[fused])
    if parts.pop("attention.qkv", None) is not None:
        for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads)):
            width = heads * model.head_dim
            parts[f"attention.{name}"] = _linear(job, f"attention.{name}", width)
        parts["attention.v"] = _linear(job, "attention.v", model.num_kv_heads * model.head_dim)
    return parts


def modules_of(
    model: ModelConfig, *, divided: bool = False
) -> tuple[Module, tuple[Param, ...]]:
    """The whole model, and its parameters in the order of their registration.

    divided: stage 3. A linear layer's weight then has its gradient before the bias, as in the
    function that takes the place of torch's (zero/linear.py; GPT-2's layers are Conv1D, which
    it leaves alone), and a block of experts is a leaf (zero/leaf_module_config.py).
    """
    registered = _register(model)
    like_llama = model.activation == "swiglu"

    def leaf(at: int, name: str, *parts: str) -> tuple[Module, ...]:
        params = registered.get(f"{at}.{name}", ())
        if not params:
            return ()
        as_registered = name.endswith("norm") or (divided and like_llama and name != "experts")
        grads = params if as_registered else params[::-1]
        return (Module(name=name, params=params, grads=grads, parts=parts),)

    make = (lambda own: _llama_layer(model, own, divided)) if like_llama else _gpt2_layer
    blocks = tuple(_numbered(make(partial(leaf, at)), at) for at in range(model.num_layers))
    embed = registered["embed"]
    front = [
        Module(name="embed", params=embed, grads=embed, parts=("embedding",), input_grad=False)
    ]
    if model.max_positions:
        rows = registered["positions"]
        front.append(Module(name="positions", params=rows, grads=rows, input_grad=False))
    # Llama's family makes its rotary table here, GPT-2 drops out.
    front.append(Module(name="rotary", in_backward=False) if like_llama else _plain("drop"))
    norm = registered["norm"]
    last = Module(name="norm", params=norm, grads=norm, parts=("head.norm",))
    own = registered.get("lm_head", ())
    head = Module(name="lm_head", params=own or embed, grads=own, parts=("head",))
    body = Module(name="model", children=(*front, *blocks, last))
    root = Module(name="", children=(body, head, _between("loss")))
    seen = {param.index: param for params in registered.values() for param in params}
    return root, tuple(seen[index] for index in sorted(seen))


def _register(model: ModelConfig) -> Registered:
    sizes: dict[str, tuple[int, ...]] = {"embed": (model.vocab_size * model.hidden_size,)}
    if model.max_positions:
        sizes["positions"] = (model.max_positions * model.hidden_size,)
    moe = model.moe
    for at in range(model.num_layers):
        is_moe = moe is not None and at >= moe.first_dense_layers
        sizes |= {f"{at}.{name}": found for name, found in _layer_sizes(model, is_moe)}
    sizes["norm"] = _norm_sizes(model)
    if not model.tied_embeddings:
        sizes["lm_head"] = (model.vocab_size * model.hidden_size,)
    found: Registered = {}
    index = 0
    for name, numels in sizes.items():
        found[name] = tuple(
            Param(index=index + place, numel=numel) for place, numel in enumerate(numels)
        )
        index += len(numels)
    return found


def _norm_sizes(model: ModelConfig) -> tuple[int, ...]:
    both = model.norm == "layernorm"
    return (model.hidden_size, model.hidden_size) if both else (model.hidden_size,)


def _layer_sizes(model: ModelConfig, is_moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Elements of each module's parameters, in the order of registration."""
    hidden, norm = model.hidden_size, _norm_sizes(model)
    if model.activation != "swiglu":
        width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        yield "input_norm", norm
        yield "qkv", _linear_sizes(hidden, width, model.qkv_bias or model.linear_bias)
        yield "out", _linear_sizes(model.num_heads * model.d_v, hidden, model.linear_bias)
        yield "mlp_norm", norm
        yield "up", _linear_sizes(hidden, model.ffn_hidden_size, model.linear_bias)
        yield "down", _linear_sizes(model.ffn_hidden_size, hidden, model.linear_bias)
        return
    yield from _attention_sizes(model)
    yield from _moe_sizes(model) if is_moe else _mlp_sizes("", model, model.ffn_hidden_size)
    yield "input_norm", norm
    yield "mlp_norm", norm


def _attention_sizes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = model.hidden_size, model.num_heads
    if (mla := model.mla) is not None:
        if mla.q_lora_rank is None:
            yield "q", (hidden * heads * model.d_qk,)
        else:
            yield "q_down", (hidden * mla.q_lora_rank,)
            yield "q_norm", (mla.q_lora_rank,)
            yield "q_up", (mla.q_lora_rank * heads * model.d_qk,)
        yield "kv_down", (hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim),)
        yield "kv_norm", (mla.kv_lora_rank,)
        yield "kv_up", (mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim),)
        yield "out", (heads * mla.v_head_dim * hidden,)
        return
    bias = model.qkv_bias or model.linear_bias
    kv_width = model.num_kv_heads * model.head_dim
    for name, width in (("q", heads * model.head_dim), ("k", kv_width), ("v", kv_width)):
        yield name, _linear_sizes(hidden, width, bias)
    yield "out", _linear_sizes(heads * model.head_dim, hidden, model.linear_bias)
    if model.qk_norm:
        yield "q_norm", (model.head_dim,)
        yield "k_norm", (model.head_dim,)


def _mlp_sizes(
    prefix: str, model: ModelConfig, width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate", _linear_sizes(model.hidden_size, width, model.linear_bias)
    yield prefix + "up", _linear_sizes(model.hidden_size, width, model.linear_bias)
    yield prefix + "down", _linear_sizes(width, model.hidden_size, model.linear_bias)


def _moe_sizes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All experts are two parameters. Only Mixtral registers its router first."""
    if (moe := model.moe) is None:
        return
    router = ("router", (moe.num_experts * model.hidden_size,))
    one = moe.num_experts * model.hidden_size * moe.ffn_hidden_size
    is_mixtral = not (model.qk_norm or moe.shared_ffn_hidden_size)
    if is_mixtral:
        yield router
    yield "experts", (2 * one, one)
    if not is_mixtral:
        yield router
    if moe.shared_ffn_hidden_size:
        yield from _mlp_sizes("shared_", model, moe.shared_ffn_hidden_size)


def _linear_sizes(inputs: int, outputs: int, bias: bool) -> tuple[int, ...]:
    return (inputs * outputs, outputs) if bias else (inputs * outputs,)


def _linear(job: Job, module: str, width: int) -> Part:
    shape = decoder.shape_of(job)
    placed = list(layers.linear(shape, module, job.tokens, width, job.model.hidden_size))
    made = [
        ComputeOp(op=op, phase=label.phase or Phase.BWD, module=module, layer=0, microbatch=0)
        for label, op in placed
    ]
    return Part(module=module, fwd=(made[0],), bwd=tuple(made[1:]))


def _plain(name: str) -> Module:
    """A module without parameters whose work is counted elsewhere: hooks run all the same."""
    return Module(name=name)


def _between(*parts: str) -> Module:
    return Module(name="", parts=parts, hooked=False)


def _llama_layer(model: ModelConfig, leaf: _Leaf, divided: bool) -> Module:
    projections = (
        "q_down q_norm q_up q k_norm kv_down kv_norm kv_up k v"
        if model.mla
        else "q q_norm k k_norm v"
    )
    attention = Module(
        name="attention",
        children=(
            *(
                module
                for name in projections.split()
                for module in leaf(name, f"attention.{name}")
            ),
            _between("attention.rope", "attention.core"),
            *leaf("out", "attention.out"),
        ),
    )
    if leaf("router"):
        steps = ("mlp.experts_gate_up", "mlp.experts_activation", "mlp.experts_down")
        (experts,) = leaf("experts", *steps)
        routed = (*leaf("router", "mlp.router"), replace(experts, children=(_plain("act"),)))
        shared: tuple[Module, ...] = ()
        if leaf("shared_gate"):
            shared = (Module(name="shared", children=_gated(leaf, "shared_")),)
        mlp = Module(name="mlp", children=(*routed, *shared))
        if divided and model.mla is None:
            mlp = as_leaf(mlp)
    else:
        mlp = Module(name="mlp", children=_gated(leaf, ""))
    return _layer(leaf, attention, mlp)


def _gated(leaf: _Leaf, prefix: str) -> tuple[Module, ...]:
    return (
        *leaf(f"{prefix}gate", f"mlp.{prefix}gate"),
        _plain("act"),
        *leaf(f"{prefix}up", f"mlp.{prefix}up"),
        _between(f"mlp.{prefix}activation"),
        *leaf(f"{prefix}down", f"mlp.{prefix}down"),
    )


def _gpt2_layer(leaf: _Leaf) -> Module:
    attention = Module(
        name="attention",
        children=(
            *leaf("qkv", "attention.qkv"),
            _between("attention.rope", "attention.core"),
            *leaf("out", "attention.out"),
            _plain("drop"),
        ),
    )
    up, down = leaf("up", "mlp.up"), leaf("down", "mlp.down")
    active = replace(_plain("act"), parts=("mlp.activation",))
    mlp = Module(name="mlp", children=(*up, active, *down, _plain("drop")))
    return _layer(leaf, attention, mlp)


def _layer(leaf: _Leaf, attention: Module, mlp: Module) -> Module:
    return Module(
        name="layer",
        children=(
            *leaf("input_norm", "attention.norm"),
            attention,
            _between("attention.residual"),
            *leaf("mlp_norm", "mlp.norm"),
            mlp,
            _between("mlp.residual"),
        ),
    )


def _numbered(module: Module, at: int) -> Module:
    children = tuple(_numbered(child, at) for child in module.children)
    return replace(module, layer=at, children=children)
