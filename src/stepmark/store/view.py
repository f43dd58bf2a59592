"""A run with all that its rows need: peaks of its device, and times of published runs."""

import csv
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cases.case import OpCase
from stepmark.cases.kind import KINDS
from stepmark.cases.record import Measured, Record, RunInfo
from stepmark.ground.options import load
from stepmark.ground.package_data import data_text
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.model.device import DeviceSpec, find_device
from stepmark.model.ops import Op
from stepmark.store.reader import (
    Run,
    find_run,
    read,
    with_all_samples,
)
from stepmark.tables.columns import Column
from stepmark.tables.launches import OpLaunches, pooled
from stepmark.tables.table import fitted

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The contents of a page or table."""

    run: RunInfo
    records: list[Record]
    rows: list[dict[str, object]]  # operators
    comm_rows: list[dict[str, object]]
    train_rows: list[dict[str, object]]
    replay_rows: list[dict[str, object]]
    device: DeviceSpec | None

    @property
    def all_rows(self) -> list[dict[str, object]]:
        """Return the rows of all kinds of cases."""
        return self.rows + self.comm_rows + self.train_rows + self.replay_rows


def columns(kind: str) -> Sequence[Column[Any]]:
    """Return the declared columns of the rows of a kind of case."""
    declared: Sequence[Column[Any]] = load(KINDS[kind].columns)
    return declared


def view(path: Path, kinds: Collection[str] = tuple(KINDS)) -> View:
    """Read a run and derive its rows; print on stderr what could not be read.

    kinds: of the cases that count; rows of operators take long, since others are read for them.
    """
    run = read_with_warnings(path)
    records = [record for record in run.latest if record.case.kind in kinds]
    return of_records(run.info, list(with_all_samples(path, records)))


def read_with_warnings(path: Path) -> Run:
    """Read a run; print on stderr what could not be read."""
    run = read(path)
    warn(run.notes)
    return run


def warn(notes: Iterable[str]) -> None:
    """Write notes on stderr, each once."""
    for note in dict.fromkeys(notes):
        sys.stderr.write(f"stepmark: {note}\n")


def of_records(run: RunInfo, records: list[Record]) -> View:
    device = device_of(run)
    kinds = {record.case.kind for record in records}
    rows: dict[str, list[dict[str, object]]] = {}
    for kind in kinds:
        more = {"reference": reference(run)} if kind == "op" else {}
        rows[kind] = load(KINDS[kind].rows)(records, run, device=device, **more)
    return View(
        run=run,
        records=records,
        rows=rows.get("op", []),
        comm_rows=rows.get("comm", []),
        train_rows=rows.get("train", []),
        replay_rows=rows.get("replay", []),
        device=device,
    )


def device_of(run: RunInfo) -> DeviceSpec | None:
    """Return the data sheet of a run's device; None of several, or where it is unknown."""
    names = {device.name for device in run.environment.devices}
    return find_device(names.pop()) if len(names) == 1 else None


def reference(run: RunInfo) -> Mapping[str, float]:
    """Return median seconds by case_id of other published runs on the same device."""
    names = {device.name for device in run.environment.devices}
    return {
        case_id: time_s
        for run_id, device, case_id, time_s in published_times()
        if {device} == names and run_id != run.run_id
    }


@lru_cache
def published_times() -> Sequence[tuple[str, str, str, float]]:
    """Return run_id, device, case_id and median seconds of published operators."""
    return [
        (row["run"], row["device"], row["case"], float(row["time_s"]))
        for row in csv.DictReader(data_text("reference.csv").splitlines())
    ]


def median_s(record: Measured) -> float:
    """Return the median seconds of a case by its slowest rank."""
    return summarize(slowest_per_sample(record.samples.seconds)).median


def operator_samples(runs: Path, name: str) -> tuple[Run, dict[Op, list[float]]]:
    """Return a run, and the seconds of the slowest rank per sample by operator.

    Of several backends it is the fastest, by its median; wrong results are left out.
    """
    run = read_with_warnings(find_run(runs, name))
    samples: dict[Op, list[float]] = {}
    operators = (record for record in run.latest if isinstance(record.case, OpCase))
    for launches in pooled(operators, OpLaunches):
        if not launches.measured or launches.num_wrong:
            continue
        slowest = list(chain(*launches.slowest_s))
        op = launches.case.op
        samples[op] = min(samples.get(op, slowest), slowest, key=lambda s: summarize(s).median)
    return run, samples


def sql_types() -> dict[str, str]:
    """Return the SQL type of every declared column."""
    return {column.name: column.unit.sql_type for column in declared()}


def declared() -> list[Column[Any]]:
    """Return the columns of all kinds, each name once."""
    return list({each.name: each for kind in KINDS for each in columns(kind)}.values())


def show_rows(run: View) -> None:
    """Print a table for each kind of case that the run has."""
    from stepmark.tables.row_tables import print_rows  # noqa: PLC0415

    if run.rows or not (run.comm_rows or run.train_rows or run.replay_rows):
        load(KINDS["op"].print_rows)(run.rows, console())
    if run.comm_rows:
        print_rows(run.comm_rows, console(), columns("comm"))
    if run.train_rows:
        load(KINDS["train"].print_rows)(run.train_rows, console())
    if run.replay_rows:
        print_rows(run.replay_rows, console(), columns("replay"))


def print_text(lines: Iterable[str]) -> None:
    """Print lines; a terminal gets tables that fit, a pipe gets whole rows."""
    if sys.stdout.isatty():
        lines = fitted(lines, shutil.get_terminal_size().columns)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def console() -> "Console":
    """Return a console as wide as the terminal; a pipe gets whole rows."""
    from rich.console import Console  # noqa: PLC0415

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=240)
