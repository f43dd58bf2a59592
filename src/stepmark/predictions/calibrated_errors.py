"""Intervals of predictions from a calibration, from errors of committed predictions like them.

The errors are in data/predictions.csv, which validation/prediction_rows.py writes. Steps are
alike in what bounds them and in whether ranks communicate; a class of fewer than FEWEST steps
is part of that of all steps on as many GPUs.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log

from stepmark.predictions.interval import COVERAGE, Interval, few_sided
from stepmark.predictions.prediction import DEVICE, HOST, Prediction
from stepmark.timeline.step_cost import Source

# Of the predictor: rows of other versions are no past predictions of this one. Those of several
# GPUs are of the time when all ranks counted as alike, whose errors were larger.
VERSION = 3
FEWEST = 4
TABLE = "predictions.csv"
_MOST_SCALED = 0.05  # of the compute time: the steps of the table were calibrated as they are
Traits = tuple[str, str]  # what bounds the step, and whether it is of one GPU


@dataclass(frozen=True, slots=True)
class PastError:
    """Error of a committed prediction. log_ratio: of measured over predicted seconds."""

    traits: Traits
    log_ratio: float


@cache
def past_errors() -> tuple[PastError, ...]:
    """Return the errors of committed predictions of this version."""
    with files("stepmark").joinpath("data", TABLE).open(encoding="utf-8") as file:
        return tuple(
            PastError(
                _traits(is_host_bound=row["bound"] == "host", num_ranks=int(row["ranks"])),
                log(float(row["measured_s"]) / float(row["predicted_s"])),
            )
            for row in csv.DictReader(file)
            if int(row["version"]) == VERSION
        )


def _traits(*, is_host_bound: bool, num_ranks: int) -> Traits:
    gpus = "one GPU" if num_ranks == 1 else "several GPUs"
    return f"bound by {HOST if is_host_bound else DEVICE}", gpus


def interval_of(
    prediction: Prediction,
    calibrated_error: float = 0.0,
    errors: Sequence[PastError] | None = None,
) -> tuple[Interval | None, list[str]]:
    """Return the interval of a prediction from a calibration, and notes on it.

    It reaches as far as the calibrated step was off: calibrated_error is the log of its time
    over its prediction. errors: of the shipped table, if left out.
    """
    inputs = prediction.inputs
    if inputs.case is None or not inputs.calibration or prediction.is_lower_bound:
        return None, []
    if inputs.case.device != "cuda":
        return None, ["no interval: committed predictions are of GPUs"]
    if inputs.what_if:
        return None, ["no interval: committed predictions are of devices as they are"]
    total_s = sum(prediction.sources.values())
    measured_s = prediction.sources.get(Source.MEASURED, 0.0)
    if measured_s < (1 - _MOST_SCALED) * total_s:
        share = 1 - measured_s / total_s
        text = f"{100 * share:.0f} % of the compute time is scaled or of another source"
        return None, [f"no interval: {text}, of which no committed prediction tells an error"]
    known = past_errors() if errors is None else errors
    num_ranks = inputs.case.num_ranks
    own = _traits(is_host_bound=prediction.step.is_host_bound, num_ranks=num_ranks)
    traits: tuple[str, ...] = own
    logs = [each.log_ratio for each in known if each.traits == own]
    if len(logs) < FEWEST:
        traits = own[1:]
        logs = [each.log_ratio for each in known if each.traits[1:] == traits]
    interval = few_sided(logs, prediction.step_s, "committed predictions", traits)
    interval = interval.reaching(prediction.step_s * exp(calibrated_error))
    note = f"the interval is by the errors of {len(logs)} committed predictions of its class"
    note = f"{note}: {', '.join(traits)}"
    if interval.coverage < COVERAGE:
        note += f"; so few give {100 * interval.coverage:.0f} % at most"
    return interval, [note]
