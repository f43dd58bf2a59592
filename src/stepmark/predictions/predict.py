"""stepmark predict: the step of a case or of a workload file, from measured parts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from stepmark.cases.comm_curve import Curve
from stepmark.cases.flops import per_token
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import techniques
from stepmark.cases.training import Fp8, Precision
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.units import format_time
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import write_files
from stepmark.model.collectives import Collective
from stepmark.model.device import DeviceSpec
from stepmark.model.ops import Phase
from stepmark.predictions import prediction as report
from stepmark.predictions.comm import CommCosts, latency_s
from stepmark.predictions.costs import RooflineCosts, file_cost, first_of
from stepmark.predictions.predict_options import PredictOptions, show_what_if
from stepmark.predictions.predict_target import Target, target_of
from stepmark.predictions.prediction_page import page
from stepmark.predictions.step import predict_step
from stepmark.step.roofline import roofline_time
from stepmark.step.tree import stage_of_case
from stepmark.step.workload import CommOp, ComputeOp, Group, Kernel
from stepmark.step.workload_stages import missing_pipeline
from stepmark.step_memory import memory
from stepmark.store.view import print_text
from stepmark.tables.export import write_json
from stepmark.timeline import step_timeline
from stepmark.timeline.ledger import Group as LedgerGroup
from stepmark.timeline.ledger import Idle, Work
from stepmark.timeline.prediction import StepMemory, StepPrediction
from stepmark.timeline.step_cost import Costs, OpCost, PowerModel, Source, known_time
from stepmark.training import train_plan
from stepmark.workloads import file_times
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.workload_files import read_notes

# Between kernels that are launched already, without a profiler: measured on an H200
# (docs/LOG.md). It stands in where no calibration has it.
_GAP_S = 1.2e-6
_IN_HOST = 8  # GPUs
_AT_LEAST = ", and the step takes at least as long"
_NOTABLE_ERROR = 0.1  # of the calibrated step, by its own parts


def run(options: PredictOptions) -> int:
    """Predict, print, write files. Returns the exit code."""
    options.check_stdout()
    about, prediction, notes = predicted(options)
    document = report.document(about, prediction, notes)
    write_files(options, "prediction", document, report.rows(prediction))
    if options.timeline:
        spans = prediction.timeline.spans()
        write_json(step_timeline.perfetto(spans), options.timeline, "timeline", "timeline")
    if options.html:
        write_text(options.html, page(document, prediction).html(), "html")
    if not options.to_stdout:
        print_text(report.lines(document, prediction))
    return 0


def predicted(options: PredictOptions) -> tuple[report.Facts, StepPrediction, list[str]]:
    """Return what is predicted, the prediction, and notes on it. Raises ConfigError."""
    with Waiting("reading the parts of the step"):
        target, notes = target_of(options)
    changes = dict(options.what_if or ())
    about = facts(target)
    if options.what_if:
        peak = about.peak_flops_per_s
        about = replace(
            about,
            device=f"{about.device} with {show_what_if(options.what_if)}",
            peak_flops_per_s=peak and peak * changes.get("flops", 1.0),
        )
    with Waiting(f"predicting a step of {target.name}"):
        prediction, more = predict(target, changes)
    notes = [*more, *notes, *calibration_notes(target), *_effects(target, changes, prediction)]
    return about, prediction, notes


def predict(target: Target, changes: dict[str, float]) -> tuple[StepPrediction, list[str]]:
    """Return the prediction of a step and what to say about it. Raises ConfigError."""
    is_of_file = target.times_of_file
    gaps = [] if target.case else list(file_times.gaps(target.workload))
    of_file = target.workload.notes if is_of_file else read_notes(target.workload)
    notes = [*gaps, *(f"of the file: {note}" for note in of_file)]
    notes += target.parts.notes if target.parts else ()
    costs, comm, unknown = _costs(target, changes)
    power = target.parts.power if target.parts and not is_of_file else None
    power = _changed_power(power, changes)
    prediction = predict_step(target.workload, costs, power)
    if unknown:
        if not any(prediction.sources.values()):
            allowed = f"one whose computation has known costs, which {_first_few(unknown)} lack"
            raise ConfigError("workload", target.name, f"{allowed} ({_remedy(target)})")
        notes += _unknown_notes(unknown)
    if power and prediction.power_w and prediction.power_w > 1.001 * power.limit_w:
        allowed = f"above {prediction.power_w:.0f} W, which the step draws at the lowest clock"
        raise ConfigError("what-if", f"power={power.limit_w:g}W", allowed)
    notes += report.source_notes(prediction.sources, comm.sources, target.device_name)
    if is_of_file:
        notes += file_times.notes(target.workload)
    else:
        notes += _contention_notes(target, costs, prediction)
    most, num_ranks = _link_domain(target), target.workload.world_size
    has_excess = file_times.has_excess(target.workload)
    spans_hosts = bool(comm.of_one_host) or (not is_of_file and _spans_more(target, most))
    if spans_hosts:
        text = f"links between hosts are not modelled: {num_ranks} GPUs communicate as {most}"
        notes.append(f"{text} of one host do{'' if has_excess else _AT_LEAST}")
    if Source.FILE not in prediction.sources and file_times.any_in(target.workload):
        notes.append("the workload file's own times are not used")
    measured_on = target.workload.settings.get("devices")
    if Source.FILE in prediction.sources and not is_of_file and measured_on:
        notes.append(f"the workload file's own times are those of {measured_on}")
    if target.case and target.case.fp8 != Fp8.NONE:
        notes.append("MFU and HFU are of the bf16 peak, not of the FP8 peak")
        if Source.ROOFLINE in prediction.sources:
            notes.append("casts to FP8 take no time by the data sheet: the step takes longer")
    if not _host_is_known(target):
        notes.append("the host's time is not known: it counts as ahead of the device")
    is_on_gpu = target.case is None or target.case.device == "cuda"
    if power is None and is_on_gpu and not is_of_file:
        notes.append("power was not calibrated: the clock counts as not limited by power")
    is_lower_bound = bool(unknown or gaps or spans_hosts) and not has_excess
    return replace(prediction, is_lower_bound=is_lower_bound), notes


def _first_few(names: Collection[str]) -> str:
    return ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "")


def _remedy(target: Target) -> str:
    """Return what gives the computation of the file a cost."""
    if target.workload.rules != "simai":
        return "workload convert --compute-from"
    return (
        "its rows have no shapes: predict the workload that the text is made from, or make the "
        "text with times, as by workload generate --compute-from and an AIOB profile"
    )


def _unknown_notes(unknown: Mapping[str, bool]) -> Iterator[str]:
    """Yield the operations without a time, and those without one in some of their passes."""
    untimed = [name for name, is_untimed in unknown.items() if is_untimed]
    partly = [name for name, is_untimed in unknown.items() if not is_untimed]
    if untimed:
        names = _first_few(untimed)
        yield f"{len(untimed)} operations have no known cost and take no time: {names}"
    if partly:
        names = _first_few(partly)
        yield f"{len(partly)} operations have a known cost in some passes only: {names}"


def calibration_notes(target: Target) -> Iterator[str]:
    """Yield how far the prediction of the calibrated step is from its time, where it is far."""
    if not (target.case and target.parts and target.parts.step):
        return
    (own, step_s), whole_s = target.parts.step, target.parts.host_s
    share = own.model.num_layers / target.case.model.num_layers

    def host_s(op: ComputeOp | CommOp) -> float:
        # The optimizer has as many operations for all layers as for a few.
        return whole_s(op) * (share if op.phase is Phase.OPTIM else 1.0)

    parts = replace(target.parts, host_s=host_s)
    calibrated = replace(target, case=own, workload=of_case(own), parts=parts)
    predicted_s = predict(calibrated, {})[0].step_s
    error = predicted_s / step_s - 1
    if abs(error) > _NOTABLE_ERROR:
        times = f"took {format_time(step_s)} and is predicted as {format_time(predicted_s)}"
        layers = f"{own.model.num_layers} layers"
        yield f"the calibrated step ({layers}) {times}: expect such an error ({error:+.0%})"


def _host_is_known(target: Target) -> bool:
    if target.times_of_file and file_times.has_host(target.workload):
        return True
    return target.case is not None and target.parts is not None


def _link_domain(target: Target) -> int:
    """Return the most GPUs that the device's links connect."""
    return (target.device.link_domain if target.device else None) or _IN_HOST


def _spans_more(target: Target, most: int) -> bool:
    """Return whether GPUs that are `most` or more apart communicate by costs of fewer."""
    if target.case is not None and target.case.device == "cpu":
        return False
    curves = target.parts.curves if target.parts else ()
    if any(
        curve.num_ranks > most if curve.num_hosts is None else curve.num_hosts > 1
        for curve in curves
    ):
        return False
    workload = target.workload
    groups = {
        workload.groups[op.group]
        for stage in range(len(workload.stages))
        for op in workload.tally(stage)
        if isinstance(op, CommOp)
    }
    return max((group.reach for group in groups), default=0) >= most


def _ranks_per_host(curves: Sequence[Curve], link_domain: int) -> int:
    """Return the ranks of a host where curves were measured over hosts, else the domain."""
    pairs = (Collective.P2P, Collective.P2P_BOTH)
    known = [curve for curve in curves if curve.num_hosts and curve.collective not in pairs]
    if all(curve.num_hosts == 1 for curve in known):
        return link_domain
    return max(curve.num_ranks // (curve.num_hosts or 1) for curve in known)


def _effects(
    target: Target, changes: dict[str, float], prediction: StepPrediction
) -> Iterator[str]:
    """Yield the step without the changes of --what-if, and the changes without effect."""
    if changes:
        before, _ = predict(target, {})
        yield f"without --what-if the step takes {before.step_s * 1e3:.2f} ms"
    for name in changes:
        others = {other: value for other, value in changes.items() if other != name}
        if predict(target, others)[0].step_s == prediction.step_s:
            yield f"--what-if {name} has no effect on this step"
    if "power" in changes and prediction.slowdown == 0.0 and prediction.clock_hz:
        clock = f"{prediction.clock_hz / 1e6:.0f} MHz"
        yield f"below the power limit kernels are those of the calibration, at about {clock}"


def _costs(
    target: Target, changes: dict[str, float]
) -> tuple[Costs, CommCosts, dict[str, bool]]:
    """Return all costs; the source of those of collectives; operations of unknown cost.

    The latter by name, with whether the cost is unknown in all their passes.
    """
    parts, is_of_file = target.parts, target.times_of_file
    unknown, timed = dict[str, bool](), set[str]()
    of_file = partial(file_cost, has_rows=target.workload.rules == "simai")
    sources = [*([of_file] if is_of_file else ()), *(parts.compute if parts else ())]
    if target.device is not None:
        sources.append(RooflineCosts(target.device))
    sources.append(of_file)
    host_s = parts.host_s if parts else lambda _op: 0.0
    if is_of_file:
        host_s = file_times.host_times(target.workload)
    first = first_of(sources, host_s)

    @cache
    def compute(op: ComputeOp) -> OpCost:
        cost = first(op)
        if cost is None and op.is_wait:
            return OpCost(time_s={}, num_kernels=0.0)
        name = op.op.name if isinstance(op.op, Kernel) else op.module
        if cost is None:
            unknown[name] = name not in timed
            return OpCost(time_s={}, num_kernels=0.0, source=Source.UNKNOWN)
        timed.add(name)
        if name in unknown:
            unknown[name] = False
        times = {w: t / _factor(op, w, target.device, changes) for w, t in cost.time_s.items()}
        return replace(cost, time_s=times)

    curves = parts.curves if parts else ()
    comm = CommCosts(curves, target.device, _ranks_per_host(curves, _link_domain(target)))
    link = changes.get("link", 1.0)

    def comm_s(op: CommOp, group: Group) -> float:
        own_s = known_time(op) if is_of_file else None
        time_s = comm(op, group) if own_s is None else own_s
        fixed_s = min(time_s, latency_s(op, group))
        return fixed_s + (time_s - fixed_s) / link

    costs = Costs(
        compute=compute,
        comm=comm_s,
        gap_s=_GAP_S if parts is None or parts.gap_s is None else parts.gap_s,
        gap=Idle.HOST if parts and parts.is_host else Idle.LAUNCH_GAP,
        host_comm_s=host_s,
        compute_slowdown=parts.compute_slowdown if parts and not is_of_file else {},
        comm_slowdown=(parts.comm_slowdown if parts and not is_of_file else None) or 1.0,
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
        text = "the contention between computation and communication was not measured"
        yield f"{text} ({', '.join(names)}): where they overlap, both take as long as alone"


def _factor(
    op: ComputeOp, work: Work, device: DeviceSpec | None, changes: dict[str, float]
) -> float:
    """Return how many times as fast the operation is: its roofline's ratio, where known.

    Work of several kinds stays as fast as it is in the file.
    """
    hbm, flops = changes.get("hbm", 1.0), changes.get("flops", 1.0)
    if work is Work.FILE:
        return 1.0
    if work not in (Work.MATMUL, Work.ATTENTION):
        return hbm
    if device is None or device.hbm_bytes_per_s is None:
        return flops
    peaks = {dtype: flops * peak for dtype, peak in device.peak_flops_per_s.items()}
    bandwidth = hbm * device.hbm_bytes_per_s
    changed = replace(device, hbm_bytes_per_s=bandwidth, peak_flops_per_s=peaks)
    before_s, after_s = roofline_time(op.op, device), roofline_time(op.op, changed)
    return before_s / after_s if before_s and after_s else flops


def _changed_power(power: PowerModel | None, changes: dict[str, float]) -> PowerModel | None:
    limit_w = changes.get("power")
    if limit_w is None:
        return power
    if power is None:
        allowed = "it needs a calibration that measured the power of a GPU"
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
            name=target.name,
            device=target.device_name,
            num_ranks=workload.world_size,
            host_is_known=_host_is_known(target),
            pipeline_is_known=not missing_pipeline(workload),
        )
    each = per_token(case)
    base = DType.FP32 if case.precision is Precision.FP32 else DType.BF16
    return report.Facts(
        name=target.name,
        device=target.device_name,
        num_ranks=case.num_ranks,
        tokens=case.tokens_per_step * case.grad_accum,
        flops_per_token=each.causal,
        executed_per_token=each.hfu,
        peak_flops_per_s=target.device.peak(base) if target.device else None,
        mbs=case.mbs,
        seq_len=case.model.seq_len,
        techniques=techniques(case),
        host_is_known=_host_is_known(target),
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
