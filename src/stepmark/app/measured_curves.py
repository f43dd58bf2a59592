"""Measured times of collectives by size: of a run, an nccl-tests file or a CSV of stepmark."""

from collections.abc import Iterator
from pathlib import Path

from stepmark.app.view import view
from stepmark.core.collectives import Collective
from stepmark.core.columns import number, text
from stepmark.core.errors import ConfigError
from stepmark.report.expected import Curve, curve_of
from stepmark.store.reader import find_run
from stepmark.trace.tables import find

Point = tuple[str, int, str, int, float]  # collective, ranks, placement, bytes, seconds


def read_curves(source: str, runs: Path) -> list[Curve]:
    """Return one curve per collective and number of ranks. Raises ConfigError.

    Times are out of place where both were measured. Several times of a size become their
    median.
    """
    path = Path(source)
    points = _file_points(path) if path.is_file() else _run_points(source, runs)
    groups: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for collective, num_ranks, placement, size, seconds in points:
        by_placement = groups.setdefault((collective, num_ranks), {})
        by_placement.setdefault(placement, []).append((size, seconds))
    curves = []
    for (collective, num_ranks), by_placement in groups.items():
        times = by_placement.get("out-of-place") or next(iter(by_placement.values()))
        if curve := curve_of(collective, num_ranks, times, source):
            curves.append(curve)
    if not curves:
        allowed = "a run or file with times of collectives and their number of ranks"
        raise ConfigError("curve", source, allowed)
    return curves


def _file_points(path: Path) -> Iterator[Point]:
    for table in find(path):
        if table.collective not in set(Collective) or not table.num_ranks:
            continue
        for reading in table.readings:
            if reading.size_bytes and reading.time_s and not reading.num_wrong:
                curve = (table.collective, table.num_ranks, reading.placement)
                yield (*curve, reading.size_bytes, reading.time_s)


def _run_points(name: str, runs: Path) -> Iterator[Point]:
    """Yield measurements without concurrent compute or delay, back to back if any are."""
    try:
        path = find_run(runs, name)
    except ConfigError as error:
        raise ConfigError("curve", name, f"a file that exists, or {error.allowed}") from None
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
            collective, placement = text(row, "collective"), text(row, "placement")
            yield collective, int(ranks), placement, int(size), seconds
