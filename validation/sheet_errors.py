"""Errors of predictions by data sheet, from which `stepmark predict` has its intervals.

    python validation/sheet_errors.py write      predict all published steps, write the table
    python validation/sheet_errors.py coverage   how often intervals by the table hold

`write` takes three minutes on a core, and is to be repeated when predictions by data sheet
change. `coverage` gives each published step its interval by all rows, its own one too, and by
those of other sources alone, which is what a new source may expect.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "validation")]

from published_jobs import job_of, playbook_row, read_rows  # noqa: E402
from published_steps import NAMES, Scored, score  # noqa: E402

from stepmark.predictions.sheet_errors import (  # noqa: E402
    TABLE,
    SheetError,
    errors_like,
    interval_by,
    read_errors,
)

PATH = ROOT / "src" / "stepmark" / "data" / TABLE
COLUMNS = ("source", "device", "waits_for", "framework", "log_ratios")


def scored_rows() -> Iterator[Scored]:
    """Yield the published steps that can be predicted."""
    rows = [*read_rows(NAMES["steps"]), *map(playbook_row, read_rows(NAMES["playbook"]))]
    for row in rows:
        if row.get("ran", "1") == "1":
            scored = score(row)
            if scored.outcome:
                yield scored


def write() -> None:
    """Predict all published steps and write the table."""
    ratios: dict[tuple[str, ...], list[str]] = {}
    for each in scored_rows():
        assert each.outcome
        key = (each.row["source"], job_of(each.row).device, *each.outcome.traits)
        ratio = log(each.published_s / each.outcome.step_s)
        ratios.setdefault(key, []).append(f"{ratio:.3f}")
    with PATH.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*key, " ".join(own)] for key, own in sorted(ratios.items()))


def print_coverage(errors: Sequence[SheetError]) -> None:
    """Print how often intervals hold, by all rows and by those of other sources."""
    print(f"{'':50}rows  all rows: holds  half width | other sources: holds  half width")
    groups: dict[str, list[SheetError]] = {}
    for each in errors:
        groups.setdefault(f"{each.source} {each.device}", []).append(each)
    for each in errors:
        shared = ", ".join(errors_like(errors, each.traits)[1])
        groups.setdefault(shared or "other classes", []).append(each)
    groups["all"] = [*errors]
    for name, own in groups.items():
        by_all = _figures(own, errors, lambda _own, _other: True)
        by_others = _figures(own, errors, lambda one, other: one.source != other.source)
        print(f"{name:50}{len(own):4} {by_all:>28} | {by_others:>32}")


def _figures(
    rows: Sequence[SheetError],
    errors: Sequence[SheetError],
    counts: Callable[[SheetError, SheetError], bool],
) -> str:
    """Return the share of rows inside their intervals, and the median half width of these."""
    inside = []
    widths = []
    for row in rows:
        others = [each for each in errors if counts(row, each)]
        own, _ = errors_like(others, row.traits)
        interval = interval_by(own, 1.0)
        assert interval.low_s is not None
        assert interval.high_s is not None
        inside.append(interval.low_s <= exp(row.log_ratio) <= interval.high_s)
        widths.append((interval.high_s - interval.low_s) / (interval.high_s + interval.low_s))
    return f"{mean(inside):.1%}  {median(widths):10.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "coverage"))
    if parser.parse_args().command == "write":
        write()
    else:
        print_coverage(read_errors())


if __name__ == "__main__":
    main()
