"""Options of `stepmark sweep`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.ground.option_groups import OUT, Files
from stepmark.ground.options import Duration, Share, between, flag, group, words_of


@group
class Settings:
    """Settings to compare."""

    env: tuple[str, ...] = flag(
        r"NAME=A,B: values of a variable; none (NAME=,B): unset; \, is a comma",
        default=(),
        metavar="NAME=A,B",
    )
    flags: tuple[str, ...] = flag(
        "NAME=A,B: values of the command's flag --NAME; on, off if it takes none",
        "--set",
        default=(),
        metavar="NAME=A,B",
    )
    python: str | None = flag(
        "A,B: interpreters or virtual environments that run the command; none: this one",
        metavar="PYTHON",
    )
    no_default: bool = flag("without the setting in which nothing is set", default=False)
    baseline: str | None = flag(
        "setting to compare with [default, or the first]", metavar="NAME"
    )


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
    budget: Duration | None = flag("time for the launches; rounds are planned to fit it")
    out: Path = flag("folder of sweeps", *OUT, default=Path("sweeps"), metavar="DIR")
    resume: str | None = flag(
        "go on with this sweep: what is missing, more rounds", metavar="SWEEP"
    )
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
