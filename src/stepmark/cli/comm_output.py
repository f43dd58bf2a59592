"""What `stepmark comm` shows: nccl-tests' table, wide columns, matrices, files."""

import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli import delivery
from stepmark.cli.options import Values
from stepmark.core.errors import ConfigError
from stepmark.core.record import Record, RunInfo

if TYPE_CHECKING:
    from stepmark.app.view import View
    from stepmark.cli.comm_plan import Plan

Rows = list[dict[str, Any]]


def check(values: Values) -> None:
    """What can be refused before an hour of measuring is refused before."""
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.launch import torchrun  # noqa: PLC0415

    session.check_outputs({**values, "style": None})
    style = values.get("style")
    if style and style not in _styles():
        raise ConfigError("style", style, f"one of {', '.join(_styles())}")
    if target := values.get("output_file"):
        if Path(target).suffix != ".json":
            raise ConfigError("-J", target, "a name that ends in .json")
        if not values.get("dry_run"):
            session.make_folder("-J", Path(target).parent)
    if (run := values.get("resume")) and not torchrun.is_rank():
        session.run_to_resume(values, run)


def _styles() -> dict[str, Callable[[Iterable[Record], RunInfo], dict[str, str]]]:
    from stepmark.report.param_comms import param_comms  # noqa: PLC0415

    return {"param": param_comms}


def listed(plan: "Plan") -> None:
    """--dry-run: the command of each case."""
    delivery.listed(plan.cases, plan.notes)


def deliver(path: Path, values: Values, code: int) -> int:
    """Show the run, write the files that were asked for; the exit code of it all."""
    return delivery.deliver(path, values, code, files=_files, show=_show)


def _show(seen: "View", values: Values) -> None:
    from stepmark.app.view import console  # noqa: PLC0415
    from stepmark.report import nccl_tests, p2p_matrix  # noqa: PLC0415
    from stepmark.report.comm_columns import COMM_COLUMNS  # noqa: PLC0415
    from stepmark.report.row_tables import print_rows  # noqa: PLC0415

    if style := values.get("style"):
        sys.stdout.write("\n".join(_styles()[style](seen.records, seen.run).values()))
        return
    if values.get("wide"):
        print_rows(seen.comm_rows, console(), COMM_COLUMNS)
        return
    matrices = [one for one in p2p_matrix.matrices(seen.comm_rows) if len(one.known) > 1]
    drawn = {one.family for one in matrices}
    for one in matrices:
        sys.stdout.write(p2p_matrix.matrix_text(one) + "\n")
    rest = [row for row in seen.comm_rows if row["family"] not in drawn]
    if rest:
        sys.stdout.write(nccl_tests.text_of(rest, seen.run))


def _files(seen: "View", values: Values) -> None:
    from stepmark.report import nccl_json  # noqa: PLC0415
    from stepmark.store.export import write_json, write_tables  # noqa: PLC0415
    from stepmark.store.files import new_file  # noqa: PLC0415

    rows = seen.comm_rows
    by_name: dict[str, Rows] = {}
    for row in rows:
        by_name.setdefault(str(row["family"]), []).append(row)
    for kind in ("json", "csv"):
        if target := values.get(kind):
            folder = target.endswith("/") or Path(target).is_dir()
            write_tables(by_name if folder else {"rows": rows}, target, kind)
    if target := values.get("output_file"):
        document = nccl_json.json_document(
            rows, seen.run, sys.argv, ended_at=datetime.now(UTC).isoformat(timespec="seconds")
        )
        file = new_file(Path(target))
        write_json(document, file)
        if file != Path(target):
            sys.stderr.write(f"{target} exists: written to {file}\n")
