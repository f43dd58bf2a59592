"""Measure one command under several settings."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.api.comparison import Comparison
from stepmark.api.keywords import is_list, read, spells_keywords, text
from stepmark.comparison import recommendation, sweep_results
from stepmark.comparison import sweep as core
from stepmark.comparison.sweep_options import SweepOptions
from stepmark.comparison.sweep_race import compare_settings
from stepmark.ground.errors import StepmarkError
from stepmark.store import sweeps
from stepmark.store.sweeps import Journal
from stepmark.tables.table import Table


class Sweep(Comparison):
    """Settings of a command, compared with the baseline. Its rows are those of a comparison.

    path: the folder of the sweep. settings: their names. recommended: the setting that wins
    somewhere and loses nowhere, None where there is none; ranges: the winner by size. failed:
    the names of settings that failed, why. fresh: the comparison of the rounds that had no part
    in the selection; None without any.
    """

    def __init__(self, path: Path) -> None:
        """Read a sweep. Raises StepmarkError where it has nothing to compare."""
        sweep = sweeps.read(path)
        result = compare_settings(path, sweep)
        failed = sweep_results.failed_lines(sweep, path)
        lines = [*failed, *sweep_results.closing_lines(result, sweep, path)]
        if result is None:
            raise StepmarkError("\n".join(lines))
        super().__init__(result.comparison)
        self.path = path
        self.settings = tuple(setting.name for setting in sweep.settings)
        self.recommended = result.advice.single
        self.ranges = Table(recommendation.rows(result.advice))
        self.failed = {name: str(last.outcome) for name, last in sweep.failed.items()}
        self.fresh = Comparison(result.fresh) if result.fresh else None
        self._result = result
        self._lines = lines

    def show(self) -> None:
        """Print what `stepmark sweep` prints."""
        sweep_results.print_result(self._result, self._lines)


@spells_keywords
def sweep(command: str | Sequence[str] = (), **options: object) -> Sweep:
    """Measure a command under several settings, in interleaved rounds, and compare them.

    command: the words after `stepmark`, such as "comm all_reduce -b 1M -e 1G". options: those
    of `stepmark sweep`, with env={"NCCL_ALGO": ["Ring", "Tree"]} for variables and
    set={"ac": ["none", "full"]} for flags of the command; `options("sweep")` lists them.
    resume="ID" continues a sweep. Settings that fail are in `failed`. Raises ConfigError for
    bad options, StepmarkError where fewer than two settings were measured.
    """
    words = list(command) if is_list(command) else shlex.split(text(command))
    given = {name: _swept(value) for name, value in options.items()}
    own = read(SweepOptions, words, given)
    core.refuse_ranks(os.environ)
    base = dict(os.environ)
    planned, path = core.planned(own, base)
    core.check_tries(planned, base)
    paths: list[Path] = []

    def note(journal: Journal, *_: object) -> int:
        paths.append(journal.path)
        return 0

    if sweep_results.measure(planned, path, own, base, note) in (130, 143):
        raise KeyboardInterrupt
    return Sweep(paths[0])


def _swept(values: object) -> object:
    """Return NAME=VALUE,... of a dict; True and False are on and off, None leaves it unset.

    Text in place of a list is that of the command line: "Ring,Tree".
    """
    if not isinstance(values, Mapping):
        return values
    return [f"{name}={_listed(each)}" for name, each in values.items()]


def _listed(values: object) -> str:
    if isinstance(values, str):
        return values
    items = values if isinstance(values, list | tuple | range) else [values]
    return ",".join(map(_value, items))


def _value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return text(value).replace("\\", "\\\\").replace(",", "\\,")
