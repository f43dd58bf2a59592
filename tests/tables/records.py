"""Made-up records and a made-up device: round figures, so that rates are done in the head."""

import re
from collections.abc import Sequence

from stepmark.cases.case import Label, OpCase
from stepmark.cases.record import (
    Check,
    DeviceInfo,
    Environment,
    Failed,
    Measured,
    Record,
    RunInfo,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.ground.dtypes import DType
from stepmark.model.device import DeviceSpec
from stepmark.model.ops import Attention, Copy, Gemm, Norm, Phase
from stepmark.tables.columns import Row

RUN_ID = "20250101-000000-made-up"
FAST = Gemm(m=8192, n=8192, k=8192)
EVIL = "<script>alert(1)</script>"


def device_info(rank: int = 0) -> DeviceInfo:
    return DeviceInfo(rank=rank, index=rank, name="Made Up 9000", max_sm_clock_hz=2.2e9)


def run_info(num_ranks: int = 1, **settings: str) -> RunInfo:
    environment = Environment(
        host="node1",
        os="Linux",
        kernel="6.1",
        cpu="Made Up CPU",
        num_cores=8,
        memory_bytes=2**34,
        python="3.12",
        torch="2.11",
        versions={"cuda": "13.0"},
        devices=tuple(device_info(rank) for rank in range(num_ranks)),
        git_commit="abc",
        stepmark="0.1",
        variables={"NCCL_DEBUG": "<b>WARN</b>"},
        warnings=("power limit below default",),
    )
    return RunInfo(
        run_id=RUN_ID,
        created_at="2025-01-01T00:00:00Z",
        command="stepmark run",
        environment=environment,
        num_cases=1,
        settings=settings,
    )


def measured(
    case: OpCase, *times_s: float, soak_s: float = 2.0, num_wrong: int = 0, num_sets: int = 4
) -> Measured:
    """One record; each time is one rank's, in five equal samples."""
    check = Check(
        max_rel_err=1e-3, tolerance=1e-2, num_wrong=num_wrong, num_compared=99, reference="fp64"
    )
    return Measured(
        run_id=RUN_ID,
        case=case,
        samples=Samples(
            seconds=tuple((time_s,) * 5 for time_s in times_s),
            method="event-rotate/1",
            calls_per_sample=20,
            num_sets=num_sets,
            soak_s=soak_s,
        ),
        checks=(check,) * len(times_s),
        telemetry=(Telemetry(sm_clock_hz=1.9e9, power_w=600.0, throttle=("sw_power_cap",)),)
        * len(times_s),
        backend_run="nvjet",
        peak_memory_bytes=None,
        started_at=0.0,
    )


def gemm(op: Gemm = FAST, *labels: Label, **more: object) -> OpCase:
    return OpCase(op=op, backend="torch", labels=labels, **more)  # type: ignore[arg-type]


def attention(phase: Phase) -> Attention:
    return Attention(
        batch=2,
        seq_q=4096,
        seq_kv=4096,
        heads=64,
        kv_heads=8,
        head_dim_qk=128,
        head_dim_v=128,
        phase=phase,
    )


COPY = OpCase(op=Copy(num_bytes=2**30), backend="torch")


def full_run() -> list[Record]:
    """Every status and several families, with a hostile model name."""
    label = Label(model=EVIL, role="mlp_up", phase=Phase.FWD, count=1, mbs=2)
    small = Gemm(m=512, n=512, k=512)
    records: list[Record] = [
        measured(gemm(FAST, label), 1.5e-3),
        measured(gemm(Gemm(m=8192, n=1024, k=8192), label), 0.3e-3, soak_s=0.4),
        measured(gemm(small), 10e-6),
        measured(COPY, 600e-6),
        measured(gemm(Gemm(m=256, n=256, k=256)), 5e-6, num_wrong=3),
    ]
    for phase, time_s in ((Phase.FWD, 1e-3), (Phase.BWD, 2.8e-3)):
        role = Label(model="llama-3-70b", role="attention", phase=phase, mbs=2)
        case = OpCase(op=attention(phase), backend="cudnn", labels=(role,))
        records.append(measured(case, time_s))
        norm = OpCase(
            op=Norm(tokens=8192, hidden=8192, phase=phase),
            backend="torch",
            labels=(Label(model="llama-3-70b", role="norm", count=2, mbs=2),),
        )
        records.append(measured(norm, 0.15e-3))
    te = OpCase(op=FAST, backend="te")
    big = OpCase(op=Gemm(m=2**20, n=2**16, k=2**16), backend="torch")
    return [
        *records,
        Skipped(run_id=RUN_ID, case=te, reason="transformer-engine is not installed"),
        Failed(run_id=RUN_ID, case=big, cause="oom", message="tried 128 GiB", ranks=(0,)),
    ]


def made_up_device() -> DeviceSpec:
    """1,000 TFLOP/s in bf16 at 2 GHz, 4 TB/s, 50 MB of L2."""
    return DeviceSpec(
        key="made-up",
        names=("Made Up 9000",),
        vendor="made up",
        device_is="one GPU",
        sources={},
        peak_flops_per_s={DType.BF16: 1e15},
        rated_clock_hz=2e9,
        hbm_bytes_per_s=4e12,
        l2_bytes=50_000_000,
    )


def check_page_of(page: str, title: str, table: Sequence[Row]) -> None:
    """A page of one kind of cases has its section, and a line per case that ran."""
    assert f"<h2>{title}</h2>" in page
    assert "<h2>Measurements</h2>" not in page
    assert "Nothing was measured." not in page
    assert len(re.findall(r'<tr(?: class="[a-z ]*")? data-command', page)) == sum(
        row["status"] in ("measured", "wrong") for row in table
    )
