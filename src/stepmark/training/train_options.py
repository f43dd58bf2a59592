"""The options of `stepmark train`, llm-train-bench's spellings among them."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.option_groups import MICRO_BATCH, Axes, MeasureOptions, ModelChoice, Ranks
from stepmark.ground.options import (
    Reader,
    WholeNumbers,
    between,
    comma_list,
    flag,
    group,
    one_of,
    words_of,
)

if TYPE_CHECKING:  # --help is faster without it
    from stepmark.cases.train_case import TrainCase

STRATEGIES = ("single", "ddp", "fsdp", "tp", "pp", "cp")
Blocks = tuple[Recompute, tuple[int, int]]  # with BLOCKS: q of every p blocks


def _read_blocks(text: str, field: str) -> Blocks:
    if text in ("none", "full", "ops", "selective"):
        return Recompute(text), (1, 1)
    if "/" not in text:
        words = ("none", "full", "selective")
        raise not_one_of(field, text, words, ", or q/p with 1 <= q <= p, such as 1/4")
    some, every = _fraction(text, field, "none, full, selective, or ")
    return (Recompute.FULL, (1, 1)) if some == every else (Recompute.BLOCKS, (some, every))


def _read_frequency(text: str, field: str) -> Blocks:
    """Read as llm-train-bench does, where 1/1 means off."""
    if _fraction(text, field, "") == (1, 1):
        return Recompute.NONE, (1, 1)
    return _read_blocks(text, field)


def _show_frequency(value: Blocks) -> str:
    return "1/1" if value[0] is Recompute.NONE else show_blocks(value)


def _fraction(text: str, field: str, others: str) -> tuple[int, int]:
    some, slash, every = text.partition("/")
    numbers = [part for part in (some, every) if part.isdecimal() and len(part) < 10]
    if not slash or len(numbers) < 2 or not 1 <= int(some) <= int(every):
        raise ConfigError(field, text, f"{others}q/p with 1 <= q <= p, such as 1/4")
    return int(some), int(every)


def show_blocks(value: Blocks) -> str:
    """Return the value as --ac takes it."""
    recompute, (some, every) = value
    if recompute is Recompute.BLOCKS:
        return f"{some}/{every}"
    return "selective" if recompute is Recompute.OPS else recompute.value


_REDUCE = (DType.FP32, DType.BF16)
Checkpointing = Annotated[
    Blocks, Reader(read=_read_blocks, show=show_blocks, metavar="none|full|selective|Q/P")
]
Frequency = Annotated[Blocks, Reader(read=_read_frequency, show=_show_frequency, metavar="Q/P")]
ReduceDType = Annotated[
    DType,
    Reader(read=lambda text, field: parse_dtype(text, field, _REDUCE), metavar="fp32|bf16"),
]
Strategies = Annotated[tuple[str, ...], comma_list(words_of(*STRATEGIES))]
Schedules = Annotated[tuple[Schedule, ...], comma_list(one_of(Schedule))]
CompileMode = Annotated[
    str, words_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
]
AttentionBackend = Annotated[str, words_of("auto", "cudnn", "flash", "efficient", "math")]
Count = Annotated[int, between(1, 65536)]
Groups = Annotated[int, between(1, 1024)]
Times = Annotated[int, between(1, 10**6)]


@group
class Model(ModelChoice):
    """Model."""

    models: tuple[str, ...] = flag(
        "model name(s), or config.json",
        default=(),
        argument=True,
        metavar="MODEL...",
        names="model",
    )
    model: str | None = flag(
        "the same as MODEL: one name, or several with commas", rare=True, names="model"
    )
    num_layers: Count | None = flag(
        "layers instead of the model's", "--num-layers", "--layers", rare=True
    )


@group
class Parallelism:
    """Layout."""

    strategy: Strategies | None = flag(
        "how ranks share the work [single for one rank, else fsdp]"
    )
    nproc: str | None = flag(
        "ranks [all accelerators; on a CPU as few as possible]", "--nproc", "-g"
    )


@group
class Batch:
    """Data."""

    mbs: WholeNumbers | None = flag(
        "sequences per micro-step and data rank, with --pp of all its micro-batches [1]",
        *MICRO_BATCH,
    )
    text: bool = flag(
        "real text, so that the loss must fall [random tokens]",
        default=False,
    )
    text_file: str | None = flag("text to train on", metavar="PATH", rare=True)
    workers: Annotated[int, between(0, 256)] | None = flag(
        "processes of the data loader [2 on accelerators, 0 on a CPU]",
        "--workers",
        "--n-workers",
        "--n_workers",
        rare=True,
    )
    seed: Annotated[int, between(0, 2**31 - 1)] | None = flag(
        "seed of weights and data [0]", rare=True
    )


@group
class OptimizerStep:
    """Optimizer step."""

    schedule: Schedules | None = flag(
        "one sample: with optimizer, or micro: it runs every Nth [step]"
    )
    grad_accum: Count | None = flag(
        "micro-steps per optimizer step [1; 8 with --schedule micro]",
        "--grad-accum",
        "--grad-acc-steps",
        "--grad_acc_steps",
    )
    grad_sync: GradSync | None = flag("micro-steps that reduce gradients [every]", rare=True)
    lr: Annotated[float, between(1e-12, 1e12)] | None = flag(
        "learning rate of AdamW [0.0003]", rare=True
    )
    clip: Annotated[float, between(0.0, 1e6)] | None = flag(
        "gradient norm to clip to; 0 = no clipping [1]", rare=True
    )


@group
class Numbers:
    """Precision."""

    precision: Precision | None = flag(
        "amp: fp32 weights, autocast to bf16; master: bf16 weights, whose fp32 copies the "
        "optimizer updates [amp; fp32 on a CPU]"
    )
    reduce_dtype: ReduceDType | None = flag(
        "type in which data ranks reduce gradients [bf16 for fsdp with amp and for bf16 "
        "weights, else fp32]",
        rare=True,
    )
    fp8: bool = flag("linear layers in FP8", "--fp8", "--use-fp8", "--use_fp8", default=False)
    fp8_recipe: Annotated[str, words_of("tensorwise", "rowwise", "te")] | None = flag(
        "of torchao, or te: TransformerEngine's [tensorwise]", rare=True
    )
    fp8_head: bool | None = flag(
        "the output head, too [no]", "--fp8-head/--no-fp8-head", rare=True
    )
    fp8_all_gather: bool | None = flag(
        "fsdp gathers weights in FP8 [yes for tensorwise]",
        "--fp8-all-gather/--no-fp8-all-gather",
        rare=True,
    )


@group
class Techniques:
    """Techniques."""

    ac: Checkpointing | None = flag(
        "activation checkpointing; selective keeps attention, collectives and half of the "
        "products; Q/P: Q of every P blocks [none]",
        "--ac",
        "--sac",
    )
    sac_freq: Frequency | None = flag(
        "llm-train-bench's --ac, where 1/1 is none", "--sac-freq", "--sac_freq", rare=True
    )
    compile: bool = flag(
        "torch.compile", "--compile", "--pt-compile", "--pt_compile", default=False
    )
    compile_scope: Annotated[str, words_of("block", "model")] | None = flag(
        "what one graph is of [block]", rare=True
    )
    compile_mode: CompileMode | None = flag(
        "default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs [default]",
        "--compile-mode",
        "--compile_mode",
        rare=True,
    )
    compile_fallback: bool = flag("run eagerly where compiling fails", default=False, rare=True)
    attention: AttentionBackend | None = flag("backend of attention [auto]", rare=True)
    loss_chunks: Count | None = flag(
        "head and loss in this many parts of the tokens [1]", rare=True
    )
    cuda_graph: bool = flag(
        "single: the whole step as one CUDA graph", default=False, rare=True
    )


@group
class Sharding:
    """Settings of one strategy."""

    reshard: str | None = flag(
        "fsdp, after forward: yes, no, or a number of ranks [yes]", rare=True
    )
    prefetch: Groups | None = flag("fsdp: groups gathered ahead [1]", rare=True)
    blocks_per_group: Groups | None = flag("fsdp: blocks gathered together [1]", rare=True)
    bucket_mb: Annotated[int, between(1, 2**20)] | None = flag(
        "ddp: MB of gradients per bucket [25]", rare=True
    )
    async_tp: bool = flag(
        "tp with --compile: overlap parts of a product with their communication",
        default=False,
        rare=True,
    )
    pp_schedule: Annotated[str, words_of("1f1b", "interleaved")] | None = flag(
        "schedule of the pipeline [1f1b]", rare=True
    )
    pp_microbatches: Annotated[int, between(0, 65536)] | None = flag(
        "micro-batches into which a pipeline divides --mbs [the number of stages]", rare=True
    )


@group
class Sampling:
    """Measurement."""

    steps: Times | None = flag(
        "steady samples at least [30; with micro 10 x --grad-accum]",
        "--steps",
        "--n-steps",
        "--n_steps",
    )
    launches: Times = flag("times that all is measured in new processes", default=1)
    find_batch: bool = flag("search the fastest micro-batch that fits", default=False)
    profile: bool = flag("Kineto traces of a few more steps, and their table", default=False)
    profile_ranks: Ranks | None = flag("ranks that write a trace, e.g. 0,1 [0]", rare=True)
    messages: bool = flag(
        "every collective of one more step, as a histogram", default=False, rare=True
    )


@group
class CaseOptions(
    Model, Axes, Parallelism, Batch, OptimizerStep, Numbers, Techniques, Sharding
):
    """Training steps."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return names and files from the command line. Raise ConfigError."""
        if self.models and self.model:
            raise ConfigError("model", self.model, "given once: as words or as --model")
        text = ",".join(self.models) or self.model or ""
        names = tuple(filter(None, map(str.strip, text.split(","))))
        if not names:
            raise ConfigError("model", "missing", "a name, or a file such as config.json")
        return names


def given_options(options: CaseOptions) -> dict[str, Any]:
    """Return the options of a training step that differ from their defaults."""
    return {
        field.name: value
        for field in dataclasses.fields(CaseOptions)
        if (value := getattr(options, field.name)) is not field.default and value != ()
    }


@dataclass(frozen=True, kw_only=True)
class TrainOptions(CaseOptions, Sampling, MeasureOptions):
    """stepmark train."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(CaseOptions, MeasureOptions):
    """stepmark calibrate."""


# Options that are the case's field of the same name; those of _ALWAYS have defaults that
# depend on the device or on other options.
_ALWAYS = ("precision", "grad_accum", "reduce_dtype", "workers")
SAME_IN_CASE = (
    *_ALWAYS,
    *("grad_sync", "compile_mode", "attention", "loss_chunks", "lr", "clip", "reshard"),
    *("prefetch", "blocks_per_group", "bucket_mb", "pp_schedule", "pp_microbatches", "seed"),
    *("cuda_graph", "async_tp", "scale", "num_layers"),
)


def options_of(case: "TrainCase") -> TrainOptions:
    """Return the options that measure this case alone."""
    defaults = {field.name: field.default for field in dataclasses.fields(case)}
    values: dict[str, Any] = {
        name: getattr(case, name)
        for name in SAME_IN_CASE
        if name in _ALWAYS or getattr(case, name) != defaults[name]
    }
    axes = case.parallel
    # Only FSDP has copies by choice: elsewhere they are all data ranks.
    copies = ("dp_replicate",) if case.data_parallel is DataParallel.FSDP else ()
    for axis in ("tp", "pp", "cp", "ep", *copies):
        if (degree := getattr(axes, axis)) > 1:
            values[axis] = degree
    is_fp8 = case.fp8 is not Fp8.NONE
    if is_fp8:
        values |= {"fp8": True, "fp8_recipe": case.fp8.value}
    if is_fp8 or case.fp8_all_gather:
        values["fp8_all_gather"] = case.fp8_all_gather
    if case.compile is not CompileScope.NONE:
        values |= {"compile": True, "compile_scope": case.compile.value}
    if case.recompute is not Recompute.NONE:
        values["ac"] = case.recompute, case.recompute_blocks
    if case.data != "random":
        values |= {"text": True} if case.data == "text" else {"text_file": case.data}
    strategy = case.data_parallel.value
    if case.data_parallel is DataParallel.NONE:
        strategy = next((axis for axis in ("pp", "tp", "cp") if axis in values), "single")
    return TrainOptions(
        models=(case.model_file or case.model.name.partition("@")[0],),
        strategy=(strategy,),
        nproc=str(case.num_ranks),
        mbs=(case.mbs,),
        seq_len=case.model.seq_len,
        schedule=(case.schedule,),
        fp8_head=case.fp8_head or None,
        device=case.device,
        **values,
    )
