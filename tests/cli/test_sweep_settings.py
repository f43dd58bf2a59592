"""stepmark sweep: settings and the order of rounds; interpreters as settings."""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark import __version__
from stepmark.cases.sweep import (
    Setting,
    split_values,
)
from stepmark.comparison import sweep as app
from stepmark.comparison import sweep_race, sweep_results, sweep_run
from stepmark.comparison.sweep import check_interpreters, parse_interpreters, settings
from stepmark.comparison.sweep_run import make, order_of
from stepmark.ground.errors import ConfigError
from stepmark.store import sweeps
from stepmark.store.sweeps import Journal

from .sweep_runs import means, names, started, sweep_of


def test_every_combination_once_and_the_default_first() -> None:
    assert names("A=1,2", "B=x,y") == [
        "default",
        *("A=1 B=x", "A=1 B=y", "A=2 B=x", "A=2 B=y"),
    ]
    assert names("A=1,2", flags=("mode=graph",)) == [
        "default",
        *("A=1 --mode graph", "A=2 --mode graph"),
    ]
    assert names("A=1,2", default=False) == ["A=1", "A=2"]


def test_an_empty_value_is_unset_and_all_unset_is_the_default() -> None:
    assert names("A=,1", "B=,x") == ["default", "B=x", "A=1", "A=1 B=x"]
    assert names("A=,1", default=False) == ["default", "A=1"]
    (unset, _) = settings(["A=,1"], [], default=True, force=False)
    assert sweep_run.environment(unset, {"A": "9", "B": "8"}) == {"B": "8"}


@given(st.lists(st.text(alphabet="a,\\;:^=", min_size=1), min_size=1))
def test_values_survive_being_written(values: list[str]) -> None:
    written = ",".join(value.replace("\\", "\\\\").replace(",", "\\,") for value in values)
    assert split_values(written) == values


def test_values_hold_what_nccl_wants() -> None:
    assert split_values("ring;allreduce:tree,^nvls") == ["ring;allreduce:tree", "^nvls"]
    assert split_values(r"mlx5_0\,mlx5_1,mlx5_2") == ["mlx5_0,mlx5_1", "mlx5_2"]


@pytest.mark.parametrize(
    ("env", "flags"),
    [
        ([], []),
        (["A"], []),
        (["=1"], []),
        (["A B=1"], []),
        (["A=1", "A=2"], []),
        (["A=1,1"], []),
        (["A="], []),
        (["A=a\nb"], []),
        (["RANK=1"], []),
        (["STEPMARK_WATCH=1"], []),
        ([], ["out=x"]),
        ([], ["-mode=x"]),
        ([f"A={','.join(map(str, range(64)))}"], []),
    ],
)
def test_bad_settings_are_refused(env: list[str], flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        settings(env, flags, default=True, force=False)


def test_many_settings_need_force() -> None:
    many = [f"A={','.join(map(str, range(64)))}"]
    assert len(settings(many, [], default=True, force=True)) == 65


@given(st.integers(1, 64), st.integers(1, 50), st.integers())
def test_every_round_is_a_permutation_and_seeds_reproduce(
    count: int, number: int, seed: int
) -> None:
    order = order_of(count, number, order="interleaved", seed=seed)
    assert sorted(order) == list(range(count))
    assert order_of(count, number, order="interleaved", seed=seed) == order
    assert order_of(count, number, order="fixed", seed=seed) == list(range(count))


def test_orders_differ_between_rounds_and_seeds() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        return [tuple(order_of(6, n, order="interleaved", seed=seed)) for n in range(1, 9)]

    assert len(set(orders(1))) >= 7
    assert orders(1) != orders(2)
    # No setting is bound to a place in its round.
    first = Counter(order_of(6, n, order="interleaved", seed=5)[0] for n in range(600))
    assert min(first.values()) > 60


def interpreter(folder: Path, script: str = "") -> Path:
    """A virtual environment in form: its bin/python sets variables, then is this one."""
    file = folder / "bin" / "python"
    file.parent.mkdir(parents=True)
    file.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return file


def test_an_environment_stands_for_its_interpreter(tmp_path: Path) -> None:
    file = interpreter(tmp_path / "venv")
    assert parse_interpreters(f"{tmp_path}/venv,") == [
        (f"{tmp_path}/venv", str(file)),
        ("", ""),
    ]
    link = tmp_path / "python-link"
    link.symlink_to(file)
    # The link stays: an interpreter finds its environment by the name it is started with.
    assert parse_interpreters(f"{link},{file}")[0] == (str(link), str(link))


def test_interpreters_are_settings_in_every_combination(tmp_path: Path) -> None:
    for name in "ab":
        interpreter(tmp_path / name)
    both = f"{tmp_path}/a,{tmp_path}/b"
    a, b = f"python {tmp_path}/a", f"python {tmp_path}/b"

    def combined(*env: str, text: str = both) -> list[str]:
        swept = settings(env, [], text, default=True, force=False)
        assert app.find_baseline(None, swept) == swept[0].name
        return [one.name for one in swept]

    assert combined() == [a, b]
    assert combined("A=1,2") == [a, f"{a} A=1", f"{a} A=2", f"{b} A=1", f"{b} A=2"]
    assert combined(text=f",{tmp_path}/b") == ["default", b]


def test_another_interpreter_is_measured_in_rounds_and_confirmed(tmp_path: Path) -> None:
    interpreter(tmp_path / "old")
    interpreter(tmp_path / "new", "export KIND=fast")
    swept = settings([], [], f"{tmp_path}/old,{tmp_path}/new", default=True, force=False)
    old, new = (setting.name for setting in swept)
    sweep = dataclasses.replace(sweep_of("x", repeats=5), settings=tuple(swept), baseline=old)
    check_interpreters(swept, means(tmp_path).base)
    with Journal.create(tmp_path, sweep) as journal:
        make(journal, means(tmp_path), [])
    assert Counter(started(tmp_path))["fast"] == journal.sweep.last_round
    result = sweep_race.compare_settings(journal.path, sweeps.read(journal.path))
    assert result is not None
    assert result.advice.single == new
    assert sweep_results.export_lines(swept[1], swept[0]) == f"with {tmp_path}/new/bin/python"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 0.0.1; exit 0", f"with stepmark {__version__}, not 0.0.1"),
        ("exec false", f"imports stepmark {__version__} (exit code 1)"),
        (
            'export PYTHONPATH=/nowhere\nset -- -S -I "$@"',
            f"imports stepmark {__version__} (ModuleNotFoundError: No module named 'stepmark')",
        ),
    ],
)
def test_an_interpreter_without_this_stepmark_is_refused(
    script: str, message: str, tmp_path: Path
) -> None:
    interpreter(tmp_path / "venv", script)
    swept = settings([], [], f",{tmp_path}/venv", default=True, force=False)
    with pytest.raises(ConfigError) as caught:
        check_interpreters(swept, means(tmp_path).base)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_upgrade_is_no_change_of_the_environment(tmp_path: Path) -> None:
    """Versions are compared with the first try of the same interpreter."""
    interpreter(tmp_path / "new")
    swept = settings([], [], f",{tmp_path}/new", default=True, force=False)
    sweep = dataclasses.replace(sweep_of("x", repeats=1), settings=tuple(swept), order="fixed")
    with Journal.create(tmp_path, sweep) as journal:
        make(journal, means(tmp_path), [])
        run = journal.path / "runs" / journal.sweep.tries[0].run / "run.json"
        run.write_text(run.read_text().replace('"2.28.9"', '"2.27.3"'))
        journal.change(repeats=2, selection=None)
        make(journal, means(tmp_path), [])
        differences = {
            one.setting: one.differs for one in journal.sweep.tries if one.round == 2
        }
    assert differences == {"default": ("nccl: 2.27.3 -> 2.28.9",), swept[1].name: ()}


def test_a_flag_without_a_value_is_on_or_off() -> None:
    on, off = (Setting(flags=(("compile", value),)) for value in ("on", "off"))
    assert on.command(("train",)) == ["train", "--compile"]
    assert off.command(("train",)) == ["train"]
    assert (on.name, off.name) == ("--compile on", "--compile off")


def test_a_setting_names_itself() -> None:
    one = Setting(variables=(("A", "1"), ("B", "")), flags=(("n", "5"), ("mode", "graph")))
    assert one.name == "A=1 -n 5 --mode graph"
    assert one.command(("comm",)) == ["comm", "-n", "5", "--mode", "graph"]
    base = Setting(variables=(("A", ""), ("B", "2")))
    assert sweep_results.export_lines(one, base).splitlines() == [
        "export A=1",
        "unset B",
        "and in the command: -n 5 --mode graph",
    ]
