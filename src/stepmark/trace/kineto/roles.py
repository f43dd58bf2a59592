"""Roles of a step's operations, as workloads name them, from where the host called them."""

import re

from stepmark.core.module import TOGETHER, role_of
from stepmark.core.trace_ops import WHOLE

_BLOCK = re.compile(r"blocks\.(\d+)(?:\.(.+))?$")
_FSDP = re.compile(
    r"FSDP::(?:all_gather|pre_forward|post_forward|pre_backward|post_backward)\w*"
    r"(?:$| \[| \(([^),]*))"
)
_LEAVES = {"attention_norm": "attention.norm", "ffn_norm": "mlp.norm"}
_RESIDUALS = {"attention": "attention.residual", "ffn": "mlp.residual"}
_ENDS = {"output": "output", "output.head": "head", "output.norm": "head.norm"}
_ATTENTION = re.compile(r"^(?!triton).*(?:attention|flash|sdpa)", re.IGNORECASE)
_ROTATION = re.compile(r"::(?:mul|add|sub|neg|cat|stack|chunk|view_as_\w+)_?$")
_COMM = re.compile(
    r"c10d|nccl:|gloo:|record_param_comms|all_?gather|reduce_?scatter|all_?reduce"
)
_PRODUCT = re.compile(r"mm$|grouped_mm|linear|matmul")
_LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax|CrossEntropy")
# Roles that an operation's name alone tells.
_BY_OP = {
    "attention.core": _ATTENTION,
    "loss": _LOSS,
    "embedding": re.compile("::embedding"),
    "pipeline": re.compile("^c10d::(?:send|recv)"),
}


def layer_of(path: str) -> int | None:
    """Return the number of the transformer block of a module's path."""
    match = _BLOCK.match(path)
    return int(match[1]) if match else None


def sharded_module(span: str) -> str | None:
    """Return the path that an annotation of FSDP2 names, e.g. "blocks.7".

    "" is the root module; None: the annotation names none.
    """
    match = _FSDP.match(span)
    return re.sub(r"\.?_orig_mod", "", match[1] or "") if match else None


def role_of_sharded(path: str) -> str:
    """Return the role of FSDP's work for these parameters."""
    return "blocks" if layer_of(path) is not None else path or "root"


def role_of_bucket(path: str) -> str:
    """Return the role of DDP's reduction after this module's gradients."""
    return "block" if layer_of(path) is not None else path.partition(".")[0]


def role_by_op(op: str) -> str:
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
    if match is None:
        return _role_at_ends(path, before)
    name, last = match[2] or "", before.rpartition(".")[2]
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


def _role_at_ends(path: str, before: str) -> str:
    if path == WHOLE:
        return WHOLE
    if path.startswith("embedding"):
        return "embedding"
    if path == "output" and before.endswith((".head", ".norm")):
        return "loss"
    return _ENDS.get(path, "")
