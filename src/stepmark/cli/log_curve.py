"""Measured times to hold messages against: of a run, an nccl-tests file or a CSV of ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.core.collectives import Collective
from stepmark.core.errors import ConfigError

if TYPE_CHECKING:
    from stepmark.report.expected import Curve

Point = tuple[str, int, str, int, float]  # collective, ranks, placement, bytes, seconds


def read_curves(word: str, runs: Path) -> "list[Curve]":
    """One curve per collective and number of ranks.

    Out of place where it was measured, else in place; several times of one size become their
    median. Raises ConfigError for a source without times of collectives.
    """
    from stepmark.report.expected import curve_of  # noqa: PLC0415

    points = list(_of_file(Path(word)) if Path(word).is_file() else _of_run(word, runs))
    held: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for collective, num_ranks, placement, size, seconds in points:
        by_placement = held.setdefault((collective, num_ranks), {})
        by_placement.setdefault(placement, []).append((size, seconds))
    curves = []
    for (collective, num_ranks), by_placement in held.items():
        chosen = by_placement.get("out-of-place") or next(iter(by_placement.values()))
        curve = curve_of(collective, num_ranks, chosen, word)
        if curve is not None:
            curves.append(curve)
    if not curves:
        allowed = "a run or file with times of collectives and their number of ranks"
        raise ConfigError("curve", word, allowed)
    return curves


def _of_file(path: Path) -> Iterator[Point]:
    from stepmark.trace.tables import find  # noqa: PLC0415

    for table in find(path):
        if table.collective not in set(Collective) or not table.num_ranks:
            continue
        for one in table.readings:
            if one.size_bytes and one.time_s and not one.num_wrong:
                yield (
                    table.collective,
                    table.num_ranks,
                    one.placement,
                    one.size_bytes,
                    one.time_s,
                )


def _of_run(word: str, runs: Path) -> Iterator[Point]:
    """Plain measurements only: alone, not delayed, back to back if there are several ways."""
    from stepmark.app.view import view  # noqa: PLC0415
    from stepmark.core.columns import number, text  # noqa: PLC0415
    from stepmark.store.reader import find_run  # noqa: PLC0415

    try:
        path = find_run(runs, word)
    except ConfigError as error:
        raise ConfigError("curve", word, f"a file that exists, or {error.allowed}") from None
    rows = [
        row
        for row in view(path).comm_rows
        if row["status"] == "measured" and not row["beside"] and not row["skew_s"]
    ]
    modes = {row["mode"] for row in rows}
    for row in rows:
        if "queued" in modes and row["mode"] != "queued":
            continue
        size, seconds, ranks = (
            number(row, key) for key in ("size_bytes", "time_s", "num_ranks")
        )
        if size and seconds and ranks:
            name, placement = text(row, "collective"), text(row, "placement")
            yield name, int(ranks), placement, int(size), seconds
