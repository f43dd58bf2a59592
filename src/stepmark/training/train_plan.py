"""From the options of `stepmark train` to its cases."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from stepmark.cases.fields import given_values
from stepmark.cases.train_case import NARROW, TrainCase
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.model.model_names import distinct_names
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.training import train_refusals
from stepmark.training.train_options import TrainOptions
from stepmark.workloads.models import is_file, read_models

# Micro-batches that --find-batch tries, until one is too large.
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_DATA_PARALLEL = ("ddp", "fsdp")
_MODEL_AXES = ("tp", "pp", "cp")  # each is a strategy, too


def cases(options: TrainOptions, device: str, world_size: int) -> list[TrainCase]:
    """Plan all strategies, schedules, models and batches. Raises ConfigError."""
    train_refusals.check_options(options)
    planned: dict[str, TrainCase] = {}
    for strategy, schedule in itertools.product(
        options.strategy or ("",), options.schedule or (Schedule.STEP,)
    ):
        for case in _strategy_cases(options, strategy, schedule, device, world_size):
            planned.setdefault(case.case_id, case)
    kinds = {(case.model, case.strategy, case.schedule) for case in planned.values()}
    if options.find_batch and len(kinds) > 1:
        model_names = distinct_names(model for model, *_ in kinds)
        names = ", ".join(
            sorted(
                f"{model_names[model]} {strategy} {schedule}"
                for model, strategy, schedule in kinds
            )
        )
        raise ConfigError("find-batch", names, "one model, one strategy and one schedule")
    return list(planned.values())


def only_case(options: TrainOptions, device: str, world_size: int) -> TrainCase:
    """Return the case of options that give one. Raises ConfigError for several."""
    planned = cases(options, device, world_size)
    if len(planned) > 1:
        fields: dict[str, Sequence[object]] = {
            "model": options.model_names,
            "strategy": options.strategy or (),
            "schedule": options.schedule or (),
            "mbs": options.mbs or (),
        }
        field, values = max(fields.items(), key=lambda item: len(item[1]))
        allowed = f"one value: {len(planned)} steps are too many here"
        raise ConfigError(field, ",".join(map(str, values)), allowed)
    return planned[0]


def _strategy_cases(
    options: TrainOptions, strategy: str, schedule: Schedule, device: str, world_size: int
) -> Iterator[TrainCase]:
    strategy, parallel = layout(options, strategy, world_size)
    techniques = _techniques(options, device, strategy, schedule, parallel)
    for model, file in _models(options, parallel.tp):
        for mbs in _batches(options, parallel):
            case = TrainCase(
                model=model,
                mbs=mbs,
                parallel=parallel,
                data_parallel=data_parallel(strategy),
                device=device,
                backend="nccl" if device == "cuda" else "gloo",
                schedule=schedule,
                model_file=file,
                **techniques,
            )
            train_refusals.check(case, options)
            yield case


def _models(options: TrainOptions, tp: int) -> Iterator[tuple[ModelConfig, str]]:
    """Yield each model with the file it was read from, "" for a built-in one."""
    for name in options.model_names:
        models = read_models(name, options.scale, tp)
        if len(models) != 1:
            raise ConfigError("model", name, f"a file of one model, not {len(models)}")
        (model,), seq_len = models, options.seq_len
        most = model.max_positions or 2**24
        if seq_len is not None and not 1 <= seq_len <= most:
            raise ConfigError("seq-len", seq_len, f"from 1 to {most} for {model.name}")
        model = dataclasses.replace(model, seq_len=seq_len or model.seq_len)
        model = model.with_layers(options.num_layers or model.num_layers)
        yield model, name if is_file(name) else ""


def _batches(options: TrainOptions, parallel: ParallelConfig) -> list[int]:
    if options.mbs:
        return sorted(set(options.mbs))
    unit = 1
    if parallel.pp > 1:  # a pipeline divides a micro-batch into parts
        (values,) = given_values(TrainCase, options)
        schedule = PipelineSchedule(values.get("pp_schedule", PipelineSchedule.ONE_F_ONE_B))
        chunks = schedule.num_chunks(values.get("pp_stages", 2))
        unit = values.get("pp_microbatches") or parallel.pp * chunks
    return [unit * count for count in _BATCHES] if options.find_batch else [unit]


def _techniques(
    options: TrainOptions,
    device: str,
    strategy: str,
    schedule: Schedule,
    parallel: ParallelConfig,
) -> dict[str, Any]:
    """Return every other field of a case, by name."""
    on_gpu = device == "cuda"
    (values,) = given_values(TrainCase, options)
    precision, fp8 = _precision(options, values.get("precision"), on_gpu=on_gpu)
    gathers_fp8 = strategy == "fsdp" and fp8 is Fp8.TENSORWISE
    recompute, blocks = options.ac or options.sac_freq or (Recompute.NONE, (1, 1))
    scope = CompileScope(options.compile_scope or CompileScope.BLOCK)
    return {
        "grad_accum": 1 if schedule is Schedule.STEP else 8,
        **strategy_defaults(strategy, precision, parallel),
        "small_first_bucket": "bucket_mb" not in values,
        "workers": 2 if on_gpu else 0,
        "scale": options.scale or "",
        "num_layers": options.num_layers,
        **values,
        "precision": precision,
        "fp8": fp8,
        "fp8_head": bool(options.fp8_head),
        "fp8_all_gather": (
            gathers_fp8 if options.fp8_all_gather is None else options.fp8_all_gather
        ),
        "compile": scope if options.compile else CompileScope.NONE,
        "recompute": recompute,
        "recompute_blocks": blocks,
        "data": options.text_file or ("text" if options.text else "random"),
    }


def _precision(
    options: TrainOptions, name: str | None, *, on_gpu: bool
) -> tuple[Precision, Fp8]:
    """Return the precision of weights, and the recipe of linear layers' products.

    name: of --precision.
    """
    fp8 = NARROW.get(name or "", Fp8.TENSORWISE if options.fp8 else Fp8.NONE)
    if options.fp8_recipe:
        fp8 = Fp8(options.fp8_recipe)
    if name in NARROW:
        return Precision.AMP, fp8
    default = Precision.AMP if on_gpu or options.fp8 else Precision.FP32
    return Precision(name or default), fp8


def data_parallel(strategy: str) -> DataParallel:
    return DataParallel(strategy) if strategy in _DATA_PARALLEL else DataParallel.NONE


def strategy_defaults(
    strategy: str, precision: Precision, parallel: ParallelConfig
) -> dict[str, Any]:
    """Return the fields whose default depends on the strategy.

    torchtitan reduces in fp32, torch in the gradients' own type.
    """
    is_low = precision in (Precision.BF16, Precision.MASTER)
    return {
        "reshard": "no" if strategy == "fsdp" and parallel.pp > 1 else "yes",
        "reduce_dtype": DType.BF16 if is_low and parallel.gradient_ranks > 1 else DType.FP32,
    }


def placement_notes(cases: Sequence[TrainCase], ranks_per_host: int) -> list[str]:
    """Return notes on tensor-parallel groups, of consecutive ranks, that reach over hosts."""
    degrees = sorted({case.parallel.tp for case in cases})
    return [
        f"tp {tp}: its groups reach over hosts of {ranks_per_host} ranks, so each layer waits "
        f"for the network; a tp that divides {ranks_per_host} keeps them inside"
        for tp in degrees
        if ranks_per_host % tp
    ]


def default_nproc(options: TrainOptions, device: str) -> str:
    """Return --nproc, or all accelerators but for `single`; on a CPU as few as possible."""
    if options.nproc:
        return options.nproc
    strategies = options.strategy or ("",)
    if strategies == ("single",):
        return "1"
    if device == "cuda":
        return "all"
    return str(max(_fewest_ranks(options, strategy) for strategy in strategies))


def _fewest_ranks(options: TrainOptions, strategy: str) -> int:
    """Return ranks with which each axis that is given has its degree, and the strategy 2."""
    degrees = {axis: getattr(options, axis) or 1 for axis in _MODEL_AXES}
    if strategy in degrees:
        degrees[strategy] = max(2, degrees[strategy])
    data_ranks = 1
    if strategy in _DATA_PARALLEL:
        shards = max(2, options.ep or 1) if strategy == "fsdp" else 1
        data_ranks = max(2, (options.dp_replicate or 1) * shards)
    return data_ranks * math.prod(degrees.values())


def layout(options: TrainOptions, strategy: str, world_size: int) -> tuple[str, ParallelConfig]:
    """Return the strategy and how many ranks each axis has. Raises ConfigError.

    strategy: "" for the default one.
    """
    degrees = {axis: getattr(options, axis) or 1 for axis in _MODEL_AXES}
    strategy = strategy or _default_strategy(degrees, world_size)
    others = math.prod(size for axis, size in degrees.items() if axis != strategy)
    if world_size % others:
        raise ConfigError("nproc", world_size, f"a multiple of {_product(degrees)}")
    if strategy in degrees:
        degree = world_size // others
        value = getattr(options, strategy)
        if value not in (None, degree):
            allowed = f"{degree}, which is what {world_size} ranks leave for it"
            raise ConfigError(strategy, value, allowed)
        degrees[strategy] = degree
    data_ranks = world_size // math.prod(degrees.values())
    _check_ranks(strategy, degrees, data_ranks, world_size)
    axes = _data_axes(options, strategy, data_ranks, degrees["cp"])
    # cp alone keeps whole weights and reduces gradients, as DDP does.
    return "ddp" if strategy == "cp" else strategy, ParallelConfig(**degrees, **axes)


def _default_strategy(degrees: dict[str, int], world_size: int) -> str:
    if world_size == 1:
        return "single"
    if math.prod(degrees.values()) == world_size:
        if 1 < degrees["cp"] < world_size:
            return "fsdp"  # tp and pp alone reduce no gradients
        return next(axis for axis in ("pp", "tp", "cp") if degrees[axis] > 1)
    return "fsdp"


def _product(degrees: dict[str, int]) -> str:
    """Return e.g. "--tp (2)" or "--tp x --pp (2 x 4 = 8)"."""
    split = {axis: size for axis, size in degrees.items() if size > 1}
    sizes = " x ".join(map(str, split.values()))
    total = f" = {math.prod(split.values())}" if len(split) > 1 else ""
    return f"{' x '.join(f'--{axis}' for axis in split)} ({sizes}{total})"


def _check_ranks(
    strategy: str, degrees: dict[str, int], data_ranks: int, world_size: int
) -> None:
    if strategy == "single" and world_size > 1:
        raise ConfigError("nproc", world_size, "1 with --strategy single")
    if degrees.get(strategy) == 1:
        allowed = f"it needs at least 2 ranks, and has 1 of {world_size}"
        raise ConfigError("strategy", strategy, allowed)
    if strategy in _DATA_PARALLEL and data_ranks * degrees["cp"] == 1:
        axes = f" next to {_product(degrees)}" if max(degrees.values()) > 1 else ""
        allowed = f"it needs at least 2 data ranks{axes}, and has 1"
        raise ConfigError("strategy", strategy, allowed)


def _data_axes(
    options: TrainOptions, strategy: str, data_ranks: int, cp: int
) -> dict[str, int]:
    copies = options.dp_replicate
    ep = options.ep or 1
    if strategy != "fsdp":
        if copies not in (None, data_ranks):
            raise ConfigError("dp-replicate", copies, f"{data_ranks} with {strategy}")
        if ep > 1:
            raise ConfigError("ep", ep, "1, or --strategy fsdp, whose ranks it divides")
        return {"dp_replicate": data_ranks}
    copies = copies or 1
    if data_ranks % copies or copies == data_ranks * cp:
        allowed = f"a divisor of {data_ranks} data ranks that leaves 2 or more to shard over"
        raise ConfigError("dp-replicate", copies, allowed)
    shards = data_ranks // copies
    if shards * cp % ep:
        raise ConfigError("ep", ep, f"a divisor of {shards * cp} FSDP ranks")
    return {"dp_replicate": copies, "dp_shard": shards, "ep": ep}
