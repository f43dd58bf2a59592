"""Measured times of collectives by size: of a run, of nccl-tests files or CSV of stepmark."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from stepmark.cases.comm_curve import Curve, curve_of
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Table
from stepmark.model.collectives import Collective, Mode
from stepmark.store.reader import find_run, is_run
from stepmark.store.view import view
from stepmark.tables.columns import Row, number, text
from stepmark.text_tables import find

# Collective, ranks, hosts where they are known, placement, bytes, seconds.
Point = tuple[str, int, int | None, str, int, float]
_MAX_FILES = 10_000


def read_curves(source: str, runs: Path) -> list[Curve]:
    """Return one curve per collective and number of ranks. Raises ConfigError.

    Times are out of place where both were measured. Several times of a size become their
    median. A folder that is no run is read file by file; FILE:2 is the second table of a file.
    """
    path = Path(source)
    head, _, table = source.rpartition(":")
    if path.is_dir() and not is_run(path):
        files = sorted(each for each in path.rglob("*") if each.is_file())
        points = _file_points(files[:_MAX_FILES])
    elif path.is_file():
        points = _file_points([path])
    elif table.isdecimal() and Path(head).is_file():
        points = _file_points([Path(head)], int(table))
    else:
        try:
            points = _run_points(find_run(runs, source))
        except ConfigError as error:
            allowed = f"a file that exists, or {error.allowed}"
            raise ConfigError("curve", source, allowed) from None
    curves = _curves(points, source)
    if not curves:
        allowed = "a run or file with times of collectives and their number of ranks"
        raise ConfigError("curve", source, allowed)
    return curves


def run_curves(path: Path) -> list[Curve]:
    """Return the curves of the collectives that a run measured, if any."""
    return _curves(_run_points(path), path.name)


def _curves(points: Iterator[Point], source: str) -> list[Curve]:
    groups: dict[tuple[str, int, int | None], dict[str, list[tuple[int, float]]]] = {}
    for collective, num_ranks, num_hosts, placement, size, seconds in points:
        by_placement = groups.setdefault((collective, num_ranks, num_hosts), {})
        by_placement.setdefault(placement, []).append((size, seconds))
    curves = []
    for (collective, num_ranks, num_hosts), by_placement in groups.items():
        times = by_placement.get("out-of-place") or next(iter(by_placement.values()))
        if curve := curve_of(collective, num_ranks, times, source, num_hosts):
            curves.append(curve)
    return curves


def _file_points(paths: Sequence[Path], number: int | None = None) -> Iterator[Point]:
    """Yield times of tables. Those of CUDA graphs only where a collective has no others."""
    tables = [table for path in paths for table in _tables(path, is_only=len(paths) == 1)]
    tables = [table for table in tables if number in (None, table.index)]
    _refuse_settings(tables)
    kinds = {(table.collective, table.num_ranks, _is_graph(table)) for table in tables}
    for table in tables:
        if _is_graph(table) and (table.collective, table.num_ranks, False) in kinds:
            continue
        assert table.num_ranks
        for reading in table.readings:
            if reading.size_bytes and reading.time_s and not reading.num_wrong:
                curve = (table.collective, table.num_ranks, None, reading.placement)
                yield (*curve, reading.size_bytes, reading.time_s)


def _tables(path: Path, *, is_only: bool) -> list[Table]:
    try:
        tables = find(path)
    except ConfigError:
        if is_only:
            raise
        return []  # of a folder: no text
    return [
        table
        for table in tables
        if table.collective in set(Collective)
        and table.num_ranks
        and any(reading.size_bytes and reading.time_s for reading in table.readings)
    ]


def _refuse_settings(tables: Sequence[Table]) -> None:
    """Refuse tables of one collective that a file tells apart by their titles."""
    first: dict[tuple[object, ...], Table] = {}
    for table in tables:
        other = first.setdefault((table.file, table.collective, table.num_ranks), table)
        if other.title != table.title and _is_graph(other) == _is_graph(table):
            value = f"{table.file} with {other.title!r} and {table.title!r}"
            allowed = f"one of them: {table.file}:{other.index} or {table.file}:{table.index}"
            raise ConfigError("curve", value, allowed)


def _is_graph(table: Table) -> bool:
    return "graph" in table.method


def _run_points(path: Path) -> Iterator[Point]:
    """Yield measurements without concurrent compute or delay, of the first mode that it has."""
    shown = view(path, kinds=("comm",))
    host_of = {device.rank: device.host for device in shown.run.environment.devices}
    rows = [
        row
        for row in shown.comm_rows
        if row["status"] == "measured" and not row["beside"] and not row["skew_s"]
    ]
    modes = {row["mode"] for row in rows}
    back_to_back = next((mode for mode in (Mode.AHEAD, Mode.QUEUED) if mode in modes), None)
    for row in rows:
        if back_to_back and row["mode"] != back_to_back:
            continue
        size, seconds, ranks = (
            number(row, key) for key in ("size_bytes", "time_s", "num_ranks")
        )
        if size and seconds and ranks:
            collective = text(row, "collective")
            placement = text(row, "placement")
            num_hosts = _num_hosts(row, int(ranks), host_of)
            yield collective, int(ranks), num_hosts, placement, int(size), seconds


def _num_hosts(row: Row, num_ranks: int, host_of: dict[int, str]) -> int | None:
    """Return the hosts of the ranks of a row; None where they are not known."""
    if row["split"]:
        return None  # several communicators at once
    pair = text(row, "pair") if row["pair"] else ""
    ranks = map(int, pair.split("-")) if pair else range(num_ranks)
    hosts = {host_of.get(rank, "") for rank in ranks}
    return None if "" in hosts else len(hosts)
