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

from stepmark.cli.file_series import Told, listed, num_wrong, series_of_tables
from stepmark.cli.run_series import context, series_of_records
from stepmark.core.comparison import Series, Side
from stepmark.core.errors import ConfigError
from stepmark.store.reader import find_run, is_run, list_runs, read


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
    if not word.strip():
        raise ConfigError("compare", word, "a run or a file")
    if _exists(word):
        return "", [word]
    name, equals, rest = word.partition("=")
    if not equals or "/" in name:
        name, rest = "", word
    if not rest:
        raise ConfigError("compare", word, "NAME=SOURCE")
    return name, [rest] if _exists(rest) else [part for part in rest.split(",") if part]


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # many names with commas are longer than a name may be
        return False


def _check_name(text: str) -> None:
    try:
        Path(text).exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("compare", text, f"a name that can be read ({reason})") from None


def _expand(text: str) -> list[str]:
    """Files of a pattern or a folder; anything else is itself."""
    _check_name(text)
    path = Path(text)
    if path.is_dir() and not is_run(path):
        inside = (p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        found = sorted([*inside, *list_runs(path)])
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
    run = read(path)
    series, notes = series_of_records(run.info, run.latest)
    return _Source(
        name=path.name,
        columns={"": lambda _: series},
        context=context(run.info) if run.is_known else {},
        notes=(*run.notes, *notes),
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
    wrong = num_wrong(tables)
    return _Source(
        name=name,
        columns={
            column: lambda told, column=column: series_of_tables(path, tables, column, told)  # type: ignore[misc]
            for column in columns
        },
        notes=(f"{wrong} wrong results are left out",) if wrong else (),
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
            held[key] = _merged(name, held[key], series) if key in held else series
    notes = tuple(dict.fromkeys(note for source in read for note in source.notes))
    if not held:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise ConfigError("compare", name, f"a source with at least one time or rate{why}")
    contexts = [source.context for source in read]
    under = {
        key: ", ".join(dict.fromkeys(one.get(key, "unset") for one in contexts))
        for key in dict.fromkeys(key for one in contexts for key in one)
    }
    return Side(name=name, series=tuple(held.values()), context=under, notes=notes)


def _merged(name: str, one: Series, other: Series) -> Series:
    """A launch that was printed as 0 bounds the whole: a mean of the rest would flatter."""
    if twice := one.launches.keys() & other.launches.keys():
        raise ConfigError(
            "compare", name, f"give each launch once, not {sorted(twice)[0]} twice"
        )
    if not one.launches or not other.launches:
        below = max(series.below or 0.0 for series in (one, other)) or None
        return dataclasses.replace(one, launches={}, below=below)
    return dataclasses.replace(
        one,
        launches={**one.launches, **other.launches},
        rounding=max(one.rounding, other.rounding),
    )


def _distinct(found: Sequence[Side]) -> list[Side]:
    """Two sources of the same name get a number."""
    taken = {side.name for side in found}
    made: list[Side] = []
    for side in found:
        name, count = side.name, 1
        while any(one.name == name for one in made) or (count > 1 and name in taken):
            count += 1
            name = f"{side.name} ({count})"
        made.append(dataclasses.replace(side, name=name))
    return made
