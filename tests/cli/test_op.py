"""Small real runs on the CPU: every family, outputs, interrupts, resume, ranks."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stepmark.cases.record import Measured
from stepmark.cli.main import status
from stepmark.measuring import measure
from stepmark.model.ops import FAMILIES
from stepmark.store.reader import read_records, with_all_samples

from .process import ROOT, lines, only_run, stepmark

pytestmark = pytest.mark.ranks

SHAPE = {
    "gemm": "--m 32 --n 32 --k 32",
    "grouped-gemm": "--num-groups 2 --tokens 16 --n 16 --k 16",
    "bmm": "--batch 2 --m 16 --n 16 --k 16",
    "attention": "--seq-q 32 --heads 2 --head-dim-qk 16 --backend math",
    "mlp": "--layers 2 --input 16 --batch 8",
    "embedding-bag": "--rows 64 --dim 16 --pooling 2 --batch 8",
    "norm": "--tokens 16 --hidden 32 --backend torch",
    "activation": "--tokens 16 --width 32 --backend torch",
    "rope": "--seq 16 --heads 2 --head-dim 16 --backend torch",
    "cross-entropy": "--tokens 16 --vocab 32 --backend torch",
    "optimizer": "--num-params 1000",
    "copy": "--num-bytes 65536",
}
# As short as can be, and not limited by a budget, which counts starts and set-up.
CPU = ["--device", "cpu", "--steps", "5", "--warmups", "1"]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_host_copy_is_skipped_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["op", "host-copy", "--num-bytes", "65536", *CPU]) == 3
    out, err = capsys.readouterr()
    assert "a device with memory of its own" in out + err


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"host-copy"}))
def test_each_family_runs(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "op",
        family,
        *SHAPE[family].split(),
        *CPU,
        "--csv",
        "-",
        "--json",
        "rows.json",
    ]
    code = status(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    rows = list(csv.DictReader(io.StringIO(out)))
    records = lines(only_run(tmp_path / "runs"))
    assert len(rows) == len(records) > 0
    for row, record in zip(rows, records, strict=True):
        assert row["family"] == family
        assert float(row["time_s"]) > 0
        assert row["num_wrong"] == "0"
        assert record["samples"]["seconds"][0]
    again = json.loads((tmp_path / "rows.json").read_text())
    found = again if isinstance(again, list) else again["rows"]
    assert [row["case_id"] for row in found] == [row["case_id"] for row in rows]


def test_a_tiny_model_all_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["op", "all", "--model", "llama-3.1-8b", "--scale", "tiny", "--csv", "out/"]
    assert status([*arguments, *CPU]) == 0, capsys.readouterr().err
    records = lines(only_run(tmp_path / "runs"))
    assert {"gemm", "attention", "norm", "optimizer", "copy"} <= {
        next(f for f in FAMILIES if f == _family(record)) for record in records
    }
    files = list((tmp_path / "out").glob("*.csv"))
    assert files
    texts = [io.StringIO(file.read_text()) for file in files]
    rows = [row for text in texts for row in csv.DictReader(text)]
    assert {row["scale"] for row in rows if row["model"]} == {"tiny"}


def _family(record: dict[str, Any]) -> str:
    case = record["case"]
    return str(case.get("family") or case["op"].get("family") or case["op"].get("type"))


@pytest.mark.parametrize(("kind", "expected"), [("wrong", 1), ("raises", 3)])
def test_exit_codes_of_a_bad_case(
    kind: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPMARK_TEST_HOOK", "tests.cli.bad_gemm")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("BAD_GEMM", kind)
    assert status(["op", "gemm", *SHAPE["gemm"].split(), *CPU]) == expected
    assert len(lines(only_run(tmp_path / "runs"))) == 1


def test_a_run_is_resumed_with_its_own_plan_only(tmp_path: Path) -> None:
    first = ["op", "gemm", "--m", "32", "--n", "32", "--k", "32", *CPU]
    assert stepmark(*first, cwd=tmp_path).returncode == 0
    run = only_run(tmp_path / "runs")
    before = lines(run)
    other = ["op", "gemm", "--m", "64", "--n", "32", "--k", "32", *CPU, "--resume", run.name]
    refused = stepmark(*other, cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "--m 32" in refused.stderr, "the flags it began with"
    assert lines(run) == before
    assert stepmark(*other, "--force", cwd=tmp_path).returncode == 0
    assert len(lines(run)) == 2


def test_two_ranks(tmp_path: Path) -> None:
    arguments = ["op", "gemm", *SHAPE["gemm"].split(), *CPU, "--nproc", "2", "--csv", "-"]
    done = stepmark(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["rank"] for row in rows] == ["", "0", "1"]
    run = only_run(tmp_path / "runs")
    (record,) = with_all_samples(run, read_records(run))
    assert isinstance(record, Measured)
    assert len(record.samples.seconds) == 2


def test_launches_are_new_processes_in_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STEPMARK_TEST_HOOK", "tests.cli.listing")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    two = ["op", "gemm", "--m", "32,64", "--n", "32", "--k", "32", *CPU, "--launches", "3"]
    assert status([*two, "--json", "rows.json"]) == 0, capsys.readouterr().err
    records = lines(only_run(tmp_path / "runs"))
    assert [record["launch"] for record in records] == [1, 1, 2, 2, 3, 3]
    pids = (tmp_path / "ranks").read_text().split()
    assert len(set(pids)) == len(pids) == 3
    table = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["launches"] for row in table] == [3, 3]
    assert all(row["launch_spread_pct"] > 0 for row in table)
    medians = [median(r["samples"]["seconds"][0]) for r in records[::2]]
    assert table[0]["time_s"] == median(medians)
    assert "spread of launches %" in capsys.readouterr().out


def test_missing_launches_are_resumed_in_processes_of_their_own(tmp_path: Path) -> None:
    words = ["op", "gemm", *SHAPE["gemm"].split(), *CPU, "--launches", "3"]
    assert stepmark(*words, cwd=tmp_path).returncode == 0
    run = only_run(tmp_path / "runs")
    records = (run / "records.jsonl").read_text().splitlines(keepends=True)
    (run / "records.jsonl").write_text(records[1])
    assert stepmark(*words, "--resume", run.name, cwd=tmp_path).returncode == 0
    assert [record["launch"] for record in lines(run)] == [2, 1, 3]
    refused = stepmark(*words[:-1], "2", "--resume", run.name, cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "--launches 3" in refused.stderr


def test_the_budget_is_for_all_launches(tmp_path: Path) -> None:
    words = ["op", "gemm", *SHAPE["gemm"].split(), "--device", "cpu", "--budget", "0.5s"]
    done = stepmark(*words, "--launches", "50", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = lines(only_run(tmp_path / "runs"))
    assert [record["launch"] for record in records] == list(range(1, 51))
    first, *_, last = records
    assert first["kind"] == "measured"
    assert first["samples"]["wall_s"] < 0.5, "each has a part of it"
    assert last["kind"] == "skipped"
    assert last["reason"] == "--budget leaves nothing"
    assert "[50/50] gemm fwd 32x32x32 fp32 torch: skipped: --budget leaves" in done.stderr
    # What was skipped for its time is measured by resume, which has the time again.
    again = stepmark("resume", "latest", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    count = sum(record["kind"] == "measured" for record in records)
    later = lines(only_run(tmp_path / "runs"))
    assert sum(record["kind"] == "measured" for record in later) > count


def test_steps_and_warmups_are_those_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["op", "gemm", *SHAPE["gemm"].split(), "--device", "cpu", "--dtype", "fp32"]
    words += ["--steps", "7", "--warmups", "3"]
    assert status([*words, "--csv", "rows.csv", "--style", "param"]) == 0
    out, _ = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text()))
    assert (row["n"], row["warmup_calls"]) == ("7", "3")
    assert row["rate"] == "soak below 0.1 s", "so few calls are no soak"
    assert f"Steps =  {7 * int(row['calls_per_sample'])}  warmups =  3" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "--steps 0 is invalid: it must be from 1 to 1000000."),
        (["--warmups", "-1"], "--warmups -1 is invalid: it must be from 1 to 1000000."),
        (["--steps", "9", "--budget", "2s"], "--budget 2s is invalid: it cannot be combined"),
        (["--warmups", "9", "--budget", "2s"], "which fixes how long a case takes."),
        (["--launches", "0"], "--launches 0 is invalid: it must be from 1 to 100."),
    ],
)
def test_samples_that_cannot_be_taken_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["op", "gemm", *SHAPE["gemm"].split(), "--device", "cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize("has_run", [False, True])
def test_launches_need_processes_of_their_own(
    has_run: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["op", "gemm", *SHAPE["gemm"].split(), *CPU, "--launches", "2"]
    if has_run:
        assert stepmark(*words, cwd=tmp_path).returncode == 0
        words = ["resume", "latest"]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(measure, "load", lambda name: _as_rank_0)
    assert status(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "launches 2 is invalid: it must be 1 under torchrun, srun or mpirun" in line


def _as_rank_0(device: str, prepare: Callable[[], object], *, force: bool) -> object:
    return prepare()


def test_a_dry_run_says_how_often_cases_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(["op", "gemm", *SMALL, "--launches", "4"]) == 0
    assert capsys.readouterr().err == "1 case, in 4 launches; none was run\n"


def test_an_exit_code_comes_through_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    arguments = ["op", "gemm", *SHAPE["gemm"].split(), *CPU, "--nproc", "2"]
    done = stepmark(*arguments, "--resume", "20200101-000000-dead", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


SMALL = ["--m", "4", "--n", "4", "--k", "4", *CPU, "--dry-run"]


@pytest.mark.parametrize(
    "words",
    [
        ["--out", "copy", "gemm", *SMALL],
        ["--csv", "norm", "gemm", *SMALL],
        ["--dry-run", "gemm", *SMALL],
        ["--m=4", "--n", "4", "gemm", *SMALL[4:]],
    ],
)
def test_a_value_is_not_taken_for_the_family(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["op", *words]) == 0
    text = capsys.readouterr().out
    assert "gemm" in ((tmp_path / "norm").read_text() if "norm" in words else text)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gemm", "--dry-ru"], "did you mean --dry-run? See"),
        (["grouped_gemm"], "did you mean grouped-gemm? It must be one of gemm, "),
        (["--config", "PARAM", "--scale", "1/64"], "--scale 1/64 is invalid"),
        (["--config", "PARAM", "--nproc", "x"], "--nproc x is invalid"),
    ],
)
def test_bad_words_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "examples" / "param_operators.json")
    assert status(["op", *(file if word == "PARAM" else word for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


BY_HAND = "--m 32 --n 32 --k 32"
MODEL = "--model llama-3.1-8b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{MODEL} --layout xx", "--layout xx is invalid: it has no effect with --model, only"),
        (f"{MODEL} --out-dtype foo", "only with --m, --n and --k."),
        (f"{MODEL} --m 512", "--m 512 is invalid: it cannot be combined with --model"),
        (f"{MODEL} --scaling rowwise", "it works only with an fp8 --dtype"),
        (f"{MODEL} --etp 2", "it works only for a model with experts"),
        (f"{BY_HAND} --layout xx", "--layout xx is invalid: it must be one of nn, nt, tn, tt"),
        (
            f"{BY_HAND} --tp 8",
            "--tp 8 is invalid: it has no effect with --m, --n and --k, only",
        ),
        (f"{BY_HAND} --as fsdp", "--as fsdp is invalid: it has no effect"),
        (f"--find-max {MODEL}", "--find-max is invalid: it cannot be combined with --model"),
        ("--find-max --m 512", "--m 512 is invalid: it cannot be combined with --find-max"),
        ("--find-max --dataset A", "it cannot be combined with --dataset"),
        (
            "--find-max --rate burst",
            "--rate burst is invalid: it has no effect with --find-max.",
        ),
        ("--dataset A --pass dgrad", "it must be a pass that gemm has with these shapes"),
        ("", "shape is missing: give --m, --n and --k, or --model or --shapes"),
    ],
)
def test_flags_that_a_source_of_shapes_ignores_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["op", "gemm", *words.split(), "--device", "h200", "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_each_file_of_attention_shapes_takes_its_own_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = ["--mbs", "2", "--device", "h200", "--dry-run"]
    of_primus = str(ROOT / "examples" / "attention_shapes.json")
    assert status(["op", "attention", "--shapes", of_primus, *dry]) == 0
    shape = {"batch": 1, "seq_q": 64, "seq_kv": 64, "heads": 2, "kv_heads": 2}
    shape |= {"head_dim_qk": 64, "head_dim_v": 64}
    own = tmp_path / "shapes.json"
    own.write_text(json.dumps([shape]))
    assert status(["op", "attention", "--shapes", str(own), *dry]) == 2
    assert "--mbs 2 is invalid: it has no effect with --shapes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "batch", "seq"),
    [
        ("--scale 1/16", 1, 512),  # of 8192
        ("--scale 1/16 --mbs 64 --seq-len 4096", 4, 256),
        ("--scale 1/64 --seq-len 100 --tp 2", 1, 2),  # a rank has half of it
        ("--scale 1 --mbs 3 --seq-len 101", 3, 101),
        ("--scale tiny", 1, 64),
        ("--scale tiny --mbs 2 --seq-len 128", 2, 128),
    ],
)
def test_scale_shortens_sequences_and_batches_of_a_model(
    words: str, batch: int, seq: int, tmp_path: Path
) -> None:
    target = tmp_path / "plan.json"
    command = ["op", "attention", "--model", "llama-3.1-8b", "--device", "cpu", "--dry-run"]
    assert status([*command, *words.split(), "--json", str(target)]) == 0
    rows = json.loads(target.read_text())
    assert rows
    shapes = {tuple(row["shape"].split()[:2]) for row in rows}
    assert shapes == {(f"b{batch}", f"s{seq}")}
