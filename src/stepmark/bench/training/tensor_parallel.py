"""Tensor and sequence parallelism of a dense decoder as a DTensor plan.

Between blocks the tokens of a sequence are divided over the ranks; attention and MLP gather
them, divide heads and widths, and scatter the sum (Korthikanti et al., arXiv:2205.05198).
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepmark.bench.training.transformer import Transformer
from stepmark.core.model import ModelConfig
from stepmark.core.train_case import TrainCase


class _Whole(ParallelStyle):
    """Parameters that every rank holds whole, as DTensors, so that optimizers see one mesh.

    layout: how the input, and so the output, lies over the ranks. Where it is divided, a
    rank's gradient is a part of the sum.
    """

    def __init__(self, layout: Placement) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            held = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(held))

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(tensor, device_mesh, [self._layout], run_check=False)
                for tensor in inputs
            )

        def after(_module: nn.Module, _inputs: tuple[Any, ...], output: DTensor) -> Any:
            return output.redistribute(device_mesh, [self._layout]).to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def apply(model: Transformer, case: TrainCase, mesh: DeviceMesh) -> None:
    """Shard a Transformer's parameters over `mesh`, in place."""
    if case.async_tp:
        _enable_async(mesh)
    if (embedding := model.embedding) is not None:
        _embedding(embedding, mesh)
    for block in model.blocks.values():
        parallelize_module(block, mesh, _block_plan(case.model))
    if (output := model.output) is not None:
        plan = {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(output, mesh, plan)


def _embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    }
    if getattr(embedding, "positions", None) is not None:
        plan["positions"] = _Whole(Replicate())
    parallelize_module(embedding, mesh, plan)

    def scatter(_module: nn.Module, _inputs: Any, x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        # A copy, not a view: FSDP warns of views that leave its modules.
        return whole.redistribute(mesh, [Shard(1)]).to_local().clone()

    embedding.register_forward_hook(scatter)


def _block_plan(model: ModelConfig) -> dict[str, ParallelStyle]:
    # Rotary tables come as second and third input of a block's attention, whole.
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": _gathered(3),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "ffn": _gathered(1),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if model.activation == "swiglu":
        plan["ffn.gate"] = ColwiseParallel()
    if model.qk_norm:
        heads = _Whole(Shard(2))
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    return plan


def _gathered(num_inputs: int) -> PrepareModuleInput:
    rest = (None,) * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
    )


def _enable_async(mesh: DeviceMesh) -> None:
    """Products in pieces beside their communication; torch.compile finds the pairs."""
    import torch._inductor.config as inductor  # noqa: PLC0415
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group  # noqa: PLC0415

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
