"""Convert an operator of ATen to one of our operators, or to a kernel of its own name.

Matrix products, attention, norms and fused optimizers become operators; all others kernels
with the bytes that they must move. Views and allocations are no work.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import (
    Attention,
    Bmm,
    Gemm,
    GroupedGemm,
    Layout,
    Norm,
    Op,
    Optimizer,
    Phase,
)
from stepmark.step.workload import Kernel
from stepmark.training.messages import tensors

# Namespaces of computation; the others are the profiler, the dispatcher and communication.
_COMPUTES = ("aten", "fsdp")
# No work, in addition to views: new memory without values, and other names of tensors.
_FREE = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("lift_fresh", "lift", "detach_", "_unsafe_view", "resize_", "set_", "record_stream"),
        *("_local_scalar_dense", "is_same_size", "_has_same_storage_numel", "equal", "item"),
    }
)
# Writes without reading the old values; so do out= arguments of others.
_ONLY_WRITES = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"})
# Reads as many of the first operand's elements as it returns.
_PICKS = frozenset({"embedding", "index_select", "gather", "index"})
_OPTIMIZERS = {
    "_fused_adamw_": "adamw",
    "_fused_adam_": "adam",
    "_fused_sgd_": "sgd",
}
_NORMS = {
    "native_layer_norm": ("layernorm", Phase.FWD),
    "native_layer_norm_backward": ("layernorm", Phase.BWD),
    "_fused_rms_norm": ("rmsnorm", Phase.FWD),
    "_fused_rms_norm_backward": ("rmsnorm", Phase.BWD),
}
_ATTENTION = ("_scaled_dot_product_", "_efficient_attention_", "_flash_attention_")
Computation = tuple[Op | Kernel, Phase | None]
Arguments = Mapping[str, Any]


def computation(
    func: Any, args: tuple[Any, ...], kwargs: Arguments, result: Any, *, backward: bool
) -> Computation | None:
    """Return the operation, and its phase where finer than the step's; None if no work."""
    name = func._schema.name.partition("::")[2]
    if func.namespace not in _COMPUTES or name in _FREE or _is_view(func):
        return None
    names = (argument.name for argument in func._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    try:
        operator = _operator(name, arguments, backward=backward)
    except ConfigError:  # a type or a shape that the operator does not have
        operator = None
    if operator is not None:
        return operator
    count = flop_registry.get(func.overloadpacket)
    flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    bytes_moved = _bytes_moved(func, name, args, kwargs, result)
    return Kernel(name=f"{func.namespace}.{name}", flops=flops, bytes_moved=bytes_moved), None


def _operator(name: str, arguments: Arguments, *, backward: bool) -> Computation | None:
    if name in _PRODUCTS:
        return _PRODUCTS[name](arguments, backward)
    if name.startswith(_ATTENTION):
        return _attention(arguments, backward="backward" in name), None
    if name in _NORMS:
        kind, phase = _NORMS[name]
        x = arguments["input"]
        num_dims = len(arguments["normalized_shape"])
        hidden = math.prod(x.shape[x.dim() - num_dims :])
        tokens = x.numel() // hidden
        return Norm(tokens=tokens, hidden=hidden, kind=kind, dtype=_dtype(x), phase=phase), None
    if name not in _OPTIMIZERS:
        return None
    params = arguments["self"]
    num_params = sum(param.numel() for param in params)
    kind = _OPTIMIZERS[name]
    return Optimizer(num_params=num_params, kind=kind, dtype=_dtype(params[0])), None


def _gemm(a: Tensor, b: Tensor, out: object = None) -> Gemm:
    return Gemm(
        m=a.shape[0],
        n=b.shape[1],
        k=a.shape[1],
        dtype=_dtype(a),
        layout=_layout(a, b),
        out_dtype=parse_dtype(str(out)) if out is not None else None,
    )


def _mm(a: Tensor, b: Tensor, backward: bool) -> Computation:
    """Return a product; a weight's gradient has its first operand transposed (x.T @ dy)."""
    op = _gemm(a, b)
    if not backward:
        return op, None
    return op, Phase.WGRAD if op.layout.startswith("t") else Phase.DGRAD


def _bmm(a: Tensor, b: Tensor) -> Computation:
    batch, m, k = a.shape
    layout = _layout(a, b)
    return Bmm(batch=batch, m=m, n=b.shape[2], k=k, dtype=_dtype(a), layout=layout), None


def _scaled_mm(arguments: Arguments, backward: bool) -> Computation:
    op = _gemm(arguments["self"], arguments["mat2"], arguments.get("out_dtype"))
    return op, Phase.DGRAD if backward else None


def _grouped_mm(arguments: Arguments, backward: bool) -> Computation | None:
    a = arguments["self"]
    b = arguments["mat2"]
    if a.dim() == 2 and b.dim() == 3:
        (num_groups, inner, outer), phase = b.shape, Phase.DGRAD if backward else Phase.FWD
        n, k = (inner, outer) if backward else (outer, inner)
        tokens = a.shape[0]
    elif a.dim() == 2 and b.dim() == 2:
        num_groups = arguments["offs"].shape[0]
        phase = Phase.WGRAD
        (n, tokens), k = a.shape, b.shape[1]
    else:
        return None
    op = GroupedGemm(
        num_groups=num_groups, tokens=tokens, n=n, k=k, dtype=_dtype(a), phase=phase
    )
    return op, phase if backward else None


_PRODUCTS: dict[str, Callable[[Arguments, bool], Computation | None]] = {
    "mm": lambda arguments, backward: _mm(arguments["self"], arguments["mat2"], backward),
    "addmm": lambda arguments, backward: _mm(arguments["mat1"], arguments["mat2"], backward),
    "bmm": lambda arguments, _: _bmm(arguments["self"], arguments["mat2"]),
    "baddbmm": lambda arguments, _: _bmm(arguments["batch1"], arguments["batch2"]),
    "_scaled_mm": _scaled_mm,
    "_grouped_mm": _grouped_mm,
}


def _attention(arguments: Arguments, *, backward: bool) -> Attention:
    q = arguments["query"]
    k = arguments["key"]
    v = arguments["value"]
    return Attention(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seq_q=q.shape[2],
        seq_kv=k.shape[2],
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        causal=bool(arguments.get("is_causal", False)),
        dtype=_dtype(q),
        phase=Phase.BWD if backward else Phase.FWD,
    )


def _layout(a: Tensor, b: Tensor) -> Layout:
    """Return the layout; "n" means that the last dimension is contiguous."""
    signs = (
        "n" if operand.stride(-1) == 1 or operand.stride(-2) != 1 else "t" for operand in (a, b)
    )
    return Layout("".join(signs))


def _dtype(tensor: Tensor) -> DType:
    return parse_dtype(str(tensor.dtype))


def _is_view(func: Any) -> bool:
    """Return whether all results are views of arguments, which it does not change."""
    returns = func._schema.returns
    return bool(returns) and all(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in returns
    )


def _bytes_moved(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Arguments, result: Any
) -> int:
    """Return the bytes moved if each operand is read and each result written once."""
    if name == "all_gather_copy_in":  # it returns the whole buffer and writes a part of it
        return 2 * sum(map(_num_bytes, tensors(args[0])))
    total = 0
    written = set()
    arguments = func._schema.arguments
    for at, argument in enumerate(arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        operands = list(tensors(value))
        if name in _PICKS and at == 0:
            operands = list(tensors(result))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and (argument.kwarg_only or name in _ONLY_WRITES))
        total += (reads + writes) * sum(map(_num_bytes, operands))
        if writes:
            written |= {id(operand) for operand in operands}
    return total + sum(
        _num_bytes(tensor) for tensor in tensors(result) if id(tensor) not in written
    )


def _num_bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes; an expanded tensor counts as the one that it expands."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.element_size() * math.prod(sizes) if tensor.numel() else 0
