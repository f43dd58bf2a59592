"""Options of `workload generate` that a framework's own file gives: --config FILE."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from stepmark.framework_files.table import Translation
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build
from stepmark.ground.options import options as declared
from stepmark.workloads.rules import RULES, find_rule, idle_with
from stepmark.workloads.workload_flags import typed
from stepmark.workloads.workload_options import Experts, GenerateOptions, Model

# Options of a model that a job with another model has, too.
_OF_JOB = ("model", "model_name", "scale", "seq_len", "make_vocab_size_divisible_by")
ARCHITECTURE = frozenset(
    field.name for cls in (Model, Experts) for field in fields(cls) if field.name not in _OF_JOB
)
_PRECISION = ("fp8_format", "fp8_recipe", "fp4_format", "fp4_recipe", "fp8_param_gather")


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
    values = dict(file.options)
    defaults = dict(file.defaults)
    if options.model or options.model_size or "num_layers" not in values:
        values = {name: text for name, text in values.items() if name not in ARCHITECTURE}
        defaults = {name: text for name, text in defaults.items() if name not in ARCHITECTURE}
    if options.precision:
        values = {name: text for name, text in values.items() if name not in _PRECISION}
    texts = {
        name: text
        for name, text in (defaults | values).items()
        if getattr(options, name, None) is None
    }
    made = build(type(options), texts)
    changes: dict[str, Any] = {name: getattr(made, name) for name in texts}
    merged = replace(options, framework=framework, **changes)
    merged = _without_idle(merged, framework, set(texts))
    if "num_layers" in texts and not merged.model_name:
        merged = replace(merged, model_name=Path(str(options.config)).stem)
    if merged.hidden_size and not (merged.model or merged.model_size or merged.vocab_size):
        allowed = f"--vocab-size, as {options.config} leaves it to a tokenizer"
        raise ConfigError("vocab-size", None, allowed)
    return merged


def _without_idle(
    options: GenerateOptions, framework: str, names: set[str]
) -> GenerateOptions:
    """Return the options without those of the file that others leave without effect."""
    own = RULES[framework].fields()
    values = asdict(RULES[framework].make()) | {
        name: typed(field, value, name)
        for name, field in own.items()
        if (value := getattr(options, name, None)) is not None
    }
    idle = {name: None for name in names if name in own and idle_with(own[name], values)}
    changes: dict[str, Any] = dict(idle)
    return replace(options, **changes)


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
        if word in (option.name.replace("_", "-"), *(each.lstrip("-") for each in option.words)):
            return option.name
    return ""
