"""The inputs of `stepmark logs`: files, folders and patterns, sorted by what they contain."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.trace.flight_recorder import looks_like_flight_recorder
from stepmark.trace.inspector import looks_like_inspector
from stepmark.trace.nccl_log import looks_like_log
from stepmark.trace.read_text import decode, is_binary, read_head
from stepmark.trace.tables import looks_like_tables

MAX_FILES = 100_000
LOG, FLIGHT, INSPECTOR, TABLES = "NCCL log", "flight recorder", "inspector", "tables"


@dataclass(slots=True, kw_only=True)
class Inputs:
    """Paths by kind. A job's output may be a log with tables: it is in both."""

    logs: list[Path] = field(default_factory=list)
    flights: list[Path] = field(default_factory=list)
    inspectors: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    unknown: list[tuple[Path, str]] = field(default_factory=list)  # of folders, with the reason

    def add(self, path: Path, kinds: set[str]) -> None:
        by_kind = {LOG: self.logs, FLIGHT: self.flights, INSPECTOR: self.inspectors}
        for kind, paths in (by_kind | {TABLES: self.tables}).items():
            if kind in kinds:
                paths.append(path)


def collect(words: Sequence[str], *, only_tables: bool = False) -> Inputs:
    """Sort the files that the words name. Raises ConfigError.

    Refused are a name without a file, a named file of no known kind, and a folder or pattern
    without any file of a known kind.
    """
    inputs = Inputs()
    seen: set[Path] = set()
    for word in words:
        paths, is_named = _expand(word)
        known = [
            path.resolve() in seen
            or _sort(path, inputs, is_named=is_named, only_tables=only_tables)
            for path in paths
        ]
        seen.update(path.resolve() for path in paths)
        if not any(known):
            raise ConfigError("file", word, "a folder or pattern with logs, dumps or tables")
    return inputs


def _expand(word: str) -> tuple[list[Path], bool]:
    """Return (files, whether one was named). Existing names may contain pattern signs."""
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
    files = _limited(word, (file for file in map(Path, matches) if file.is_file()))
    if not files:
        raise ConfigError("file", word, "a file, a folder or a quoted pattern that exists")
    return files, False


def _limited(word: str, files: Iterator[Path]) -> list[Path]:
    """Return the files sorted, so that equal folders give equal output."""
    listed = []
    for file in files:
        listed.append(file)
        if len(listed) > MAX_FILES:
            raise ConfigError("file", word, f"at most {MAX_FILES} files")
    return sorted(listed)


def _sort(path: Path, inputs: Inputs, *, is_named: bool, only_tables: bool) -> bool:
    """Add the file to the inputs, and return whether it is of a known kind."""
    try:
        kinds = kinds_of(path)
    except ConfigError as error:
        if is_named:
            raise
        inputs.unknown.append((path, error.allowed))
        return False
    if only_tables:
        kinds = {TABLES} if is_named or TABLES in kinds else set()
    if not kinds and is_named:
        allowed = "an NCCL log, a flight-recorder dump, inspector lines or a table"
        raise ConfigError("file", path, f"{allowed}; --tables searches it for tables anyway")
    if not kinds:
        inputs.unknown.append((path, "it contains nothing that stepmark recognizes"))
    inputs.add(path, kinds)
    return bool(kinds)


def kinds_of(path: Path) -> set[str]:
    """Return what a file contains, by its first 64 KiB. Raises ConfigError."""
    head = read_head(path)
    if not head.strip():
        raise ConfigError("file", path, "a file with content; this one is empty")
    if looks_like_inspector(head):
        return {INSPECTOR}
    if looks_like_flight_recorder(head):
        return {FLIGHT}
    kinds = {LOG} if looks_like_log(head) else set()
    if not is_binary(head) and looks_like_tables(decode(head)):
        kinds.add(TABLES)
    return kinds
