"""The script of the table of predictions, with one small step on the CPU."""

import csv
import os
import re
import runpy
import tempfile
from pathlib import Path

import pytest
from tests import fork_server, outputs

from stepmark.measuring.machine import machine
from stepmark.runs import run

from .prediction_rows import SCRIPT
from .process import ROOT, environment

STEP = "gpt2-125m --scale tiny --num-layers 3 --mbs 2 --strategy ddp"


def script(*words: str, cwd: Path, code: int = 0) -> str:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork_server.server().fork_command(
            ["tests.cli.prediction_rows", STEP, *words],
            environment() | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            str(cwd),
            (out.fileno(), err.fileno()),
        )
        returncode = process.wait(300)
        out.seek(0)
        err.seek(0)
        shown = out.read()
        text = err.read()
    assert returncode == code, text[-3000:]
    assert ("committed before the measurement" in text) == (words[0] == "measure")
    return shown


# test_run.py measures a step of the same job, and test_outputs.py holds what `again` prints.
@pytest.mark.slow
@pytest.mark.ranks
def test_a_step_is_measured_twice_tabled_and_predicted_again(tmp_path: Path) -> None:
    script("measure", "--nproc", "2", "--device", "cpu", "--out", "runs", cwd=tmp_path)
    shown = script("table", "runs", "rows.csv", cwd=tmp_path)
    (row,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    error_pct = 100 * (float(row["predicted_s"]) / float(row["measured_s"]) - 1)
    assert float(row["error_pct"]) == pytest.approx(error_pct)
    assert (row["ranks"], row["mbs"], row["strategy"]) == ("2", "2", "ddp")
    assert float(row["lines_error_pct"]) > 0
    assert f"all: 1 rows, mean {abs(error_pct):.2f} %" in shown
    # By the same predictor it is the same prediction.
    again = script("again", "runs", cwd=tmp_path)
    assert f"predicted {error_pct:+.1f} %" in again
    assert f"all: 1 rows, mean {abs(error_pct):.2f} %" in again
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "prediction.json").exists()
    assert script("again", "elsewhere", cwd=tmp_path, code=3) == ""


def test_every_row_is_a_step_that_can_be_run() -> None:
    loaded = runpy.run_path(str(SCRIPT))
    here = machine("h200", dry_run=True)
    for ranks, rows in loaded["ROWS"].items():
        for words in rows:
            case = run.step_case(loaded["_options"](words, ranks, "h200"), here, [])
            assert case.num_ranks == ranks, words


# Mean and largest error of the step in percent, as they are, rounded up. A step of Mixtral is
# 19 % off; what the host bounds is as noisy as its virtual machine (docs/prediction.md).
STRATA = {
    "device single compiled": (9, 1.0, 2.7),
    "device single eager": (12, 2.5, 19.1),
    "host single eager": (7, 27.0, 41.0),
    "device fsdp compiled": (2, 2.6, 3.4),
    "host fsdp compiled": (1, 7.3, 7.3),
}
ERRORS = {"clock": 2.4, "allocated": 0.8, "reserved": 4.9}


def test_published_steps_are_predicted_as_well_as_they_were() -> None:
    """tests/test_outputs.py holds this transcript to what the script prints."""
    shown = (outputs.FOLDER / "predictions.txt").read_text()
    for stratum, (count, mean, largest) in STRATA.items():
        found = re.search(rf"{stratum}: (\d+) rows, mean (.*) %, max (.*) %", shown)
        assert found, stratum
        assert int(found[1]) == count
        assert float(found[2]) <= mean
        assert float(found[3]) <= largest
    for name, mean in ERRORS.items():
        found = re.search(rf"{name}_error_pct: (\d+) rows, mean (.*) %", shown)
        assert found, name
        assert int(found[1]) == sum(count for count, *_ in STRATA.values())
        assert float(found[2].partition(" ")[0]) <= mean
    fp8 = re.search(r"llama-3.1-70b-proxy-1l .*172.6 ms, predicted (\S+) %", shown)
    assert fp8, "the step in FP8"
    assert abs(float(fp8[1])) <= 1.0
