"""The options of stepmark trace."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.option_groups import OUT, Files, Ranks
from stepmark.ground.options import (
    REQUIRED,
    Reader,
    between,
    flag,
    group,
    read_ranges,
    words_of,
)
from stepmark.ground.units import ranks_text

StepNumbers = Annotated[
    tuple[int, ...],
    Reader(read=partial(read_ranges, least=0, most=2**63), metavar="5|5-7", is_sequence=True),
]


@group
class TraceInputs:
    """Traces."""

    files: tuple[str, ...] = flag(
        "traces of one job: files, folders, quoted patterns, a run, or latest",
        default=REQUIRED,
        argument=True,
        metavar="DIR...",
        names="run",
    )
    ranks: Ranks | None = flag("only these ranks, e.g. 0,1 or 0-3 [all]")
    steps: StepNumbers | None = flag("only these steps, as ProfilerStep# counts them [all]")
    jobs: Annotated[int, between(1, 1024)] | None = flag(
        "processes that read [cores]", rare=True
    )
    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR")
    no_cache: bool = flag("neither use nor keep parsed columns of large traces", default=False)

    def has_step(self, number: int) -> bool:
        """Return whether --steps selects this step."""
        return self.steps is None or number in self.steps

    def check_steps(self, numbers: Collection[int], unmarked: Iterable[str]) -> None:
        """Raise ConfigError if --steps selects none of these, or for files without steps."""
        if self.steps is None:
            return
        if file := next(iter(unmarked), None):
            allowed = f"it has no meaning for {file}, without ProfilerStep marks"
        elif not any(map(self.has_step, numbers)):
            allowed = f"among those of the traces: {ranks_text(numbers).split(' ', 1)[1]}"
        else:
            return
        raise ConfigError("steps", self.steps, allowed)


@dataclass(frozen=True, kw_only=True)
class BreakdownOptions(Files, TraceInputs):
    """stepmark trace breakdown."""

    details: bool = flag("also launch calls, copies and the queue of launches", default=False)
    html: str | None = flag("timeline, steps and messages as one page", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(Files, TraceInputs):
    """stepmark trace ledger."""


@dataclass(frozen=True, kw_only=True)
class MessagesOptions(Files, TraceInputs):
    """Messages."""

    by: str | None = flag(
        "tell apart: collective,dtype,group,phase or fewer [all]", metavar="FIELDS"
    )
    bins: str | None = flag("craypat, pow2, exact, or edges 1K,64K,1M [exact while few]")
    curve: str | None = flag(
        "run, file or folder with measured times: what messages should take",
        metavar="RUN|FILE",
    )
    other_curve: str | None = flag(
        "measured times of another network or setting: what it gains",
        metavar="RUN|FILE",
    )
    network: str | None = flag(
        "what messages should take on it, and what it gains: dgx-h100, p5, ... or a file",
        metavar="NAME|FILE",
        names="network",
    )
    network_speedup: Annotated[float, between(1.0, 1000.0)] | None = flag(
        "times as fast: what such a network gains [2]"
    )
    force: bool = flag("accept a curve of another number of ranks", default=False, rare=True)
    html: str | None = flag("figures of the histogram as one page", metavar="PATH")


BY = ("role", "layer", "module", "op", "group", "name")


@dataclass(frozen=True, kw_only=True)
class KernelsOptions(Files, TraceInputs):
    """stepmark trace kernels."""

    by: Annotated[str, words_of(*BY)] = flag(
        "role, layer, module, op, group or name",
        default="role",
    )
    workload: str | None = flag(
        "workload of the step, which tells roles by shapes [of a run: its own]", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class CompareTracesOptions(KernelsOptions):
    """stepmark trace compare."""

    files: tuple[str, ...] = flag(
        "two sides, a file, folder, quoted pattern or run each; launches of a side are "
        "joined by commas",
        default=REQUIRED,
        argument=True,
        metavar="A[,A2...] B[,B2...]",
        names="run",
    )
    by: Annotated[str, words_of(*BY)] = flag(
        "role, layer, module, op, group or name",
        default="op",
    )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(TraceInputs):
    """stepmark trace convert."""

    to: Annotated[str, words_of("chakra", "csv", "parquet", "trimmed")] = flag(
        "chakra (a step, for ASTRA-sim), csv or parquet (tables), trimmed (for Perfetto)",
        default=REQUIRED,
        metavar="FORMAT",
    )
    out: Path = flag("folder, new or empty", *OUT, default=REQUIRED, metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class CriticalPathOptions(Files, TraceInputs):
    """stepmark trace critical-path."""


@dataclass(frozen=True, kw_only=True)
class ToWorkloadOptions(TraceInputs):
    """stepmark trace to-workload."""

    out: str = flag("file to write; - = stdout", *OUT, default=REQUIRED, metavar="FILE")
    starts: bool = flag("keep the start of each operation, for replay --pace", default=False)
