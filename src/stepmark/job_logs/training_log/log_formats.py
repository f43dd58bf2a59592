"""What trainers print of a step, one entry per format; each figure with what must follow it.

The lines are those of the sources that `source` names. A figure counts only with the text after
it, so that one that was cut inside is left out rather than read as another number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from stepmark.ground.units import GIB, MIB

# Patterns of figures, in whose first group that matches the figure is, and its unit in SI.
Figures = Mapping[str, tuple[str, float]]

BRIDGE = "Megatron-Bridge"
_MEGATRON_LM = "Megatron-LM"
_HUGGING_FACE = "Hugging Face Trainer"

# Digits are limited, so that a line of a million digits costs nothing.
_FINITE = r"[+-]?\d{1,18}(?:,\d{3}){0,6}(?:\.\d{0,18})?(?:[eE][+-]?\d{1,2})?"
# Megatron prints NAN, others nan.
_PLAIN = rf"(?:{_FINITE}|[+-]?(?i:nan|inf))"
_N = f"({_PLAIN})"
_FACT = f"({_FINITE})"
_HUMAN = f"({_PLAIN}[KMGBTPE]?)"
_FIXED = r"(\d{1,15}\.\d{4}|-?(?i:nan|inf))$"  # by its decimals a whole figure
_WHOLE = r"(\d{1,15})"
_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def number_of(text: str) -> float:
    """Return the value of 1,234 or 12.5, of 1.23K (nanotron) or of 1:02:03 (tqdm)."""
    if ":" in text:
        parts = [float(part) for part in reversed(text.split(":"))]
        return sum(part * 60.0**place for place, part in enumerate(parts))
    scale = _SUFFIXES.get(text[-1:], 1.0)
    return float(text.rstrip("KMGBTPE").replace(",", "")) * scale


def _figures(units: Mapping[str, float] | None = None, /, **patterns: str) -> Figures:
    return {name: (text, (units or {}).get(name, 1.0)) for name, text in patterns.items()}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern; most commands that import this need none."""
    return re.compile(pattern, re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class LogFormat:
    """What a trainer prints of a step.

    source: where the line is written. marks: texts of which each line of a step has one.
    first: begins a step of several lines; None: every line is one. figures: by fields of
    LoggedStep; `samples` in place of a number. required: without these, or with two of one of
    them in a step of several lines, a step is torn.
    facts: by fields of LogFacts; their lines have one of fact_marks. resolution_s: of the
    clock, where times are its differences. digits: significant ones of all figures; None: as
    many as are printed. last_digits: unit of the last digit of figures with fixed decimals, as
    the log has them. is_mean: figures are means since the line before. not_steps: lines with
    such a mark that state no step. total: a rate of all steps so far, its unit, and what it is.
    untimed: lines of losses, where another line states the time. zero: a bar that begins, with
    the number of its steps. within: trainers whose jobs print these lines, too. rate_mark:
    without it, a step states no time yet. remark: what limits all its figures.
    """

    trainer: str
    source: str
    marks: tuple[str, ...]
    figures: Figures
    required: tuple[str, ...] = ("number", "step_s")
    first: str | None = None
    fact_marks: tuple[str, ...] = ()
    facts: Figures = field(default_factory=dict)
    resolution_s: float = 0.0
    digits: int | None = None
    last_digits: Mapping[str, float] = field(default_factory=dict)
    is_mean: bool = True
    not_steps: str | None = None
    total: tuple[str, str, str] | None = None
    untimed: str | None = None
    zero: str | None = None
    within: tuple[str, ...] = ()
    rate_mark: str = ""
    remark: str = ""

    @property
    def has_numbers(self) -> bool:
        return bool({"number", "samples"} & self.figures.keys())


_MEGATRON = _figures(
    {"step_s": 1e-3},
    # Not its first space: prefixes of torchrun and mpirun may take that.
    number=rf"iteration +{_WHOLE}/ *\d",
    step_s=rf"elapsed time per iteration \(ms\): {_N} \|",
    tflops_gpu=rf"throughput per GPU \(TFLOP/s/GPU\): {_N} \|",
    batch=rf"global batch size: +{_WHOLE} \|",
    loss=rf" lm loss: {_N} \|",
    grad_norm=rf"grad norm: {_N} \|",
    learning_rate=rf"\| learning rate: {_N} \|",
    num_skipped=rf"number of skipped iterations: +{_WHOLE} \|",
    num_nan=rf"number of nan iterations: +{_WHOLE} \|",
)
_MEGATRON_FACTS = _figures(
    {"memory_bytes": MIB},
    memory_bytes=rf" memory \(MB\) \|.{{1,80}} max reserved: {_FACT}(?: \||$)",
    num_ranks=rf"using world size: {_WHOLE}, data-parallel",
    seq_len=rf"\bseq_length(?: \.{{3,}}|:) {_WHOLE}$",
)
FORMATS = (
    LogFormat(
        trainer=_MEGATRON_LM,
        source="NVIDIA/Megatron-LM, megatron/training/training.py, training_log",
        marks=("elapsed time per iteration (ms): ",),
        figures=_MEGATRON,
        fact_marks=("using world size: ", "seq_length", " memory (MB) | "),
        facts=_MEGATRON_FACTS,
        last_digits={"step_s": 1e-4},
    ),
    LogFormat(
        trainer="Megatron-DeepSpeed",
        source="bigscience-workshop/Megatron-DeepSpeed, megatron/training.py, training_log",
        marks=("elapsed time per iteration (s): ",),
        figures={
            **_MEGATRON,
            **_figures(
                step_s=rf"elapsed time per iteration \(s\): {_N} \|",
                tflops_gpu=rf" TFLOPs: {_N} \|",
            ),
        },
        fact_marks=("using world size: ", "seq_length", " memory (MB) | "),
        facts=_MEGATRON_FACTS,
        last_digits={"step_s": 1e-2},
    ),
    LogFormat(
        trainer=BRIDGE,
        source="NVIDIA-NeMo/Megatron-Bridge, training/utils/train_utils.py, training_log",
        marks=("Step Time : ",),
        figures=_figures(
            step_s=rf"Step Time : {_N}s GPU utilization",
            tflops_gpu=rf"GPU utilization: {_N}(?=MODEL_TFLOP/s/GPU)",
        ),
        required=("step_s",),
        last_digits={"step_s": 1e-2},
        within=(_MEGATRON_LM,),
    ),
    LogFormat(
        trainer="NeMo",
        source="NVIDIA/NeMo, nemo/lightning/pytorch/callbacks/progress_printer.py",
        marks=("train_step_timing in s: ",),
        figures=_figures(
            # An iteration is of its epoch.
            number=r"Training epoch \d{1,6}, iteration "
            rf"(?:\d{{1,15}}/.* global_step: {_WHOLE}(?: \||$)"
            rf"|{_WHOLE}/\d(?!.* global_step: ))",
            step_s=rf"train_step_timing in s: {_N}(?: \||$)",
            batch=rf"global_batch_size: {_WHOLE}(?: \||$)",
            loss=rf"reduced_train_loss: {_N}(?: \||$)",
            grad_norm=rf"grad_norm: {_N}(?: \||$)",
            learning_rate=rf" lr: {_N}(?: \||$)",
            memory_bytes=rf"peak_memory_usage: {_N}(?: \||$)",
        ),
        digits=4,
    ),
    LogFormat(
        trainer="NeMo",
        source="NVIDIA/NeMo 1, in the bar of Lightning's callbacks/progress/tqdm_progress.py",
        marks=("train_step_timing in s=",),
        figures=_figures(
            number=rf"\| {_WHOLE}/\d{{1,12}} \[",
            step_s=rf"train_step_timing in s={_N}[,\]]",
            loss=rf"reduced_train_loss={_N}[,\]]",
        ),
        digits=3,
    ),
    LogFormat(
        trainer="torchtitan",
        source="pytorch/torchtitan, torchtitan/components/metrics.py (train.py before 2025)",
        marks=("tps: ", "wps: "),
        figures=_figures(
            {"memory_bytes": GIB},
            number=rf"(?<!validate )\bstep: +{_WHOLE}  loss:",
            tokens_per_s_gpu=rf" [tw]ps: {_N}  \w",
            tflops_gpu=rf" tflops: {_N}  \w",
            loss=rf" loss: +{_N}  \w",
            grad_norm=rf" grad_norm: +{_N}  \w",
            memory_bytes=rf" memory: +{_N}GiB\(",
        ),
        required=("number", "tokens_per_s_gpu"),
        last_digits={"tokens_per_s_gpu": 1.0},
        not_steps=r"\bvalidate step: ",
        fact_marks=(
            "device mesh with",
            "global batch size ",
            "tokens per train step",
            " total parameters",
        ),
        facts=_figures(
            batch=rf"global batch size {_WHOLE}, ",
            seq_len=rf"sequence length {_WHOLE}, ",
            tokens=rf", {_WHOLE} tokens per train step, ",
            parameters=rf"size: {_FACT} total parameters",
            # All degrees but ep, whose ranks are among the others.
            num_ranks=r"-D device mesh with \[.{1,80}\], \[([\d, ]{1,40})\]"
            r"|with parallelism: (pp=\d+, dp_replicate=\d+, dp_shard=\d+, cp=\d+, tp=\d+),",
        ),
    ),
    LogFormat(
        trainer="DeepSpeed pipeline",
        source="deepspeedai/DeepSpeed, deepspeed/runtime/pipe/engine.py, train_batch",
        marks=("iter time (s): ",),
        figures=_figures(
            number=rf"steps: {_WHOLE} loss:",
            step_s=rf"iter time \(s\): {_N} samples/sec",
            loss=rf" loss: {_N} ",
        ),
        last_digits={"step_s": 1e-3},
    ),
    LogFormat(
        trainer="DeepSpeed",
        source="deepspeedai/DeepSpeed, deepspeed/utils/timer.py, ThroughputTimer",
        marks=("SamplesPerSec=",),
        figures=_figures(
            {"memory_bytes": GIB},
            number=rf"/global_step={_WHOLE}, RunningAvg",
            samples_per_s=rf"CurrSamplesPerSec={_N}, ",
            memory_bytes=rf"MaxMemAllocated={_N}GB",
        ),
        required=("number", "samples_per_s"),
        is_mean=False,
        # engine.py: from forward to step, unless the engine loads the data
        remark="its timer may leave out the time between two steps, such as data loading",
        # Before 0.7: avg_samples_per_sec of utils/timer.py, at micro-steps.
        total=(
            rf"\d/\d{{1,12}}, (?:RunningAvg)?SamplesPerSec={_FACT}(?:, |$)",
            "samples/s",
            "the mean since the start, warm-up and slow steps included",
        ),
        within=(
            *(_MEGATRON_LM, "Megatron-DeepSpeed", "DeepSpeed pipeline"),
            *(_HUGGING_FACE, "Composer"),
        ),
        fact_marks=("train_batch_size ...",),
        facts=_figures(batch=rf"\btrain_batch_size \.{{3,}} {_WHOLE}$"),
    ),
    LogFormat(
        trainer="nanotron",
        source="huggingface/nanotron, src/nanotron/trainer.py, train_step_logs",
        marks=("time_per_iteration_ms: ",),
        figures=_figures(
            {"step_s": 1e-3},
            number=rf"\biteration: {_WHOLE} / \d",
            step_s=rf"time_per_iteration_ms: {_HUMAN} \|",
            tokens_per_s=rf" tokens_per_sec: {_HUMAN} \|",
            tokens_per_s_gpu=rf" tokens_per_sec_per_gpu: {_HUMAN} \|",
            tflops_gpu=rf" model_tflops_per_gpu: {_HUMAN}(?: \||$)",
            loss=rf" lm_loss: {_HUMAN} \|",
            learning_rate=rf" lr: {_HUMAN} \|",
            grad_norm=rf" grad_norm: {_HUMAN}(?: \||$)",
            memory_bytes=rf" cuda_max_memory_reserved: {_HUMAN}(?: \||$)",
        ),
        fact_marks=(" | global_batch_size: ",),
        facts=_figures(
            batch=rf"^(?!.*lm_loss).* global_batch_size: {_WHOLE} \|",
            seq_len=rf" sequence_length: {_WHOLE} \|",
        ),
        digits=3,
    ),
    LogFormat(
        trainer="Composer",
        source="mosaicml/composer, loggers/console_logger.py and callbacks/speed_monitor.py",
        marks=(
            "[batch=",
            "[token=",
            "[sample=",
            "[epoch=",
            "rain time/batch: ",
            "rain trainer/global_step: ",
            "rain throughput/",
            "rain loss/train/total: ",
            "rain memory/peak_",
        ),
        first=r"\[(?:batch|token|sample|epoch)=\d",
        figures=_figures(
            {"memory_bytes": 1e9},
            number=rf"rain (?:time/batch|trainer/global_step): {_WHOLE}$",
            samples_per_s=rf"rain throughput/samples_per_sec: {_FIXED}",
            batches_per_s=rf"rain throughput/batches_per_sec: {_FIXED}",
            tokens_per_s=rf"rain throughput/tokens_per_sec: {_FIXED}",
            tokens_per_s_gpu=rf"rain throughput/device/tokens_per_sec: {_FIXED}",
            loss=rf"rain loss/train/total: {_FIXED}",
            memory_bytes=rf"rain memory/peak_reserved_mem: {_FIXED}",
        ),
        required=("number", "samples_per_s"),
        last_digits=dict.fromkeys(
            ("samples_per_s", "batches_per_s", "tokens_per_s", "tokens_per_s_gpu"), 1e-4
        ),
        rate_mark="rain throughput/",
        remark="its rates are means over a window of batches (100, unless configured), which "
        "smear outliers",
        fact_marks=("global_train_batch_size: ", "max_seq_len: ", "n_gpus: "),
        facts=_figures(
            batch=rf"\bglobal_train_batch_size: {_WHOLE}$",
            seq_len=rf"\bmax_seq_len: {_WHOLE}$",
            num_ranks=rf"\bn_gpus: {_WHOLE}$",
        ),
    ),
    LogFormat(
        trainer=_HUGGING_FACE,
        source="huggingface/transformers, trainer_callback.py, ProgressCallback; tqdm's bar",
        marks=("%|", "'loss': ", "'train_steps_per_second': "),
        # Bars of datasets have a name in front; the trainer's have none.
        first=r"^\s*\d{1,3}%\|",
        figures=_figures(
            number=rf"\| {_WHOLE}/\d{{1,12}} \[",
            clock_s=r"\| \d{1,12}/\d{1,12} \[((?:\d{1,4}:)?\d\d:\d\d)<",
            loss=rf"'loss': '?{_N}'?[,}}]",
            grad_norm=rf"'grad_norm': '?{_N}'?[,}}]",
            learning_rate=rf"'learning_rate': '?{_N}'?[,}}]",
        ),
        required=("number", "clock_s", "loss"),
        not_steps=r"^[^'|]*[^\s'|]\s+\d{1,3}%\|",  # a bar with a name
        # speed_metrics of trainer_utils.py
        total=(
            rf"'train_steps_per_second': '?{_FACT}'?[,}}]",
            "steps/s",
            "the number of all steps, also before a resumption, over the time since the start",
        ),
        untimed=r"^\{'loss': ",
        zero=r"\| 0/(\d{1,12}) \[0{1,2}:00<",
        fact_marks=("Total train batch size", "Number of trainable parameters"),
        facts=_figures(
            batch=rf"Total train batch size .{{1,80}} = {_FACT}$",
            parameters=rf"Number of trainable parameters = {_FACT}$",
        ),
        resolution_s=1.0,
        remark="its clock goes on while it evaluates and saves",
    ),
    LogFormat(
        trainer="MLPerf",
        source="mlcommons/logging, mlperf_logging/mllog/mllog.py, rules training_5.1.0",
        marks=('"key": "block_start"', '"key": "block_stop"'),
        first=r'"key": "block_start"',
        figures=_figures(
            {"begin_s": 1e-3, "clock_s": 1e-3},
            begin_s=rf'"time_ms": {_WHOLE}, .*"key": "block_start"',
            clock_s=rf'"time_ms": {_WHOLE}, .*"key": "block_stop"',
            begin_samples=rf'"key": "block_start".*"samples_count": {_WHOLE}[,}}]',
            samples=rf'"key": "block_stop".*"samples_count": {_WHOLE}[,}}]',
        ),
        required=("begin_s", "clock_s", "begin_samples", "samples"),
        fact_marks=('"key": "global_batch_size"', '"key": "max_sequence_length"'),
        facts=_figures(
            batch=rf':::MLLOG .*"key": "global_batch_size", "value": {_WHOLE}, ',
            seq_len=rf':::MLLOG .*"key": "max_sequence_length", "value": {_WHOLE}, ',
        ),
        resolution_s=1e-3,
        within=(_MEGATRON_LM, BRIDGE, "NeMo", "torchtitan", _HUGGING_FACE, "Composer"),
        remark="each line is a block of steps between two evaluations",
    ),
)
