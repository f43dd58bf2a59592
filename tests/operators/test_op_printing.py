"""What takes most of a step, by the operators that a run measured."""

from dataclasses import replace

import pytest
from tests.tables.records import COPY, FAST, attention, gemm, made_up_device, measured, run_info

from stepmark.cases.case import Label, OpCase
from stepmark.cases.record import Record, Skipped
from stepmark.model.ops import Gemm, Norm, Phase
from stepmark.operators.op_columns import rows
from stepmark.operators.op_printing import (
    ceiling_lines,
    doubtful_lines,
    step_lines,
    wrong_lines,
)

QKV = Label(model="m", role="qkv", phase=Phase.FWD, per_step=4, mbs=1)
CORE = Label(model="m", role="attention", phase=Phase.FWD, per_step=2, mbs=1)


def core(backend: str) -> OpCase:
    return OpCase(op=attention(Phase.FWD), backend=backend, labels=(CORE,))


def records() -> list[Record]:
    return [
        measured(gemm(FAST, QKV), 1e-3),
        measured(core("flash"), 9e-3),
        measured(core("cudnn"), 3e-3),
    ]


def test_a_step_has_the_fastest_backend_as_often_as_it_runs() -> None:
    table = rows(records(), run_info())
    assert [row["time_per_step_s"] for row in table] == pytest.approx([4e-3, 18e-3, 6e-3])
    shares = [row["share_of_total_pct"] for row in table]
    assert shares[1] is None, "a slower backend is no part of the step"
    assert shares[0] == pytest.approx(40)
    assert shares[2] == pytest.approx(60)


def test_the_longest_operator_of_a_step_is_first() -> None:
    lines = [*step_lines(rows(records(), run_info()))]
    assert lines[1].startswith("A step of m, mbs 1 spends 10 ms in these operators")
    assert [line.split() for line in lines[-2:]] == [
        ["attention", "2", "6", "ms", "60.0", "%"],
        ["qkv", "4", "4", "ms", "40.0", "%"],
    ]


def test_what_was_not_measured_is_counted() -> None:
    out = Label(model="m", role="out", phase=Phase.FWD, per_step=2, mbs=1)
    skipped = Skipped(run_id="r", case=gemm(Gemm(m=64, n=64, k=64), out), reason="no memory")
    lines = [*step_lines(rows([*records(), skipped], run_info()))]
    assert lines[-1] == "1 operator of the step was not measured, or wrong."


def test_rows_of_no_model_have_no_step() -> None:
    assert [*step_lines(rows([measured(gemm(), 1e-3)], run_info()))] == []


def test_a_wrong_result_has_its_errors_and_their_limits() -> None:
    record = measured(gemm(), 1e-3, num_wrong=3)
    (check,) = record.checks
    check = replace(check, max_rel_err=0.024, tolerance=0.0625)
    scaled = replace(record, checks=(replace(check, rms_err=0.02, rms_tolerance=0.0078),))
    name = "wrong  gemm 8192x8192x8192 bf16 torch"
    assert [*wrong_lines(rows([scaled], run_info()))] == [
        f"{name}: rms error 2.0e-02 (limit 7.8e-03)"
    ]
    lost = replace(record, checks=(replace(check, max_rel_err=float("inf")),))
    assert [*wrong_lines(rows([lost], run_info()))] == [
        f"{name}: largest error NaN or infinite"
    ]
    of_a_part = replace(record, checks=(replace(check, max_rel_err=0.05),))
    assert [*wrong_lines(rows([of_a_part], run_info()))] == [
        f"{name}: some elements are over the limits of their part"
    ]
    assert [*wrong_lines(rows([measured(gemm(), 1e-3)], run_info()))] == []


def test_a_result_in_another_type_is_doubtful() -> None:
    record = measured(gemm(), 1e-3)
    checks = tuple(replace(check, remarks=("result is float32",)) for check in record.checks)
    table = rows([replace(record, checks=checks)], run_info())
    assert doubtful_lines(table)[-1] == "doubtful: result is float32 1 (of 1)"


def test_a_memory_without_a_limit_has_a_line() -> None:
    norm = measured(OpCase(op=Norm(tokens=8, hidden=8), backend="torch"), 1e-3)
    assert [*ceiling_lines(rows([norm], run_info()))] == [
        "no data sheet of this machine: compare GB/s with those of stepmark op copy"
    ]
    assert [*ceiling_lines(rows([norm, measured(COPY, 1e-3)], run_info()))] == []
    assert [*ceiling_lines(rows([norm], run_info(), device=made_up_device()))] == []
