"""Which products of a step are in FP8, against the layers that torchao converts."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training.models import made

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Fp8
from stepmark.ground.dtypes import DType
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Gemm, Phase
from stepmark.model.product_precision import Recipe, by_recipe
from stepmark.step.layout import Inputs, is_cast, linear_products
from stepmark.step.workload import ComputeOp, Kernel
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


def test_casts_to_mxfp8_are_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tensors of a step of one layer: elements and factors, for each product."""
    module = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    rows, out, width = 64, 96, 160
    written: list[int] = []

    def noting(cast: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            tensor = cast(*args, **kwargs)
            written.append(tensor.qdata.nbytes + tensor.scale.nbytes)
            return tensor

        return noted

    by_rows = staticmethod(noting(module.MXTensor.to_mx))
    monkeypatch.setattr(module.MXTensor, "to_mx", by_rows)
    by_columns = noting(module._to_mxfp8_dim1_kernel_wrapper)
    monkeypatch.setattr(module, "_to_mxfp8_dim1_kernel_wrapper", by_columns)
    x, weight = (
        torch.randn(size, width, dtype=torch.bfloat16, requires_grad=True)
        for size in (rows, out)
    )
    y = module._to_mxfp8_then_scaled_mm(
        x, weight, module.KernelPreference.EMULATED, module.ScaleCalculationMode.RCEIL
    )
    num_forward = len(written)
    y.sum().backward()
    inputs = Inputs(mbs=1, seq_len=rows, products=by_recipe(Recipe.MXFP8))
    moved = {Phase.FWD: 0, Phase.BWD: 0}
    for phase, op in linear_products(inputs, rows, out, width):
        if isinstance(op, Kernel):
            assert op.bytes_moved is not None
            moved[Phase.FWD if phase is Phase.FWD else Phase.BWD] += op.bytes_moved
    read = {Phase.FWD: 2 * width * (rows + out)}
    read[Phase.BWD] = read[Phase.FWD] + 2 * 2 * rows * out
    assert moved[Phase.FWD] == read[Phase.FWD] + sum(written[:num_forward])
    assert moved[Phase.BWD] == read[Phase.BWD] + sum(written[num_forward:])
    assert (num_forward, len(written)) == (2, 6)


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
