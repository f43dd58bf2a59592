"""Factors fitted to measured steps: laws of the fit, rows of a file, steps of a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cli.main import status
from stepmark.ground.options import build
from stepmark.predictions import anchor_fit
from stepmark.predictions.anchor_fit import AnchorStep
from stepmark.predictions.anchored_steps import MEASURED, Anchor, fit_anchors
from stepmark.predictions.factors import Part
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import PredictOptions

ROOT = Path(__file__).parents[2]
FACTORS = st.floats(1.5, 3)


@st.composite
def steps_with(draw: st.DrawFn) -> tuple[dict[Part, float], list[AnchorStep]]:
    """Return factors, and steps that take as long as these say."""
    factors = {part: draw(FACTORS) for part in Part}
    steps = []
    for _ in range(7):
        parts_s = {part: draw(st.floats(0.01, 1)) for part in Part if part is not Part.HOST}
        step = AnchorStep(measured_s=1.0, parts_s=parts_s)
        steps.append(replace(step, measured_s=step.time_s(factors)))
    return factors, steps


def left_out_s(steps: list[AnchorStep]) -> list[float]:
    return anchor_fit.left_out_s(anchor_fit.choose(steps), steps)


@settings(max_examples=8, deadline=None)
@given(steps_with())
def test_factors_of_other_steps_predict_a_step(
    drawn: tuple[dict[Part, float], list[AnchorStep]],
) -> None:
    """Steps without noise: leaving one out is better than no factor, and nearly exact."""
    _, steps = drawn
    logs = [abs(math.log(step.measured_s / step.time_s({}))) for step in steps]
    left_out = zip(steps, left_out_s(steps), strict=True)
    own = [abs(math.log(step.measured_s / time_s)) for step, time_s in left_out]
    assert sum(own) <= sum(logs) + 1e-9
    assert sum(own) / len(own) < 0.12


@settings(max_examples=20, deadline=None)
@given(steps_with(), st.floats(0.5, 3))
def test_equal_errors_have_one_factor(
    drawn: tuple[dict[Part, float], list[AnchorStep]], factor: float
) -> None:
    _, steps = drawn
    scaled = [
        replace(step, measured_s=step.time_s(dict.fromkeys(Part, factor))) for step in steps
    ]
    factors = anchor_fit.fitted(anchor_fit.choose(scaled), scaled)
    for step in scaled:
        assert step.time_s(factors) == pytest.approx(step.measured_s, rel=0.02)


def test_factors_do_not_depend_on_the_order_of_steps() -> None:
    logs = (0.1, 0.3, 0.35, 0.38, 0.4, 0.42, 0.45, 0.5, 1.2)
    steps = [of_products(log) for log in logs]
    model = anchor_fit.choose(steps)
    assert anchor_fit.choose(steps[::-1]) == model
    factor = anchor_fit.fitted(model, steps)[Part.PRODUCTS]
    assert factor == pytest.approx(math.exp(0.4), rel=0.05)
    assert anchor_fit.fitted(model, steps[::-1])[Part.PRODUCTS] == pytest.approx(factor)


def test_a_few_delayed_steps_give_no_factor_to_the_others() -> None:
    """Four of ten are as late as one another; without them ten cannot tell a common factor."""
    logs = (0.05, 0.12, 0.66, 0.8, 0.84, 0.95, 1.21, 1.69, 1.7, 1.8)
    steps = [of_products(log) for log in logs]
    assert not anchor_fit.choose(steps).has_common
    assert anchor_fit.choose([of_products(0.84 + log / 20) for log in logs]).has_common


def of_products(log: float) -> AnchorStep:
    """Return a step of products alone that takes e^log times as long as predicted."""
    return AnchorStep(measured_s=math.exp(log), parts_s={Part.PRODUCTS: 1.0})


def test_noise_has_no_factor() -> None:
    """Errors on both sides say nothing of any cost."""
    steps = [of_products(log) for log in (-0.2, 0.2) * 5]
    model = anchor_fit.choose(steps)
    assert anchor_fit.fitted(model, steps) == {}
    assert left_out_s(steps) == [1.0] * 10


def test_a_step_that_waits_for_its_host_has_a_factor_of_the_host() -> None:
    """Steps with the host ahead by the prediction, and 4 times as late as measured."""
    steps = []
    for index in range(12):
        step = AnchorStep(
            measured_s=1.0,
            parts_s={Part.PRODUCTS: 0.1 + 0.1 * index},
            host_s=0.09 + 0.02 * (index % 3),
        )
        steps.append(replace(step, measured_s=step.time_s({Part.HOST: 4.0})))
    factors = anchor_fit.fitted(anchor_fit.choose(steps), steps)
    assert factors[Part.HOST] == pytest.approx(4.0, rel=0.1)
    assert factors[Part.PRODUCTS] == pytest.approx(1.0, rel=0.1)


def llama_inputs(**values: object) -> Inputs:
    given: dict[str, object] = {
        "models": ("llama-3.1-8b",),
        "num_layers": "4",
        "nproc": "16",
        "strategy": "fsdp",
        "device": "h100-sxm",
    }
    return inputs_of(build(PredictOptions, {**given, **values}))


def test_factors_scale_costs_and_not_the_step() -> None:
    """With all costs the step doubles; messages that computation hides stay hidden."""
    inputs = llama_inputs(mbs="8")
    before = predict(inputs)
    doubled = predict(replace(inputs, factors=dict.fromkeys(Part, 2.0)))
    assert doubled.step_s == pytest.approx(2 * before.step_s)
    slower = predict(replace(inputs, factors={Part.BETWEEN_HOSTS: 2.0}))
    assert slower.step.comm_s == pytest.approx(2 * before.step.comm_s)
    assert slower.step_s < before.step_s + 0.5 * before.step.comm_s
    same = predict(replace(inputs, factors={Part.IN_HOST: 2.0}))
    assert same.step_s == before.step_s


def test_fitted_factors_are_those_of_the_steps() -> None:
    """Steps whose products take 1.5 times as long, at layouts that differ in their share."""
    true = {Part.PRODUCTS: 1.5}
    layouts = [{"mbs": mbs, "strategy": name} for mbs in "1248" for name in ("fsdp", "ddp")]
    steps = [llama_inputs(**layout) for layout in layouts]
    measured = [predict(replace(inputs, factors=true)).step_s for inputs in steps]
    own = [Anchor("", *pair) for pair in zip(steps, measured, strict=True)]
    anchored = fit_anchors(own, lambda inputs: predict(inputs).step, "steps")
    assert anchored.error > 0.2
    assert anchored.left_out_error < 0.03
    assert anchored.factors[Part.PRODUCTS] == pytest.approx(1.5, rel=0.1)
    for inputs, step_s in zip(steps, measured, strict=True):
        again = predict(replace(inputs, factors=anchored.factors))
        assert again.step_s == pytest.approx(step_s, rel=0.05)


COMMAND = [
    "predict",
    "llama-3.1-8b",
    "--num-layers",
    "2",
    "--device",
    "h100-sxm",
    "--nproc",
    "16",
]


def predicted(tmp_path: Path, *words: str) -> dict[str, Any]:
    answer = tmp_path / "answer.json"
    assert status([*COMMAND, *words, "--json", str(answer)]) == 0
    document: dict[str, Any] = json.loads(answer.read_text())
    return document


@pytest.mark.parametrize("measured", MEASURED)
def test_rows_of_a_file_are_predictions(measured: str, tmp_path: Path) -> None:
    """Steps 1.4 times as long as predicted, in each way to state them, have this factor."""
    rows = [["strategy", "mbs", "seq-len", measured]]
    for index in range(10):
        layout = ["fsdp", str(1 + index % 5), "4096" if index < 5 else "2048"]
        own = predicted(
            tmp_path, "--strategy", *layout[:1], "--mbs", layout[1], "--seq-len", layout[2]
        )
        value = {
            "step": f"{1.4e3 * own['step_s']}ms",
            "tokens_per_s_gpu": str(own["tokens_per_s_gpu"] / 1.4),
            "tokens_per_s": str(own["tokens_per_s"] / 1.4),
            "mfu": f"{own['mfu_pct'] / 1.4}%",
            "log": f"{index}.log",
        }[measured]
        elapsed = f"elapsed time per iteration (ms): {1.4e3 * own['step_s']} |"
        lines = [f" iteration {number}/ 9 | {elapsed}\n" for number in range(1, 10)]
        (tmp_path / f"{index}.log").write_text("".join(lines))
        rows.append([*layout, value])
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(map(",".join, rows)))
    before = predicted(tmp_path, "--mbs", "2")
    after = predicted(tmp_path, "--mbs", "2", "--anchor", str(path))
    assert before["anchors"] is None
    assert after["step_s"] == pytest.approx(1.4 * before["step_s"], rel=0.01)
    assert after["anchors"]["error_pct"] == pytest.approx(100 - 100 / 1.4, rel=0.01)
    assert after["anchors"]["left_out_error_pct"] < 1
    assert after["anchors"]["factors"]["products"] == pytest.approx(1.4, rel=0.05)
    interval = after["interval"]
    assert interval["num_rows"] == 10
    assert 0.97 * after["step_s"] < interval["low_s"] <= after["step_s"] <= interval["high_s"]


@pytest.mark.parametrize(
    "text",
    [
        "\nmbs\tstep\n1\t1s\n\n2\t1.5s\n",
        "\nmbs;step\n1;1s\n \n;\n2;1.5s\n",
        "\nmbs, step\n1, 1s\n\n2, 1.5s\n",
        "\n| **mbs** | `step` |\r\n|---:|:---|\n| 1 | 1s |\n| 2 | 1.5s |\n",
        "\n MBS   step\n --- ------\n  1    1s\n\n  2  1.5 s\n",
        "\nmbs step (s)  win %\n1   1s   40\n2   1.5s   30\n",
        "mbs  seq len  time per step (s)\n1    4096     1s\n2    4096     ~1.5\n",
        "mbs;Seq;s/it;notes\n1;4,096;1s;good, warm\n2;4096;1,5;\n",
        "Of May 9:\n\n mbs | ms/step |\n---|---|\n1 | 1s |\n2 | 1.5s |\n\nmbs 1 | best",
        "mbs,step\n1,1s\n4,OOM\n4,\n2,1.5s\n",
    ],
)
def test_tables_of_any_delimiter(text: str, tmp_path: Path) -> None:
    """Rows are named by their lines in the file, whatever stands between them."""
    path = tmp_path / "measured.txt"
    path.write_text(text)
    rows = predicted(tmp_path, "--anchor", str(path))["anchors"]["rows"]
    assert [row["measured_s"] for row in rows] == [1.0, 1.5]
    lines = text.replace(",", ".").split("\n")
    starts = [
        next(n for n, line in enumerate(lines, 1) if time in line) for time in ("1s", "1.5")
    ]
    assert [row["name"] for row in rows] == [f"line {number}" for number in starts]


def test_columns_of_plan_are_columns_of_anchors(tmp_path: Path) -> None:
    """Each row of plan's columns is the row of options that says the same."""
    plans, options = tmp_path / "plans.csv", tmp_path / "options.csv"
    plans.write_text(
        "rules,tp,pp,vpp,dp,mbs,ckpt,GPUs,step\n"
        "megatron,2,2,2,4,1,1/chunk,16,9s\n"
        "megatron,2,1,1,8,1,full,,9s\n"
        "pytorch,1,2,2,4,1,1/2,8,9s\n"
        "pytorch,1,1,1,2x8,1,none,,9s\n"
    )
    names = "recompute-granularity,recompute-method,recompute-num-layers"
    parts = "recompute,recompute-some,recompute-every,pp-schedule,pp-stages,dp-replicate"
    options.write_text(
        f"framework,tp,pp,vpp,mbs,nproc,step,{names},{parts}\n"
        "megatron,2,2,2,1,16,9s,full,block,1,,,,,,\n"
        "megatron,2,1,,1,16,9s,full,,,,,,,,\n"
        "pytorch,1,2,,1,8,9s,,,,blocks,1,2,interleaved,2,\n"
        "pytorch,1,1,,1,16,9s,,,,none,,,,,2\n"
    )
    words = ["--framework", "megatron", "--gbs", "64", "--num-layers", "8"]
    rows = [
        predicted(tmp_path, *words, "--anchor", str(path))["anchors"]["rows"]
        for path in (plans, options)
    ]
    first, second = ([row | {"where": ""} for row in own] for own in rows)
    assert first == second
    assert len({row["predicted_s"] for row in rows[0]}) == 4


@pytest.mark.parametrize(
    ("heading", "value"),
    [
        ("step (s)", "2"),
        ("Time (ms)", "2000"),
        ("Step time [sec]", "2"),
        ("time (ms)", "2 s"),
        ("tok/s/GPU", "2,048"),
        ("tokens/s/GPU", "2,048.0"),
        ("tokens per second per GPU", "2048"),
        ("tokens/s", "32,768"),
        ("step (s) | tok/s/gpu | MFU", "2 | 2,050 | 99"),
    ],
)
def test_units_of_headings(heading: str, value: str, tmp_path: Path) -> None:
    """A cell's own unit goes before that of its heading; numbers may be as they are printed."""
    path = tmp_path / "measured.md"
    path.write_text(f"| name | MBS | {heading} | GiB |\n|---|---|\n| a | 1 | {value} | 9 |")
    (row,) = predicted(tmp_path, "--seq-len", "4096", "--anchor", str(path))["anchors"]["rows"]
    assert row["name"] == "line 3 (a)"
    assert row["measured_s"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    "words",
    [
        "--cp 2 --ep 1",
        "--pp 2 --vpp 2",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_a_row_with_a_layout_is_not_that_of_the_command(words: str, tmp_path: Path) -> None:
    """Axes without a column are 1, as in tables of plan, and no part of a recomputation."""
    path = tmp_path / "measured.csv"
    path.write_text(
        "tp,pp,dp,mbs,ckpt,step\n2,1,8,1,full,9s\n2,1,8,1,none,7s\n2,2,4,1,full,9s\n"
    )
    common = ["--framework", "megatron", "--gbs", "64", "--tp", "2", "--num-layers", "8"]
    alone, own = (
        predicted(tmp_path, *common, *more, "--anchor", str(path))["anchors"]
        for more in ([], words.split())
    )
    assert own == alone
    left_out = "steps whose rows do not state vpp, cp, ep have vpp 1, cp 1, ep 1"
    assert own["notes"][0] == left_out


def test_a_row_without_a_layout_has_that_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text("seq-len,step\n4096,9s\n")
    words = ["--framework", "megatron", "--tp", "2", "--cp", "2", "--gbs", "64"]
    alone = predicted(tmp_path, *words, "--seq-len", "4096")
    (row,) = predicted(tmp_path, *words, "--anchor", str(path))["anchors"]["rows"]
    assert row["predicted_s"] == alone["step_s"]


def test_a_row_may_name_another_framework(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(
        "framework,tp,sequence-parallel,gbs,step\nmegatron,8,yes,16,1.2s\n,2,,32,1.5\n"
    )
    words = ["--framework", "megatron", "--gbs", "32", "--tp", "4"]
    document = predicted(tmp_path, *words, "--anchor", str(path))
    assert [row["name"] for row in document["anchors"]["rows"]] == ["line 2", "line 3"]
    assert [row["measured_s"] for row in document["anchors"]["rows"]] == [1.2, 1.5]
    alone = predicted(tmp_path, *words)["interval"]
    assert document["interval"]["low_s"] == alone["low_s"]
    assert document["interval"]["high_s"] == max(alone["high_s"], document["step_s"])
    assert document["interval"]["num_anchors"] == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "factors on costs: 6.19" in printed
    assert " note: factors above 2 or below 0.5: 6.19 for all costs; " in printed
    assert ", of the step without anchors (9 give one of their own)" in printed


def test_doubtful_anchors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that is ten times as long as the others say, and factors that are no tuning."""
    own = {mbs: predicted(tmp_path, "--mbs", mbs)["step_s"] for mbs in ("1", "2")}
    path = tmp_path / "measured.csv"
    rows = [(mbs, factor * own[mbs]) for mbs in own for factor in (2.45, 2.5, 2.55)]
    rows.append(("1", 25 * own["1"]))
    path.write_text("mbs,step\n" + "".join(f"{mbs},{step_s}\n" for mbs, step_s in rows))
    capsys.readouterr()
    anchors = predicted(tmp_path, "--mbs", "1", "--anchor", str(path))["anchors"]
    outlier, factors = anchors["notes"]
    assert outlier.startswith("line 8 (mbs 1) is far from the other anchors: it took ")
    assert factors.startswith("factors above 2 or below 0.5: 2.5 for all costs; ")
    printed = capsys.readouterr().out
    assert f"  note: {outlier}\n" in printed
    assert "  errors: line 8 -9" in printed
    assert status([*COMMAND, "--mbs", "1,2", "--anchor", str(path)]) == 0
    assert "note: line 8 (mbs 1) is far from the other anchors" in capsys.readouterr().out


def test_rows_that_cannot_be_the_step_are_named(tmp_path: Path) -> None:
    """A layout that does not fit, one that is off the others by half, another model."""
    own = {mbs: predicted(tmp_path, "--mbs", mbs)["step_s"] for mbs in ("1", "2", "64")}
    path = tmp_path / "measured.csv"
    rows = [f"llama-3.1-8b,{mbs},{1.1 * step_s}" for mbs, step_s in own.items()]
    rows += [f"llama-3.1-8b,2,{2.0 * own['2']}", "gpt2-1.5b,1,9"]
    path.write_text("\n".join(["model,mbs,step", *rows, "llama-3.1-8b,8,OOM"]))
    notes = predicted(tmp_path, "--anchor", str(path))["anchors"]["notes"]
    assert any(note.startswith("line 5 (mbs 2) is far from the other") for note in notes)
    assert any(note.startswith("line 4 (mbs 64) DOES NOT FIT (") for note in notes)
    assert "line 6 is of another model: gpt2-1.5b@2-layers" in notes
    assert "line 7 is left out: its time is OOM" in notes


def test_few_anchors_without_a_factor_leave_the_interval(tmp_path: Path) -> None:
    before = predicted(tmp_path)
    path = tmp_path / "measured.csv"
    step_s = before["step_s"]
    path.write_text(f"mbs,step\n1,{0.8 * step_s}\n1,{step_s}\n1,{1.2 * step_s}\n")
    after = predicted(tmp_path, "--anchor", str(path))
    assert after["anchors"]["factors"] == {}
    assert after["anchors"]["notes"] == []
    assert after["step_s"] == step_s
    assert after["interval"] == before["interval"] | {"num_anchors": 3}
    assert after["interval"]["low_s"] is not None


def test_steps_of_a_run_are_anchors(tmp_path: Path) -> None:
    run = ROOT / "results" / "h100-x4-predictions-1"
    document = predicted(tmp_path, "--anchor", str(run))
    rows = document["anchors"]["rows"]
    assert {row["name"].split()[0] for row in rows} >= {"gpt2-1.5b"}
    assert not any("another model" in note for note in document["anchors"]["notes"])
    assert all(0.3 < row["predicted_s"] / row["measured_s"] < 2 for row in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp,colour,step\n2,red,1s", "line 1: column colour is invalid: it must be an option"),
        ("tp,recomputation,hue,step\n2,full,3,1s", "line 1: column 'recomputation, hue'"),
        ("tp,TFLOP/s/GPU\n2,400", "line 1: column tflop/s/gpu is invalid"),
        ("tp,step\n1,1s\nx,1s", "line 3: tp x is invalid: it must be a whole number"),
        ("mbs,step\n1,-1s", "line 2: step -1s is invalid"),
        ("mbs\n1", "line 1: the measured time is missing: give a column step,"),
        ("mbs,step,tok/s/gpu\n1,1s,40", "line 2: step 1s is invalid: it must be what tokens"),
        ("mbs,step\n1,OOM", "1 to 50 measured steps, not 0"),
        ("mbs,mfu\n1,140", "line 2: mfu 140 is invalid"),
        ("tp,step\n3,1s", "line 2: nproc 16 is invalid: it must be a multiple of --tp (3)"),
        ("tp,step\n2,1s,3", "line 2: its cells: '3' is invalid"),
        ("mbs,step", "1 to 50 measured steps, not 0"),
        ("mbs,step\n" + "1,1s\n" * 51, "1 to 50 measured steps, not 51"),
        ("json,step\nx.json,1s", "column json is invalid"),
        ("dp,tp,nproc,step\n8,2,8,1s", "line 2: dp 8 is invalid: it must be nproc (8) /"),
        ("dp,tp,step\n8,4,1s", "nproc (16) / (tp x pp x cp), which here is 32 ranks; a column"),
        ("layout,mbs,step\nwide,x,1s", "line 2 (wide): mbs x is invalid"),
        ("mbs,step (h)\n1,9d", "line 2: step 9d is invalid"),
        (
            "mbs,seq-len (K),step\n1,8,9s",
            "line 1: column seq_len_(k) is invalid: did you mean seq_len?",
        ),
        ("mbs,step\n1,1s\n1,36.2ms", "line 3: step '36.2 ms' is invalid: it must be at least "),
        ("dp,step\n2x0,1s", "line 2: dp 2x0 is invalid"),
        ("mbs;step\n1;1s\n\nx;1s", "line 4: mbs x is invalid"),
    ],
)
def test_rows_that_are_refused(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    assert status([*COMMAND, "--anchor", str(path)]) == 2
    assert expected in capsys.readouterr().err


def test_a_list_needs_a_column_of_the_anchors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a row would be another step in each combination; factors are fitted once."""
    words = ["predict", "gpt2-125m", "--nproc", "8", "--device", "h100-sxm", "--mbs", "1,2"]
    file, answer = tmp_path / "measured.csv", tmp_path / "rows.json"
    file.write_text("nproc,step\n8,50ms\n")
    assert status([*words, "--anchor", str(file)]) == 2
    assert (
        "line 1: mbs is missing: give a column mbs, since the command has no"
        in capsys.readouterr().err
    )
    file.write_text("mbs,step\n1,60ms\n2,60ms\n")
    assert status([*words, "--anchor", str(file), "--json", str(answer)]) == 0
    alone = tmp_path / "alone.json"
    assert status([*words[:-1], "2", "--anchor", str(file), "--json", str(alone)]) == 0
    rows = {row["mbs"]: row["step_s"] for row in json.loads(answer.read_text())["rows"]}
    assert rows[2] == json.loads(alone.read_text())["step_s"]
