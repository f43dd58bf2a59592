"""Completion in a shell: the scripts, and what the program answers to them."""

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.process import command, environment, stepmark_process

COMPLETE = "_STEPMARK_COMPLETE"


def answers(line: str, cwd: Path, shell: str = "bash") -> list[str]:
    """Return the completions of the last word of a line; a space behind it begins a new one."""
    done = subprocess.run(
        command(*line.split(" ")[1:]),
        cwd=cwd,
        env=environment() | {COMPLETE: shell},
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
        ("stepmark trace --js", ["--json"]),
        ("stepmark trace la", ["latest"]),
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
    assert answers("stepmark train --strategy=d", tmp_path, "zsh") == ["--strategy=ddp"]
    # bash takes the flag, the equals sign and the value for three words.
    assert answers("stepmark train --strategy = d", tmp_path) == ["ddp"]


@pytest.mark.ranks
@pytest.mark.alone
def test_completions_take_a_fifth_of_a_second(tmp_path: Path) -> None:
    """Of a processor; on one that others share, 15 starts of the interpreter."""

    def seconds(run: Callable[[], object]) -> float:
        begin = os.times()
        run()
        end = os.times()
        spent = end.children_user + end.children_system
        return spent - begin.children_user - begin.children_system

    def complete() -> object:
        return answers("stepmark train --s", tmp_path)

    def start() -> object:
        return [subprocess.run([sys.executable, "-c", "pass"], check=True) for _ in range(15)]

    pairs = [(seconds(complete), seconds(start)) for _ in range(5)]
    assert any(own < max(0.2, bare) for own, bare in pairs), pairs


@pytest.mark.ranks
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_program_and_variable(shell: str, tmp_path: Path) -> None:
    done = stepmark_process("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{COMPLETE}={shell}" in done.stdout
    assert done.stdout.endswith("\n")


def program(folder: Path) -> dict[str, str]:
    """Return the environment of a shell that finds the program and some files in a folder."""
    path = folder / "bin" / "stepmark"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m stepmark "$@"\n')
    path.chmod(0o755)
    run = folder / "runs" / "20260101-000000-aaaa"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (folder / "job log.txt").touch()
    variables = {"PATH": f"{path.parent}:{os.environ['PATH']}", "HOME": str(folder / "bin")}
    return environment() | variables | {"TERM": "dumb", "COLUMNS": "200"}


# What is typed before a tab, and what stands there then.
TYPED = {
    "stepmark trai": "stepmark train ",
    "stepmark trace br": "stepmark trace breakdown ",
    "stepmark train --strat": "stepmark train --strategy ",
    "stepmark train --strategy ddp,f": "stepmark train --strategy ddp,fsdp ",
    "stepmark train --strategy=fs": "stepmark train --strategy=fsdp ",
    "stepmark predict --device=mi250": "stepmark predict --device=mi250x ",
    "stepmark op gemm --model mixtral-8x7": "stepmark op gemm --model mixtral-8x7b ",
    "stepmark report --runs=./runs 2": "stepmark report --runs=./runs 20260101-000000-aaaa ",
    "stepmark compare before=2": "stepmark compare before=20260101-000000-aaaa ",
    "stepmark logs job": r"stepmark logs job\ log.txt ",
    "stepmark comm --csv=job": r"stepmark comm --csv=job\ log.txt ",
}
START = {
    "bash": "PS1='$ '; eval \"$(stepmark completion bash)\"",
    "zsh": "PS1='$ '; bindkey -e; setopt interactive_comments; autoload -Uz compinit; "
    'compinit -u -D; eval "$(stepmark completion zsh)"',
}
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.mark.ranks
@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_completes_in_the_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    variables = program(tmp_path)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execvpe(shell, SHELLS[shell], variables)
    try:
        os.write(terminal, f"{START[shell]}; echo rea''dy\n".encode())
        screen(terminal, "ready")
        for typed, completed in TYPED.items():
            os.write(terminal, f"{typed}\t".encode())
            screen(terminal, completed)
            os.write(terminal, b"\x01#\n")  # the line becomes a comment
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def screen(terminal: int, expected: str) -> None:
    """Read what a shell writes until the expected text stands there."""
    output = ""
    while expected not in output:
        readable, _, _ = select.select([terminal], [], [], 20)
        assert readable, f"{expected!r} is not in {output!r}"
        output += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(terminal, 4096).decode())


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_with_the_script(tmp_path: Path) -> None:
    script = "".join(f"complete -C '{line}' | head -1\n" for line in TYPED)
    done = subprocess.run(
        ["fish", "-c", f"stepmark completion fish | source\n{script}"],
        cwd=tmp_path,
        env=program(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words == [shlex.split(line)[-1] for line in TYPED.values()]
