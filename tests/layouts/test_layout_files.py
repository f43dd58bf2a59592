"""Files of layouts: `predict` of a file is the row, and a row without a file is named."""

import csv
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from stepmark.cli.main import status

WORDS = "plan llama-3.1-8b --gpus 32 --gbs 64 --seq-len 2048 --device h100-sxm --mbs 1 --jobs 1"
ONE_LAYOUT = ["--framework", "megatron", "--tp", "2", "--pp", "1", "--recompute", "none"]


@pytest.mark.parametrize(
    ("framework", "axes", "suffix", "more"),
    [
        ("megatron", "--tp 2 --pp 2 --recompute none,half --top 3", ".sh", []),
        # torchtitan has no product of q, k and v, which a note says.
        ("pytorch", "--tp 1,2 --pp 1 --recompute none,half --top 6", ".toml", ["--fuse-qkv"]),
    ],
)
def test_predict_of_a_file_is_its_row(
    framework: str,
    axes: str,
    suffix: str,
    more: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "new" / "layouts"
    out = tmp_path / "layouts.json"
    words = [*WORDS.split(), "--framework", framework, *axes.split()]
    assert status([*words, "--files", str(folder), "--json", str(out)]) == 0
    errors = capsys.readouterr().err
    rows = json.loads(out.read_text())["layouts"]
    shown = [row for row in rows if row["file"]]
    assert shown == rows[: int(words[-1])]
    assert [*map(Path, (row["file"] for row in shown))] == sorted(folder.iterdir())
    assert {Path(row["file"]).suffix for row in shown} == {suffix}
    # Rows that differ in what files say: chunks, replicas or recomputed layers.
    assert len({(row["vpp"], row["dp_replicate"], row["recompute"]) for row in shown}) > 2
    generated = ["--framework", framework, *more] if more else []
    for row in shown:
        predicted = tmp_path / "prediction.json"
        words = ["predict", row["file"], *generated, "--device", "h100-sxm"]
        assert status([*words, "--json", str(predicted)]) == 0
        assert json.loads(predicted.read_text())["step_s"] == row["step_s"], row["file"]
    losses = re.findall("torchtitan cannot carry: fuse-qkv", errors)
    assert len(losses) == (framework == "pytorch")
    (command,) = re.findall(r"to predict the first: stepmark (.*)", errors)
    assert shlex.split(command)[:2] == ["predict", shown[0]["file"]]
    assert status(shlex.split(command)) == 0


def test_files_have_two_hops_and_say_that_they_lack_an_imbalance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "layouts"
    out = tmp_path / "layouts.json"
    words = "plan qwen3-30b-a3b --gpus 32 --gbs 64 --device h100-sxm --mbs 1 --jobs 1 --tp 1"
    more = "--pp 1 --ep 32 --recompute full --framework megatron --dispatch two-hop --top 1"
    common = [*words.split(), *more.split(), "--files", str(folder), "--json", str(out)]
    assert status(common) == 0
    assert "cannot carry" not in capsys.readouterr().err
    (file,) = folder.iterdir()
    assert "two-hop" in file.name
    assert "--moe-token-dispatcher-type flex" in file.read_text()
    (row,) = json.loads(out.read_text())["layouts"]
    predicted = tmp_path / "prediction.json"
    words = f"predict {file} --device h100-sxm --json {predicted}"
    assert status(words.split()) == 0
    assert json.loads(predicted.read_text())["step_s"] == row["step_s"]
    assert status([*common, "--imbalance", "1.5"]) == 0
    assert "megatron-args cannot carry: imbalance 1.5" in capsys.readouterr().err


def test_a_row_without_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "layouts.csv"
    words = "plan gpt-7b --gpus 8 --gbs 16 --seq-len 1024 --device h200 --mbs 1 --tp 1 --pp 1"
    more = ["--recompute", "none", "--framework", "both", "--top", "2", "--jobs", "1"]
    folder = tmp_path / "layouts"
    folder.mkdir()
    (folder / "09-earlier.sh").write_text("")
    assert status([*words.split(), *more, "--files", str(folder), "--csv", str(rows)]) == 0
    errors = capsys.readouterr().err
    table = [*csv.DictReader(rows.read_text().splitlines())]
    (number,) = (n for n, row in enumerate(table[:2], 1) if row["framework"] == "pytorch")
    assert f"no file of row {number}: torchtitan: " in errors
    assert [not row["file"] for row in table] == [n + 1 == number for n in range(len(table))]
    assert "has 1 more of earlier searches, as 09-earlier.sh" in errors


def test_files_of_several_numbers_of_gpus(tmp_path: Path) -> None:
    words = WORDS.replace("--gpus 32", "--gpus 8,16").split()
    assert status([*words, *ONE_LAYOUT, "--top", "3", "--files", str(tmp_path)]) == 0
    names = [each.name for each in sorted(tmp_path.iterdir())]
    assert names == ["01-8gpus-megatron-tp2-mbs1.sh", "02-16gpus-megatron-tp2-mbs1.sh"]


def test_what_is_no_regular_file_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "01-megatron-tp2-mbs1.sh")
    words = [*WORDS.split(), *ONE_LAYOUT, "--top", "1"]
    assert status([*words, "--files", str(tmp_path)]) == 2
    assert "a name that is free, or a regular file's" in capsys.readouterr().err
    assert (tmp_path / "01-megatron-tp2-mbs1.sh").is_fifo()


def test_a_folder_that_cannot_be_made_ends_no_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert status([*WORDS.split(), "--files", str(tmp_path / "file" / "layouts")]) == 2
    assert "--files" in capsys.readouterr().err
