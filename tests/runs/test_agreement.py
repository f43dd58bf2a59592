"""What a run says of its steps agrees: differences and gains, in all published results."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.predictions import ledger_page
from stepmark.predictions.predicted_steps import Step, StepReport, Suggestion
from stepmark.runs import step_report, suggestions
from stepmark.runs.suggestions import Measurement
from stepmark.store.view import view
from stepmark.timeline.ledger_rows import ledger_table
from stepmark.timeline.ledger_text import doubt

RESULTS = Path(__file__).parents[2] / "results"
RUNS = sorted(
    path.parent.name for path in RESULTS.glob("*/prediction.json") if path.parent.is_dir()
)
DIFFERENCE = r"; (?:([\d.,]+) ms (longer|shorter) than|as long as) predicted: ([^;]+);"


def with_trace(step: Measurement) -> tuple[Suggestion, ...]:
    """Suggest as if the run had its traces, which are too large to publish."""
    return suggestions.suggestions(replace(step, has_trace=True))


def report_of(name: str, monkeypatch: pytest.MonkeyPatch) -> StepReport:
    monkeypatch.setattr(step_report, "suggestions", with_trace)
    path = RESULTS / name
    report = step_report.step_report(path, view(path))
    assert report is not None
    return report


def check_differences(step: Step) -> None:
    """Those of lines add up to that of the steps, which is the one of the table."""
    assert step.predicted is not None
    table = ledger_table([step.predicted, step.measured.ledger])
    apart_ms = table.steps_ms[1] - table.steps_ms[0]
    clause = re.search(
        r"; (?:([\d.,]+) ms (longer|shorter) than|as long as) predicted: ([^;]+);",
        step.sentence,
    )
    assert clause, step.sentence
    total, side, lines = clause.groups()
    shown = [float(number) for number in re.findall(r"([+-][\d.]+) ms", lines)]
    assert sum(shown) == pytest.approx(apart_ms, abs=1e-6)
    sign = -1 if side == "shorter" else 1
    assert sign * float(total or 0) == pytest.approx(apart_ms, abs=1e-6)


def check_gains(step: Step) -> None:
    """Each gain is within what the others leave of the step, and its text says the same."""
    own = step.measured.ledger
    gains = [each for each in step.suggestions if each.gain_ns is not None]
    for each in gains:
        assert each.gain_ns is not None
        assert 0 < each.gain_ns <= own.window_ns
        shown = re.search(r"([\d.]+) ms \(([\d.]+) %\)", each.text)
        if shown:
            assert float(shown[1]) == pytest.approx(each.gain_ns / 1e6, rel=6e-3)
            assert float(shown[2]) == pytest.approx(
                100 * each.gain_ns / own.window_ns, abs=0.06
            )
    assert sum(each.gain_ns or 0 for each in gains) <= own.window_ns
    for each in step.suggestions:
        named = re.search(r"(All|[\d.]+ ms) of the ([\d.]+) ms (above|below)", each.text)
        if named:
            assert step.predicted is not None
            apart_ns = own.window_ns - step.predicted.window_ns
            assert (apart_ns > 0) == (named[3] == "above")
            assert float(named[2]) == pytest.approx(abs(apart_ns) / 1e6, rel=6e-3)
            if named[1] != "All":
                assert float(named[1].removesuffix(" ms")) <= float(named[2])
            assert each.gain_ns is None


@pytest.mark.parametrize("name", RUNS)
def test_published_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(name, monkeypatch)
    for step in report.steps:
        if doubt(step.measured.ledger):
            assert "predicted:" not in step.sentence
            assert all(each.gain_ns is None for each in step.suggestions)
            continue
        check_gains(step)
        if step.predicted is not None:
            check_differences(step)
    html = "".join(ledger_page.answer(report))
    for total, whole in re.findall(r"Together at most ([\d.]+) of the ([\d.]+) ms", html):
        assert float(total) <= float(whole)


def test_there_are_steps_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = "\n".join(
        each.text
        for name in ("h100-predictions-1", "h100-x4-predictions-3")
        for step in report_of(name, monkeypatch).steps
        for each in step.suggestions
    )
    for words in (
        "All of the ",
        " ms of the ",
        " above ",
        " below ",
        "to gain",
        "save at most",
    ):
        assert words in texts
