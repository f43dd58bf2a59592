"""Roles of a step's operations, as workloads name them, from where the host called them."""

import re
from typing import NamedTuple

from stepmark.step.module import TOGETHER, role_of
from stepmark.step.trace_ops import COARSE, MARK, WHOLE
from stepmark.traces.kineto.event_tables import STACK
from stepmark.traces.kineto.host_ops import FSDP, PHASE_MARKS

_BLOCK = re.compile(r"blocks\.(\d+)(?:\.(.+))?$")
_STACK_LAYER = re.compile(r"(?:^|\.)\w*(?:Block|Layer)_(\d+)(?:\.|$)")
_LEAVES = {"attention_norm": "attention.norm", "ffn_norm": "mlp.norm"}
_RESIDUALS = {"attention": "attention.residual", "ffn": "mlp.residual"}
_ENDS = {"output": "output", "output.head": "head", "output.norm": "head.norm", WHOLE: WHOLE}
_ROTATION = re.compile(r"::(?:mul|add|sub|neg|cat|stack|chunk|view_as_\w+)_?$")
_COMM = re.compile(
    r"c10d|nccl:|gloo:|record_param_comms|all_?gather|reduce_?scatter|all_?reduce"
)
_PRODUCT = re.compile(r"mm$|grouped_mm|linear|matmul")
# Roles that an operation's name alone tells.
_BY_OP = {
    "attention.core": re.compile(r"^(?!triton).*(?:attention|flash|sdpa)", re.IGNORECASE),
    "loss": re.compile("cross_entropy|nll_loss|log_softmax|CrossEntropy"),
    "embedding": re.compile("::embedding"),
    "pipeline": re.compile("^c10d::(?:send|recv)"),
}


class Place(NamedTuple):
    """Where an operation belongs; "" and None: unknown, or nowhere."""

    role: str
    module: str
    layer: int | None


def place_of(
    span: str,
    *,
    before: str,
    ops: tuple[str, str],
    is_gated: bool,
    is_bucket: bool,
    is_activated: bool,
) -> Place:
    """Return the place of an operation by the innermost annotation around it.

    before: the annotation inside that one which ended last. ops: the outermost operation inside
    the annotation, and the innermost one. is_bucket: DDP reduces gradients of this module.
    """
    by_name = _role_by_op(ops[1]) or _role_by_op(ops[0])
    if span.startswith("Optimizer."):
        return Place("update", "", None)
    if (sharded := FSDP.match(span)) is not None:
        path = re.sub(r"\.?_orig_mod", "", sharded[1] or "")
        layer = layer_of(path)
        return Place(path or "root" if layer is None else "blocks", path, layer)
    name = span.removeprefix(MARK)
    if span in PHASE_MARKS:
        role = {"data": "data", "optimizer": "clip", "backward": "gradients"}.get(name, by_name)
        if before.startswith("Optimizer."):
            role = "update"
        elif name == "backward" and ops[0] in ("aten::div", "aten::ones_like"):
            role = "loss"
        return Place(role, "", None)
    if not span.startswith(MARK):
        path = span.removeprefix(STACK)
        number = _STACK_LAYER.search(path)
        role = "gradients" if is_bucket else by_name
        return Place(role, path, int(number[1]) if number else None)
    layer = layer_of(name)
    if is_bucket:
        return Place(name.partition(".")[0] if layer is None else "block", name, layer)
    role = role_of_call(
        *(name, before.removeprefix(MARK), ops[0]), is_gated=is_gated, is_activated=is_activated
    )
    return Place(by_name or role if role in COARSE else role, name, layer)


def layer_of(path: str) -> int | None:
    """Return the number of the transformer block of a module's path."""
    match = _BLOCK.match(path)
    return int(match[1]) if match else None


def _role_by_op(op: str) -> str:
    """Return the role that an operation of any model has by its name, or ""."""
    return next((role for role, pattern in _BY_OP.items() if pattern.search(op)), "")


def role_of_call(
    path: str, before: str, op: str, *, is_gated: bool, is_activated: bool = False
) -> str:
    """Return the role of an operation that a module of `stepmark train` calls itself.

    op: the outermost one inside the module's call. before: the module inside that was called
    last before it, or "". is_activated: an activation came before it in this call.
    """
    match = _BLOCK.match(path)
    if path == "output" and before.endswith((".head", ".norm")):
        return "loss"
    if match is None:
        return "embedding" if path.startswith("embedding") else _ENDS.get(path, "")
    name = match[2] or ""
    last = before.rpartition(".")[2]
    inside = {
        "": _RESIDUALS.get(last, "block"),
        "attention": "attention.core",
        "ffn": "mlp.activation" if last in ("gate", "up") else "mlp.router",
        "ffn.shared": "mlp.shared_activation",
        "ffn.held": "mlp.experts_activation",
    }
    if name in ("attention", "ffn") and not before and _COMM.search(op):
        return _LEAVES[f"{name}_norm"]  # its rows are gathered
    if name == "attention" and _ROTATION.search(op):
        return "attention.rope"
    if name == "ffn.held" and _PRODUCT.search(op):
        first = "mlp.experts_gate_up" if is_gated else "mlp.experts_up"
        return "mlp.experts_down" if is_activated else first
    role = inside.get(name) or _LEAVES.get(name) or role_of(name)
    return TOGETHER.get(role, role) if is_gated else role
