"""The exit code of `check` over made-up launches: 0 only if every case is within the limit."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.report.records import COPY, measured, run_info
from tests.store.writers import new_run

from stepmark.app import check
from stepmark.core.record import Skipped
from stepmark.core.verb_options import CheckOptions


def runs(root: Path, name: str, times_s: Sequence[float]) -> list[Path]:
    """A run of one case per time."""
    paths = []
    for number, time_s in enumerate(times_s):
        info = dataclasses.replace(run_info(), run_id=f"{name}{number}")
        with new_run(root, info) as writer:
            writer.append(dataclasses.replace(measured(COPY, time_s), run_id=info.run_id))
        paths.append(root / info.run_id)
    return paths


SPREAD = (1.0, 1.001, 0.999, 1.0005, 0.9995)
WIDE = (1.0, 1.02, 0.98, 1.01, 0.99)


@pytest.mark.parametrize(
    ("before", "now", "code", "words"),
    [
        ((1.0,), SPREAD, 0, "0 of 1 cases slower"),
        ((1.0,), [1.2 * s for s in SPREAD], 1, "1 of 1 cases slower"),
        ((1.0,), [1.026 * s for s in SPREAD], 3, "use --launches"),
        ((1.0,), [1.04 * s for s in WIDE], 3, "reference of several launches"),
        (SPREAD, [1.0449 * s for s in WIDE], 3, "use --launches"),
        ((1.0,), (1.0, 1.0, 1.0), 3, "no interval (identical values)"),
        ((1.0,), (1.0,), 3, "no interval (one launch)"),
        (SPREAD, SPREAD, 0, "0 of 1 cases slower"),
    ],
)
def test_only_a_certain_pass_ends_with_0(
    before: Sequence[float],
    now: Sequence[float],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    baseline = ",".join(map(str, runs(tmp_path, "before", before)))
    paths = runs(tmp_path, "now", now)
    monkeypatch.setattr(check, "_measure_again", lambda *_: (paths, 0, set()))
    assert check.run(CheckOptions(baseline=baseline)) == code
    assert words in capsys.readouterr().err


def test_a_check_that_measures_nothing_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (baseline,) = runs(tmp_path, "before", (1.0,))
    with new_run(tmp_path, dataclasses.replace(run_info(), run_id="now")) as writer:
        writer.append(Skipped(run_id="now", case=COPY, reason="no GPU"))
    monkeypatch.setattr(check, "_measure_again", lambda *_: ([tmp_path / "now"], 3, set()))
    assert check.run(CheckOptions(baseline=str(baseline))) == 3
    assert "nothing was measured" in capsys.readouterr().err


def test_the_launches_that_would_decide_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [1.026 * s for s in SPREAD]
    baseline = str(runs(tmp_path, "before", (1.0,))[0])
    monkeypatch.setattr(
        check, "_measure_again", lambda *_: (runs(tmp_path, "now", times), 0, set())
    )
    assert check.run(CheckOptions(baseline=baseline)) == 3
    count = int(capsys.readouterr().err.split("--launches ")[1])
    more = [times[place % len(times)] for place in range(count)]
    monkeypatch.setattr(
        check, "_measure_again", lambda *_: (runs(tmp_path, "more", more), 0, set())
    )
    assert check.run(CheckOptions(baseline=baseline)) == 0
