"""The options of verbs that measure nothing of their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.core.option_groups import RUN_NAME, Files, Ranks
from stepmark.core.options import (
    REQUIRED,
    Duration,
    Share,
    Words,
    between,
    flag,
    group,
    text_of,
    words_of,
)


@group
class RunsFolder:
    """Runs."""

    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")


@group
class RunName(RunsFolder):
    """Runs."""

    run: str = flag(RUN_NAME, default="latest", argument=True, metavar="ID", names="run")


@dataclass(frozen=True, kw_only=True)
class ListOptions(Files, RunsFolder):
    """stepmark runs list."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Files, RunName):
    """stepmark runs show."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(RunsFolder):
    """Export."""

    run: str = flag(RUN_NAME, default=REQUIRED, argument=True, metavar="ID", names="run")
    path: str = flag(
        "file, or folder of a tracker", default=REQUIRED, argument=True, metavar="PATH"
    )
    to: Annotated[str, text_of("csv", "json", "parquet", "tensorboard", "wandb", "mlflow")] = (
        flag("kind of the file or tracker", default=REQUIRED, metavar="KIND")
    )


@dataclass(frozen=True, kw_only=True)
class SqlOptions(Files, RunsFolder):
    """Query."""

    query: str = flag(
        "over views records and runs", default=REQUIRED, argument=True, metavar="QUERY"
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions(RunsFolder):
    """Page."""

    run: str = flag(RUN_NAME, default="latest", argument=True, metavar="ID", names="run")
    other: str | None = flag(
        "a second run: the ledgers of both side by side",
        argument=True,
        metavar="ID2",
        names="run",
    )
    out: Path | None = flag("file to write [RUN/report.html, of two RUN/report-ID2.html]")


@group
class NodeChecks:
    """Node check."""

    nodes: bool = flag("check this host's devices before a big job", default=False)
    out: Path | None = flag("folder that all hosts share [node-check]", metavar="DIR")
    read_from: Path | None = flag(
        "measure nothing: the verdict on all hosts that wrote into DIR", "--from", metavar="DIR"
    )
    pairs: Path | None = flag(
        "with --from: a run of `comm p2p-matrix` on these hosts, for the network", metavar="RUN"
    )
    expect: Words | None = flag(
        "hosts that must have written into --from, comma-separated", rare=True
    )
    gpus_per_node: Annotated[int, between(0, 1024)] | None = flag(
        "a host with others fails", rare=True
    )
    floor: Share = flag("slowdown that is accepted, against the others' median", default=0.05)
    device: Annotated[str, words_of("cuda", "cpu")] | None = flag(
        "cuda or cpu [cuda where there is one]"
    )
    nproc: str | None = flag("devices to check [all; 1 on a CPU]")
    budget: Duration | None = flag("time for the rates of a device [60s; 5s on a CPU]")
    launches: Annotated[int, between(1, 100)] | None = flag(
        "times each rate is measured [5; 2 on a CPU]", rare=True
    )
    timeout: Duration | None = flag("a device that takes longer is stuck [600s]", rare=True)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(NodeChecks, Files):
    """stepmark doctor."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Files, RunsFolder):
    """Check."""

    baseline: str = flag(
        "run id or path of the reference; commas join its launches",
        default=REQUIRED,
        names="run",
    )
    budget: Duration = flag("time in all", default=600.0)
    launches: Annotated[int, between(2, 100)] = flag("times each case is measured", default=5)
    floor: Annotated[float, between(0.0, 1.0)] = flag(
        "slowdown that is still accepted", default=0.03
    )


@group
class Settings:
    """Settings to compare."""

    env: tuple[str, ...] = flag(
        r"NAME=A,B: values of a variable; none (NAME=,B): unset; \, is a comma", default=()
    )
    flags: tuple[str, ...] = flag(
        "NAME=A,B: values of the command's flag --NAME; on, off if it takes none",
        "--set",
        default=(),
    )
    python: str | None = flag(
        "A,B: interpreters or virtual environments that run the command; none: this one"
    )
    no_default: bool = flag("without the setting in which nothing is set", default=False)
    baseline: str | None = flag("setting to compare with [default, or the first]")


@group
class Rounds:
    """Rounds."""

    repeats: Annotated[int, between(1, 1000)] | None = flag(
        "most rounds that select, of all settings but the dropped; most fresh rounds [5]"
    )
    order: Annotated[str, words_of("interleaved", "fixed")] | None = flag(
        "interleaved (a new order each round) or fixed [interleaved]"
    )
    seed: int | None = flag("of the orders [random; it is kept]", rare=True)
    timeout: Duration | None = flag("a setting that takes longer is left out [10m]")
    budget: Duration | None = flag("no further round that would end after this")
    out: Path = flag("folder of sweeps", default=Path("sweeps"))
    resume: str | None = flag("go on with this sweep: what is missing, more rounds")
    force: bool = flag(
        "more than 64 settings; overwrite the tuner file", default=False, rare=True
    )
    dry_run: bool = flag("list the commands, run none", default=False)


@group
class Recommendation:
    """Recommendation."""

    min_gain: Share | None = flag("smaller gains are not recommended [1%]")
    emit_tuner: Path | None = flag("comm: write this file for NCCL's tuner plugin", rare=True)
    tuner_plugin: str | None = flag(
        "plugin to verify the tuner file with [NCCL_TUNER_PLUGIN]", rare=True
    )
    html: str | None = flag("a page with the curves and ratios", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Settings, Rounds, Recommendation, Files):
    """stepmark sweep."""

    words: tuple[str, ...] = flag(
        "-- and a command that measures: -- comm all_reduce -b 1K -e 1G",
        default=(),
        argument=True,
        metavar="COMMAND",
    )


@dataclass(frozen=True, kw_only=True)
class MessageView:
    """Messages."""

    histogram: bool = flag("how often each message size", default=False)
    by: str | None = flag("tell apart: collective,dtype,group,phase or fewer [all]")
    bins: str | None = flag("craypat, pow2, exact, or edges 1K,64K,1M [exact while few]")
    ranks: int | None = flag("ranks of communicators that do not state them", rare=True)
    curve: str | None = flag("run or file with measured times: what messages cost")
    steps: Annotated[int, between(1, 2**31)] | None = flag(
        "training steps in the files, for figures per step"
    )
    tuning: bool = flag("algorithm and protocol by size, as logged", default=False)
    html: str | None = flag("figures of the histogram as one page", metavar="PATH")
    force: bool = flag("accept a curve of another number of ranks", default=False, rare=True)

    @property
    def shows_histogram(self) -> bool:
        """Whether an option asks for the histogram, or implies it."""
        implied = (self.by, self.bins, self.curve, self.html)
        return self.histogram or any(value is not None for value in implied)


@dataclass(frozen=True, kw_only=True)
class LogsOptions(MessageView, Files, RunsFolder):
    """Tables."""

    files: tuple[str, ...] = flag(
        "files, folders and quoted patterns of one job",
        default=REQUIRED,
        argument=True,
        metavar="FILE...",
    )
    tables: bool = flag("list and validate tables of results", default=False)


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts that files do not state."""

    collective: str | None = flag("of files that do not state it", rare=True)
    ranks: int | None = flag("number of ranks of files that do not state it", rare=True)
    unit: Annotated[str, words_of("rate", "time")] | None = flag(
        "of figures that do not state it: rate or time", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics."""

    size_range: str | None = flag(
        "sizes of the geometric mean, e.g. 1M-1G [all]", "--range", metavar="SIZE-SIZE"
    )
    noise: Share | None = flag("variation of one launch (1 sd), e.g. 2%", rare=True)
    noise_from: tuple[str, ...] = flag(
        "a run with several launches, whose variation is used",
        "--noise-from",
        "--spread",
        default=(),
        metavar="RUN",
    )
    statistic: Annotated[str, words_of("median", "mean")] = flag(
        "of a launch's samples: median or mean", default="median", rare=True
    )
    fail_if_slower: Share | None = flag("exit 1 if any is slower, e.g. 5%, beyond noise")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SourceFacts, Statistics, Files, RunsFolder):
    """Comparison."""

    sources: tuple[str, ...] = flag(
        "runs, files, FILE:2 (its second table), folders, quoted patterns; several with commas "
        "are launches of one side",
        default=REQUIRED,
        argument=True,
        metavar="[NAME=]A[,A2,...] B [C ...]",
        names="run",
    )
    baseline: str | None = flag("name of the side to compare with [first]")
    placement: Annotated[str, words_of("in", "out", "both")] = flag(
        "in, out (of place) or both", default="both"
    )
    allow: tuple[str, ...] = flag(
        "pair although this differs: method, num_ranks, dtype", default=()
    )
    force: bool = flag("pair whatever differs", default=False, rare=True)
    html: Path | None = flag("a page with the curves and ratios")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Completion."""

    shell: Annotated[str, words_of("bash", "zsh", "fish")] = flag(
        "shell of the script", default=REQUIRED, argument=True, metavar="bash|zsh|fish"
    )


@group
class WatchedSteps:
    """Steps."""

    warmup: Annotated[int, between(1, 2**31)] = flag(
        "optimizer steps before the first that is timed", default=10
    )
    steps: Annotated[int, between(1, 1000)] = flag("steps to profile", default=3)
    ranks: Ranks | None = flag("ranks to profile, e.g. 0,1 [the first 8]")
    no_shapes: bool = flag("profile without the shapes of operands", default=False, rare=True)
    nccl_subsys: str = flag(
        "parts of NCCL that log; COLL writes a line per call, all job long",
        default="INIT,ENV,NET,GRAPH,COLL",
        rare=True,
    )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(WatchedSteps, Files):
    """stepmark watch."""

    out: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")
    words: tuple[str, ...] = flag(
        "-- and the job's command: -- torchrun --nproc-per-node 8 train.py",
        default=(),
        argument=True,
        metavar="COMMAND",
    )
