"""From the flags of `stepmark train` to its cases."""

import dataclasses
import itertools
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from stepmark.app.models import read_models
from stepmark.cli import train_refusals
from stepmark.cli.options import Values, whole_numbers, words
from stepmark.cli.train_spread import spread, strategies_of
from stepmark.core.dtypes import DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.model import ModelConfig
from stepmark.core.parallel import ParallelConfig
from stepmark.core.train_case import TrainCase
from stepmark.core.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
    Schedule,
)

Kind = TypeVar("Kind", bound=StrEnum)

# What --find-batch tries, until one is too large.
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Fields of a case that a flag of the same name gives as it is.
_PLAIN = (
    *("attention", "loss_chunks", "cuda_graph", "async_tp", "lr", "clip", "reshard"),
    *("prefetch", "blocks_per_group", "bucket_mb", "pp_schedule", "pp_microbatches"),
    *("workers", "seed", "scale", "compile_mode", "grad_accum"),
)


def cases(values: Values, device: str, world_size: int) -> list[TrainCase]:
    """All strategies, models, batches and schedules that the flags name. Raises ConfigError."""
    train_refusals.check_flags(values)
    found: dict[str, TrainCase] = {}
    schedules = words(values.get("schedule")) or [Schedule.STEP.value]
    for strategy, schedule in itertools.product(strategies_of(values), schedules):
        one = {**values, "strategy": strategy, "schedule": schedule}
        for case in _of_strategy(one, device, world_size):
            found.setdefault(case.case_id, case)
    kinds = {(case.model.name, case.strategy, case.schedule) for case in found.values()}
    if values.get("find_batch") and len(kinds) > 1:
        named = ", ".join(sorted(" ".join(kind) for kind in kinds))
        raise ConfigError("find-batch", named, "one model, one strategy and one schedule")
    return list(found.values())


def _of_strategy(values: Values, device: str, world_size: int) -> Iterator[TrainCase]:
    strategy, parallel = spread(values, world_size)
    chosen = _techniques(values, device, strategy, parallel)
    kind = DataParallel(strategy) if strategy in ("ddp", "fsdp") else DataParallel.NONE
    for model, file in _models(values, parallel.tp):
        for mbs in _batches(values, parallel, chosen):
            case = TrainCase(
                model=model,
                mbs=mbs,
                parallel=parallel,
                data_parallel=kind,
                device=device,
                backend="nccl" if device == "cuda" else "gloo",
                model_file=file,
                **chosen,  # type: ignore[arg-type]
            )
            train_refusals.check(case, values)
            train_refusals.check_run(values, case)
            yield case


def _models(values: Values, tp: int) -> Iterator[tuple[ModelConfig, str]]:
    """Each with the file it was read from, "" for a built-in one."""
    asked = words(values.get("model"))
    if not asked:
        raise ConfigError("model", "missing", "a name, or a file such as config.json")
    for word in asked:
        of_file = read_models(word, values.get("scale"), tp)
        is_file = Path(word).suffix == ".json" or Path(word).is_dir()
        if len(of_file) != 1:
            raise ConfigError("model", word, f"a file of one model, not {len(of_file)}")
        yield _with_length(of_file[0], values.get("seq_len")), word if is_file else ""


def _with_length(model: ModelConfig, seq_len: int | None) -> ModelConfig:
    if seq_len is None:
        return model
    most = model.max_positions or 2**24
    if not 1 <= seq_len <= most:
        raise ConfigError("seq-len", seq_len, f"from 1 to {most} for {model.name}")
    return dataclasses.replace(model, seq_len=seq_len)


def _batches(values: Values, parallel: ParallelConfig, chosen: dict[str, object]) -> list[int]:
    if values.get("mbs"):
        return sorted(set(whole_numbers(str(values["mbs"]), "mbs")))
    unit = 1
    if parallel.pp > 1:  # a pipeline cuts it into parts
        per_rank = 2 if chosen.get("pp_schedule") == "interleaved" else 1
        unit = int(values.get("pp_microbatches") or 0) or parallel.pp * per_rank
    return [unit * one for one in _BATCHES] if values.get("find_batch") else [unit]


def _techniques(
    values: Values, device: str, strategy: str, parallel: ParallelConfig
) -> dict[str, object]:
    """Every other field of a case, by name."""
    found = {name: values[name] for name in _PLAIN if values.get(name) is not None}
    schedule = _member(Schedule, values, "schedule", Schedule.STEP)
    fp8 = _member(Fp8, values, "fp8_recipe", Fp8.TENSORWISE) if values.get("fp8") else Fp8.NONE
    low = device == "cuda" or fp8 is not Fp8.NONE
    precision = _member(
        Precision, values, "precision", Precision.AMP if low else Precision.FP32
    )
    recompute, blocks = recomputed(values)
    gathers = strategy == "fsdp" and fp8 is Fp8.TENSORWISE
    asked = values.get("fp8_all_gather")
    found |= {
        "schedule": schedule,
        "grad_sync": _member(GradSync, values, "grad_sync", GradSync.EVERY),
        "precision": precision,
        "reduce_dtype": _reduce_dtype(values, strategy, precision, parallel),
        "fp8": fp8,
        "fp8_head": bool(values.get("fp8_head")),
        "fp8_all_gather": gathers if asked is None else asked,
        "compile": _scope(values),
        "recompute": recompute,
        "recompute_blocks": blocks,
        "data": _data(values),
    }
    found.setdefault("grad_accum", 1 if schedule is Schedule.STEP else 8)
    found.setdefault("workers", 2 if device == "cuda" else 0)
    return found


def _member(kind: type[Kind], values: Values, field: str, default: Kind) -> Kind:
    text = values.get(field)
    offered = [one for one in kind if one != "none"]
    if text is None:
        return default
    if text not in offered:
        raise ConfigError(field.replace("_", "-"), text, f"one of {', '.join(offered)}")
    return kind(text)


def _scope(values: Values) -> CompileScope:
    scope = _member(CompileScope, values, "compile_scope", CompileScope.BLOCK)
    return scope if values.get("compile") else CompileScope.NONE


def _reduce_dtype(
    values: Values, strategy: str, precision: Precision, parallel: ParallelConfig
) -> DType:
    """As llm-train-bench's: bf16 for FSDP, fp32 for DDP of fp32 weights."""
    if (text := values.get("reduce_dtype")) is not None:
        found = parse_dtype(text)
        if found not in (DType.FP32, DType.BF16):
            raise ConfigError("reduce-dtype", text, "fp32 or bf16")
        return found
    low = precision in (Precision.BF16, Precision.MASTER)
    low = low or (precision is Precision.AMP and strategy == "fsdp")
    return DType.BF16 if low and parallel.gradient_ranks > 1 else DType.FP32


def _data(values: Values) -> str:
    if path := values.get("text_file"):
        if values.get("text"):
            raise ConfigError("text-file", path, "it cannot be combined with --text")
        try:
            size = Path(path).stat().st_size if Path(path).is_file() else None
        except OSError:
            size = None
        if size is None:
            raise ConfigError("text-file", path, "a file that can be read")
        if not size:
            raise ConfigError("text-file", path, "a file with text in it")
        return str(path)
    return "text" if values.get("text") else "random"


def recomputed(values: Values) -> tuple[Recompute, tuple[int, int]]:
    """--sac and --sac-freq: none, full, ops, or q of every p blocks. Raises ConfigError."""
    text, freq = values.get("sac"), values.get("sac_freq")
    if text is not None and freq is not None:
        raise ConfigError(
            "sac-freq", freq, "it cannot be combined with --sac, which says the same"
        )
    if freq is not None:
        some, every = _of_every(freq, "sac-freq")
        # llm-train-bench's way to say off.
        return (Recompute.NONE, (1, 1)) if (some, every) == (1, 1) else _blocks(some, every)
    if text is None:
        return Recompute.NONE, (1, 1)
    if text in (Recompute.NONE, Recompute.FULL, Recompute.OPS):
        return Recompute(text), (1, 1)
    return _blocks(*_of_every(text, "sac"))


def _blocks(some: int, every: int) -> tuple[Recompute, tuple[int, int]]:
    if some == every:
        return Recompute.FULL, (1, 1)
    return Recompute.BLOCKS, (some, every)


def _of_every(text: str, field: str) -> tuple[int, int]:
    some, slash, every = text.partition("/")
    allowed = "none, full, ops, or q/p with 1 <= q <= p, such as 1/4"
    if field == "sac-freq":
        allowed = "q/p with 1 <= q <= p, such as 1/4; 1/1 is none"
    numbers = [part for part in (some, every) if part.isdecimal() and len(part) < 10]
    if not slash or len(numbers) < 2 or not 1 <= int(some) <= int(every):
        raise ConfigError(field, text, allowed)
    return int(some), int(every)
