"""Calibrations of an H200 as runs, and predictions from them."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.predictions.test_calibrate import step_of

from stepmark.cases.train_case import TrainCase
from stepmark.predictions.inputs import Inputs, changed
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import of_training
from stepmark.workloads.rules.pytorch.case import of_case

DATA = Path(__file__).parents[1] / "data" / "h200-steps"


GPT2, LLAMA = "20261123-210511-f1ca", "20261123-210652-0a57"


WORDS = {
    GPT2: "gpt2-1.5b --strategy single --mbs 8 --compile",
    LLAMA: "llama-3.1-8b --strategy single --seq-len 4096 --compile --precision bf16",
}


MEASURED = json.loads((DATA / "measured.json").read_text())


SHEET = "llama-3.1-8b --strategy fsdp --nproc 8 --mbs 2 --device h100-sxm"


Predict = Callable[[str], tuple[int, Any, str]]


def joined(words: object) -> str:
    """Return the name of a case without blanks, which mutate.py can run alone."""
    return str(words).replace(" ", "_")


def copy_runs(folder: Path) -> Path:
    """Write the calibrations as runs."""
    for run in (GPT2, LLAMA):
        shutil.copytree(DATA / run, folder / run)
        packed = folder / run / "records.jsonl.gz"
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return folder


@cache
def inputs_of(path: Path, words: str) -> Inputs:
    return of_training(step_of(words), path)


def step_s(runs: Path, name: str, case: TrainCase, **changes: float) -> float:
    """The predicted step of a case by a calibration."""
    inputs = replace(inputs_of(runs / name, WORDS[name]), case=case, workload=of_case(case))
    return predict(changed(inputs, changes)).step_s
