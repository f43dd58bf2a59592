"""The command line's manners: fast help, one line for bad input, clean stdout."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepmark import __version__
from stepmark.cli import main
from stepmark.cli.commands import Command, Group
from stepmark.cli.main import status
from stepmark.ground.options import load
from stepmark.measuring import measure
from stepmark.model.ops import FAMILIES

from .process import stepmark_process

VERBS = list(main.VERBS)
GEMM = ["op", "gemm", "--m", "64", "--n", "64", "--k", "64"]
ATTENTION = ["op", "attention", "--seq-q", "64", "--heads", "4", "--head-dim-qk", "16"]


def _measured(*_: object, **__: object) -> None:
    raise AssertionError("bad input was measured")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "supervise", _measured)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not (tmp_path / "runs").exists(), "bad input must not start a run"


def called(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = status(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.ranks
def test_help_is_fast(tmp_path: Path) -> None:
    """In CPU time of the process: waiting for other processes is not ours."""

    def seconds() -> float:
        begin = os.times()
        assert stepmark_process("--help", cwd=tmp_path).returncode == 0
        end = os.times()
        spent = end.children_user + end.children_system
        return spent - begin.children_user - begin.children_system

    assert min(seconds() for _ in range(5)) < 0.2


def test_version() -> None:
    assert called(["--version"]) == (0, f"stepmark {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help(arguments: list[str]) -> None:
    code, out, err = called(arguments)
    assert (code, err) == (0, "")
    assert out.startswith("Usage")
    for verb in VERBS if arguments == ["--help"] else []:
        assert f"  {verb} " in out


@pytest.mark.parametrize("family", [*FAMILIES, "all"])
def test_help_of_a_family(family: str) -> None:
    code, out, err = called(["op", family, "--help"])
    assert (code, err) == (0, "")
    for flag in ("MODEL...", "--dtype", "--budget", "--csv", "--nproc"):
        if flag != "--dtype" or family not in ("copy", "host-copy"):
            assert flag in out


BAD: list[tuple[list[str], str]] = [
    (["nonsense"], "nonsense"),
    (["op", "nonsense"], "nonsense"),
    ([*GEMM, "--nonsense"], "nonsense"),
    (["op", "gemm", "--device", "cpu", "--m"], "--m"),
    (["op", "gemm", "--model", "lama-3"], "lama-3"),
    (["op", "gemm", "--model", "none.json"], "none.json"),
    (["op", "gemm"], "missing"),
    (["op", "gemm", "--m", "64"], "missing"),
    (["op", "all"], "missing"),
    ([*GEMM, "--dtype", "int3"], "int3"),
    ([*GEMM, "--backend", "magic"], "magic"),
    ([*GEMM, "--model", "llama-3.1-8b"], "one source"),
    ([*GEMM, "--dataset", "A"], "one source"),
    (["op", "gemm", "--dataset", "A", "--model", "llama-3.1-8b"], "one source"),
    (["op", "gemm", "--dataset", "Z"], "Z"),
    (["op", "norm", "--shapes", "none.json"], "none.json"),
    (["op", "norm", "--shapes", "garbage.json"], "garbage.json"),
    (["op", "gemm", "--model", "garbage.json"], "garbage.json"),
    (["op", "--config", "garbage.json"], "garbage.json"),
    (["op", "--config", "none.json"], "none.json"),
    (["op", "gemm", "--m", "0", "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "-4", "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "9" * 30, "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "9" * 5000, "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "1.5", "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "nan", "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", "many", "--n", "64", "--k", "64"], "m"),
    (["op", "gemm", "--m", ",", "--n", "64", "--k", "64"], "m"),
    ([*GEMM, "--layout", "xx"], "layout"),
    ([*GEMM, "--out-dtype", "xx"], "out-dtype"),
    ([*GEMM, "--pass", "sideways"], "sideways"),
    ([*ATTENTION, "--kv-heads", "3"], "kv-heads"),
    ([*ATTENTION, "--varlen", "60+3"], "varlen"),
    ([*ATTENTION, "--varlen", "a+b"], "varlen"),
    ([*ATTENTION, "--pass", "optim"], "optim"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--tp", "3"], "tp"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--tp", "0"], "tp"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--tp", "-8"], "tp"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--tp", "x"], "tp"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--ep", "2"], "ep"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--seq-len", "-5"], "seq-len"),
    (["op", "gemm", "--model", "llama-3.1-8b", "--seq-len", "0"], "seq-len"),
    (["op", "grouped-gemm", "--model", "llama-3.1-8b"], "grouped-gemm"),
    (["op", "copy", "--model", "llama-3.1-8b"], "llama-3.1-8b"),
    *(
        (["op", "gemm", "--model", "llama-3.1-8b", "--mbs", v], "mbs")
        for v in ("0", "-1", "x", "2-1", "1-99999", "", "9" * 5000)
    ),
    *(
        (["op", "gemm", "--model", "llama-3.1-8b", "--scale", v], "scale")
        for v in ("0", "2", "-1/2", "1/0", "small", "nan", "1/2/3")
    ),
    *(([*GEMM, "--budget", v], "budget") for v in ("0", "-1s", "soon", "nan", "1e9h", "")),
    *(([*GEMM, "--nproc", v], "nproc") for v in ("0", "-2", "x", "1.5", "99999")),
    *(([*GEMM, "--clock", v], "clock") for v in ("sundial", "graph-rotate")),
    ([*GEMM, "--rate", "leisurely"], "rate"),
    ([*GEMM, "--style", "baroque"], "style"),
    ([*GEMM, "--device", "tpu"], "device"),
    ([*GEMM, "--out", "/proc/x"], "out"),
    ([*GEMM, "--out", "a-file"], "out"),
    ([*GEMM, "--csv", "/proc/x/y.csv"], "csv"),
    ([*GEMM, "--json", "a-file/y.json"], "json"),
    ([*GEMM, "--resume", "20200101-000000-dead"], "20200101-000000-dead"),
    (["resume", "20200101-000000-dead", "--out", "."], "20200101-000000-dead"),
    ([*GEMM, "--device", "h200"], "--dry-run"),
    (["report", "20200101-000000-dead"], "20200101-000000-dead"),
    (["check", "--baseline", "20200101-000000-dead"], "20200101-000000-dead"),
    (["check"], "baseline"),
    (["check", "--baseline", "x", "--launches", "0"], "launches"),
    (["check", "--baseline", "x", "--floor", "nan"], "floor"),
    (["check", "--baseline", "x", "--floor", "-1"], "floor"),
    (["run", "--model", "lama-3"], "lama-3"),
    (["run", "--budget", "soon"], "budget"),
    (["run", "--nproc", "0"], "nproc"),
    (["run", "--out", "/proc/x"], "out"),
]


@pytest.mark.parametrize(("arguments", "word"), BAD, ids=lambda x: " ".join(x)[:70])
def test_bad_input_is_one_line_and_two(arguments: list[str], word: str, tmp_path: Path) -> None:
    (tmp_path / "garbage.json").write_bytes(b"\x00garbage\xff" * 120_000)
    (tmp_path / "a-file").write_text("in the way")
    if arguments[0] == "op" and "--device" not in arguments and "gemm" in arguments:
        arguments = [*arguments, "--device", "cpu"]
    code, out, err = called(arguments)
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("stepmark: ")
    assert word in err
    assert "Traceback" not in err
    assert len(err) < 600


def test_a_bad_argument_is_not_called_a_flag() -> None:
    _, _, err = called(["predict", "none.json", "--device", "h200"])
    assert "model none.json is invalid: it must be a file that exists" in err
    assert "--model" not in err


def test_bad_input_in_a_process(tmp_path: Path) -> None:
    done = stepmark_process(*GEMM, "--rate", "leisurely", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_plan_needs_no_run(tmp_path: Path) -> None:
    code, out, err = called(
        [
            *[
                "op",
                "gemm",
                "--model",
                "llama-3.1-70b",
                "--mbs",
                "1-2",
                "--dry-run",
                "--csv",
                "-",
                "--device",
                "cpu",
            ]
        ]
    )
    assert code == 0
    header, *rows = out.splitlines()
    assert header.startswith("kind,family,model,role,pass")
    assert len(rows) == 2 * 6 * 3
    assert len(err.splitlines()) == 1
    assert "none was run" in err


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    import subprocess

    from .process import command, environment

    arguments = command(
        *[
            "op",
            "all",
            "--model",
            "llama-3.1-8b",
            "--device",
            "cpu",
            "--dry-run",
            "--mbs",
            "1-64",
        ]
    )
    process = subprocess.Popen(
        arguments,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    assert "Traceback" not in errors
    assert "Exception" not in errors


def test_the_list_of_verbs_is_that_of_their_modules() -> None:
    """`stepmark --help` reads no verb: what it says of them stands in a table."""
    for name, verb in main.VERBS.items():
        assert isinstance(main.command(name, []), Command | Group), name
        handler = load(verb.handler)
        assert callable(handler) or isinstance(handler, Group), name
    _, told, _ = called(["--help"])
    assert all(f"  {name} " in told for name in VERBS)
