"""`stepmark op custom` on the CPU: small real runs, exit codes, comparison, and its example."""

import json
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.store.reader import find_run

from .process import ROOT, lines, only_run

pytestmark = pytest.mark.ranks

CPU = ["--device", "cpu", "--steps", "5", "--warmups", "1"]
FILE = """
import torch
from stepmark import CustomOp

FACTOR = 2

def build(device, dtype, n=4096, bytes_moved=0):
    x = torch.randn(n, device=device, dtype=dtype)
    return CustomOp(
        call=lambda x: x * FACTOR,
        operands=(x,),
        reference=lambda x: x * 2,
        flops=n,
        bytes_moved=bytes_moved or 2 * x.nbytes,
    )

other = build
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "kernel.py").write_text(FILE)


def test_functions_are_measured_and_compared_after_an_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["op", "custom", "kernel.py:build,other", "--arg", "n=512,1024", *CPU]
    assert status([*words, "--launches", "2", "--json", "rows.json"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["shape"], row["backend"], row["role"]) for row in rows] == [
        ("n=512", "build", "kernel.py"),
        ("n=512", "other", "kernel.py"),
        ("n=1024", "build", "kernel.py"),
        ("n=1024", "other", "kernel.py"),
    ]
    for row in rows:
        size = int(row["shape"].removeprefix("n="))
        assert (row["flops"], row["bytes_moved"]) == (size, 8 * size)
        assert row["tflops"] == pytest.approx(size / row["time_s"] / 1e12)
        assert row["gb_per_s"] == pytest.approx(8 * size / row["time_s"] / 1e9)
        assert row["num_wrong"] == 0
        assert row["launches"] == 2
    printed = capsys.readouterr().out
    assert "other / build" in printed, "the ratio of functions with the same arguments"
    assert "other: geometric mean" in printed
    assert "over 2 lines" in printed
    first = only_run(tmp_path / "runs")
    (tmp_path / "kernel.py").write_text(f"{FILE}\n# edited\n")
    assert status([*words, "--resume", first.name]) == 2, "the kernel is another one"
    assert status([*words, "--launches", "2"]) == 0
    capsys.readouterr()
    assert status(["compare", str(first), str(find_run(tmp_path / "runs", "latest"))]) == 0
    out, err = capsys.readouterr()
    assert "n=1024" in out
    assert "kernel.py was edited before" in out
    assert "sweep --env" not in out + err


def test_functions_of_one_launch_have_a_ratio_and_the_way_to_a_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["op", "custom", "kernel.py:build,other", *CPU]) == 0
    out = capsys.readouterr().out
    assert "other / build" in out
    assert "no verdict without repeats: measure with --launches 3" in out


def test_a_wrong_kernel_is_said_and_the_exit_code_is_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernel.py").write_text(FILE.replace("FACTOR = 2", "FACTOR = 2.1"))
    assert status(["op", "custom", "kernel.py:build", *CPU]) == 1
    assert "WRONG" in capfd.readouterr().err


def test_a_bad_contract_ends_the_run_before_the_first_case(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["op", "custom", "kernel.py:build", "--arg", "bytes_moved=4,-4", *CPU]
    assert status([*words, "--nproc", "2"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    expected = "kernel.py:build: bytes_moved -4 is invalid: it must be a whole number from 1."
    assert line == f"stepmark: {expected}"
    assert not lines(only_run(tmp_path / "runs"))


def test_a_plan_has_the_work_and_the_least_time_of_a_device_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernel.py").write_text(f"{FILE}\nprint('loaded')\n")
    words = ["op", "custom", "kernel.py:build", "--arg", "n=1048576", "--dry-run"]
    assert status([*words, "--device", "h200", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    bytes_moved = 4 * 2**20
    known = ("flops", "bytes_moved", "memory_bytes")
    assert [row[name] for name in known] == [2**20, bytes_moved, bytes_moved // 2]
    assert row["least_s"] == pytest.approx(bytes_moved / 4.8e12)
    assert row["bound"] == "memory"
    assert row["predicted_s"] is None


def test_a_plan_names_each_function_and_refuses_its_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["op", "custom", "kernel.py:build,other", "--dry-run", "--device", "h200"]
    assert status(words) == 0
    rows = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "kernel" in line
    ]
    assert rows == ["kernel.py:build", "kernel.py:other"]
    assert status([*words, "--arg", "n=many"]) == 2
    assert "it raised TypeError: randn()" in capsys.readouterr().err


def test_a_plan_says_why_it_does_not_know_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = FILE.replace("    return CustomOp(", "    x[0].item()\n    return CustomOp(", 1)
    (tmp_path / "kernel.py").write_text(build)
    words = ["op", "custom", "kernel.py:build", "--dry-run", "--device", "h200"]
    assert status(words) == 0
    assert "default arguments (unknown without a device)" in capsys.readouterr().out
    assert status([*words, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    unknown = ("flops", "bytes_moved", "memory_bytes", "least_s", "predicted_s")
    assert [row[name] for name in unknown] == [None] * 5
    assert (
        "# at least is unknown without a device: kernel.py:build 'kernel.py:9 in build'" in err
    )


@pytest.mark.parametrize("words", [["--dry-run"], CPU])
def test_an_argument_that_a_function_lacks_is_refused_in_a_plan_too(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert status(["op", "custom", "kernel.py:build", "--arg", "m=5", *words]) == 2
    assert "called with 2 arguments, and by name with m" in capfd.readouterr().err


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "custom_op.py"
    words = ["--arg", "tokens=64", "--arg", "hidden=128"]
    assert status(["op", "custom", f"{example}:eager_norm", *words, *CPU]) == 0
    assert "eager_norm" in capsys.readouterr().out
