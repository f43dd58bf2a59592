"""Which products of a step are in FP8, against the layers that torchao converts."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.training.models import made

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Fp8
from stepmark.ground.dtypes import DType
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.step.layout import is_cast
from stepmark.step.workload import ComputeOp
from stepmark.training import precision
from stepmark.workloads.rules.pytorch.case import of_case

NAMES = ("llama-3.1-8b", "gpt2-125m", "mixtral-8x7b", "deepseek-v3")


def make_case(name: str, *, head: bool = False) -> TrainCase:
    model = find_model(name).tiny()
    return TrainCase(model=model, device="cpu", fp8=Fp8.TENSORWISE, fp8_head=head)


def products(case: TrainCase) -> list[ComputeOp]:
    return [
        op
        for op in of_case(case).expand()
        if isinstance(op, ComputeOp) and isinstance(op.op, Gemm)
    ]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_products_in_fp8_are_those_of_converted_layers(name: str, head: bool) -> None:
    case = make_case(name, head=head)
    model = made(case.model)
    precision.apply_fp8(model, case)
    converted = Counter(
        tuple(module.weight.shape)
        for module in model.modules()
        if type(module).__name__ == "Float8Linear"
    )
    of_step = Counter(
        (op.op.n, op.op.k)
        for op in products(case)
        if isinstance(op.op, Gemm) and op.op.dtype.is_fp8 and op.phase is Phase.FWD
    )
    assert converted
    assert of_step == converted


def test_layers_in_mxfp8_are_those_of_the_step_and_round_to_four_bits() -> None:
    """torchao emulates them on a CPU. e4m3 has 3 bits behind the point: errors up to 1 / 16."""
    case = replace(make_case("llama-3.1-8b"), fp8=Fp8.MXFP8)
    model = made(case.model)
    plain = {name: module.forward for name, module in model.named_modules()}
    precision.apply_fp8(model, case)
    changed = {
        name: module
        for name, module in model.named_modules()
        if "forward" in vars(module) and isinstance(module, torch.nn.Linear)
    }
    forward = [op.op for op in products(case) if op.phase is Phase.FWD]
    num_narrow = sum(isinstance(op, Gemm) and op.dtype is DType.MXFP8 for op in forward)
    assert len(changed) == num_narrow > 0
    assert not any(name.endswith(("head", "router")) for name in changed)
    for name, module in changed.items():
        x = torch.randn(32, module.in_features, requires_grad=True)
        y = module(x)
        exact = plain[name](x)
        error = (y - exact).norm() / exact.norm()
        assert 0.005 < error.item() < 1 / 16
        y.sum().backward()
        assert x.grad is not None
        assert module.weight.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_only_the_types_of_products_change_and_casts_are_added(name: str) -> None:
    case = make_case(name)
    low = of_case(case)
    plain = of_case(replace(case, fp8=Fp8.NONE))
    assert low.groups == plain.groups
    without_casts = [
        op for op in low.expand() if not (isinstance(op, ComputeOp) and is_cast(op))
    ]
    num_casts = sum(1 for _ in low.expand()) - len(without_casts)
    num_narrow = 0
    for a, b in zip(without_casts, plain.expand(), strict=True):
        if a != b:
            assert isinstance(a, ComputeOp)
            assert isinstance(b, ComputeOp)
            assert isinstance(a.op, Gemm)
            assert isinstance(b.op, Gemm)
            assert a.op.flops == b.op.flops
            assert a.op.dtype.is_fp8
            assert replace(a, op=b.op) == b
            num_narrow += 1
    # Of three products of a layer, input and weight are cast before the first, the output's
    # gradient before the second.
    assert 3 * num_casts == 2 * num_narrow > 0
