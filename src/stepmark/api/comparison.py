"""Compare what was measured."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stepmark.api.keywords import read, spells_keywords, text
from stepmark.api.ledger import to_plotly
from stepmark.api.run import Run
from stepmark.comparison import compare_verb, comparison_page
from stepmark.comparison import comparison as core
from stepmark.comparison import comparison_text as report
from stepmark.comparison.compare_options import CompareOptions
from stepmark.store.view import console
from stepmark.tables.columns import named
from stepmark.tables.table import Table

Source = str | os.PathLike[str] | Run
Launches = Source | Sequence[Source]
_SHOWN = (
    *("size_bytes", "side", "baseline_time_s", "time_s", "baseline_busbw_gb_s", "busbw_gb_s"),
    *("baseline_rate", "rate", "speed", "low", "high", "verdict", "reason"),
)


class Comparison(Table):
    """Sides against a baseline: a row per measurement and side, with a ratio and a verdict.

    names: the sides, the baseline first. overall: the geometric mean of each side's ratios.
    notes: what differs besides, what has no pair, why there is no verdict. too_slow: whether
    something is certainly slower by more than fail_if_slower; None without such a limit, and
    where a line is untested.

    Figures of two sides, None of more, which `overall` has: speed: the geometric mean of the
    speeds over the baseline's, 1.05 is 5 % faster; low, high: its 99 % interval; verdict:
    faster, slower, same or cannot tell.
    """

    def __init__(self, comparison: core.Comparison) -> None:
        """Keep a comparison."""
        _, varying = report.split_fields(comparison.lines)
        super().__init__(report.rows(comparison), named((*varying, *_SHOWN)))
        self.names = comparison.names
        self.notes = comparison.notes
        self.overall = Table(report.overall_rows(comparison))
        code = compare_verb.exit_code(comparison)
        has_limit = comparison.too_slow is not None
        self.too_slow = {0: False, 1: True}.get(code) if has_limit else None
        means = comparison.overall
        mean = means[0].ratio if len(means) == 1 and len(self.names) == 2 else None
        self.speed = mean and mean.speed
        self.low = mean and mean.low
        self.high = mean and mean.high
        self.verdict = mean and mean.verdict.value
        self.comparison = comparison

    def __repr__(self) -> str:
        count = ", ".join(f"{number} {name}" for name, number in Counter(self.verdicts).items())
        return f"<{type(self).__name__} of {' and '.join(self.names)}: {count}>"

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"{super()._repr_html_()}{notes}"

    @property
    def verdicts(self) -> list[str]:
        """Return the verdict of each row: faster, slower, same or cannot tell."""
        return [str(row["verdict"]) for row in self.rows()]

    def plot(self) -> Any:
        """Return a plotly figure: curves by size of one table, else speeds of all lines."""
        figures = [*comparison_page.figures(self.comparison)]
        if len(figures) > 1:
            lines = self.comparison.lines
            figures = [comparison_page.ratios(lines, self.comparison)]
        return to_plotly(figures[0])

    def show(self) -> None:
        """Print what `stepmark compare` prints."""
        report.printed(self.comparison, console())


@spells_keywords
def compare(*sources: Launches | Mapping[str, Launches], **options: object) -> Comparison:
    """Compare two or more sides; the first is the baseline.

    sources: each a run, its id or path, or a file of figures such as nccl-tests prints; a list
    is one side with several launches. Or one dict of these by the names of the sides. options:
    those of `stepmark compare`, e.g. noise_from, fail_if_slower; `options("compare")` lists
    them.
    """
    words: list[object] = []
    for source in sources:
        if isinstance(source, Mapping):
            words += [f"{name}={text(launches)}" for name, launches in source.items()]
        else:
            words.append(source)
    return Comparison(compare_verb.compared(read(CompareOptions, words, options)))
