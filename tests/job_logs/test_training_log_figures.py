"""Figures of a training log have each of its steps, once, in its part."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from tests.job_logs.training_lines import SEQ_LEN, VERSIONS, KnownStep

from stepmark.job_logs.training_log.steady_state import steady_state
from stepmark.job_logs.training_log.training_log import read_training_log
from stepmark.job_logs.training_log.training_log_figures import figures
from stepmark.tables.figures import Figure

Points = dict[int, float | None]


def steps(count: int, slow: Sequence[int] = ()) -> list[KnownStep]:
    """Return steps of about 2 s, the first three of 6 s, those of `slow` of 5 s."""
    random = Random(count)
    return [
        KnownStep(
            number=number,
            step_s=6.0 if number <= 3 else 5.0 if number in slow else random.gauss(2.0, 0.01),
            loss=2.5 + 1 / number,
        )
        for number in range(1, count + 1)
    ]


def drawn(
    folder: Path, starts: Sequence[Sequence[KnownStep]], name: str = "megatron 2026"
) -> list[Figure]:
    version = next(own for own in VERSIONS if own.name == name)
    lines = [line for start in starts for step in start for line in version.lines(step)]
    path = folder / "job.log"
    path.write_text("\n".join([*lines, ""]))
    log = read_training_log(path)
    return list(figures(log, steady_state(log)))


def points(figure: Figure) -> dict[str, Points]:
    return {
        own.name: {int(x or 0): y for x, y in zip(own.x, own.y, strict=True)}  # type: ignore[misc]
        for own in figure.series
    }


def test_each_step_is_drawn_once_in_its_part(tmp_path: Path) -> None:
    known = steps(60, slow=(30, 45))
    times, loss = drawn(tmp_path, [known])
    of_part = points(times)
    assert list(of_part) == ["warm-up", "steady", "outlier"]
    assert set(of_part["warm-up"]) >= {1, 2, 3}
    assert set(of_part["outlier"]) == {30, 45}
    together = {number: y for own in of_part.values() for number, y in own.items()}
    assert together == pytest.approx({own.number: own.step_s for own in known}, rel=1e-4)
    assert sum(map(len, of_part.values())) == len(known)
    assert times.y.title == "s"
    assert times.right is not None
    assert [own.name for own in times.right.series] == ["steady"]
    assert points(loss)["loss"] == {own.number: float(f"{own.loss:.6E}") for own in known}
    assert not times.marks


def test_steps_of_other_starts_are_drawn_apart(tmp_path: Path) -> None:
    known = steps(60)
    times, *_ = drawn(tmp_path, [known[:50], known[40:]])
    of_part = points(times)
    assert set(of_part["other starts"]) == set(range(1, 51))
    assert set(of_part["warm-up"]) | set(of_part["steady"]) == set(range(41, 61))
    assert [mark.x for mark in times.marks] == [(41, 41)]
    assert "A dashed line: the job began anew." in times.note


def test_a_very_long_log_has_few_points_and_all_outliers(tmp_path: Path) -> None:
    slow = (7001, 7002, 9999)
    times, loss = drawn(tmp_path, [steps(10_000, slow)])
    assert all(len(own.x) <= 4000 for own in (*times.series, *loss.series))
    assert set(points(times)["outlier"]) == set(slow)
    assert "steady lines one in 3 is drawn" in times.note


def test_short_steps_are_in_ms_and_slow_ones_on_a_logarithmic_axis(tmp_path: Path) -> None:
    known = [KnownStep(own.number, own.step_s / 10, own.loss) for own in steps(40)]
    known[20] = KnownStep(21, 30.0, 2.5)
    times, _ = drawn(tmp_path, [known])
    assert times.y.title == "ms"
    assert times.y.base == 10
    assert points(times)["outlier"] == {21: 30_000.0}


def test_rates_are_drawn_where_no_time_is_known(tmp_path: Path) -> None:
    known = steps(40)
    times, _, memory = drawn(tmp_path, [known], "torchtitan 2026")
    assert times.title == "Rates of steps"
    assert times.y.title == "tokens/s/GPU"
    rate = points(times)["steady"][40]
    assert rate == round(128 * SEQ_LEN / 16 / known[39].step_s)
    assert set(points(memory)["memory"].values()) == {42.5}


def test_a_loss_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    known = steps(40)
    known[30] = KnownStep(31, 2.0, float("nan"))
    _, loss = drawn(tmp_path, [known])
    assert loss.note == "Nan in 1 line of any rank, a gap."
