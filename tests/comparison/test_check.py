"""The exit code of `check` over made-up launches: 0 only if every case is within the limit."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.store.writers import new_run
from tests.tables.records import COPY, measured, run_info

from stepmark.cases.case import OpCase
from stepmark.cases.record import Skipped
from stepmark.comparison import check
from stepmark.comparison.check_options import CheckOptions
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import plain
from stepmark.model.ops import Copy


def runs(root: Path, name: str, times_s: Sequence[float]) -> list[Path]:
    """A run of one case per time."""
    return [launches(root, f"{name}{n}", [time_s]) for n, time_s in enumerate(times_s)]


def launches(
    root: Path,
    name: str,
    times_s: Sequence[float],
    apart_s: float = 60.0,
    cases: Sequence[OpCase] = (COPY,),
) -> Path:
    """A run of cases with a launch per time, which begin this long after one another."""
    info = dataclasses.replace(run_info(), run_id=name, command="stepmark op copy --budget 1s")
    with new_run(root, info) as writer:
        for number, time_s in enumerate(times_s, 1):
            for case in cases:
                record = measured(case, time_s)
                writer.append(
                    dataclasses.replace(
                        record, run_id=name, launch=number, started_at=number * apart_s
                    )
                )
    return root / name


def shown(now: Path, *before: Path, floor: float = 0.03) -> int:
    baseline = ",".join(map(str, before))
    return check.show(now, plain(CheckOptions(baseline=baseline, floor=floor)), 0)


SPREAD = (1.0, 1.001, 0.999, 1.0005, 0.9995)
WIDE = (1.0, 1.02, 0.98, 1.01, 0.99)
WILD = (1.0, 1.06, 0.94, 1.03, 0.97)


@pytest.mark.parametrize(
    ("before", "now", "code", "words"),
    [
        ((1.0,), SPREAD, 0, "0 of 1 cases slower"),
        ((1.0,), [1.2 * s for s in SPREAD], 1, "1 of 1 cases slower"),
        ((1.0,), [1.026 * s for s in SPREAD], 3, "use --launches"),
        ((1.0,), [1.04 * s for s in WIDE], 3, "and a baseline of"),
        (SPREAD, [1.0449 * s for s in WIDE], 3, "use --launches"),
        (WILD, [1.04 * s for s in WILD], 3, "and a baseline of"),
        (SPREAD, [1.0449 * s for s in WILD], 3, "use --launches"),
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(launches(tmp_path, "now", now), *runs(tmp_path, "before", before)) == code
    assert words in capsys.readouterr().err


def test_launches_of_one_baseline_count_as_those_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = launches(tmp_path, "now", [1.0449 * s for s in WILD])
    shown(now, *runs(tmp_path, "before", SPREAD))
    several = capsys.readouterr()
    shown(now, launches(tmp_path, "before", SPREAD))
    assert capsys.readouterr().out == several.out


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_case_that_is_not_measured_again_is_no_pass(
    is_measured: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = dataclasses.replace(COPY, op=Copy(num_bytes=2**31))
    before = launches(tmp_path, "before", SPREAD, cases=(COPY, larger))
    again = (COPY, larger) if is_measured else (COPY,)
    code = shown(launches(tmp_path, "now", SPREAD, cases=again), before)
    text = capsys.readouterr().err
    if is_measured:
        assert (code, "not compared" in text) == (0, False)
    else:
        assert code == 3
        assert "0 of 1 cases slower than before; 1 not compared" in text


def test_a_check_that_measures_nothing_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_run(tmp_path, dataclasses.replace(run_info(), run_id="now")) as writer:
        writer.append(Skipped(run_id="now", case=COPY, reason="no GPU"))
    assert shown(tmp_path / "now", *runs(tmp_path, "before", (1.0,))) == 3
    assert "nothing was measured" in capsys.readouterr().err


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_check_says_how_to_go_on(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = launches(tmp_path, "now", SPREAD[:2])
    values = plain(CheckOptions(baseline=str(launches(tmp_path, "before", SPREAD))))
    assert check.show(now, values, code) == code
    out, err = capsys.readouterr()
    assert f"go on with: stepmark resume {now}" in err
    assert "cases slower" not in out + err, "no verdict on a part of the launches"


def test_the_launches_that_would_decide_do_in_the_time_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [1.026 * s for s in SPREAD]
    before = runs(tmp_path, "before", (1.0,))
    assert shown(launches(tmp_path, "now", times), *before) == 3
    text = capsys.readouterr().err
    count, budget_s = map(int, re.findall(r"--launches (\d+) --budget (\d+)s", text)[0])
    assert budget_s == 600 / 5 * count, "each launch as long as those of now"
    assert f"which takes about {count} min" in text
    more = [times[place % len(times)] for place in range(count)]
    assert shown(launches(tmp_path, "more", more), *before) == 0


def refusal(baseline: Path, **options: float) -> str:
    with pytest.raises(ConfigError) as refused:
        check.plan(CheckOptions(baseline=str(baseline), **options))  # type: ignore[arg-type]
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.fixture
def _with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(num_ranks=int)
    monkeypatch.setattr(check, "machine", lambda device: here)


@pytest.mark.usefixtures("_with_device")
def test_a_baseline_of_too_few_launches_is_refused_with_their_number(tmp_path: Path) -> None:
    single = launches(tmp_path, "single", [1.0])
    text = refusal(single)
    assert "it has 1 launch, and" in text
    needed = int(re.findall(r"needs (\d+) ", text)[0])
    assert needed > 1
    assert f"`stepmark op copy --budget 1s --launches {needed}`" in text
    planned = check.plan(CheckOptions(baseline=str(launches(tmp_path, "some", WIDE[:needed]))))
    assert [entry.launch for entry in planned.entries] == [1, 2, 3, 4, 5]
    assert planned.how.op.budget_s == 600
    # A larger slowdown is decided by fewer launches, a smaller one by more.
    check.plan(CheckOptions(baseline=str(single), floor=0.2))
    assert "needs" in refusal(launches(tmp_path, "two", WIDE[:2]), floor=0.0)


@pytest.mark.usefixtures("_with_device")
def test_a_quiet_baseline_needs_fewer_launches_and_a_noisy_one_no_more(tmp_path: Path) -> None:
    quiet = launches(tmp_path, "quiet", SPREAD[:2])
    check.plan(CheckOptions(baseline=str(quiet), floor=0.005))
    assert "needs" in refusal(launches(tmp_path, "two", (1.0, 1.02)), floor=0.005)
    check.plan(CheckOptions(baseline=str(launches(tmp_path, "noisy", (1.0, 1.3)))))


@pytest.mark.usefixtures("_with_device")
def test_a_floor_that_no_baseline_decides_is_refused(tmp_path: Path) -> None:
    text = refusal(launches(tmp_path, "many", WIDE * 4), floor=0.0, launches=2)
    assert text.startswith("floor 0 is invalid: use a larger one, or more than 2 --launches")


@pytest.mark.usefixtures("_with_device")
def test_a_plan_names_its_baseline_wherever_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(tmp_path / "runs", "before", SPREAD)
    monkeypatch.chdir(tmp_path)
    planned = check.plan(CheckOptions(baseline="before"))
    assert planned.options["baseline"] == str(tmp_path / "runs" / "before")
    assert planned.command == "check"


def judged(before: Sequence[Path], now: Sequence[Path], **options: object) -> int:
    """The exit code of check --current."""
    texts = (",".join(map(str, paths)) for paths in (before, now))
    baseline, current = texts
    return check.run(CheckOptions(baseline=baseline, current=current, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (SPREAD, 0),
        ([1.2 * s for s in SPREAD], 1),
        ([1.026 * s for s in SPREAD], 3),
        ((1.0,), 3),
    ],
)
def test_a_run_that_was_measured_before_has_the_verdict_of_one_that_is_measured(
    now: Sequence[float], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = runs(tmp_path, "before", (1.0,))
    path = launches(tmp_path, "now", now)
    assert shown(path, *before) == code
    out, err = capsys.readouterr()
    assert judged(before, [path]) == code
    own = capsys.readouterr()
    assert own.out == out
    assert own.err.partition(";")[0].strip() in err
    if code == 3:
        assert "in --current" in own.err
    # Launches in runs of their own count as those of one run.
    assert judged(before, runs(tmp_path, "each", now)) == code


def test_wrong_results_of_a_current_run_are_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = launches(tmp_path, "before", SPREAD)
    info = dataclasses.replace(run_info(), run_id="now")
    with new_run(tmp_path, info) as writer:
        writer.append(dataclasses.replace(measured(COPY, 1.0, num_wrong=3), run_id="now"))
    assert judged([before], [tmp_path / "now"]) == 1
    assert "all 1 results are wrong" in capsys.readouterr().err


def test_what_says_nothing_of_a_current_run_is_refused(tmp_path: Path) -> None:
    before = launches(tmp_path, "before", SPREAD)
    now = launches(tmp_path, "now", SPREAD)
    larger = dataclasses.replace(COPY, op=Copy(num_bytes=2**31))
    other = launches(tmp_path, "other", SPREAD, cases=(larger,))
    for name, value in (("budget", 5.0), ("launches", 5)):
        with pytest.raises(ConfigError, match=f"^{name} {value} is invalid.*left out with"):
            judged([before], [now], **{name: value})
    with pytest.raises(ConfigError, match=r"current .*another run than --baseline"):
        judged([before, now], [now])
    with pytest.raises(ConfigError, match=r"current .*a run with a case of before"):
        judged([before], [other])
