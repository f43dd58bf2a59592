"""stepmark predict FILE of AICB and SimAI: the notes name what the file lacks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli import main

AICB = Path(__file__).parents[1] / "data" / "aicb"
GPT13B = AICB / "tutorial_gpt13b_tp8_pp1_w8_gbs2"
GPT175B = AICB / "gpt175b_tp8_pp8_w1024_gbs1536_sp"
SIMAI, SIMAI_STAGE = GPT13B / "simai_aiob_example.txt", GPT175B / "simai_aiob_example.txt.gz"
Predict = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str]) -> Predict:
    def call(file: Path, *words: str) -> tuple[int, Any, str]:
        """Return the exit code, the document of --json and the messages."""
        code = main.status(["predict", str(file), "--device", "h100", *words, "--json", "-"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return call


@pytest.mark.parametrize(
    "file",
    [GPT13B / "mocked.csv", AICB / "ds_stage2_llama7b_w128" / "mocked.csv"],
    ids=lambda file: file.parent.name,
)
def test_a_step_of_communication_alone(predict: Predict, file: Path) -> None:
    code, document, _ = predict(file)
    assert code == 0
    assert "the file has no computation" in document["notes"][0]
    assert document["is_lower_bound"]
    assert document["bubble_s"] == 0  # all stages are there


def test_text_has_the_gap_before_other_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.status(["predict", str(GPT13B / "mocked.csv"), "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "predicted step at least" in out.splitlines()[0]
    assert out.partition("note: ")[2].startswith("the file has no computation")


@pytest.mark.parametrize(
    "file", [SIMAI_STAGE, GPT175B / "mocked_comp.csv.gz"], ids=lambda file: file.name
)
def test_one_stage_of_a_pipeline_has_no_known_bubble(predict: Predict, file: Path) -> None:
    _, document, _ = predict(file)
    assert document["notes"][0].startswith("the file has one of 8 stages: no pipeline")
    assert document["bubble_s"] is None


def test_all_stages_of_a_file_have_no_such_note(predict: Predict, tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    words = "workload generate --model gpt2-125m --framework megatron --pp 2 --world-size 4"
    assert main.status([*words.split(), "--gbs", "8", "-o", str(file)]) == 0
    _, document, _ = predict(file)
    assert document["bubble_s"] > 0
    assert not any(note.startswith("the file has") for note in document["notes"])


def test_work_without_lines_in_aicb_is_named(predict: Predict) -> None:
    _, document, _ = predict(GPT13B / "mocked_comp.csv.gz")
    kinds = "attention, norm and elementwise, loss, optimizer"
    assert document["notes"][0] == f"the file has no computation of these kinds: {kinds}"
    assert document["is_lower_bound"]


def test_products_that_are_too_large_give_no_lower_bound(predict: Predict) -> None:
    _, document, _ = predict(GPT175B / "mocked_comp.csv.gz")
    assert (
        "of the file: products of MegatronColumnLinear are 8 times too large"
        in (document["notes"])
    )
    assert not document["is_lower_bound"]
    assert not any("at least" in note for note in document["notes"])


def test_rows_of_layers_are_of_no_single_kind(predict: Predict) -> None:
    """AICB's rows of 1.82 ms have all of the attention block; 40 layers, 2 micro-batches."""
    _, document, _ = predict(SIMAI)
    compute = {r["line"]: r["time_ns"] for r in document["ledger"] if r["group"] == "compute"}
    assert compute["computation of the file"] == pytest.approx(
        2 * 40 * 3 * (1.82e6 + 2.478e6) + _final(SIMAI), rel=1e-6
    )
    assert compute["optimizer"] == pytest.approx(34.021e6, rel=1e-6)
    assert set(compute) <= {"computation of the file", "optimizer", "norm and elementwise"}


def _final(file: Path) -> int:
    rows = (line.split() for line in file.read_text().splitlines()[2:])
    return sum(sum(map(int, row[2:9:3])) for row in rows if row[0] == "final_column")


def test_what_if_leaves_times_of_unknown_kind(predict: Predict) -> None:
    _, before, _ = predict(SIMAI)
    _, after, _ = predict(SIMAI, "--what-if", "flops=2x")
    assert after["step_s"] == before["step_s"]
    assert any("flops has no effect" in note for note in after["notes"])


def test_only_rows_without_any_time_count_as_untimed(predict: Predict) -> None:
    _, document, _ = predict(SIMAI)
    (untimed,) = (note for note in document["notes"] if "take no time" in note)
    (partly,) = (note for note in document["notes"] if "some passes only" in note)
    assert untimed.startswith("4 operations")
    assert "grad_param_compute" not in untimed
    assert partly.endswith(": grad_param_compute, embedding_layer")


def test_rows_without_times_are_refused_with_what_helps(predict: Predict) -> None:
    code, _, error = predict(GPT13B / "simai_no_aiob.txt")
    assert code == 2
    assert "AIOB profile" in error
    assert "workload convert" not in error
