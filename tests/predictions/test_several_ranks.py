"""Steps of several ranks, and that of a host that bounds it, by measured parts."""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.cases.training import DataParallel
from stepmark.cli.main import status
from stepmark.predictions.calibration import host_of_run, slowest_rank
from stepmark.predictions.host_times import passes_s
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.power import mean_power_w, slowdown_of
from stepmark.predictions.predict import calibrated_error, predict, with_host_of_step
from stepmark.predictions.predict_inputs import of_training
from stepmark.predictions.prediction import Prediction
from stepmark.step.trace_ops import COMPUTE, OpTable
from stepmark.step.workload import CommOp
from stepmark.store import plans
from stepmark.store.view import read_with_warnings
from stepmark.timeline.ledger import Group, Work
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.trace_files import map_traces
from stepmark.traces.trace_options import KernelsOptions
from stepmark.workloads.rules.pytorch.case import of_case

RESULTS = Path(__file__).parents[2] / "results"
FOUR = RESULTS / "h100-x4-predictions-1"
MEASURED_S = {"llama-3.1-8b": 0.8496, "llama-3.1-70b-proxy": 0.4427}


def inputs_of(run: Path, model: str, mbs: int | None = None) -> Inputs:
    plan = plans.read(run)
    (case,) = {
        entry.case
        for entry in plan.entries
        if plan.is_predicted(entry)
        and entry.case.model.name == model
        and (mbs is None or (entry.case.mbs, entry.case.grad_accum) == (mbs, 1))
        and str(entry.case.precision) == "amp"
        and str(entry.case.recompute) == "none"
    }
    return of_training(case, run)


def traces_of(model: str) -> list[Path]:
    records = [r for r in read_with_warnings(FOUR).latest if r.case.kind == "train"]
    (record,) = [r for r in records if r.train.model.name == f"{model}@2-layers"]
    return [FOUR / "traces" / Path(name).name for name in record.training.traces]


@pytest.mark.parametrize(
    ("model", "error"), [("llama-3.1-8b", 0.015), ("llama-3.1-70b-proxy", 0.005)]
)
def test_steps_that_four_h100_bound(model: str, error: float) -> None:
    made = predict(inputs_of(FOUR, model))
    assert made.step_s == pytest.approx(MEASURED_S[model], rel=error)
    assert made.clock is not None
    assert made.clock.power_w == pytest.approx(692, rel=0.01)


def test_a_drawn_step_of_two_h200_is_as_slow_as_its_calibrated_kernels() -> None:
    run = RESULTS / "h200-x2-predictions-1"
    made = predict(inputs_of(run, "qwen3-8b", 2))
    assert made.step_s == pytest.approx(0.818, rel=0.01)
    committed = json.loads((run / "prediction.json").read_text())["predictions"][0]
    assert committed["prediction"]["step_s"] == pytest.approx(0.7818, abs=1e-4)
    assert math.exp(calibrated_error(made.inputs)) == pytest.approx(1, abs=0.01)


def test_buckets_of_ddp_take_no_time_of_python() -> None:
    """A host issues as much at all widths: gpt2-1.5b has 145 buckets, 1/8 of its width five."""
    run = RESULTS / "h200-x2-predictions-3"
    plan = plans.read(run)
    (case,) = {
        entry.case
        for entry in plan.entries
        if plan.is_predicted(entry) and entry.case.data_parallel is DataParallel.DDP
    }
    (own,) = [
        record
        for record in read_with_warnings(run).latest
        if record.case.kind == "train" and record.train.model.name == "gpt2-1.5b@1/8"
    ]
    host_s = host_of_run(run, case)
    total_s = sum(map(host_s, of_case(case).expand()))
    assert total_s == pytest.approx(sum(passes_s(own).values()))
    assert total_s == pytest.approx(0.347, abs=0.001)


def test_kernels_beside_others_are_those_of_other_streams() -> None:
    """Copies of FSDP2 as the trace itself has them."""
    file = traces_of("llama-3.1-8b")[0]
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kernels = [each for each in events if each.get("cat") == "kernel"]
    computes = [each for each in kernels if "nccl" not in each["name"]]
    times = Counter[int]()
    for each in computes:
        times[each["args"]["stream"]] += round(1000 * each["dur"])
    ((main, _),) = times.most_common(1)
    scatters = {e["args"]["stream"] for e in kernels if "ReduceScatter" in e["name"]}
    (result,) = map_traces(
        KernelsOptions(files=(str(file),)), measured_ops, shares=False
    ).results
    by_comm = Counter[str]()
    for op in result.value.ops:
        by_comm[op.comm] += op.time_ns
    assert set(by_comm) == {"", "all_gather", "reduce_scatter"}
    scattered = sum(time for stream, time in times.items() if stream in scatters)
    gathered = sum(times.values()) - times[main] - scattered
    assert by_comm["reduce_scatter"] == pytest.approx(scattered, rel=1e-3)
    assert by_comm["all_gather"] == pytest.approx(gathered, rel=1e-3)


def test_copies_of_messages_take_time_of_their_streams() -> None:
    inputs = inputs_of(FOUR, "llama-3.1-8b")
    assert set(inputs.comm_copies) == {"all_gather", "reduce_scatter"}
    workload = inputs.workload
    copies_s = sum(
        inputs.comm_copies[op.collective] * op.message_bytes(workload.groups[op.group])
        for op in workload.expand()
        if isinstance(op, CommOp) and op.collective in inputs.comm_copies
    )
    # In the measured step they took 24.4 and 17.3 ms, more of it overlapped (docs/diary).
    assert 0.7 * 0.0417 < copies_s < 0.0417
    without = predict(replace(inputs, comm_copies={}))
    made = predict(inputs)
    assert made.step.comm_s - without.step.comm_s == pytest.approx(copies_s, rel=0.35)
    assert 0 <= made.step_s - without.step_s < copies_s / 2, "most of it is hidden"


def test_the_slowest_rank_computes_longest_in_steps_back_to_back() -> None:
    options = KernelsOptions(files=tuple(map(str, traces_of("llama-3.1-70b-proxy"))))
    results = map_traces(options, measured_ops, shares=False).results
    tables = {result.info.rank: result.value for result in results}
    workload = inputs_of(FOUR, "llama-3.1-70b-proxy").workload
    num_steps = len(tables[0].steps) // 2
    # By the driver's mean clock of the step, MHz: 1418, 1495, 1477, 1517.
    assert slowest_rank(tables, workload, num_steps) == 0

    def slowed(rank: int, steps: tuple[int, ...], *, comm: bool) -> dict[int, OpTable]:
        ops = tuple(
            replace(op, time_ns=2 * op.time_ns)
            if op.step in steps and (op.key.kind != COMPUTE) == comm
            else op
            for op in tables[rank].ops
        )
        return {**tables, rank: replace(tables[rank], ops=ops)}

    before, after = tables[2].steps[:num_steps], tables[2].steps[num_steps:]
    assert slowest_rank(slowed(2, before, comm=False), workload, num_steps) == 2
    assert slowest_rank(slowed(2, before, comm=True), workload, num_steps) == 0
    assert slowest_rank(slowed(2, after, comm=False), workload, num_steps) == 0


def test_messages_draw_power() -> None:
    inputs = inputs_of(FOUR, "llama-3.1-8b")
    power = inputs.power
    assert power is not None
    assert 150 < power.comm_w < 230, "records have 290 to 355 W, idle is some 140 W"
    full_s = {Work.MATMUL: 0.7, Work.ATTENTION: 0.2}
    silent, busy = (mean_power_w(power, 0.1, full_s, 1.0, comm_s) for comm_s in (0.0, 0.25))
    assert busy - silent == pytest.approx(0.25 * power.comm_w)
    slowdowns = [slowdown_of(power, full_s, 1.0, 0.0, comm_s) for comm_s in (0.0, 0.25)]
    assert slowdowns[0] < slowdowns[1]


def test_lines_of_the_ledger_are_those_of_the_measured_step() -> None:
    """Of the step whose slowest rank is the one that was measured, in ms."""
    ledger = predict(inputs_of(FOUR, "llama-3.1-70b-proxy")).step.ledger
    measured = {
        (Group.COMPUTE, Work.MATMUL): 272.9,
        (Group.OVERLAPPED, Work.MATMUL): 66.7,
        (Group.COMPUTE, Work.ELEMENTWISE): 26.1,
        (Group.OVERLAPPED, Work.ELEMENTWISE): 16.7,
        (Group.COMPUTE, Work.ATTENTION): 15.8,
        (Group.COMPUTE, Work.OPTIMIZER): 21.3,
    }
    for line, time_ms in measured.items():
        assert ledger.lines[line] / 1e6 == pytest.approx(time_ms, abs=0.012 * 442.7), line


def with_step(inputs: Inputs, factor: float) -> Prediction:
    """Predict with a calibrated step that took so many times its predicted time."""
    assert inputs.step is not None
    case, step_s = inputs.step
    predicted_s = step_s / math.exp(calibrated_error(inputs))
    changed = replace(inputs, step=(case, factor * predicted_s))
    return predict(with_host_of_step(changed))


def test_the_host_of_one_rank_is_measured_twice() -> None:
    inputs = inputs_of(RESULTS / "h100-predictions-1", "gpt2-125m", 2)
    alike, slower = with_step(inputs, 1.0001), with_step(inputs, 1.8)
    assert alike.step.is_host_bound
    ratio = slower.step_s / alike.step_s
    # The calibrated step waits for the host only in a part of it.
    assert math.sqrt(1.8) < ratio < 1.8
    assert with_step(inputs, 9.0).step_s == pytest.approx(alike.step_s), "no host is so slow"


def test_a_step_of_several_ranks_that_is_late_says_nothing_of_its_host() -> None:
    inputs = inputs_of(FOUR, "gpt2-1.5b")
    assert with_step(inputs, 1.5).step_s == with_step(inputs, 1.0).step_s


@pytest.mark.parametrize("mbs", [1, 2])
def test_another_device_says_nothing_of_the_host(mbs: int, tmp_path: Path) -> None:
    """Its calibrated step would be faster than was measured, and no slower host explains it."""

    def step_s(*more: str) -> float:
        run = str(RESULTS / "h100-predictions-1")
        answer = tmp_path / f"{len(more)}.json"
        words = ["predict", "gpt2-1.5b", "--strategy", "single", "--nproc", "1"]
        words += ["--mbs", str(mbs), "--calibration", run, *more, "--json", str(answer)]
        assert status(words) == 0
        return float(json.loads(answer.read_text())["step_s"])

    measured = step_s()
    faster = step_s("--what-if", "flops=1.3x,hbm=1.3x")
    assert 0.7 * measured < faster <= measured
