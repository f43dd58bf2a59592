"""Options of `stepmark logs`."""

from dataclasses import dataclass
from typing import Annotated

from stepmark.ground.option_groups import Files, RunsFolder
from stepmark.ground.options import REQUIRED, between, flag


@dataclass(frozen=True, kw_only=True)
class MessageView:
    """Messages."""

    histogram: bool = flag("how often each message size", default=False)
    by: str | None = flag(
        "tell apart: collective,dtype,group,phase or fewer [all]", metavar="FIELDS"
    )
    bins: str | None = flag("craypat, pow2, exact, or edges 1K,64K,1M [exact while few]")
    ranks: int | None = flag("ranks of communicators that do not state them", rare=True)
    curve: str | None = flag(
        "run or file with measured times: what messages cost", metavar="RUN|FILE"
    )
    steps: Annotated[int, between(1, 2**31)] | None = flag(
        "training steps in the files, for figures per step"
    )
    tuning: bool = flag("algorithm and protocol by size, as logged", default=False)
    html: str | None = flag("the answer, steps and histogram as one page", metavar="PATH")
    force: bool = flag("accept a curve of another number of ranks", default=False, rare=True)

    @property
    def is_diagnosis(self) -> bool:
        """Whether no option asks for a view of messages alone."""
        return not self.shows_histogram and not self.tuning

    @property
    def shows_histogram(self) -> bool:
        """Whether an option asks for the histogram, or implies it."""
        implied = (self.by, self.bins, self.curve)
        return self.histogram or any(value is not None for value in implied)


@dataclass(frozen=True, kw_only=True)
class TrainingView:
    """Training logs."""

    model: str | None = flag("what is trained: FLOP/s in every convention", names="model")
    device: str | None = flag(
        "its device, for MFU, or that of a table that names none", names="device"
    )


@dataclass(frozen=True, kw_only=True)
class LogsOptions(MessageView, TrainingView, Files, RunsFolder):
    """Tables."""

    files: tuple[str, ...] = flag(
        "files, folders and quoted patterns of one job",
        default=REQUIRED,
        argument=True,
        metavar="FILE...",
    )
    ended: bool = flag("the job ended: what is incomplete failed", default=False)
    tables: bool = flag("list and validate tables of results", default=False)
    nics: str | None = flag(
        "NICs of a host that the ranks use, to judge a table: 8x400G", metavar="8x400G"
    )
    gpus_per_node: Annotated[int, between(1, 1024)] | None = flag(
        "ranks of a host, for a table that names no hosts", rare=True
    )
