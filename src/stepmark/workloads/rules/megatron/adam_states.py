"""Types of Adam's states: fp32, or narrower with the precision-aware optimizer.

Source: megatron-core 0.16.1, optimizer/optimizer_config.py (OptimizerConfig.__post_init__),
optimizer/distrib_optimizer.py (_build_model_and_main_param_groups, copy_group_grads,
_copy_main_params_to_model_params), and TransformerEngine 2.11, pytorch/optimizers/
fused_adam.py (_initialize_state, get_unscaled_state, step, _apply_scale). Only read: it runs
on GPUs alone. Scales, one fp32 number per tensor and state, are left out.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Optimizer, Phase
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.workload import ComputeOp
from stepmark.workloads.rules.megatron.narrow import Fp8Format, Fp8Recipe
from stepmark.workloads.rules.megatron.settings import Megatron, StateDtype

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

_FP32 = DType.FP32.itemsize
_REMAINDER = 2  # bytes of an fp32 weight that its bf16 one lacks
# Bytes that a narrow state moves to become fp32, and back: the copy and a factor; the largest
# magnitude, a factor and the copy, or for bf16 a cast and a copy.
_TO_FP32 = {StateDtype.BF16: 6, StateDtype.FP16: 6 + 8, StateDtype.FP8: 5}
_FROM_FP32 = {StateDtype.BF16: 6 + 4, StateDtype.FP16: 4 + 8 + 6, StateDtype.FP8: 4 + 5}


def check(settings: Megatron, dtype: DType) -> None:
    """Raise ConfigError for what Megatron-LM refuses, or what is not modelled."""
    name = "use_precision_aware_optimizer"
    if not settings.use_precision_aware_optimizer:
        return
    if not settings.use_distributed_optimizer:
        raise ConfigError(name, True, "only with use_distributed_optimizer")
    if dtype is DType.FP32:
        raise ConfigError(name, True, "only with bf16 or fp16, as modelled")
    if settings.fp8_param_gather:
        raise ConfigError(
            name, True, "false with fp8_param_gather, which is not modelled with it"
        )
    if settings.main_grads_dtype is not StateDtype.FP32 and dtype is not DType.BF16:
        raise ConfigError("main_grads_dtype", settings.main_grads_dtype, "fp32 without bf16")
    allowed = {"main_grads_dtype": StateDtype.BF16, "main_params_dtype": StateDtype.FP16}
    for field, narrow in allowed.items():
        if (value := getattr(settings, field)) not in (StateDtype.FP32, narrow):
            raise ConfigError(field, value, f"fp32 or {narrow}")


def has_fused_weights(plan: "Plan") -> bool:
    """Return whether FusedAdam keeps the main weights, and updates the model's with them."""
    settings = plan.settings
    if not settings.use_precision_aware_optimizer or settings.optimizer_cpu_offload:
        return False
    is_delayed = settings.fp8_recipe is Fp8Recipe.DELAYED
    has_bf16_products = settings.fp8_format is Fp8Format.NONE
    is_narrow = settings.main_params_dtype is not StateDtype.FP32
    return is_narrow or is_delayed or has_bf16_products


def weight_bytes(plan: "Plan") -> int:
    """Return the bytes of a main weight; 0: it is the model's."""
    if plan.job.dtype is DType.FP32:
        return 0
    if plan.settings.main_params_dtype is not StateDtype.FP32:
        return plan.settings.main_params_dtype.itemsize
    is_split = has_fused_weights(plan) and plan.job.dtype is DType.BF16
    return _REMAINDER if is_split else _FP32


def state_bytes(plan: "Plan") -> int:
    """Return the bytes of a main weight, its moments and, where it is cast, its gradient."""
    settings = plan.settings
    moments = settings.exp_avg_dtype.itemsize + settings.exp_avg_sq_dtype.itemsize
    is_cast = plan.gradient_dtype.itemsize < _FP32 and not has_fused_weights(plan)
    return weight_bytes(plan) + moments + (_FP32 if is_cast else 0)


def _narrow(plan: "Plan") -> Iterator[StateDtype]:
    """Yield the types of states that are fp32 only while they are updated."""
    settings = plan.settings
    states = [settings.exp_avg_dtype, settings.exp_avg_sq_dtype]
    if has_fused_weights(plan):
        states.append(settings.main_params_dtype)
    return (state for state in states if state is not StateDtype.FP32)


def temporary_bytes(plan: "Plan") -> int:
    """Return the bytes of a parameter's states in fp32, which an update has besides them."""
    return _FP32 * len(list(_narrow(plan)))


def adam(count: int, module: str) -> ComputeOp:
    """Return Adam's step over so many parameters with states in fp32."""
    op = Optimizer(num_params=count, kind="adamw", dtype=DType.FP32)
    return ComputeOp(op=op, phase=Phase.OPTIM, module=module)


def update_kernels(plan: "Plan", count: int, module: str) -> Iterator[ComputeOp]:
    """Yield FusedAdam's step over so many parameters with narrow states.

    Its kernel reads and writes moments in fp32, main weights and the model's, and reads
    gradients.
    """
    of_weights = 2 * (plan.job.dtype.itemsize if has_fused_weights(plan) else 0)
    main = plan.settings.main_params_dtype
    # Temporary fp32 weights, unless these are the states themselves.
    of_weights += 2 * (weight_bytes(plan) if main is StateDtype.FP32 else _FP32)
    gradient = plan.gradient_dtype.itemsize if has_fused_weights(plan) else _FP32
    sizes = {
        "unscale": sum(_TO_FP32[state] for state in _narrow(plan)),
        "adamw": gradient + of_weights + 4 * _FP32,
        "scale": sum(_FROM_FP32[state] for state in _narrow(plan)),
    }
    for name, size in sizes.items():
        if size:
            op = memory_kernel(name, size * count)
            yield ComputeOp(op=op, phase=Phase.OPTIM, module=module)
