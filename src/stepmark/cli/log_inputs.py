"""What `stepmark logs` is given: files, folders and patterns, sorted by what they hold."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepmark.core.errors import ConfigError

MAX_FILES = 100_000
LOG, FLIGHT, INSPECTOR, TABLES = "NCCL log", "flight recorder", "inspector", "tables"


@dataclass(slots=True, kw_only=True)
class Inputs:
    """Paths by kind. A job's output may be a log with tables: it is in both."""

    logs: list[Path] = field(default_factory=list)
    flights: list[Path] = field(default_factory=list)
    inspectors: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    unknown: list[tuple[Path, str]] = field(default_factory=list)  # of folders; why


def collect(words: Sequence[str], *, as_tables: bool = False) -> Inputs:
    """Sort the files that the words name. `as_tables`: look for nothing but tables.

    Raises ConfigError for a name without a file, a named file of no known kind and a folder
    or pattern without any of a known kind.
    """
    found = Inputs()
    seen: set[Path] = set()
    for word in words:
        paths, named = _expand(word)
        known = [
            path.resolve() in seen or _sort(path, found, named=named, as_tables=as_tables)
            for path in paths
        ]
        seen.update(path.resolve() for path in paths)
        if not any(known):
            raise ConfigError("file", word, "a folder or pattern with logs, dumps or tables")
    return found


def _expand(word: str) -> tuple[list[Path], bool]:
    """(files, whether one was named). Names with magic signs that exist are names."""
    path = Path(word)
    try:
        if not word:
            raise ValueError("an empty name")
        if path.is_dir():
            return _limited(word, (p for p in path.rglob("*") if p.is_file())), False
        if path.exists():
            return [path], True
        matches = glob.glob(word, recursive=True) if glob.has_magic(word) else []
    except (OSError, ValueError) as error:
        raise ConfigError("file", word, f"a name that can be read ({error})") from None
    files = (Path(match) for match in matches)
    held = _limited(word, (file for file in files if file.is_file()))
    if not held:
        raise ConfigError("file", word, "a file, a folder or a quoted pattern that exists")
    return held, False


def _limited(word: str, files: Iterator[Path]) -> list[Path]:
    """Sorted, so that equal folders give equal output."""
    found = []
    for file in files:
        found.append(file)
        if len(found) > MAX_FILES:
            raise ConfigError("file", word, f"at most {MAX_FILES} files")
    return sorted(found)


def _sort(path: Path, found: Inputs, *, named: bool, as_tables: bool) -> bool:
    """Whether it is of a known kind."""
    try:
        kinds = kinds_of(path)
    except ConfigError as error:
        if named:
            raise
        found.unknown.append((path, error.allowed))
        return False
    if as_tables:
        kinds = {TABLES} if named or TABLES in kinds else set()
    if not kinds:
        if named:
            allowed = "an NCCL log, a flight-recorder dump, inspector lines or a table"
            raise ConfigError("file", path, f"{allowed}; --tables looks for tables anyway")
        found.unknown.append((path, "nothing that stepmark knows"))
    by_kind = {LOG: found.logs, FLIGHT: found.flights, INSPECTOR: found.inspectors}
    for kind, paths in (by_kind | {TABLES: found.tables}).items():
        if kind in kinds:
            paths.append(path)
    return bool(kinds)


def kinds_of(path: Path) -> set[str]:
    """What a file holds, by its first 64 KiB. Raises ConfigError if it cannot be read."""
    from stepmark.trace.flight_recorder import looks_like_flight_recorder  # noqa: PLC0415
    from stepmark.trace.inspector import looks_like_inspector  # noqa: PLC0415
    from stepmark.trace.nccl_log import looks_like_log  # noqa: PLC0415
    from stepmark.trace.read_text import decode, is_binary, read_head  # noqa: PLC0415
    from stepmark.trace.tables import looks_like_tables  # noqa: PLC0415

    start = read_head(path)
    if not start.strip():
        raise ConfigError("file", path, "a file with content; this one is empty")
    if looks_like_inspector(start):
        return {INSPECTOR}
    if looks_like_flight_recorder(start):
        return {FLIGHT}
    kinds = {LOG} if looks_like_log(start) else set()
    if not is_binary(start) and looks_like_tables(decode(start)):
        kinds.add(TABLES)
    return kinds
