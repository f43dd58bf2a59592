"""A measured step and its prediction."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepmark as sm
from stepmark.cli.main import status
from stepmark.ground.units import format_time
from stepmark.predictions.measured_step import CLOSE, Figure, MeasuredStep, factor_for, lines
from stepmark.predictions.predict import predict

STEP = "predict llama-3.1-8b --nproc 64 --device h100-sxm --gbs 128"


def called(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = status(words.split())
    out, err = capsys.readouterr()
    return code, out, err


def document(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = called(f"{words} --json -", capsys)
    assert code == 0, err
    loaded: dict[str, Any] = json.loads(out)
    return loaded


@given(
    parts=st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=4
    ).filter(lambda parts: max(a + b for a, b in parts) > 0.01),
    ratio=st.floats(0.05, 20),
)
def test_a_factor_makes_the_step_as_long_as_measured(
    parts: list[tuple[float, float]], ratio: float
) -> None:
    """A step is the longest of its chains, each with a part that another rate changes."""

    def step_s(factor: float) -> float:
        return max(fixed + part / factor for fixed, part in parts)

    measured_s = ratio * step_s(1.0)
    factor = factor_for(step_s, measured_s)
    if factor is None:
        assert step_s(1e-3) < measured_s or step_s(1e3) > measured_s
    else:
        assert step_s(factor) == pytest.approx(measured_s, rel=1.01 * CLOSE)


def test_each_cause_alone_is_the_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    """--what-if with the factor predicts what was measured."""
    measured = document(f"{STEP} --measured 2.9s", capsys)["measured"]
    assert measured["ratio"] == pytest.approx(2.9 / (2.9 - measured["gap_s"]))
    assert set(measured["factors"]) == {"link", "hbm", "flops", "host"}
    for name in ("link", "hbm", "flops"):
        factor = measured["factors"][name]
        changed = document(f"{STEP} --what-if {name}={factor:.6f}x", capsys)
        assert changed["step_s"] == pytest.approx(2.9, rel=2 * CLOSE)


def test_a_slower_host_is_the_measured_step() -> None:
    options = {"nproc": 64, "gbs": 128, "device": "h100-sxm", "measured": "2.9s"}
    prediction = sm.predict("llama-3.1-8b", **options).prediction
    assert prediction.measured is not None
    factor = prediction.measured.factors["host"]
    assert factor is not None
    assert factor < 1
    inputs = prediction.inputs
    slow = replace(inputs, host_s=lambda op: inputs.host_s(op) / factor)
    assert predict(slow).step_s == pytest.approx(2.9, rel=CLOSE)


def test_a_rate_is_the_same_as_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = 128 * 8192
    figures = f"{tokens / 2}tokens/s", f"{tokens / 128}tok/s/GPU", f"{tokens / 2e3}ktokens/s"
    for text in figures:
        assert document(f"{STEP} --measured {text}", capsys)["measured"]["step_s"] == 2.0


def test_mfu_has_the_conventions_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand, for llama-3.1-8b: 8.03e9 parameters, of which 0.53e9 are looked up only."""
    measured = document(f"{STEP} --measured 2.9s", capsys)["measured"]
    shares = {row["convention"]: row["measured_mfu_pct"] for row in measured["conventions"]}
    num_params, embedding, layers, width, seq = 8_030_261_248, 128_256 * 4096, 32, 4096, 8192
    rate = 128 * seq / 2.9 / 64 / 989.4e12 * 100
    square = 12 * layers * width * seq
    norms = (2 * layers + 1) * width
    assert shares["6n"] == pytest.approx(6 * num_params * rate, rel=1e-3)
    assert shares["palm-all"] == pytest.approx((6 * num_params + square) * rate, rel=1e-3)
    without_table = 6 * (num_params - embedding) + square
    assert shares["torchtitan"] == pytest.approx(without_table * rate, rel=1e-3)
    causal = 6 * (num_params - embedding - norms) + square / 2
    assert shares["causal"] == shares["hfu"] == pytest.approx(causal * rate, rel=1e-3)


def test_recomputation_counts_in_hfu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    measured = document(f"{STEP} --ac full --measured 2.9s", capsys)["measured"]
    shares = {row["convention"]: row["measured_mfu_pct"] for row in measured["conventions"]}
    assert 1.2 < shares["hfu"] / shares["causal"] < 4 / 3


def test_the_first_line_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    step_s = document(STEP, capsys)["step_s"]
    code, out, _ = called(f"{STEP} --measured 2.9s", capsys)
    assert code == 0
    first, *others = out.splitlines()
    assert f"predicted step {format_time(step_s)}, " in first
    assert f"measured 2.9 s ({2.9 / step_s:.3g} x as long)" in first
    assert any("(--what-if flops=0." in line for line in others)
    assert any("the host at 0.0" in line for line in others)


def test_a_figure_above_the_peak_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = called(f"{STEP} --measured 0.5s", capsys)
    assert "faster than the device's peak: check the figure" in out
    _, out, _ = called(f"{STEP} --measured 1s", capsys)
    assert "check the figure" not in out


def test_what_equals_the_prediction_needs_no_cause(capsys: pytest.CaptureFixture[str]) -> None:
    step_s = document(STEP, capsys)["step_s"]
    assert document(f"{STEP} --measured {step_s:.6f}s", capsys)["measured"]["factors"] == {}


@pytest.mark.parametrize(("high_s", "word"), [(2.0, "inside"), (1.2, "outside")])
def test_the_interval_of_predictions(high_s: float, word: str) -> None:
    interval_s = 0.9, high_s
    step = MeasuredStep(step_s=1.5, predicted_s=1.0, factors={}, interval_s=interval_s)
    text = "\n".join(lines(step.document(None, None, 1, None)))
    assert f"{word} the interval of such predictions (900 ms to {high_s:g} s)" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{STEP} --measured 2s --what-if link=2x", "left out with --measured"),
        (f"{STEP} --measured 2s --tp 1,2", "--measured 2s is invalid: it must be left out"),
        (f"{STEP} --measured fast", "--measured fast is invalid"),
    ],
)
def test_refusals(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = called(words, capsys)
    assert code == 2
    assert expected in err


def test_a_rate_needs_the_tokens_of_a_step() -> None:
    assert Figure(500.0, "tokens/s/GPU").step_s(4000, 4) == 2.0
    with pytest.raises(Exception, match="does not tell the tokens"):
        Figure(500.0, "tokens/s").step_s(None, 4)


def test_the_page_has_the_measured_step_and_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "step.html"
    code, _, err = called(f"{STEP} --measured 2.9s --tokens 15T --html {page}", capsys)
    assert code == 0, err
    text = page.read_text()
    assert "longer than predicted" in text
    assert "palm-all" in text
    assert "15T tokens in " in text


def test_a_part_that_bounds_the_step_when_slow_needs_two_predictions() -> None:
    """A prediction with a slow host takes seconds."""
    factors = []

    def step_s(factor: float) -> float:
        factors.append(factor)
        return max(31.8, 4.0 / factor)

    assert factor_for(step_s, 33.0) == pytest.approx(4 / 33, rel=CLOSE)
    assert sum(step_s(factor) > 31.8 for factor in [*factors]) == 2
