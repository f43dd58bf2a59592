"""stepmark predict: the step of a case or of a workload file, from measured parts."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.units import format_time
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import write_files
from stepmark.model.ops import Phase
from stepmark.model.systems import IN_HOST
from stepmark.predictions import calibrated_errors, framework_job, prediction_text, sheet_errors
from stepmark.predictions.comm import CommCosts, with_copies
from stepmark.predictions.costs import first_of
from stepmark.predictions.factors import Anchored, Part, part_of
from stepmark.predictions.framework_job import FrameworkJob, Generate, generated
from stepmark.predictions.inputs import Inputs, changed
from stepmark.predictions.interval import Interval
from stepmark.predictions.measured_step import CLOSE, HOST, Figure, MeasuredStep, factor_for
from stepmark.predictions.note import Topic, noted
from stepmark.predictions.plan_columns import Varied
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import FACTORS, PredictOptions, show_what_if
from stepmark.predictions.prediction import Prediction
from stepmark.predictions.prediction_notes import first_few, notes_of
from stepmark.predictions.simulation import simulate
from stepmark.predictions.step import at_clock, fitted_factor, offload_share, total
from stepmark.predictions.training_run import TrainingRun, show_tokens, training_run
from stepmark.step.workload import CommOp, ComputeOp, Group, Operation, Workload
from stepmark.store.view import print_text
from stepmark.tables.export import write_json
from stepmark.timeline.ledger import Idle
from stepmark.timeline.step_cost import Costs, OpCost, Source, known_time
from stepmark.workloads.rules.megatron import deepep
from stepmark.workloads.rules.pytorch.case import of_case

_NOTABLE_ERROR = 0.1  # of the calibrated step, by its own parts


Job = PredictOptions | FrameworkJob


def run(job: Job) -> int:
    """Predict, print, write files. Returns the exit code."""
    prediction = of_job(job)
    job.check_stdout()
    document = prediction.document()
    write_files(job, "prediction", document, document["ledger"])
    if job.timeline:
        events = prediction.step.timeline().perfetto()
        write_json(events, job.timeline, "timeline", "timeline")
    if job.html:
        from stepmark.predictions.prediction_page import page  # noqa: PLC0415 - numpy

        write_text(job.html, page(prediction, document).html(), "html")
    if not job.to_stdout:
        text = prediction_text.lines(
            prediction, document, all_stages=job.stages, all_notes=job.notes
        )
        print_text(text)
    return 0


def of_job(
    job: Job,
    workload: Workload | None = None,
    make: Generate = generated,
    anchored: Anchored | None = None,
) -> Prediction:
    """Return the prediction of a job, of a framework or not. Raises ConfigError.

    workload: the step, if no option names it. make: the workload of a framework's job.
    anchored: factors by its anchors; None: they are fitted.
    """
    if anchored is None and job.anchor:
        anchored = anchored_by(job)
    if not isinstance(job, FrameworkJob):
        return _predicted(job, workload, anchored)
    with Waiting("generating the workload"):
        workload = framework_job.workload_of(job, make)
    prediction = _predicted(framework_job.basis_of(job), workload, anchored)
    more = framework_job.notes_of_job(job, workload.world_size)
    return replace(prediction, notes=(*prediction.notes, *more))


def _predicted(
    options: PredictOptions,
    workload: Workload | None = None,
    anchored: Anchored | None = None,
) -> Prediction:
    """Return what the options ask for. workload: the step, if no option names it.

    Raises ConfigError.
    """
    with Waiting("reading the parts of the step"):
        inputs = with_host_of_step(inputs_of(options, workload))
    if anchored:
        inputs = replace(inputs, factors=anchored.factors)
        anchored = replace(anchored, model_name=inputs.workload.name)
    changes = dict(options.what_if or ())
    if changes and options.measured:
        allowed = "left out with --measured, which is of the device as it is"
        raise ConfigError("what-if", show_what_if(tuple(changes.items())), allowed)
    training = _training_run(options, inputs)
    with Waiting(f"predicting a step of {inputs.name}"):
        prediction = predict(changed(inputs, changes))
    interval, interval_notes = interval_of(prediction, anchored)
    measured = None
    if options.measured:
        measured = _measured(options.measured, inputs, prediction, interval)
    more = (
        *noted(Topic.CALIBRATION, calibration_notes(inputs)),
        *noted(Topic.OPTIONS, _effects(inputs, changes, prediction)),
    )
    return replace(
        prediction,
        interval=interval,
        anchored=anchored,
        notes=(*prediction.notes, *noted(Topic.INTERVAL, interval_notes), *more),
        run=training,
        measured=measured,
    )


def interval_of(
    prediction: Prediction, anchored: Anchored | None = None
) -> tuple[Interval | None, list[str]]:
    """Return the interval by anchors, by calibrated steps or by published ones, and notes.

    Where anchors are few, it is that of the prediction without factors, and has the one with.
    """
    if anchored:
        own = anchored.interval(prediction.step_s)
        if own.is_known:
            return own, []
        inputs = replace(prediction.inputs, factors={})
        plain = predict(inputs) if anchored.factors else prediction
        interval, notes = interval_of(plain)
        if interval is None or not interval.is_known:
            return own, [str(own), *notes]
        interval = interval.reaching(prediction.step_s)
        return replace(interval, num_anchors=len(anchored.rows)), notes
    if prediction.inputs.calibration:
        return calibrated_errors.interval_of(prediction, calibrated_error(prediction.inputs))
    return sheet_errors.interval_of(prediction)


def _training_run(options: PredictOptions, inputs: Inputs) -> TrainingRun | None:
    """Return the run of --tokens. Raises ConfigError."""
    run = training_run(options.tokens, options.price, inputs.device)
    if run and not inputs.tokens:
        allowed = "left out: the workload does not tell the tokens of a step"
        raise ConfigError("tokens", show_tokens(run.tokens), allowed)
    return run


def _measured(
    figure: Figure, inputs: Inputs, prediction: Prediction, interval: Interval | None
) -> MeasuredStep:
    """Return the step of --measured, and what explains its gap. Raises ConfigError."""
    measured_s = figure.step_s(inputs.tokens, inputs.num_ranks, inputs.seq_len)
    is_close = abs(measured_s - prediction.step_s) <= CLOSE * measured_s
    is_part = {"link": prediction.step.comm_s > 0.0, HOST: inputs.host_is_known}
    names = [name for name in (*FACTORS, HOST) if is_part.get(name, True) and not is_close]
    with Waiting("looking for what explains the measured step"):
        factors = {
            name: factor_for(partial(_step_s, inputs, name), measured_s) for name in names
        }
    return MeasuredStep(
        step_s=measured_s,
        predicted_s=prediction.step_s,
        factors=factors,
        interval_s=_bounds(interval),
        notes=(*figure.warnings, *figure.notes),
    )


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or interval.low_s is None or interval.high_s is None:
        return None
    return interval.low_s, interval.high_s


def _step_s(inputs: Inputs, name: str, factor: float) -> float:
    """Return the seconds of the step with a part that is so many times as fast."""
    if name != HOST:
        return predict(changed(inputs, {name: factor})).step_s

    def host_s(op: Operation) -> float:
        return inputs.host_s(op) / factor

    return predict(replace(inputs, host_s=host_s)).step_s


def anchored_by(
    options: Job,
    varied: Varied | None = None,
    key: Callable[[Job], Hashable] | None = None,
) -> Anchored:
    """Return the factors by the anchors that the options name. Raises ConfigError.

    varied: options that each row of a table must state, with the columns that do.
    key: of the options of a row, by which Anchored has its seconds.
    """
    from stepmark.predictions.anchored_steps import (  # noqa: PLC0415 - numpy
        fit_anchors,
        read_anchors,
    )

    with Waiting("reading anchors"):
        rows, notes = read_anchors(options, varied or {})
        steps = [replace(row, inputs=with_host_of_step(row.inputs)) for row in rows]
    with Waiting(f"fitting factors to {len(steps)} measured steps"):
        for each in steps:
            notes += _memory_notes(each.name + each.layout, each.inputs)
        anchored = fit_anchors(
            steps, lambda own: predict(own).step, options.anchor or "", notes
        )
    times_s = {key(each.job): each.measured_s for each in steps if key and each.job}
    return replace(anchored, measured_s=times_s)


def _memory_notes(name: str, inputs: Inputs) -> Iterator[str]:
    """Yield that a measured step does not fit by its prediction."""
    memory = predict(inputs).estimated_memory
    if memory and memory.fits is False:
        size = memory.reserved_bytes or memory.allocated_bytes
        sizes = prediction_text.fit_text(memory.verdict, size, memory.device_bytes)
        yield f"{name} {sizes} by its prediction: check its layout"


def predict(inputs: Inputs) -> Prediction:
    """Return the prediction of a step. Raises ConfigError."""
    workload = inputs.workload
    file = inputs.file
    power = inputs.power
    costs, comm = costs_of(inputs)
    issued = file.issued if file else workload.issued()
    computed = total(issued, costs)
    step = simulate(workload, costs)
    clock = None
    if power:
        rate = computed.product_flops_per_s
        step, clock = at_clock(workload, costs, power, rate, step)
        if clock.power_w > 1.001 * power.limit_w:
            allowed = f"above {clock.power_w:.0f} W, which the step draws at the lowest clock"
            raise ConfigError("what-if", f"power={power.limit_w:g}W", allowed)
    if computed.unknown and not any(computed.sources.values()):
        names = first_few(computed.unknown)
        allowed = f"one whose computation has known costs, which {names} lack"
        raise ConfigError("workload", inputs.name, f"{allowed} ({_remedy(workload)})")
    spans_hosts = not inputs.times_of_file and _reaches_over_hosts(inputs, issued)
    prediction = Prediction(
        inputs=inputs,
        step=step,
        clock=clock,
        sources=computed.sources,
        comm_sources=comm.sources,
        unknown=computed.unknown,
        offload_share=offload_share(issued, costs, workload.groups),
        spans_hosts=spans_hosts,
    )
    return replace(prediction, notes=(*notes_of(prediction), *inputs.notes))


def _remedy(workload: Workload) -> str:
    """Return what gives the computation of the file a cost."""
    if workload.rules != "simai":
        return "workload convert --compute-from"
    return (
        "its rows have no shapes: predict the workload that the text is made from, or make the "
        "text with times, as by workload generate --compute-from and an AIOB profile"
    )


def calibration_notes(inputs: Inputs) -> Iterator[str]:
    """Yield how far the prediction of the calibrated step is from its time, where it is far."""
    if inputs.step is None:
        return
    own, step_s = inputs.step
    error = math.expm1(-calibrated_error(inputs))
    if abs(error) > _NOTABLE_ERROR:
        predicted_s = step_s * (1 + error)
        times = f"took {format_time(step_s)} and is predicted as {format_time(predicted_s)}"
        layers = f"{own.model.num_layers} layers"
        yield f"the calibrated step ({layers}) {times}: expect such an error ({error:+.0%})"


def calibrated_error(inputs: Inputs) -> float:
    """Return the log of the calibrated step's time over its prediction by its own parts."""
    if inputs.case is None or inputs.step is None:
        return 0.0
    own, step_s = inputs.step
    return math.log(step_s / predict(_calibrated(inputs, inputs.case, own)).step_s)


def _calibrated(inputs: Inputs, case: TrainCase, own: TrainCase) -> Inputs:
    """Return the inputs of the calibrated step, by the parts of the step."""
    whole_s = inputs.host_s
    share = own.model.num_layers / case.model.num_layers

    def host_s(op: Operation) -> float:
        # The optimizer has as many operations for all layers as for a few.
        return whole_s(op) * (share if op.phase is Phase.OPTIM else 1.0)

    return replace(inputs, case=own, workload=of_case(own), host_s=host_s)


def with_host_of_step(inputs: Inputs) -> Inputs:
    """Return the inputs of a calibration with the host's time by both parts that it bounds.

    A host is measured in the step of small widths, and in that of few layers where it bounds
    it. On virtual machines its speed changes by a factor of 1.5 to 1.8 for seconds at a time
    (docs/diary), so that these are two draws, and their geometric mean counts. Of several ranks
    the latter also has what they wait for one another, which few layers have more of.
    """
    if inputs.case is None or inputs.step is None or inputs.is_host or inputs.num_ranks > 1:
        return inputs
    own, step_s = inputs.step
    calibrated = _calibrated(inputs, inputs.case, own)
    first = predict(calibrated)
    is_near = abs(first.step_s / step_s - 1) <= _NOTABLE_ERROR
    if is_near and not first.step.is_host_bound:
        return inputs

    def predicted_s(factor: float) -> float:
        return predict(replace(calibrated, host_factor=factor)).step_s

    factor = fitted_factor(predicted_s, step_s)
    return replace(inputs, host_factor=math.sqrt(factor))


def _reaches_over_hosts(inputs: Inputs, issued: Iterable[Operation]) -> bool:
    """Return whether ranks of several hosts communicate by costs of one host."""
    if inputs.is_on_cpu or inputs.network is not None:
        return False
    if any((curve.num_hosts or 0) > 1 or curve.num_ranks > IN_HOST for curve in inputs.curves):
        return False
    groups = {inputs.workload.groups[op.group] for op in issued if isinstance(op, CommOp)}
    return max((group.reach for group in groups), default=0) >= IN_HOST


def _effects(
    inputs: Inputs, changes: Mapping[str, float], prediction: Prediction
) -> Iterator[str]:
    """Yield the step without the changes of --what-if, and the changes without effect."""
    if changes:
        yield f"without --what-if the step takes {predict(inputs).step_s * 1e3:.2f} ms"
    for name in changes:
        others = {other: value for other, value in changes.items() if other != name}
        if predict(changed(inputs, others)).step_s == prediction.step_s:
            yield f"--what-if {name} has no effect on this step"
    clock = prediction.clock
    if "power" in changes and clock and clock.slowdown == 0.0:
        text = "below the power limit kernels are those of the calibration, at about"
        yield f"{text} {clock.clock_hz / 1e6:.0f} MHz"


def costs_of(inputs: Inputs) -> tuple[Costs, CommCosts]:
    """Return all costs, and the source of those of collectives."""
    cost_of = first_of(inputs.compute)
    comm = CommCosts(inputs.curves, inputs.network, inputs.num_ranks)
    copied = with_copies(comm, inputs.comm_copies)
    hop = inputs.workload.groups.get(deepep.IN_HOST)
    if hop is not None and comm.joins_hosts(hop):
        allowed = "at most the GPUs that NVLink joins: this hop of DeepEP stays within them"
        raise ConfigError("moe-deepep-gpus-per-host", hop.size, allowed)
    factors = inputs.factors

    def host_s(op: Operation) -> float:
        return inputs.host_factor * inputs.host_s(op) * factors.get(Part.HOST, 1.0)

    @cache
    def compute(op: ComputeOp) -> OpCost:
        cost = cost_of(op)
        if cost is not None:
            times = {
                work: time_s * factors.get(part_of(work), 1.0)
                for work, time_s in cost.time_s.items()
            }
            return replace(cost, time_s=times, host_s=host_s(op))
        source = Source.RULE if op.is_wait else Source.UNKNOWN
        return OpCost(time_s={}, num_kernels=0.0, source=source)

    def comm_s(op: CommOp, group: Group) -> float:
        is_of_file = inputs.times_of_file and not inputs.sends_by_network
        own_s = known_time(op) if is_of_file else None
        time_s = copied(op, group) if own_s is None else own_s
        fixed_s = min(time_s, comm.latency_s(op, group))
        part = Part.BETWEEN_HOSTS if comm.joins_hosts(group) else Part.IN_HOST
        return (fixed_s + (time_s - fixed_s) / inputs.link) * factors.get(part, 1.0)

    costs = Costs(
        compute=compute,
        comm=comm_s,
        gap_s=inputs.gap_s * factors.get(Part.GAPS, 1.0),
        gap=Idle.HOST if inputs.is_host else Idle.LAUNCH_GAP,
        host_comm_s=host_s,
        compute_slowdown=inputs.compute_slowdown,
        comm_slowdown=inputs.comm_slowdown or 1.0,
        # A send takes few of a device's units. Steps profiled for data sheets have none.
        sends_contend=bool(inputs.calibration),
    )
    return costs, comm
