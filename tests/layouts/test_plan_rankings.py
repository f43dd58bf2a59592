"""Scores of plan's order: of measured layouts, and of a layout that a paper chose."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import plan_rankings
import published_jobs
from plan_rankings import MeasuredLayout

STEPS_S = st.floats(0.1, 100)
LAYOUTS = st.lists(st.builds(MeasuredLayout, STEPS_S, STEPS_S, st.booleans()), min_size=1)


def test_the_first_five_are_by_prediction() -> None:
    measured_s = (4.0, 3.0, 6.0, 5.0, 2.5, 2.0)
    layouts = [MeasuredLayout(number, s, fits=True) for number, s in enumerate(measured_s)]
    own = plan_rankings.ranking(layouts[::-1])
    assert (own.num_layouts, own.num_fits, own.fastest_fits) == (6, 6, True)
    assert own.first == pytest.approx(4.0 / 2.0 - 1)
    assert own.first_five == pytest.approx(2.5 / 2.0 - 1)
    assert own.drawn == pytest.approx(3.5 / 2.0 - 1)


def test_layouts_that_do_not_fit_are_not_shown() -> None:
    layouts = [MeasuredLayout(1.0, 2.0, fits=False), MeasuredLayout(2.0, 3.0, fits=True)]
    own = plan_rankings.ranking(layouts)
    assert (own.num_fits, own.fastest_fits) == (1, False)
    assert own.first == own.first_five == pytest.approx(0.5)


@given(LAYOUTS)
def test_laws_of_rankings(layouts: list[MeasuredLayout]) -> None:
    own = plan_rankings.ranking(layouts)
    assert 0 <= own.first_five <= own.first
    assert own.drawn >= 0
    perfect = [MeasuredLayout(each.measured_s, each.measured_s, True) for each in layouts]
    assert plan_rankings.ranking(perfect).first == 0


def test_a_few_rows_of_the_playbook() -> None:
    """On 8 GPUs the first by prediction is also the fastest measured."""
    playbook = map(
        published_jobs.playbook_row, published_jobs.read_rows("playbook-layouts.csv")
    )
    rows = [row for row in playbook if row["gpus"] == "8" and row["ran"] == "1"]
    rows = [row for row in rows if row["model"] == "1B" and row["gbs"] == "256"][:6]
    ((name, layouts),) = plan_rankings.measured_groups(rows, fewest=6).items()
    assert name == "1B on 8, batch 256"
    assert [each.measured_s for each in layouts] == pytest.approx(
        [256 * 4096 / (float(row["tokens_per_s_gpu"]) * 8) for row in rows]
    )
    assert plan_rankings.ranking(layouts).first == 0
    assert plan_rankings.measured_groups(rows) == {}


def test_a_published_layout_is_one_of_its_search(tmp_path: Path) -> None:
    """22B on 8 A100 (arXiv:2205.05198, table 5): tp 8 with selective recomputation, 1.10 s."""
    row = next(row for row in plan_rankings.published_rows() if row["model"] == "Megatron-22B")
    search = plan_rankings.search_of(row, tmp_path)
    assert any(each.parallel.pp == 2 for each in search.layouts)
    some = [each for each in search.layouts if each.parallel.tp == 8 and each.job.mbs > 1]
    choice = plan_rankings.choice_of(plan_rankings.PublishedSearch(row, search.cluster, some))
    own = choice.published
    assert (own["tp"], own["pp"], own["mbs"], own["recompute"]) == (8, 1, 4, "selective")
    assert own["step_s"] == pytest.approx(1.10, rel=0.05)
    assert choice.fits
    assert choice.excess(choice.first) <= plan_rankings.CLOSE
    text = [*choice.lines()]
    assert text[0].startswith("Megatron-22B on 8: +0.0%")
    assert text[1].endswith("1.115 s, measured 1.1 s")


def test_parts_of_a_published_step_are_the_step() -> None:
    row = {"step_s": 10.0, "exposed_comm_s": 2.0, "bubble_s": 3.0}
    assert plan_rankings.parts_s(row) == {
        "computing": 5.0,
        "exposed communication": 2.0,
        "pipeline bubble": 3.0,
    }


def test_published_layouts_that_are_compared() -> None:
    names = [plan_rankings.name_of(row) for row in plan_rankings.published_rows()]
    assert len({*names}) == len(names)
    assert {"Llama-3.1-405B on 8192", "Llama-3.1-405B on 16384"} <= {*names}
