"""Figures of training: samples, phases, loss."""

from collections.abc import Iterator, Sequence
from math import log

from stepmark.cases.record import Measured, Record
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import name_of
from stepmark.cases.training import Schedule
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import format_time
from stepmark.tables.columns import digits
from stepmark.tables.figures import Axis, Figure, Kind, Mark, Series, folded, unique
from stepmark.training.training_rates import PHASES, mean_phases

# Further cases have no figure of their own; the table has them.
MAX_CASES = 6
# More ranks are drawn as one line, the slowest of each sample.
MAX_RANKS = 16
_NAMES = {"fwd_s": "forward", "bwd_s": "backward", "optim_s": "optimizer", "other_s": "other"}


def figures(records: Sequence[Record]) -> Iterator[Figure]:
    """Yield the figures of the training of a run; none for what was not measured."""
    measured = (record for record in records if isinstance(record, Measured))
    ran = [
        record
        for record in measured
        if isinstance(record.case, TrainCase) and any(record.samples.seconds[:1])
    ]
    ran.sort(key=lambda record: bool(record.train.labels))  # calibrations of parts are last
    for record in ran[:MAX_CASES]:
        yield samples(record, left_out=_left_out(ran))
    # A case that calibrates is part of a model: its phases and loss are those of no step.
    steps = [record for record in ran if not record.train.labels] or ran
    if any(mean_phases(record, 0) for record in steps):
        yield phase_bars(steps)
    with_loss = [record for record in steps if record.training and record.training.loss]
    if with_loss:
        yield losses(with_loss[:MAX_CASES], left_out=_left_out(with_loss))


def _left_out(ran: Sequence[Measured]) -> str:
    """Return a sentence about cases that have no figure of their own, "" without any."""
    more = len(ran) - MAX_CASES
    return f" {more} more cases are not drawn." if more > 0 else ""


def samples(record: Measured, left_out: str = "") -> Figure:
    """Return a line per rank over the samples, warm-up included and shaded."""
    warmup = record.training.warmup_s if record.training else ()
    dropped = len(warmup[0]) if warmup else 0
    median_ms = 1e3 * summarize(slowest_per_sample(record.samples.seconds)).median
    marks = [Mark(y=(median_ms, median_ms), name=f"median {digits(median_ms)} ms")]
    if dropped:
        marks.insert(0, Mark(x=(-0.5, dropped - 0.5)))
    is_micro = record.train.schedule is Schedule.MICRO
    # A first sample that compiles takes as long as a hundred others and would flatten them.
    top_ms = 1.25e3 * max(map(max, record.samples.seconds))
    return Figure(
        title=f"Samples: {name_of(record.train)}",
        note=f"Shaded: warm-up, left out of all rates; it may exceed the upper edge.{left_out}",
        x=Axis(title="micro-step" if is_micro else "step"),
        y=Axis(title="ms", limits=(0, top_ms)),
        series=[
            Series(
                kind=Kind.CURVE,
                name=name,
                x=range(len(values)),
                y=[round(value * 1e3, 4) for value in values],
            )
            for name, values in _by_rank(record)
        ],
        marks=marks,
        height=340,
    )


def _by_rank(record: Measured) -> list[tuple[str, list[float]]]:
    warmup = record.training.warmup_s if record.training else ()
    seconds = record.samples.seconds
    before = warmup or ((),) * len(seconds)
    if len(seconds) > MAX_RANKS:
        slowest = slowest_per_sample(before) + slowest_per_sample(seconds)
        return [(f"slowest of {len(seconds)} ranks", slowest)]
    return [
        (f"rank {rank}", [*early, *values])
        for rank, (early, values) in enumerate(zip(before, seconds, strict=True))
    ]


def phase_bars(ran: Sequence[Measured]) -> Figure:
    """Return one bar per case, its phases stacked; they add up to the mean sample."""
    bars = []
    for record in ran:
        medians = [summarize(values).median for values in record.samples.seconds]
        if means := mean_phases(record, medians.index(max(medians))):
            bars.append((record, means))
    names = [*map(folded, unique([name_of(record.train) for record, _ in bars]))]
    return Figure(
        title="Phases of a sample",
        note="Mean sample of the slowest rank over whole cycles, so that the optimizer counts.",
        x=Axis(title="ms"),
        y=Axis(categories=names),
        series=[
            Series(
                kind=Kind.BARS,
                name=_NAMES[phase],
                x=[means[phase] * 1e3 for _, means in bars],
                y=names,
                hover=[f"{_NAMES[phase]} {format_time(means[phase])}" for _, means in bars],
            )
            for phase in PHASES
        ],
        height=170 + sum(max(52, 18 * (name.count("\n") + 1)) for name in names),
    )


def losses(ran: Sequence[Measured], left_out: str = "") -> Figure:
    """Return a curve per case; a loss that is not finite is a gap."""
    curves = [(r, r.training.loss) for r in ran if r.training and r.training.loss]
    names = unique([name_of(record.train) for record, _ in curves])
    marks = []
    for size in {record.train.model.vocab_size for record, _ in curves}:
        loss = log(size)
        marks.append(Mark(y=(loss, loss), name=f"every token as likely: {loss:.2f}"))
    return Figure(
        title="Loss",
        note=f"Loss of each sample from the very first one, mean over ranks.{left_out}",
        x=Axis(title="sample"),
        y=Axis(title="loss"),
        series=[
            Series(
                kind=Kind.CURVE,
                name=folded(name),
                x=range(len(loss)),
                y=[round(value, 5) for value in loss],
            )
            for name, (_, loss) in zip(names, curves, strict=True)
        ],
        marks=marks,
        height=340 + 20 * len(curves),
    )
