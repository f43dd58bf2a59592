"""Options of `workload generate` that a framework's own file gives: --config FILE."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from stepmark.framework_files.table import Options, Translation
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, exact
from stepmark.ground.options import options as declared
from stepmark.model.model import ModelConfig
from stepmark.step.workload import Workload
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


def options_of(workload: Workload) -> tuple[Options, Options]:
    """Return the options that describe a generated workload, and their defaults.

    Raises ConfigError for a workload that no rule generated.
    """
    rule = RULES.get(workload.rules)
    made = rule.job_of(workload) if rule and rule.has_job else None
    if rule is None or made is None:
        allowed = "one that `workload generate` made of a decoder, with all its ranks"
        raise ConfigError("workload", workload.name, allowed)
    job, settings = made
    parallel = job.parallel
    options = _of_model(job.model) | {
        "seq_len": str(job.model.seq_len),
        "tp": str(parallel.tp),
        "pp": str(parallel.pp),
        "cp": str(parallel.cp),
        "ep": str(parallel.ep),
        "dp_replicate": str(parallel.dp_replicate),
        "mbs": str(job.mbs),
        "gbs": str(job.global_batch),
        "dtype": str(job.dtype),
        "world_size": str(workload.world_size),
    }
    own = rule.fields()
    values = {name: getattr(settings, name) for name in own if name in workload.settings}
    options |= {name: _text(value) for name, value in values.items() if value is not None}
    made_by_default = rule.make()
    defaults = dict.fromkeys(("tp", "pp", "cp", "ep", "dp_replicate"), "1")
    defaults |= {
        name: _text(value)
        for name in own
        if (value := getattr(made_by_default, name)) is not None
    }
    return options, defaults


def _of_model(model: ModelConfig) -> Options:
    """Return the options of a model of given widths."""
    if model.attention_bias:
        allowed = "left out: files of frameworks have biases of q, k and v alone, or all"
        raise ConfigError("attention-bias", "true", allowed)
    options = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size or (model.moe or model).ffn_hidden_size,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "swiglu": model.activation == "swiglu",
        "norm": model.norm,
        "linear_bias": model.linear_bias,
        "qkv_bias": model.qkv_bias,
        "qk_norm": model.qk_norm,
        "untied": not model.tied_embeddings,
    }
    if mla := model.mla:
        widths = {field.name: getattr(mla, field.name) or 0 for field in fields(mla)}
        options |= widths
    else:
        options |= {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    if moe := model.moe:
        options |= {
            "num_experts": moe.num_experts,
            "top_k": moe.top_k,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "dense_layers": moe.first_dense_layers,
            "router_bias": moe.router_bias,
        }
        if moe.num_shared_experts:
            options["shared_ffn_hidden_size"] = moe.shared_ffn_hidden_size
    return {name: _text(value) for name, value in options.items()}


def _text(value: object) -> str:
    return exact(value) if isinstance(value, float) else str(value)
