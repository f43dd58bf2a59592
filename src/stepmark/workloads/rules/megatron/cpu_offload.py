"""Adam of a fraction of the parameters on the host: --optimizer-cpu-offload.

Source: megatron-core 0.16.1, optimizer/__init__.py and
optimizer/cpu_offloading/hybrid_optimizer.py (HybridDeviceOptimizer). Only read. Main weights,
gradients and moments of these parameters, 16 bytes each, are in the host's memory in fp32. Both
copies are in fp32, too: casts of copies that do not block run on the device (torch 2.13,
aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda). A fraction counts parameters, where
Megatron-LM offloads whole tensors until it is reached.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Phase
from stepmark.step.host_memory import host_adam, host_copy
from stepmark.step.kernel_choice import memory_kernel
from stepmark.step.workload import ComputeOp
from stepmark.workloads.pipeline import wait
from stepmark.workloads.rules.megatron.adam_states import adam
from stepmark.workloads.rules.megatron.settings import Megatron, StateDtype

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

_FP32 = DType.FP32.itemsize
NOTE = (
    "optimizer_cpu_offload: the time of Adam on the host is not known; copies count as those of"
    " pinned memory"
)


def check(settings: Megatron) -> None:
    """Raise ConfigError for what validate_args refuses, or what has no effect."""
    if not settings.optimizer_cpu_offload:
        return
    if not settings.use_precision_aware_optimizer:
        allowed = "only with use_precision_aware_optimizer"
        raise ConfigError("optimizer_cpu_offload", True, allowed)
    fraction = settings.optimizer_offload_fraction
    if not 0 < fraction <= 1:
        raise ConfigError("optimizer_offload_fraction", fraction, "above 0 and up to 1")
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if (value := getattr(settings, name)) is not StateDtype.FP32:
            allowed = "fp32 with optimizer_cpu_offload, whose states are in fp32"
            raise ConfigError(name, value, allowed)


def host_count(plan: "Plan", count: int) -> int:
    """Return how many of so many updated parameters are offloaded."""
    if not plan.settings.optimizer_cpu_offload:
        return 0
    return ceil(plan.settings.optimizer_offload_fraction * count)


def device_count(plan: "Plan", count: int) -> int:
    """Return how many of so many updated parameters have their states on the device."""
    return count - host_count(plan, count)


def update(plan: "Plan", count: int, module: str) -> Iterator[ComputeOp]:
    """Yield HybridDeviceOptimizer.step over so many parameters.

    With overlap_cpu_optimizer_d2h_h2d copies have streams of their own, and the host updates
    one tensor after the other, so that weights go up while gradients come down.
    """
    is_overlapped = plan.settings.overlap_cpu_optimizer_d2h_h2d
    on_host, on_device = host_count(plan, count), device_count(plan, count)
    gradient, weight = plan.gradient_dtype.itemsize, plan.job.dtype.itemsize

    def kernel(name: str, num_bytes: int) -> ComputeOp:
        op = memory_kernel(name, num_bytes)
        return ComputeOp(op=op, phase=Phase.OPTIM, module=module)

    def copy(direction: str) -> ComputeOp:
        op = host_copy(on_host * _FP32, direction, Phase.OPTIM, module)
        if not is_overlapped:
            return op
        name = f"{module}.{direction}"
        return replace(op, stream=direction, name=name, after=(ready,))

    ready = f"{module}.ready"
    if is_overlapped:
        yield replace(wait((), Phase.OPTIM, module), name=ready)
    if gradient < _FP32:
        yield kernel("gradient_cast", count * (gradient + _FP32))
    yield copy("d2h")
    if on_device:
        yield adam(on_device, module)
        yield kernel("parameter_copy", on_device * (_FP32 + weight))
    yield host_adam(module)
    yield copy("h2d")
    if is_overlapped:
        names = (f"{module}.d2h", f"{module}.h2d")
        yield wait(names, Phase.OPTIM, module)
    yield kernel("parameter_cast", on_host * (_FP32 + weight))
