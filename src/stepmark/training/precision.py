"""Number formats of a step: autocast, and FP8 products through torchao or TransformerEngine."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel, Fp8, Precision
from stepmark.ground.dtypes import DType
from stepmark.measuring.environment import HAS_TRITON
from stepmark.model.ops.matmul import row_multiple
from stepmark.training.attention import Attention
from stepmark.training.layers import FeedForward, triton_kernels

WEIGHTS = {
    Precision.AMP: torch.float32,
    Precision.MASTER: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
    Precision.FP32: torch.float32,
}
_BY_TE = (Fp8.TE, Fp8.NVFP4)
REDUCED = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def autocast(case: TrainCase) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return the context of a forward pass. FSDP casts by its mixed-precision policy."""
    if case.precision is not Precision.AMP or case.data_parallel is DataParallel.FSDP:
        return contextlib.nullcontext
    return lambda: torch.autocast(case.device, torch.bfloat16)


def apply_fp8(model: nn.Module, case: TrainCase) -> None:
    """Replace linear layers in place, except those with widths that are no multiple of 16."""
    if case.fp8 is Fp8.NONE:
        return
    if case.fp8 in _BY_TE:
        _apply_te(model, case)
        return
    if case.fp8 is Fp8.MXFP8:
        _apply_mxfp8(model, case)
        return
    float8 = _torchao()
    config = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(case.fp8.value),
        emulate=case.device == "cpu",
        enable_fsdp_float8_all_gather=case.fp8_all_gather,
    )
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: _fits(module, name, case)
    )
    for module in model.modules():
        if type(module).__name__ == "Float8Linear":
            _take_rows(module, fuses_bias=case.fp8 is Fp8.TENSORWISE and case.parallel.tp == 1)
        if isinstance(module, Attention):
            module.joins_gradients = True
        if isinstance(module, FeedForward):
            module.settles_gradients = True


def _take_rows(module: Any, *, fuses_bias: bool) -> None:
    """Pass rows to torchao's layer instead of sequences of them.

    Its backward pass flattens its input and computes the scale again. The compiler merges both
    scales only where there was nothing to flatten.
    """
    multiply: Callable[[Tensor], Tensor] = module.forward
    if fuses_bias and module.bias is not None:
        from stepmark.training import fp8_bias  # noqa: PLC0415

        multiply = functools.partial(fp8_bias.multiply, module)

    def forward(x: Tensor) -> Any:
        return multiply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    module.forward = forward


def _quiet_torchao() -> None:
    """Leave out the errors that torchao logs for kernels that we do not use, on its import."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # it uses an old name


def _torchao() -> Any:
    _quiet_torchao()
    import torchao.float8.float8_ops  # noqa: PLC0415

    lay_out(torchao.float8.float8_ops)
    return torchao.float8


def _apply_mxfp8(model: nn.Module, case: TrainCase) -> None:
    """Let linear layers multiply in MXFP8, emulated on a CPU. Not run on a device that has it.

    The convenience function of torchao's mxfp8_linear.py casts both operands of each product.
    """
    _quiet_torchao()
    from torchao.prototype.moe_training import mxfp8_linear  # noqa: PLC0415

    on_cpu = case.device == "cpu"
    kernels = mxfp8_linear.KernelPreference
    how = kernels.EMULATED if on_cpu else kernels.AUTO
    scales = mxfp8_linear.ScaleCalculationMode.RCEIL

    def multiply(module: nn.Linear, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(torch.bfloat16)
        weight = module.weight.to(torch.bfloat16)
        y: Tensor = mxfp8_linear._to_mxfp8_then_scaled_mm(rows, weight, how, scales)
        if module.bias is not None:
            y = y + module.bias.to(y.dtype)
        result: Tensor = y.unflatten(0, x.shape[:-1])
        return result

    for name, module in model.named_modules():
        if _fits(module, name, case):
            module.forward = functools.partial(multiply, module)


def _fits(module: nn.Module, name: str, case: TrainCase) -> bool:
    multiple = row_multiple(case.dtype)
    if not isinstance(module, nn.Linear):
        return False
    if module.in_features % multiple or module.out_features % multiple:
        return False
    if name.endswith("router"):
        return False  # a few columns, and their order decides the experts of tokens
    return case.fp8_head or not name.endswith("output.head")


def _apply_te(model: nn.Module, case: TrainCase) -> None:
    """Replace linear layers. Written, not run: no machine of ours has TransformerEngine."""
    for name, module in list(model.named_modules()):
        if not _fits(module, name, case):
            continue
        assert isinstance(module, nn.Linear)
        parent = model.get_submodule(name.rpartition(".")[0])
        replacement = _transformer_engine().pytorch.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device=module.weight.device.type,
        )
        setattr(parent, name.rpartition(".")[2], replacement)


def _transformer_engine() -> Any:
    import transformer_engine.pytorch  # noqa: PLC0415

    return transformer_engine


def fp8_region(case: TrainCase) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return the context in which TransformerEngine's layers compute in FP8 or NVFP4."""
    if case.fp8 not in _BY_TE:
        return contextlib.nullcontext
    te = _transformer_engine()
    if case.fp8 is Fp8.NVFP4:
        nvfp4 = te.common.recipe.NVFP4BlockScaling()
        return lambda: te.pytorch.fp8_autocast(enabled=True, fp8_recipe=nvfp4)
    # llm-train-bench's recipe.
    recipe = te.common.recipe.DelayedScaling(
        fp8_format=te.common.recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
    )
    return lambda: te.pytorch.fp8_autocast(enabled=True, fp8_recipe=recipe)


def after_optimizer(case: TrainCase) -> Callable[[nn.Module], None] | None:
    """Return the call that computes all scales for FP8 all-gather in one all-reduce."""
    if not case.fp8_all_gather:
        return None
    precompute: Callable[[nn.Module], None] = (
        _torchao().precompute_float8_dynamic_scale_for_fsdp
    )
    return precompute


@torch.library.custom_op("stepmark::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """Return x.t(), contiguous; x is a matrix of one-byte numbers."""
    if x.is_cuda and HAS_TRITON:
        y: Tensor = triton_kernels().transpose(x.contiguous())
        return y
    return x.t().clone(memory_format=torch.contiguous_format)  # never x itself


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def lay_out(float8_ops: Any) -> None:
    """Let torchao's products use our transposition of their operands.

    Hopper's tensor cores read both FP8 operands along the summed dimension, so the backward
    products need transposed ones. torchao transposes by a copy: alone it moves 0.3 TB/s on an
    H200, fused by Inductor with the cast 1.4 TB/s. This kernel moves 2.9 to 3.9 TB/s, and
    leaves Inductor casts that write in the order in which they read.

    float8_ops: the module torchao.float8.float8_ops. Its preprocess_addmm copies operands of
    the wrong layout; it now gets the right one. A second call changes nothing.
    """
    before = float8_ops.preprocess_addmm
    if getattr(before, "lays_out", False):
        return

    def preprocess_addmm(a: Any, b: Any) -> Any:
        if not float8_ops.is_row_major(a._data.stride()):
            a = _with_data(a, transposed(a._data.t()))
        if float8_ops.is_row_major(b._data.stride()):
            b = _with_data(b, transposed(b._data).t())
        return before(a, b)

    preprocess_addmm.lays_out = True  # type: ignore[attr-defined]
    float8_ops.preprocess_addmm = preprocess_addmm


def _with_data(tensor: Any, data: Tensor) -> Any:
    return type(tensor)(
        data,
        tensor._scale,
        tensor._orig_dtype,
        tensor._linear_mm_config,
        tensor._gemm_input_role,
        tensor._axiswise_dim,
    )
