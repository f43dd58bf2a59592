"""stepmark calibrate: measure the parts from which a training step is predicted.

They are ordinary cases of an ordinary run:

kernels  the step with few layers, steady and long enough for the power limit to act, and then
         a profile with pauses, in which kernels run at full clock
host     all layers with small widths and few tokens: the host is the step, phase by phase
comm     the messages of the step
power    products, attention and copies at full and at half load, on a GPU
"""

import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from stepmark.cases.case import Label, OpCase, Rate
from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow, Entry, How, OpHow, Plan, Profile, TrainHow, entries
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Recompute
from stepmark.collectives import comm_plan, comm_workload
from stepmark.collectives.comm_options import CommOptions
from stepmark.collectives.comm_remarks import comm_lines
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, NothingToMeasureError
from stepmark.ground.options import build, plain
from stepmark.ground.stats import slowest_per_sample
from stepmark.ground.units import GIB, format_time
from stepmark.measuring import delivery
from stepmark.measuring.machine import Machine
from stepmark.measuring.measure import measure_or_list
from stepmark.model.ops import FAMILY_OF, Attention, Copy, Gemm, Op
from stepmark.model.ops.backends import BACKENDS, unsupported
from stepmark.operators import op_plan
from stepmark.predictions.costs import times_by_work
from stepmark.predictions.hosts import HOST
from stepmark.step_memory import memory
from stepmark.store.view import View, console, median_s, view
from stepmark.tables.row_tables import LEAD
from stepmark.timeline.ledger import Work
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.trace_files import map_traces, recorded_traces
from stepmark.traces.trace_options import KernelsOptions
from stepmark.training import framework_options, train_plan
from stepmark.training.train_options import CalibrateOptions, TrainOptions, options_of
from stepmark.workloads.models import factor, read_models
from stepmark.workloads.rules.pytorch.case import of_case

# Roles of the training cases and of the operators.
KERNELS = "kernels"
POWER = "power"
_FEWEST_LAYERS = 2
# The head draws more power than blocks and slows them, messages draw less: of several GPUs the
# mixture is nearer to the whole step's with more layers (docs/diary).
_LAYERS_OF_RANKS = 8
_SMALL_WIDTH = 256
_FEW_TOKENS = 64
_STEPS = 20
STEADY_S = 2.0
# operators end by themselves after some 35 s
_MODEL_S = 90.0
COMM_S = 50.0
_IDLE_BYTES = 4096  # so few that the device is as good as idle, at full clock
_PRODUCT = Gemm(m=8192, n=8192, k=8192, dtype=DType.BF16)
_ATTENTION = Attention(
    batch=4,
    seq_q=4096,
    seq_kv=4096,
    heads=32,
    kv_heads=32,
    head_dim_qk=128,
    head_dim_v=128,
)
# Those at full load follow each other: each finds the device warm and needs no soak.
_LOADS: tuple[tuple[Rate, tuple[Op, ...]], ...] = (
    (Rate.SUSTAINED, (_PRODUCT, _ATTENTION, Copy(num_bytes=GIB))),
    (Rate.HALF, (_PRODUCT, _ATTENTION, Copy(num_bytes=_IDLE_BYTES))),
)


def run(options: CalibrateOptions) -> int:
    """Plan, then measure or list. Returns the exit code."""
    return measure_or_list(lambda machine: plan(options, machine), options)


def plan(options: CalibrateOptions, machine: Machine) -> Plan:
    """Plan the parts of one training step. Raises ConfigError."""
    job = framework_options.with_file(TrainOptions(**vars(options)), machine)
    with job.naming_keys():
        nproc = train_plan.default_nproc(job.options, machine.device)
        world_size = machine.num_ranks(job.options.nproc, nproc)
        case = train_plan.only_case(job.options, machine.device, world_size)
    parts, notes = calibration_cases(case, machine)
    budget_s = options.budget
    timeout_s = options.timeout or 600.0
    is_compiled = case.compile is not CompileScope.NONE
    model_s = budget_s / 2 if budget_s else None if is_compiled else _MODEL_S
    return Plan(
        command="calibrate",
        argv=tuple(sys.argv[1:]),
        options=plain(options),
        device=machine.device,
        world_size=case.num_ranks,
        how=How(
            op=OpHow(budget_s=budget_s and budget_s / 4, timeout_s=timeout_s),
            comm=CommHow(budget_s=budget_s / 4 if budget_s else COMM_S),
            train=TrainHow(
                steps=_STEPS,
                steady_s=STEADY_S,
                budget_s=model_s,
                timeout_s=timeout_s,
                profile_ranks=(0,) if case.device == "cpu" else tuple(range(case.num_ranks)),
                compile_fallback=options.compile_fallback,
            ),
        ),
        entries=parts,
        notes=(*job.notes, *notes, *case.model.unmodelled),
    )


def calibration_cases(
    case: TrainCase, machine: Machine
) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Return the parts of a training step in the order of their measurement, and notes."""
    kernels = _with_few_layers(case, machine)
    host = _with_small_widths(case)
    if kernels.case_id == host.case_id:
        training = [replace(kernels, labels=(*kernels.labels, *host.labels))]
    else:
        training = [kernels, host]
    messages, notes = _messages(case)
    powers = _powers(case.num_ranks, machine) if case.device == "cuda" else []
    first, *rest = entries([*training, *messages, *powers])
    return (replace(first, profile=Profile.PAUSED), *rest), notes


def _planned(options: TrainOptions, case: TrainCase, role: str) -> TrainCase:
    """Return the case of other options, which plan the device and ranks of `case`."""
    (planned,) = train_plan.cases(options, case.device, case.num_ranks)
    return replace(planned, labels=(Label(role=role),))


def _with_few_layers(case: TrainCase, machine: Machine) -> TrainCase:
    """Return the case with as few layers as have everything that its layers do.

    Of several GPUs without a pipeline it has more, where they fit.
    """
    grouped = case.blocks_per_group * case.parallel.pp
    kinds = case.recompute_blocks[1] if case.recompute is Recompute.BLOCKS else 1
    least = max(_FEWEST_LAYERS, case.num_stages, grouped, kinds)
    # Of a shallow step half the layers: a prediction from the step itself would tell nothing.
    more = min(_LAYERS_OF_RANKS, case.model.num_layers // 2) // least * least
    fewest, most = (
        _planned(
            replace(options_of(case), num_layers=min(case.model.num_layers, count)),
            case,
            KERNELS,
        )
        for count in (least, max(least, more))
    )
    if case.num_ranks == 1 or case.parallel.pp > 1 or not machine.memory_bytes:
        return fewest
    sizes = memory.calibrated(most)
    fits = memory.verdict(most, *sizes, machine.memory_bytes) == memory.FITS
    return most if fits else fewest


def _with_small_widths(case: TrainCase) -> TrainCase:
    """Return the case with all layers, but few tokens and widths that its ranks can divide."""
    options = replace(options_of(case), mbs=None)  # the smallest
    width = case.model.hidden_size
    while width > _SMALL_WIDTH:
        scale = str(factor(options.scale or "1") / 2)
        (model,) = read_models(options.model_names[0], scale, case.parallel.tp)
        if model.hidden_size >= width:
            break
        options = replace(options, scale=scale)
        width = model.hidden_size
    seq_len = min(_FEW_TOKENS, case.model.seq_len)
    while True:
        try:
            return _planned(replace(options, seq_len=seq_len), case, HOST)
        except ConfigError:  # no multiple of what divides a sequence
            if seq_len >= case.model.seq_len:
                raise
            seq_len = min(2 * seq_len, case.model.seq_len)


def _messages(case: TrainCase) -> tuple[list[CommCase], tuple[str, ...]]:
    """Return the distinct collectives of a step, and why some are left out."""
    if case.num_ranks == 1:
        return [], ()
    base = comm_plan.shared(CommOptions(), case.device, case.num_ranks, case.num_ranks)
    try:
        originals = comm_workload.labelled(of_case(case))
        cases, notes = comm_workload.placed(originals, base)
    except ConfigError as error:
        return [], (f"the collectives of the step are left out: {error}",)
    except NothingToMeasureError as error:
        return [], error.reasons
    return cases, tuple(notes)


def _powers(num_ranks: int, machine: Machine) -> list[OpCase]:
    """Return what draws most, least and between, each by the backend that runs here."""
    limits = op_plan.capabilities(machine)
    cases = []
    for rate, op in ((rate, op) for rate, ops in _LOADS for op in ops):
        family = FAMILY_OF[type(op)]
        # cuDNN's attention, if there is one: the fastest.
        names = sorted(BACKENDS[family], key=lambda name: name != "cudnn")
        backends = [name for name in names if unsupported(family, name, op, limits) is None]
        case = OpCase(
            op=op,
            backend=(backends or names)[0],
            device="cuda",
            num_ranks=num_ranks,
            rate=rate,
            labels=(Label(role=POWER),),
        )
        cases.append(case)
    return cases


def show(path: Path, values: Mapping[str, object], code: int) -> int:
    """Show a line per part, write the files of --json and --csv. Returns the exit code."""
    options = build(CalibrateOptions, values)
    measured = view(path)
    rows = [*measured.train_rows, *measured.comm_rows, *measured.rows]
    delivery.write_rows(rows, options, by="family")
    if not options.to_stdout:
        for line in _lines(measured, path):
            console().print(line, markup=False, highlight=False, soft_wrap=True)
    return delivery.finish(measured, path, code)


def _lines(run: View, path: Path) -> Iterator[str]:
    records = [record for record in run.records if isinstance(record, Measured)]
    for record in records:
        roles = {label.role for label in record.case.labels}
        if record.training and KERNELS in roles:
            yield f"{'kernels':<{LEAD}}{_kernel_text(record, path)}"
        if record.training and HOST in roles:
            yield f"{'host':<{LEAD}}{_host_text(record)}"
    yield from comm_lines(run.comm_rows, run.run.environment.devices)
    of_ops: dict[Op, list[str]] = {}
    for record in records:
        if isinstance(record.case, OpCase):
            watts = [t.mean_power_w for t in record.telemetry if t.mean_power_w is not None]
            power = f"{statistics.mean(watts):.0f} W" if watts else "unknown power"
            text = f"{record.case.rate} {format_time(median_s(record))} at {power}"
            of_ops.setdefault(record.case.op, []).append(text)
    for op, texts in of_ops.items():
        yield f"{'power':<{LEAD}}{FAMILY_OF[type(op)]} {op.shape_text}: {'; '.join(texts)}"


def _kernel_text(record: Measured, run: Path) -> str:
    assert record.training is not None
    step = format_time(median_s(record) * record.training.cycle)
    text = f"{record.train.model.num_layers} layers, steady step {step}"
    try:
        times = kernel_times(record, run)
    except ConfigError as error:
        return f"{text}; the profile cannot be read: {error}"
    named = (f"{work} {format_time(seconds)}" for work, seconds in times.items())
    return f"{text}; profiled: {', '.join(named) or 'no kernel'}"


def kernel_times(record: Measured, run: Path) -> dict[Work, float]:
    """Return seconds per step by kind of work in the traces of a training case.

    The mean over steps, of the rank with most. run: its folder. Raises ConfigError.
    """
    assert record.training is not None
    files = recorded_traces(run, record.training)
    traces = map_traces(KernelsOptions(files=files), _by_work, shares=False) if files else None
    ranks = [result.value for result in traces.results] if traces else []
    times = max(ranks, key=lambda times: sum(times.values()), default={})
    return {work: times[work] for work in Work if work in times}


def _by_work(trace: RankTrace) -> dict[Work, float]:
    return times_by_work(measured_ops(trace, lambda _step: True, None))


def _host_text(record: Measured) -> str:
    training = record.training
    assert training is not None
    phases = {
        "forward": training.fwd_s,
        "backward": training.bwd_s,
        "optimizer": training.optim_s,
        "step": record.samples.seconds,
    }
    text = ", ".join(
        f"{name} {format_time(statistics.median(slowest_per_sample(seconds)) * training.cycle)}"
        for name, seconds in phases.items()
        if seconds
    )
    case = record.train
    return f"{case.model.num_layers} layers, {case.tokens_per_step} tokens, medians: {text}"
