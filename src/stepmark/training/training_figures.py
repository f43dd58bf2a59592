"""Plotly figures of training: samples, phases, loss."""

from collections.abc import Sequence
from math import log

import plotly.graph_objects as go
from plotly.graph_objects import Figure

from stepmark.cases.record import Measured, Record
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import name_of
from stepmark.cases.training import Schedule
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import format_time
from stepmark.tables.columns import digits
from stepmark.tables.figures import (
    COLOURS,
    INK,
    Drawn,
    curve_style,
    folded,
    reference_line,
    styled,
    unique,
)
from stepmark.training.training_rates import PHASES, mean_phases

# Further cases have no figure of their own; the table has them.
MAX_CASES = 6
# More ranks are drawn as one line, the slowest of each sample.
MAX_RANKS = 16
_NAMES = {"fwd_s": "forward", "bwd_s": "backward", "optim_s": "optimizer", "other_s": "other"}


def drawn(records: Sequence[Record]) -> list[Drawn]:
    """Return all figures of the training of a run; none for what was not measured."""
    measured = (record for record in records if isinstance(record, Measured))
    ran = [
        record
        for record in measured
        if isinstance(record.case, TrainCase) and any(record.samples.seconds[:1])
    ]
    ran.sort(key=lambda record: bool(record.train.labels))  # calibrations of parts are last
    more = f" {len(ran) - MAX_CASES} more cases are not drawn." if len(ran) > MAX_CASES else ""
    figures: list[Drawn] = []
    for record in ran[:MAX_CASES]:
        note = f"Shaded: warm-up, left out of all rates; it may exceed the upper edge.{more}"
        figures.append((f"Samples: {name_of(record.train)}", note, samples(record)))
    # A case that calibrates is part of a model: its phases and loss are those of no step.
    steps = [record for record in ran if not record.train.labels] or ran
    if any(mean_phases(record, 0) for record in steps):
        note = (
            "Mean sample of the slowest rank over whole cycles, so that the optimizer counts."
        )
        figures.append(("Phases of a sample", note, phase_bars(steps)))
    with_loss = [record for record in steps if record.training and record.training.loss]
    if with_loss:
        few = with_loss[:MAX_CASES]
        left_out = len(with_loss) - len(few)
        more = f" {left_out} more cases are not drawn." if left_out else ""
        note = f"Loss of each sample from the very first one, mean over ranks.{more}"
        figures.append(("Loss", note, losses(few)))
    return figures


def samples(record: Measured) -> Figure:
    """Draw a line per rank over the samples, warm-up included and shaded."""
    figure = go.Figure()
    warmup = record.training.warmup_s if record.training else ()
    dropped = len(warmup[0]) if warmup else 0
    for index, (name, values) in enumerate(_by_rank(record)):
        figure.add_scatter(
            x=list(range(len(values))),
            y=[round(value * 1e3, 4) for value in values],
            name=name,
            **curve_style(index, width=1.5, size=5),
            hovertemplate="sample %{x}: %{y:.4g} ms",
        )
    if dropped:
        edges = {"x0": -0.5, "x1": dropped - 0.5}
        figure.add_vrect(**edges, fillcolor=INK, opacity=0.2, line_width=0)
    median_ms = 1e3 * summarize(slowest_per_sample(record.samples.seconds)).median
    reference_line(figure, median_ms, f"median {digits(median_ms)} ms")
    is_micro = record.train.schedule is Schedule.MICRO
    figure.update_xaxes(title="micro-step" if is_micro else "step")
    # A first sample that compiles takes as long as a hundred others and would flatten them.
    top = 1.25e3 * max(map(max, record.samples.seconds))
    figure.update_yaxes(title="ms", range=[0, top])
    return styled(figure, height=340)


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
    """Draw one bar per case, its phases stacked; they add up to the mean sample."""
    bars = []
    for record in ran:
        medians = [summarize(values).median for values in record.samples.seconds]
        if means := mean_phases(record, medians.index(max(medians))):
            bars.append((record, means))
    names = unique([name_of(record.train) for record, _ in bars])
    figure = go.Figure()
    for index, phase in enumerate(PHASES):
        figure.add_bar(
            orientation="h",
            y=list(map(folded, names)),
            x=[means[phase] * 1e3 for _, means in bars],
            name=_NAMES[phase],
            marker_color=COLOURS[index],
            hovertext=[f"{_NAMES[phase]} {format_time(means[phase])}" for _, means in bars],
            hoverinfo="text",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="ms")
    figure.update_yaxes(automargin=True, autorange="reversed")
    return styled(figure, height=170 + 52 * len(bars))


def losses(ran: Sequence[Measured]) -> Figure:
    """Draw a curve per case; a loss that is not finite is a gap."""
    curves = [(r, r.training.loss) for r in ran if r.training and r.training.loss]
    names = unique([name_of(record.train) for record, _ in curves])
    figure = go.Figure()
    for index, ((_, loss), name) in enumerate(zip(curves, names, strict=True)):
        figure.add_scatter(
            x=list(range(len(loss))),
            y=[round(value, 5) for value in loss],
            name=folded(name),
            **curve_style(index, width=1.5, size=5),
            hovertemplate="%{x}: %{y:.4f}<extra></extra>",
        )
    for size in {record.train.model.vocab_size for record, _ in curves}:
        reference_line(figure, log(size), f"every token as likely: {log(size):.2f}")
    figure.update_xaxes(title="sample")
    figure.update_yaxes(title="loss")
    return styled(figure, height=340 + 20 * len(curves))
