"""The two parts of a backward pass: torch's products and norms, and those of the rules."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.curves import GPT2, LLAMA, MIXTRAL, spread
from tests.training.workload_cases import ZB1P
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

from stepmark.cases.train_case import TrainCase
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Gemm, GroupedGemm, Norm
from stepmark.model.parallel import PipelineSchedule
from stepmark.step.workload import ComputeOp, Item, Workload
from stepmark.training.transformer import Transformer
from stepmark.workloads.rules.pytorch.case import of_case

Product = tuple[int, int, int]
NORM = "norm"


class Recorder(TorchDispatchMode):
    """Products as (m, n, k) and backward passes of norms, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Product | tuple[str, bool, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            (m, k), (_, n) = args[0].shape, args[1].shape
            self.ran.append((m, n, k))
        elif func is torch.ops.aten.native_layer_norm_backward.default:
            of_input, of_weight, _ = args[-1]
            self.ran.append((NORM, of_input, of_weight))
        return func(*args, **(kwargs or {}))


def case_of(model: ModelConfig) -> TrainCase:
    case = spread(replace(model, tied_embeddings=False), "none", pp=2)
    return replace(case, **ZB1P, pp_stages=1, mbs=2, pp_microbatches=2)


def torch_parts(case: TrainCase) -> tuple[list[Any], list[Any]]:
    """What the last stage runs for its input, then for its weights."""
    model = case.model
    stage = Transformer(
        model, layers=case.stage_layers[1], has_embedding=False, has_output=True
    )
    x = torch.randn(1, model.seq_len, model.hidden_size, requires_grad=True)
    labels = torch.zeros(model.seq_len, dtype=torch.int64)
    output = stage.output
    assert output is not None
    hidden: Tensor = stage(x)
    loss = output.mean_loss(hidden.flatten(0, 1), labels)
    with Recorder() as first:
        _, groups = stage_backward_input([loss], None, [x], nn.Module.parameters(stage))
    with Recorder() as second:
        stage_backward_weight(nn.Module.parameters(stage), groups)
    return first.ran, second.ran


def parts(made: Workload, layers: int) -> tuple[list[Any], list[Any]]:
    """The same by the rules."""
    first = [made.blocks["output.input"], *[made.blocks["block.input"]] * layers]
    second = [*[made.blocks["block.weight"]] * layers, made.blocks["output.weight"]]
    return [*ran(first)], [*ran(second)]


def ran(blocks: list[tuple[Item, ...]]) -> Iterator[Product | tuple[str, bool, bool]]:
    for block in blocks:
        for op in block:
            if not isinstance(op, ComputeOp):
                continue
            if isinstance(op.op, Gemm):
                yield op.op.m, op.op.n, op.op.k
            elif isinstance(op.op, Norm):
                yield NORM, True, False
            elif getattr(op.op, "name", "") == "norm_weight_backward":
                yield NORM, False, True


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda model: model.name)
def test_each_part_runs_what_torch_runs(model: ModelConfig) -> None:
    case = case_of(model)
    made = of_case(case)
    layers = len(case.stage_layers[1])
    of_torch = torch_parts(case)
    by_rule = parts(made, layers)
    for real, ruled in zip(of_torch, by_rule, strict=True):
        has_norms = any(one[0] == NORM for one in real)  # RMSNorm is several operations
        assert sorted(real, key=str) == sorted(
            (one for one in ruled if has_norms or one[0] != NORM), key=str
        )
    assert any(one[0] != NORM for one in of_torch[1])


@pytest.mark.parametrize("model", [LLAMA, GPT2, MIXTRAL], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "schedule", [PipelineSchedule.ZB1P, PipelineSchedule.ZBV, PipelineSchedule.DUALPIPE_V]
)
def test_all_stages_together_multiply_as_with_whole_passes(
    model: ModelConfig, schedule: PipelineSchedule
) -> None:
    model = replace(model, num_layers=4, tied_embeddings=False)
    whole = replace(spread(model, "none", pp=2), mbs=4, pp_microbatches=4)
    wanted = products(of_case(whole))
    assert wanted
    assert products(of_case(replace(whole, pp_schedule=schedule))) == wanted


def products(made: Workload) -> Counter[str]:
    return Counter(
        str(one.op)
        for stage in range(len(made.stages))
        for one in made.expand(stage)
        if isinstance(one, ComputeOp) and isinstance(one.op, Gemm | GroupedGemm)
    )
