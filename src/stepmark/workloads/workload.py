"""stepmark workload: generate, show and convert what a training step does."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import dashed
from stepmark.ground.waiting import Waiting
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import ProductPrecision, Recipe, by_recipe
from stepmark.step.workload import Workload
from stepmark.workloads import configured, workload_files, workload_flags, workload_model
from stepmark.workloads.architecture import AnyJob, Batch, OwnJob
from stepmark.workloads.job import Job, Spread, near_multiples
from stepmark.workloads.rules import RULES, Rule, find_rule, idle_with
from stepmark.workloads.rules.megatron.narrow import BY_PRECISION
from stepmark.workloads.workload_files import StageFlag, Target, stage_flag
from stepmark.workloads.workload_options import (
    ConvertOptions,
    Experts,
    GenerateOptions,
    Layout,
    Model,
    Rows,
    ShowOptions,
)

_MODEL_AXES = ("tp", "pp", "cp")
_DATA_AXES = ("dp_shard", "dp_replicate")
_SHARED = {field.name for field in fields(GenerateOptions)}  # not only of the rules
_PROGRAM = ("groups", "blocks", "stages")
_RECOMPUTE = ("recompute_activations", "recompute")


def run_generate(options: GenerateOptions) -> None:
    """Write a file, or print what `show` prints."""
    if names := list(without_effect(options)):
        sys.stderr.write(f"# AICB's parameters without effect here: {', '.join(names)}\n")
    with Waiting(f"generating the workload of {options.model or 'a model'}"):
        workload = generate(options)
    notes = workload.all_notes
    workload = with_times(workload, options)
    stage = stage_flag(getattr(options, "pipeline_stage", None), options.pp_rank)
    if not (options.out or options.to):
        _show(workload, options, stage)
        return
    if (options.distinct or options.to_stdout) and (options.out or "-") == "-":
        raise ConfigError("out", "-", "a file, as the tables go to stdout")
    for note in notes:
        sys.stderr.write(f"# {note}\n")
    target = Target(to=options.to, out=options.out, rank=options.rank, stage=stage)
    workload_files.deliver(workload, target)
    if options.distinct or options.json or options.csv:
        _show(workload, options, stage, text=options.distinct)


def _show(
    workload: Workload,
    options: Rows,
    stage: StageFlag | None,
    html: str | None = None,
    *,
    text: bool = True,
) -> None:
    """Import what shows workloads, which takes longer than reading a file."""
    from stepmark.workloads.workload_show import show  # noqa: PLC0415 - 60 ms

    show(workload, options, stage, html, text=text)


def with_times(workload: Workload, options: GenerateOptions) -> Workload:
    """Add the times of computation that the options name, if they do. Raises ConfigError."""
    if options.comp_filepath and not options.compute_from:
        from stepmark.workloads import workload_times  # noqa: PLC0415 - 60 ms

        return workload_times.timed_as_aicb(workload, options.comp_filepath)
    return workload_files.timed(workload, options.compute_from)


def show(options: ShowOptions) -> None:
    """Print the workload of a file."""
    with Waiting(f"reading {options.file}"):
        workload = workload_files.read(options.file, options.group_sizes, options.world_size)
    _show(workload, options, stage_flag(options.stage), options.html)


def convert(options: ConvertOptions) -> None:
    """Write a file in another format."""
    with Waiting(f"reading {options.file}"):
        workload = workload_files.read(options.file, options.group_sizes, options.world_size)
    for note in workload_files.read_notes(workload):
        sys.stderr.write(f"# {note}\n")
    stage = stage_flag(options.stage)
    target = Target(to=options.to, out=options.out, rank=options.rank, stage=stage)
    workload_files.deliver(workload_files.timed(workload, options.compute_from), target)


def without_effect(options: GenerateOptions) -> Iterator[str]:
    """Yield AICB's parameters that are given although the framework's rules lack them."""
    own = RULES[find_rule(options.framework or "megatron")].fields()
    timed = options.comp_filepath or options.compute_from
    for name in workload_flags.NO_EFFECT:
        if name in own or getattr(options, name, None) in (None, False):
            continue
        if timed and name in ("aiob", "aiob_enable"):
            continue
        if name in _RECOMPUTE and "recompute_granularity" in own:
            continue
        yield f"--{dashed(name)}"


def generate(options: GenerateOptions) -> Workload:
    """Generate the workload of the flags and of the framework's file that they name.

    Its notes are on defaults. Raises ConfigError.
    """
    options = configured.placed(options)
    if not options.config:
        return _generated(options)
    file = configured.read(options.config)
    with configured.naming_keys(options, file):
        workload = _generated(configured.with_file(options, file), options)
    return replace(workload, notes=(*workload.notes, *file.notes))


def _generated(options: GenerateOptions, typed: GenerateOptions | None = None) -> Workload:
    """Return the workload. typed: the options without those of a framework's file."""
    framework = find_rule(options.framework or "megatron")
    rule = RULES[framework]
    if not rule.has_job:
        settings = settings_of(framework, options)
        # Generate the workload of no transformer, for which options of one are refused.
        workload_model.refuse(
            options,
            (Model, Experts, Layout),
            allowed={"world_size", *rule.fields()},
            rule=f"it has no effect with {rule.module}",
        )
        return rule.workload(settings, options.world_size or 1)
    options = _translated(options, rule)
    job, settings, notes = job_of(options)
    _check_effect(rule, settings, typed or options)
    workload = rule.workload(job, settings)
    idle = _idle_notes(options, rule, workload, job, settings)
    notes = (*notes, *_script_notes(options, rule), *workload.notes, *idle)
    return replace(workload, notes=notes)


def job_of(options: GenerateOptions) -> tuple[AnyJob, Any, tuple[str, ...]]:
    """Return the job of the flags, its framework's settings, and notes on defaults.

    Raises ConfigError.
    """
    framework = find_rule(options.framework or "megatron")
    rule = RULES[framework]
    options = _with_precision(_translated(options, rule), rule)
    settings = settings_of(framework, options)
    job, notes = _job(options, framework, settings)
    return job, rule.resolved(settings, job.parallel), notes


def _check_effect(rule: Rule, settings: Any, options: GenerateOptions) -> None:
    """Raise ConfigError for an option that another setting leaves without effect."""
    values = asdict(settings)
    for name, field in rule.fields().items():
        given = getattr(options, name, None)
        other = idle_with(field, values)
        if other is not None and given is not None:
            words = f"it has no effect with {dashed(other)} {values[other]}"
            raise ConfigError(f"--{dashed(name)}", given, words)


def _idle_notes(
    options: GenerateOptions, rule: Rule, workload: Workload, job: AnyJob, settings: Any
) -> tuple[str, ...]:
    """Note the settings that are given and without which the step would be the same."""
    own = [name for name in rule.fields() if name not in _SHARED]
    given = [name for name in own if getattr(options, name, None) is not None]
    defaults = rule.make()
    idle = []
    for name in given:
        with contextlib.suppress(ConfigError):  # it would be refused, so the setting matters
            changed = replace(settings, **{name: getattr(defaults, name)})
            changed = rule.resolved(changed, job.parallel)
            if changed == settings:
                continue
            other = rule.workload(job, changed)
            if all(getattr(other, part) == getattr(workload, part) for part in _PROGRAM):
                idle.append(f"--{dashed(name)}")
    return (f"no effect on this job: {', '.join(idle)}",) if idle else ()


def _job(
    options: GenerateOptions, framework: str, settings: Any
) -> tuple[AnyJob, tuple[str, ...]]:
    """Return the job to train, and notes on defaults."""
    parallel = parallel_of(options, getattr(settings, "data_axis", "dp_shard"))
    mbs = 1 if options.mbs is None else options.mbs
    gbs = options.gbs
    if gbs is None and parallel.pp > 1 and hasattr(settings, "pp_schedule"):
        # The fewest that torch's schedules take, as in `train`.
        chunks = settings.pp_schedule.num_chunks(settings.pp_stages)
        count = settings.pp_microbatches or parallel.pp * chunks
        gbs = mbs * parallel.data_ranks * count
    spread: dict[str, Any] = {
        "parallel": parallel,
        "mbs": mbs,
        "gbs": gbs,
        "dtype": parse_dtype(options.dtype) if options.dtype else DType.BF16,
        "products": _products(options, framework),
    }
    if not workload_model.is_own(options.model):
        model, notes = workload_model.choose(options, framework, options.tp or 1)
        imbalance = 1.0 if options.imbalance is None else options.imbalance
        return Job(model=model, imbalance=imbalance, **spread), notes
    if options.imbalance not in (None, 1.0):
        raise ConfigError("imbalance", options.imbalance, "1 for a model that is no decoder")
    Spread(**spread)  # validates batches before the user's function gets them
    seq_len = workload_model.own_seq_len(options)
    batch = Batch(
        mbs=spread["mbs"],
        seq_len=seq_len,
        dtype=spread["dtype"],
        products=spread["products"],
    )
    architecture, notes = workload_model.choose_own(options, framework, batch)
    if options.model_name:
        architecture = replace(architecture, name=options.model_name)
    return OwnJob(architecture=architecture, seq_len=seq_len, **spread), notes


def _script_notes(options: GenerateOptions, rule: Rule) -> tuple[str, ...]:
    name = "use_distributed_optimizer"
    if (
        not options.model_size
        or name not in rule.fields()
        or getattr(options, name, None) is not None
    ):
        return ()
    return (
        "AICB's scripts always add --use-distributed-optimizer; here it is off unless given",
    )


def _translated(options: GenerateOptions, rule: Rule) -> GenerateOptions:
    """Replace AICB's --recompute_activations by Megatron-LM's selective recomputation."""
    name = "recompute_granularity"
    is_given = any(getattr(options, alias, None) for alias in _RECOMPUTE)
    if not is_given or name not in rule.fields() or getattr(options, name):
        return options
    changes: dict[str, Any] = {name: "selective"}
    return replace(options, **changes)


def _with_precision(options: GenerateOptions, rule: Rule) -> GenerateOptions:
    """Set the framework's settings that --precision stands for, where it has such.

    Raises ConfigError for settings that contradict it.
    """
    if options.precision is None or "fp8_format" not in rule.fields():
        return options
    changes: dict[str, Any] = {}
    for name, value in BY_PRECISION[options.precision].items():
        given = getattr(options, name)
        if given is None:
            changes[name] = value
        elif "none" in (given, value) and given != value:
            raise ConfigError(name, given, f"{value} with --precision {options.precision}")
    recipe = getattr(options, "fp8_recipe", None)
    if recipe is not None and (recipe == "mxfp8") != (options.precision == "mxfp8"):
        raise ConfigError("precision", options.precision, f"another with --fp8-recipe {recipe}")
    return replace(options, **changes)


def _products(options: GenerateOptions, framework: str) -> ProductPrecision | None:
    """Return the products of linear layers, as torchao makes them, in a PyTorch framework.

    Raises ConfigError for a framework without. Megatron-LM's are among its settings.
    """
    name = options.precision
    if name in (None, "bf16") or "fp8_format" in RULES[framework].fields():
        return None
    if framework == "deepspeed":
        allowed = "bf16 with DeepSpeed, whose rules have no narrower products"
        raise ConfigError("precision", name, allowed)
    return by_recipe(Recipe.TENSORWISE if name == "fp8" else Recipe(name))


def parallel_of(options: GenerateOptions, data_axis: str) -> ParallelConfig:
    """Return the layout; its data ranks are what the world size leaves. Raises ConfigError.

    data_axis: theirs by default; "": there is one data rank.
    """
    values = {
        name: getattr(options, name)
        for name in (*_MODEL_AXES, "ep", *_DATA_AXES)
        if getattr(options, name, None) is not None
    }
    parallel = ParallelConfig(**values)
    world = options.world_size
    if world is None:
        return parallel
    if not 1 <= world <= 2**24:
        raise ConfigError("world-size", world, "from 1 to 16777216")
    free = [name for name in _DATA_AXES if name not in values]
    axis = data_axis if data_axis in ("", *free) else (free[0] if free else "")
    sizes = {name: getattr(parallel, name) for name in (*_MODEL_AXES, *_DATA_AXES)}
    unit = parallel.world_size
    if world % unit or (not axis and world != unit):
        words = " x ".join(
            f"{dashed(name)} {size}"
            for name, size in sizes.items()
            if size > 1 and name != axis
        )
        allowed = f"a multiple of {words or 1} ({unit})"
        near = near_multiples(world, unit)
        if not axis:
            allowed = f"the product of {words or 1} ({unit})"
            near = str(unit)
            near += "" if data_axis else "; --framework pytorch has data ranks, too"
        raise ConfigError("world-size", world, f"{allowed}, e.g. {near}")
    return replace(parallel, **{axis: world // unit}) if axis else parallel


def settings_of(framework: str, options: GenerateOptions) -> Any:
    """Return the framework's settings from the options that are given. Raises ConfigError."""
    rule = RULES[framework]
    values = {
        name: workload_flags.typed(field, value, name)
        for name, field in rule.fields().items()
        if (value := getattr(options, name, None)) is not None
    }
    return rule.make(**values)
