"""stepmark plan: which layout should this model train with on this cluster?"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.layout_search import LayoutSearch, search
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.plan_text import lines_of_count, lines_of_counts
from stepmark.measuring.delivery import write_files
from stepmark.store.view import print_text


def run(options: PlanOptions) -> int:
    """Search, print, write files. Returns the exit code."""
    options.check_stdout()
    searches = plan(options)
    rows = [row for each in searches for row in each.rows]
    write_files(options, "layouts", document(searches), rows)
    if not options.to_stdout:
        print_text(lines(options, searches))
    return 0


def plan(options: PlanOptions) -> list[LayoutSearch]:
    """Return the best layouts for each number of GPUs. Raises ConfigError.

    A number for which nothing fits or divides is left out if others have layouts.
    """
    searches: list[LayoutSearch] = []
    errors: list[ConfigError] = []
    for count in dict.fromkeys(options.gpus):
        try:
            searches.append(search(dataclasses.replace(options, gpus=(count,)), count))
        except ConfigError as error:
            errors.append(error)
    if not searches:
        raise errors[0]
    return searches


def lines(options: PlanOptions, searches: list[LayoutSearch]) -> Iterator[str]:
    """Return the answer as text."""
    if len(searches) > 1:
        return lines_of_counts(searches)
    return lines_of_count(options, searches[0])


def document(searches: list[LayoutSearch]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "counts": [
            {
                "gpus": each.num_gpus,
                "num_layouts": each.num_layouts,
                "num_too_large": each.num_too_large,
                "seconds": each.took_s,
                "command": each.command,
                "best": each.rows[0],
            }
            for each in searches
        ],
        "layouts": [row for each in searches for row in each.rows],
    }
