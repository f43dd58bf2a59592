"""Attention in FP8 with the casts around it, as TransformerEngine's fused attention runs it.

Source: TransformerEngine 2.11, pytorch/attention/dot_product_attention/backends.py
(FusedAttnFunc) and utils.py (combine_and_quantize, combine_and_dequantize), with its defaults
(NVTE_FP8_DPA_BWD=1, NVTE_DPA_FP8CS_O_in_F16=1); common/fused_attn/fused_attn_fp8.cu. Read, not
compared with a run.
"""

from collections.abc import Iterator
from dataclasses import replace

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Attention, Phase
from stepmark.model.product_precision import ProductPrecision, Recipe
from stepmark.step.kernel_choice import attention_numels, memory_kernel
from stepmark.step.layout import cast_kernel
from stepmark.step.module import Module, work_of
from stepmark.step.workload import Kernel

_WIDE = DType.BF16.itemsize
_NARROW = DType.FP8_E4M3.itemsize


def in_fp8(core: Module, op: Attention, products: ProductPrecision) -> Module:
    """Return fused attention in fp8. op: the kernel in bf16; products: with its recipe.

    Queries, keys and values are joined and cast as one tensor, and the gradient of the output
    is cast. With delayed scaling the kernel writes fp8, which is cast back; with tensorwise
    scaling, bf16. The backward pass reads two numbers of the softmax per row, in fp32.
    """
    inputs, output = attention_numels(op)
    narrow = replace(op, dtype=products.dtype)
    backward = replace(op, dtype=products.grad_dtype or products.dtype, phase=Phase.BWD)
    joined = memory_kernel("concatenate", 2 * _WIDE * inputs)
    work = work_of(
        core.role,
        (Phase.FWD, joined),
        (Phase.FWD, _cast(inputs, products)),
        (Phase.FWD, narrow),
        *((Phase.FWD, kernel) for kernel in _wide(output, products, num_tensors=1)),
        (Phase.BWD, _cast(output, products)),
        (Phase.BWD, backward),
        *((Phase.BWD, kernel) for kernel in _wide(inputs, products, num_tensors=3)),
    )
    keeps = replace(core.keeps, statistics=2 * core.keeps.statistics)
    return replace(core, work=work, keeps=keeps)


def saved_bytes(numel: int, output: int, recipe: Recipe) -> int:
    """Return what attention in fp8 keeps of queries, keys and values, and of its output.

    With delayed scaling the output stays in fp8, with tensorwise scaling in bf16.
    """
    return numel * _NARROW + output * (_NARROW if recipe is Recipe.DELAYED else _WIDE)


def _cast(numel: int, products: ProductPrecision) -> Kernel:
    """Return the cast to fp8 in one layout, which attention's kernels read in any pass."""
    return cast_kernel(numel * (products.num_reads * _WIDE + _NARROW))


def _wide(numel: int, products: ProductPrecision, *, num_tensors: int) -> Iterator[Kernel]:
    """Yield the cast of results back to bf16; several tensors are joined before."""
    if products.attention is not Recipe.DELAYED:
        return
    if num_tensors > 1:
        yield memory_kernel("concatenate", 2 * _NARROW * numel)
    yield memory_kernel("dequantize", numel * (_NARROW + _WIDE))
