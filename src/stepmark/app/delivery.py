"""How a measuring verb ends: what it shows and writes, where the run lies, what to do next."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.core.errors import ConfigError, worst
from stepmark.core.record import Failed, Measured
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.app.view import View

Values = Mapping[str, Any]  # what the user asked for, by option name
Rows = list[dict[str, Any]]


def deliver(
    path: Path,
    values: Values,
    code: int,
    *,
    files: "Callable[[View, Values], None]",
    show: "Callable[[View, Values], None]",
) -> int:
    """Write the files that were asked for, show the run; the exit code of it all."""
    from stepmark.app.view import view  # noqa: PLC0415

    run = view(path)
    files(run, values)
    if "-" not in (values.get("json"), values.get("csv")):
        show(run, values)
    return ended(run, path, code)


def ended(run: "View", path: Path, code: int) -> int:
    """Say where the run lies, and how to go on with one that was cut short."""
    sys.stdout.flush()
    sys.stderr.write(f"run {path}\n")
    words = {130: "interrupted", 143: "terminated", 3: "not all cases were measured"}
    if word := words.get(code):
        sys.stderr.write(f"{word}; {resume_hint(path)}\n")
    return worst(code, exit_code(run))


def exit_code(run: "View") -> int:
    """1 for wrong results or figures above a binding limit, 3 for failed cases, else 0."""
    if any(isinstance(r, Measured) and r.num_wrong for r in run.records):
        return 1
    if any(row.get("over_limit") for row in (*run.rows, *run.comm_rows, *run.train_rows)):
        return 1
    return 3 if any(isinstance(r, Failed) for r in run.records) else 0


def resume_hint(path: Path) -> str:
    """What to do after an interrupt. How an outer launcher was called is not known."""
    from stepmark.launch import outer_launcher  # noqa: PLC0415

    where = " under the same launcher" if outer_launcher.is_rank() else ""
    return f"finished cases are kept; go on with: stepmark resume {path}{where}"


def check_outputs(values: Values) -> None:
    """Refuse outputs that cannot be written before an hour of measuring."""
    if values.get("budget") is not None:
        parse_duration(values["budget"], "budget")
    if values.get("dry_run"):
        return
    if values.get("json") == values.get("csv") == "-":
        raise ConfigError("csv", "-", "a path: stdout is already taken by --json")
    for name in ("json", "csv"):
        target = values.get(name)
        if not target or target == "-":
            continue
        make_folder(name, Path(target) if is_folder(target) else Path(target).parent)
    if out := values.get("out"):
        make_folder("out", Path(out))


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


def write_rows(rows: Rows, values: Values) -> None:
    """--json and --csv: all rows, or in a folder a file per model or family."""
    from stepmark.store.export import write_tables  # noqa: PLC0415

    for kind in ("json", "csv"):
        if target := values.get(kind):
            tables = by_model(rows) if is_folder(target) else {"rows": rows}
            write_tables(tables, target, kind)


def by_model(rows: Rows) -> dict[str, Rows]:
    """By a name that a file can have: of the model, or of the family."""
    groups: dict[str, Rows] = {}
    for row in rows:
        name = str(row.get("model") or row.get("family"))
        groups.setdefault(
            "".join(c if c.isalnum() or c in "._-" else "_" for c in name), []
        ).append(row)
    return groups


def as_options(values: Values) -> dict[str, object]:
    """What a plan keeps of them: what was given."""
    return {name: value for name, value in values.items() if value not in (None, False, [])}
