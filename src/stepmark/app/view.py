"""A run with all that its rows need: peaks of its device, and shipped reference runs."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.core.case import OpCase
from stepmark.core.device import DeviceSpec, find_device
from stepmark.core.ops import Op
from stepmark.core.options import load
from stepmark.core.record import Measured, Record, RunInfo
from stepmark.core.stats import slowest_per_sample, summarize
from stepmark.store.reader import (
    Run,
    find_run,
    latest,
    list_runs,
    read,
    read_info,
    read_records,
    with_all_samples,
)

if TYPE_CHECKING:
    from rich.console import Console


# By kind of case: the module whose rows and columns it has, imported when a run has the kind.
_COLUMNS = {kind: f"stepmark.report.{kind}_columns" for kind in ("op", "comm", "train")}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a page or table is drawn from."""

    run: RunInfo
    records: list[Record]
    rows: list[dict[str, object]]  # operators
    comm_rows: list[dict[str, object]]
    train_rows: list[dict[str, object]]
    device: DeviceSpec | None


def view(path: Path) -> View:
    """Read a run and derive its rows; say what could not be read."""
    run = read_aloud(path)
    return of_records(run.info, list(with_all_samples(path, run.latest)))


def read_aloud(path: Path) -> Run:
    """Read a run and say on stderr what of it could not be read."""
    run = read(path)
    say(run.notes)
    return run


def say(notes: Iterable[str]) -> None:
    """Write notes on stderr, each once."""
    for note in dict.fromkeys(notes):
        sys.stderr.write(f"stepmark: {note}\n")


def of_records(run: RunInfo, records: list[Record]) -> View:
    names = {device.name for device in run.environment.devices}
    device = find_device(names.pop()) if len(names) == 1 else None
    kinds = {record.case.kind for record in records}
    rows: dict[str, list[dict[str, object]]] = {}
    for kind in kinds:
        known = {"reference": reference(run)} if kind == "op" else {}
        rows[kind] = load(f"{_COLUMNS[kind]}:rows")(records, run, device=device, **known)
    return View(
        run=run,
        records=records,
        rows=rows.get("op", []),
        comm_rows=rows.get("comm", []),
        train_rows=rows.get("train", []),
        device=device,
    )


def results_folder() -> Path | None:
    """Shipped reference runs: inside an installed package, or in the checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "results", package.parents[1] / "results"):
        if folder.is_dir():
            return folder
    return None


def reference(run: RunInfo) -> Mapping[str, float]:
    """Median seconds by case_id of shipped runs on the same device; not of this run itself."""
    folder = results_folder()
    names = {device.name for device in run.environment.devices}
    known: dict[str, float] = {}
    if folder is None or len(names) != 1:
        return known
    for path in list_runs(folder):
        other = read_info(path)
        if other.run_id == run.run_id or {d.name for d in other.environment.devices} != names:
            continue
        known |= medians(latest(read_records(path)))
    return known


def medians(records: list[Record]) -> dict[str, float]:
    """Median of the slowest rank by case_id; wrong results are no reference."""
    return {
        record.case.case_id: summarize(slowest_per_sample(record.samples.seconds)).median
        for record in records
        if isinstance(record, Measured) and not record.num_wrong
    }


def operator_medians(runs: Path, name: str) -> tuple[str, dict[Op, float]]:
    """A run's name, and the median of the slowest rank by operator.

    The fastest of several backends; wrong results are left out.
    """
    path = find_run(runs, name)
    times: dict[Op, float] = {}
    for record in read_aloud(path).latest:
        if not isinstance(record, Measured) or not isinstance(record.case, OpCase):
            continue
        if record.num_wrong or not record.samples.seconds:
            continue
        time_s = summarize(slowest_per_sample(record.samples.seconds)).median
        times[record.case.op] = min(time_s, times.get(record.case.op, time_s))
    return path.name, times


def sql_types() -> dict[str, str]:
    """The SQL type of every declared column."""
    return {
        column.name: column.unit.sql_type
        for kind, module in _COLUMNS.items()
        for column in load(f"{module}:{kind.upper()}_COLUMNS")
    }


def show_rows(seen: View) -> None:
    """A table for each kind of case that the run has."""
    print_rows = load("stepmark.report.row_tables:print_rows")
    if seen.rows or not (seen.comm_rows or seen.train_rows):
        print_rows(seen.rows, console(), load(f"{_COLUMNS['op']}:OP_COLUMNS"))
    if seen.comm_rows:
        print_rows(seen.comm_rows, console(), load(f"{_COLUMNS['comm']}:COMM_COLUMNS"))
    if seen.train_rows:
        load("stepmark.report.training_printing:print_training")(seen.train_rows, console())


def console(*, stderr: bool = False) -> "Console":
    """As wide as the terminal; a pipe gets whole rows."""
    from rich.console import Console  # noqa: PLC0415

    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(stderr=stderr, width=240)
