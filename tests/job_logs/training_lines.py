"""Logs of trainers, made by the format strings of their sources from steps that are known.

Each version names the file and the release (or commit) of which the format is. No time here was
measured: they are drawn by a seed.
"""

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step that a log states: its number, seconds and loss, as exact as they are printed."""

    number: int
    step_s: float
    loss: float


BATCH, SEQ_LEN, RANKS = 128, 4096, 16
TOKENS = BATCH * SEQ_LEN


def known_steps(seed: int, count: int, interval: int = 1) -> list[KnownStep]:
    random = Random(seed)
    return [
        KnownStep(
            number=place * interval,
            step_s=round(random.uniform(2.0, 9.0), 1),
            loss=round(random.uniform(2.0, 11.0), 4),
        )
        for place in range(1, count + 1)
    ]


@dataclass(frozen=True, slots=True)
class Version:
    """A trainer's format. head: facts; lines: of a step; rounding: of its time, relative."""

    name: str
    trainer: str
    head: tuple[str, ...]
    lines: Callable[[KnownStep], Sequence[str]]
    rounding: float = 1e-9
    # A figure that ends its line may be cut within it unseen.
    has_open_end: bool = False


def _megatron_old(step: KnownStep) -> list[str]:
    """v2.6 (3860e995), megatron/training.py."""
    text = f" iteration {step.number:8d}/{9000:8d} |"
    text += f" consumed samples: {step.number * BATCH:12d} |"
    text += f" elapsed time per iteration (ms): {step.step_s * 1000.0:.1f} |"
    text += f" learning rate: {1.5e-4:.3E} | global batch size: {BATCH:5d} |"
    text += f" lm loss: {step.loss:.6E} | loss scale: {1.0:.1f} | grad norm: {1.25:.3f} |"
    return [f"{text} number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"]


def _megatron(step: KnownStep) -> list[str]:
    """d98e8a64 (August 2026), megatron/training/training.py."""
    text = f" [{datetime.datetime(2026, 8, 1, 12, 0, 1, 250_000)}]"
    text += f" iteration {step.number:8d}/{9000:8d} |"
    text += f" consumed samples: {step.number * BATCH:12d} |"
    text += f" elapsed time per iteration (ms): {step.step_s * 1000.0:.1f} |"
    text += f" throughput per GPU (TFLOP/s/GPU): {312.5:.1f} |"
    text += f" energy per GPU (J/iter/GPU): {900.0:.1f} | power per GPU (W/GPU): {640.0:.1f} |"
    text += f" learning rate: {1.5e-4:.6E} | global batch size: {BATCH:5d} |"
    text += f" lm loss: {step.loss:.6E} | load_balancing_loss: {1.0:.6E} |"
    text += f" loss scale: {1.0:.1f} | grad norm: {1.25:.3f} | num zeros: 0 |"
    return [f"{text} number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"]


def _bridge(step: KnownStep) -> list[str]:
    """Megatron-Bridge 067f987d (August 2026), training/utils/train_utils.py."""
    first = f"Step Time : {step.step_s:.2f}s GPU utilization: {312.5:.1f}MODEL_TFLOP/s/GPU"
    return [first, *_megatron(step)]


def _nemo(step: KnownStep) -> list[str]:
    """NeMo 01f7dbc5, nemo/lightning/pytorch/callbacks/progress_printer.py."""
    text = f"Training epoch 0, iteration {step.number}/9000 | lr: {1.5e-4:.4}"
    text += f" | global_batch_size: {BATCH} | global_step: {step.number}"
    text += f" | reduced_train_loss: {step.loss:.4} | train_step_timing in s: {step.step_s:.4}"
    return [text]


def _nemo_bar(step: KnownStep) -> list[str]:
    """NeMo 1: Lightning's bar with figures of three digits."""
    text = (
        f"Epoch 0: : {step.number % 100:3d}%|#    | {step.number}/9000 [00:09<10:00, v_num=0, "
    )
    text += f"reduced_train_loss={step.loss:.3g}, global_step={step.number}, "
    text += f"consumed_samples={step.number * BATCH}, train_step_timing in s={step.step_s:.3g}]"
    return [text]


def _titan_rate(step: KnownStep) -> float:
    return TOKENS / RANKS / step.step_s


def _torchtitan_old(step: KnownStep) -> list[str]:
    """Before 4d182a13 (2024), train.py: "wps", no gradient norm."""
    wps = _titan_rate(step)
    return [
        f"[rank0]:2024-10-01 10:00:00,123 - root - INFO - \033[36mstep: {step.number:2}  "
        f"\033[32mloss: {step.loss:7.4f}  \033[33mmemory: {42.5:5.2f}GiB({53.7:.2f}%)  "
        f"\033[34mwps: {round(wps):,}  \033[35mmfu: {41.25:.2f}%\033[39m"
    ]


def _torchtitan(step: KnownStep) -> list[str]:
    """b5bcd76c (August 2026), torchtitan/components/metrics.py."""
    tps = _titan_rate(step)
    return [
        f"[titan] 2026-08-01 10:00:00,123 - root - INFO - \033[31mstep: {step.number:2}  "
        f"\033[32mloss: {step.loss:8.5f}  \033[38;2;180;60;0mgrad_norm: {1.25:7.4f}  "
        f"\033[38;2;54;234;195mmemory: {42.5:5.2f}GiB({53.7:.2f}%)  "
        f"\033[34mtps: {round(tps):,}  \033[36mtflops: {312.5:,.2f}  "
        f"\033[35mmfu: {41.25:.2f}%\033[39m"
    ]


def _deepspeed(step: KnownStep) -> list[str]:
    """v0.8.3 and edaa7221 (August 2026), deepspeed/utils/timer.py."""
    rate = BATCH / step.step_s
    return [
        "[2026-08-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] "
        f"step={step.number}, skipped=0, lr=[0.00015], mom=[(0.9, 0.95)]",
        "[2026-08-01 10:00:00,124] [INFO] [timer.py:260:stop] epoch=0/"
        f"micro_step={step.number}/global_step={step.number}, "
        f"RunningAvgSamplesPerSec={rate * 1.01}, CurrSamplesPerSec={rate}, "
        f"MemAllocated={12.5}GB, MaxMemAllocated={42.5}GB",
    ]


def _deepspeed_pipeline(step: KnownStep) -> list[str]:
    """v0.3.0 to edaa7221 (August 2026), deepspeed/runtime/pipe/engine.py."""
    text = f"steps: {step.number} loss: {step.loss:0.4f} "
    return [f"{text}iter time (s): {step.step_s:0.3f} samples/sec: {BATCH / step.step_s:0.3f}"]


def _composer(step: KnownStep) -> list[str]:
    """6405188 (April 2026), composer/loggers/console_logger.py."""
    figures = {
        "time/batch": step.number,
        "loss/train/total": step.loss,
        "memory/peak_reserved_mem": 42.5,
        "throughput/batches_per_sec": 1 / step.step_s,
        "throughput/samples_per_sec": BATCH / step.step_s,
        "throughput/device/samples_per_sec": BATCH / step.step_s / RANKS,
        "throughput/tokens_per_sec": TOKENS / step.step_s,
        "throughput/device/tokens_per_sec": TOKENS / step.step_s / RANKS,
        "time/train": 0.25,
    }
    shown = [
        f"\t Train {name}: {value}"
        if isinstance(value, int)
        else f"\t Train {name}: {value:.4f}"
        for name, value in figures.items()
    ]
    return [f"[batch={step.number}/9000]:", *shown]


def _composer_old(step: KnownStep) -> list[str]:
    """v0.12.0, composer/loggers/console_logger.py and callbacks/speed_monitor.py."""
    return [
        f"[epoch=1][batch={step.number}/9000]:",
        f"\t Train trainer/global_step: {step.number}",
        f"\t Train loss/train/total: {step.loss:.4f}",
        f"\t Train throughput/samples_per_sec: {BATCH / step.step_s:.4f}",
        "\t Train wall_clock/train: 12.5000",
    ]


def human_format(value: float, billion: str) -> str:
    """nanotron, logging/base.py: three significant digits."""
    if abs(value) < 1:
        return f"{value:.3g}"
    value = float(f"{value:.3g}")
    place = 0
    while abs(value) >= 1000:
        value /= 1000.0
        place += 1
    digits = f"{value:f}".rstrip("0").rstrip(".")
    return f"{digits}{['', 'K', 'M', billion, 'T', 'P', 'E'][place]}"


def _nanotron_old(step: KnownStep) -> list[str]:
    """v0.4, src/nanotron/trainer.py."""
    return [_nanotron_line(step, "elapsed_time_per_iteration_ms", BATCH, "G")]


def _nanotron(step: KnownStep) -> list[str]:
    """2411b022 (April 2026), src/nanotron/trainer.py."""
    text = _nanotron_line(step, "time_per_iteration_ms", TOKENS, "B")
    return [text.replace(" | grad_norm", " | eta: 1:02:03 | grad_norm")]


def _nanotron_line(step: KnownStep, name: str, batch: int, billion: str) -> str:
    figures = {
        "consumed_tokens": step.number * TOKENS,
        name: step.step_s * 1000,
        "tokens_per_sec": TOKENS / step.step_s,
        "tokens_per_sec_per_gpu": TOKENS / step.step_s / RANKS,
        "global_batch_size": batch,
        "lm_loss": step.loss,
        "lr": 1.5e-4,
        "model_tflops_per_gpu": 312.5,
        "grad_norm": 1.25,
    }
    words = [f"{key}: {human_format(value, billion)}" for key, value in figures.items()]
    prefix = "\033[2;3m08/01 10:00:00 [INFO|DP=0|PP=0|TP=0]\033[0m: "
    return f"{prefix}iteration: {step.number} / 9000 | {' | '.join(words)}"


_DOTS = "  seq_length {} 4096".format("." * 38)
_MEGATRON_HEAD = (
    f"using world size: {RANKS}, data-parallel size: 8, context-parallel size: 1, "
    "tensor-model-parallel size: 2, pipeline-model-parallel size: 1",
    "------------------------ arguments ------------------------",
    _DOTS,
    "-------------------- end of arguments ---------------------",
)
_TITAN_LAST = "gradient accumulation steps 1, "
VERSIONS = (
    Version("megatron 2.6", "Megatron-LM", _MEGATRON_HEAD, _megatron_old),
    Version("megatron 2026", "Megatron-LM", _MEGATRON_HEAD, _megatron),
    Version("bridge", "Megatron-Bridge", ("  seq_length: 4096",), _bridge),
    Version("nemo", "NeMo", (), _nemo, has_open_end=True),
    Version("nemo 1", "NeMo", (), _nemo_bar, rounding=5e-3),
    Version(
        "torchtitan 2024",
        "torchtitan",
        (
            f"[rank0]:Building 2-D device mesh with ['dp_shard', 'tp'], [{RANKS // 2}, 2]",
            "[rank0]:Trainer is initialized with local batch size 8, global batch size 128, "
            f"{_TITAN_LAST}sequence length 4096, total steps 9000 (warmup 2).",
        ),
        _torchtitan_old,
        rounding=2e-4,
    ),
    Version(
        "torchtitan 2026",
        "torchtitan",
        (
            "[titan] 2026-08-01 10:00:00,123 - root - INFO - Building device mesh with "
            "parallelism: pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=4",
            "[titan] 2026-08-01 10:00:00,123 - root - INFO - Trainer is initialized with 65536 "
            f"tokens per DP rank, {TOKENS} tokens per train step, {_TITAN_LAST}"
            "maximum context length 4096, total steps 9000 (warmup 2)",
        ),
        _torchtitan,
        rounding=2e-4,
    ),
    Version(
        "deepspeed",
        "DeepSpeed",
        (
            "[2026-08-01 10:00:00,123] [INFO] [config.py:1004:print]   train_batch_size "
            f"{'.' * 13} {BATCH}",
        ),
        _deepspeed,
    ),
    Version("deepspeed pipeline", "DeepSpeed pipeline", (), _deepspeed_pipeline),
    Version(
        "composer",
        "Composer",
        (f"global_train_batch_size: {BATCH}", "max_seq_len: 4096", f"n_gpus: {RANKS}"),
        _composer,
        rounding=1e-5,
    ),
    Version(
        "composer 0.12",
        "Composer",
        (f"global_train_batch_size: {BATCH}", "max_seq_len: 4096"),
        _composer_old,
        rounding=1e-5,
    ),
    Version(
        "nanotron 0.4",
        "nanotron",
        (
            f"[Start training] datetime: 2024-08-01 | mbs: 2 | grad_accum: 4 | "
            f"global_batch_size: {BATCH} | sequence_length: 4096 | train_steps: 9000",
        ),
        _nanotron_old,
        rounding=5e-3,
    ),
    Version(
        "nanotron 2026",
        "nanotron",
        (
            "mbs: 2 | grad_accum: 4 | cp: 1 | sequence_length: 4096 | "
            f"global_batch_size: {BATCH} | train_steps: 9000",
        ),
        _nanotron,
        rounding=5e-3,
    ),
)


def hugging_face(steps: Sequence[KnownStep], *, is_new: bool = False) -> list[str]:
    """transformers: ProgressCallback with tqdm; version 5 prints figures as text."""
    lines = ["  Total train batch size (w. parallel, distributed & accumulation) = 128"]
    total = steps[-1].number
    clock_s = 0.0
    for step in steps:
        clock_s += step.step_s
        minutes, seconds = divmod(int(clock_s), 60)
        elapsed = f"{minutes:02d}:{seconds:02d}"
        bar = (
            f"{100 * step.number // total:3d}%|███   | {step.number}/{total} [{elapsed}<10:00,"
        )
        figures: dict[str, object] = {"loss": step.loss, "grad_norm": 1.25, "epoch": 0.1}
        if is_new:
            figures = {name: f"{value:.4g}" for name, value in figures.items()}
        lines.append(f"\r{bar}  6.00s/it]\r{' ' * 40}\r{figures}")
    return lines


def mlperf(blocks: Sequence[KnownStep], steps_of_block: int = 10) -> list[str]:
    """mllog.py, closed_llama31_405b.yaml of training_5.1.0: blocks between evaluations."""

    def line(time_s: float, kind: str, key: str, value: object, **metadata: object) -> str:
        entry = {
            "namespace": "",
            "time_ms": round(time_s * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "train.py", "lineno": 7, **metadata},
        }
        return f":::MLLOG {json.dumps(entry)}"

    point, start, stop = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"
    time_s = 1_785_000_000.0
    lines = [
        line(time_s, point, "global_batch_size", BATCH),
        line(time_s, point, "max_sequence_length", SEQ_LEN),
        line(time_s, start, "run_start", None),
    ]
    samples = 0
    for block in blocks:
        lines.append(line(time_s, start, "block_start", None, samples_count=samples))
        time_s += block.step_s * steps_of_block
        samples += BATCH * steps_of_block
        lines.append(line(time_s, stop, "block_stop", None, samples_count=samples))
        lines.append(line(time_s, start, "eval_start", None, samples_count=samples))
        time_s += 33.25
        lines.append(line(time_s, stop, "eval_stop", None, samples_count=samples))
    return [*lines, line(time_s, stop, "run_stop", None, status="success")]
