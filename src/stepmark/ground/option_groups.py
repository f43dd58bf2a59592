"""Groups of options that several verbs share."""

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, ClassVar

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import (
    Duration,
    between,
    comma_list,
    dashed,
    flag,
    group,
    read_ranges,
)

Degree = Annotated[int, between(1, 2**20)]
Ranks = Annotated[
    tuple[int, ...],
    replace(comma_list(between(0, 2**20)), read=partial(read_ranges, least=0)),
]
OUT = ("--out", "-o")
MBS = "sequences per micro-batch, split by train --pp"
MICRO_BATCH = ("--mbs", "--bsz", "--micro-batch", "--micro-batch-size", "--batch-size")

RUN_NAME = "run id or its beginning, a path, or latest"


@group
class Files:
    """Files."""

    json: str | None = flag("rows as JSON; - = stdout, DIR/ = a file in it", metavar="PATH")
    csv: str | None = flag("rows as CSV; - = stdout, DIR/ = a file in it", metavar="PATH")

    written: ClassVar[tuple[str, ...]] = ("json", "csv")  # options that may be "-"

    @property
    def to_stdout(self) -> bool:
        """Whether stdout is one of the files, so that nothing else may be printed there."""
        return "-" in attrgetter(*self.written)(self)

    def check_stdout(self) -> None:
        """Raise ConfigError for two outputs on stdout."""
        taken = ""
        for name in self.written:
            if getattr(self, name) == "-":
                if taken:
                    allowed = f"a path: stdout is already taken by --{dashed(taken)}"
                    raise ConfigError(dashed(name), "-", allowed)
                taken = name


@group
class RunsFolder:
    """Runs."""

    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")


@group
class RunFolder:
    """Run."""

    out: str | None = flag("folder for run directories [runs]", *OUT, metavar="DIR")
    dry_run: bool = flag("list the cases, run none", default=False)


@group
class Output(RunFolder, Files):
    """Run."""

    resume: str | None = flag(
        "go on with this run: skip measured cases, retry failed",
        rare=True,
        names="run",
        metavar="RUN",
    )
    force: bool = flag("resume although the environment differs", default=False, rare=True)


@group
class Device:
    """Device."""

    device: str | None = flag(
        "cuda, cpu; --dry-run: any, as h200 [cuda if any]", names="device"
    )


@group
class Budget:
    """Time limits."""

    budget: Duration | None = flag("time for all cases together, e.g. 60s")


@group
class TimeLimits(Budget):
    """Time limits."""

    timeout: Duration | None = flag(
        "a case that takes longer fails [600s; comm 60s]", "--timeout", "-T"
    )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(Output, TimeLimits, Device):
    """Options of every verb that measures."""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Run."""

    run: str = flag(RUN_NAME, default="latest", argument=True, metavar="ID", names="run")
    out: Path = flag("folder of runs", *OUT, "--runs", default=Path("runs"), metavar="DIR")
    force: bool = flag("resume although the environment differs", default=False)


@group
class ModelChoice:
    """Model."""

    model: str | None = flag("model name, or a file such as config.json", names="model")
    scale: str | None = flag("1/64: scaled-down widths; tiny: a tiny model")
    seq_len: int | None = flag("tokens per sequence [the model's]", "--seq-len", "--seq-length")


@group
class Axes:
    """Layout."""

    tp: Degree | None = flag(
        "tensor-parallel degree [1]", "--tp", "--tp-num", "--tensor-model-parallel-size"
    )
    pp: Degree | None = flag(
        "pipeline-parallel degree [1]",
        "--pp",
        "--pp-num",
        "--pipeline-model-parallel",
        "--pipeline-model-parallel-size",
    )
    cp: Degree | None = flag(
        "context-parallel degree: ranks of a sequence [1]", "--cp", "--context-parallel-size"
    )
    ep: Degree | None = flag(
        "expert-parallel degree, within the data ranks [1]",
        "--ep",
        "--expert-model-parallel-size",
        "--expert-parallel-size",
        "--ep-num",
    )
    dp_replicate: Degree | None = flag(
        "copies, each over the other ranks (HSDP)",
        "--dp-replicate",
        "--num-distributed-optimizer-instances",
        rare=True,
    )
