"""Options of `workload generate` that a framework's own file gives: --config FILE."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.cases.train_case import NARROW
from stepmark.framework_files.architecture import NAMES, widths_of
from stepmark.framework_files.table import Options, Translation
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, dashed, exact
from stepmark.ground.options import options as declared
from stepmark.model.model import ModelConfig
from stepmark.model.product_precision import ProductPrecision, Recipe, by_recipe
from stepmark.step.workload import Workload
from stepmark.workloads import workload_model
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES, find_rule
from stepmark.workloads.workload_options import GenerateOptions

ARCHITECTURE = frozenset(NAMES)
_PRECISION = (
    *("fp8_format", "fp8_recipe", "fp4_format", "fp4_recipe"),
    *("fp8_param_gather", "fp8_all_gather"),
)
_MODEL = {*NAMES, "model", "model_name", "seq_len", "make_vocab_size_divisible_by"}


def read(path: str) -> Translation:
    """Return a framework's file as options. Raises ConfigError."""
    from stepmark.framework_files import configuration  # noqa: PLC0415 - 10 ms

    return configuration.read(path)


def placed(options: GenerateOptions) -> GenerateOptions:
    """Return the options with a framework's file that --model names as --config."""
    from stepmark.framework_files import configuration  # noqa: PLC0415 - 10 ms

    if options.config or not configuration.is_framework_file(options.model):
        return options
    return replace(options, model=None, config=options.model)


def framework_of(options: GenerateOptions, file: Translation | None) -> str:
    """Return the framework whose rules a job follows. Raises ConfigError."""
    own = file.framework if file else "megatron"
    framework = find_rule(options.framework or own)
    if file and RULES[framework].module != RULES[own].module:
        raise ConfigError("framework", framework, f"{own}, whose file {options.config} is")
    return framework


def with_file(options: GenerateOptions, file: Translation) -> GenerateOptions:
    """Return the options with those of the file that are not given. Raises ConfigError."""
    framework = framework_of(options, file)
    _check_flags(options, file)
    values = dict(file.options)
    defaults = dict(file.defaults)
    if options.model or options.model_size or "num_layers" not in values:
        values = {name: text for name, text in values.items() if name not in ARCHITECTURE}
        defaults = {name: text for name, text in defaults.items() if name not in ARCHITECTURE}
    if options.precision and str(options.precision) != values.get("precision"):
        values = {name: text for name, text in values.items() if name not in _PRECISION}
    accumulated = values.pop("grad_accum", "")
    texts = {
        name: text
        for name, text in (defaults | values).items()
        if getattr(options, name, None) is None
    }
    of_file = build(type(options), texts)
    changes: dict[str, Any] = {name: getattr(of_file, name) for name in texts}
    merged = replace(options, framework=framework, **changes)
    if accumulated:
        has_batch = options.mbs is not None or options.gbs is not None
        merged = _accumulated(merged, accumulated, has_batch=has_batch)
    if "num_layers" in texts and not merged.model_name:
        merged = replace(merged, model_name=Path(str(options.config)).stem)
    if merged.hidden_size and not (merged.model or merged.model_size or merged.vocab_size):
        allowed = f"--vocab-size, as {options.config} leaves it to a tokenizer"
        raise ConfigError("vocab-size", None, allowed)
    return merged


def model_of(path: str, tp: int) -> ModelConfig:
    """Return the model of a framework's file, which may pad for tp. Raises ConfigError."""
    file = read(path)
    own = replace(
        file,
        options={name: text for name, text in file.options.items() if name in _MODEL},
        defaults={name: text for name, text in file.defaults.items() if name in _MODEL},
        requested={},
        needed={},
        fixed={},
    )
    if not {"model", "num_layers"} & own.options.keys():
        raise ConfigError("model", None, f"a name: {path} names none")
    if "num_layers" in own.options and "vocab_size" not in own.options:
        allowed = "in the file, which leaves it to a tokenizer"
        raise ConfigError(f"{path}: vocab-size", None, f"{allowed}; or name another model")
    options = GenerateOptions(config=path)
    with naming_keys(options, file):
        merged = with_file(options, own)
        model, notes = workload_model.choose(merged, file.framework, tp)
    return replace(model, unmodelled=notes)


def _check_flags(options: GenerateOptions, file: Translation) -> None:
    """Raise ConfigError for a flag that the file needs, or that it cannot be with."""
    for origins, rule in (
        (file.requested, "left to a trainer: give --{}"),
        (file.needed, "with --{}, which the file does not say"),
    ):
        for name, (key, value) in origins.items():
            if getattr(options, name) is None:
                allowed = rule.format(dashed(name))
                raise ConfigError(f"{options.config}: {key}", value, allowed)
    if not file.fixed or getattr(options, file.freed_by, None) is not None:
        return
    flag = f"--{dashed(file.freed_by)}"
    for name, own in file.fixed.items():
        given = getattr(options, name)
        if given is not None and str(given) != own:
            allowed = (
                f"{own}, on which {flag} of {options.config} depends, or given with {flag}"
            )
            raise ConfigError(name, given, allowed)
    if "num_layers" in file.fixed and (model := options.model or options.model_size):
        allowed = f"left out: {flag} of {options.config} depends on its layers; or with {flag}"
        raise ConfigError("model", model, allowed)


def _accumulated(
    options: GenerateOptions, accumulated: str, *, has_batch: bool
) -> GenerateOptions:
    """Return the options with a step of so many micro-batches. Raises ConfigError.

    has_batch: flags give a batch, and win over the number of micro-batches.
    """
    if not accumulated.isdecimal() or not 1 <= int(accumulated) <= 2**20:
        raise ConfigError("gradient_accumulation_steps", accumulated, "a number from 1")
    axes = [getattr(options, name) or 1 for name in ("tp", "pp", "cp")]
    data_axes = (options.dp_shard or 1) * (options.dp_replicate or 1)
    world_size = options.world_size
    data_ranks = world_size // math.prod(axes) if world_size else data_axes
    num_batches = int(accumulated) * max(1, data_ranks)
    if options.gbs is None:
        return replace(options, gbs=(options.mbs or 1) * num_batches)
    if options.mbs is None:
        mbs, rest = divmod(options.gbs, num_batches)
        if rest or not mbs:
            allowed = f"a multiple of {accumulated} micro-batches of {max(1, data_ranks)} ranks"
            raise ConfigError("gbs", options.gbs, allowed)
        return replace(options, mbs=mbs)
    if not has_batch and options.mbs * num_batches != options.gbs:
        allowed = f"{options.mbs} x {accumulated} micro-batches x {max(1, data_ranks)} ranks"
        raise ConfigError("gbs", options.gbs, allowed)
    return options


@contextlib.contextmanager
def naming_keys(options: GenerateOptions, file: Translation | None) -> Iterator[None]:
    """Name the file and its key in a ConfigError about an option that is from there."""
    try:
        yield
    except ConfigError as error:
        name = _option_of(type(options), error.field)
        origin = file.origin.get(name) if file else None
        if origin is None or getattr(options, name, None) is not None:
            raise
        field = f"{options.config}: {origin[0]}"
        raise ConfigError(field, origin[1], error.allowed) from error.__cause__


def _option_of(cls: type, field: str) -> str:
    """Return the option that a message calls so; "" for none."""
    word = field.lstrip("-").replace("_", "-")
    for option in declared(cls):
        if word in (
            option.name.replace("_", "-"),
            *(each.lstrip("-") for each in option.words),
        ):
            return option.name
    return ""


def options_of(workload: Workload, framework: str) -> tuple[Options, Options]:
    """Return the options that describe a generated workload, and a framework's defaults.

    Raises ConfigError for a workload that the framework's rules did not generate.
    """
    base = RULES[framework]
    rule = RULES.get(workload.rules)
    if rule is None or rule.module != base.module:
        allowed = f"one by the rules of {framework}, whose file this is"
        raise ConfigError("workload", workload.rules, allowed)
    described = rule.job_of(workload)
    if described is None:
        allowed = "one that `workload generate` made of a decoder, with all its ranks"
        raise ConfigError("workload", workload.name, allowed)
    job, settings = described
    own = [name for name in base.fields() if name in workload.settings or name in rule.fixed]
    options = _of_job(job) | _texts({name: getattr(settings, name) for name in own})
    options["world_size"] = str(workload.world_size)
    if job.parallel.pp > 1 and "pp_microbatches" in own:
        options["pp_microbatches"] = str(settings.pp_microbatches or job.num_microbatches)
    defaults = dict.fromkeys(_AXES, "1") | {"dtype": "bf16"}
    if job.products is not None and "fp8_format" not in base.fields():
        options["precision"] = _precision_of(job.products)
    by_default = base.resolved(base.make(), job.parallel)
    return options, defaults | _texts({name: getattr(by_default, name) for name in own})


def _of_job(job: Job) -> Options:
    """Return the options of the model, the axes and the batches."""
    parallel = job.parallel
    options: dict[str, object] = {
        "seq_len": job.model.seq_len,
        **{name: getattr(parallel, name) for name in _AXES},
        "mbs": job.mbs,
        "gbs": job.global_batch,
        "dtype": job.dtype,
    }
    return widths_of(job.model) | {name: str(value) for name, value in options.items()}


def _precision_of(products: ProductPrecision) -> str:
    """Return the value of --precision with these products. Raises ConfigError."""
    for name, recipe in NARROW.items():
        own = by_recipe(Recipe(recipe.value))
        if (own.dtype, own.scaling) == (products.dtype, products.scaling):
            return name
    raise ConfigError("products", products.dtype, f"those of one of {', '.join(NARROW)}")


_AXES = ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard")


def _texts(values: Mapping[str, object]) -> Options:
    """Return settings as options have them; None is left out."""
    return {
        name: exact(value) if isinstance(value, float) else str(value)
        for name, value in values.items()
        if value is not None
    }
