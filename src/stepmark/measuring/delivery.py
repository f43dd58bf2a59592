"""The end of a measuring verb: its tables and files, the place of the run, the next command."""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from stepmark.cases.record import Failed, Measured
from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError, worst
from stepmark.ground.option_groups import Files
from stepmark.ground.options import dashed
from stepmark.store.view import View
from stepmark.tables.export import is_folder, write_csv, write_json, write_tables

Rows = list[dict[str, Any]]
_TABLES = ("json", "csv")  # options that may name a folder


def finish(run: View, path: Path, code: int) -> int:
    """Print where the run lies, what is missing, and how to resume one that was cut short."""
    sys.stdout.flush()
    sys.stderr.write(f"run {path}\n")
    is_empty = not any(isinstance(record, Measured) for record in run.records)
    counts = Counter(record.kind for record in run.records)
    if is_empty and set(counts) <= {"skipped"} and code not in (130, 143):
        reason = "every case was skipped" if counts else "no case was run"
        sys.stderr.write(f"nothing was measured: {reason}\n")
    else:
        unfinished = "nothing was measured" if is_empty else "not all cases were measured"
        words = {130: "interrupted", 143: "terminated", 3: unfinished}
        if word := words.get(code):
            sys.stderr.write(f"{word}; {resume_hint(path)}\n")
    return worst(code, exit_code(run))


def exit_code(run: View) -> int:
    """Return 1 for wrong results or figures above a hard limit, else 0.

    It is 3 if cases failed, or if nothing was measured.
    """
    if any(isinstance(r, Measured) and r.num_wrong for r in run.records):
        return 1
    if any(row.get("over_limit") for row in (*run.rows, *run.comm_rows, *run.train_rows)):
        return 1
    is_empty = not any(isinstance(r, Measured) for r in run.records)
    return 3 if is_empty or any(isinstance(r, Failed) for r in run.records) else 0


def resume_hint(path: Path) -> str:
    """Return what to do after an interrupt. How an outer launcher was called is unknown."""
    is_launched = outer_launcher.is_rank() or outer_launcher.is_agent()
    where = " under the same launcher" if is_launched else ""
    return f"finished cases are kept; go on with: stepmark resume {path}{where}"


def check_outputs(options: Files, out: str | Path | None, *, dry_run: bool) -> None:
    """Validate outputs before measuring. Raises ConfigError."""
    options.check_stdout()
    if dry_run:
        return
    for name in (*_TABLES, "html", "timeline", "aicb_log"):
        target = getattr(options, name, None)
        if target and name not in _TABLES and Path(target).is_dir():
            raise ConfigError(dashed(name), target, "a file, not a folder")
        if target and target != "-":
            make_folder(name, Path(target) if is_folder(target) else Path(target).parent)
    if out:
        make_folder("out", Path(out))


def make_folder(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not show whether the file system is read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(name, folder, f"a folder that can be written ({reason})") from None


def write_files(options: Files, name: str, document: object, rows: Rows) -> None:
    """Write a document as --json and rows as --csv; in a folder the file is called `name`."""
    options.check_stdout()
    if options.json:
        write_json(document, options.json, name)
    if options.csv:
        write_csv(rows, options.csv, name)


def write_rows(rows: Rows, options: Files, by: str = "model") -> None:
    """Write --json and --csv: all rows, or in a folder a file per model or family."""
    if options.json:
        write_tables(_as_tables(rows, options.json, by), options.json, "json")
    if options.csv:
        write_tables(_as_tables(rows, options.csv, by), options.csv, "csv")


def _as_tables(rows: Rows, target: str, by: str) -> dict[str, Rows]:
    if not is_folder(target):
        return {"rows": rows}
    tables: dict[str, Rows] = {}
    for row in rows:
        name = str(row.get(by) or row.get("family"))
        file_name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        tables.setdefault(file_name, []).append(row)
    return tables
