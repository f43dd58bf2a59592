"""The options of `stepmark train`, llm-train-bench's spellings among them."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from stepmark.cases.fields import option_values, with_fields
from stepmark.cases.train_case import Count, TrainCase
from stepmark.cases.training import CompileScope, DataParallel, Fp8, Recompute, Schedule
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.option_groups import (
    MBS,
    MICRO_BATCH,
    Axes,
    MeasureOptions,
    ModelChoice,
    Ranks,
)
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


Checkpointing = Annotated[
    Blocks, Reader(read=_read_blocks, show=show_blocks, metavar="none|full|selective|Q/P")
]
Frequency = Annotated[
    Blocks,
    Reader(
        read=_read_frequency,
        show=lambda value: "1/1" if value[0] is Recompute.NONE else show_blocks(value),
        metavar="Q/P",
    ),
]
Strategies = Annotated[tuple[str, ...], comma_list(words_of(*STRATEGIES))]
Schedules = Annotated[tuple[Schedule, ...], comma_list(one_of(Schedule))]
Times = Annotated[int, between(1, 10**6)]


@group
class Model(ModelChoice):
    """Model."""

    models: tuple[str, ...] = flag(
        "model name(s), config.json, or a framework's file",
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
    config: str | None = flag(
        "a framework's file beside another MODEL: Megatron arguments, torchtitan, DeepSpeed",
        metavar="FILE",
        rare=True,
    )


@group
class Parallelism:
    """Layout."""

    strategy: Strategies | None = flag("how ranks share the work [fsdp; one rank: single]")
    nproc: str | None = flag(
        "ranks [all accelerators; CPU: as few as possible]",
        "--nproc",
        "-g",
        metavar="N|all",
    )


@group
@with_fields(TrainCase)
class Batch:
    """Data."""

    mbs: WholeNumbers | None = flag(
        f"{MBS} [1]",
        *MICRO_BATCH,
    )
    text: bool = flag(
        "real text, so that the loss must fall [random tokens]",
        default=False,
        rare=True,
    )
    text_file: str | None = flag("text to train on", metavar="PATH", rare=True)


@group
@with_fields(TrainCase)
class OptimizerStep:
    """Optimizer step."""

    schedule: Schedules | None = flag(
        "one sample: with optimizer, or micro: it runs every Nth [step]", rare=True
    )


@group
@with_fields(TrainCase)
class Numbers:
    """Precision."""

    fp8: bool = flag(
        "as --precision fp8, also over master and bf16",
        "--fp8",
        "--use-fp8",
        "--use_fp8",
        default=False,
        rare=True,
    )
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
@with_fields(TrainCase)
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
    compile: bool | None = flag(
        "torch.compile [no; run: on accelerators]",
        "--compile/--no-compile",
        "--pt-compile",
        "--pt_compile",
    )
    compile_scope: Annotated[str, words_of("block", "layers", "loss", "model")] | None = flag(
        "what is compiled: each block, and the head with the loss; only the layers or the "
        "loss; or the model as one graph [block]",
        rare=True,
    )
    compile_fallback: bool = flag("run eagerly where compiling fails", default=False, rare=True)


@group
@with_fields(TrainCase)
class Sharding:
    """Settings of one strategy."""


@group
class Sampling:
    """Measurement."""

    steps: Times | None = flag(
        "least steady samples [30; micro 10 x --grad-accum]",
        "--steps",
        "--n-steps",
        "--n_steps",
    )
    launches: Times = flag("times that it is measured, in new processes", default=1)
    find_batch: bool = flag("search the fastest micro-batch that fits", default=False)
    profile: bool = flag("Kineto traces of a few more steps and a table", default=False)
    profile_ranks: Ranks | None = flag(
        "ranks that write a trace, e.g. 0,1 [0]", rare=True, metavar="RANK,..."
    )
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


# Options with a default of their own that a framework's file may give, too.
_OF_FILES = (
    *("clip", "attention"),
    *("pp_schedule", "pp_stages", "pp_microbatches", "pp_split"),
)


def options_of(case: TrainCase) -> TrainOptions:
    """Return the options that measure this case alone."""
    # Beside a framework's file defaults are given, too, as they win over the file's options.
    is_configured = bool(case.model_file) and not case.model_file.endswith(".json")
    values = option_values(case, explicit=_OF_FILES if is_configured else ())
    axes = case.parallel
    # Only FSDP has copies by choice: elsewhere they are all data ranks.
    copies = ("dp_replicate",) if case.data_parallel is DataParallel.FSDP else ()
    for axis in ("tp", "pp", "cp", "ep", *copies):
        if (degree := getattr(axes, axis)) > 1 or is_configured:
            values[axis] = degree
    if case.dtype.is_block_format:
        values["precision"] = case.fp8.value
    elif case.fp8 is not Fp8.NONE:
        values |= {
            "fp8": True,
            "fp8_recipe": case.fp8.value,
            "fp8_all_gather": case.fp8_all_gather,
        }
    if case.compile is not CompileScope.NONE:
        values |= {"compile": True, "compile_scope": case.compile.value}
    elif is_configured:
        values["compile"] = False
    if case.recompute is not Recompute.NONE or is_configured:
        values["ac"] = case.recompute, case.recompute_blocks
    if case.data != "random":
        values |= {"text": True} if case.data == "text" else {"text_file": case.data}
    strategy = case.data_parallel.value
    if case.data_parallel is DataParallel.NONE:
        divided = (axis for axis in ("pp", "tp", "cp") if getattr(axes, axis) > 1)
        strategy = next(divided, "single")
    return TrainOptions(
        models=(case.model_file or case.model.name.partition("@")[0],),
        strategy=(strategy,),
        nproc=str(case.num_ranks),
        mbs=(case.mbs,),
        seq_len=case.model.seq_len,
        schedule=(case.schedule,),
        scale=case.scale or None,
        num_layers=case.num_layers,
        fp8_head=case.fp8_head or None,
        device=case.device,
        **values,
    )
