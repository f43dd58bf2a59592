"""stepmark run: parts, prediction and step in this order, and what the run says of them."""

import json
import re
import shutil
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import pytest

from stepmark.cases.record import Measured
from stepmark.store.reader import read_records

from .process import stepmark

pytestmark = pytest.mark.ranks

WORDS = "run gpt2-125m --scale tiny --num-layers 3 --nproc 2 --device cpu --budget 20s"


def test_a_step_is_predicted_before_it_is_measured(tmp_path: Path) -> None:
    done = stepmark(*WORDS.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    records = [record for record in read_records(run) if isinstance(record, Measured)]
    parts = [record for record in records if record.launch == 1]
    (step,) = (record for record in records if record.launch == 2)
    text = (run / "prediction.json").read_bytes()
    document = json.loads(text)
    committed = datetime.fromisoformat(document["created_at"]).timestamp()
    assert max(record.started_at for record in parts) < committed < step.started_at
    (entry,) = document["predictions"]
    assert (entry["case_id"], entry["problem"]) == (step.case.case_id, "")
    lines = entry["prediction"]["ledger"]
    assert sum(line["time_ns"] for line in lines) == round(entry["prediction"]["step_s"] * 1e9)

    # Its part for the host is the same step, of the first launch: it is not the one compared.
    assert [r.launch for r in records if r.case.case_id == step.case.case_id] == [1, 2]
    digest = sha256(text).hexdigest()
    assert f"committed before the measurement: sha256 {digest}" in done.stderr
    second = document["created_at"][:19].replace("T", " ")
    commitment = (
        f"prediction committed before the measurement, {second} UTC, "
        f"and not changed since: sha256 {digest}"
    )
    # The terminal has the answer; the details are those of the run.
    assert len(done.stdout.splitlines()) <= 40
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert f"stepmark runs show {run.relative_to(tmp_path)}" in done.stdout
    shown = stepmark("runs", "show", "latest", cwd=tmp_path).stdout
    assert commitment in shown
    assert "before its prediction" not in shown
    assert "profiler_start" not in done.stderr + done.stdout  # Kineto's log
    (sentence,) = re.findall(r"^gpt2-125m@tiny.* ddp on 2 x .*: measured .*$", shown, re.M)
    assert " ".join(done.stdout.split()).count(sentence) == 1
    predicted_ms = entry["prediction"]["step_s"] * 1e3
    (predicted,) = re.findall(r"predicted ([\d.]+) ms \(", sentence)
    assert float(predicted) == pytest.approx(predicted_ms, rel=0.01)
    assert "no interval: committed predictions are of GPUs" in done.stderr
    check_sums(shown)
    assert re.search(r"^step: the sum of the lines +[\d.]+ +[\d.]+ ", done.stdout, re.M)
    # A profile that leaves the step unexplained, as on a busy host, has this one line to say.
    unexplained = "profile it again" in " ".join(done.stdout.split())
    for number in (1,) if unexplained else (1, 2):
        assert re.search(rf"^{number}\. ", done.stdout, re.M)
    assert "SM clock" not in done.stdout

    training = step.training
    assert training is not None
    for name, hashed in zip(training.traces, training.trace_sha256, strict=True):
        assert sha256((run / "traces" / name).read_bytes()).hexdigest() == hashed
    # The run's own step, predicted again.
    step_s = entry["prediction"]["step_s"]
    words = ("predict", "--from-run", "latest", "--json", "-")
    for more in ((), ("--gbs", "2"), ("--num-layers", "3")):
        assert json.loads(stepmark(*words, *more, cwd=tmp_path).stdout)["step_s"] == step_s
    deeper = stepmark(*words, "--num-layers", "6", cwd=tmp_path)
    assert json.loads(deeper.stdout)["step_s"] > step_s
    check_resume(tmp_path, run, text)


def check_sums(shown: str) -> None:
    """Check that the lines of the ledger add up to the step, predicted and measured."""
    columns = re.findall(
        r"^ {2}(?: {2}\S|unexpl).*? {2,}([\d.]+) +(-?[\d.]+) +[+-]", shown, re.M
    )
    (whole,) = re.findall(r"^step +([\d.]+) +([\d.]+)", shown, re.M)
    for place in (0, 1):  # of the prediction, and of the measurement
        total = sum(float(line[place]) for line in columns)
        assert total == pytest.approx(float(whole[place]), abs=0.001 * len(columns))


def check_resume(folder: Path, run: Path, text: bytes) -> None:
    """Measure the step again; its prediction stays, and one that was changed is refused."""
    records = run / "records.jsonl"
    kept = [line for line in records.read_text().splitlines(True) if '"launch":2' not in line]
    records.write_text("".join(kept))
    shutil.copytree(run, folder / "edited")
    again = stepmark("resume", str(run), cwd=folder)
    assert again.returncode == 0, again.stderr
    assert (run / "prediction.json").read_bytes() == text
    assert "committed before the measurement" not in again.stderr
    assert [record.launch for record in read_records(run)].count(2) == 1

    file = folder / "edited" / "prediction.json"
    file.write_bytes(text.replace(b'"step_s": ', b'"step_s": 1'))
    refused = stepmark("resume", "edited", cwd=folder)
    assert (refused.returncode, "changed since" in refused.stderr) == (2, True)
    assert [record.launch for record in read_records(folder / "edited")].count(2) == 0
