"""Options of `stepmark compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.ground.option_groups import Files, RunsFolder
from stepmark.ground.options import REQUIRED, Share, flag, words_of


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
    noise: Share | None = flag("variation of one launch (1 sd), e.g. 2%")
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
    baseline: str | None = flag("name of the side to compare with [first]", metavar="NAME")
    placement: Annotated[str, words_of("in", "out", "both")] = flag(
        "in, out (of place) or both", default="both"
    )
    allow: tuple[str, ...] = flag(
        "pair although this differs: method, num_ranks, dtype",
        default=(),
        metavar="WORD",
    )
    force: bool = flag("pair whatever differs", default=False, rare=True)
    html: Path | None = flag("a page with the curves and ratios", metavar="PATH")
