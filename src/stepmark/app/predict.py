"""stepmark predict: the step of a case or of a workload file, from measured parts."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from stepmark.app import parts as measured_parts
from stepmark.app import train_plan, workload_files
from stepmark.app.delivery import write_files
from stepmark.app.machine import Machine, machine
from stepmark.app.parts import Parts
from stepmark.core.device import DeviceSpec, find_device, find_device_by_alias, load_devices
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.flops import per_token
from stepmark.core.ledger import Group as LedgerGroup
from stepmark.core.ledger import Idle, Work
from stepmark.core.predict_options import PredictOptions
from stepmark.core.prediction import StepMemory, StepPrediction
from stepmark.core.record import Measured, RunInfo
from stepmark.core.step_cost import Costs, OpCost, PowerModel
from stepmark.core.train_case import TrainCase
from stepmark.core.train_options import CaseOptions, TrainOptions, options_of
from stepmark.core.training import Precision
from stepmark.core.workload import CommOp, ComputeOp, Group, Kernel, Workload
from stepmark.predict import memory
from stepmark.predict.comm import CommCosts
from stepmark.predict.costs import RooflineCosts, first_of
from stepmark.predict.step import predict_step
from stepmark.report import prediction as report
from stepmark.store.export import write_json
from stepmark.store.reader import find_run, list_runs, read_info, read_records
from stepmark.workload.rules.pytorch.case import of_case
from stepmark.workload.tree import stage_of_case

# Between kernels that are launched already, without a profiler: measured on an H200
# (docs/LOG.md). It stands in where no calibration has it.
_GAP_S = 1.2e-6
_NO_EFFECT = ("text", "text_file", "workers", "seed", "lr", "compile_fallback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is predicted. case: None for a workload file."""

    name: str
    workload: Workload
    case: TrainCase | None
    device: DeviceSpec | None
    device_name: str
    parts: Parts | None


def run(options: PredictOptions) -> int:
    """Predict, print, write files. Returns the exit code."""
    options.check_stdout()
    target = _target(options)
    about = facts(target)
    prediction, notes = predict(target, dict(options.what_if or ()))
    document = report.document(about, prediction, notes)
    write_files(options, "prediction", document, report.rows(prediction))
    if options.timeline:
        write_json(report.timeline(prediction), options.timeline, "timeline")
    if not options.to_stdout and options.timeline != "-":
        sys.stdout.write("\n".join(report.lines(document, prediction)) + "\n")
    return 0


def predict(target: Target, changes: dict[str, float]) -> tuple[StepPrediction, list[str]]:
    """Return the prediction of a step and what to say about it. Raises ConfigError."""
    notes: list[str] = list(target.parts.notes) if target.parts else []
    costs, comm, unknown = _costs(target, changes)
    power = target.parts.power if target.parts else None
    prediction = predict_step(target.workload, costs, _changed_power(power, changes))
    if unknown:
        shown = ", ".join(list(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        notes.append(f"{len(unknown)} operations have no known cost and take no time: {shown}")
    notes += report.source_notes(prediction.sources, comm.sources, target.device_name)
    notes += _contention_notes(target, costs, prediction)
    if power is None and target.case is not None and target.case.device == "cuda":
        notes.append("power was not calibrated: the device counts as running at full clock")
    return prediction, notes


def _target(options: PredictOptions) -> Target:
    for name in _NO_EFFECT:
        value = getattr(options, name)
        if value not in (None, False):
            raise ConfigError(name, value, "left out: it does not change a prediction")
    file = _workload_file(options)
    if file is not None:
        return _file_target(options, file)
    base = find_run(options.runs, options.from_run) if options.from_run else None
    here = _machine(options, base)
    case = _case(options, here, base)
    try:
        workload = of_case(case)
    except ConfigError as error:
        raise ConfigError(error.field, error.value, error.allowed) from None
    path = _calibration(options, here, case, base)
    found = measured_parts.read_parts(path, case) if path else None
    device = found.device if found else find_device(here.name)
    if found is None and device is None:
        allowed = "a calibration of this machine (stepmark calibrate), or --device and its name"
        raise ConfigError("calibration", "missing", allowed)
    return Target(
        name=f"{case.model.name} {case.strategy}",
        workload=workload,
        case=case,
        device=device,
        device_name=found.device_name if found else here.name,
        parts=found,
    )


def _workload_file(options: PredictOptions) -> str | None:
    """Return the argument if it is a file that is no model's config."""
    if len(options.models) != 1 or options.from_run:
        return None
    path = Path(options.models[0])
    is_file = options.models[0] == "-" or path.is_file()
    is_config = path.name == "config.json" or path.suffix == ".toml"
    return options.models[0] if is_file and not is_config else None


def _file_target(options: PredictOptions, file: str) -> Target:
    for field in fields(CaseOptions):
        value = getattr(options, field.name)
        if field.name != "models" and value not in (None, False, ()):
            allowed = "left out: a workload file says what its step is"
            raise ConfigError(field.name, value, allowed)
    workload = workload_files.read(file)
    if not workload.stages:
        raise ConfigError("workload", file, "a workload with the operations of a step")
    found = None
    if options.calibration:
        path = find_run(options.runs, options.calibration)
        found = measured_parts.read_parts(path, None)
    device = _spec(options.device) if options.device else found.device if found else None
    if device is None and found is None:
        here = machine(None)
        device = find_device(here.name)
        if device is None:
            raise ConfigError("device", "missing", "the name of a device, e.g. h200")
    return Target(
        name=workload.name,
        workload=workload,
        case=None,
        device=device,
        device_name=device.names[0] if device else found.device_name if found else "",
        parts=found,
    )


def _spec(name: str) -> DeviceSpec:
    spec = find_device_by_alias(name)
    if spec is None:
        raise ConfigError("device", name, f"one of {', '.join(load_devices())}")
    return spec


def _machine(options: PredictOptions, base: Path | None) -> Machine:
    """Return the machine that is predicted: the one of --device, of the run, or this one."""
    if options.device in ("cpu", "cuda"):
        return machine(options.device)
    if options.device:
        spec = _spec(options.device)
        return machine(spec.key, dry_run=True)
    if base is None and options.calibration:
        base = find_run(options.runs, options.calibration)
    if base is None:
        return machine(None)
    info = read_info(base)
    devices = info.environment.devices
    if any(record.case.device == "cpu" for record in read_records(base)):
        return Machine(device="cpu", name=devices[0].name)
    first = devices[0]
    return Machine(
        device="cuda",
        name=first.name,
        num_accelerators=None,
        memory_bytes=first.memory_bytes,
        is_here=False,
    )


def _case(options: PredictOptions, here: Machine, base: Path | None) -> TrainCase:
    """Return the case of the options; those that are not given are the run's."""
    given = {
        field.name: getattr(options, field.name)
        for field in fields(CaseOptions)
        if getattr(options, field.name) not in (None, False, ())
    }
    if base is not None:
        given = {**_options_of_run(base), **given}
    if options.gbs is not None:
        given["grad_accum"] = None
    train = TrainOptions(**given)
    world_size = here.num_ranks(train_plan.default_nproc(train, here.device))
    cases = train_plan.cases(train, here.device, world_size)
    if len(cases) != 1:
        names = ", ".join(f"{case.model.name} {case.strategy} mbs {case.mbs}" for case in cases)
        raise ConfigError("model", names, "one case: one model, strategy and micro-batch")
    (case,) = cases
    if options.gbs is None:
        return case
    per_micro_step = case.mbs * case.parallel.data_ranks
    if options.gbs < 1 or options.gbs % per_micro_step:
        allowed = f"a multiple of --mbs x data ranks ({per_micro_step})"
        raise ConfigError("gbs", options.gbs, allowed)
    return replace(case, grad_accum=options.gbs // per_micro_step)


def _options_of_run(base: Path) -> dict[str, object]:
    """Return the options of the deepest training step that the run measured."""
    cases = [
        record.train
        for record in read_records(base)
        if isinstance(record, Measured) and record.training and not record.train.scale
    ]
    if not cases:
        raise ConfigError("from-run", base.name, "a run that measured a training step")
    deepest = max(cases, key=lambda case: case.model.num_layers)
    found = options_of(deepest)
    return {
        field.name: getattr(found, field.name)
        for field in fields(CaseOptions)
        if getattr(found, field.name) not in (None, False, ()) and field.name not in _NO_EFFECT
    }


def _calibration(
    options: PredictOptions, here: Machine, case: TrainCase, base: Path | None
) -> Path | None:
    """Return the run whose parts are used; None: a data sheet is."""
    if options.calibration:
        path = find_run(options.runs, options.calibration)
        _check_sitting(read_info(path), here, force=options.force)
        return path
    if base is not None:
        return base if not options.device else None
    if options.device not in (None, "cpu", "cuda"):
        return None
    for path in sorted(list_runs(options.runs), reverse=True) if options.runs.is_dir() else ():
        names = {device.name for device in read_info(path).environment.devices}
        if case.device == "cuda" and names != {here.name}:
            continue
        if any(
            isinstance(record, Measured)
            and record.training
            and record.training.traces
            and measured_parts.is_like(record.train, case)
            for record in read_records(path)
        ):
            return path
    return None


def _check_sitting(info: RunInfo, here: Machine, *, force: bool) -> None:
    """Refuse a calibration of another device."""
    names = {device.name for device in info.environment.devices}
    if here.device == "cuda" and here.name and names != {here.name} and not force:
        allowed = f"a run on {here.name}, not {', '.join(sorted(names))}; or --force"
        raise ConfigError("calibration", info.run_id, allowed)


def _costs(
    target: Target, changes: dict[str, float]
) -> tuple[Costs, CommCosts, dict[str, None]]:
    """Return all costs; the source of those of collectives; operations of unknown cost."""
    found, unknown = target.parts, dict[str, None]()
    sources = [*(found.compute if found else ())]
    if target.device is not None:
        sources.append(RooflineCosts(target.device))
    host_s = found.host_s if found else lambda _op: 0.0
    first = first_of(sources, host_s)

    @cache
    def compute(op: ComputeOp) -> OpCost:
        cost = first(op)
        if cost is None:
            if not op.is_wait:
                unknown[op.op.name if isinstance(op.op, Kernel) else op.module] = None
            return OpCost(time_s={}, num_kernels=0.0)
        times = {work: t / _factor(work, changes) for work, t in cost.time_s.items()}
        return replace(cost, time_s=times)

    comm = CommCosts(found.curves if found else (), target.device)
    link = changes.get("link", 1.0)

    def comm_s(op: CommOp, group: Group) -> float:
        return comm(op, group) / link

    costs = Costs(
        compute=compute,
        comm=comm_s,
        gap_s=found.gap_s if found else _GAP_S,
        gap=Idle.HOST if found and found.is_host else Idle.LAUNCH_GAP,
        host_comm_s=0.0,
        compute_slowdown=found.compute_slowdown if found else {},
        comm_slowdown=(found.comm_slowdown if found else None) or 1.0,
    )
    return costs, comm, unknown


def _contention_notes(
    target: Target, costs: Costs, prediction: StepPrediction
) -> Iterator[str]:
    """Yield what runs beside communication without a known contention."""
    works = {
        name
        for ledger in prediction.timeline.ledgers
        for group, name in ledger.lines
        if group is LedgerGroup.OVERLAPPED and Work(name) not in costs.compute_slowdown
    }
    names = [str(work) for work in Work if work in works]
    if works and (target.parts is None or target.parts.comm_slowdown is None):
        names.append("communication")
    if names:
        text = "where computation and communication run at once, they take as long as alone"
        yield f"contention was not measured of {', '.join(names)}: {text}"


def _factor(work: Work, changes: dict[str, float]) -> float:
    name = "flops" if work in (Work.PRODUCT, Work.ATTENTION) else "hbm"
    return changes.get(name, 1.0)


def _changed_power(power: PowerModel | None, changes: dict[str, float]) -> PowerModel | None:
    limit_w = changes.get("power")
    if limit_w is None:
        return power
    if power is None:
        allowed = "left out, since the calibration has no power of this device"
        raise ConfigError("what-if", f"power={limit_w:g}W", allowed)
    if limit_w <= power.static_w:
        raise ConfigError(
            "what-if", f"power={limit_w:g}W", f"above {power.static_w:.0f} W, idle"
        )
    return replace(power, limit_w=limit_w)


def facts(target: Target) -> report.Facts:
    """Return the memory of the step, and what rates are derived from."""
    case, workload = target.case, target.workload
    if case is None:
        return report.Facts(
            name=target.name, device=target.device_name, num_ranks=workload.world_size
        )
    each = per_token(case)
    base = DType.FP32 if case.precision is Precision.FP32 else DType.BF16
    return report.Facts(
        name=target.name,
        device=target.device_name,
        num_ranks=case.num_ranks,
        tokens=case.tokens_per_step * case.micro_steps,
        flops_per_token=each.causal,
        executed_per_token=each.hfu,
        peak_flops_per_s=target.device.peak(base) if target.device else None,
        mbs=case.mbs,
        seq_len=case.model.seq_len,
        calibration=target.parts.run if target.parts else "",
        memory=_memory(case, target),
    )


def _memory(case: TrainCase, target: Target) -> StepMemory | None:
    """Return the predicted memory; None on a CPU, where torch does not count it."""
    if case.device != "cuda":
        return None
    device_bytes = target.device.hbm_bytes if target.device else None
    if target.parts and target.parts.memory_bytes:
        device_bytes = target.parts.memory_bytes
    measured = target.parts.memory if target.parts else ()
    allocated, reserved = memory.calibrated(case, stage_of_case, measured)
    verdict, fitting = "unknown", ""
    if device_bytes is not None:
        verdict = memory.verdict(case, allocated, reserved, device_bytes)
        if verdict == "runs out of memory":
            fitting = train_plan.what_fits(case, device_bytes, measured)
    return StepMemory(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device_bytes,
        verdict=verdict,
        fitting=fitting,
    )
