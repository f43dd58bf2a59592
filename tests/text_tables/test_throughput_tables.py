"""Results of a Hugging Face Trainer, with and without their quotes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stepmark.ground.reading import Table
from stepmark.text_tables import find, tables_of

SLIDES = Path(__file__).parents[2] / "examples" / "frontier-rccl.txt"
RESULT = (
    "{'train_runtime': 1126.1257, 'train_samples_per_second': 36.372, "
    "'train_steps_per_second': 0.009, 'train_loss': 80.29, 'epoch': 0.09}"
)


def metrics(table: Table) -> dict[str, tuple[float | None, float | None]]:
    return {one.label: (one.time_s, one.rate) for one in table.readings}


@pytest.fixture(name="results", scope="module")
def _results() -> list[Table]:
    return [table for table in find(SLIDES) if table.tool == "trainer"]


def test_runtime_times_rate_is_the_same_work_in_all_three_runs(
    results: Sequence[Table],
) -> None:
    """40 960 samples of GPT-J and 192 000 of BigBird: the lost quotes cost no figure."""
    samples = []
    for table in results:
        found = metrics(table)
        runtime, rate = found["train_runtime"][0], found["train_samples_per_second"][1]
        assert runtime is not None
        assert rate is not None
        samples.append(runtime * rate)
    assert samples[:3] == pytest.approx([40_960] * 3, rel=1e-4)
    assert samples[3:] == pytest.approx([192_000] * 3, rel=1e-4)


def test_loss_and_epoch_are_no_speed(results: Sequence[Table]) -> None:
    for table in results:
        assert set(metrics(table)) == {
            "train_runtime",
            "train_samples_per_second",
            "train_steps_per_second",
        }


@pytest.mark.parametrize(
    "text",
    [
        RESULT,
        RESULT.replace("'", '"'),
        RESULT.replace("second':", "second:"),
        RESULT.replace("'", "").replace("{", ""),
        "[rank0]: " + RESULT,
    ],
    ids=["python", "json", "lost quotes", "no quotes", "prefix"],
)
def test_every_form_of_a_result_is_one_table(text: str) -> None:
    (table,) = tables_of(text + "\n", "x")
    assert metrics(table) == {
        "train_runtime": (pytest.approx(1126.1257), None),
        "train_samples_per_second": (None, 36.372),
        "train_steps_per_second": (None, 0.009),
    }


def test_results_that_follow_each_other_are_apart() -> None:
    tables = tables_of(f"{RESULT}\n{RESULT.replace('train', 'eval')}\n{RESULT}\n", "x")
    assert [one.first_line for one in tables] == [1, 2, 3]
    assert "eval_runtime" in metrics(tables[1])


@pytest.mark.parametrize(("text", "bound"), [("0.0", 0.05), ("0.0e-02", 0.0005)])
def test_a_rate_that_rounds_to_zero_is_a_bound(text: str, bound: float) -> None:
    (table,) = tables_of(RESULT.replace("0.009", text), "x")
    (last,) = (one for one in table.readings if one.label == "train_steps_per_second")
    assert (last.rate, last.rate_below) == (None, pytest.approx(bound))


@pytest.mark.parametrize(
    "line",
    ["throughput: 123 samples/s", "train_samples_per_second", "train_runtime: n/a"],
)
def test_words_without_a_result_are_no_table(line: str) -> None:
    assert tables_of(f"{line}\n", "x") == []
