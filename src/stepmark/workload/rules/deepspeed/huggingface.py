"""The modules of Hugging Face's decoders, which users train with DeepSpeed.

transformers 5.23, models/llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3,
gpt2: modeling_*.py. A SwiGLU model is Llama's family, any other GPT-2's. Parameters are
numbered in the order of named_parameters(), which is that of a module's __init__, not of its
calls.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stepmark.core.model import ModelConfig
from stepmark.core.module import Module as Leaf
from stepmark.core.workload import Kernel
from stepmark.workload.job import Job
from stepmark.workload.rules.deepspeed.modules import Module, Param, as_leaf
from stepmark.workload.tree import TreeMaker

Registered = dict[str, tuple[Param, ...]]
_Make = Callable[..., tuple["Module", ...]]


def tree_of(job: Job) -> TreeMaker:
    """In Llama's family q, k and v, and gate and up, are linear layers of their own."""
    like_llama = job.model.activation == "swiglu"
    return job.tree("huggingface" if like_llama else "train", sequence_parallel=False)


def _leaves(tree: TreeMaker, *, moe: bool) -> dict[str, Leaf]:
    return {leaf.role: leaf for leaf in tree.block(moe=moe).walk() if leaf.work or leaf.params}


def parts_of(job: Job) -> dict[str, Leaf]:
    """Computation by role of dense and MoE layers, embedding and head."""
    model, tree = job.model, tree_of(job)
    found: dict[str, Leaf] = {}
    for is_moe, count in ((False, model.num_dense_layers), (True, model.num_moe_layers)):
        found |= _leaves(tree, moe=is_moe) if count else {}
    found |= {leaf.role: leaf for leaf in (tree.embedding().inside[0], *tree.output().inside)}
    # Sums of gradients of one input are left out, of q, k and v as of gate and up.
    return {
        role: replace(
            leaf, work=tuple(one for one in leaf.work if not isinstance(one.op, Kernel))
        )
        if leaf.is_linear
        else leaf
        for role, leaf in found.items()
    }


def modules_of(job: Job, *, divided: bool = False) -> tuple[Module, tuple[Param, ...]]:
    """The whole model, and its parameters in the order of their registration.

    divided: stage 3. A linear layer's weight then has its gradient before the bias, as in the
    function that takes the place of torch's (zero/linear.py; GPT-2's layers are Conv1D, which
    it leaves alone), and a block of experts is a leaf (zero/leaf_module_config.py).
    """
    model = job.model
    registered = _register(job)
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


def _register(job: Job) -> Registered:
    """Parameters by module, numbered in the order of registration."""
    model, tree = job.model, tree_of(job)
    sizes: dict[str, list[int]] = {}
    for name, one in zip(("embed", "positions"), tree.embedding().inside, strict=False):
        sizes[name] = [param.numel for param in one.params]
    kinds = {
        is_moe: _in_order(model, _leaves(tree, moe=is_moe))
        for is_moe, count in ((False, model.num_dense_layers), (True, model.num_moe_layers))
        if count
    }
    for at in range(model.num_layers):
        is_moe = at >= model.num_dense_layers
        sizes |= {f"{at}.{name}": numels for name, numels in kinds[is_moe].items()}
    norm, head, _ = tree.output().inside
    sizes["norm"] = [param.numel for param in norm.params]
    if not model.tied_embeddings:
        sizes["lm_head"] = [param.numel for param in head.params]
    found: Registered = {}
    index = 0
    for name, numels in sizes.items():
        found[name] = tuple(
            Param(index=index + place, numel=numel) for place, numel in enumerate(numels)
        )
        index += len(numels)
    return found


_LATENT = "q q_down q_norm q_up kv_down kv_norm kv_up out"
_GROUPED = "q k v out q_norm k_norm"
_MLP = "gate up down"
_SHARED = "shared_gate shared_up shared_down"


def _in_order(model: ModelConfig, leaves: dict[str, Leaf]) -> dict[str, list[int]]:
    """Elements of each module's parameters; all experts are two, after Mixtral's router."""
    names = {"attention.norm": "input_norm", "mlp.norm": "mlp_norm"}
    found: dict[str, list[int]] = {}
    for role, leaf in leaves.items():
        name = "experts" if "experts_" in role else role.partition(".")[2]
        sizes = found.setdefault(names.get(role, name), [])
        sizes += [param.numel for param in leaf.params]
    attention = _LATENT if model.mla else _GROUPED
    is_mixtral = not (model.qk_norm or (model.moe and model.moe.shared_ffn_hidden_size))
    routed = "router experts" if is_mixtral else "experts router"
    order = f"{attention} {_MLP} {routed} {_SHARED} input_norm mlp_norm"
    if model.activation != "swiglu":
        order = "input_norm qkv out mlp_norm up down"
    return {name: found[name] for name in order.split() if found.get(name)}


def _plain(name: str) -> Module:
    """A module without parameters whose work is counted elsewhere: hooks run all the same."""
    return Module(name=name)


def _between(*parts: str) -> Module:
    return Module(name="", parts=parts, hooked=False)


def _llama_layer(model: ModelConfig, leaf: _Make, divided: bool) -> Module:
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


def _gated(leaf: _Make, prefix: str) -> tuple[Module, ...]:
    return (
        *leaf(f"{prefix}gate", f"mlp.{prefix}gate"),
        _plain("act"),
        *leaf(f"{prefix}up", f"mlp.{prefix}up"),
        _between(f"mlp.{prefix}activation"),
        *leaf(f"{prefix}down", f"mlp.{prefix}down"),
    )


def _gpt2_layer(leaf: _Make) -> Module:
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


def _layer(leaf: _Make, attention: Module, mlp: Module) -> Module:
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
