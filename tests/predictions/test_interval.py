"""Laws of conformal intervals."""

import json
import math
import random
import sys
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import published_jobs
import published_steps

from stepmark.cli.main import status
from stepmark.ground.options import build
from stepmark.ground.units import format_time, with_one_unit
from stepmark.predictions import calibrated_errors
from stepmark.predictions.calibrated_errors import PastError
from stepmark.predictions.interval import COVERAGE, few_sided, signed_interval
from stepmark.predictions.predict import of_job, predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import PredictOptions
from stepmark.predictions.prediction import Prediction
from stepmark.predictions.sheet_errors import (
    FEWEST,
    TABLE,
    SheetError,
    Traits,
    errors_like,
    interval_by,
    read_errors,
    traits_of,
)

ROOT = Path(__file__).parents[2]
STEPS = published_jobs.read_rows("published-steps.csv")


@pytest.mark.parametrize(("count", "coverage"), [(1, 0.5), (4, 0.8), (8, 8 / 9), (9, 0.9)])
def test_few_rows_have_the_largest_error_and_say_how_often_it_holds(
    count: int, coverage: float
) -> None:
    made = few_sided([0.01] * (count - 1) + [-0.05], 0.4, "rows")
    assert made.coverage == pytest.approx(coverage)
    assert made.high_s == pytest.approx(0.4 * math.exp(0.05))
    assert made.low_s == pytest.approx(0.4 * math.exp(-0.05))
    assert str(made) == f"{100 * coverage:.0f} % interval 380.5 to 420.5 ms by {count} rows"


def test_no_rows_have_no_interval() -> None:
    assert str(few_sided([], 0.4, "rows")) == "no interval: 0 rows, 9 needed"


@pytest.mark.parametrize("count", [5, 15])
def test_coverage_of_exchangeable_rows(count: int) -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(2000):
        *known, new = (rng.gauss(0, 0.02) for _ in range(count + 1))
        made = few_sided(known, 1.0, "rows")
        assert made.low_s is not None
        assert made.high_s is not None
        covered += made.low_s <= math.exp(new) <= made.high_s
    assert covered / 2000 >= made.coverage - 0.02


@settings(max_examples=50)
@given(st.lists(st.floats(-2, 2), min_size=9, max_size=60), st.floats(0.001, 100))
def test_signed_interval_has_all_but_a_twentieth_on_each_side(
    errors: list[float], predicted_s: float
) -> None:
    made = signed_interval(errors, predicted_s, "rows")
    assert made.low_s is not None
    assert made.high_s is not None
    below = sum(predicted_s * math.exp(error) < made.low_s * (1 - 1e-9) for error in errors)
    above = sum(predicted_s * math.exp(error) > made.high_s * (1 + 1e-9) for error in errors)
    assert below + above <= (len(errors) + 1) * (1 - COVERAGE)
    if len(errors) >= 19:
        assert max(below, above) <= (len(errors) + 1) * (1 - COVERAGE) / 2


def test_an_interval_of_longer_steps_begins_at_the_prediction() -> None:
    made = signed_interval([math.log(1.1 + index / 100) for index in range(21)], 2.0, "rows")
    assert (made.low_s, made.high_s) == (2.0, pytest.approx(2.6))
    assert made.median_ratio == pytest.approx(1.2)
    ends = "90 % interval 2 to 2.6 s by 21 rows"
    assert str(made) == f"{ends}, which took 1.2 x as long in the median: expect 2.4 s, not 2 s"
    shorter = signed_interval(
        [-math.log(1.1 + index / 100) for index in range(21)], 2.0, "rows"
    )
    assert (shorter.low_s, shorter.high_s) == (pytest.approx(2 / 1.3), 2.0)
    assert "0.83 x as long in the median: expect 1.667 s, not 2 s" in str(shorter)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-2, 2), min_size=19, max_size=60),
    st.floats(0.001, 100),
    st.floats(0.1, 10),
    st.randoms(use_true_random=False),
)
def test_laws_of_signed_intervals(
    errors: list[float], predicted_s: float, scale: float, rng: random.Random
) -> None:
    """It holds the prediction, is in proportion to it, and has no order of rows."""
    made = signed_interval(errors, predicted_s, "rows")
    assert made.low_s is not None
    assert made.high_s is not None
    assert made.low_s <= predicted_s <= made.high_s
    scaled = signed_interval(errors, scale * predicted_s, "rows")
    assert scaled.low_s == pytest.approx(scale * made.low_s)
    assert scaled.high_s == pytest.approx(scale * made.high_s)
    rng.shuffle(errors)
    assert signed_interval(errors, predicted_s, "rows") == made
    if made.median_ratio is None:
        assert min(errors) <= 0 <= max(errors)
    else:
        assert made.low_s <= predicted_s * made.median_ratio <= made.high_s


def test_coverage_of_signed_intervals() -> None:
    """Exchangeable draws whose sources count alike are inside as often as is stated."""
    rng = random.Random(11)
    inside = 0
    for _ in range(500):
        *known, new = (
            SheetError("ab"[index % 2], "h100-sxm", (), rng.gauss(0.2, 0.3))
            for index in range(41)
        )
        made = interval_by(known, 1.0)
        assert made.low_s is not None
        assert made.high_s is not None
        inside += made.low_s <= math.exp(new.log_ratio) <= made.high_s
    assert inside / 500 >= COVERAGE - 0.03


def test_signed_interval_of_few_rows_has_equal_sides() -> None:
    made = signed_interval([0.1] * 9, 1.0, "rows")
    assert made.low_s == pytest.approx(math.exp(-0.1))
    assert made.high_s == pytest.approx(math.exp(0.1))
    assert str(signed_interval([0.1] * 8, 1.0, "rows")) == "no interval: 8 rows, 9 needed"


def sheet_errors(count: int, log_ratio: float, *traits: str, source: str) -> list[SheetError]:
    return [SheetError(source, "h100-sxm", traits, log_ratio)] * count


def test_a_small_class_is_part_of_a_larger_one() -> None:
    traits = ("the host", "pytorch")
    small = sheet_errors(FEWEST - 1, 0.1, "the host", "megatron", source="a")
    large = sheet_errors(FEWEST, 0.2, *traits, source="b")
    rows = small + large
    rows += sheet_errors(FEWEST - 1, 0.3, "communication", "pytorch", source="b")
    assert errors_like(rows, traits) == (large, traits)
    assert errors_like(rows, ("the host", "megatron")) == (small + large, traits[:1])
    assert errors_like(rows, ("communication", "pytorch")) == (rows, ())


def test_sources_count_alike() -> None:
    """Of two sources one has nine tenths of the steps, and is not all of the interval."""
    traits = ("the host", "pytorch")
    rows = sheet_errors(90, 0.5, *traits, source="a") + sheet_errors(
        10, 0.1, *traits, source="b"
    )
    rows[-1:] = sheet_errors(1, -0.2, *traits, source="b")
    made = interval_by(rows, 1.0)
    assert made.num_rows == 100
    assert (made.low_s, made.high_s) == (
        pytest.approx(math.exp(-0.2)),
        pytest.approx(math.exp(0.5)),
    )
    more = interval_by([*rows, *sheet_errors(10, 0.1, *traits, source="b")], 1.0)
    assert more.low_s == 1.0
    assert more.high_s == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("options", "waits_for"),
    [
        ({"mbs": "2"}, "under 10 % exposed communication"),
        ({"mbs": "8", "tp": "8"}, "10 to 30 % exposed communication"),
        ({"mbs": "1", "seq_len": "128"}, "over 30 % exposed communication"),
        ({"models": ("gpt2-125m",), "nproc": "1", "strategy": "single"}, "the host"),
    ],
)
def test_classes_are_by_exposed_communication(
    options: dict[str, object], waits_for: str
) -> None:
    step = {"models": ("llama-3.1-8b",), "num_layers": "2", "nproc": "16", **options}
    inputs = inputs_of(build(PredictOptions, {**step, "device": "h100-sxm", "host": "slow"}))
    assert traits_of(predict(inputs)) == (waits_for, "pytorch")


def test_errors_of_published_steps_are_those_of_todays_predictions() -> None:
    """The table is written again when predictions change: validation/sheet_errors.py write."""
    errors: dict[tuple[str, str, Traits], list[float]] = {}
    for each in read_errors():
        errors.setdefault((each.source, each.device, each.traits), []).append(each.log_ratio)
    sources = ("MT-NLG-2022", "llm-foundry")
    rows = [next(row for row in STEPS if row["source"] == source) for source in sources]
    for row in rows:
        scored = published_steps.score(row)
        assert scored.outcome
        device = published_jobs.job_of(row).device
        ratio = math.log(scored.published_s / scored.outcome.step_s)
        assert f"{ratio:.3f}" in {
            f"{own:.3f}" for own in errors[row["source"], device, scored.outcome.traits]
        }
    assert resources.files("stepmark").joinpath("data", TABLE).stat().st_size < 40_000


@pytest.mark.parametrize(
    ("device", "expected", "traits"),
    [
        (
            "h100-sxm",
            "its class: under 10 % exposed communication, pytorch (all from llm-foundry)",
            ["under 10 % exposed communication", "pytorch"],
        ),
        (
            "b200",
            "no published step is of a device like b200: the interval is by the errors",
            [],
        ),
    ],
)
def test_predictions_by_data_sheet_have_an_interval(
    device: str,
    expected: str,
    traits: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = tmp_path / "answer.json"
    words = ["--nproc", "8", "--mbs", "2", "--num-layers", "2", "--device", device]
    assert status(["predict", "llama-3.1-8b", *words, "--json", str(answer)]) == 0
    document = json.loads(answer.read_text())
    interval = document["interval"]
    assert interval["low_s"] < interval["high_s"]
    assert interval["num_rows"] >= FEWEST
    assert interval["traits"] == traits
    assert interval["median_ratio"] is None
    low, high = (format_time(interval[end]) for end in ("low_s", "high_s"))
    printed = capsys.readouterr().out
    ends = with_one_unit(low, "to", high)
    assert f", 90 % interval {ends} by {interval['num_rows']} published steps" in printed
    assert expected in printed


def of_run(name: str, **changes: Any) -> Prediction:
    return of_job(build(PredictOptions, {"from_run": ROOT / "results" / name, **changes}))


def test_a_calibrated_step_has_the_errors_of_committed_ones_like_it() -> None:
    rows = Counter(each.traits for each in calibrated_errors.past_errors())
    single = of_run("h100-run")
    traits = ("bound by the device", "one GPU")
    assert single.interval is not None
    assert single.interval.traits == traits
    assert single.interval.num_rows == rows[traits] >= 18
    assert single.interval.coverage == COVERAGE
    assert single.interval.high_s is not None
    assert 1 < single.interval.high_s / single.step_s < 1.03
    several = of_run("h100-x4-predictions-1", models=("llama-3.1-8b",), seq_len=8192)
    assert several.interval is not None
    traits = ("bound by the device", "several GPUs")
    assert several.interval.num_rows == rows[traits] >= 10
    assert several.interval.coverage == COVERAGE
    few = [PastError(traits, 0.1)] * 4
    _, notes = calibrated_errors.interval_of(several, errors=few)
    assert any("so few give 80 % at most" in note for note in notes)


def test_a_scaled_step_and_one_on_a_cpu_have_no_interval() -> None:
    scaled = of_run("h100-run", mbs=(4,))
    assert scaled.interval is None
    assert any("is scaled or of another source" in note for note in scaled.notes)
    case = scaled.inputs.case
    assert case is not None
    on_cpu = replace(scaled, inputs=replace(scaled.inputs, case=replace(case, device="cpu")))
    interval, notes = calibrated_errors.interval_of(on_cpu)
    assert (interval, notes) == (None, ["no interval: committed predictions are of GPUs"])


@pytest.mark.parametrize(("own", "num_rows"), [(4, 4), (3, 8), (0, 5)])
def test_a_class_of_few_is_part_of_that_of_as_many_gpus(own: int, num_rows: int) -> None:
    single = of_run("h100-run")
    errors = [PastError(("bound by the device", "one GPU"), 0.01)] * own
    errors += [PastError(("bound by the host", "one GPU"), 0.5)] * 5
    errors += [PastError(("bound by the device", "several GPUs"), 0.7)] * 9
    interval, _ = calibrated_errors.interval_of(single, errors=errors)
    assert interval is not None
    assert interval.num_rows == num_rows
    most = 0.01 if own == 4 else 0.5
    assert interval.high_s == pytest.approx(single.step_s * math.exp(most))


def test_an_interval_reaches_as_far_as_the_calibrated_step_was_off() -> None:
    single = of_run("h100-run")
    near, _ = calibrated_errors.interval_of(single, 0.001)
    assert near == replace(single.interval, low_s=near.low_s, high_s=near.high_s)
    slow, _ = calibrated_errors.interval_of(single, math.log(1.3))
    fast, _ = calibrated_errors.interval_of(single, math.log(0.8))
    assert slow.high_s == pytest.approx(1.3 * single.step_s)
    assert slow.low_s == near.low_s
    assert fast.low_s == pytest.approx(0.8 * single.step_s)
    assert fast.high_s == near.high_s


def test_a_changed_device_has_no_interval_by_steps_of_others() -> None:
    changed = of_run("h100-run", what_if=(("flops", 2.0),))
    assert changed.interval is None
    assert any("of devices as they are" in note for note in changed.notes)
