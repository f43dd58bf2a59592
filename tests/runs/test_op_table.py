"""A plan of operators as tables: a step is the sum of its operators, 80 columns wide."""

import json
from typing import Any

import pytest

from stepmark.cases.case import OpCase
from stepmark.cases.training import CompileScope
from stepmark.cli.main import status
from stepmark.ground.dtypes import DType
from stepmark.ground.options import plain
from stepmark.measuring.machine import machine
from stepmark.model.device import find_device_by_alias
from stepmark.model.ops import Attention, Copy, Gemm, Phase
from stepmark.operators.op_options import LAYER, LayerOptions
from stepmark.operators.op_plan import layer_cases
from stepmark.predictions.costs import SheetCosts
from stepmark.runs import op_table
from stepmark.step.workload import ComputeOp
from stepmark.tables.columns import number

MODELS = ("llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b")


def steps_and_cases(**options: Any) -> tuple[list[op_table.Step], list[OpCase]]:
    given = LayerOptions(family=LAYER, **options)
    here = machine("h200", dry_run=True)
    return op_table.steps_of(plain(given), here), layer_cases(given, here)


@pytest.mark.parametrize("model", MODELS)
def test_products_and_attention_of_the_plan_are_those_of_the_step(model: str) -> None:
    (step,), cases = steps_and_cases(model=model)
    ops = {case.op for case in cases}
    of_plan = sum(step.work[op] * op.flops for op in ops)
    of_kernels = sum(
        part.times * count * (op.flops or 0)
        for part in step.parts
        for op, count in part.work.items()
        if hasattr(op, "name")
    )
    assert of_plan + of_kernels == op_table._flops_of(step.work) > 0


@pytest.mark.parametrize("model", MODELS)
def test_the_places_of_an_operator_have_all_its_calls(model: str) -> None:
    (step,), cases = steps_and_cases(model=model)
    for case in cases:
        calls = sum(label.per_step or 0 for label in case.labels)
        assert calls == step.work[case.op], case


def test_a_dense_step_has_six_flops_per_weight_and_token() -> None:
    """And those of the causal half of attention: PaLM, appendix B."""
    (step,), _ = steps_and_cases(model="llama-3.1-8b", mbs=(2,))
    tokens = 2 * 8192
    in_products = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    pairs = 2 * 8192 * 8193 // 2
    attention = 32 * 12 * pairs * 4096
    # The pairs of a token with itself are counted as halves.
    assert op_table._flops_of(step.work) == pytest.approx(
        6 * in_products * tokens + attention, rel=1e-4
    )


@pytest.mark.parametrize("model", MODELS)
def test_rows_add_up_to_the_step(model: str) -> None:
    (step,), cases = steps_and_cases(model=model)
    rows = op_table._merged([(case, plan_row(case)) for case in cases], [step])
    chunked = [row for row in rows if str(row["operator"]).startswith("loss_chunked")]
    assert chunked
    assert {row["share_of_step_pct"] for row in chunked} == {None}, "instead of the loss"
    assert rows[-1]["operator"] == "other operators"
    in_step = [row for row in rows if row["calls_per_step"]]
    assert sum(number(row, "share_of_step_pct") or 0 for row in rows) == pytest.approx(100)
    for name, whole in (("flops", op_table._flops_of(step.work)), ("least_s", step.least_s)):
        parts = [
            (number(row, "calls_per_step") or 0) * (number(row, name) or 0) for row in in_step
        ]
        assert sum(parts) == pytest.approx(whole)


def plan_row(case: OpCase) -> dict[str, Any]:
    label = case.labels[0]
    device = find_device_by_alias("h200")
    row = dict.fromkeys(("predicted_s", "model", "mbs", "dtype", "shape", "family"))
    return row | {
        "role": label.role,
        "pass": label.phase,
        "flops": case.op.flops,
        "least_s": op_table.least_s(case.op, device),
    }


def test_equal_operators_are_counted_in_all_their_places() -> None:
    """Gate and up are one product, forwards."""
    (step,), cases = steps_and_cases(model="llama-3.1-8b")
    gate = Gemm(m=8192, n=14336, k=4096, dtype=DType.BF16)
    assert gate in {case.op for case in cases}
    assert step.work[gate] == 64
    share = op_table._in_steps(gate, [step])["share_of_step_pct"]
    cost = op_table.predicted(gate, "torch", step.device)
    assert cost is not None
    assert step.time_s is not None
    assert share == pytest.approx(100 * 64 * cost.total_s / step.time_s), "predicted times"


@pytest.mark.parametrize("compiled", [False, True])
def test_costs_are_those_of_predict(compiled: bool) -> None:
    ops = {case.op for case in steps_and_cases(model="llama-3.1-8b")[1]}
    (step,), _ = steps_and_cases(model="llama-3.1-8b")
    sheet = SheetCosts(step.device, {} if compiled else {"compile": CompileScope.NONE})
    for op in ops:
        if not isinstance(op, Attention | Copy):
            cost = op_table.predicted(op, "compile" if compiled else "torch", step.device)
            of_predict = sheet(ComputeOp(op=op, phase=Phase.FWD, module=""))
            assert cost is not None
            assert of_predict is not None
            assert cost.total_s == of_predict.total_s
            assert cost.total_s > 1.01 * (op_table.least_s(op, step.device) or 0)
    attention = next(op for op in ops if isinstance(op, Attention))
    assert op_table.predicted(attention, "math", step.device) is None
    assert op_table.predicted(Copy(num_bytes=2**30), "torch", step.device) is None


def test_the_step_has_its_predicted_time_and_what_its_optimizer_owns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["all", "deepseek-v3", "--device", "h200", "--dry-run"]
    for layout, owned in (([], "671 B"), (["--ep", "8", "--dp-shard", "64"], "10.48 B")):
        assert status(["op", *words, *layout]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert f"Its AdamW updates {owned} parameters (--tp 1" in text
    (step,), _ = steps_and_cases(model="deepseek-v3", ep=8, dp_shard=64)
    row = op_table._part_row("step", 1, step.work, step)
    assert row["predicted_s"] == step.time_s
    assert f"{step.time_s:.4g} s" in text


def test_what_steps_have_differently_is_unknown() -> None:
    steps, _ = steps_and_cases(model="llama-3.1-8b", mbs=(1, 2))
    assert len(steps) == 2
    gate = Gemm(m=8192, n=14336, k=4096, dtype=DType.BF16)
    assert op_table._in_steps(gate, steps)["calls_per_step"] == 64, "one step has it"
    optimizer = next(op for op in steps[0].parts[0].work if hasattr(op, "num_params"))
    unknown = {"calls_per_step": None, "share_of_step_pct": None}
    assert op_table._in_steps(optimizer, steps) == unknown, "another share of a longer step"  # type: ignore[arg-type]


def test_the_time_of_a_step_is_that_of_its_parts() -> None:
    (step,), _ = steps_and_cases(model="deepseek-v3", ep=8)
    assert [part.times for part in step.parts] == [3, 58, 1]
    parts = [(step.least_s_of(part.work) or 0) * part.times for part in step.parts]
    assert step.least_s == pytest.approx(sum(parts))
    assert find_device_by_alias("h200") is step.device


@pytest.mark.parametrize(
    "words",
    [
        *(f"all {model} --device h200" for model in MODELS),
        "all llama-3.1-8b --device cpu --scale 1/64",
        "attention gpt-oss-20b --device h200",
        "gemm llama-3.1-70b --tp 8 --dtype bf16,fp8 --mbs 1,2 --device h200",
        "norm --tokens 4096 --hidden 4096 --device h200 --rate half",
    ],
)
def test_lines_have_at_most_80_columns(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert status(["op", *words.split(), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    if "norm" not in words:
        answer = " ".join(lines[:2])
        assert ("takes at least" in answer) == ("h200" in words)


def test_80_columns_have_predicted_and_least_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert status(["op", "all", "llama-3.1-8b", "--device", "h200", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "operator          shape                        x  at least  predicted  of time"
    assert head in lines
    assert "Predicted: attention by cudnn; norm," in " ".join(lines)


def test_files_have_calls_and_shares_of_each_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        status(["op", "all", "llama-3.1-8b", "--device", "h200", "--dry-run", "--json", "-"])
        == 0
    )
    rows = json.loads(capsys.readouterr().out)
    calls = {(row["role"], row["pass"]): row["calls_per_step"] for row in rows}
    assert calls["gate", "fwd"] == calls["up", "fwd"] == 32
    assert calls["norm", "fwd"] == 65
    assert calls["loss_chunked", "fwd"] is None
    flash = [row for row in rows if row["backend"] in ("torch", "flash")]
    assert 98 < sum(row["share_of_step_pct"] or 0 for row in flash) < 100


def test_an_operator_names_its_places() -> None:
    def operator(*places: str) -> str:
        words = (place.split() for place in places)
        return op_table._operator(
            [{"role": w[0], "pass": w[1], "family": "gemm"} for w in words]
        )

    assert operator("gate fwd", "up fwd") == "gate, up fwd"
    assert operator("out fwd", "out dgrad") == "out fwd, out dgrad"
    assert operator("experts_gate fwd", "experts_up fwd") == "experts_gate fwd + 1"
    assert operator("optimizer_layer optim") == "optimizer_layer"


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (
            "gemm llama-3.1-8b",
            "15 cases, 18 rows (equal operators are measured once); none was run",
        ),
        ("copy --num-bytes 4096", "1 case; none was run"),
    ],
)
def test_counts_that_differ_are_explained(
    words: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["op", *words.split(), "--device", "h200", "--dry-run"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == end


def test_a_model_is_an_argument_or_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in ("llama-3.1-8b gpt2-125m", "--model llama-3.1-8b,gpt2-125m"):
        assert status(["op", "norm", *words.split(), "--device", "h200", "--dry-run"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert status(["op", "norm", "gpt2-125m", "--model", "gpt2-125m", "--dry-run"]) == 2
    assert "it cannot be combined with MODEL" in capsys.readouterr().err
