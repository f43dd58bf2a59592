"""Which backends are measured where none is named: one list, for op all and for a family."""

from typing import Any

import pytest

from stepmark.measuring.machine import Machine, machine
from stepmark.model.ops import Attention
from stepmark.model.ops.backends import BACKENDS, usual
from stepmark.operators.op_options import FamilyOptions, LayerOptions, options_class
from stepmark.operators.op_plan import capabilities, family_cases, layer_cases

HERE = {"cuda": machine("h200", dry_run=True), "cpu": Machine(device="cpu")}


def family_options(family: str, **values: Any) -> FamilyOptions:
    options = options_class(family)(family=family, **values)
    assert isinstance(options, FamilyOptions)
    return options


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize("family", ["gemm", "attention", "norm", "grouped-gemm"])
def test_a_layer_and_a_family_have_the_same_backends(device: str, family: str) -> None:
    here = HERE[device]
    values = {"model": "deepseek-v3", "ep": 32}
    of_layer = layer_cases(LayerOptions(**values), here)  # type: ignore[arg-type]
    of_family = family_cases(family_options(family, **values), here)
    in_layer = [(case.op, case.backend) for case in of_layer if case.family == family]
    assert in_layer == [(case.op, case.backend) for case in of_family]
    names = {backend for _, backend in in_layer}
    assert not names & ({"loop"} | ({"compile"} if device == "cpu" else {"math"}))


def test_others_are_measured_where_they_are_named_or_nothing_else_runs() -> None:
    here = HERE["cpu"]
    values = {"seq_q": "16", "heads": "2", "head_dim_qk": "8"}
    named = family_cases(family_options("attention", backend=("math",), **values), here)
    assert {case.backend for case in named} == {"math"}
    windowed = Attention(
        batch=1, seq_q=16, seq_kv=16, heads=2, kv_heads=2, head_dim_qk=8, head_dim_v=8, window=4
    )
    assert usual("attention", windowed, capabilities(here)) == ["math"]
    assert "math" in BACKENDS["attention"]
