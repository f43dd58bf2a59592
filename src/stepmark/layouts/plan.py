"""stepmark plan: which layout should this model train with on this cluster?"""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.layouts.anchors_of_plan import anchored_by_plan
from stepmark.layouts.candidate import place
from stepmark.layouts.layout_files import check_folder, write_layouts
from stepmark.layouts.layout_search import LayoutSearch, search
from stepmark.layouts.layout_work import Simulated
from stepmark.layouts.measured_layouts import check_machine, lines_of_steps, measure_layouts
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.plan_page import page
from stepmark.layouts.plan_text import lines_of_count, lines_of_counts
from stepmark.measuring.delivery import write_files
from stepmark.predictions.prediction_text import anchor_lines
from stepmark.store.view import print_text

LeftOut = dict[int, ConfigError]  # by number of GPUs


def run(options: PlanOptions) -> int:
    """Search, print, write files. Returns the exit code."""
    options.check_stdout()
    searches, left_out = plan(options)
    rows = [row for each in searches for row in each.rows]
    write_files(options, "layouts", document(searches, left_out), rows)
    text = [*lines(options, searches, left_out)]
    if options.html:
        write_text(options.html, page(options, searches, text).html(), "html")
    if not options.to_stdout:
        print_text(text)
    return 0


def plan(options: PlanOptions) -> tuple[list[LayoutSearch], LeftOut]:
    """Return the best layouts for each number of GPUs, and why others have none.

    Raises ConfigError where none has one.
    """
    check_folder(options)
    check_machine(options)
    searches, left_out = _search_all(options)
    if options.verify:
        layouts = [each.candidate for each in _shown_layouts(options, searches)]
        options = dataclasses.replace(options, anchor=str(measure_layouts(options, layouts)))
        before = place(searches[0].rows[0])
        sys.stderr.write(f"# the first row before this measurement: {before}\n")
        searches, left_out = _search_all(options)
    return write_layouts(options, searches), left_out


def _shown_layouts(options: PlanOptions, searches: list[LayoutSearch]) -> list[Simulated]:
    """Return the layouts of the rows that are shown."""
    if len(searches) > 1:
        return [each.best for each in searches]
    return [*searches[0].simulated[: options.top]]


def _search_all(options: PlanOptions) -> tuple[list[LayoutSearch], LeftOut]:
    """Search for each number of GPUs. Raises ConfigError where none has a layout."""
    searches: list[LayoutSearch] = []
    left_out: LeftOut = {}
    anchored = anchored_by_plan(options)
    for count in sorted({*options.gpus}):
        own = dataclasses.replace(options, gpus=(count,))
        try:
            searches.append(search(own, count, anchored))
        except ConfigError as error:
            left_out[count] = error
    if not searches:
        raise next(iter(left_out.values()))
    return searches, left_out


def lines(
    options: PlanOptions, searches: list[LayoutSearch], left_out: LeftOut
) -> Iterator[str]:
    """Yield the answer as text."""
    anchored = searches[0].cluster.anchored
    if len(searches) > 1:
        yield from lines_of_counts(searches)
        if anchored:
            yield from anchor_lines(anchored.document())
    else:
        yield from lines_of_count(options, searches[0])
    if options.verify and anchored:
        yield from lines_of_steps(options, anchored)
    for count, error in left_out.items():
        yield f"{count} GPUs are left out: {error}"


def document(searches: list[LayoutSearch], left_out: LeftOut) -> dict[str, Any]:
    """Return everything as plain data."""
    anchored = searches[0].cluster.anchored
    return {
        "anchors": anchored and anchored.document(),
        "counts": [
            {
                "gpus": each.cluster.num_gpus,
                "num_layouts": each.num_layouts,
                "num_too_large": each.num_too_large,
                "seconds": each.took_s,
                "command": each.command,
                "best": each.rows[0],
            }
            for each in searches
        ],
        "left_out": [
            {"gpus": count, "reason": str(error)} for count, error in left_out.items()
        ],
        "layouts": [row for each in searches for row in each.rows],
    }
