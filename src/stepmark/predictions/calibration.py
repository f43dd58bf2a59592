"""What a calibration run measured, as inputs of a prediction."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import mean

from stepmark.cases.case import OpCase, Rate
from stepmark.cases.comm_case import CommCase
from stepmark.cases.comm_curve import Curve
from stepmark.cases.fields import differences
from stepmark.cases.record import METHOD_VERSIONS, Measured, Telemetry
from stepmark.cases.train_case import TrainCase
from stepmark.collectives.measured_curves import run_curves
from stepmark.ground.errors import ConfigError
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import MIB, format_time
from stepmark.model.device import find_device
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Attention, Copy, Gemm, Op, Phase
from stepmark.predictions import contention, power, step
from stepmark.predictions.comm import CommCosts, with_copies
from stepmark.predictions.costs import (
    CostOf,
    OperatorCosts,
    ProfiledCosts,
    pass_of,
    sources,
    times_by_work,
)
from stepmark.predictions.host_times import is_issued, pass_times, passes_s
from stepmark.predictions.inputs import HostOf, Inputs, no_host
from stepmark.predictions.note import Note, Topic, noted
from stepmark.step.trace_ops import COMPUTE, OpTable
from stepmark.step.workload import COMPUTE as MAIN
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.store.view import median_s, read_with_warnings
from stepmark.tables.launches import OpLaunches, pooled
from stepmark.timeline.ledger import Idle, Work
from stepmark.timeline.step_cost import Costs, OpCost, PowerModel
from stepmark.timeline.trace_columns import RankInfo, RankTrace
from stepmark.traces.kineto.arrivals import RankParts, rank_parts
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.trace_files import map_traces, recorded_traces
from stepmark.traces.trace_options import KernelsOptions
from stepmark.workloads.rules.pytorch.case import of_case

_MOST_BUSY = 1.1  # of a step, in kernels of compute: no stream has more
_NOTABLE = 0.1  # scaling of computation on a host
_NOTHING = OpCost(time_s={}, num_kernels=0.0)
_PowerRecord = tuple[Measured, float, float]  # with mean clock and power
_LARGE = 256 * MIB  # messages that the energy counter sees
_MOST_SHOWN = 4  # options in which a profile differs
# Fields in which a calibration may differ from the case: costs are scaled. Those of the model
# are in _MODEL_SCALED.
_SCALED: tuple[str, ...] = (
    "mbs",
    "grad_accum",
    "model",
    "parallel",
    "scale",
    "labels",
    "model_file",
    "seed",
    "num_layers",
    "workers",
    "data",
    "lr",
)
_OPTIONS = {"data_parallel": "strategy", "recompute": "ac", "recompute_blocks": "ac"}
_MODEL_SCALED = {
    *("num_layers", "seq_len", "name", "source", "aliases"),
    *("published_params", "published_active_params"),
}


def calibrated(inputs: Inputs, path: Path, *, force: bool = False) -> Inputs:
    """Return the inputs with what the run at `path` measured, in one sitting on one machine.

    Raises ConfigError for a run that has nothing for the case, or that was measured by another
    version of a timing method unless `force`.
    """
    run = read_with_warnings(path)
    case = inputs.case
    records = [record for record in run.latest if isinstance(record, Measured)]
    if not run.info.environment.devices:
        raise ConfigError("calibration", path.name, "a run whose run.json names its device")
    for record in records:
        version = record.samples.method.rpartition("/")[2]
        if version not in map(str, METHOD_VERSIONS[record.case.kind]) and not force:
            allowed = f"measured as this release does, not by {record.samples.method}"
            raise ConfigError("calibration", path.name, f"{allowed}; or --force")
    sustained = (
        record
        for record in records
        if isinstance(record.case, OpCase)
        and record.case.rate is Rate.SUSTAINED
        and not record.num_wrong
        and record.samples.seconds
    )
    times = {each.case.op: each.time_s for each in pooled(sustained, OpLaunches)}
    measured: tuple[CostOf, ...] = (OperatorCosts(times),)
    first = run.info.environment.devices[0]
    shallow = None
    inputs = replace(
        inputs,
        calibration=path.name,
        calibrated_on=date_text(datetime.fromisoformat(run.info.created_at)),
        curves=tuple(run_curves(path)),
    )
    if case is not None:
        steps = [record for record in records if isinstance(record.case, TrainCase)]
        inputs, shallow = _with_profile(inputs, path, steps, case)
        measured = (shallow.costs, *measured)
    device = find_device(first.name)
    return replace(
        inputs,
        device=device,
        device_name=first.name,
        compute=sources(
            device,
            measured,
            inputs.file,
            settings=inputs.workload.settings,
            of_file=inputs.times_of_file,
        ),
        power=None if inputs.times_of_file else _power(records, shallow, inputs.curves),
        memory_bytes=first.memory_bytes,
    )


def date_text(created_at: datetime) -> str:
    """Return a date, and how many days ago it was, if any."""
    return f"{created_at:%Y-%m-%d}{ago(created_at)}"


def ago(created_at: datetime) -> str:
    days = (datetime.now(UTC) - created_at).days
    return f", {days} {'day' if days == 1 else 'days'} ago" if days else ""


def _with_profile(
    inputs: Inputs, path: Path, steps: Sequence[Measured], case: TrainCase
) -> tuple[Inputs, "_Shallow"]:
    """Return the inputs with what steps of few layers tell, and the profiled one."""
    profiled = nearest_profile(steps, case)
    if profiled is None:
        raise ConfigError("calibration", path.name, missing_profile(steps, case))
    notes: list[str] = []
    shallow = _shallow(path, profiled, inputs.curves, notes)
    if shallow.is_host:
        shallow = _slowed(shallow, CommCosts(inputs.curves, None), notes)
    inputs = replace(
        inputs,
        host_s=no_host if shallow.is_host else _host_times(steps, case, notes),
        host_is_known=True,
        gap_s=shallow.gap_s,
        is_host=shallow.is_host,
        compute_slowdown=shallow.compute_slowdown,
        comm_slowdown=shallow.comm_slowdown,
        comm_copies=shallow.comm_copies,
        memory=tuple(_memory(steps, case)),
        step=(replace(profiled.train, labels=()), shallow.step_s),
        notes=(*inputs.notes, *notes),
    )
    return inputs, shallow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shallow:
    """A profiled step of few layers, with the times of its kernels without contention.

    They are of `rank`, for which the others wait longest. comm_copies: as of Inputs.
    times, times_in_blocks: of all and of those of its blocks, with pauses and back to back, by
    kind of work; step_s: unprofiled, back to back, with clock_and_power of its device.
    """

    workload: Workload
    rank: int
    costs: CostOf
    gap_s: float
    compute_slowdown: Mapping[Work, float]
    comm_slowdown: float | None
    comm_copies: Mapping[str, float]
    is_host: bool
    step_s: float
    clock_and_power: tuple[float, float] | None
    times: tuple[dict[Work, float], dict[Work, float]]
    times_in_blocks: tuple[dict[Work, float], dict[Work, float]]

    def machine(self, comm: CommCosts) -> Costs:
        """Return the costs of the step at full clock, without the host's time."""
        return Costs(
            compute=lambda op: self.costs(op) or _NOTHING,
            comm=with_copies(comm, self.comm_copies),
            gap_s=self.gap_s,
            gap=Idle.HOST if self.is_host else Idle.LAUNCH_GAP,
            compute_slowdown=self.compute_slowdown,
            comm_slowdown=self.comm_slowdown or 1.0,
        )


def _shallow(
    path: Path, record: Measured, curves: Iterable[Curve], notes: list[str]
) -> _Shallow:
    """Read a profiled step. Of a GPU the steps in the first half of the trace are back to back,
    those in the second half have pauses, and are at full clock.
    """
    assert record.training is not None
    workload = of_case(record.train)
    files = recorded_traces(path, record.training)
    tables, by_rank = _read(files, workload)
    half = len(next(iter(tables.values())).steps) // 2 if "-paused" in files[0] else 0
    rank = slowest_rank(tables, workload, half or None)
    table = tables[rank]
    if not table.ops:
        raise ConfigError("trace", files[0], "a trace with operations of a step")
    comm_copies = _comm_copies(table, workload)
    # Without computation on streams of these collectives.
    tables = {
        number: replace(own, ops=tuple(op for op in own.ops if op.comm not in comm_copies))
        for number, own in tables.items()
    }
    notes += noted(Topic.CALIBRATION, table.notes)
    step_s = mean(slowest_per_sample(record.samples.seconds)) * record.training.cycle
    compute_ns = sum(op.time_ns for op in tables[rank].ops if op.key.kind == COMPUTE)
    kernels_s = compute_ns * 1e-9 / len(table.steps)
    if not table.is_host and kernels_s > _MOST_BUSY * step_s:
        text = f"{format_time(kernels_s)} of kernels in a step of {format_time(step_s)}"
        raise ConfigError("trace", files[0], f"one of this step, not with {text}")
    if table.is_host:
        tables[rank], gap_s = _unprofiled(table, record)
    else:
        _, parts = by_rank[rank]
        steps = parts.times.steps[: half or None]
        gap_ns = sum(step.idle.kernel_gap_ns for step in steps if step.idle)
        gap_s = gap_ns * 1e-9 / max(1, sum(step.num_events for step in steps))
    halves = [
        {number: _with_steps(own, own.steps[place]) for number, own in tables.items()}
        for place in (slice(half, None), slice(half))
    ]
    fitted = contention.contention(*(own.values() for own in halves))
    full, limited = (fitted.alone(own[rank], group) for group, own in enumerate(halves))
    return _Shallow(
        workload=workload,
        rank=rank,
        costs=ProfiledCosts(workload, full),
        gap_s=gap_s,
        compute_slowdown=fitted.slowdown,
        comm_slowdown=contention.comm_slowdown(by_rank, curves),
        comm_copies=comm_copies,
        is_host=table.is_host,
        step_s=step_s,
        clock_and_power=_clock_and_power(record, rank),
        times=(times_by_work(full), times_by_work(limited)),
        times_in_blocks=(
            times_by_work(full, in_blocks=True),
            times_by_work(limited, in_blocks=True),
        ),
    )


_ByRank = dict[int, tuple[RankInfo, RankParts]]


def _read(files: tuple[str, ...], workload: Workload) -> tuple[dict[int, OpTable], _ByRank]:
    """Return the operations of traces by rank, and what tells how ranks wait for others."""
    traces = map_traces(KernelsOptions(files=files), partial(_reduce, workload), shares=False)
    assert traces is not None
    tables: dict[int, OpTable] = {}
    by_rank: _ByRank = {}
    for info, (table, parts) in ((own.info, own.value) for own in traces.results):
        if damage := [each for each in info.damage if each.kind != "rounded"]:
            raise ConfigError("trace", info.file, f"a whole trace: {damage[0].text}")
        tables[info.rank or 0] = table
        by_rank[info.rank or 0] = info, parts
    return tables, by_rank


def _slowed(shallow: _Shallow, comm: CommCosts, notes: list[str]) -> _Shallow:
    """Return the step on a host, with the costs with which it takes its measured time."""
    costs = shallow.machine(comm)
    factor = step.host_factor(shallow.workload, costs, shallow.step_s)
    if abs(factor - 1) > _NOTABLE:
        times = f"{factor:.2f} of its profiled time"
        notes.append(f"computation takes {times}, as the calibrated step did unprofiled")

    def slowed(op: ComputeOp) -> OpCost | None:
        cost = shallow.costs(op)
        if cost is None:
            return None
        return replace(cost, time_s={work: factor * t for work, t in cost.time_s.items()})

    return replace(shallow, costs=slowed, gap_s=factor * shallow.gap_s)


def slowest_rank(
    tables: Mapping[int, OpTable], workload: Workload, num_steps: int | None = None
) -> int:
    """Return the rank of the first stage whose GPU computes longest in its first num_steps.

    Others wait for it. Who waits least is no such sign: waiting has the host's pace as well.
    """
    compute_ns = {
        rank: sum(
            op.time_ns
            for op in own.ops
            if op.key.kind == COMPUTE and not op.comm and op.step in own.steps[:num_steps]
        )
        for rank, own in tables.items()
        if not workload.stage_of(rank)
    }
    return max(compute_ns, key=compute_ns.__getitem__, default=min(tables))


def _comm_copies(table: OpTable, workload: Workload) -> dict[str, float]:
    """Return the seconds of copies on streams of collectives per byte of their messages."""
    num_bytes = Counter[str]()
    for op in workload.expand():
        if isinstance(op, CommOp) and op.stream != MAIN:
            num_bytes[op.collective] += op.message_bytes(workload.groups[op.group])
    times_ns = Counter[str]()
    for measured in table.ops:
        times_ns[measured.comm] += measured.time_ns
    return {
        name: times_ns[name] * 1e-9 / (total * len(table.steps))
        for name, total in num_bytes.items()
        if times_ns[name] and total
    }


def _with_steps(table: OpTable, steps: tuple[int, ...]) -> OpTable:
    ops = tuple(op for op in table.ops if op.step in steps)
    return replace(table, steps=steps, ops=ops)


def _reduce(workload: Workload, trace: RankTrace) -> tuple[OpTable, RankParts]:
    return measured_ops(trace, workload=workload), rank_parts(trace, lambda _number: True)


def _unprofiled(table: OpTable, record: Measured) -> tuple[OpTable, float]:
    """Return times of at most the unprofiled phases, and the time between operations."""
    # In a pipeline a pass also waits for other stages: how much of it is between operations is
    # not known, and all of it counts as slower compute.
    is_pipeline = record.train.parallel.pp > 1
    num_steps = len(table.steps)
    rest_s = 0.0
    kernels = 0
    factors = dict[str, float]()
    for name, pass_s in passes_s(record).items():
        own = [op for op in table.ops if pass_of(op.key.phase) == name]
        total_s = sum(op.time_ns for op in own) * 1e-9 / num_steps
        factors[name] = min(1.0, pass_s / total_s) if total_s else 1.0
        rest_s += 0.0 if is_pipeline else max(0.0, pass_s - total_s)
        kernels += sum(op.kernels for op in own)
    ops = tuple(
        replace(op, time_ns=round(op.time_ns * factors.get(pass_of(op.key.phase), 1.0)))
        for op in table.ops
    )
    return replace(table, ops=ops), rest_s * num_steps / max(1, kernels)


def _unscaled(model: ModelConfig) -> dict[str, object]:
    """Return what a model shares with its scaled forms: name, layers, and kinds of modules.

    The host launches the same operations for any widths.
    """
    moe = model.moe and (
        *(model.moe.num_experts, model.moe.top_k, model.moe.num_shared_experts),
        *(model.moe.first_dense_layers, model.moe.router_bias),
        *(model.moe.shared_gate, model.moe.latent_size > 0),
    )
    kinds = [(layer.mixer, layer.ffn, layer.has_rope) for layer in model.pattern]
    return {
        "kinds": (kinds, model.norm_placement, model.is_parallel, model.num_mtp_layers),
        "name": model.name.partition("@")[0],
        "num_layers": model.num_layers,
        "activation": model.activation,
        "norm": model.norm,
        "tied_embeddings": model.tied_embeddings,
        "biases": (model.qkv_bias, model.attention_bias, model.linear_bias),
        "qk_norm": model.qk_norm,
        "has_positions": bool(model.max_positions),
        "moe": moe,
        "mla": model.mla and model.mla.q_lora_rank is not None,
    }


def host_of_run(path: Path, case: TrainCase) -> HostOf:
    """Return the host's time for an operation of a case, as a run of its host's part has it.

    Raises ConfigError for a run without this part of such a step.
    """
    records = [each for each in read_with_warnings(path).latest if isinstance(each, Measured)]
    steps = [record for record in records if isinstance(record.case, TrainCase)]
    record = _host_record(steps, case)
    if record is None:
        part = f"the host's part of {case.model.name} {case.strategy}"
        raise ConfigError(
            "host", path.name, f"a run with {part}; stepmark calibrate measures it"
        )
    return _per_operation(record)


def _host_record(steps: Iterable[Measured], case: TrainCase) -> Measured | None:
    """Return the step of tiny widths that is nearest to the case; None: there is none."""

    def is_like_it(record: Measured) -> bool:
        own = record.train
        facts = record.training
        wide = replace(own, model=case.model, mbs=case.mbs, parallel=case.parallel)
        is_same = _unscaled(own.model) == _unscaled(case.model)
        return bool(own.scale and is_same and facts and facts.fwd_s) and is_like(wide, case)

    def distance(record: Measured) -> tuple[bool, int]:
        # The step itself may be among them: it has more tokens.
        return record.train.grad_accum != case.grad_accum, record.train.tokens_per_step

    return min(filter(is_like_it, steps), key=distance, default=None)


def _per_operation(record: Measured) -> HostOf:
    """Return the host's time for an operation, by pass."""
    per_op = {each.name: each.per_operation_s for each in pass_times(record)}
    return lambda op: per_op.get(pass_of(op.phase), 0.0) if is_issued(op) else 0.0


def _host_times(steps: Iterable[Measured], case: TrainCase, notes: list[str]) -> HostOf:
    """Return the host's time for an operation; none where it was not calibrated."""
    record = _host_record(steps, case)
    if record is None:
        text = "the host's time was not calibrated: it counts as ahead of the device"
        notes.append(Note.of(Topic.HOST, text))
        return no_host
    return _per_operation(record)


def _memory(steps: Iterable[Measured], case: TrainCase) -> Iterator[tuple[TrainCase, int, int]]:
    for record in steps:
        facts = record.training
        if not facts or not is_like(record.train, case):
            continue
        allocated = max((b for b in facts.allocated_bytes if b), default=0)
        reserved = max((b for b in facts.reserved_bytes if b), default=0)
        if allocated and reserved:
            yield record.train, allocated, reserved


def _power(
    records: Sequence[Measured], shallow: _Shallow | None, curves: Iterable[Curve]
) -> PowerModel | None:
    """Return the power model, where all its operators were measured with their energy."""
    readings: dict[tuple[type[Op], Rate], _PowerRecord] = {}
    rank = shallow.rank if shallow else 0
    for record in records:
        op = record.case.op if isinstance(record.case, OpCase) else None
        is_backward = isinstance(op, Attention) and op.phase is not Phase.FWD
        if op and not is_backward and (clock_and_power := _clock_and_power(record, rank)):
            key = type(op), record.operator.rate
            if key not in readings or median_s(readings[key][0]) < median_s(record):
                readings[key] = record, *clock_and_power
    needed = itertools.product((Gemm, Attention, Copy), (Rate.HALF, Rate.SUSTAINED))
    if any(key not in readings for key in needed):
        return None
    product, attention = (
        _reading(readings[op, Rate.HALF], readings[op, Rate.SUSTAINED])
        for op in (Gemm, Attention)
    )
    model = power.fit(
        product,
        attention,
        copy_w=readings[Copy, Rate.SUSTAINED][2],
        idle_w=readings[Copy, Rate.HALF][2],
        product_flops=readings[Gemm, Rate.SUSTAINED][0].operator.op.flops,
    )
    model = replace(model, comm_w=_comm_w(records, rank, model.static_w))
    if shallow is None or shallow.is_host:
        return model
    model = power.with_sensitivities(model, *shallow.times)
    if clock_and_power := shallow.clock_and_power:
        calibrated = shallow.workload, shallow.machine(CommCosts(curves, None))
        if any(isinstance(op, CommOp) for op in shallow.workload.expand()):
            measured_x = power.slowdown_between(model, *shallow.times)
            model = step.anchored_power(model, *calibrated, clock_and_power[0], measured_x)
        else:
            model = step.fitted_power(model, *calibrated, shallow.step_s, *clock_and_power)
    # Products of a whole step are those of its blocks, not of the head as in a shallow one.
    return power.with_sensitivities(model, *shallow.times_in_blocks)


def _comm_w(records: Iterable[Measured], rank: int, static_w: float) -> float:
    """Return the power of large messages above idle; 0 where none was measured."""
    watts = [
        reading[1] - static_w
        for record in records
        if isinstance(record.case, CommCase)
        and record.case.message_bytes >= _LARGE
        and (reading := _clock_and_power(record, rank))
    ]
    return max(0.0, mean(watts)) if watts else 0.0


def _reading(half: _PowerRecord, sustained: _PowerRecord) -> power.Reading:
    (record, full_clock_hz, part_w), samples = half, half[0].samples
    span_s = samples.wall_s - samples.soak_s
    busy_s = sum(samples.seconds[0]) * samples.calls_per_sample
    return power.Reading(
        full_clock_s=median_s(record),
        full_clock_hz=full_clock_hz,
        duty=min(1.0, busy_s / span_s),
        part_w=part_w,
        sustained_s=median_s(sustained[0]),
        sustained_w=sustained[2],
    )


def _clock_and_power(record: Measured, rank: int) -> tuple[float, float] | None:
    """Return the means of a rank's device; None where it has no clock or energy counter."""
    state = record.telemetry[rank] if rank < len(record.telemetry) else Telemetry()
    clock_hz = state.clock_hz
    watts = state.mean_power_w
    return (clock_hz, watts) if clock_hz and watts and state.energy_j else None


def is_like(measured: TrainCase, case: TrainCase) -> bool:
    """Return whether costs of the measured case are those of this case, or scale to them."""
    return not _differences(measured, case)


def _differences(measured: TrainCase, case: TrainCase) -> list[str]:
    """Return the options in which costs of the measured case are not those of this case."""
    model = case.model.with_layers(measured.model.num_layers)
    pairs = (
        (case, measured, set(differences(case, measured)).difference(_SCALED)),
        (case.parallel, measured.parallel, ("tp", "cp", "ep")),
        (model, measured.model, {f.name for f in fields(model)} - _MODEL_SCALED),
    )
    different = [
        "model" if own is model else _OPTIONS.get(name, name)
        for own, other, names in pairs
        for name in sorted(names)
        if getattr(own, name) != getattr(other, name)
    ]
    return list(dict.fromkeys(different))


def _distance(measured: TrainCase, case: TrainCase) -> tuple[bool, bool, bool, int]:
    """Return how far the measured case is from the case; the smallest is the best."""
    return (
        measured.model.seq_len != case.model.seq_len,
        measured.mbs != case.mbs,
        measured.parallel != case.parallel,
        measured.model.num_layers,
    )


def missing_profile(steps: Iterable[Measured], case: TrainCase) -> str:
    """Return the rule that a run breaks in which no profiled step is like the case."""
    allowed = f"a run with a profile of {case.model.name} {case.strategy}"
    profiled = [record.train for record in steps if record.training and record.training.traces]
    if profiled:
        best = min((_differences(other, case) for other in profiled), key=len)
        shown = [*best[:_MOST_SHOWN], "..."] if len(best) > _MOST_SHOWN else best
        allowed += f" (its profile differs in {', '.join(shown)})"
    return f"{allowed}; stepmark calibrate measures one"


def nearest_profile(steps: Iterable[Measured], case: TrainCase) -> Measured | None:
    """Return the profiled step whose costs are used for the case; None: there is none."""
    candidates = [
        record
        for record in steps
        if record.training and record.training.traces and is_like(record.train, case)
    ]
    return min(candidates, key=lambda record: _distance(record.train, case), default=None)
