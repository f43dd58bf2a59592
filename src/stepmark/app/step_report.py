"""The predicted step of a run: committed before it is measured, and compared afterwards."""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from stepmark.app import predict
from stepmark.app.parts import read_parts
from stepmark.app.predict import Target
from stepmark.core.columns import Row
from stepmark.core.errors import StepmarkError
from stepmark.core.plan import Plan
from stepmark.core.record import Measured
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope
from stepmark.predict.interval import PastPrediction, interval
from stepmark.report import prediction as report
from stepmark.store import predictions
from stepmark.workload.rules.pytorch.case import of_case

VERSION = 1  # of the predictor: rows of other versions are no past predictions of this one
_TABLE = "predictions.csv"


def commit(run: Path, plan: Plan) -> None:
    """Write the predictions of the steps of later launches, or why there is none."""
    if predictions.is_committed(run):
        return
    cases = {e.case.case_id: e.case for e in plan.entries if e.launch > 1}
    entries: list[dict[str, Any]] = []
    for case_id, case in cases.items():
        assert isinstance(case, TrainCase)
        try:
            entry = {"prediction": _prediction(run, case), "problem": ""}
        except StepmarkError as error:
            entry = {"prediction": None, "problem": str(error)}
        entries.append({"case_id": case_id, **entry})
    document = {
        "schema": 1,
        "version": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "predictions": entries,
    }
    digest = predictions.commit(run, document)
    for entry in entries:
        predicted = entry["prediction"]
        text = f"no prediction: {entry['problem']}"
        if predicted:
            text = f"predicted step of {predicted['name']}: {predicted['step_s'] * 1e3:.1f} ms"
        sys.stderr.write(f"{text}\n")
    sys.stderr.write(f"committed before the measurement: sha256 {digest}\n")


def _prediction(run: Path, case: TrainCase) -> Row:
    parts = read_parts(run, case)
    target = Target(
        name=f"{case.model.name} {case.strategy}",
        workload=of_case(case),
        case=case,
        device=parts.device,
        device_name=parts.device_name,
        parts=parts,
    )
    prediction, notes = predict.predict(target, {})
    document = report.document(predict.facts(target), prediction, notes)
    around = interval(
        past_predictions(), stratum(case, str(document["bound"])), prediction.step_s
    )
    low_high = around.low_s, around.high_s
    return {**document, "interval_s": low_high, "interval": str(around)}


def stratum(case: TrainCase, bound: str) -> tuple[str, str, str]:
    """Return what past predictions must share with a case: bound, strategy, compiled or not."""
    strategy = case.data_parallel.value if case.num_ranks > 1 else "single"
    if max(case.parallel.tp, case.parallel.pp) > 1:
        strategy = case.strategy
    is_compiled = case.compile is not CompileScope.NONE
    return bound, strategy, "compiled" if is_compiled else "eager"


def past_predictions() -> Sequence[PastPrediction]:
    """Return the committed table of predictions of this version."""
    path = files("stepmark").joinpath("data", _TABLE)
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8") as file:
        return tuple(
            PastPrediction(
                stratum=(row["bound"], row["strategy"], row["compiled"]),
                predicted_s=float(row["predicted_s"]),
                measured_s=float(row["measured_s"]),
            )
            for row in csv.DictReader(file)
            if int(row["version"]) == VERSION
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a run says of its step: lines for the terminal, and a section of its page."""

    lines: tuple[str, ...]
    html: str


def step_record(records: Sequence[object], case_id: str) -> Measured | None:
    """Return the record of the predicted step."""
    own = [r for r in records if isinstance(r, Measured) and r.case.case_id == case_id]
    return own[-1] if own else None
