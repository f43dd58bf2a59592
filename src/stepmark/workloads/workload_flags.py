"""The options of `stepmark workload generate`: a framework's settings are options, too."""

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import REAL, WHOLE, Reader, dashed, flag, options
from stepmark.workloads.rules import RULES, find_rule
from stepmark.workloads.workload_options import GenerateOptions

# AICB's and Megatron's other names of settings, besides the names of the fields.
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("--sp", "--enable-sequence-parallel", "--sp-enable"),
    "virtual_pipeline_model_parallel_size": ("--vpp",),
    "microbatch_group_size_per_vp_stage": (
        "--microbatch-group-size-per-virtual-pipeline-stage",
    ),
    "recompute": ("--ac",),
    "stage": ("--zero-stage",),
    "stage3_prefetch_bucket_size": ("--prefetch-bucket-size",),
    "stage3_param_persistence_threshold": ("--param-persistence-threshold",),
    "stage3_model_persistence_threshold": ("--model-persistence-threshold",),
    "stage3_max_live_parameters": ("--max-live-parameters",),
}
# AICB's parameters that change nothing: of its get_params and scripts.
_SWITCHES = (
    *("use_flash_attn", "aiob_enable", "aiob", "computation_enable", "enable_visual"),
    *("workload_only", "amp_enabled", "gated_linear_unit", "bias_gelu_fusion", "openai_gelu"),
    *("squared_relu", "onnx_safe", "moe_grouped_gemm", "grouped_gemm", "overlap_version"),
    *("overlap_grad_reduce", "recompute_activations", "recompute"),
    *("use_distributed_optimizer", "sequence_parallel", "enable_sequence_parallel"),
    *("sp_enable", "sp", "contiguous_gradients"),
)
_VALUED = (
    *("epoch_num", "gpu_type", "activation_func", "result_dir", "nnodes", "node_rank"),
    *("nproc_per_node", "master_addr", "master_port", "begin_size", "end_size", "test_comm"),
    *("iter_num", "multi_all_reduce_enable", "zero_stage", "reduce_bucket_size"),
    *("allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold"),
    *("model_persistence_threshold", "max_live_parameters"),
)
NO_EFFECT = (*_SWITCHES, *_VALUED)
_LARGE = 10**6  # elements, not layers


@functools.cache
def options_class(framework: str, *, has_ignored: bool = True) -> type[GenerateOptions]:
    """GenerateOptions with the settings of a framework.

    has_ignored: with AICB's parameters that have no effect, for AICB's command lines.
    """
    settings = settings_group(framework)
    stage: list[tuple[str, Any, Any]] = []
    if "stage" not in RULES[framework].fields():
        text = "pipeline stage, as --pp-rank; of DeepSpeed it is ZeRO's"
        stage.append(("pipeline_stage", int | None, flag(text, "--stage", rare=True)))
    output = _class(f"Settings of {framework}.", stage, settings) if stage else settings
    names = _names(GenerateOptions) | _names(output)
    ignored: list[tuple[str, Any, Any]] = []
    for name in NO_EFFECT if has_ignored else ():
        if name not in names:
            kind, default = (bool, False) if name in _SWITCHES else (str | None, None)
            ignored.append((name, kind, flag("AICB's; no effect", default=default, rare=True)))
    without_effect = _class("AICB's parameters without effect.", ignored)
    bases = (GenerateOptions, output, without_effect)
    cls: type[GenerateOptions] = _class(framework, [], *bases)
    return cls


@functools.cache
def settings_group(framework: str) -> type:
    """Return the group of options that are a framework's settings."""
    names = _names(GenerateOptions)
    fields = RULES[framework].fields().items()
    own = [_setting(name, field) for name, field in fields if name not in names]
    group: type = _class(f"Settings of {framework}.", own)
    return group


def _class(title: str, fields: list[tuple[str, Any, Any]], *bases: type) -> Any:
    """Make a group of options, or with bases the class that joins them."""
    return dataclasses.make_dataclass(
        "Generate",
        fields,
        bases=bases,
        namespace={"__doc__": title},
        frozen=True,
        kw_only=True,
        init=bool(bases),
        repr=False,
        eq=False,
    )


def _names(cls: type) -> set[str]:
    """Return all names of options, with _ and without dashes in front."""
    names = {option.name for option in options(cls)}
    words = (word for option in options(cls) for word in option.words)
    return names | {word.lstrip("-").replace("-", "_") for word in words}


def _setting(name: str, field: "dataclasses.Field[Any]") -> tuple[str, Any, Any]:
    kind = kind_of(field)
    spellings = (f"--{dashed(name)}", *_SPELLINGS.get(name, ()))
    text = str(field.metadata.get("help", name))
    rare = not field.metadata.get("common")
    if kind is bool:
        text += f" [{'yes' if field.default else 'no'}]"
        switches = (f"{word}/--no-{word.removeprefix('--')}" for word in spellings)
        return name, bool | None, flag(text, *switches, rare=rare)
    if field.default not in (None, ""):
        text += f" [{field.default}]"
    metavars = {int: WHOLE, float: REAL}
    choices = tuple(kind) if issubclass(kind, StrEnum) else ()
    reader = Reader(
        read=functools.partial(_read, kind, field.default),
        metavar=metavars.get(kind) or "|".join(choices),
        choices=choices,
    )
    return name, Annotated[kind, reader] | None, flag(text, *spellings, rare=rare)


def kind_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the type of a setting; of `int | None` it is int."""
    kind = field.type
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind


def refuse_other_framework(option: str) -> None:
    """Refuse an unknown option that is a setting of other frameworks. Raises ConfigError."""
    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [framework for framework, rule in RULES.items() if name in rule.fields()]
    if owners:
        raise ConfigError(option, "given", f"only with --framework {' or '.join(owners)}")
    refuse_arguments(option)


def refuse_arguments(option: str) -> None:
    """Refuse an unknown option that is an argument of Megatron-LM. Raises ConfigError."""
    from stepmark.framework_files import megatron  # noqa: PLC0415 - only before an error

    if option in megatron.known_names():
        raise ConfigError(option, "given", "only with --framework megatron, whose it is")


def without_arguments(
    words: Sequence[str], known: Collection[str]
) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Take Megatron-LM's arguments that are none of ours out of the words of a command line.

    known: our spellings. Returns the other words, and the argument and text of options by their
    names. Raises ConfigError.
    """
    from stepmark.framework_files import megatron, typed_arguments  # noqa: PLC0415 - 5 ms

    names = megatron.known_names() - {*known}
    rest: list[str] = []
    options: dict[str, tuple[str, str]] = {}
    coming = iter(words)
    for word in coming:
        name, is_, value = word.partition("=")
        if name not in names:
            rest.append(word)
            continue
        argument = name.removeprefix("--")
        if not is_:
            takes_value = megatron.takes_value(argument)
            value = next(coming, "") if takes_value else "true"
        option, text = typed_arguments.typed_option(argument, value)
        other, before = options.setdefault(option, (name, text))
        if before != text:
            raise ConfigError(name, "given", f"left out with {other}")
    return rest, options


def add_arguments(
    values: dict[str, Any], arguments: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Return the values of options with those of arguments. Raises ConfigError for both."""
    for option, (argument, _) in arguments.items():
        if values.get(option) is not None:
            raise ConfigError(argument, "given", f"left out with --{dashed(option)}")
    return values | {option: text for option, (_, text) in arguments.items()}


def refuse_bare_recompute(name: str) -> None:
    """Refuse AICB's --recompute, which has no value, where a framework's own has one."""
    framework = find_rule(name)
    kinds = kind_of(RULES[framework].fields()["recompute"])
    allowed = f"it needs a value with {framework}: {', '.join(k for k in kinds if k != 'none')}"
    raise ConfigError("--recompute", "given", allowed)


def typed(field: "dataclasses.Field[Any]", value: object, name: str) -> Any:
    """Convert a setting to its field's type, which an option of its name may lack."""
    if not isinstance(value, str):
        return value
    return _read(kind_of(field), field.default, value, dashed(name))


def _read(kind: Any, default: object, text: str, field: str) -> Any:
    """Read a setting as its field's type. Raises ConfigError."""
    if kind is str:
        return text
    try:
        if kind is int:
            number = float(text)
            if number != int(number):
                raise ValueError
            return int(text) if text.lstrip("+-").isdecimal() else int(number)
        return kind(text.lower() if issubclass(kind, str) else text)
    except (ValueError, OverflowError):
        is_large = isinstance(default, int) and default >= _LARGE
        words = {
            int: f"a whole number{' such as 500000000 or 5e8' if is_large else ''}",
            float: "a number",
        }
        if kind in words:
            raise ConfigError(field, text, words[kind]) from None
        raise not_one_of(field, text, kind) from None
