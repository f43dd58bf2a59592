"""Anchors: measured steps to which factors on the costs of predictions are fitted.

They are rows of a table (CSV, TSV, Markdown), the training steps of a run, or the steady step
of a training log. The columns of a table are options of `stepmark predict`, so that a row is a
prediction with these options changed, or columns of `stepmark plan`, and one of MEASURED: the
time of an optimizer step (14.7s, 812ms, or seconds), tokens per second and GPU, MFU in percent
as predictions have it, or a training log, whose path is relative to the file. A row with tp,
pp or dp states its layout, whatever that of the command is.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stepmark.cases.record import Measured
from stepmark.cases.train_words import name_of
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, nearest
from stepmark.ground.options import Option, between, build, options, plain
from stepmark.ground.read_text import read_text
from stepmark.ground.units import format_time, parse_duration
from stepmark.predictions import anchor_fit, framework_job
from stepmark.predictions.anchor_fit import AnchorStep
from stepmark.predictions.factors import Anchored, AnchorRow, Part
from stepmark.predictions.framework_job import FrameworkJob
from stepmark.predictions.inputs import Inputs, no_host
from stepmark.predictions.measured_step import figure_of_log
from stepmark.predictions.plan_columns import (
    DP,
    IGNORED,
    LABEL,
    NOTES,
    PLAN_COLUMNS,
    Varied,
    axes_left_out,
    column_of,
    in_options,
    layout_of,
    ranks_of,
    replaced_by,
    value_of,
)
from stepmark.predictions.predict_inputs import inputs_of, of_training
from stepmark.predictions.predict_options import PredictOptions
from stepmark.predictions.simulation import SteadyStep
from stepmark.store.reader import find_run, read_info, read_records
from stepmark.store.view import median_s
from stepmark.text_tables.delimited_rows import read_rows
from stepmark.workloads.rules import find_rule

MEASURED = ("step", "tokens_per_s_gpu", "tokens_per_s", "log", "mfu")  # the best first
_EMPTY = ("", "-", "oom", "n/a", "failed", "out of memory")  # cells
_SAME = 0.02  # of a time, by which two figures of a row may differ
MOST_ANCHORS = 50
_NOT_OF_ROWS = (
    "anchor",
    "runs",
    "from_run",
    "what_if",
    "force",
    "json",
    "csv",
    "timeline",
    "html",
    "stages",
    "notes",
)
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_RATE = between(1e-6, 1e9)
_NUDGE = 0.01  # of a factor, for the part of the critical path that is in proportion to it
_ROUNDS = 2  # of predictions with factors, after which these are fitted anew

StepOf = Callable[[Inputs], SteadyStep]
AnyOptions = PredictOptions | FrameworkJob


@dataclass(frozen=True, slots=True)
class Anchor:
    """A measured step, and the inputs of its prediction.

    left_out: axes that are 1 because the row has no cell of theirs. layout: in brackets. job:
    the options that predict it.
    """

    name: str
    inputs: Inputs
    measured_s: float
    left_out: tuple[str, ...] = ()
    layout: str = ""
    job: AnyOptions | None = None


def fit_anchors(
    measured: Sequence[Anchor], step_of: StepOf, source: str = "", notes: Sequence[str] = ()
) -> Anchored:
    """Return factors fitted to anchors. step_of: simulates a step. notes: of reading them."""
    before = [_anchor_step(anchor, step_of) for anchor in measured]
    steps = before
    model = anchor_fit.choose(steps)
    for _ in range(_ROUNDS):
        factors = anchor_fit.fitted(model, steps)
        steps = [
            step.scaled(factors, step_of(replace(anchor.inputs, factors=factors)).step_s)
            for anchor, step in zip(measured, steps, strict=True)
        ]
    times_s = zip(before, anchor_fit.left_out_s(model, steps), strict=True)
    return Anchored(
        source=source,
        model=model.name,
        factors=anchor_fit.fitted(model, steps),
        rows=tuple(
            AnchorRow(
                name=anchor.name,
                where=anchor.name + anchor.layout,
                model=anchor.inputs.workload.name if anchor.job else "",
                measured_s=anchor.measured_s,
                predicted_s=step.time_s({}),
                left_out_s=left_out_s,
            )
            for anchor, (step, left_out_s) in zip(measured, times_s, strict=True)
        ),
        left_out=tuple(dict.fromkeys(axis for each in measured for axis in each.left_out)),
        table_notes=tuple(notes),
    )


def _anchor_step(anchor: Anchor, step_of: StepOf) -> AnchorStep:
    """Return what the predicted time of an anchor is made of.

    The critical path of the device has of each part what a nudge of its factor adds.
    """
    inputs = anchor.inputs
    predicted = step_of(inputs)
    ahead = replace(inputs, host_s=no_host)
    host_s = max(predicted.host_s(lane) for lane in predicted.lanes)
    device_s = step_of(ahead).step_s if host_s else predicted.step_s
    parts_s: dict[Part, float] = {}
    for part in Part:
        if part not in (Part.HOST, Part.GAPS):
            nudged = replace(ahead, factors={part: 1 + _NUDGE})
            parts_s[part] = max(0.0, step_of(nudged).step_s - device_s) / _NUDGE
    parts_s[Part.GAPS] = max(0.0, device_s - sum(parts_s.values()))
    step = AnchorStep(measured_s=anchor.measured_s, parts_s=parts_s, host_s=host_s)
    return step.scaled({}, predicted.step_s)


def read_anchors(options: AnyOptions, varied: Varied) -> tuple[list[Anchor], list[str]]:
    """Return the anchors that the options name, and notes on the others. Raises ConfigError.

    varied: of which the command has no single value, so that each row of a table needs a cell.
    """
    assert options.anchor
    path = Path(options.anchor)
    notes: list[str] = []
    read = _of_file(options, path, varied, notes) if path.is_file() else _of_run(options)
    measured = [*read]
    if not 1 <= len(measured) <= MOST_ANCHORS:
        allowed = f"1 to {MOST_ANCHORS} measured steps, not {len(measured)}"
        raise ConfigError("anchor", options.anchor, allowed)
    return measured, notes


def columns_of(varied: Iterable[Option]) -> Varied:
    """Return the columns that give a row the value of an option, by its name."""
    return {
        option.name: {
            *(column_of(word)[0] for word in (option.name, *option.words)),
            *((DP,) if option.name in ("nproc", "world_size") else ()),
        }
        for option in varied
    }


def _of_run(options: AnyOptions) -> Iterator[Anchor]:
    """Yield the training steps of a run, each the mean of its launches."""
    try:
        path = find_run(options.runs, options.anchor or "")
    except ConfigError as error:
        raise ConfigError(
            "anchor", error.value, f"a table (CSV, Markdown), a log or {error.allowed}"
        ) from None
    records: dict[str, list[Measured]] = {}
    for record in read_records(path):
        if isinstance(record, Measured) and record.training and not record.train.labels:
            records.setdefault(record.case.case_id, []).append(record)
    if not records:
        raise ConfigError("anchor", options.anchor, "a run that measured a training step")
    device = read_info(path).environment.devices[0].name
    basis = options if isinstance(options, PredictOptions) else framework_job.basis_of(options)
    calibration = find_run(options.runs, options.calibration) if options.calibration else None
    for own in records.values():
        case = own[0].train
        yield Anchor(
            name=name_of(case),
            inputs=of_training(case, calibration, device, options=basis),
            measured_s=fmean(median_s(record) * case.cycle for record in own),
        )


def _of_file(
    options: AnyOptions, path: Path, varied: Varied, notes: list[str]
) -> Iterator[Anchor]:
    """Yield the step of a training log, or the rows of a table; add to the notes.

    Raises ConfigError with the line of a row.
    """
    from stepmark.job_logs.training_log.step_lines import has_steps  # noqa: PLC0415 - 0.1 s

    given = plain(options)
    for name in _NOT_OF_ROWS:
        given.pop(name, None)
    if has_steps(path):
        if varied:
            allowed = f"a table, since a log does not state {', '.join(varied)}"
            raise ConfigError("anchor", path, allowed)
        inputs, job = _inputs(given, {})
        measured_s = _log_s(inputs, path, "anchor")
        _check_peak(inputs, measured_s, "anchor")
        yield Anchor(name=path.name, inputs=inputs, measured_s=measured_s, job=job)
        return
    rows = read_rows(read_text(path))
    number, heading = next(rows, (1, []))
    columns = [*map(column_of, heading)]
    line = f"line {number}"
    try:
        _check_columns([name for name, _ in columns], given, varied)
        notes += [f"column {name} is not read" for name, _ in columns if name in NOTES]
        for number, row in rows:
            line = f"line {number}"
            if len(row) != len(columns):
                raise ConfigError("its cells", len(row), f"as many as columns: {len(columns)}")
            pairs = [*zip(columns, row, strict=True)]
            cells = {
                name: value_of(text, unit)
                for (name, unit), text in pairs
                if text.lower() not in _EMPTY
            }
            line += f" ({cells[LABEL]})" if LABEL in cells else ""
            if not cells.keys() & {*MEASURED}:
                words = [text for (name, _), text in pairs if name in MEASURED and text]
                notes.append(f"{line} is left out: its time is {', '.join(words) or 'empty'}")
                continue
            _check_columns(cells, given, varied)
            inputs, job = _inputs(given, cells)
            measured_s = _measured_s(inputs, cells, path.parent)
            _check_peak(inputs, measured_s, next(name for name in MEASURED if name in cells))
            yield Anchor(line, inputs, measured_s, axes_left_out(cells), layout_of(cells), job)
    except ConfigError as error:
        field = f"{path.name}: {line}: {error.field}"
        raise ConfigError(field, error.value, error.allowed) from None


def _check_columns(columns: Collection[str], given: Mapping[str, Any], varied: Varied) -> None:
    """Raise ConfigError for columns that are wrong, and for those that are missing."""
    known = {*MEASURED, *IGNORED, *PLAN_COLUMNS, *_options_of(_class_of(given, {}))}
    unknown = [name for name in columns if name not in known and "framework" not in columns]
    missing = ", ".join(name for name, own in varied.items() if not own & {*columns})
    needed = f"a column {missing}, since the command has no single value of it"
    if unknown:
        rule = _columns_rule([word for name in unknown for word in nearest(name, known)])
        rule += f"; also give {needed}" if missing else ""
        raise ConfigError("column", ", ".join(unknown), rule)
    if missing:
        raise ConfigError(missing, None, needed)
    if not {*columns} & {*MEASURED}:
        raise ConfigError("the measured time", None, f"a column {', '.join(MEASURED)}")


def _columns_rule(near: Sequence[str]) -> str:
    """Return what a column must be. near: the names that its own is like."""
    rule = f"did you mean {' or '.join(near)}? It must be " if near else ""
    return f"{rule}an option of this command, or one of {', '.join(MEASURED)}"


def _class_of(given: Mapping[str, Any], cells: Mapping[str, str]) -> type[AnyOptions]:
    """Return the options of a row."""
    framework = cells.get("framework") or given.get("framework")
    return framework_job.options_class(find_rule(framework)) if framework else PredictOptions


def _inputs(given: Mapping[str, Any], cells: Mapping[str, str]) -> tuple[Inputs, AnyOptions]:
    """Return the inputs of a row, and its options: the command's, changed by its cells."""
    cls = _class_of(given, cells)
    by_column = _options_of(cls)
    replaced = replaced_by(cells)
    changed = {name: value for name, value in given.items() if name not in replaced}
    left_out = [by_column[axis] for axis in axes_left_out(cells) if axis in by_column]
    changed |= {option.name: "1" for option in left_out}
    for column, text in in_options(cells, by_column).items():
        if column in MEASURED or column in IGNORED:
            continue
        if column not in by_column:
            near = nearest(column, [*MEASURED, *by_column])
            raise ConfigError("column", column, _columns_rule(near[:1]))
        option = by_column[column]
        value = _switch(column, text) if option.is_switch else text
        changed[option.name] = [value] if option.is_list else value
    if "model" in cells:
        changed = {name: changed[name] for name in changed.keys() - {"model", "model_size"}}
        changed["models"] = [cells["model"]]
    for name in changed.keys() - {option.name for option in options(cls)}:
        raise ConfigError(name, changed[name], f"left out with --framework {cls.__doc__}")
    row = build(cls, changed)
    if DP in cells:
        row = build(cls, changed | _ranks(cells, row))
    if isinstance(row, FrameworkJob):
        workload = framework_job.workload_of(row)
        return inputs_of(framework_job.basis_of(row), workload), row
    return inputs_of(row), row


def _ranks(cells: Mapping[str, str], row: AnyOptions) -> dict[str, Any]:
    """Return the option of the ranks that a row's column dp gives.

    Raises ConfigError for other ranks than those of the row, or of the command.
    """
    count = ranks_of(cells[DP], row)
    ranks = getattr(row, "world_size", None) or row.nproc
    if ranks and str(ranks) != str(count):
        allowed = f"nproc ({ranks}) / (tp x pp x cp), which here is {count} ranks; a column "
        raise ConfigError(DP, cells[DP], f"{allowed}nproc or cp may be missing")
    return {"nproc": str(count)}


def _options_of(cls: type[AnyOptions]) -> dict[str, Option]:
    """Return the options that a column may name, by their names and spellings."""
    allowed = [option for option in options(cls) if option.name not in _NOT_OF_ROWS]
    return {
        column_of(word)[0]: option
        for option in allowed
        for word in (option.name, *option.words)
        if not word.startswith("--no-")
    }


def _switch(column: str, text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ConfigError(column, text, f"one of {', '.join(_SWITCH)}")
    return _SWITCH[text.lower()]


def _log_s(inputs: Inputs, path: Path, field: str) -> float:
    """Return the seconds of the steady step of a training log."""
    figure = figure_of_log(path, field)
    if figure.warnings:
        raise ConfigError(field, path, f"a log without a warning: {figure.warnings[0]}")
    return figure.step_s(inputs.tokens, inputs.num_ranks, inputs.seq_len, field)


def _measured_s(inputs: Inputs, cells: Mapping[str, str], folder: Path) -> float:
    """Return the seconds of an optimizer step that a row states. folder: of its logs."""
    names = [name for name in MEASURED if name in cells]
    first = names.pop(0)
    time_s = _time_s(inputs, first, cells, folder)
    for name in names:
        other_s = time_s if name == "mfu" else _time_s(inputs, name, cells, folder)
        if abs(other_s / time_s - 1) > _SAME:
            allowed = f"what {name} {cells[name]} is, a step of {format_time(other_s)}"
            raise ConfigError(first, cells[first], allowed)
    return time_s


def _time_s(inputs: Inputs, name: str, cells: Mapping[str, str], folder: Path) -> float:
    """Return the seconds of a step by one of MEASURED. MFU counts FLOPs as predictions do."""
    if name == "step":
        return parse_duration(cells[name], name)
    if name == "log":
        return _log_s(inputs, folder / cells[name], name)
    text = cells[name].removesuffix("%") if name == "mfu" else cells[name]
    value: float = _RATE.read(text, name)
    if inputs.tokens is None:
        raise ConfigError(name, cells[name], "step: the tokens of this step are not known")
    tokens = inputs.tokens / (1 if name == "tokens_per_s" else inputs.num_ranks)
    if name != "mfu":
        return tokens / value
    flops = inputs.token_flops
    peak = inputs.peak_flops_per_s
    if flops is None or peak is None or value > 100:
        raise ConfigError(name, cells[name], "a percentage of a device whose peak is known")
    return tokens * flops.causal / (peak * value / 100)


def _check_peak(inputs: Inputs, measured_s: float, field: str) -> None:
    """Raise ConfigError for a step with more FLOPs in its time than the device can do."""
    flops = inputs.token_flops
    if inputs.device is None or inputs.tokens is None or flops is None:
        return
    dtypes = (DType.FP32, DType.BF16, *inputs.narrow_dtypes)
    peak = max(inputs.device.peak(dtype) or 0.0 for dtype in dtypes)
    if peak == 0.0:
        return
    least_s = inputs.tokens / inputs.num_ranks * flops.causal / peak
    if measured_s < least_s:
        allowed = f"at least {format_time(least_s)}, the model's FLOPs at the device's peak"
        raise ConfigError(field, format_time(measured_s), allowed)
