"""What this machine cannot run, and why. What no machine could is refused when planning."""

import importlib.util

import torch

from stepmark.bench.context import MeasureContext
from stepmark.bench.environment import HAS_TRITON
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope, Fp8, Precision

_CPU_LACKS = {
    "cudnn": "cuDNN attention needs a CUDA device",
    "efficient": "the memory-efficient attention needs a CUDA device",
}


def why_not(case: TrainCase, context: MeasureContext) -> str | None:
    """None where the case can be tried here."""
    return _format(case, context) or _compiler(case, context) or _device(case, context)


def _format(case: TrainCase, context: MeasureContext) -> str | None:
    if case.fp8 is Fp8.NONE:
        return None
    on_gpu = case.device == "cuda"
    if case.fp8 is Fp8.TE:
        return _te(case)
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install torchao (extra fp8)"
    is_compiled = case.compile is not CompileScope.NONE
    if on_gpu and case.fp8 is Fp8.ROWWISE and case.parallel.cp > 1 and is_compiled:
        # torch 2.11 on H200, recipes/technique_table.py; why is not known, perhaps a race.
        return (
            "wrong gradients with cp, --fp8-recipe rowwise and --compile: without one of them"
        )
    if on_gpu and not context.capabilities.is_rocm and context.capabilities.capability < (8, 9):
        capability = ".".join(map(str, context.capabilities.capability))
        return f"FP8 products need compute capability 8.9, this device has {capability}"
    return None


def _te(case: TrainCase) -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed: --fp8-recipe tensorwise uses torchao"
    if case.compile is not CompileScope.NONE:
        return "TransformerEngine's FP8 layers do not compile: --fp8-recipe tensorwise"
    return None if case.device == "cuda" else "TransformerEngine needs a CUDA device"


def _compiler(case: TrainCase, context: MeasureContext) -> str | None:
    if case.compile is CompileScope.NONE:
        return None
    if case.device == "cpu" and not context.capabilities.has_compiler:
        return "torch.compile needs a C++ compiler: none of $CXX, c++, g++, clang++ is here"
    if case.device == "cuda" and not HAS_TRITON:
        return "torch.compile needs triton, which is not installed"
    return None


def _device(case: TrainCase, context: MeasureContext) -> str | None:
    if case.device == "cpu":
        if case.cuda_graph:
            return "CUDA graphs need a CUDA device"
        if case.async_tp:
            return "asynchronous tensor parallelism needs CUDA devices (symmetric memory)"
        return _CPU_LACKS.get(case.attention)
    odd = case.model.d_qk % 8 or case.model.d_v % 8 or context.capabilities.is_rocm
    if case.parallel.cp > 1 and case.attention == "flash" and odd:
        return "flash attention takes no mask, which cp needs here: --attention auto"
    if case.precision is not Precision.FP32 and not torch.cuda.is_bf16_supported():
        return "this device has no bf16"
    return None
