"""Every verb that writes: devices, pipes and links stay what they are; a full disk is said."""

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ground.devices import device

from stepmark.cli import main
from stepmark.ground import streams

RESULTS = Path(__file__).parents[2] / "results"
RUN = str(RESULTS / "h200-x4-train-proxy-ddp")
OTHER = str(RESULTS / "h200-x4-train-proxy-ddp-fp8")
LOG = str(RESULTS / "h200-x4-nccl-tests" / "nccl-tests-queued-all_reduce-1.txt")
LOGS = [str(path) for path in sorted((RESULTS / "h200-x4-nccl-log").iterdir())]
WORKLOAD = RESULTS.parent / "tests/data/aicb/ds_stage2_llama7b_w128/mocked.csv"

# A command line up to the name of the file, and what the file holds.
FILES: dict[str, tuple[list[str], bytes]] = {
    "report": (["report", RUN, "--out"], b"<!doctype html>"),
    "compare --html": (["compare", RUN, OTHER, "--html"], b"<!doctype html>"),
    "compare --json": (["compare", RUN, OTHER, "--json"], b'{\n  "names"'),
    "compare --csv": (["compare", RUN, OTHER, "--csv"], b"family,"),
    "show --csv": (["runs", "show", RUN, "--csv"], b"family,"),
    "list --json": (["runs", "list", "--runs", str(RESULTS.parent / "docs"), "--json"], b"[]"),
    "sql --csv": (["runs", "sql", "SELECT 1 AS one", "--csv"], b"one\n1\n"),
    "export": (["runs", "export", RUN, "--to", "json"], b"{"),
    "parquet": (["runs", "export", RUN, "--to", "parquet"], b"PAR1"),
    "doctor --json": (["doctor", "--json"], b"{"),
    "logs --html": (["logs", *LOGS, "--html"], b"<!doctype html>"),
    "logs --json": (["logs", LOG, "--json"], b"{"),
    "workload --out": (["workload", "generate", "--model", "gpt2-1.5b", "--out"], b"{"),
    "workload --html": (["workload", "show", str(WORKLOAD), "--html"], b"<!doc"),
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_report_goes_into_a_folder_to_a_file_or_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    names = {"new/": "new/report.html", "there": "there/report.html", "x": "x"}
    for out, name in names.items():
        assert main.status(["report", RUN, "-o", out]) == 0
        assert capsys.readouterr().out == f"{name}\n"
        assert (tmp_path / name).read_bytes().startswith(b"<!doctype html>")
    assert main.status(["report", RUN, "-o", "-"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</html>")


def written(name: str, path: Path) -> int:
    words, _ = FILES[name]
    return main.status([*words, str(path)])


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_gets_the_whole_file(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert written(name, pipe) == 0
    reader.join(10)
    assert got
    assert got[0].startswith(FILES[name][1])
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_followed_and_a_device_left(name: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    node = device(tmp_path / "deep", "null")
    for target in (Path("deep/target"), node):
        link = tmp_path / f"to-{target.name}"
        link.symlink_to(target)
        assert written(name, link) == 0
        assert link.is_symlink()
    assert (tmp_path / "deep" / "target").read_bytes().startswith(FILES[name][1])
    assert stat.S_ISCHR(node.stat().st_mode)


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = device(tmp_path, "full")
    assert written(name, node) == 2
    said = capsys.readouterr().err.splitlines()
    (line,) = [line for line in said if line.startswith("stepmark: ")]
    assert "can be written (No space left on device)" in line
    assert stat.S_ISCHR(node.stat().st_mode)


@pytest.fixture
def stdout_on() -> Iterator[Callable[[int], None]]:
    """Put a descriptor in the place of this process's stdout; the test's own comes back."""
    kept, before = os.dup(1), sys.stdout

    def put(fd: int) -> None:
        os.dup2(fd, 1)
        sys.stdout = streams.checked(1, before)

    yield put
    sys.stdout = before
    os.dup2(kept, 1)
    os.close(kept)


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["compare", RUN, OTHER],
        ["runs", "sql", "SELECT 1 AS one"],
        ["logs", LOG],
        ["workload", "generate", "--model", "gpt2-1.5b"],
        ["report", RUN, "--out", "report.html"],
        ["--help"],
        ["comm", "--help"],
        ["runs", "show", RUN, "--csv", "-"],
        ["runs", "list", "--runs", str(RESULTS)],
        ["comm", "all_reduce", "--nproc", "2", "--device", "cpu", "--dry-run"],
        ["train", "gpt2-1.5b", "--device", "cpu", "--dry-run"],
        ["op", "gemm", "--m", "8", "--n", "8", "--k", "8", "--device", "cpu", "--dry-run"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("how", ["full", "closed"])
def test_stdout_that_cannot_be_written_is_one_sentence(
    words: list[str],
    how: str,
    stdout_on: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    where, mode = ("/dev/full", os.O_WRONLY) if how == "full" else (os.devnull, os.O_RDONLY)
    fd = os.open(where, mode)
    stdout_on(fd)
    code = main.status(words)
    sys.stdout.flush()
    os.close(fd)
    reason = "No space left on device" if how == "full" else "it is closed"
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("stepmark: ")]
    assert (code, len(said)) == (2, 1)
    assert reason in said[0]


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "show", RUN],
        ["runs", "sql", "SELECT 1 AS one"],
        ["logs", LOG],
        ["compare", RUN, OTHER],
        ["op", "copy", "--num-bytes", "1024", "--device", "cpu", "--dry-run"],
    ],
)
def test_two_files_on_stdout_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.status([*words, "--json", "-", "--csv", "-"]) == 2
    assert "stdout is already taken by --json" in capsys.readouterr().err
