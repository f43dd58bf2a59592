"""What a decoder computes, part by part in the order it runs, on one rank after sharding.

Rules put communication between the parts. Layers and micro-batches are 0: a Run adds its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stepmark.core.ops import Attention, Copy, Norm, Op, Phase
from stepmark.core.workload import ComputeOp, Kernel
from stepmark.workload import layers
from stepmark.workload.job import Job
from stepmark.workload.layers import LayerShape, Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module: its forward operations, and its backward ones in the order they run."""

    module: str
    fwd: tuple[ComputeOp, ...]
    bwd: tuple[ComputeOp, ...]


def forward(parts: Iterable[Part]) -> tuple[ComputeOp, ...]:
    return tuple(op for part in parts for op in part.fwd)


def backward(parts: Iterable[Part]) -> tuple[ComputeOp, ...]:
    return tuple(op for part in reversed(tuple(parts)) for op in part.bwd)


def shape_of(job: Job) -> LayerShape:
    """Context parallelism leaves a rank its share of each sequence's tokens."""
    return LayerShape(
        model=job.model,
        parallel=job.parallel,
        mbs=job.mbs,
        seq_len=job.model.seq_len // job.parallel.cp,
        dtype=job.dtype,
    )


def layer(job: Job, *, moe: bool = False, sequence_parallel: bool = True) -> tuple[Part, ...]:
    """One block: attention.* and then mlp.*, or router, experts.* and shared.* of an MoE layer.

    Residual sums are parts of their own ("attention.residual").
    """
    return (
        *attention(job, sequence_parallel=sequence_parallel),
        *(experts(job, sequence_parallel=sequence_parallel) if moe else ()),
        *(() if moe else mlp(job, sequence_parallel=sequence_parallel)),
    )


def attention(job: Job, *, sequence_parallel: bool = True) -> tuple[Part, ...]:
    """norm, projections, q/k norms, rope, core, out, residual."""
    shape = shape_of(job)
    linears = _by_role(layers.attention_linears(shape))
    out = linears.pop("out")
    normed = _by_role(layers.norms(shape))
    inner = [(role, normed[role]) for role in ("q_norm", "k_norm", "kv_norm") if role in normed]
    return (
        _norm(job, "attention.norm", sequence_parallel=sequence_parallel),
        *(_part(f"attention.{role}", placed) for role, placed in linears.items()),
        *(_part(f"attention.{role}", placed) for role, placed in inner),
        *_ropes(shape),
        _part("attention.core", _scores(job, shape)),
        _part("attention.out", out),
        _residual(job, "attention.residual", sequence_parallel=sequence_parallel),
    )


def mlp(job: Job, *, sequence_parallel: bool = True) -> tuple[Part, ...]:
    """norm, gate_up or up, activation, down, residual of a dense layer."""
    shape = shape_of(job)
    linears = _by_role(layers.mlp_linears(shape))
    up = "gate_up" if "gate_up" in linears else "up"
    return (
        _norm(job, "mlp.norm", sequence_parallel=sequence_parallel),
        _part(f"mlp.{up}", linears[up]),
        _part("mlp.activation", _by_role(layers.activations(shape))["activation"]),
        _part("mlp.down", linears["down"]),
        _residual(job, "mlp.residual", sequence_parallel=sequence_parallel),
    )


def experts(job: Job, *, sequence_parallel: bool = True) -> tuple[Part, ...]:
    """norm, router, experts.*, shared.* and residual of an MoE layer, routing balanced."""
    shape = shape_of(job)
    linears = _by_role(layers.mlp_linears(shape))
    grouped = _by_role(layers.grouped_gemms(shape))
    active = _by_role(layers.activations(shape))
    up = "experts_gate_up" if "experts_gate_up" in grouped else "experts_up"
    shared = [
        role for role in ("shared_gate_up", "shared_up", "shared_down") if role in linears
    ]
    found = [
        _norm(job, "mlp.norm", sequence_parallel=sequence_parallel),
        _part("mlp.router", linears["router"]),
        _part(f"mlp.{up}", grouped[up]),
        _part("mlp.experts_activation", active["experts_activation"]),
        _part("mlp.experts_down", grouped["experts_down"]),
    ]
    if shared:
        found.append(_part(f"mlp.{shared[0]}", linears[shared[0]]))
        found.append(_part("mlp.shared_activation", active["shared_activation"]))
        found.append(_part("mlp.shared_down", linears["shared_down"]))
    found.append(_residual(job, "mlp.residual", sequence_parallel=sequence_parallel))
    return tuple(found)


def embedding(job: Job) -> Part:
    """Rows looked up; their gradients added into the table."""
    num_bytes = job.tokens * job.model.hidden_size * job.dtype.itemsize
    scatter = Kernel(name="embedding_backward", flops=0, bytes_moved=3 * num_bytes)
    return Part(
        module="embedding",
        fwd=(_compute("embedding", Phase.FWD, Copy(num_bytes=num_bytes), layer=None),),
        bwd=(_compute("embedding", Phase.WGRAD, scatter, layer=None),),
    )


def head(job: Job, *, sequence_parallel: bool = True) -> tuple[Part, ...]:
    """Final norm, output projection, loss. They belong to no layer."""
    shape = shape_of(job)
    loss = [one for one in layers.losses(shape) if one[0].role == "loss"]
    found = (
        _norm(job, "head.norm", sequence_parallel=sequence_parallel),
        _part("head", layers.head_linear(shape)),
        _part("loss", loss),
    )
    return tuple(_without_layer(part) for part in found)


def _part(module: str, placed: Iterable[Placed]) -> Part:
    """What several operators of one module do; backward in reverse order of the forward."""
    listed = list(placed)
    fwd = [(label, op) for label, op in listed if label.phase is Phase.FWD]
    bwd = [(label, op) for label, op in listed if label.phase is not Phase.FWD]
    return Part(
        module=module,
        fwd=tuple(_compute(module, Phase.FWD, op) for _, op in fwd),
        bwd=tuple(_compute(module, label.phase or Phase.BWD, op) for label, op in bwd),
    )


def _compute(module: str, phase: Phase, op: Op | Kernel, layer: int | None = 0) -> ComputeOp:
    return ComputeOp(op=op, phase=phase, module=module, layer=layer, microbatch=0)


def _without_layer(part: Part) -> Part:
    return replace(
        part,
        fwd=tuple(replace(op, layer=None) for op in part.fwd),
        bwd=tuple(replace(op, layer=None) for op in part.bwd),
    )


def _by_role(placed: Iterable[Placed]) -> dict[str, list[Placed]]:
    found: dict[str, list[Placed]] = {}
    for label, op in placed:
        found.setdefault(label.role, []).append((label, op))
    return found


def _tokens(job: Job, *, sequence_parallel: bool) -> int:
    """Rows of the residual stream on this rank."""
    return job.tokens // job.parallel.tp if sequence_parallel else job.tokens


def _norm(job: Job, module: str, *, sequence_parallel: bool) -> Part:
    placed = _by_role(layers.norms(shape_of(job)))["norm"]
    rows = _tokens(job, sequence_parallel=sequence_parallel)
    return _part(module, ((label, _with_rows(op, rows)) for label, op in placed))


def _with_rows(op: Op, rows: int) -> Op:
    return replace(op, tokens=rows) if isinstance(op, Norm) else op


def _residual(job: Job, module: str, *, sequence_parallel: bool) -> Part:
    """x + f(x): two read, one written. Backward the gradient is passed on, and added."""
    rows = _tokens(job, sequence_parallel=sequence_parallel)
    moved = 3 * rows * job.model.hidden_size * job.dtype.itemsize
    add = Kernel(name="add", flops=0, bytes_moved=moved)
    return Part(
        module=module,
        fwd=(_compute(module, Phase.FWD, add),),
        bwd=(_compute(module, Phase.BWD, add),),
    )


def _ropes(shape: LayerShape) -> Iterator[Part]:
    placed = list(layers.ropes(shape))
    if placed:
        yield _part("attention.rope", placed)


def _scores(job: Job, shape: LayerShape) -> Iterator[Placed]:
    """Under context parallelism each rank has a chunk of the head and one of the tail.

    Together their queries see as many pairs as seq_len / cp queries do that see seq_len / 2
    keys each: the count is exact, the shape stands for the two chunks.
    """
    cp, seq_len = job.parallel.cp, job.model.seq_len
    for label, op in layers.attentions(shape):
        if cp > 1 and isinstance(op, Attention):
            yield label, replace(op, seq_kv=seq_len // 2, causal=False)
        else:
            yield label, op
