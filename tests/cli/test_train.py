"""`stepmark train` as a user starts it: what it measures, keeps and says; ranks that break."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.training.train_records import flat, single

from stepmark.cases.record import Failed, Measured, Record
from stepmark.cases.train_case import TrainCase
from stepmark.cli.main import status
from stepmark.store.reader import read_records
from stepmark.training.train import found_batch

from .comm_process import Running, outcomes
from .process import lines, only_run, stepmark

pytestmark = pytest.mark.ranks

TINY = ["--device", "cpu", "--scale", "tiny"]
# A case is over when its share of the budget is; no case gets its samples.
ENDLESS = ["--steps", "1000000", "--budget"]


def failed(case: TrainCase, cause: str) -> Failed:
    return Failed(run_id="r", case=case, cause=cause, message="as it may be", ranks=())


def test_one_rank_is_measured_shown_and_written(tmp_path: Path) -> None:
    words = ["train", "gpt2-125m", "--strategy", "single", "--steps", "5", *TINY]
    done = stepmark(*words, "--json", "rows.json", "--csv", "rows.csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    (record,) = read_records(run)
    assert record.train.model.num_layers == 2
    (line,) = lines(run)
    assert len(line["samples"]["seconds"]) == 1
    assert len(line["samples"]["seconds"][0]) >= 5
    assert line["training"]["num_params"] == record.train.model.num_params
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (same,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    assert row["strategy"] == same["strategy"] == "single"
    assert row["tokens_per_s_gpu"] > 0
    assert float(same["tflops"]) > 0
    assert "gpt2-125m@tiny" in done.stdout
    assert "tokens/s" in done.stdout
    assert re.search(r"^\[1/1\] train gpt2-125m@tiny single mbs 1", done.stderr, re.M)
    assert done.stderr.splitlines()[-1].startswith("run ")


def test_calibration_measures_every_part_and_is_resumed(tmp_path: Path) -> None:
    words = ["calibrate", "gpt2-125m", "--num-layers", "3", "--mbs", "2", "--nproc", "2", *TINY]
    done = stepmark(*words, "--budget", "30s", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    kernels, host, *messages = read_records(run)
    assert (kernels.train.model.num_layers, kernels.train.mbs) == (2, 2)
    assert (host.train.model.num_layers, host.train.mbs) == (3, 1)
    assert isinstance(kernels, Measured)
    assert isinstance(host, Measured)
    assert [bool(part.training and part.training.traces) for part in (kernels, host)] == [1, 0]
    assert {record.comm.family for record in messages} == {
        *("all_gather", "reduce_scatter", "all_reduce")
    }
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == len(messages) + 2
    first, second, *rest = done.stdout.splitlines()
    assert re.match(r"kernels +2 layers, steady step .* matmul .* optimizer", first)
    assert re.match(
        r"host +3 layers, 128 tokens, medians: forward .* backward .* optimizer", second
    )
    assert sum(line.startswith("busbw") for line in rest) == 3
    again = stepmark("resume", run.name, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_two_ranks_of_each_strategy_learn_a_text_and_tell_their_messages(
    tmp_path: Path,
) -> None:
    words = ["train", "llama-3.1-8b", "--strategy", "ddp,fsdp", "--nproc", "2", *TINY]
    words += ["--text", "--steps", "16", "--lr", "0.003", "--messages", "--out", "."]
    done = stepmark(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    found = lines(only_run(tmp_path))
    assert outcomes(found) == ["measured"] * 2
    for line, collectives in zip(
        found, ({"all_reduce"}, {"all_gather", "reduce_scatter"}), strict=True
    ):
        assert len(line["samples"]["seconds"]) == 2
        losses = line["training"]["loss"]
        assert losses[-1] < losses[0] - 0.5
        sent = {kind["collective"] for kind, _ in line["training"]["messages"]}
        assert collectives <= sent
    first, second = (line["training"]["loss"][0] for line in found)
    assert first == pytest.approx(second, rel=1e-5), "the same weights and data"
    assert done.stdout.count("messages of one sample, not timed:") == 2


def test_a_broken_rank_costs_its_case_and_new_ranks_go_on(tmp_path: Path) -> None:
    words = ["train", "gpt2-125m", "--strategy", "ddp", *TINY, "--mbs", "2-4"]
    words += ["--steps", "3", "--timeout", "60s"]
    running = Running(*words, cwd=tmp_path, hook="tests.cli.failing", is_forking=True)
    assert running.end() == 3, running.err()
    records = running.records()
    assert outcomes(records) == ["error", "error", "measured"]
    made, stuck = records[:2]
    assert made["message"] == "broken while it is made"
    assert stuck["message"] == "broken in the backward pass"
    assert made["ranks"] == stuck["ranks"] == [1]
    assert "tests/cli/failing.py" in made["traceback"]
    assert "Traceback" not in running.err()


def test_a_batch_that_is_too_large_ends_a_search_well(tmp_path: Path) -> None:
    """In each launch; new ranks, since one hung in a collective, try nothing larger."""
    words = ["train", "gpt2-125m", "--strategy", "ddp", *TINY, "--mbs", "1,8,16"]
    words += ["--find-batch", "--steps", "3", "--launches", "2", "--timeout", "60s"]
    running = Running(*words, cwd=tmp_path, hook="tests.cli.failing", is_forking=True)
    assert running.end() == 0, running.err()
    assert outcomes(running.records()) == ["measured", "oom", "skipped"] * 2
    assert "not all cases were measured" not in running.err()


MEASURED, TOO_LARGE = flat(single(), 0.9), failed(single(), "oom")


@pytest.mark.parametrize(
    ("records", "launches", "expected"),
    [
        ([MEASURED, TOO_LARGE], 1, True),
        ([MEASURED], 1, False),  # so that another reason of exit code 3 stays one
        ([TOO_LARGE], 1, False),
        ([MEASURED, TOO_LARGE, failed(single(), "lost rank")], 1, False),
        ([MEASURED, TOO_LARGE], 2, False),
        ([MEASURED, TOO_LARGE, replace(MEASURED, launch=2)], 2, True),
    ],
)
def test_a_search_has_found_a_batch(
    records: list[Record], launches: int, expected: bool
) -> None:
    assert found_batch(records, launches) == expected


@pytest.mark.slow
def test_under_torchrun_it_is_one_rank(tmp_path: Path) -> None:
    words = ["train", "gpt2-125m", *TINY, "--strategy", "fsdp", "--steps", "3"]
    running = Running(*words, cwd=tmp_path, torchrun=2, is_forking=True)
    assert running.end() == 0, running.err()
    assert outcomes(running.records()) == ["measured"]
    assert running.out().count("fsdp x2 mbs 1 seq 64") == 1
    assert running.err().count("run ") == 1


def test_a_sweep_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = ["sweep", "--set", "sac=none,full", "--no-default", "--repeats", "1", "--dry-run"]
    assert status([*words, "--", "train", "llama-3.1-8b", *TINY, "--steps", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2
    assert all("stepmark train llama-3.1-8b" in line for line in told)
    assert {line.partition("--sac")[2].strip(" =") for line in told} == {"none", "full"}
