"""Predict a job of a framework's rules, as `stepmark workload generate` describes it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stepmark.framework_files import configuration
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import flag
from stepmark.model.network_options import NetworkOptions
from stepmark.predictions.note import Note, Topic
from stepmark.predictions.predict_options import Basis, PredictionFiles, PredictOptions
from stepmark.step.workload import Workload
from stepmark.workloads import workload_flags
from stepmark.workloads.rules import find_rule
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_options import Experts, FrameworkChoice, Layout, Model


@dataclass(frozen=True, kw_only=True)
class FrameworkJob(
    FrameworkChoice, Model, Experts, Layout, Basis, NetworkOptions, PredictionFiles
):
    """stepmark predict --framework."""

    models: tuple[str, ...] = flag(
        "model, config, FILE.py:function, framework's file",
        default=(),
        argument=True,
        metavar="MODEL",
        names="model",
    )
    nproc: int | None = flag("ranks in all, as --world-size", "--nproc", "-g")
    world_size: int | None = flag("as --nproc", rare=True)
    from_run: str | None = flag("", names="run")  # refused: the framework says what the step is


@functools.cache
def options_class(framework: str) -> type[FrameworkJob]:
    """Return the options with the settings of a framework."""
    cls: type[FrameworkJob] = dataclasses.make_dataclass(
        "FrameworkJob",
        [],
        bases=(FrameworkJob, workload_flags.settings_group(framework)),
        namespace={"__doc__": framework},
        frozen=True,
        kw_only=True,
    )
    return cls


# A framework with the values of its options.
Generate = Callable[[str, tuple[tuple[str, Any], ...]], Workload]


def generated(framework: str, values: tuple[tuple[str, Any], ...]) -> Workload:
    """Return the workload of these options. Raises ConfigError."""
    cls = workload_flags.options_class(framework, has_ignored=False)
    return generate(cls(**dict(values)))


def named_files(job: FrameworkJob) -> tuple[list[str], list[str]]:
    """Return the models and the frameworks' files that the job names. Raises ConfigError."""
    named = [*job.models, *([job.model] if job.model else [])]
    names = [name for name in named if not configuration.is_framework_file(name)]
    files = [name for name in (*named, job.config) if name and name not in names]
    if len(names) > 1 or len(files) > 1:
        several = names if len(names) > 1 else files
        raise ConfigError("model", ", ".join(several), "one model and one framework's file")
    return names, files


def notes_of_job(job: FrameworkJob, num_ranks: int) -> Iterator[str]:
    """Yield that nothing states the ranks, and notes on the keys of the framework's file.

    Raises ConfigError.
    """
    files = [configuration.read(name) for name in named_files(job)[1]]
    of_files = [file.options.get("world_size") for file in files]
    if not any((job.nproc, job.world_size, job.dp_shard, job.dp_replicate, *of_files)):
        text = "the number of ranks is the product of the axes, because --nproc is not given"
        yield Note.of(Topic.OPTIONS, f"{text}: {num_ranks}")
    yield from (note for file in files for note in file.notes)


def workload_of(job: FrameworkJob, make: Generate = generated) -> Workload:
    """Return the workload of the job. Raises ConfigError."""
    try:
        return make(*described(job))
    except ConfigError as error:
        if error.field == "world-size" and not job.world_size:
            raise ConfigError("nproc", error.value, error.allowed) from error.__cause__
        raise


def described(job: FrameworkJob) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the framework, with the values of its options. Raises ConfigError."""
    names, files = named_files(job)
    if job.nproc and job.world_size and job.nproc != job.world_size:
        raise ConfigError("nproc", job.nproc, f"--world-size ({job.world_size})")
    if job.from_run:
        raise ConfigError(
            "from-run", job.from_run, "left out: --framework says what the step is"
        )
    framework = job.framework or configuration.framework_of(files[0])
    cls = workload_flags.options_class(find_rule(framework), has_ignored=False)
    values = _values(job, cls)
    values |= {"model": "".join(names) or None, "world_size": job.world_size or job.nproc}
    values["config"] = "".join(files) or None
    return find_rule(framework), tuple(values.items())


def basis_of(job: FrameworkJob) -> PredictOptions:
    """Return the options of a prediction of the job's workload."""
    values = _values(job, Basis) | _values(job, NetworkOptions) | _values(job, PredictionFiles)
    return PredictOptions(**{**values, "gbs": None})


def _values(job: FrameworkJob, cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: getattr(job, name) for name in names if hasattr(job, name)}
