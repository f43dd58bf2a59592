"""How a measuring verb ends: what it shows and writes, where the run lies, what to do next."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stepmark.app.view import View, view
from stepmark.core.errors import ConfigError, worst
from stepmark.core.option_groups import Files, Output
from stepmark.core.options import load
from stepmark.core.record import Failed, Measured
from stepmark.launch import outer_launcher

Rows = list[dict[str, Any]]
Options = TypeVar("Options", bound=Files)


def deliver(
    path: Path,
    options: Options,
    code: int,
    *,
    files: Callable[[View, Options], None],
    show: Callable[[View, Options], None],
) -> int:
    """Write the files that were asked for, show the run; the exit code of it all."""
    run = view(path)
    files(run, options)
    if not options.to_stdout:
        show(run, options)
    return ended(run, path, code)


def ended(run: View, path: Path, code: int) -> int:
    """Say where the run lies, and how to go on with one that was cut short."""
    sys.stdout.flush()
    sys.stderr.write(f"run {path}\n")
    words = {130: "interrupted", 143: "terminated", 3: "not all cases were measured"}
    if word := words.get(code):
        sys.stderr.write(f"{word}; {resume_hint(path)}\n")
    return worst(code, exit_code(run))


def exit_code(run: View) -> int:
    """1 for wrong results or figures above a binding limit, 3 for failed cases, else 0."""
    if any(isinstance(r, Measured) and r.num_wrong for r in run.records):
        return 1
    if any(row.get("over_limit") for row in (*run.rows, *run.comm_rows, *run.train_rows)):
        return 1
    return 3 if any(isinstance(r, Failed) for r in run.records) else 0


def resume_hint(path: Path) -> str:
    """What to do after an interrupt. How an outer launcher was called is not known."""
    where = " under the same launcher" if outer_launcher.is_rank() else ""
    return f"finished cases are kept; go on with: stepmark resume {path}{where}"


def check_outputs(options: Output) -> None:
    """Refuse outputs that cannot be written before an hour of measuring."""
    if options.dry_run:
        return
    options.check_stdout()
    for name, target in (("json", options.json), ("csv", options.csv)):
        if not target or target == "-":
            continue
        make_folder(name, Path(target) if is_folder(target) else Path(target).parent)
    if options.out:
        make_folder("out", Path(options.out))


def make_folder(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(name, folder, f"a folder that can be written ({reason})") from None
    try:
        # Permissions do not tell of a read-only or a made-up file system.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(name, folder, f"a folder that can be written ({reason})") from None


def is_folder(target: str) -> bool:
    return target.endswith("/") or Path(target).is_dir()


def write_rows(rows: Rows, options: Files, by: str = "model") -> None:
    """--json and --csv: all rows, or in a folder a file per model or family."""
    for kind, target in (("json", options.json), ("csv", options.csv)):
        if target:
            write_tables = load("stepmark.store.export:write_tables")
            write_tables(_as_tables(rows, target, by), target, kind)


def _as_tables(rows: Rows, target: str, by: str) -> dict[str, Rows]:
    if not is_folder(target):
        return {"rows": rows}
    tables: dict[str, Rows] = {}
    for row in rows:
        name = str(row.get(by) or row.get("family"))
        file_name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
        tables.setdefault(file_name, []).append(row)
    return tables
