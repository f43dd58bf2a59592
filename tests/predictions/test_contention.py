"""Contention that is measured is the one that was: of steps whose truth is known."""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.ground.options import build
from stepmark.predictions.contention import Sample, contention, fit, sheet_slowdowns, slowdown
from stepmark.predictions.inputs import Inputs
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import PredictOptions
from stepmark.step.trace_ops import COMM, COMPUTE, MeasuredOp, OpKey, OpTable
from stepmark.timeline.ledger import CONTENTION, Group, Work
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.trace_files import map_traces
from stepmark.traces.trace_options import KernelsOptions

FSDP8 = Path(__file__).parents[1] / "data" / "traces" / "fsdp8"

KERNELS = {
    Work.MATMUL: "nvjet_tst",
    Work.ATTENTION: "flash_fwd_kernel",
    Work.ELEMENTWISE: "vectorized_elementwise_kernel",
}
TRUTHS = [
    {Work.MATMUL: 1.0, Work.ATTENTION: 1.0, Work.ELEMENTWISE: 1.0},
    {Work.MATMUL: 1.5, Work.ATTENTION: 1.1, Work.ELEMENTWISE: 1.25},
    {Work.MATMUL: 2.5, Work.ATTENTION: 1.0, Work.ELEMENTWISE: 1.02},
]


def under(alone: float, factor: float, comm: float) -> tuple[float, float]:
    """Time of work beside communication that ends after `comm`, and the part beside it."""
    done = min(alone, comm / factor)
    return done * factor + alone - done, done * factor


def table(ops: list[MeasuredOp], steps: tuple[int, ...]) -> OpTable:
    return OpTable(
        steps=steps,
        step_ns=(1,) * len(steps),
        is_marked=True,
        is_host=False,
        outside_ns=0,
        ops=tuple(ops),
    )


def profiled(seed: int, truth: dict[Work, float], noise: float) -> tuple[OpTable, OpTable]:
    """A profile of two layers and three steps, and the same without communication."""
    die = random.Random(seed)
    ops, alone_ops = [], []
    for work, kernel in KERNELS.items():
        for number in range(12):
            alone = die.uniform(5e3, 2e6)
            always = number == 0  # it has communication beside it in all layers
            for step, layer in ((s, a) for s in (4, 5, 6) for a in (0, 1)):
                key = OpKey(
                    f"r{number}", f"{layer}", layer, "fwd", False, COMPUTE, "op", kernel
                )
                own = alone * die.gauss(1, noise)
                comm = 2e9 * always or die.choice([0.0, alone * die.random() * 2, 9e9])
                time, beside = under(own, truth[work], comm)
                ops.append(MeasuredOp(step, key, round(time), 1, 1, 1, 1, round(beside)))
                alone_ops.append(replace(ops[-1], time_ns=round(own), overlapped_ns=0))
    key = OpKey("block", "", 0, "fwd", False, COMM, "c10d", "ncclDevKernel_AllGather")
    message = MeasuredOp(4, key, 10**6, 1, 1, 1, 1, 10**5)
    return table([*ops, message], (4, 5, 6)), table([*alone_ops, message], (4, 5, 6))


def by_work(own: OpTable) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for op in own.ops:
        sums[op.key.name] += op.time_ns
    return sums


@pytest.mark.parametrize("truth", TRUTHS, ids=["none", "some", "much"])
@pytest.mark.parametrize("seed", range(12))
def test_slowdowns_and_times_alone_are_the_true_ones(
    seed: int, truth: dict[Work, float]
) -> None:
    measured, alone = profiled(seed, truth, 0.005)
    found = contention([measured])
    assert found.slowdown == pytest.approx(truth, rel=0.02)
    assert by_work(found.alone(measured)) == pytest.approx(by_work(alone), rel=0.01)


def test_without_noise_it_is_exact() -> None:
    truth = TRUTHS[1]
    measured, alone = profiled(1, truth, 0.0)
    found = contention([measured])
    assert found.slowdown == pytest.approx(truth, rel=1e-4)
    for own, other in zip(found.alone(measured).ops, alone.ops, strict=True):
        assert own.time_ns == pytest.approx(other.time_ns, rel=1e-3, abs=2)


def test_ranks_are_taken_together() -> None:
    """One rank always waits in a collective, the other never: each alone tells nothing."""
    key = OpKey("mlp.up", "", 0, "fwd", False, COMPUTE, "aten::mm", "nvjet_tst")
    late, early = (
        table([MeasuredOp(4, key, time, 1, 1, 1, 1, beside)], (4,))
        for time, beside in ((1000, 0), (1300, 1300))
    )
    assert contention([late]).slowdown == contention([early]).slowdown == {}
    assert contention([early]).alone(early) == early
    assert contention([late], [early]).slowdown == {}, "their clocks may differ"
    found = contention([late, early])
    assert found.slowdown == {Work.MATMUL: pytest.approx(1.3)}
    assert found.alone(early).ops[0].time_ns == 1000


def test_what_is_not_known_is_none() -> None:
    alike = [Sample("a", 10, 5), Sample("a", 11, 5.5)]
    assert slowdown(alike, fit(alike)) is None
    assert slowdown([], {}) is None
    # Little of the overlapped time is of work whose contention is known.
    known = [Sample("b", 0.1, 0), Sample("b", 0.2, 0.2)]
    assert fit(known) == {"b": pytest.approx(0.5)}
    assert slowdown([*alike, *known], fit(known)) is None
    assert slowdown(known, fit(known)) == pytest.approx(2)


def test_each_kernel_has_the_contention_that_was_measured_of_it() -> None:
    """And not the mean over its kind, which only work of unknown contention has."""
    ops, alone_ops = [], []
    for role, factor in (("mlp.up", 1.6), ("mlp.down", 1.1)):
        key = OpKey(role, "", 0, "fwd", False, COMPUTE, "aten::mm", "nvjet_tst")
        for step, comm in ((4, 0.0), (5, 9e9)):
            time, beside = under(1e6, factor, comm)
            ops.append(MeasuredOp(step, key, round(time), 1, 1, 1, 1, round(beside)))
            alone_ops.append(replace(ops[-1], time_ns=10**6))
    found = contention([table(ops, (4, 5))])
    for own, alone in zip(found.alone(table(ops, (4, 5))).ops, alone_ops, strict=True):
        assert own.time_ns == pytest.approx(alone.time_ns, abs=2)
    # q of both: 1 - 1 / 1.6 and 1 - 1 / 1.1, by their overlapped times of 1.6 and 1.1.
    assert found.slowdown[Work.MATMUL] == pytest.approx(2.7 / 2)


@pytest.mark.parametrize(("share", "is_known"), [(0.24, False), (0.26, True)])
def test_shares_that_hardly_differ_tell_no_contention(share: float, is_known: bool) -> None:
    """Below a quarter of the time an error of the times is as large as what is looked for."""
    time = 10 / (1 - 0.5 * share)
    samples = [Sample("a", 10, 0), Sample("a", time, share * time)]
    assert fit(samples) == ({"a": pytest.approx(0.5)} if is_known else {})


@pytest.mark.parametrize(
    ("factor", "q"), [(0.7, -0.2), (0.85, 1 - 1 / 0.85), (8.0, 1 - 1 / 8), (50.0, 0.9)]
)
def test_contention_is_bounded(factor: float, q: float) -> None:
    """Work that takes 50 times as long was interrupted; some is faster by noise alone."""
    samples = [Sample("a", 10, 0), Sample("a", 10 * factor, 10 * factor)]
    assert fit(samples) == {"a": pytest.approx(q)}


@pytest.mark.parametrize(("known_ns", "is_known"), [(9, False), (12, True)])
def test_the_mean_needs_a_tenth_of_the_overlapped_time(known_ns: int, is_known: bool) -> None:
    samples = [Sample("a", 100, 100), Sample("b", known_ns, known_ns)]
    mean = slowdown(samples, {"b": 0.5})
    assert mean == (pytest.approx(2) if is_known else None)


def test_a_kernel_that_was_interrupted_once_is_no_contention() -> None:
    samples = [Sample("a", 10, 0)] * 5 + [Sample("a", 10, 10)] * 4 + [Sample("a", 900, 900)]
    assert slowdown(samples, fit(samples)) == 1.0


def by_sheet(model: str, **values: object) -> Inputs:
    return inputs_of(build(PredictOptions, {"models": [model], **values}))


def test_slowdowns_by_data_sheet_are_those_of_a_profile_on_8_h200() -> None:
    """Left out of the medians it is as far off: validation/contention.py prints it."""
    options = KernelsOptions(files=(str(FSDP8),))
    traces = map_traces(options, measured_ops, shares=False)
    assert traces is not None
    measured = contention([result.value for result in traces.results]).slowdown
    own = sheet_slowdowns().compute
    for work in (Work.MATMUL, Work.ATTENTION, Work.ELEMENTWISE):
        assert own[work] == pytest.approx(measured[work], rel=0.1)


@pytest.mark.parametrize("device", ["h100-sxm", "h200"])
def test_overlapped_work_takes_longer_by_data_sheet(device: str) -> None:
    inputs = by_sheet("llama-3.1-8b", strategy="fsdp", nproc="8", mbs="2", device=device)
    prediction = predict(inputs)
    alone = predict(replace(inputs, compute_slowdown={}, comm_slowdown=None))
    slowed = {
        Work(name): time_ns
        for (group, name), time_ns in prediction.step.ledgers[0].lines.items()
        if group is Group.OVERLAPPED
    }
    expected_ns = sum(
        time_ns * (1 - 1 / sheet_slowdowns().compute[work]) for work, time_ns in slowed.items()
    )
    assert prediction.step.part_s(CONTENTION) == pytest.approx(expected_ns * 1e-9, rel=1e-3)
    # Computation hides what is longer of the communication.
    assert prediction.step_s - alone.step_s == pytest.approx(expected_ns * 1e-9, rel=0.1)
    (note,) = [each for each in prediction.notes if "overlap" in each]
    assert "H100 and H200" in note


@pytest.mark.parametrize(
    ("device", "nproc", "compute", "comm"),
    [
        ("h100-sxm", "1", False, False),
        ("h100-sxm", "8", True, True),
        ("h100-sxm", "64", True, False),  # no profile is of several hosts
        ("a100-80gb-sxm", "8", False, False),  # nor of other units
        ("mi300x", "8", False, False),  # or of another vendor
    ],
)
def test_slowdowns_are_those_that_were_profiled(
    device: str, nproc: str, compute: bool, comm: bool
) -> None:
    strategy = "single" if nproc == "1" else "fsdp"
    inputs = by_sheet("gpt2-125m", strategy=strategy, nproc=nproc, device=device)
    assert bool(inputs.compute_slowdown) is compute
    assert (inputs.comm_slowdown is not None) is comm
