"""stepmark trace convert on the command line."""

import gzip
import json
from pathlib import Path

import pytest

from stepmark.cli.main import status

DATA = Path(__file__).parents[1] / "data" / "traces"


def test_a_trace_of_one_step_and_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    words = ["--to", "trimmed", "--steps", "6", "--ranks", "0,5", "--jobs", "1"]
    assert status(["trace", "convert", str(DATA / "fsdp8"), *words, "--out", str(folder)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.json.gz", "rank5.json.gz"]
    trace = json.loads(gzip.decompress((folder / "rank5.json.gz").read_bytes()))
    assert trace["distributedInfo"]["rank"] == 5
    assert str(folder / "rank0.json.gz") in capsys.readouterr().out
    # Nothing is left, and nothing is overwritten.
    assert status(["trace", "convert", str(DATA / "fsdp8"), *words, "--out", str(folder)]) == 2
    assert "a new or empty folder" in capsys.readouterr().err
    other = tmp_path / "other"
    words[3] = "9"
    assert status(["trace", "convert", str(DATA / "fsdp8"), *words, "--out", str(other)]) == 2
    assert "5-6" in capsys.readouterr().err
    assert not other.exists()
    other.mkdir()
    assert status(["trace", "convert", str(DATA / "fsdp8"), *words, "--out", str(other)]) == 2
    assert list(other.iterdir()) == []


def test_outputs_of_another_kind_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for a file, and stdout for a folder: nothing is written."""
    monkeypatch.chdir(tmp_path)
    trace = str(DATA / "fsdp8")
    for form in ("csv", "chakra"):
        assert status(["trace", "convert", trace, "--to", form, "--out", "-"]) == 2
        assert "it must be a folder" in capsys.readouterr().err
    for out in (str(tmp_path), "new/"):
        assert status(["trace", "to-workload", trace, "--out", out]) == 2
        assert "a workload is one file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
