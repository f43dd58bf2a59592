"""What `compare` puts side by side: runs of ours, other tools' files, or several of either.

A source is a run (path, id, "latest"), a file, `FILE:2` for the second table of a file, a
folder or a quoted pattern. Several joined by commas are launches of one side; `name=` in front
names it.
"""

import dataclasses
import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.core.case import Case
from stepmark.core.collectives import Collective, busbw_factor
from stepmark.core.comm_case import CommCase
from stepmark.core.comparison import Fields, Series, Side
from stepmark.core.errors import ConfigError
from stepmark.core.reading import Reading, Table
from stepmark.core.record import Measured, Record, RunInfo
from stepmark.core.stats import slowest_per_sample
from stepmark.report.tables import shape_text
from stepmark.store.runs import find_run, latest, read_records, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the user says of files that do not say it themselves."""

    collective: str | None = None
    num_ranks: int | None = None
    placement: str | None = None  # only this one is read


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
    series, notes = _series_of_records(info, records)
    return _Source(
        name=path.name, columns={"": lambda _: series}, context=_context(info), notes=notes
    )


def _context(info: RunInfo) -> dict[str, str]:
    """What a run ran on and under: differences are what a comparison is about."""
    found = info.environment
    names = dict.fromkeys(device.name for device in found.devices)
    libraries = {
        name: value
        for name, value in found.versions.items()
        if name in ("cuda", "hip", "driver", "nccl", "rccl")
    }
    variables = {
        name: value
        for name, value in found.variables.items()
        if not name.startswith(("TORCHELASTIC", "STEPMARK"))
    }
    return {"device": ", ".join(names), "torch": found.torch, **libraries, **variables}


def _series_of_records(
    info: RunInfo, records: Iterable[Record]
) -> tuple[list[Series], tuple[str, ...]]:
    held: dict[str, list[Measured]] = {}
    wrong = 0
    for record in records:
        if isinstance(record, Measured) and record.samples.seconds:
            wrong += bool(record.num_wrong)
            if not record.num_wrong:
                held.setdefault(record.case.case_id, []).append(record)
    notes = (f"{wrong} wrong results are left out",) if wrong else ()
    return [_of_records(info, found) for found in held.values()], notes


def _of_records(info: RunInfo, records: Sequence[Measured]) -> Series:
    """Seconds of the slowest rank of each sample, by launch."""
    case = records[0].case
    method = records[0].samples.method
    launches = {
        f"{info.run_id}/{record.launch}": tuple(slowest_per_sample(record.samples.seconds))
        for record in records
    }
    if isinstance(case, CommCase):
        return Series(
            fields=_comm_fields(case, method),
            size_bytes=case.message_bytes,
            launches=launches,
            busbw_factor=case.busbw_factor or None,
        )
    return Series(fields=_op_fields(case, method), launches=launches)


def _comm_fields(case: CommCase, method: str) -> Fields:
    return {
        "family": case.collective.value,
        "dtype": case.dtype.value,
        "redop": case.redop.value,
        "root": case.root,
        "placement": "in-place" if case.in_place else "out-of-place",
        "num_ranks": case.num_ranks,
        "world_size": case.world_size,
        "method": method,
        "api": case.api.value,
        "backend": case.backend,
        "calls_per_group": case.calls_per_group,
        "split": case.split,
        "pair": f"{case.pair[0]}-{case.pair[1]}" if case.pair else "",
        "spread": case.spread,
        "skew_s": case.skew_s,
        "max_ctas": case.max_ctas,
        "beside": case.beside,
    }


def _op_fields(case: Case, method: str) -> Fields:
    op = dataclasses.asdict(case.op)
    plain = {
        name: value if isinstance(value, str | int | float | bool | None) else str(value)
        for name, value in op.items()
    }
    return {
        "family": case.family,
        "shape": shape_text(case.op),
        **plain,
        "dtype": case.dtype.value,
        "phase": str(plain.get("phase", "")),
        "backend": case.backend,
        "rate_kind": case.rate.value,
        "num_ranks": case.num_ranks,
        "scale": case.scale,
        "method": method,
    }


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
        raise ConfigError("compare", path, f"one of its tables: {_listed(path, tables)}")
    name = path.name.removesuffix(".gz").removesuffix(path.suffix)
    name += f":{number}" if number is not None else ""
    columns = wide[0].columns if wide else ("",)
    return _Source(
        name=name,
        columns={
            column: lambda told, column=column: _series_of_tables(path, tables, column, told)  # type: ignore[misc]
            for column in columns
        },
    )


def _listed(path: Path, tables: Sequence[Table]) -> str:
    shown = [f"{path}:{table.index} ({table.title or table.tool})" for table in tables]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def _series_of_tables(
    path: Path, tables: Sequence[Table], column: str, told: Told
) -> list[Series]:
    """Repeats of a sweep within a file are values of one launch."""
    held: dict[tuple[object, ...], tuple[Table, list[Reading]]] = {}
    for table in tables:
        for reading in table.readings:
            placed = told.placement is None or reading.placement in ("", told.placement)
            if not placed or (column and reading.column != column):
                continue
            key = _reading_key(reading, table)
            first, readings = held.setdefault(key, (table, []))
            if first is not table or any(r.cycle == reading.cycle for r in readings):
                raise ConfigError(
                    "compare", path, f"one of its tables: {_listed(path, tables)}"
                )
            readings.append(reading)
    found = [_of_readings(path, table, readings, told) for table, readings in held.values()]
    return [series for series in found if series.launches or series.below is not None]


def _reading_key(reading: Reading, table: Table) -> tuple[object, ...]:
    return (
        *(table.collective, table.method, table.unit, table.num_ranks),
        *(reading.label, reading.size_bytes, reading.dtype, reading.redop, reading.root),
        *(reading.placement, reading.column),
    )


def _of_readings(path: Path, table: Table, readings: Sequence[Reading], told: Told) -> Series:
    first = readings[0]
    collective = table.collective or told.collective or ""
    num_ranks = table.num_ranks or told.num_ranks
    times = tuple(r.time_s for r in readings if r.time_s is not None and r.time_s > 0)
    rates = tuple(r.rate for r in readings if r.rate is not None and r.rate > 0)
    values = times or rates
    unit = "s" if times else table.unit or "rate"
    return Series(
        fields={
            "family": collective,
            "label": first.label,
            "dtype": first.dtype,
            "redop": first.redop,
            "root": first.root,
            "placement": first.placement,
            "num_ranks": num_ranks,
            "method": table.method,
            "unit": unit,
        },
        size_bytes=first.size_bytes,
        unit=unit,
        launches={str(path): values} if values else {},
        busbw_factor=_factor(collective, num_ranks) if times else None,
        below=first.rate_below,
        printed=True,
    )


def _factor(collective: str, num_ranks: int | None) -> float | None:
    if num_ranks is None or collective not in list(Collective):
        return None
    return busbw_factor(Collective(collective), num_ranks) or None


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
            if (
                told
                and told.placement
                and series.fields.get("placement", "")
                not in (
                    "",
                    None,
                    told.placement,
                )
            ):
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
    context = {
        key: ", ".join(dict.fromkeys(one.get(key, "unset") for one in contexts))
        for key in dict.fromkeys(key for one in contexts for key in one)
    }
    notes = tuple(dict.fromkeys(note for source in read for note in source.notes))
    return Side(name=name, series=tuple(held.values()), context=context, notes=notes)


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
