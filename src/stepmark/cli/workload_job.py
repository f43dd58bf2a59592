"""From the flags of `stepmark workload generate` to a workload."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stepmark.cli import workload_aicb, workload_flags, workload_model, workload_own
from stepmark.cli.options import Values
from stepmark.core.dtypes import DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.parallel import ParallelConfig
from stepmark.core.workload import Workload
from stepmark.workload.architecture import AnyJob, Batch, OwnJob
from stepmark.workload.job import Job, Spread
from stepmark.workload.rules import RULES, Rule, find_rule

_MODEL_AXES = ("tp", "pp", "cp")
_DATA_AXES = ("dp_shard", "dp_replicate")


def generate(values: Values) -> Workload:
    """What the flags ask for. Notes of what was decided are in the workload.

    Raises ConfigError.
    """
    framework = find_rule(values.get("framework") or "megatron")
    rule = RULES[framework]
    values = _translated(values, rule)
    settings = settings_of(framework, values)
    if not rule.has_job:
        return _without_job(rule, settings, values)
    job, notes = _job(values, framework)
    made = rule.function()(job, settings)
    return replace(made, notes=(*notes, *_of_scripts(values, rule), *made.notes))


def _job(values: Values, framework: str) -> tuple[AnyJob, tuple[str, ...]]:
    """What is trained, and what was decided for the user."""
    spread: dict[str, Any] = {
        "parallel": parallel_of(values, RULES[framework]),
        "mbs": 1 if values.get("mbs") is None else values["mbs"],
        "gbs": values.get("gbs"),
        "dtype": parse_dtype(values["dtype"]) if values.get("dtype") else DType.BF16,
    }
    if not workload_own.is_own(values.get("model")):
        chosen = workload_model.choose(values, framework, values.get("tp") or 1)
        return Job(model=chosen.model, **spread), chosen.notes
    Spread(**spread)  # refuses batches before the user's function sees them
    length = workload_own.seq_len(values)
    batch = Batch(mbs=spread["mbs"], seq_len=length, dtype=spread["dtype"])
    made, notes = workload_own.choose(values, framework, batch)
    if values.get("model_name"):
        made = replace(made, name=values["model_name"])
    return OwnJob(architecture=made, seq_len=length, **spread), notes


def _of_scripts(values: Values, rule: Rule) -> tuple[str, ...]:
    name = "use_distributed_optimizer"
    if (
        not values.get("model_size")
        or name not in rule.fields()
        or values.get(name) is not None
    ):
        return ()
    return (
        "AICB's scripts always add --use-distributed-optimizer; here it is off unless given",
    )


_RECOMPUTE = ("recompute_activations", "recompute")


def _translated(values: Values, rule: Rule) -> Values:
    """AICB's --recompute_activations is Megatron-LM's, which means the selective kind."""
    asked = any(values.get(name) for name in _RECOMPUTE)
    if asked and "recompute_granularity" in rule.fields():
        return {
            **values,
            "recompute_granularity": values.get("recompute_granularity") or "selective",
        }
    return values


def _without_job(rule: Rule, settings: Any, values: Values) -> Workload:
    """Of no transformer, so nothing about one may be given."""
    asked = (*workload_flags.MODEL, *workload_flags.EXPERTS, *workload_flags.SPREAD)
    own = {"world_size", *rule.fields()}
    for flag in asked:
        if flag.name not in own and values.get(flag.name) is not None:
            shown = _flag(flag.name)
            raise ConfigError(shown, values[flag.name], f"it has no effect with {rule.module}")
    return rule.function()(settings, values.get("world_size") or 1)


def parallel_of(values: Values, rule: Rule) -> ParallelConfig:
    """Data-parallel ranks are those that the world size leaves. Raises ConfigError."""
    given = {
        name: values[name]
        for name in (*_MODEL_AXES, "ep", *_DATA_AXES)
        if values.get(name) is not None
    }
    asked = ParallelConfig(**given)
    world = values.get("world_size")
    if world is None:
        return asked
    if not 1 <= world <= 2**24:
        raise ConfigError("world-size", world, "from 1 to 16777216")
    free = [name for name in _DATA_AXES if name not in given]
    axis = rule.data_axis if rule.data_axis in ("", *free) else (free[0] if free else "")
    fixed = {name: getattr(asked, name) for name in (*_MODEL_AXES, *_DATA_AXES) if name != axis}
    at_once = asked.world_size
    if world % at_once or (not axis and world != at_once):
        words = " x ".join(f"{_flag(name)} {size}" for name, size in fixed.items() if size > 1)
        allowed = f"a multiple of {words or 1} ({at_once})"
        below = world // at_once * at_once
        near = " or ".join(str(one) for one in (below, below + at_once) if one)
        if not axis:
            allowed, near = f"the product of {words or 1} ({at_once})", str(at_once)
            near += "" if rule.data_axis else "; --framework fsdp has data ranks, too"
        raise ConfigError("world-size", world, f"{allowed}, e.g. {near}")
    return replace(asked, **{axis: world // at_once}) if axis else asked


def settings_of(framework: str, values: Values) -> Any:
    """The framework's settings from the flags that were given. Raises ConfigError."""
    rule = RULES[framework]
    found = {
        name: _read(name, field, values[name])
        for name, field in rule.fields().items()
        if values.get(name) is not None
    }
    return rule.settings_class()(**found)


def say_no_effect(values: Values) -> None:
    """One line on stderr per parameter of AICB that changes nothing."""
    for line in without_effect(values):
        sys.stderr.write(f"# {line}\n")


def without_effect(values: Values) -> Iterator[str]:
    """Of AICB's parameters that were given and that the framework's rules do not have."""
    framework = find_rule(values.get("framework") or "megatron")
    own = RULES[framework].fields()
    timed = values.get("comp_filepath") or values.get("compute_from")
    for name, why in workload_aicb.NO_EFFECT.items():
        if name in own or values.get(name) in (None, False):
            continue
        if timed and name in ("aiob", "aiob_enable"):
            continue
        if name in _RECOMPUTE and "recompute_granularity" in own:
            continue
        if name in _RECOMPUTE and "recompute" in own:
            kinds = workload_flags.kinds(own)
            yield f"--{name}: no effect: Megatron-LM's; of {framework} --recompute {kinds}"
            continue
        yield f"--{name}: no effect: {why}"


def _read(name: str, field: Any, value: Any) -> Any:
    """A setting in its field's type."""
    kind = workload_flags.kind_of(field)
    if not isinstance(value, str) or kind is str:
        return value
    try:
        if kind is int:
            number = float(value)
            if number != int(number):
                raise ValueError
            return int(value) if value.lstrip("+-").isdecimal() else int(number)
        return kind(value.lower() if issubclass(kind, str) else value)
    except (ValueError, OverflowError):
        raise ConfigError(_flag(name), value, _allowed(kind, field.default)) from None


_LARGE = 10**6  # elements, not layers


def _allowed(kind: Any, default: Any) -> str:
    is_large = isinstance(default, int) and default >= _LARGE
    words = {int: "a whole number" + " such as 500000000 or 5e8" * is_large, float: "a number"}
    return words[kind] if kind in words else f"one of {', '.join(kind)}"


def _flag(name: str) -> str:
    return name.replace("_", "-")
