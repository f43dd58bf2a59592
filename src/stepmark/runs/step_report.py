"""The predicted step of a run: committed before it is measured, and compared afterwards."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepmark.cases.plan import STEP_LAUNCH, Plan
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import shape_text
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.predictions.calibrated_errors import VERSION
from stepmark.predictions.interval import Interval
from stepmark.predictions.predict import (
    calibration_notes,
    interval_of,
    predict,
    with_host_of_step,
)
from stepmark.predictions.predict_inputs import of_training, step_words
from stepmark.predictions.predicted_steps import Step, StepReport
from stepmark.predictions.prediction import ledger_rows, ledgers_of, part_rows
from stepmark.replays import replay_log_verb
from stepmark.runs.step_ledger import measured_ledger
from stepmark.runs.suggestions import Measurement, suggestions
from stepmark.store import ledgers, predictions
from stepmark.store.view import View, median_s
from stepmark.tables.columns import Row, number, text
from stepmark.timeline.ledger import Ledger, MeasuredLedger, StepPower
from stepmark.timeline.step_sentence import sentence
from stepmark.workloads.rules.pytorch.case import of_case

_SLOWED = 0.98  # of the highest clock of any rank
_CLOCK_STEP_S = 1.0  # by which a clock may be set back


def commit(run: Path, plan: Plan) -> None:
    """Write the predictions of the steps of later launches, or why there is none.

    Raises ConfigError for a prediction that was changed after it was committed.
    """
    if predictions.read(run) is not None:
        return
    document = predicted_steps(run, plan)
    digest = predictions.commit(run, document)
    for entry in document["predictions"]:
        predicted = entry["prediction"]
        text = f"no prediction: {entry['problem']}"
        if predicted:
            least = "at least " * predicted["is_lower_bound"]
            step = f"{predicted['name']}: {least}{predicted['step_s'] * 1e3:.1f} ms"
            text = "\nnote: ".join((f"predicted step of {step}", *predicted["notes"]))
        sys.stderr.write(f"{text}\n")
    sys.stderr.write(f"committed before the measurement: sha256 {digest}\n")


def predicted_steps(run: Path, plan: Plan) -> dict[str, Any]:
    """Return the predictions of the steps of later launches, as they are committed."""
    cases = {e.case.case_id: e.case for e in plan.entries if plan.is_predicted(e)}
    entries: list[dict[str, Any]] = []
    for case_id, case in cases.items():
        assert isinstance(case, TrainCase)
        entry: dict[str, Any] = {"case_id": case_id, "prediction": None, "problem": ""}
        try:
            entry["prediction"] = _prediction(run, case)
        except StepmarkError as error:
            entry["problem"] = str(error)
        entries.append(entry)
    return {
        "schema": 1,
        "version": VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "predictions": entries,
    }


def _prediction(run: Path, case: TrainCase) -> Row:
    inputs = with_host_of_step(of_training(case, run))
    prediction = predict(inputs)
    interval, more = interval_of(prediction)
    notes = (*prediction.notes, *more, *calibration_notes(inputs))
    document = replace(prediction, interval=interval, notes=notes).document()
    # Messages of a measured step contain the waiting for other ranks, and lines are compared.
    ledgers = prediction.step.ledgers
    return {**document, "ledger": ledger_rows(ledgers), "ledger_parts": part_rows(ledgers)}


def step_report(path: Path, run: View) -> StepReport | None:
    """Return the report of the steps that a run predicted; None where it predicts none.

    Raises ConfigError for a prediction that was changed after it was committed.
    """
    found = predictions.read(path)
    if found is None:
        return None
    document, digest = found
    created_at = datetime.fromisoformat(document["created_at"]).timestamp()
    steps: list[Step] = []
    notes: list[str] = []
    is_before = True
    kept = ledgers.read(path)
    for entry in document["predictions"]:
        case_id = entry["case_id"]
        predicted = entry["prediction"]
        if entry["problem"]:
            notes.append(f"no prediction: {entry['problem']}")
        records = records_of(run, case_id)
        for record in records:
            if record.started_at < created_at - _CLOCK_STEP_S:
                is_before = False
                notes.append("the step was measured before its prediction was committed")
            if record.training and record.training.traces:
                try:
                    measured = kept.get(case_id) or measured_ledger(path, record)
                except ConfigError as error:
                    notes.append(f"no ledger: {error}")
                    continue
                steps.append(_step(predicted, record, measured, path, run))
                notes += [*measured.notes, *_heat_notes(record)]
        has_ledger = case_id in {step.case_id for step in steps}
        if predicted and records and (len(records) > 1 or not has_ledger):
            notes.append(_totals(predicted, records))
    when = "before" if is_before else "after the start of"
    committed_at = f"{datetime.fromtimestamp(created_at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    commitment = f"prediction committed {when} the measurement, {committed_at}"
    return StepReport(
        steps=tuple(steps),
        notes=tuple(dict.fromkeys(notes)),
        commitment=f"{commitment}, and not changed since: sha256 {digest}",
    )


def _interval(predicted: Mapping[str, Any]) -> str:
    """Return the interval of a prediction's document in words; "": there is none."""
    interval = predicted["interval"]
    if not interval or isinstance(interval, str):  # that of older releases
        return interval if interval and None not in predicted.get("interval_s", [None]) else ""
    return str(Interval(**interval))


def reported(path: Path, run: View) -> StepReport | ConfigError | None:
    """Return the report, or what is wrong with the prediction."""
    try:
        return step_report(path, run)
    except ConfigError as error:
        return error


def records_of(run: View, case_id: str) -> list[Measured]:
    """Return what was measured of a case after its prediction.

    A step of as few layers as its calibration has is measured for this in the first launch.
    """
    return [
        record
        for record in run.records
        if isinstance(record, Measured)
        and record.case.case_id == case_id
        and record.launch >= STEP_LAUNCH
    ]


def _totals(predicted: Mapping[str, Any], records: Sequence[Measured]) -> str:
    """Return the times of a step that has no ledger, of all launches."""
    case = records[0].train
    ran = [record for record in records if any(record.samples.seconds)]
    times = [f"{1e3 * median_s(record) * case.cycle:.1f}" for record in ran]
    name = f"{case.model.name} {shape_text(case)}"
    measured = f"measured {' and '.join(times)} ms" if times else "not measured"
    predicted_ms = 1e3 * predicted["step_s"]
    around = _interval(predicted)
    text = f"{name}: {measured}, predicted {predicted_ms:.1f} ms"
    return f"{text} ({around})" if around else text


def _step(
    predicted: Mapping[str, Any] | None,
    record: Measured,
    measured: MeasuredLedger,
    path: Path,
    run: View,
) -> Step:
    """Return a measured step beside its prediction's document; None: there is none."""
    case = record.train
    ledger: Ledger | None = None
    power = StepPower()
    around = ""
    if predicted:
        ledger = ledgers_of(predicted)[of_case(case).stage_of(measured.rank)]
        power = StepPower(**{n: predicted[n] for n in ("clock_hz", "power_w", "energy_j")})
        around = _interval(predicted)
    devices = ", ".join(sorted({device.name for device in run.run.environment.devices}))
    name = f"{case.model.name} {case.strategy} on {case.num_ranks} x {devices}"
    place = case.case_id, record.launch
    rows = [r for r in run.train_rows if (r.get("case_id"), r.get("launch")) == place]
    row = next((row for row in rows if row["rank"] is None), {})
    measured_steps = [each for each in run.records if isinstance(each, Measured)]
    ids = {each.case.case_id for each in measured_steps if each.launch >= STEP_LAUNCH}
    options = step_words(case) if len(ids) > 1 else ()
    logs = replay_log_verb.of_run(path, run.records)
    step_s = measured.ledger.window_ns / 1e9
    return Step(
        case_id=case.case_id,
        name=f"{case.model.name} {shape_text(case)}",
        predicted=ledger,
        measured=measured,
        power=(power, _measured_power(record, measured)),
        sentence=sentence(
            name,
            measured.ledger,
            ledger,
            interval=around,
            mfu_pct=number(row, "mfu_pct"),
            validity=text(row, "validity"),
        ),
        replayed=tuple(line for _, log in logs for line in log.beside(step_s)),
        suggestions=suggestions(
            Measurement(
                case=case,
                predicted=ledger,
                measured=measured.ledger,
                run=str(path),
                step=options,
                has_trace=measured.profiled is not None,
                row=row,
                environment=run.run.environment,
            )
        ),
    )


def _heat_notes(record: Measured) -> Iterator[str]:
    """Yield which GPUs were slowed down by heat, which no prediction includes."""
    clocks = [state.clock_hz for state in record.telemetry if state.clock_hz]
    hot = [
        f"{rank} ({state.clock_hz / 1e6:.0f} MHz)" if state.clock_hz else str(rank)
        for rank, state in enumerate(record.telemetry)
        if any(reason.startswith("thermal") for reason in state.throttle)
        and (not clocks or (state.clock_hz or 0.0) < _SLOWED * max(clocks))
    ]
    if hot:
        name = f"{record.train.model.name} {record.train.strategy}"
        which = "GPU of rank" if len(hot) == 1 else "GPUs of ranks"
        yield f"{name}: heat slowed down the {which} {', '.join(hot)}, which is not predicted"


def _measured_power(record: Measured, measured: MeasuredLedger) -> StepPower:
    """Return clock, power and energy of the measured rank's GPU."""
    if record.train.device != "cuda":
        return StepPower()
    state = record.telemetry[measured.rank]
    watts = state.mean_power_w
    return StepPower(
        clock_hz=state.clock_hz,
        power_w=watts,
        energy_j=None if watts is None else watts * measured.ledger.window_ns * 1e-9,
    )
