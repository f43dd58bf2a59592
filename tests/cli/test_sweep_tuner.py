"""stepmark sweep --emit-tuner: the file of a tuner plugin, and its check."""

import dataclasses
import shlex
from pathlib import Path

import pytest
from tests.cases.comm_samples import SAMPLES
from tests.comparison.tuner_file import parse
from tests.parsing import parse as typed

from stepmark.cases.sweep import (
    TunerChoice,
)
from stepmark.collectives.comm_options import CommOptions
from stepmark.comparison import sweep_race
from stepmark.comparison import tuner_verb as tuning
from stepmark.comparison.recommendation import Advice
from stepmark.comparison.sweep import settings
from stepmark.comparison.sweep_run import make
from stepmark.comparison.tuner_text import COLLECTIVES, first_match
from stepmark.ground.errors import ConfigError
from stepmark.store.commands import command_of
from stepmark.store.sweeps import Journal

from .sweep_runs import means, sweep_of


def logged(**at: tuple[str, str, int]) -> tuning.Logged:
    """s1024=...: what all collectives run with at 1 KiB."""
    return {
        (name, int(key[1:])): TunerChoice(
            collective=name,
            size_bytes=int(key[1:]),
            algorithm=how[0],
            protocol=how[1],
            num_channels=how[2],
        )
        for name in COLLECTIVES
        for key, how in at.items()
    }


def test_the_file_says_what_won_and_the_default_elsewhere(tmp_path: Path) -> None:
    with Journal.create(tmp_path, sweep_of("fast", "slow", repeats=4)) as journal:
        make(journal, means(tmp_path), [])
    found = sweep_race.compare_settings(journal.path, journal.sweep)
    assert found is not None
    ring, tree = ("ring", "simple", 4), ("tree", "ll", 8)
    sizes = ("s1024", "s65536", "s524288", "s16777216", "s1073741824")
    both = {
        "default": logged(**dict.fromkeys(sizes, ring)),
        "KIND=fast": logged(**dict.fromkeys(sizes, tree)),
    }
    chosen = tuning.choose(both, found.advice)
    held = {one.size_bytes: one.how for one in chosen if one.collective == "all_reduce"}
    # Measured from 64 KiB to 16 MiB, and nothing is known beyond.
    assert held == {2**10: ring, 2**16: tree, 2**19: tree, 2**24: tree, 2**30: ring}
    others = {one.how for one in chosen if one.collective != "all_reduce"}
    assert others == {ring}


def tuned(folder: Path, plugin: str | None = None) -> tuple[list[str], int, tuning.Request]:
    """A sweep in which Tree wins, and its tuner file."""
    sweep = dataclasses.replace(
        sweep_of("x", repeats=4),
        settings=tuple(settings(["NCCL_ALGO=Tree"], [], default=True, force=False)),
    )
    asked = tuning.request(folder / "tuner.conf", plugin, sweep, force=False)
    with Journal.create(folder, sweep) as journal:
        how = means(folder)
        make(journal, how, [])
        found = sweep_race.compare_settings(journal.path, journal.sweep)
        assert found is not None
        said, code = tuning.emit(journal, found.advice, asked, how, [])
    return said, code, asked


def test_a_tuner_file_has_the_winner_and_nccls_own_choices(tmp_path: Path) -> None:
    said, code, asked = tuned(tmp_path)
    assert (code, said[-1]) == (0, "not verified: no tuner plugin (--tuner-plugin PATH)")
    text = asked.target.read_text()
    assert "# Measured with NCCL 2.28.9 on 2 x Made Up 9000: 2 ranks, 1 node." in text
    rules = parse(text)

    def how(name: str, size: int) -> tuple[str, str, int]:
        rule = first_match(rules, name, size, num_nodes=1, num_ranks=2)
        assert rule is not None
        return rule.algorithm, rule.protocol, rule.num_channels

    assert how("all_reduce", 2**12) == ("ring", "ll", 2)
    assert how("all_reduce", 2**20) == ("tree", "ll128", 16)
    assert how("all_reduce", 2**33) == ("ring", "simple", 24)
    # NCCL's log counts these per rank.
    for name in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert how(name, 2**15) == ("ring", "ll", 2)
        assert how(name, 2**16) == ("ring", "simple", 24)


WORDS = [
    *(shlex.split(command_of(case))[2:] for case in SAMPLES.values()),
    ["-b", "1K", "-e", "1G", "-f", "2", "-r", "-1", "all_reduce", "--no-align", "all_gather"],
    ["all_reduce", "-b1K", "--end=4M", "--with", "gemm:64", "-n", "3", "--wide", "broadcast"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_comm_command_is_read_as_its_verb_reads_it(words: list[str]) -> None:
    assert tuning.comm_options(words) == typed(CommOptions, words)


def test_a_comm_command_that_its_verb_refuses_is_refused() -> None:
    for words in (
        ["all_reduce", "--nonsense"],
        ["all_reduce", "-b"],
        ["all_reduce", "--be=1K"],
    ):
        with pytest.raises(ConfigError, match="command"):
            tuning.comm_options(words)


def test_a_plugin_that_does_as_told_verifies(tmp_path: Path) -> None:
    said, code, _ = tuned(tmp_path, "good.so")
    assert code == 0
    assert said[-1].startswith("verified with good.so, sizes seen: ")
    assert "all_reduce 21" in said[-1]
    assert said[-1].endswith("0 not as told")


def test_one_channel_is_seen_and_is_a_failed_check(tmp_path: Path) -> None:
    said, code, _ = tuned(tmp_path, "trap")
    assert code == 1
    assert any(
        line.startswith("all_reduce 1048576 bytes: the file says tree/ll128 with 16 channels")
        and line.endswith("tree/ll128 with 1 channels")
        for line in said
    )
    assert {line.split()[0] for line in said[2:]} == set(COLLECTIVES)


def test_without_a_log_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_with_text", lambda folder: [])
    with pytest.raises(tuning.ProbeError, match="no choice with channels"):
        tuned(tmp_path)
    assert not (tmp_path / "tuner.conf").exists()


def test_a_file_that_would_change_nothing_is_not_written(tmp_path: Path) -> None:
    advice = Advice(
        baseline="default",
        considered=(),
        picks=(),
        ranges=(),
        single=None,
        num_tests=0,
        min_gain=0.01,
        left_out={},
    )
    asked = tuning.Request(target=tmp_path / "t", plugin=None, options=CommOptions())
    with Journal.create(tmp_path, sweep_of("fast")) as journal:
        said, code = tuning.emit(journal, advice, asked, means(tmp_path), [])
    assert (said, code) == (["no tuner file: the default stays everywhere"], 0)
    assert not asked.target.exists()
