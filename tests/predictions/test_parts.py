"""Contention from traces of ranks, and in the prediction."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.traces.comm_traces import MAIN, TraceWriter

from stepmark.cases.comm_curve import Curve
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.predictions import calibration
from stepmark.predictions.calibration import _unscaled
from stepmark.predictions.contention import comm_slowdown, contention
from stepmark.predictions.predict import predict
from stepmark.predictions.predict_inputs import of_training
from stepmark.step.trace_ops import MeasuredOp, OpKey, OpTable
from stepmark.timeline.ledger import CONTENTION, Group, Work
from stepmark.traces.kineto.arrivals import rank_parts
from stepmark.traces.kineto.kernels import measured_ops
from stepmark.traces.kineto.ledger import ledgers
from stepmark.traces.kineto.reader import read_trace


class Step(TraceWriter):
    """Two layers: one computes by itself, the other while a sum of 1.25 times its time runs.

    Rank 1 arrives 30 us late in each collective, and rank 0 computes only after them.
    """

    def layer(self, number: int, at: float, product: float, other: float) -> None:
        self.add("user_annotation", f"stepmark::blocks.{number}", at, 30, MAIN)
        for place, name in ((2, "aten::mm"), (12, "aten::add")):
            self.add("cpu_op", name, at + place, 5, MAIN)
        self.kernel("nvjet_tst", at + 3, at + 100, product)
        self.kernel("vectorized_elementwise_kernel", at + 13, at + 100 + product, other)

    def steps(self) -> None:
        early = 0 if self.rank else 30
        for number, at in ((4, 0), (5, 2000)):
            self.step(number, at, 1900)
            self.layer(0, at + 10, 100, 100)
            self.collective("allreduce", 8, 8, at + 50, at + 400 - early, 200 + early)
            if self.rank:
                self.layer(1, at + 600, 140, 110)
            else:
                self.layer(1, at + 1100, 100, 100)
            self.collective("allreduce", 8, 8, at + 650, at + 700 - early, 250 + early)


def test_contention_of_traces(tmp_path: Path) -> None:
    traces = []
    for rank in range(2):
        step = Step(rank=rank, world_size=2)
        step.steps()
        traces.append(read_trace(step.write(tmp_path)))
    tables = [measured_ops(trace) for trace in traces]
    assert contention(tables).slowdown == {
        Work.MATMUL: pytest.approx(1.4),
        Work.ELEMENTWISE: pytest.approx(1.1),
    }
    for trace, table in zip(traces, tables, strict=True):
        own = sum(each.total(Group.OVERLAPPED) for _, each in ledgers(trace, lambda _: True))
        computing = [op for op in table.ops if op.key.kind == "compute"]
        assert sum(op.overlapped_ns for op in computing) == own
        assert own == 500_000 * (trace.info.rank or 0)
    by_rank = {
        rank: (trace.info, rank_parts(trace, lambda _: True))
        for rank, trace in enumerate(traces)
    }
    assert comm_slowdown(by_rank, ()) == pytest.approx(1.25)
    # The curve takes part where none of the transfers is by itself.
    curve = Curve(collective="all_reduce", num_ranks=2, points=((16, 200e-6),), source="")
    assert comm_slowdown(by_rank, (curve,)) == pytest.approx(1.25)
    assert comm_slowdown({0: by_rank[0]}, (curve,)) is None  # it may wait for the other


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_prediction_has_the_measured_contention(factor: float) -> None:
    model = replace(find_model("llama-3.1-8b"), num_layers=2)
    case = TrainCase(
        model=model,
        device="cuda",
        parallel=ParallelConfig(dp_shard=8),
        data_parallel=DataParallel.FSDP,
    )
    works = dict.fromkeys(Work, factor)
    by_sheet = of_training(case, None, "NVIDIA H200")
    alone = replace(by_sheet, compute_slowdown={}, comm_slowdown=None)
    inputs = replace(
        alone,
        calibration="run",
        gap_s=0.0,
        compute_slowdown=works,
        comm_slowdown=factor,
    )
    prediction = predict(inputs)
    step = prediction.step
    beside = step.ledgers[0].total(Group.OVERLAPPED) * 1e-9
    assert beside > 0
    assert step.part_s(CONTENTION) == pytest.approx(beside * (1 - 1 / factor), abs=1e-6)
    assert not any("contention" in note for note in prediction.notes)
    (note,) = [note for note in predict(alone).notes if "contention" in note]
    assert "(matmul, attention, norm and elementwise, communication)" in note
    less = {work: each for work, each in works.items() if work is not Work.MATMUL}
    notes = predict(replace(inputs, compute_slowdown=less)).notes
    (note,) = [note for note in notes if "contention" in note]
    assert "not measured (matmul):" in note


@pytest.mark.parametrize(("pp", "gap_s"), [(1, 2e-3), (2, 0.0)])
def test_waiting_in_a_pipeline_is_no_time_between_operations(pp: int, gap_s: float) -> None:
    """On a host a forward of 10 ms has four operations of 0.5 ms."""
    key = OpKey("head", "", None, "fwd", False, "compute", "aten::mm", "matmul")
    table = OpTable(
        steps=(1,),
        step_ns=(10_000_000,),
        is_marked=True,
        is_host=True,
        outside_ns=0,
        ops=(MeasuredOp(1, key, 2_000_000, 4, 4, 1, 1),),
    )
    facts = SimpleNamespace(fwd_s=((10e-3,) * 3,), bwd_s=(), optim_s=())
    train = SimpleNamespace(parallel=ParallelConfig(pp=pp))
    record: Any = SimpleNamespace(training=facts, train=train)
    _, found_s = calibration._unprofiled(table, record)
    assert found_s == pytest.approx(gap_s)


def test_the_host_step_is_of_the_model_whose_widths_were_scaled() -> None:
    """A file of another model of that name has other modules, which the host launches."""
    model = find_model("mixtral-8x7b")
    assert _unscaled(model.scaled(Fraction(1, 16))) == _unscaled(model)
    assert model.moe
    others = [
        replace(model, norm="layernorm"),
        replace(model, activation="gelu"),
        replace(model, qk_norm=True),
        replace(model, num_layers=16),
        replace(model, moe=replace(model.moe, top_k=1)),
        find_model("mixtral-8x22b"),
    ]
    assert all(_unscaled(other) != _unscaled(model) for other in others)
