"""Intervals of predictions by data sheet, from the errors of published steps like them.

The errors are in data/sheet_errors.csv, which validation/sheet_errors.py writes. Steps are
alike in their share of exposed communication, or in that their host bounds them, and in their
framework; a class of fewer than FEWEST steps is part of a larger one, without the framework.
The more of a step is exposed communication, the further off is its prediction. Each source
counts as much as another, since steps of one source err alike.
"""

import csv
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from math import log
from statistics import fmean

from stepmark.ground.grouping import group_by
from stepmark.model.device import DeviceSpec, load_devices
from stepmark.predictions.interval import Interval, signed_interval
from stepmark.predictions.note import Note, Topic
from stepmark.predictions.prediction import HOST, Prediction
from stepmark.timeline.ledger import TRANSFER, Group
from stepmark.timeline.step_cost import Source
from stepmark.workloads.rules import RULES

FEWEST = 30
TABLE = "sheet_errors.csv"
Traits = tuple[str, ...]  # what the step waits for, the framework
_EXPOSED_PCT = (10, 30)  # round numbers that part the shares of exposed communication


@dataclass(frozen=True, slots=True)
class SheetError:
    """Error of a published step. log_ratio: of measured over predicted seconds."""

    source: str
    device: str
    traits: Traits
    log_ratio: float


@cache
def read_errors() -> tuple[SheetError, ...]:
    """Return the errors of published steps."""
    with files("stepmark").joinpath("data", TABLE).open(encoding="utf-8") as file:
        return tuple(
            SheetError(
                source=row["source"],
                device=row["device"],
                traits=(row["waits_for"], row["framework"]),
                log_ratio=float(log_ratio),
            )
            for row in csv.DictReader(file)
            for log_ratio in row["log_ratios"].split()
        )


def traits_of(prediction: Prediction) -> Traits:
    """Return what a prediction has in common with others of its class."""
    step = prediction.step
    if step.is_host_bound:
        waits_for = HOST
    else:
        waits_for = _range_of(100 * step.part_s(TRANSFER) / step.step_s)
    name = prediction.inputs.workload.rules
    framework = RULES[name].module.partition(".")[0] if name in RULES else name
    return waits_for, framework


def _range_of(exposed_pct: float) -> str:
    """Return the range of shares of exposed communication that this one is in."""
    least, most = _EXPOSED_PCT
    if exposed_pct < least:
        share = f"under {least} %"
    elif exposed_pct < most:
        share = f"{least} to {most} %"
    else:
        share = f"over {most} %"
    return f"{share} {Group.COMM}"


def errors_like(
    errors: Sequence[SheetError], traits: Traits
) -> tuple[Sequence[SheetError], Traits]:
    """Return the errors of the smallest class that is large enough, and what it shares."""
    for length in range(len(traits), 0, -1):
        shared = traits[:length]
        own = [each for each in errors if each.traits[:length] == shared]
        if len(own) >= FEWEST:
            return own, shared
    return errors, ()


def interval_by(
    errors: Sequence[SheetError], predicted_s: float, traits: Traits = ()
) -> Interval:
    """Return the interval by errors of published steps, with equal weights of sources.

    traits: what the steps have in common with the predicted one.
    """
    counts = Counter(each.source for each in errors)
    logs = [each.log_ratio for each in errors]
    weights = [1 / (counts[each.source] * len(counts)) for each in errors]
    interval = signed_interval(logs, predicted_s, "published steps", weights)
    return replace(interval, traits=traits)


def chance_faster(ratio: float, errors: Sequence[SheetError] = ()) -> float:
    """Return the chance that a step takes less time than one predicted to be faster.

    ratio: of their predicted times, 1 or more. It is the share of pairs of steps whose errors
    differ by more, this way round: of one source and device, each counts as much as another.
    errors: of published steps, if left out.
    """
    by_source = _differences(tuple(errors) or read_errors())
    tails = ((len(own) - bisect_right(own, log(ratio))) / (2 * len(own)) for own in by_source)
    return fmean(tails)


@cache
def _differences(errors: tuple[SheetError, ...]) -> Sequence[Sequence[float]]:
    """Return how far the errors of two steps of a source are apart, in order, by source."""
    by_source = group_by(errors, lambda each: (each.source, each.device))
    pairs = (
        sorted(abs(one.log_ratio - two.log_ratio) for one, two in combinations(own, 2))
        for own in by_source.values()
    )
    return [own for own in pairs if own]


def interval_of(prediction: Prediction) -> tuple[Interval | None, list[str]]:
    """Return the interval of a prediction by data sheet, and notes on it."""
    inputs = prediction.inputs
    is_by_sheet = set(prediction.sources) <= {Source.SHEET, Source.RULE}
    if inputs.is_on_cpu or not (inputs.device and is_by_sheet) or prediction.is_lower_bound:
        return None, []
    errors: Sequence[SheetError] = read_errors()
    traits: Traits = ()
    if _is_of_family(inputs.device, errors):
        errors, traits = errors_like(errors, traits_of(prediction))
        note = f"the interval is by the errors of {len(errors)} published steps"
        note += f" of its class: {', '.join(traits)}" if traits else ""
    else:
        note = f"no published step is of a device like {inputs.device.key}"
        note += f": the interval is by the errors of all {len(errors)} on others"
    topic = Topic.INTERVAL if traits else Topic.RULES  # errors of other devices are a rule
    note = Note.of(topic, f"{note} ({_main_source(errors)})")
    return interval_by(errors, prediction.step_s, traits), [note]


def _main_source(errors: Sequence[SheetError]) -> str:
    """Return the source that most errors are from, and how many of them."""
    ((source, count),) = Counter(each.source for each in errors).most_common(1)
    return f"{'all' if count == len(errors) else count} from {source}"


def _is_of_family(device: DeviceSpec, errors: Sequence[SheetError]) -> bool:
    """Return whether errors are known of a device with the same units."""
    devices = load_devices()
    families = {
        (devices[own].vendor, devices[own].capability) for own in {e.device for e in errors}
    }
    return (device.vendor, device.capability) in families
