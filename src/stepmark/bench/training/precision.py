"""Number formats of a step: autocast, and FP8 products through torchao or TransformerEngine."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.bench.environment import HAS_TRITON
from stepmark.bench.training.attention import Attention
from stepmark.bench.training.layers import FeedForward
from stepmark.core.dtypes import DType
from stepmark.core.train_case import TrainCase
from stepmark.core.training import DataParallel, Fp8, Precision

WEIGHTS = {
    Precision.AMP: torch.float32,
    Precision.MASTER: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
    Precision.FP32: torch.float32,
}
REDUCED = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}


def autocast(case: TrainCase) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What a forward pass runs in. Under FSDP its mixed-precision policy casts instead."""
    if case.precision is not Precision.AMP or case.data_parallel is DataParallel.FSDP:
        return contextlib.nullcontext
    return lambda: torch.autocast(case.device, torch.bfloat16)


def apply_fp8(model: nn.Module, case: TrainCase) -> None:
    """Replace linear layers, in place. Layers whose widths are no multiple of 16 stay."""
    if case.fp8 is Fp8.NONE:
        return
    if case.fp8 is Fp8.TE:
        _apply_te(model, case)
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
            _take_rows(module, joins_bias=case.fp8 is Fp8.TENSORWISE and case.parallel.tp == 1)
        if isinstance(module, Attention):
            module.joins_gradients = True
        if isinstance(module, FeedForward):
            module.settles_gradients = True


def _take_rows(module: Any, *, joins_bias: bool) -> None:
    """Give torchao's layer rows instead of sequences of them.

    Its backward pass flattens its input and takes the scale again. The compiler sees that both
    scales are one only where there was nothing to flatten.
    """
    multiply: Callable[[Tensor], Tensor] = module.forward
    if joins_bias and module.bias is not None:
        from stepmark.bench.training import fp8_bias  # noqa: PLC0415

        multiply = functools.partial(fp8_bias.multiply, module)

    def forward(x: Tensor) -> Any:
        return multiply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    module.forward = forward


def _torchao() -> Any:
    """Its own kernels, which we do not use, log an error each where they do not load."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # it uses an old name
    import torchao.float8.float8_ops  # noqa: PLC0415

    lay_out(torchao.float8.float8_ops)
    return torchao.float8


def _fits(module: nn.Module, name: str, case: TrainCase) -> bool:
    if not isinstance(module, nn.Linear) or module.in_features % 16 or module.out_features % 16:
        return False
    if name.endswith("router"):
        return False  # a few columns, and its order decides where tokens go
    return case.fp8_head or not name.endswith("output.head")


def _apply_te(model: nn.Module, case: TrainCase) -> None:
    """Written, not run: no machine of ours has TransformerEngine."""
    import transformer_engine.pytorch as te  # noqa: PLC0415

    for name, module in list(model.named_modules()):
        if not _fits(module, name, case):
            continue
        assert isinstance(module, nn.Linear)
        parent = model.get_submodule(name.rpartition(".")[0])
        replacement = te.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device=module.weight.device.type,
        )
        setattr(parent, name.rpartition(".")[2], replacement)


def fp8_region(case: TrainCase) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """TransformerEngine's layers compute in FP8 only inside its own context."""
    if case.fp8 is not Fp8.TE:
        return contextlib.nullcontext
    import transformer_engine.pytorch as te  # noqa: PLC0415
    from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: PLC0415

    # llm-train-bench's recipe.
    recipe = DelayedScaling(
        fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
    )
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def after_optimizer(case: TrainCase) -> Callable[[nn.Module], None] | None:
    """FP8 all-gather takes the scales of all weights at once, in one all-reduce."""
    if not case.fp8_all_gather:
        return None
    precompute: Callable[[nn.Module], None] = (
        _torchao().precompute_float8_dynamic_scale_for_fsdp
    )
    return precompute


@torch.library.custom_op("stepmark::transposed", mutates_args=())
def transposed(x: Tensor) -> Tensor:
    """x.t() with rows in one piece; x is a matrix of one-byte numbers."""
    if x.is_cuda and HAS_TRITON:
        from stepmark.bench.training.triton_kernels import transpose  # noqa: PLC0415

        return transpose(x.contiguous())
    return x.t().clone(memory_format=torch.contiguous_format)  # never x itself


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def lay_out(float8_ops: Any) -> None:
    """Let torchao's products take their transposed operands from here.

    Tensor cores of the Hopper generation read both FP8 operands along the summed dimension, so
    the backward products need transposed ones. torchao leaves that to a copy: alone it moves
    0.3 TB/s on an H200, fused by Inductor with the cast 1.4 TB/s. This kernel moves 2.9 to
    3.9 TB/s, and leaves Inductor casts that write as they read.

    float8_ops: the module torchao.float8.float8_ops. Its preprocess_addmm copies operands that
    lie the wrong way; it now gets them the right way. Twice is once.
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
