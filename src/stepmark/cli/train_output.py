"""What `stepmark train` shows: a block per case, its messages and profile, a table, files."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.cli import delivery, session
from stepmark.cli.options import Values
from stepmark.core.record import Failed, Measured, Record
from stepmark.launch import torchrun

if TYPE_CHECKING:
    from stepmark.app.view import View

TRACES = "traces"  # folder of a run


def check(values: Values) -> None:
    """What can be refused before an hour of measuring is refused before."""
    session.check_outputs({**values, "style": None})
    if (run := values.get("resume")) and not torchrun.is_rank():
        session.run_to_resume(values, run)


def deliver(path: Path, values: Values, code: int) -> int:
    """Show the run, write the files that were asked for; the exit code of it all."""
    from stepmark.store.reader import read_records  # noqa: PLC0415

    def show(seen: "View", _values: Values) -> None:
        _show(seen, path)

    launches = values.get("launches") or 1
    found = values.get("find_batch") and found_batch(read_records(path), launches)
    # What was too large is how the search ended.
    code = delivery.deliver(
        path, values, 0 if found and code == 3 else code, files=_files, show=show
    )
    return 0 if found and code == 3 else code


def found_batch(records: Iterable[Record], launches: int) -> bool:
    """Whether each launch has measured a batch, and nothing failed but for lack of memory."""
    known = list(records)
    measured = {record.launch for record in known if isinstance(record, Measured)}
    causes = {record.cause for record in known if isinstance(record, Failed)}
    return measured >= set(range(1, launches + 1)) and causes == {"oom"}


def _show(seen: "View", path: Path) -> None:
    from stepmark.app.view import console  # noqa: PLC0415
    from stepmark.cli.progress import named  # noqa: PLC0415
    from stepmark.report import train_columns, training_messages, training_printing  # noqa: PLC0415

    per_rank = train_columns.per_rank_rows(seen.records, seen.run)
    several = [row for row in per_rank if len(seen.run.environment.devices) > 1]
    training_printing.print_training(seen.train_rows, console(), several)
    for record in seen.records:
        if not isinstance(record, Measured) or (told := record.training) is None:
            continue
        tables = list(_tables(path / TRACES, told.traces))
        if told.messages or tables:
            sys.stdout.write(f"\n{named(record.case)}\n")
        if told.messages:
            lines = training_messages.lines(told, record.case.num_ranks)
            sys.stdout.write("\n".join(lines) + "\n")
        for table in tables:
            sys.stdout.write(table.read_text() + "\n")


def _tables(folder: Path, traces: Sequence[str]) -> Iterator[Path]:
    """The text beside each trace: where the time went by kernel."""
    for name in traces:
        table = folder / f"{Path(name).name.removesuffix('.json.gz')}.txt"
        if table.is_file():
            yield table


def _files(seen: "View", values: Values) -> None:
    from stepmark.store.export import write_tables  # noqa: PLC0415

    for kind in ("json", "csv"):
        if target := values.get(kind):
            folder = target.endswith("/") or Path(target).is_dir()
            tables = session.by_model(seen.train_rows) if folder else {"rows": seen.train_rows}
            write_tables(tables, target, kind)
