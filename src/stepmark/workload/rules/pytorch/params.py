"""Parameters of a plain PyTorch decoder on one tensor-parallel rank: shape, module, readiness.

The modules are those of `stepmark train` (bench/training/transformer.py) and, but for q, k
and v in one matrix, of torchtitan's Llama: linear layers of gate and up apart, the head
without bias.
"""

from collections.abc import Iterator

from stepmark.core.model import ModelConfig
from stepmark.workload.job import Job
from stepmark.workload.units import Param


def embedding_params(job: Job) -> tuple[Param, ...]:
    model = job.model
    table = (model.vocab_size // job.parallel.tp, model.hidden_size)
    found = [Param(name="embedding.tokens.weight", shape=table, part="embedding")]
    if model.max_positions:
        shape = (model.max_positions, model.hidden_size)
        found.append(Param(name="embedding.positions.weight", shape=shape, part="embedding"))
    return tuple(found)


def output_params(job: Job, *, has_table: bool = False) -> tuple[Param, ...]:
    """has_table: the embedding is here; where it is tied the head has no tensor of its own.

    Under tp each of them is a DTensor of its own when FSDP takes them, which gathers and
    reduces the table twice.
    """
    model, tp = job.model, job.parallel.tp
    found = list(_norm("output.norm", "head.norm", model))
    is_copy = model.tied_embeddings and has_table
    if not is_copy or tp > 1:
        shape = (model.vocab_size // tp, model.hidden_size)
        head = Param(name="output.head.weight", shape=shape, part="head", is_copy=is_copy)
        found.append(head)
    return tuple(found)


def block_params(job: Job, *, moe: bool) -> tuple[Param, ...]:
    """Of one layer, in the order of registration."""
    return (
        *_norm("attention_norm", "attention.norm", job.model),
        *(_latent(job.model) if job.model.mla else _attention(job)),
        *_norm("ffn_norm", "mlp.norm", job.model),
        *(_experts(job) if moe else _ffn(job, "ffn", "mlp.", job.model.ffn_hidden_size)),
    )


def _norm(name: str, part: str, model: ModelConfig) -> Iterator[Param]:
    names = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    for one in names:
        shape = (model.hidden_size,)
        yield Param(name=f"{name}.{one}", shape=shape, part=part, is_partial=True, is_norm=True)


def _linear(
    name: str, part: str, rows: int, columns: int, *, bias: int = 0, is_expert: bool = False
) -> Iterator[Param]:
    """bias: rows of it on this rank."""
    yield Param(name=f"{name}.weight", shape=(rows, columns), part=part, is_expert=is_expert)
    if bias:
        yield Param(name=f"{name}.bias", shape=(bias,), part=part)


def _attention(job: Job) -> Iterator[Param]:
    model, tp = job.model, job.parallel.tp
    rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp
    bias = rows if model.qkv_bias or model.linear_bias else 0
    yield from _linear("attention.qkv", "attention.qkv", rows, model.hidden_size, bias=bias)
    if model.qk_norm:
        for one in ("q_norm", "k_norm"):
            yield Param(
                name=f"attention.{one}.weight",
                shape=(model.head_dim,),
                part=f"attention.{one}",
                is_partial=True,
            )
    width = model.num_heads * model.head_dim // tp
    bias = model.hidden_size if model.linear_bias else 0
    yield from _linear("attention.out", "attention.out", model.hidden_size, width, bias=bias)


def _latent(model: ModelConfig) -> Iterator[Param]:
    """bench/training/latent_attention.py; not divided by tp, which is refused."""
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads
    assert mla is not None
    if mla.q_lora_rank is None:
        yield from _linear("attention.q", "attention.q", heads * model.d_qk, hidden)
    else:
        yield from _linear("attention.q.down", "attention.q_down", mla.q_lora_rank, hidden)
        norm = (mla.q_lora_rank,)
        yield Param(name="attention.q.norm.weight", shape=norm, part="attention.q_norm")
        rows = heads * model.d_qk
        yield from _linear("attention.q.up", "attention.q_up", rows, mla.q_lora_rank)
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield from _linear("attention.kv_down", "attention.kv_down", down, hidden)
    norm = (mla.kv_lora_rank,)
    yield Param(name="attention.kv_norm.weight", shape=norm, part="attention.kv_norm")
    rows = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear("attention.kv_up", "attention.kv_up", rows, mla.kv_lora_rank)
    yield from _linear("attention.out", "attention.out", hidden, heads * mla.v_head_dim)


def _ffn(job: Job, name: str, prefix: str, width: int) -> Iterator[Param]:
    model = job.model
    rows, hidden = width // job.parallel.tp, model.hidden_size
    bias = model.linear_bias and name == "ffn"
    if model.activation == "swiglu":
        part = f"{prefix}gate_up"
        yield from _linear(f"{name}.gate", part, rows, hidden, bias=rows if bias else 0)
        yield from _linear(f"{name}.up", part, rows, hidden, bias=rows if bias else 0)
    else:
        yield from _linear(f"{name}.up", f"{prefix}up", rows, hidden, bias=rows if bias else 0)
    down = f"{prefix}down"
    yield from _linear(f"{name}.down", down, hidden, rows, bias=hidden if bias else 0)


def _experts(job: Job) -> Iterator[Param]:
    """bench/training/experts.py: three dimensions, the first over this rank's experts."""
    model, moe = job.model, job.model.moe
    assert moe is not None
    if moe.router_bias:
        shape = (moe.num_experts,)
        yield Param(name="ffn.router_bias", shape=shape, part="mlp.router", is_trained=False)
    yield from _linear("ffn.router", "mlp.router", moe.num_experts, model.hidden_size)
    count, width, hidden = (
        moe.num_experts // job.parallel.ep,
        moe.ffn_hidden_size,
        (model.hidden_size),
    )
    is_gated = model.activation == "swiglu"
    part = "mlp.experts_gate_up" if is_gated else "mlp.experts_up"
    up = (count, width, hidden)
    for one in ("gate", "up") if is_gated else ("up",):
        yield Param(name=f"ffn.held.{one}", shape=up, part=part, is_expert=True)
    down = (count, hidden, width)
    yield Param(name="ffn.held.down", shape=down, part="mlp.experts_down", is_expert=True)
    if moe.num_shared_experts:
        yield from _ffn(job, "ffn.shared", "mlp.shared_", moe.shared_ffn_hidden_size)


def ready_order(params: tuple[Param, ...], *, autocast: bool) -> tuple[Param, ...]:
    """Parameters as their gradients become ready, the last module's first.

    Nodes of autograd run newest first; of one node's parameters the order is that of
    torch 2.13: bias before weight of a linear layer, weight before bias of a norm, and the
    other way round under autocast, whose casts are nodes of their own.
    """
    by_module: dict[str, list[Param]] = {}
    for one in params:
        if one.is_trained:
            by_module.setdefault(one.name.rpartition(".")[0], []).append(one)
    found: list[Param] = []
    for members in reversed(by_module.values()):
        in_order = members[0].is_norm is not autocast and not members[0].is_expert
        found += members if in_order else reversed(members)
    return tuple(found)
