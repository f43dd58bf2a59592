"""Made-up records of collectives: 8 ranks, a straggler, a slow pair, a contended GEMM."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from tests.tables.records import RUN_ID, device_info, made_up_device, run_info

from stepmark.cases.comm_case import CommCase, default_mode
from stepmark.cases.record import (
    Arrivals,
    Beside,
    Check,
    Failed,
    Measured,
    Record,
    RunInfo,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import FACTS, Collective, Mode, RedOp, trimmed_count
from stepmark.model.device import DeviceSpec

NUM_RANKS = 8
SIZES = [2**power for power in range(10, 33, 2)]
STRAGGLER = 5
SLOW_PAIR = (3, 5)
LINK = 450e9


def comm_run(num_ranks: int = NUM_RANKS, **variables: str) -> RunInfo:
    run = run_info(num_ranks)
    devices = tuple(
        replace(device_info(rank), host="node1", index=rank) for rank in range(num_ranks)
    )
    versions = {"cuda": "13.0", "nccl": "2.28.9"}
    found = replace(
        run.environment, devices=devices, versions=versions, variables=dict(variables)
    )
    return replace(run, environment=found, command="stepmark comm all_reduce")


def comm_device() -> DeviceSpec:
    return replace(made_up_device(), link_kind="made up", link_bytes_per_s=LINK)


def comm_case(
    collective: Collective = Collective.ALL_REDUCE,
    size: int = 2**26,
    dtype: DType = DType.BF16,
    num_ranks: int = NUM_RANKS,
    **more: object,
) -> CommCase:
    facts = FACTS[collective]
    given: dict[str, object] = {
        "world_size": num_ranks,
        "redop": RedOp.SUM if facts.reduces else RedOp.NONE,
        "root": 0 if facts.rooted else -1,
        "mode": default_mode("cuda", "nccl", collective),
        **more,
    }
    count = trimmed_count(collective, size, dtype.itemsize, num_ranks)
    return CommCase(
        collective=collective, count=count, dtype=dtype, num_ranks=num_ranks, **given
    )  # type: ignore[arg-type]


def comm_measured(
    case: CommCase,
    seconds: Sequence[Sequence[float]],
    *,
    launch: int = 1,
    num_wrong: int = 0,
    late_s: float = 2e-6,
    issue_s: float = 8e-6,
    checked: bool = True,
    beside: Beside | None = None,
) -> Measured:
    """seconds[rank][sample]; one element is wrong on as many ranks as num_wrong says."""
    num_ranks = len(seconds)
    check = Check(
        max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=99, reference="position"
    )
    checks = tuple(replace(check, num_wrong=int(i < num_wrong)) for i in range(num_ranks))
    state = Telemetry(sm_clock_hz=1.9e9, power_w=300.0)
    arrivals = Arrivals(
        late_s=tuple((late_s * rank / max(1, num_ranks - 1),) * 3 for rank in range(num_ranks)),
        error_s=0.0,
        issue_s=tuple(issue_s + 1e-7 * rank for rank in range(num_ranks)),
        warmup_calls=5,
    )
    return Measured(
        run_id=RUN_ID,
        case=case,
        samples=Samples(
            seconds=tuple(map(tuple, seconds)),
            method=f"comm-{case.mode}/1",
            calls_per_sample=20,
        ),
        checks=checks if checked else (),
        telemetry=(state,) * num_ranks,
        backend_run="nccl 2.28.9",
        peak_memory_bytes=None,
        started_at=0.0,
        launch=launch,
        arrivals=arrivals,
        beside=beside,
    )


def flat(case: CommCase, time_s: float, n: int = 8, **more: object) -> Measured:
    """The same time for every rank and sample."""
    seconds = [[time_s] * n] * len(case.members)
    return comm_measured(case, seconds, **more)  # type: ignore[arg-type]


def nvlink_time(size: float, latency: float = 20e-6, rate: float = 208e9) -> float:
    """A latency, a slow protocol under 1 MiB, a fast one above."""
    return latency + size / 40e9 if size < 2**20 else 1.4 * latency + size / rate


def noisy(case: CommCase, time_s: float, random: Random, launch: int = 1) -> Measured:
    """Ranks within 2 % of each other; the straggler comes late and so is short."""
    launch_s = time_s * random.uniform(0.99, 1.01)
    seconds = [
        [
            launch_s * random.uniform(0.99, 1.03)
            - (min(6e-6, 0.2 * launch_s) if rank == STRAGGLER else 0.0)
            for _ in range(20)
        ]
        for rank in case.members
    ]
    return comm_measured(case, seconds, launch=launch)


def sweep(
    collective: Collective,
    random: Random,
    *,
    launches: int = 3,
    time_of: Callable[[float], float] = nvlink_time,
    sizes: Sequence[int] = SIZES,
    **more: object,
) -> list[Record]:
    """All sizes, both placements, several launches."""
    return [
        noisy(case, time_of(size), random, launch)
        for size in sizes
        for in_place in (False, True)
        for case in (comm_case(collective, size, in_place=in_place, **more),)  # type: ignore[arg-type]
        for launch in range(1, launches + 1)
    ]


def pair_times(random: Random) -> list[Record]:
    """Bandwidth and latency of all ordered pairs; one pair at a third of the rate."""
    found: list[Record] = []
    for pair in ((i, j) for i in range(NUM_RANKS) for j in range(NUM_RANKS) if i != j):
        slow = 3.0 if pair == SLOW_PAIR else 1.0
        whole = {"num_ranks": 2, "world_size": NUM_RANKS, "pair": pair}
        big = comm_case(Collective.P2P, 2**28, **whole)  # type: ignore[arg-type]
        ping = comm_case(Collective.PING_PONG, 8, **whole)  # type: ignore[arg-type]
        found.append(flat(big, slow * 2**28 / 380e9 * random.uniform(0.99, 1.01)))
        found.append(flat(ping, 9e-6 * random.uniform(0.95, 1.05)))
    return found


def contended(random: Random) -> list[Record]:
    """An all-reduce beside a GEMM: both slower, the collective more so when it is large."""
    found: list[Record] = []
    for size in SIZES[5:]:
        case = comm_case(Collective.ALL_REDUCE, size, beside="gemm:8192")
        slower = 1.1 + 0.4 * (size / SIZES[-1]) ** 0.2
        record = noisy(case, nvlink_time(size) * slower, random)
        alone, together = (1e-3,) * 5, (1e-3 * (1 + 0.2 * size / SIZES[-1]),) * 5
        ranks = len(record.samples.seconds)
        both = Beside(
            alone_s=(alone,) * ranks, together_s=(together,) * ranks, backend_run="cublas"
        )
        found.append(replace(record, beside=both))
    return found


def full_comm_run(seed: int = 7) -> list[Record]:
    """Several collectives, modes and statuses; the same at each call."""
    random = Random(seed)
    slower = lambda size: nvlink_time(size, 24e-6, 395e9)  # noqa: E731, one formula
    barrier = comm_case(Collective.BARRIER, 0, DType.UINT8)
    gather = comm_case(Collective.GATHER, 2**20)
    huge = comm_case(Collective.ALL_REDUCE, 2**36)
    return [
        *sweep(Collective.ALL_REDUCE, random),
        *sweep(
            Collective.ALL_REDUCE,
            random,
            launches=1,
            time_of=lambda size: nvlink_time(size) - 12e-6,
            sizes=SIZES[:9],
            mode=Mode.GRAPH,
        ),
        *sweep(Collective.ALL_TO_ALL, random, time_of=slower),
        *sweep(Collective.ALL_GATHER, random, launches=1, time_of=slower, dtype=DType.FP32),
        *pair_times(random),
        *contended(random),
        flat(barrier, 30e-6),
        flat(gather, 50e-6, num_wrong=2),
        Skipped(run_id=RUN_ID, case=huge, reason="needs 192 GiB", needed_bytes=192 * 2**30),
        Failed(
            run_id=RUN_ID,
            case=comm_case(Collective.SCATTER, 2**20),
            cause="timeout",
            message="no end after 60 s",
            ranks=(5,),
            traceback="Thread 1",
        ),
    ]
