"""Made-up records of training: two strategies, cycles, a straggler, FP8, what went wrong."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.tables.records import RUN_ID, device_info, made_up_device, run_info

from stepmark.cases.message import MessageKind, Tally
from stepmark.cases.record import (
    Check,
    Failed,
    Measured,
    Record,
    RunInfo,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    Recompute,
    Schedule,
    Training,
)
from stepmark.ground.dtypes import DType
from stepmark.model.device import DeviceSpec
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig

STRAGGLER = 3
MEMORY = 140 * 2**30
# Of a sample: forward, backward, optimizer where there is one.
SHARES = (0.3, 0.55, 0.1)


def train_run(num_ranks: int = 8) -> RunInfo:
    run = run_info(num_ranks)
    devices = tuple(
        replace(device_info(rank), memory_bytes=MEMORY) for rank in range(num_ranks)
    )
    found = replace(run.environment, devices=devices)
    return replace(run, environment=found, command="stepmark train llama-3.1-8b")


def train_device() -> DeviceSpec:
    """1,000 TFLOP/s in bf16, 2,000 in FP8, at 2 GHz."""
    peaks = {DType.BF16: 1e15, DType.FP8_E4M3: 2e15}
    return replace(made_up_device(), peak_flops_per_s=peaks)


def model(name: str = "llama-3.1-8b", seq_len: int = 4096) -> ModelConfig:
    return replace(find_model(name), seq_len=seq_len)


def single(**more: object) -> TrainCase:
    return TrainCase(model=model(), mbs=2, **more)  # type: ignore[arg-type]


def fsdp(num_ranks: int = 8, **more: object) -> TrainCase:
    given: dict[str, object] = {
        "model": model(),
        "mbs": 2,
        "parallel": ParallelConfig(dp_shard=num_ranks),
        "data_parallel": DataParallel.FSDP,
        **more,
    }
    return TrainCase(**given)  # type: ignore[arg-type]


def micro(num_ranks: int = 8, grad_accum: int = 4) -> TrainCase:
    return fsdp(
        num_ranks,
        schedule=Schedule.MICRO,
        grad_accum=grad_accum,
        compile=CompileScope.BLOCK,
        recompute=Recompute.BLOCKS,
        recompute_blocks=(1, 4),
    )


def told(
    case: TrainCase, seconds: Sequence[Sequence[float]], warmup: int = 2, **more: object
) -> Training:
    """Phases are SHARES of each sample; the last of a cycle has the optimizer."""
    num_samples, cycle, ranks = len(seconds[0]), case.cycle, len(seconds)
    has_optim = [index % cycle == cycle - 1 for index in range(num_samples)]

    def share(of: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(of * value for value in values) for values in seconds)

    optim = tuple(
        tuple(SHARES[2] * v * has for v, has in zip(values, has_optim, strict=True))
        for values in seconds
    )
    given: dict[str, object] = {
        "tokens_per_sample": case.tokens_per_step * case.micro_steps,
        "cycle": cycle,
        "num_params": case.model.num_params,
        "warmup_s": tuple((5 * values[0],) * warmup for values in seconds),
        "loss": tuple(11.0 - 0.1 * index for index in range(warmup + num_samples)),
        "fwd_s": share(SHARES[0]),
        "bwd_s": share(SHARES[1]),
        "optim_s": optim,
        "data_s": share(0.001),
        "build_s": 12.5,
        "first_s": 40.0,
        "allocated_bytes": tuple((60 + rank) * 2**30 for rank in range(ranks)),
        "reserved_bytes": tuple((70 + rank) * 2**30 for rank in range(ranks)),
        "alloc_retries": (0,) * ranks,
        "attention_run": "cudnn",
        "data": "random tokens, shifted labels",
        **more,
    }
    return Training(**given)  # type: ignore[arg-type]


def train_measured(
    case: TrainCase,
    seconds: Sequence[Sequence[float]],
    *,
    launch: int = 1,
    num_wrong: int = 0,
    throttle: tuple[str, ...] = (),
    training: Training | None = None,
) -> Measured:
    """seconds[rank][sample]."""
    ranks = len(seconds)
    check = Check(
        max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=9, reference="finite losses"
    )
    return Measured(
        run_id=RUN_ID,
        case=case,
        samples=Samples(seconds=tuple(map(tuple, seconds)), method=f"train-{case.schedule}/1"),
        checks=(replace(check, num_wrong=num_wrong), *(check,) * (ranks - 1)),
        telemetry=(Telemetry(sm_clock_hz=1.7e9, power_w=690.0, throttle=throttle),) * ranks,
        backend_run="torch",
        peak_memory_bytes=80 * 2**30,
        started_at=0.0,
        launch=launch,
        training=training or told(case, seconds),
    )


def flat(case: TrainCase, time_s: float, n: int = 8, **more: object) -> Measured:
    """The same time for every rank and sample."""
    return train_measured(case, [[time_s] * n] * case.num_ranks, **more)  # type: ignore[arg-type]


def noisy(case: TrainCase, time_s: float, random: Random, n: int = 12) -> Measured:
    """Ranks within 1 %; the straggler 8 % slower."""
    seconds = [
        [
            time_s * random.uniform(0.995, 1.005) * (1.08 if rank == STRAGGLER else 1.0)
            for _ in range(n)
        ]
        for rank in range(case.num_ranks)
    ]
    return train_measured(case, seconds)


MESSAGES: tuple[tuple[MessageKind, Tally], ...] = tuple(
    (
        MessageKind(
            collective=name,
            dtype="bf16",
            group="dp_shard",
            num_ranks=8,
            phase=phase,
            call_bytes=size,
            message_bytes=8 * size,
        ),
        Tally(calls=8 * calls, ranks=8),
    )
    for name, phase, size, calls in (
        ("all_gather", "forward", 2**20, 32),
        ("all_gather", "backward", 2**20, 31),
        ("reduce_scatter", "backward", 2**21, 32),
    )
)


def with_messages() -> Measured:
    case, seconds = fsdp(), [[0.7] * 6] * 8
    return train_measured(case, seconds, training=told(case, seconds, messages=MESSAGES))


def full_train_run(seed: int = 5) -> list[Record]:
    """Both schedules, several techniques and every status; the same at each call."""
    random = Random(seed)
    fp8 = fsdp(fp8=Fp8.TENSORWISE, fp8_head=True, compile=CompileScope.MODEL)
    bad = fsdp(lr=30.0)
    return [
        flat(single(), 0.9, throttle=("sw_power_cap",)),
        noisy(fsdp(), 0.7, random),
        noisy(micro(), 0.7, random, n=18),
        noisy(fp8, 0.5, random),
        flat(bad, 0.7, num_wrong=3),
        Failed(
            run_id=RUN_ID,
            case=fsdp(mbs=64),
            cause="oom",
            message="tried 200 GiB; mbs 8 would fit",
            ranks=(0,),
        ),
        Skipped(run_id=RUN_ID, case=fsdp(fp8=Fp8.TE), reason="TransformerEngine is missing"),
    ]
