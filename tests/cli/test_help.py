"""Help pages: what fits on the first one, what is left for --help-all, examples that run."""

import re
import shlex
from pathlib import Path

import pytest

from stepmark.cli import main
from stepmark.cli.commands import Command, Group
from stepmark.ground.option_groups import MBS
from stepmark.model.device import load_devices
from stepmark.model.ops import FAMILIES

from .test_main import called


def command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command that words name, and its arguments."""
    built, rest = main.command(words[0], words[1:]), words[1:]
    while isinstance(built, Group):
        built, rest = built.command(rest), rest[1:]
    return built, rest


GROUPS = ("trace", "runs", "workload")
FRAMEWORKS = ("megatron", "deepspeed", "fsdp", "dlrm")
COMMANDS = [
    *([name] for name in main.VERBS if name not in GROUPS),
    *(["op", family] for family in (*FAMILIES, "all")),
    *([name, each] for name in GROUPS for each in main.command(name, []).commands),
    *(["workload", "generate", "--framework", name] for name in FRAMEWORKS),
    *(["predict", "--framework", name] for name in FRAMEWORKS),
]
PAGES = [*([name] for name in GROUPS), *COMMANDS]
OPTIONS = [(words, option) for words in COMMANDS for option in command(words)[0].options]
# Of examples that plan cases: a device and ranks, which this machine lacks.
PLANNED = ("op", "comm", "train", "calibrate", "run")


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_the_first_page_has_at_most_60_lines(
    words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = called([*words, "--help"])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 60, "mark rare options: flag(..., rare=True)"
    assert max(map(len, lines)) <= columns
    assert words[:2] == ["op", "all"] or "Examples:" in out or "Commands:" in out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_all_has_every_spelling_of_every_option(words: list[str]) -> None:
    declared = [option for option in command(words)[0].options if option.help]
    first, everything = (called([*words, page])[1] for page in ("--help", "--help-all"))
    rare = [option for option in declared if option.rare]
    assert (f" {len(rare)} more options." in first) == bool(rare)
    assert "more options" not in everything
    for option in declared:
        for word in () if option.argument else option.words:
            both = f"--[no-]{word.removeprefix('--').removeprefix('no-')}"
            assert word in everything or both in everything, word
    for option in rare:
        assert not re.search(rf"^  (-\w, )?{option.spellings[-1]} ", first, re.M)


def test_mbs_means_one_thing_in_all_verbs() -> None:
    texts = {option.help.partition(" [")[0] for _, option in OPTIONS if "--mbs" in option.words}
    assert texts == {MBS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_placeholder_is_a_word(words: list[str]) -> None:
    """Of numbers it may be N or NUMBER, as of text VALUE it may not."""
    for option in command(words)[0].options:
        if not option.is_switch and option.help:
            word = option.metavar.removesuffix(",...")
            assert word not in ("", "VALUE", "TEXT", "STR", "INT"), option.name
            assert "<" not in word, option.name


# nccl-tests' -o is a reduction.
OTHER_O = (["comm"],)


def test_o_and_out_mean_one_thing_in_all_verbs() -> None:
    """A folder is DIR, a file FILE; where both are possible, a folder ends in a slash."""
    outputs = [
        (words, option) for words, option in OPTIONS if {"-o", "--out"} & {*option.words}
    ]
    assert len(outputs) > 20
    for words, option in outputs:
        if words in OTHER_O:
            assert ("-o" in option.words) != ("--out" in option.words)
            continue
        assert {"-o", "--out"} <= {*option.words}, words
        first = {"DIR": "folder", "FILE": "file", "FILE|DIR/": "file"}[option.metavar]
        assert option.help.startswith(first), words
        assert ("DIR/ = " in option.help) == ("|" in option.metavar), words


def test_a_default_is_stated_once_and_in_brackets() -> None:
    _, out, _ = called(["launch", "--help-all"])
    assert "--submit/--print" in out
    assert "[default: " not in out
    assert "leave or cancel the job [leave]" in " ".join(out.split())
    _, out, _ = called(["op", "gemm", "--help"])
    assert "--layout nn|nt|tn" in out
    assert "memory layout of A and B [nt]" in out


def test_without_words_a_short_screen_says_where_to_start() -> None:
    code, out, err = called([])
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 20
    for word in ("stepmark run", "stepmark doctor", "stepmark --help", "stepmark VERB --help"):
        assert word in out


@pytest.mark.parametrize("words", [["trace"], ["runs"], ["workload"]])
def test_a_group_without_a_command_is_its_help(words: list[str]) -> None:
    assert called(words) == called([*words, "--help"])


def test_every_verb_has_a_topic() -> None:
    assert sorted(sum(main.TOPICS.values(), ())) == sorted(main.VERBS)


def _examples() -> list[str]:
    return sorted({example for page in COMMANDS for example in command(page)[0].examples})


@pytest.mark.parametrize("example", _examples())
def test_examples_are_valid(example: str) -> None:
    built, arguments = command(shlex.split(example.partition(" > ")[0], comments=True))
    values = built.parse("stepmark", arguments)
    built.read(values)
    if example.partition(" ")[0] in PLANNED and "--config" not in example:
        more = [] if "--device" in example else ["--device", "h200"]
        code, _, err = called([*shlex.split(example), *more, *["--dry-run"]])
        if "--list" not in example:
            assert code == 0, err


def test_a_named_device_needs_no_nproc_for_a_dry_run() -> None:
    for line in ("comm all_reduce", "train llama-3.1-8b", "run gpt2-125m"):
        code, out, err = called([*line.split(), "--device", "h200", "--dry-run"])
        assert code == 0, err
        assert "--nproc 8" in out
        assert "8 ranks are assumed" in err


NEAREST = [
    ("trian llama-3.1-8b", "did you mean train?"),
    ("trace breakdwn", "did you mean breakdown?"),
    ("op gem", "did you mean gemm?"),
    ("op gemm --dry-ru", "did you mean --dry-run?"),
    ("plan llama-3.1-8b --nproc 8", "did you mean --gpus?"),
    ("predict llama-3.1-8b --gpus 8", "did you mean --nproc?"),
    ("workload generate --nproc 8", "did you mean --world-size?"),
    ("comm all_reduc", "did you mean all_reduce?"),
    ("comm all_reduce -d bf61", "-d bf61 is invalid: did you mean bf16?"),
    ("comm all_reduce --api ncl", "--api ncl is invalid: did you mean nccl?"),
    ("comm all_reduce --mode grph", "did you mean graph?"),
    ("comm all_reduce --device h2000 --dry-run", "did you mean h200?"),
    ("train llama-3.1-8b --strategy fspd", "did you mean fsdp?"),
    ("train llama-3.1-8b --precision bf61", "did you mean bf16?"),
    ("train llama-3.1-8b --ac fulll", "did you mean full?"),
    ("predict lama-3.1-8b --device h200", "did you mean llama-3.1-8b"),
    ("train lama-3.1-8b --device cpu", "did you mean llama-3.1-8b"),
    ("workload generate --model lama-3.1-8b", "did you mean llama-3.1-8b"),
    ("op gemm --model lama-3.1-8b --device cpu", "did you mean llama-3.1-8b"),
    ("workload generate --framework megatrn", "--framework megatrn is invalid: did you mean"),
    ("workload generate --model gpt-7b --to simia", "did you mean simai?"),
    ("predict gpt-7b --device h2000 --nproc 8", "did you mean h200?"),
    ("completion zhs", "did you mean zsh?"),
    ("sweep --env A=1,2 -- com all_reduce", "did you mean comm?"),
]


@pytest.mark.parametrize(("line", "text"), NEAREST)
def test_the_nearest_choice_is_suggested(line: str, text: str) -> None:
    code, out, err = called(shlex.split(line))
    assert (code, out) == (2, "")
    assert text in err


USAGE = [
    ("doctor foo", "argument foo is invalid: it must be left out"),
    ("op gemm --m", "--m is invalid: it must be given with a value."),
    ("train --fp8=yes", "--fp8 is invalid: it must be given without a value."),
    ("op gemm --xyzzy 1", "--xyzzy is invalid: it must be one of the options of this command."),
    ("completion", "shell is missing: give one of bash, zsh, fish."),
    ("runs export latest x", "--to is missing: give one of csv, json,"),
]


@pytest.mark.parametrize(("line", "text"), USAGE)
def test_usage_errors_are_sentences(line: str, text: str) -> None:
    code, out, err = called(shlex.split(line))
    assert (code, out) == (2, "")
    assert text in err
    assert err.rstrip().endswith(".")


def test_all_devices_are_listed_where_one_is_unknown() -> None:
    _, _, err = called(["predict", "gpt-7b", "--nproc", "8", "--device", "xyz"])
    assert all(name in err for name in load_devices())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_two_options_of_a_command_have_one_spelling(words: list[str]) -> None:
    built, _ = command(words)
    assert len(built.words) == len({*built.words})
    built.parse("stepmark", [])  # argparse would refuse them
