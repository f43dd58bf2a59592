"""Steps of the first layouts, trained on this machine, as anchors of a plan: `--verify K`.

PyTorch trains a layout with its tp, cp, ep, micro-batch and recomputation, without a pipeline,
on the GPUs of this machine. Two numbers of layers tell what is once a step from a layer's cost.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepmark.cases.plan import How, Plan, entries
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import Recompute
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import format_time
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layout_files import FORMAT_OF
from stepmark.layouts.plan_options import TWO_HOP, PlanOptions
from stepmark.layouts.small_steps import without_pipeline
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import measure_quietly
from stepmark.model.device import find_device_by_alias
from stepmark.model.parallel import ParallelConfig
from stepmark.predictions.factors import Anchored
from stepmark.store.reader import read_records
from stepmark.tables.columns import NUMBER, RATIO, given
from stepmark.tables.table import Table
from stepmark.training import train, train_plan
from stepmark.training.framework_options import with_file
from stepmark.training.framework_table import FRAMEWORKS
from stepmark.training.train_options import Blocks, TrainOptions
from stepmark.workloads.formats import FORMATS

_LAYERS = (2, 4)
_MICROBATCHES = 2
_INTERRUPTED = (130, 143)


def check_machine(options: PlanOptions) -> None:
    """Raise ConfigError where --verify cannot measure what the plan is for."""
    if options.verify is None:
        return
    if options.anchor is not None:
        allowed = "left out with --anchor: both give the factors of the plan"
        raise ConfigError("verify", options.verify, allowed)
    if options.packing is not None:
        allowed = "left out with --packing: `stepmark train` packs no sequences"
        raise ConfigError("verify", options.verify, allowed)
    if options.imbalance > 1 or TWO_HOP in options.dispatch:
        allowed = "left out with --imbalance and --dispatch two-hop, which PyTorch cannot train"
        raise ConfigError("verify", options.verify, allowed)
    here = machine(None)
    device = find_device_by_alias(options.device)
    if device is None or here.name not in device.names:
        name = here.name or "no GPU"
        allowed = f"left out here: this machine has {name}, and --device is {options.device}"
        raise ConfigError("verify", options.verify, allowed)


def measure_layouts(options: PlanOptions, layouts: Sequence[Candidate]) -> Path:
    """Measure steps of layouts on all GPUs of this machine; return the run.

    Raises ConfigError where no step is measured.
    """
    here = machine(None)
    plan = training_plan(options, layouts, here, here.num_ranks("all"))
    for note in plan.notes:
        sys.stderr.write(f"# {note}\n")
    code, run = measure_quietly(plan, str(options.runs))
    sys.stderr.write(f"run {run}\n")
    if code in _INTERRUPTED:
        raise KeyboardInterrupt
    num_measured = sum(isinstance(record, Measured) for record in read_records(run))
    if not num_measured:
        raise _refusal(options, f"no step of run {run} was measured")
    if num_measured < len(plan.entries):
        sys.stderr.write(f"# {num_measured} of {len(plan.entries)} steps were measured\n")
    return run


def training_plan(
    options: PlanOptions, layouts: Sequence[Candidate], here: Machine, num_ranks: int
) -> Plan:
    """Return the steps of the first layouts that a machine can train on so many ranks.

    Raises ConfigError where there is none.
    """
    assert options.verify
    cases: dict[str, TrainCase] = {}
    notes: dict[str, None] = {}
    refused: dict[str, list[str]] = defaultdict(list)  # rows by reason
    num_planned = 0
    for number, layout in enumerate(layouts, 1):
        if num_planned == options.verify:
            break
        try:
            own = [
                train_plan.only_case(step, here.device, num_ranks)
                for step in _steps(options, layout, here, num_ranks)
            ]
        except ConfigError as error:
            refused[str(error)].append(str(number))
            continue
        num_planned += 1
        cases |= {case.case_id: case for case in own}
        if layout.framework in FRAMEWORKS:
            notes[FRAMEWORKS[layout.framework]] = None
    left_out = [f"row {', '.join(rows)}: {reason}" for reason, rows in refused.items()]
    if not cases:
        raise _refusal(options, f"none of these rows can be trained: {'; '.join(left_out)}")
    return Plan(
        command="train",
        argv=tuple(sys.argv[1:]),
        device=here.device,
        world_size=num_ranks,
        how=How(train=train.how(TrainOptions(), num_ranks)),
        entries=entries([*cases.values()]),
        notes=(*(f"not measured here: {line}" for line in left_out), *notes),
    )


def _refusal(options: PlanOptions, reason: str) -> ConfigError:
    return ConfigError("verify", options.verify, f"left out here, as {reason}")


def _steps(
    options: PlanOptions, layout: Candidate, here: Machine, num_ranks: int
) -> Iterator[TrainOptions]:
    """Yield options of `train` for a layout with few layers and no pipeline.

    Raises ConfigError for a layout that it cannot train on so many ranks.
    """
    _check_ranks(layout.parallel, num_ranks)
    axes = {axis: getattr(layout.parallel, axis) for axis in ("tp", "cp", "ep")}
    changed: dict[str, Any] = {
        "models": options.models,
        "seq_len": layout.job.model.seq_len,
        "nproc": str(num_ranks),
        **{axis: degree for axis, degree in axes.items() if degree > 1},
        "mbs": (layout.job.mbs,),
        "grad_accum": _MICROBATCHES,
        "ac": _checkpointing(layout.recompute),
    }
    counts = sorted({min(count, layout.job.model.num_layers) for count in _LAYERS})
    if not layout.is_megatron:
        if options.precision not in (None, "bf16"):
            changed["precision"] = options.precision
        if options.precision == "fp8":
            changed["fp8_all_gather"] = layout.settings.fp8_all_gather
        for num_layers in counts:
            yield TrainOptions(num_layers=num_layers, **changed)
        return
    form = FORMATS[FORMAT_OF[layout.framework]]
    text = "".join(form.load().write(without_pipeline(layout).workload()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"layout{form.suffix}"
        path.write_text(text)
        for num_layers in counts:  # flags win over the file
            typed = TrainOptions(config=str(path), num_layers=num_layers, **changed)
            yield with_file(typed, here).options


def _check_ranks(axes: ParallelConfig, num_ranks: int) -> None:
    """Raise ConfigError for axes that do not divide the ranks of this machine."""
    rest = num_ranks
    for axis in ("cp", "tp"):
        degree = getattr(axes, axis)
        if rest % degree:
            more = f", of which cp has {axes.cp}" if axis == "tp" and axes.cp > 1 else ""
            allowed = f"a divisor of the ranks of this machine ({num_ranks}{more})"
            raise ConfigError(axis, degree, allowed)
        rest //= degree
    if rest * axes.cp % axes.ep:
        allowed = f"a divisor of the data and cp ranks of this machine ({rest * axes.cp})"
        raise ConfigError("ep", axes.ep, allowed)


def _checkpointing(recompute: str) -> Blocks:
    """Return --ac; where a part of the layers is recomputed, it is every second one here."""
    if "/" in recompute:
        return Recompute.BLOCKS, (1, 2)
    return Recompute(recompute), (1, 1)


def lines_of_steps(options: PlanOptions, anchored: Anchored) -> Iterator[str]:
    """Yield measured and predicted times, and what was not measured."""
    rows = [
        {
            "measured": format_time(row.measured_s),
            "predicted": format_time(row.predicted_s),
            "ratio": row.measured_s / row.predicted_s,
            "step": row.name.partition("@")[2] or row.name,  # without the model
        }
        for row in anchored.rows
    ]
    yield ""
    yield f"steps of the first {options.verify} rows with few layers, before these factors:"
    columns = (given("measured", NUMBER), given("predicted", NUMBER), given("ratio", RATIO))
    yield from Table(rows, (*columns, given("step"))).text()
    yield "not measured: pipelines, links between hosts, and ranks beyond this machine"
