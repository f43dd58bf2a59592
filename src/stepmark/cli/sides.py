"""What `compare` puts side by side: runs of ours, other tools' files, or several of either.

A source is a run (path, id, "latest"), a file, `FILE:2` for the second table of a file, a
folder or a quoted pattern. Several joined by commas are launches of one side; `name=` in front
names it.
"""

import dataclasses
import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.cli.file_series import Told, listed, series_of_tables
from stepmark.cli.run_series import context, series_of_records
from stepmark.core.comparison import Series, Side
from stepmark.core.errors import ConfigError
from stepmark.store.runs import find_run, latest, read_records, read_run


def sides(words: Sequence[str], runs: Path, told: Told) -> list[Side]:
    """One side per word; of a single table with a column per setting, one per column."""
    found: list[Side] = []
    for word in words:
        name, sources = _split(word)
        read = [_read(source, runs) for text in sources for source in _expand(text)]
        found += _sides_of(name, word, read, told)
    return _distinct(found)


def side_of_runs(name: str, paths: Sequence[Path]) -> Side:
    """The launches of all these runs taken together."""
    return _pooled(name, [_of_run(path) for path in paths])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One file's or run's contribution: its series by column ("" for all but wide tables)."""

    name: str
    columns: Mapping[str, Callable[[Told], list[Series]]]
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _split(word: str) -> tuple[str, list[str]]:
    """("tcp", ["a.txt", "b.txt"]) of "tcp=a.txt,b.txt"; a path that exists is left whole."""
    if Path(word).exists():
        return "", [word]
    name, equals, rest = word.partition("=")
    if not equals or "/" in name:
        name, rest = "", word
    if not rest:
        raise ConfigError("compare", word, "NAME=SOURCE")
    return name, [rest] if Path(rest).exists() else [part for part in rest.split(",") if part]


def _expand(text: str) -> list[str]:
    """Files of a pattern or a folder; anything else is itself."""
    path = Path(text)
    if path.is_dir() and not (path / "run.json").is_file():
        inside = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        found = [p for p in inside if p.is_file() or (p / "run.json").is_file()]
        if not found:
            raise ConfigError("compare", text, "a run, a file, or a folder of these")
        return [str(p) for p in found]
    if any(sign in text for sign in "*?[") and not path.exists():
        matches = sorted(glob.glob(text))
        if not matches:
            raise ConfigError("compare", text, "a pattern that matches files or runs")
        return matches
    return [text]


def _read(text: str, runs: Path) -> _Source:
    path = Path(text)
    if path.is_file():
        return _of_file(path, None)
    head, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and Path(head).is_file():
        return _of_file(Path(head), int(number))
    if path.parent != Path() and not path.exists() and not (runs / path).exists():
        raise ConfigError("compare", text, "a run or a file that exists")
    return _of_run(find_run(runs, text))


def _of_run(path: Path) -> _Source:
    info, records = read_run(path), latest(read_records(path))
    series, notes = series_of_records(info, records)
    return _Source(
        name=path.name, columns={"": lambda _: series}, context=context(info), notes=notes
    )


def _of_file(path: Path, number: int | None) -> _Source:
    from stepmark.trace.tables import find  # noqa: PLC0415

    tables = find(path)
    if number is not None:
        tables = [table for table in tables if table.index == number]
        if not tables:
            raise ConfigError("compare", f"{path}:{number}", "a table of this file")
    if not tables:
        raise ConfigError("compare", path, "a file with a table of times or rates")
    wide = [table for table in tables if table.columns]
    if wide and len(tables) > 1:
        raise ConfigError("compare", path, f"one of its tables: {listed(path, tables)}")
    name = path.name.removesuffix(".gz").removesuffix(path.suffix)
    name += f":{number}" if number is not None else ""
    columns = wide[0].columns if wide else ("",)
    return _Source(
        name=name,
        columns={
            column: lambda told, column=column: series_of_tables(path, tables, column, told)  # type: ignore[misc]
            for column in columns
        },
    )


def _sides_of(name: str, word: str, read: Sequence[_Source], told: Told) -> list[Side]:
    columns = list(dict.fromkeys(column for source in read for column in source.columns))
    made = []
    for column in columns:
        called = name or (read[0].name if len(read) == 1 else word)
        called = f"{name} {column}".strip() if column else called
        chosen = [
            dataclasses.replace(source, columns={"": source.columns[column]})
            for source in read
            if column in source.columns
        ]
        made.append(_pooled(called, chosen, told))
    return made


def _pooled(name: str, read: Sequence[_Source], told: Told | None = None) -> Side:
    """Series that differ in nothing become one, with the launches of all."""
    held: dict[tuple[object, ...], Series] = {}
    for source in read:
        for series in source.columns[""](told or Told()):
            placed = series.fields.get("placement") or None
            if told and told.placement and placed not in (None, told.placement):
                continue
            key = (tuple(series.fields.items()), series.size_bytes, series.unit)
            before = held.get(key)
            held[key] = (
                series
                if before is None
                else dataclasses.replace(
                    series, launches={**before.launches, **series.launches}
                )
            )
    if not held:
        raise ConfigError("compare", name, "a source with at least one time or rate")
    contexts = [source.context for source in read]
    under = {
        key: ", ".join(dict.fromkeys(one.get(key, "unset") for one in contexts))
        for key in dict.fromkeys(key for one in contexts for key in one)
    }
    notes = tuple(dict.fromkeys(note for source in read for note in source.notes))
    return Side(name=name, series=tuple(held.values()), context=under, notes=notes)


def _distinct(found: Sequence[Side]) -> list[Side]:
    """Two sources of the same name get a number."""
    seen: dict[str, int] = {}
    made = []
    for side in found:
        seen[side.name] = seen.get(side.name, 0) + 1
        count = seen[side.name]
        name = side.name if count == 1 else f"{side.name} ({count})"
        made.append(dataclasses.replace(side, name=name))
    return made
