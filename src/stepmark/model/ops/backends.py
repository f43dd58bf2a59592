"""The backends of each operator family, and limits that are known without asking a device.

Without torch: plans are made in processes that do not load it. What only torch or the device
knows is skipped on the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepmark.ground.dtypes import DType
from stepmark.model.ops import (
    FAMILIES,
    Attention,
    Bmm,
    Cast,
    Copy,
    Gemm,
    GroupedGemm,
    HostCopy,
    Mlp,
    Optimizer,
    Scaling,
)

# Optional packages that a backend may need.
MODULES = (
    "triton",
    "flash_attn",
    "flash_attn_interface",
    "transformer_engine",
    "torchao",
    "aiter",
    "deepspeed",
)
# Families with several backends.
_SEVERAL = {
    "grouped-gemm": ("torch", "loop"),
    "attention": ("flash", "cudnn", "efficient", "math", "flex", "flash-attn", "varlen"),
    "norm": ("torch", "compile"),
    "activation": ("torch", "compile"),
    "rope": ("torch", "compile"),
    "cross-entropy": ("torch", "compile"),
}
BACKENDS: dict[str, tuple[str, ...]] = {
    family: _SEVERAL.get(family, ("torch",)) for family in FAMILIES
}
# Backends that are measured where they are named, or nothing else runs: products of all pairs,
# and of one expert after the other; on a CPU also compiled functions, which take seconds each.
_ON_REQUEST = {"cuda": ("math", "loop"), "cpu": ("math", "loop", "compile")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of a device and its host, from which support is decided."""

    device_type: str  # "cuda" or "cpu"
    capability: tuple[int, int]  # (9, 0) on Hopper; (0, 0) on CPU
    is_rocm: bool
    has_compiler: bool  # a C++ compiler for torch.compile
    modules: frozenset[str]  # of MODULES, those that import


def unsupported(family: str, backend: str, op: Any, capabilities: Capabilities) -> str | None:
    """Return why this backend cannot run the operator, as far as is known beforehand."""
    if family == "attention":
        return attention(backend, op, capabilities)
    if backend == "compile":
        return needs_compiler(op, capabilities)
    limit = _LIMITS.get((family, backend))
    return limit(op, capabilities) if limit else None


def usual(family: str, op: Any, capabilities: Capabilities) -> list[str]:
    """Return the backends that are measured where none is named; none where nothing runs."""
    run = [b for b in BACKENDS[family] if unsupported(family, b, op, capabilities) is None]
    on_request = _ON_REQUEST[capabilities.device_type]
    return [name for name in run if name not in on_request] or run


def gemm(op: Gemm, capabilities: Capabilities) -> str | None:
    if op.dtype.is_narrow:
        of_type = _block_format if op.dtype.is_block_format else _fp8
        return of_type(op, capabilities)
    if (reason := tf32(op, capabilities)) is not None:
        return reason
    if _stored(op.result_dtype) != _stored(op.dtype):
        if op.result_dtype is not DType.FP32 or op.dtype not in (DType.BF16, DType.FP16):
            return f"torch.mm has no {op.result_dtype} result of {op.dtype} inputs"
        if capabilities.device_type == "cpu":
            return "torch.mm writes another type than its inputs' on GPUs only"
    return None


def _not_measured(what: str) -> str:
    return f"{what} are predicted and not measured: no backend here runs them"


def _stored(dtype: DType) -> DType:
    """Return the type in memory: TF32 only multiplies numbers that are stored as fp32."""
    return DType.FP32 if dtype is DType.TF32 else dtype


def tf32(op: Gemm | Bmm | Mlp, capabilities: Capabilities) -> str | None:
    on_cpu = capabilities.device_type == "cpu"
    if op.dtype is DType.TF32 and (on_cpu or capabilities.capability < (8, 0)):
        return "tf32 needs a GPU of compute capability 8.0 or later"
    return None


def _fp8(op: Gemm, capabilities: Capabilities) -> str | None:
    if op.scaling is Scaling.BLOCKWISE:
        return _not_measured("blockwise fp8 products")
    return _no_fp8_here(capabilities) or _no_fp8_result(op)


def _no_fp8_here(capabilities: Capabilities) -> str | None:
    if capabilities.device_type == "cpu":
        return "fp8 products need a GPU"
    if not capabilities.is_rocm and capabilities.capability < (8, 9):
        return "fp8 products need compute capability 8.9 or later"
    if capabilities.is_rocm and capabilities.capability < (9, 5):
        return "float8_e4m3fn needs CDNA4 (gfx950); CDNA3 has the fnuz formats only"
    return None


def _no_fp8_result(op: Gemm) -> str | None:
    if op.result_dtype not in (DType.BF16, DType.FP16, DType.FP32):
        return f"torch._scaled_mm has no {op.result_dtype} result"
    if op.scaling is Scaling.ROWWISE and op.result_dtype is not DType.BF16:
        return "row-wise scaled products have bf16 results only"
    return None


def _block_format(op: Gemm, capabilities: Capabilities) -> str | None:
    """Check cuBLAS's products in blocks, of which torch.nn.functional.scaled_mm has two."""
    if capabilities.is_rocm:
        return f"{op.dtype} products are measured on NVIDIA's GPUs only"
    if capabilities.capability < (10, 0):
        return f"{op.dtype} products need a GPU of compute capability 10.0 or later (Blackwell)"
    if op.cast is not Cast.NONE:
        return f"casts to {op.dtype} are predicted and not measured: give --cast none"
    if op.k % 32:  # rows of whole 16 bytes, of two numbers each in nvfp4
        return f"{op.dtype} products need a k that is a multiple of 32, not {op.k}"
    if op.result_dtype not in (DType.BF16, DType.FP16, DType.FP32):
        return f"torch's scaled_mm has no {op.result_dtype} result"
    return None


def grouped_gemm(op: GroupedGemm, capabilities: Capabilities) -> str | None:
    """Check the grouped kernel; a loop of products runs anywhere."""
    if (reason := grouped_loop(op, capabilities)) is not None:
        return reason
    if capabilities.device_type == "cpu":
        return None
    if op.dtype is not DType.BF16:
        return f"grouped_mm on a GPU takes bf16, not {op.dtype}"
    if not capabilities.is_rocm and capabilities.capability < (8, 0):
        return "grouped_mm needs compute capability 8.0 or later"
    if op.n % 8 or op.k % 8:
        return f"grouped_mm needs rows of whole 16 bytes; n {op.n}, k {op.k}"
    return None


def grouped_loop(op: GroupedGemm, capabilities: Capabilities) -> str | None:
    return _not_measured(f"grouped {op.dtype} products") if op.dtype.is_narrow else None


def optimizer(op: Optimizer, capabilities: Capabilities) -> str | None:
    on_cpu = capabilities.device_type == "cpu"
    if on_cpu and op.kind == "sgd" and op.dtype.itemsize == 2:
        # From 16 elements on, most results are wrong, as our check found in torch 2.13.0.
        return f"torch's fused SGD computes wrong {op.dtype} updates on CPU"
    return None


def copy(op: Copy | HostCopy, capabilities: Capabilities) -> str | None:
    return f"num-bytes {op.num_bytes} is no multiple of 4" if op.num_bytes % 4 else None


def host_copy(op: HostCopy, capabilities: Capabilities) -> str | None:
    if capabilities.device_type == "cpu":
        return "a copy between host and device needs a device with memory of its own"
    return copy(op, capabilities)


def needs_compiler(op: Any, capabilities: Capabilities) -> str | None:
    return None if capabilities.has_compiler else "torch.compile needs a C++ compiler here"


def attention(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    return (
        _no_pieces(op)
        or _no_attention_type(name, op, capabilities)
        or _no_attention_shape(name, op, capabilities)
        or _no_attention_here(name, capabilities)
    )


def _no_pieces(op: Attention) -> str | None:
    if op.piece_mean and not op.causal:
        return "packed sequences of a ring of ranks are predicted and not measured"
    return None


def _no_attention_type(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    on_cpu = capabilities.device_type == "cpu"
    if op.dtype.is_fp8:
        return _not_measured("kernels of fp8 attention")
    if op.dtype is DType.TF32 and (name != "math" or on_cpu):
        return "tf32 attention: the math backend on a GPU only"
    if name in ("math", "flex") or on_cpu or op.dtype in (DType.BF16, DType.FP16):
        return None
    if name == "efficient" and op.dtype is DType.FP32:
        return None
    return f"{name} attention has no {op.dtype} kernel"


def _no_attention_shape(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    is_packed = op.varlen or op.piece_mean
    if name in ("flash", "cudnn", "efficient") and (op.window or is_packed):
        return f"scaled_dot_product_attention masks no window or varlen in its {name} kernel"
    if op.softcap and name not in ("math", "flex", "flash-attn"):
        return f"{name} attention has no softcap; math, flex and flash-attn have it"
    if op.sinks and name not in ("math", "flex", "flash", "varlen"):
        return f"{name} attention has no sinks; math, flex, flash and varlen have them"
    if name == "efficient" and op.heads != op.kv_heads:
        return "the efficient kernel has no grouped heads"
    if name in ("flash", "flash-attn", "varlen"):
        return _no_flash_heads(name, op, capabilities)
    return None


def _no_flash_heads(name: str, op: Attention, capabilities: Capabilities) -> str | None:
    if op.head_dim_qk != op.head_dim_v:
        return f"{name} attention needs equal head widths"
    if capabilities.device_type == "cpu":
        return None
    if op.head_dim_qk > 256:
        return f"{name} attention has heads of at most 256"
    # scaled_dot_product_attention pads heads, and so does the flash-attn package.
    if op.head_dim_qk % 8 and (name == "varlen" or op.sinks):
        with_sinks = " with sinks" if op.sinks else ""
        return f"{name} attention{with_sinks} has heads of multiples of 8"
    return None


def _no_attention_here(name: str, capabilities: Capabilities) -> str | None:
    if capabilities.device_type == "cpu":
        return None if name in ("flash", "math") else f"{name} attention needs a GPU"
    if name == "cudnn" and capabilities.is_rocm:
        return "ROCm has no cuDNN"
    if name == "flex" and not capabilities.has_compiler:
        return "flex attention needs a C++ compiler here"
    if name == "flash-attn" and "flash_attn" not in capabilities.modules:
        return "flash-attn is not installed"
    if name != "math" and not capabilities.is_rocm and capabilities.capability < (8, 0):
        return f"{name} attention needs compute capability 8.0 or later"
    return None


_LIMITS: dict[tuple[str, str], Callable[[Any, Capabilities], str | None]] = {
    ("gemm", "torch"): gemm,
    ("grouped-gemm", "torch"): grouped_gemm,
    ("grouped-gemm", "loop"): grouped_loop,
    ("bmm", "torch"): tf32,
    ("mlp", "torch"): tf32,
    ("optimizer", "torch"): optimizer,
    ("copy", "torch"): copy,
    ("host-copy", "torch"): host_copy,
}
