"""Predictions of all combinations of options with lists, as one table."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.grouping import group_by
from stepmark.ground.option_grid import Axis, Grid
from stepmark.ground.units import GIB, format_bytes, format_time
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import write_files
from stepmark.model.device import find_device_by_alias, unknown_device
from stepmark.model.kernel_groups import COMMUNICATION
from stepmark.model.systems import find_system
from stepmark.predictions.anchored_steps import columns_of
from stepmark.predictions.framework_job import generated
from stepmark.predictions.note import MOST_NOTES, Topic, note_lines, noted, topic_of
from stepmark.predictions.predict import Job, anchored_by, of_job
from stepmark.predictions.prediction_text import in_width, limit
from stepmark.predictions.training_run import show_tokens
from stepmark.step.workload import Workload
from stepmark.store.view import print_text
from stepmark.tables.columns import COUNT, NUMBER, PERCENT, TEXT, Column, given
from stepmark.tables.figures import Axis as FigureAxis
from stepmark.tables.figures import Figure, Kind, Series
from stepmark.tables.table import Table

Spell = Callable[[ConfigError], ConfigError]
Row = dict[str, Any]

# Options of one prediction.
_ONE_PREDICTION = ("html", "timeline", "measured", "stages", "notes")
_MOST_ROWS = 40
# Figures of a prediction's document that are in a row as they are.
_FIGURES = (
    *("name", "num_ranks", "tokens", "seq_len", "network", "step_s", "is_lower_bound"),
    *("tokens_per_s", "tokens_per_s_gpu", "mfu_pct", "hfu_pct", "tflops", "mbs", "techniques"),
    *(
        "comm_s",
        "exposed_comm_s",
        "contention_s",
        "bubble_s",
        "power_w",
        "clock_hz",
        "energy_per_token_j",
    ),
    *("run_tokens", "days", "gpu_hours", "gpu_hour_price", "cost"),
)
# What the console calls that for which a step waits.
_LIMITS = {
    "computation": "compute",
    COMMUNICATION: "comm",
    "the pipeline bubble": "bubble",
    "the host": "host",
}
# Rows in this order: memory that suffices or is unknown, may suffice, does not.
_VERDICTS = ("fits", "close", "does not fit")


@dataclass(frozen=True, kw_only=True)
class PredictionGrid:
    """Rows, the best first, and the combinations that are refused.

    jobs: of the rows. is_by_cost: the cheapest is first. refused: the axes of each, with its
    reason. notes: on rows, with the number of rows.
    """

    axes: Sequence[Axis]
    rows: Sequence[Row]
    jobs: Sequence[Job]
    is_by_cost: bool
    refused: Sequence[Row]
    notes: Mapping[str, int]

    @cached_property
    def best(self) -> Row | None:
        """The first row, unless none fits."""
        first = self.rows[0]
        return None if first["verdict"] == "does not fit" else first

    def place(self, row: Row) -> str:
        """Return the combination of a row, as words."""
        return ", ".join(f"{axis.title} {row[axis.name]}" for axis in self.axes)

    def document(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "best": self.best,
            "rows": self.rows,
            "refused": self.refused,
            "notes": self.notes,
        }

    @property
    def columns(self) -> list[Column[Any]]:
        """Return the columns that people see: the axes, then figures."""
        return [*(_axis_column(axis, self.rows) for axis in self.axes), *_COLUMNS]


def _axis_column(axis: Axis, rows: Sequence[Row]) -> Column[Row]:
    name = axis.name
    is_number = all(isinstance(row[name], int) for row in rows)
    return given(name, COUNT if is_number else TEXT, axis.title)


def step_text(row: Row) -> str:
    return f"{'>= ' if row['is_lower_bound'] else ''}{format_time(row['step_s'])}"


def _bytes(row: Row) -> int:
    """Return the predicted memory; 0 where it is unknown."""
    return row["reserved_bytes"] or row["allocated_bytes"] or 0


def _millijoules(row: Row) -> str:
    energy_j = row["energy_per_token_j"]
    return f"{1e3 * energy_j:.1f}" if energy_j else ""


def whole(name: str) -> Callable[[Row], str]:
    """Return what shows a value as a whole number."""
    return lambda row: "" if row[name] is None else f"{row[name]:,.0f}"


def gibibytes(row: Row) -> str:
    return f"{_bytes(row) / GIB:.1f}" if _bytes(row) else ""


_COLUMNS = (
    given("step_s", NUMBER, "step", step_text),
    given("tokens_per_s_gpu", NUMBER, "tokens/s/GPU", whole("tokens_per_s_gpu")),
    given("mfu_pct", PERCENT, "MFU %"),
    given("reserved_bytes", NUMBER, "GiB", gibibytes),
    given("verdict", heading="memory"),
    given("bound"),
    given("energy_per_token_j", NUMBER, "mJ/token", _millijoules),
    given("days", PERCENT),
    given("cost", NUMBER, words=whole("cost")),
)


def run(grid: Grid[Job], spell: Spell) -> int:
    """Predict a grid, print it, write its files. spell: fields as they were typed.

    Returns the exit code.
    """
    options = grid.options
    options.check_stdout()
    predictions = predict_grid(grid, spell)
    write_files(options, "predictions", predictions.document(), [*predictions.rows])
    if not options.to_stdout:
        print_text(lines(predictions))
    return 0


def predict_grid(
    grid: Grid[Job], spell: Spell = lambda error: error, workload: Workload | None = None
) -> PredictionGrid:
    """Predict each combination. workload: the step, if no option names it.

    Raises ConfigError where no combination is a step.
    """
    _check(grid)
    predicted: list[tuple[Row, Job]] = []
    refused: list[Row] = []
    errors: list[ConfigError] = []
    notes = Counter[str]()
    make = lru_cache(maxsize=1)(generated)  # devices of one job come one after the other
    anchored = None
    if grid.options.anchor:
        varied = columns_of(axis.option for axis in grid.axes)
        anchored = anchored_by(grid.options, varied)
    with Waiting(f"predicting {len(grid)} combinations"):
        for place, job in grid.points():
            try:
                prediction = of_job(job, workload, make, anchored)
            except ConfigError as error:
                errors.append(error)
                refused.append({**place, "reason": str(spell(error))})
                continue
            predicted.append(({**row_of(prediction.figures()), **place}, job))
            notes.update(dict.fromkeys(prediction.all_notes, 1))
    if not predicted:
        raise errors[0]
    if anchored:
        doubts = noted(Topic.CALIBRATION, anchored.notes)
        notes.update(dict.fromkeys(doubts, len(predicted)))
    is_by_cost = _is_by_cost(grid.axes, [row for row, _ in predicted])
    predicted.sort(key=lambda own: _order(own[0], is_by_cost=is_by_cost))
    rows, jobs = zip(*predicted, strict=True)
    return PredictionGrid(
        axes=grid.axes,
        rows=rows,
        jobs=jobs,
        is_by_cost=is_by_cost,
        refused=refused,
        notes=notes,
    )


def _check(grid: Grid[Job]) -> None:
    """Refuse what is of one prediction, and names of nothing. Raises ConfigError."""
    for name in _ONE_PREDICTION:
        if value := getattr(grid.options, name):
            lists = ", ".join(f"--{axis.title}" for axis in grid.axes)
            raise ConfigError(name, value, f"left out with lists ({lists})")
    if "-" in grid.options.models:
        raise ConfigError("workload", "-", "a file: each prediction reads it")
    for axis in grid.axes:
        name = axis.option.name
        firsts: dict[str, str] = {}
        for value in axis.values if name in _KEYS else ():
            first = firsts.setdefault(_KEYS[name](value), value)
            if first != value:
                raise ConfigError(name, value, f"left out: it is the same as {first}")


def _device_key(name: str) -> str:
    device = find_device_by_alias(name)
    if device is None and name not in ("cpu", "cuda"):
        raise unknown_device(name)
    return device.key if device else name


# The one name of what has several, by option. Raise ConfigError for one that nothing has.
_KEYS: dict[str, Callable[[str], str]] = {
    "device": _device_key,
    "network": lambda name: find_system(name).name,
}


def row_of(document: Mapping[str, Any]) -> Row:
    """Return the row of a prediction. document: its figures."""
    memory = document["memory"] or {}
    interval = document["interval"] or {}
    name = limit(document)
    return {
        **{name: document[name] for name in _FIGURES},
        "interval_low_s": interval.get("low_s"),
        "interval_high_s": interval.get("high_s"),
        "bound": _LIMITS.get(name, name),
        "allocated_bytes": memory.get("allocated_bytes"),
        "reserved_bytes": memory.get("reserved_bytes"),
        "device_bytes": memory.get("device_bytes"),
        "verdict": memory.get("verdict", "unknown"),
    }


def _is_by_cost(axes: Sequence[Axis], rows: Sequence[Row]) -> bool:
    """Return whether the cheapest is best: with prices, of several devices."""
    has_devices = any(axis.option.name == "device" for axis in axes)
    return has_devices and all(row["cost"] is not None for row in rows)


def _order(row: Row, *, is_by_cost: bool) -> tuple[int, float]:
    """Return what orders rows: the memory, then the cost, or the time of a token or step."""
    verdict = row["verdict"]
    place = _VERDICTS.index(verdict) if verdict in _VERDICTS else 0
    if is_by_cost:
        return place, row["cost"]
    rate = row["tokens_per_s_gpu"]
    return place, -rate if rate else row["step_s"]


def lines(grid: PredictionGrid) -> Iterator[str]:
    """Yield the grid as text."""
    yield from in_width(_answer(grid), "    ")
    yield from (f"  {text}" for text in _common(grid.rows))
    yield ""
    yield from Table(grid.rows[:_MOST_ROWS], grid.columns).text()
    if len(grid.rows) > _MOST_ROWS:
        yield f"{_MOST_ROWS} of {len(grid.rows)} combinations; --csv and --json have all"
    yield from _refusals(grid.refused)
    yield from _notes(grid)


def _answer(grid: PredictionGrid) -> str:
    """Return which combination is best, with its figures."""
    best = grid.best
    count = f"{len(grid.rows) + len(grid.refused)} combinations"
    if best is None:
        least = min(grid.rows, key=lambda row: _bytes(row) / row["device_bytes"])
        sizes = f"{format_bytes(_bytes(least))} of {format_bytes(least['device_bytes'])}"
        text = f"none of {count} fits: the least memory is {sizes}, with {grid.place(least)}"
        return f"{least['name']}: {text}"
    fits = {"fits": " that fits", "close": " that may fit (its memory is close)"}
    rank = "cheapest" if grid.is_by_cost else "fastest per GPU"
    forms = {
        "tokens_per_s_gpu": "{:,.0f} tokens/s/GPU",
        "mfu_pct": "{:.1f} % MFU (causal)",
        "days": "{:,.1f} days",
        "cost": "cost {:,.0f}",
    }
    known = (form.format(best[name]) for name, form in forms.items() if best[name] is not None)
    figures = [f"step {step_text(best)}", *known]
    head = f"{best['name']}: {rank}{fits.get(best['verdict'], '')} of {count}"
    return f"{head}: {grid.place(best)}: {', '.join(figures)}"


def figure(grid: PredictionGrid) -> Figure:
    """Return a bar per combination: tokens/s of a GPU, or the step without tokens."""
    has_tokens = all(row["tokens_per_s_gpu"] for row in grid.rows)
    name, title = ("tokens_per_s_gpu", "tokens/s/GPU") if has_tokens else ("step_s", "step (s)")
    places = [grid.place(row) for row in grid.rows]
    by_verdict = group_by(zip(places, grid.rows, strict=True), lambda own: own[1]["verdict"])
    return Figure(
        title="Predicted steps",
        note="The best is the first; colours tell whether the memory fits.",
        x=FigureAxis(title=title, has_zero=True),
        y=FigureAxis(categories=places),
        series=[
            Series(
                kind=Kind.BARS,
                name=str(verdict),
                x=[row[name] for _, row in own],
                y=[place for place, _ in own],
            )
            for verdict, own in by_verdict.items()
        ],
        height=160 + 24 * len(places),
    )


def _common(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what all rows have in common."""

    def common(name: str) -> Any:
        values = {row[name] for row in rows}
        return values.pop() if len(values) == 1 else None

    num_ranks = common("num_ranks")
    step = ["1 rank" if num_ranks == 1 else f"{num_ranks} ranks"] if num_ranks else []
    step += [f"{common('tokens'):,} tokens a step"] if common("tokens") else []
    if all(row["tokens"] for row in rows) and not common("tokens"):
        step += ["rows differ in tokens a step: compare tokens/s/GPU"]
    step += [f"seq {common('seq_len')}"] if common("seq_len") else []
    if step:
        yield f"step: {', '.join(step)}"
    if common("network"):
        yield f"network: {common('network')}"
    if common("run_tokens"):
        text = f"training: {show_tokens(common('run_tokens'))} tokens without interruptions"
        price = common("gpu_hour_price")
        yield f"{text}, at {price:g} a GPU hour" if price else text
    if any(_bytes(row) for row in rows):
        yield (
            "memory: GiB that the fullest rank reserves, and whether they fit into its device"
            " with what CUDA and NCCL need"
        )


def _refusals(refused: Sequence[Row]) -> Iterator[str]:
    """Yield the reasons with their numbers; those that differ in figures alone are one."""
    groups = group_by(refused, lambda row: re.sub(r"[\d.]+", "", row["reason"]))
    for rows in sorted(groups.values(), key=len, reverse=True):
        alike = ", for example" if len({row["reason"] for row in rows}) > 1 else ""
        yield f"{len(rows)} refused{alike}: {rows[0]['reason']}"


def _notes(grid: PredictionGrid) -> Iterator[str]:
    """Yield the first notes by topic, of one topic those on most rows first."""
    ordered = sorted(grid.notes.items(), key=lambda note: (topic_of(note[0]), -note[1]))
    counts = {note: f" ({count} of {len(grid.rows)})" for note, count in ordered}
    counts |= dict.fromkeys((n for n, count in ordered if count == len(grid.rows)), "")
    texts = (f"note{where}: {note}" for note, where in counts.items())
    yield from note_lines(texts, MOST_NOTES, "--json has all")
