"""The options of `stepmark launch`."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import Reader, Words, between, flag, group, words_of
from stepmark.ground.units import parse_duration

RESUME = "resume"  # the verb that goes on with a run
CHECK = "doctor"  # the verb that checks hosts
TARGETS = ("slurm", "torchrun", "mpirun", "pssh", "ssh")
Ranks = Annotated[int, between(0, 1024)]
_PRINTED = (".txt", ".out", ".log")


def _line(text: str, field: str) -> str:
    """Read text that may stand in a line of a script."""
    if not text or not text.isprintable():
        raise ConfigError(field, text, "one line of printable characters")
    return text


def _time_limit(text: str, field: str) -> str:
    """Read 30m or 2h, or a time as Slurm writes it; return the latter."""
    if re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2})", text):
        return text
    allowed = "a duration such as 30m or 2h, at most 168h, or Slurm's HH:MM:SS or D-HH:MM:SS"
    if text.isdecimal():  # minutes for Slurm, seconds for our other options
        raise ConfigError(field, text, allowed)
    try:
        seconds = round(parse_duration(text, field))
    except ConfigError:
        raise ConfigError(field, text, allowed) from None
    return slurm_time(seconds)


def slurm_time(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _job_name(text: str, field: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise ConfigError(
            field, text, "letters, digits, '.', '_' and '-', since it names files"
        )
    return text


def _folder(text: str, field: str) -> str:
    """Read the folder of runs. A file is more likely meant for what the verb prints."""
    if PurePath(text).suffix in _PRINTED:
        raise ConfigError(
            field, text, "a folder for runs (--slurm --output FILE: what the verb prints)"
        )
    return _line(text, field)


Line = Annotated[str, Reader(read=_line)]


@group
class Target:
    """Target (one of them)."""

    slurm: bool = flag("an sbatch script, for srun", default=False)
    torchrun: bool = flag("a torchrun command per host", default=False)
    mpirun: bool = flag("a script with Open MPI's mpirun", default=False)
    pssh: bool = flag("a script with pssh", default=False)
    ssh: bool = flag("a script with ssh alone", default=False)
    follow: Annotated[str, Reader(read=_line, metavar="JOBID")] | None = flag(
        "follow a Slurm job that is submitted already"
    )


@group
class RankLayout:
    """Hosts and ranks."""

    nodes: Annotated[int, between(1, 2**20)] | None = flag(
        "hosts of Slurm [those of --nodelist, or 1]", "--nodes", "-N"
    )
    hosts: Line | None = flag(
        "hosts of the other targets: a,b or n[1-4], or a file with one per line"
    )
    gpus_per_node: Ranks | None = flag("GPUs of each host, and ranks: one per GPU")
    nproc_per_node: Ranks | None = flag("ranks of each host, where it has no GPUs", rare=True)
    port: Annotated[int, between(1024, 65535)] | None = flag(
        "port of the first host [29500; Slurm: from the job id]",
        rare=True,
        metavar="PORT",
    )


@group
class SlurmJob:
    """Slurm job."""

    partition: Line | None = flag("partition", "--partition", "-p")
    account: Line | None = flag("account", "--account", "-A")
    qos: Line | None = flag("quality of service", "--qos", "-q", rare=True)
    time: Annotated[str, Reader(read=_time_limit, metavar="DURATION")] | None = flag(
        "time limit: 30m, 2h, or HH:MM:SS [doctor: by its timeouts]", "--time", "-t"
    )
    nodelist: Line | None = flag(
        "hosts that it must have", "--nodelist", "-w", rare=True, metavar="HOSTS"
    )
    exclude: Line | None = flag(
        "hosts that it must not have", "--exclude", "-x", rare=True, metavar="HOSTS"
    )
    job_name: Annotated[str, Reader(read=_job_name)] | None = flag(
        "name [stepmark-VERB]", "--job-name", "-J"
    )
    output: Line | None = flag(
        "file for what the verb prints; %j: job id [NAME-JOBID.out]", metavar="FILE"
    )
    requeue: bool = flag(
        "restart it when a host fails; it then resumes its run", default=False, rare=True
    )
    modules: Words | None = flag("environment modules to load", rare=True)
    container: Line | None = flag(
        "image for Pyxis, e.g. nvcr.io#nvidia/pytorch:25.10-py3", metavar="IMAGE"
    )
    container_mounts: Line | None = flag(
        "more mounts: SRC:DST,...", metavar="MOUNTS", rare=True
    )
    submit: bool = flag(
        "submit the script and follow the job [print]", "--submit/--print", default=False
    )
    on_interrupt: Annotated[str, words_of("leave", "cancel")] = flag(
        "Ctrl-C while following: leave or cancel the job", default="leave", rare=True
    )


@group
class JobEnvironment:
    """Environment of the ranks."""

    fabric: Words | None = flag("presets of variables; list shows them")
    export: tuple[Line, ...] = flag(
        "variables, which override presets; NAME has the value that it has here",
        default=(),
        metavar="NAME[=VALUE],...",
    )
    python: Line | None = flag(
        "Python that has stepmark [this one; in a container stepmark]", metavar="PYTHON"
    )
    out: Annotated[str, Reader(read=_folder)] | None = flag(
        "folder for runs [runs]", "--out", "-o", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Target, RankLayout, SlurmJob, JobEnvironment):
    """stepmark launch."""

    words: tuple[str, ...] = flag(
        "-- and a verb that measures: -- comm all_reduce -b 1K -e 1G",
        default=(),
        argument=True,
        metavar="VERB ARGS",
    )

    @property
    def ranks_per_host(self) -> int:
        return self.gpus_per_node or self.nproc_per_node or 0

    @property
    def name(self) -> str:
        """Name of the Slurm job."""
        return self.job_name or f"stepmark-{self.words[0]}"
