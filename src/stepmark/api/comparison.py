"""Compare what was measured."""

import os
from collections.abc import Sequence

from stepmark.api.keywords import read, spells_keywords
from stepmark.api.run import Run
from stepmark.api.table import Table
from stepmark.app.compare import compared
from stepmark.app.view import console
from stepmark.core import comparison as core
from stepmark.core.verb_options import CompareOptions
from stepmark.report import comparison as report

Source = str | os.PathLike[str] | Run
_SHOWN = ("verdict", "ratio", "ratio_low", "ratio_high", "baseline_time_s", "time_s")


class Comparison(Table):
    """Sides against a baseline: a row per measurement and side, with a ratio and a verdict.

    names: the sides, the baseline first. overall: the geometric mean of each side's ratios.
    """

    def __init__(self, comparison: core.Comparison) -> None:
        """Keep a comparison."""
        super().__init__(report.rows(comparison))
        self.names = comparison.names
        self.notes = comparison.notes
        self.overall = Table(report.overall_rows(comparison))
        self.comparison = comparison

    @property
    def verdicts(self) -> list[str]:
        """Return the verdict of each row: faster, slower, same or cannot tell."""
        return [str(row["verdict"]) for row in self.rows()]

    def show(self) -> None:
        """Print what `stepmark compare` prints."""
        report.printed(self.comparison, console())


@spells_keywords
def compare(*sources: Source | Sequence[Source], **options: object) -> Comparison:
    """Compare two or more sides; the first is the baseline.

    sources: each a run, its id or path, or a file of figures such as nccl-tests prints. A list
    is one side with several launches; "name=PATH" names a side. options: those of `stepmark
    compare`, e.g. noise_from, fail_if_slower; `options("compare")` lists them.
    """
    return Comparison(compared(read(CompareOptions, sources, options)))
