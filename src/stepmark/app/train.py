"""stepmark train: what it shows. A block per case, its messages and profile, a table, files."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepmark.app import delivery
from stepmark.app.delivery import Values
from stepmark.core.option_groups import MeasureOptions
from stepmark.core.options import build
from stepmark.core.plan import TrainHow
from stepmark.core.record import Failed, Measured, Record
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.app.view import View

_TRACES = "traces"  # folder of a run


def how(values: Values, profile_ranks: tuple[int, ...]) -> TrainHow:
    """--steps, --budget and the like."""
    return TrainHow(
        steps=values.get("steps"),
        budget_s=parse_duration(values["budget"], "budget") if values.get("budget") else None,
        timeout_s=parse_duration(values.get("timeout") or "600s", "timeout"),
        messages=bool(values.get("messages")),
        profile=bool(values.get("profile")),
        profile_ranks=profile_ranks,
        find_batch=bool(values.get("find_batch")),
        compile_fallback=bool(values.get("compile_fallback")),
    )


def show(path: Path, values: Values, code: int) -> int:
    """Show the run, write the files that were asked for; the exit code of it all."""
    from stepmark.store.reader import read_records  # noqa: PLC0415

    launches = values.get("launches") or 1
    found = bool(values.get("find_batch")) and found_batch(read_records(path), launches)
    # What was too large is how the search ended.
    code = delivery.deliver(
        path,
        build(MeasureOptions, values),
        0 if found and code == 3 else code,
        files=lambda run, given: delivery.write_rows(run.train_rows, given),
        show=lambda run, given: _show(run, path),
    )
    return 0 if found and code == 3 else code


def found_batch(records: Iterable[Record], launches: int) -> bool:
    """Whether each launch has measured a batch, and nothing failed but for lack of memory."""
    known = list(records)
    measured = {record.launch for record in known if isinstance(record, Measured)}
    causes = {record.cause for record in known if isinstance(record, Failed)}
    return measured >= set(range(1, launches + 1)) and causes == {"oom"}


def _show(run: "View", path: Path) -> None:
    from stepmark.app.progress import named  # noqa: PLC0415
    from stepmark.app.view import console  # noqa: PLC0415
    from stepmark.report import train_columns, training_messages, training_printing  # noqa: PLC0415

    per_rank = train_columns.per_rank_rows(run.records, run.run)
    several = [row for row in per_rank if len(run.run.environment.devices) > 1]
    training_printing.print_training(run.train_rows, console(), several)
    for record in run.records:
        if not isinstance(record, Measured) or (facts := record.training) is None:
            continue
        tables = list(_tables(path / _TRACES, facts.traces))
        if facts.messages or tables:
            sys.stdout.write(f"\n{named(record.case)}\n")
        if facts.messages:
            lines = training_messages.lines(facts, record.case.num_ranks)
            sys.stdout.write("\n".join(lines) + "\n")
        for table in tables:
            sys.stdout.write(table.read_text() + "\n")


def _tables(folder: Path, traces: Sequence[str]) -> Iterator[Path]:
    """The text beside each trace: where the time went by kernel."""
    for name in traces:
        table = folder / f"{Path(name).name.removesuffix('.json.gz')}.txt"
        if table.is_file():
            yield table
