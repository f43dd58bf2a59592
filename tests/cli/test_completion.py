"""Completion in a shell: the scripts, and what the program answers to them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.process import command, environment, stepmark_process

COMPLETE = "_STEPMARK_COMPLETE"


def answers(line: str, cwd: Path, shell: str = "bash") -> list[str]:
    """Return the completions of the last word of a line; a space behind it begins a new one."""
    words = line.split(" ")
    variables = {
        COMPLETE: f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        command(),
        cwd=cwd,
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("stepmark tr", ["train", "trace"]),
        ("stepmark trace br", ["breakdown"]),
        ("stepmark train --strat", ["--strategy"]),
        ("stepmark train --strategy ddp,f", ["ddp,fsdp"]),
        ("stepmark comm all_re", ["all_reduce"]),
        ("stepmark op ge", ["gemm"]),
        ("stepmark op gemm --layout n", ["nn", "nt"]),
        ("stepmark predict qwen3-3", ["qwen3-30b-a3b", "qwen3-32b"]),
        ("stepmark op gemm --model mixtral-8x7", ["mixtral-8x7b"]),
        ("stepmark workload generate --framework meg", ["megatron"]),
        ("stepmark workload convert --to sim", ["simai"]),
        ("stepmark predict --device h20", ["h200-sxm", "h200-nvl", "h20"]),
        ("stepmark runs show 2", ["20260101-000000-aaaa"]),
        ("stepmark runs show --runs elsewhere 2", ["20260102-000000-bbbb"]),
        ("stepmark report l", ["latest"]),
        ("stepmark nonsense --st", []),
    ],
)
def test_completions(line: str, expected: list[str], tmp_path: Path) -> None:
    for run in ("runs/20260101-000000-aaaa", "elsewhere/20260102-000000-bbbb"):
        folder = tmp_path / run
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    assert answers(line, tmp_path) == expected


@pytest.mark.ranks
def test_other_shells_get_their_format(tmp_path: Path) -> None:
    assert answers("stepmark train --strategy d", tmp_path, "fish") == ["ddp"]
    assert answers("stepmark train --strategy d", tmp_path, "zsh")[-1] == ':(("ddp"))\''


@pytest.mark.ranks
def test_completions_take_a_fifth_of_a_second(tmp_path: Path) -> None:
    def seconds() -> float:
        begin = os.times()
        answers("stepmark train --s", tmp_path)
        end = os.times()
        spent = end.children_user + end.children_system
        return spent - begin.children_user - begin.children_system

    assert min(seconds() for _ in range(5)) < 0.2


@pytest.mark.ranks
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_program_and_variable(shell: str, tmp_path: Path) -> None:
    done = stepmark_process("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{COMPLETE}=complete_{shell}" in done.stdout
    assert done.stdout.endswith("\n")


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "stepmark"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m stepmark "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(stepmark completion bash)"\n'
        "COMP_WORDS=(stepmark comm all_red) COMP_CWORD=2\n"
        "_stepmark_completion stepmark\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    variables = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "all_reduce\n"
