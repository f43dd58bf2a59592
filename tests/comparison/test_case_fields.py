"""What defines the thing measured is part of its identity, and of every comparison of it."""

import dataclasses
from typing import Any

import pytest
from tests.cases.test_comm_case import CHANGES as COMM_CHANGES
from tests.cases.test_comm_case import PLAIN as COMM
from tests.store.test_train_codec import PLAIN as TRAIN
from tests.store.test_train_codec import PLAIN_MODEL
from tests.store.test_train_codec import SAMPLES as TRAIN_SAMPLES

from stepmark.cases.case import ClockName, OpCase, Rate
from stepmark.cases.comm_case import CommCase
from stepmark.cases.fields import Role, declared
from stepmark.cases.record import AnyCase, Measured, Samples
from stepmark.cases.replay_case import Compute, Pace, ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import DataParallel
from stepmark.comparison.comparison import Fields
from stepmark.comparison.series import STRICT, series_of_records
from stepmark.ground.dtypes import DType
from stepmark.model.model import ModelConfig
from stepmark.model.ops.matmul import Gemm
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit, TpPlan

GEMM = Gemm(m=16, n=32, k=64, dtype=DType.BF16)
OP = OpCase(op=GEMM, backend="torch")
REPLAY = ReplayCase(file="a.json", digest="0", num_ranks=2)
# One field at a time to another value: each field that is identity stands here.
CHANGES: dict[type, tuple[AnyCase, dict[str, Any]]] = {
    CommCase: (COMM, COMM_CHANGES),
    TrainCase: (
        TRAIN,
        {
            **{
                field.attribute: getattr(TRAIN_SAMPLES["everything"], field.attribute)
                for field in declared(TrainCase)
                if field.role is not None
            },
            "model": dataclasses.replace(PLAIN_MODEL, hidden_size=128),
            "parallel": ParallelConfig(dp_replicate=2),
            "embedding_in_backward": False,
            "small_first_bucket": False,
            "bucket_view": True,
            "tp_plan": TpPlan.WHOLE,
            "pp_split": StageSplit.EVEN,
            "pp_stages": 3,
        },
    ),
    OpCase: (
        OP,
        {
            "op": dataclasses.replace(GEMM, k=128),
            "backend": "triton",
            "device": "cpu",
            "num_ranks": 2,
            "clock": ClockName.HOT,
            "rate": Rate.BURST,
        },
    ),
    ReplayCase: (
        REPLAY,
        {
            "digest": "1",
            "num_ranks": 4,
            "device": "cpu",
            "compute": Compute.REAL,
            "blocking": True,
            "pace": Pace.ORIGINAL,
        },
    ),
}
# In one of them a field has an effect that has none in a step of one rank.
TRAIN_LAYOUTS = tuple(
    dataclasses.replace(
        TRAIN,
        model=dataclasses.replace(PLAIN_MODEL, tied_embeddings=False),
        data_parallel=kind,
        parallel=parallel,
        pp_schedule=schedule,
    )
    for kind, parallel, schedule in (
        (DataParallel.FSDP, ParallelConfig(dp_shard=2), PipelineSchedule.ONE_F_ONE_B),
        (DataParallel.DDP, ParallelConfig(dp_replicate=2), PipelineSchedule.ONE_F_ONE_B),
        (DataParallel.NONE, ParallelConfig(tp=2), PipelineSchedule.ONE_F_ONE_B),
        (DataParallel.NONE, ParallelConfig(pp=4), PipelineSchedule.ONE_F_ONE_B),
        (DataParallel.NONE, ParallelConfig(pp=2), PipelineSchedule.INTERLEAVED),
    )
)
# The method of the samples has these; a timer writes it.
IN_METHOD = ("mode", "aligned")


def seen(case: AnyCase) -> tuple[Fields, int | None, ModelConfig | None]:
    """What a comparison knows of a case beside its times."""
    seconds = tuple((1.0, 1.0) for _ in range(case.num_ranks))
    record = Measured(
        run_id="r",
        case=case,
        samples=Samples(seconds=seconds, method="m/1"),
        checks=(),
        telemetry=(),
        backend_run="",
        peak_memory_bytes=0,
        started_at=0.0,
    )
    (series,), _ = series_of_records([record])
    return dict(series.fields), series.size_bytes, series.model


@pytest.mark.parametrize("kind", CHANGES)
def test_every_identity_is_compared(kind: type) -> None:
    plain, changes = CHANGES[kind]
    assert changes.keys() == {f.attribute for f in declared(kind) if f.role is not None}
    fields = {field.attribute: field for field in declared(kind)}
    bases = (plain, *TRAIN_LAYOUTS) if kind is TrainCase else (plain,)
    for name, value in changes.items():
        base = next(case for case in bases if fields[name].is_effective(case))
        case = dataclasses.replace(base, **{name: value})
        assert case.case_id != base.case_id, name
        if name not in IN_METHOD:
            assert seen(case) != seen(base), name


@pytest.mark.parametrize("kind", CHANGES)
def test_a_strict_field_is_refused_by_its_name(kind: type) -> None:
    plain, _ = CHANGES[kind]
    strict = {field.name for field in declared(kind) if field.role is Role.STRICT}
    assert strict <= set(STRICT)
    assert strict <= seen(plain)[0].keys()
