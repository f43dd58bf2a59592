"""Profiles of training on one GPU: what the trace says of a step is what was run and timed.

Needs one GPU that CUPTI may profile.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.cli.process import stepmark_process

from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.kernel_groups import COMMUNICATION, group_of
from stepmark.step.trace_ops import PRODUCTS
from stepmark.step.workload import ComputeOp, Workload
from stepmark.store.reader import read_records
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.kineto.reader import read_trace
from stepmark.workloads.durations import family
from stepmark.workloads.rules.pytorch.case import of_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Large enough that the GPU, and not the host, takes the time.
WORDS = [
    "llama-3.1-8b",
    "--scale",
    "1/4",
    "--seq-len",
    "2048",
    "--bsz",
    "4",
    "--strategy",
    "single",
]


@pytest.mark.parametrize("flags", [[], ["--compile"], ["--ac", "full"]])
def test_a_step_is_attributed(tmp_path: Path, flags: list[str]) -> None:
    words = [*WORDS, *flags, "--steps", "10", "--profile", "--out", "runs"]
    done = stepmark_process("train", *words, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    (record,) = read_records(run)
    assert isinstance(record, Measured)
    assert isinstance(record.case, TrainCase)
    (file,) = (run / "traces").iterdir()
    trace = read_trace(file)
    workload = of_case(record.case)
    table = measured_ops(trace, workload=workload)
    ops = list(table.ops)
    assert not table.is_host
    assert len(table.steps) == 3

    # The sum law, and no more than 5 % of the time without a role.
    total = sum(op.time_ns for op in ops)
    assert total + table.outside_ns == int((trace.gpu.end - trace.gpu.start).sum())
    known = sum(op.time_ns for op in ops if op.key.role)
    assert known >= 0.95 * total, Counter(
        {(op.key.op, op.key.name): op.time_ns for op in ops if not op.key.role}
    ).most_common(10)

    # As many products by role, layer and phase as in the workload.
    calls: Counter[tuple[object, ...]] = Counter()
    for op in ops:
        if op.key.op in PRODUCTS and op.calls:
            calls[op.key.role, op.key.layer, op.key.phase] += op.calls
    assert calls == products(workload, len(table.steps))
    attention = [op for op in ops if op.key.role == "attention.core"]
    assert {op.key.phase for op in attention} == {"fwd", "bwd"}

    # The step of the trace is the measured one and what profiling costs, most of it on the
    # host (2.2 times on an H100 whose launches are slow): its work fits into the measured one.
    step_s = summarize(table.step_ns).median * 1e-9
    real_s = summarize(slowest_per_sample(record.samples.seconds)).median
    busy_s = total / len(table.steps) * 1e-9
    assert busy_s <= step_s * 1.001  # one stream
    assert busy_s < 1.03 * real_s < 1.03 * 1.1 * step_s, (busy_s, step_s, real_s)
    assert re.search(r"profiled step \d+\.\d ms, unprofiled \d+\.\d ms", done.stdout)
    assert "note:" not in done.stdout.partition("profiled step")[2], done.stdout
    assert not any(group_of(op.key.name) == COMMUNICATION for op in ops)


def products(workload: Workload, steps: int) -> Counter[tuple[object, ...]]:
    expected: Counter[tuple[object, ...]] = Counter()
    for op in workload.expand():
        if isinstance(op, ComputeOp) and family(op.op) == "gemm":
            expected[op.module, op.layer, op.phase] += steps
    return expected
