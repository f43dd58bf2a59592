"""The recipes of CONTRIBUTING, followed in a copy of the package: what is added works.

Each writes or changes as many files as its line of the table says.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import recipe_files

ROOT = Path(__file__).parents[1]
Run = Callable[..., str]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which all recipes were followed."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in recipe_files.RECIPES.values():
        for edit in recipe:
            edit.apply(copy / "src" / "stepmark")
    return copy


@pytest.fixture(scope="module")
def run(tree: Path) -> Run:
    def output(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        return done.stdout if not code else done.stderr

    return output


@pytest.mark.parametrize("name", recipe_files.RECIPES)
def test_a_recipe_takes_as_many_files_as_the_table_says(name: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    files = {edit.file for edit in recipe_files.RECIPES[name]}
    assert int(row.split("|")[2]) == len(files)
    for file in files:
        folder = file.rpartition("/")[0]
        assert f"`{file}`" in row or f"`{folder}/" in row, file


def test_an_operator(run: Run) -> None:
    flags = ("--elements", "1024", "--device", "cpu", "--budget", "1s", "--json", "-")
    (row, *_) = json.loads(run("-m", "stepmark", "op", "scale", *flags))["rows"]
    assert (row["family"], row["shape"], row["num_wrong"]) == ("scale", "1024 elements", 0)
    assert row["status"] == "measured"
    assert row["bytes_moved"] > 0
    code = "from stepmark.nodes.bench_doctor import samples; print(*samples('scale'))"
    assert "Scale" in run("-c", code)


COLUMN = """
from stepmark.cli.main import status
for words in (
    ["runs", "show", "few/gemm", "--json", "shown.json"],
    ["runs", "show", "few/gemm", "--csv", "shown.csv"],
    ["runs", "sql", "SELECT range_s FROM rows", "--runs", "few", "--json", "found.json"],
    ["report", "few/gemm", "--out", "column.html"],
):
    assert status(words) == 0, words
"""


def test_a_column(run: Run, tree: Path) -> None:
    (tree / "few").mkdir(exist_ok=True)
    (tree / "few" / "gemm").symlink_to(ROOT / "results" / "h200-x2-gemm")
    printed = run("-c", COLUMN)
    assert "range" in printed.splitlines()[3].split()
    shown = json.loads((tree / "shown.json").read_text())["rows"]
    (first, *_) = csv.DictReader((tree / "shown.csv").read_text().splitlines())
    assert float(first["range_s"]) == shown[0]["range_s"] > 0
    found = json.loads((tree / "found.json").read_text())
    assert sorted(row["range_s"] for row in found) == sorted(row["range_s"] for row in shown)
    page = (tree / "column.html").read_text()
    assert '<button type="button">range</button>' in page


def rows_of(run: Run, *words: str) -> list[dict[str, object]]:
    document = json.loads(run("-m", "stepmark", *words, "--device", "cpu", "--json", "-"))
    rows: list[dict[str, object]] = document["rows"]
    return rows


def test_an_option_of_comm(run: Run, tree: Path) -> None:
    """What the declaration alone gives: option, plan, command, columns, words, comparison."""
    sizes = ("all_reduce", "-b", "1K", "-e", "1K", "-n", "3", "--nproc", "2")
    rows = rows_of(run, "comm", *sizes, "--gloo-threads", "1,2", "--out", "threads")
    assert [row["gloo_threads"] for row in rows] == [1, 2]
    assert {row["num_wrong"] for row in rows} == {0}
    assert ["1 gloo threads" in str(row["shape"]) for row in rows] == [True, False]
    assert ["--gloo-threads 1" in str(row["command"]) for row in rows] == [True, False]
    (first, *_) = rows_of(run, "comm", *sizes, "--out", "plain")
    assert first["case_id"] == rows[1]["case_id"]
    # Cases of earlier runs keep their identity.
    stored = "h200-x4-comm-queued-1"
    (tree / "few").mkdir(exist_ok=True)
    (tree / "few" / stored).symlink_to(ROOT / "results" / stored)
    shown = json.loads(run("-m", "stepmark", "runs", "show", f"few/{stored}", "--json", "-"))
    records = (ROOT / "results" / stored / "records.jsonl").read_text().splitlines()
    ids = {json.loads(line)["case_id"] for line in records}
    assert {row["case_id"] for row in shown["rows"]} == ids
    only = ("--gloo-threads", "1", "--device")
    run("-m", "stepmark", "comm", *sizes, *only, "cpu", "--out", "one")
    assert "gloo_threads differs" in run("-m", "stepmark", "compare", "plain/*", "one/*")
    refused = run("-m", "stepmark", "comm", *sizes, *only, "h200", "--dry-run", code=2)
    assert "only with gloo" in refused


def test_a_training_technique(run: Run) -> None:
    step = ("train", "gpt2-125m", "--scale", "tiny", "--steps", "3", "--strategy", "single")
    (plain,) = rows_of(run, *step, "--out", "plain-step")
    (smooth,) = rows_of(run, *step, "--label-smoothing", "0.5", "--out", "smooth-step")
    assert smooth["label_smoothing"] == 0.5
    assert str(smooth["techniques"]) == f"{plain['techniques']}, label smoothing 0.5"
    assert "--label-smoothing 0.5" in str(smooth["command"])
    assert smooth["loss_first"] != plain["loss_first"]
    notes = run("-m", "stepmark", "compare", "plain-step/*", "smooth-step/*")
    assert "label_smoothing differs" in notes
    smoothed = ("--label-smoothing", "0.5", "--loss-chunks", "2", "--device", "cpu")
    assert "0 with --loss-chunks" in run("-m", "stepmark", *step, *smoothed, code=2)


def test_a_collective(run: Run) -> None:
    sizes = ("-b", "1K", "-e", "1K", "-n", "3")
    where = ("--nproc", "2", "--device", "cpu", "--json", "-")
    (row, *_) = json.loads(run("-m", "stepmark", "comm", "ring_back", *sizes, *where))["rows"]
    assert (row["collective"], row["num_wrong"]) == ("ring_back", 0)


def test_a_format(run: Run, tree: Path) -> None:
    what = (
        "--framework",
        "ddp",
        "--model",
        "gpt2-125m",
        "--scale",
        "tiny",
        "--world-size",
        "2",
    )
    text = run("-m", "stepmark", "workload", "generate", *what, "--to", "counts")
    counts = {name: int(count) for name, count in (line.split() for line in text.splitlines())}
    assert counts["ComputeOp"] > counts["CommOp"] > 0


def test_a_section_of_the_page_of_a_run(run: Run, tree: Path) -> None:
    (record, *_) = sorted((ROOT / "results").glob("**/run.json"))
    run("-m", "stepmark", "report", str(record.parent), "--out", "page.html")
    assert "<h2>Cases by family</h2>" in (tree / "page.html").read_text()


def test_a_page_with_a_figure(run: Run, tree: Path) -> None:
    what = (
        "--framework",
        "ddp",
        "--model",
        "gpt2-125m",
        "--world-size",
        "2",
        "--out",
        "w.json",
    )
    run("-m", "stepmark", "workload", "generate", *what)
    code = (
        "from pathlib import Path\n"
        "from stepmark.workloads.counts_page import page\n"
        "from stepmark.step import native\n"
        "shown = page(native.read(Path('w.json')))\n"
        "Path('counts.html').write_text(shown.html())\n"
        "print(sum(shown.sections[0].series[0].x))"
    )
    assert int(run("-c", code)) > 0
    html = (tree / "counts.html").read_text()
    assert "<h1>Counts of &lt;gpt2-125m" in html
    assert re.search(r'<section id="operations-of-stage-0"><h2>.*"x":\[\d+', html, re.S)
    assert "<h2>Rules</h2>" in html


def test_a_model_and_a_device(run: Run) -> None:
    code = (
        "from stepmark.model.model_tables import find_model\n"
        "from stepmark.model.device import find_device\n"
        "print(find_model('toy').num_layers, find_device('Toy Accelerator').hbm_bytes)"
    )
    assert run("-c", code).split() == ["3", "1024"]
