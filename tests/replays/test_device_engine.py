"""Programs on the streams of a GPU."""

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stepmark.cases.replay_case import Compute
from stepmark.ground.dtypes import DType
from stepmark.measuring.environment import capabilities
from stepmark.model.ops import Gemm, Phase
from stepmark.replays.bench.computation import Computation
from stepmark.replays.bench.device_engine import DeviceEngine
from stepmark.replays.bench.engine import UNKNOWN, Program
from stepmark.step.rank_program import Step
from stepmark.step.workload import COMPUTE, ComputeOp, Kernel

MS = 1e-3
pytestmark = pytest.mark.gpu


def step(time_s: float | None, *deps: int, stream: str = COMPUTE, **more: Any) -> Step:
    op = ComputeOp(op=Kernel(name="k"), phase=Phase.FWD, module="m", stream=stream)
    return Step(ComputeOp(**{**_fields(op), "time_s": time_s, **more}), deps)


def _fields(op: ComputeOp) -> dict[str, Any]:
    return {name: getattr(op, name) for name in op.__dataclass_fields__}


def engine(
    steps: Sequence[Step], compute: Compute = Compute.SLEEP, **more: bool
) -> DeviceEngine:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    none: Any = None  # no messages
    computation = Computation(steps, compute, device, capabilities(device))
    program = Program(
        steps=steps, messenger=none, buffers=none, computation=computation, **more
    )
    return DeviceEngine(program, device)


def seconds(own: DeviceEngine) -> float:
    own.run()
    begin = time.perf_counter()
    own.run()
    return time.perf_counter() - begin


def test_busy_times_in_a_row_take_their_sum() -> None:
    own = engine([step(MS / 50) for _ in range(1000)])
    assert len(own._untimed) == 1
    assert seconds(own) == pytest.approx(20 * MS, rel=0.02)


def test_streams_run_beside_each_other_unless_one_waits() -> None:
    beside = [step(20 * MS), step(20 * MS, stream="side")]
    assert seconds(engine(beside)) == pytest.approx(20 * MS, rel=0.05)
    after = [step(20 * MS), step(20 * MS, 0, stream="side")]
    assert seconds(engine(after)) == pytest.approx(40 * MS, rel=0.05)
    assert seconds(engine(beside, blocking=True)) == pytest.approx(40 * MS, rel=0.05)


def test_what_waits_for_nothing_that_runs_waits_for_the_stream_before_it() -> None:
    """An operation without a time still marks the end of those before it."""
    steps = [step(20 * MS), step(None), step(20 * MS, 1, stream="side")]
    assert seconds(engine(steps)) == pytest.approx(40 * MS, rel=0.05)


def test_a_timed_pass_has_starts_and_times_of_every_operation() -> None:
    own = engine([step(5 * MS), step(3 * MS, 0, stream="side"), step(5 * MS), step(None)])
    own.run()
    spans = [UNKNOWN] * 4
    own.run(spans)
    starts, times = zip(*spans, strict=True)
    assert times[:3] == pytest.approx([5 * MS, 3 * MS, 5 * MS], rel=0.05)
    assert math.isnan(times[3])
    assert starts[:3] == pytest.approx([0, 5 * MS, 5 * MS], abs=0.5 * MS)


def test_what_events_add_is_known() -> None:
    """Many short operations take their times in a timed pass, but for this."""
    steps = [step(20e-6) for _ in range(500)]
    own = engine(steps)
    own.run()
    spans = [UNKNOWN] * len(steps)
    own.run(spans)
    event_s = own._program.computation.event_s
    assert 0 <= event_s < 10e-6
    took_s = sum(time_s for _, time_s in spans) - len(steps) * event_s
    assert took_s == pytest.approx(len(steps) * 20e-6, rel=0.05)


def test_the_pace_delays_operations() -> None:
    steps = [step(MS), step(MS, start_s=30 * MS)]
    assert seconds(engine(steps, is_paced=True)) == pytest.approx(31 * MS, rel=0.05)
    assert seconds(engine(steps)) == pytest.approx(2 * MS, rel=0.2)


def test_operators_run_as_long_as_they_take() -> None:
    """Products of 8192^3 in bf16: 1.1 TFLOP each, below the peak of any GPU of today."""
    product = Gemm(m=8192, n=8192, k=8192, dtype=DType.BF16)
    op = ComputeOp(op=product, phase=Phase.FWD, module="m")
    took_s = seconds(engine([Step(op, ())] * 20, Compute.REAL))
    assert 20 * product.flops / 5e15 < took_s < 20 * product.flops / 1e14
