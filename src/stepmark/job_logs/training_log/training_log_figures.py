"""Figures of a training log: the times of its steps by part, their loss and memory."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from stepmark.ground.units import GIB, plural
from stepmark.job_logs.training_log.steady_state import SteadyState
from stepmark.job_logs.training_log.step_lines import LoggedStep
from stepmark.job_logs.training_log.training_log import SECONDS, TrainingLog
from stepmark.tables.figures import COLOURS, INK, Axis, Figure, Kind, Mark, Panel, Series

_T = TypeVar("_T")
# Points of a series: of more lines every second, third, ... is drawn; of outliers the slowest.
_MOST_POINTS = 4000
_MOST_RESTARTS = 50  # dashed lines
_WIDE = 4.0  # a value over the median, or below, from which the axis is logarithmic
_HEIGHT = 380


def figures(log: TrainingLog, steady: SteadyState) -> Iterator[Figure]:
    """Yield the times of steps, then loss and memory where the steps state them."""
    yield _times(log, steady)
    if any(own.loss is not None for own in log.steps):
        losses = [own.loss for own in log.steps]
        count = len(log.bad_losses)
        note = f"Nan in {plural(count, 'line')} of any rank, a gap." if count else "As logged."
        yield _curve(log, "Loss", "loss", losses, note)
    if any(own.memory_bytes is not None for own in log.steps):
        memory = [own.memory_bytes and own.memory_bytes / GIB for own in log.steps]
        yield _curve(log, "Memory", "GiB", memory, "The peak of the rank that states it.")


def _times(log: TrainingLog, steady: SteadyState) -> Figure:
    """Return the times, or rates, of all steps, and on the right of the steady ones alone."""
    first = steady.num_warmup
    outliers = {log.steps[place] for place in steady.outliers}
    regular = [own for own in log.steps[first:] if own not in outliers]
    slowest = sorted(outliers, key=lambda own: -(log.cost_of(own) or 0.0))[:_MOST_POINTS]
    slowest.sort(key=lambda own: own.number)
    unit = "ms" if log.unit == SECONDS and steady.median < 1.0 else log.unit

    def value(cost: float) -> float:
        return 1e3 * cost if unit == "ms" else log.value_of(cost)

    def series(name: str, steps: Sequence[LoggedStep], kind: Kind, colour: str) -> Series:
        costs = [log.cost_of(own) for own in steps]
        return Series(
            kind=kind,
            name=name,
            colour=colour,
            dash="solid",
            x=[own.number for own in steps],
            y=[value(cost) if cost else None for cost in costs],
        )

    drawn = series("steady", _thinned(regular), Kind.CURVE, COLOURS[0])
    others = [own for start in log.other_starts for own in start]
    shown = [
        series("other starts", _thinned(others), Kind.POINTS, INK),
        series("warm-up", _thinned(log.steps[:first]), Kind.CURVE, COLOURS[4]),
        drawn,
        series("outlier", slowest, Kind.POINTS, COLOURS[1]),
    ]
    middle = value(steady.median)
    low, high = sorted(map(value, steady.quartiles))
    values = [y for own in shown for y in own.y if isinstance(y, float)]
    is_wide = max(values) > _WIDE * middle or min(values) < middle / _WIDE
    step = Axis(title="step")
    return Figure(
        title="Times of steps" if log.unit == SECONDS else "Rates of steps",
        note=_note(log, len(regular)),
        x=step,
        y=Axis(title=unit, base=10) if is_wide else Axis(title=unit, has_zero=True),
        series=[own for own in shown if own.x],
        marks=[Mark(x=(own.number, own.number)) for own in log.restarts[-_MOST_RESTARTS:]],
        right=Panel(
            x=step,
            y=Axis(title=unit),
            series=[drawn],
            marks=[Mark(y=(low, high)), Mark(y=(middle, middle), name="median")],
        ),
        height=_HEIGHT,
    )


def _note(log: TrainingLog, num_steady: int) -> str:
    sentences = ["The second: the steady state alone, with its median and quartiles."]
    if log.restarts:
        sentences.append("A dashed line: the job began anew.")
    if num_steady > _MOST_POINTS:
        every = math.ceil(num_steady / _MOST_POINTS)
        sentences.append(f"Of {num_steady} steady lines one in {every} is drawn.")
    return " ".join(sentences)


def _curve(
    log: TrainingLog, title: str, unit: str, values: Sequence[float | None], note: str
) -> Figure:
    points = _thinned(list(zip([own.number for own in log.steps], values, strict=True)))
    return Figure(
        title=title,
        note=note,
        x=Axis(title="step"),
        y=Axis(title=unit),
        series=[
            Series(
                kind=Kind.CURVE,
                name=title.lower(),
                x=[number for number, _ in points],
                y=[value for _, value in points],
                is_in_legend=False,
            )
        ],
        height=_HEIGHT,
    )


def _thinned(points: Sequence[_T]) -> Sequence[_T]:
    """Return at most so many points, at equal distances."""
    return points[:: max(1, math.ceil(len(points) / _MOST_POINTS))]
