"""stepmark compare: runs, files of nccl-tests, CSVs, training logs and slides, with verdicts.

A source is a run (path, id, "latest"), a file, `FILE:2` for the second table of a file, a
folder or a quoted pattern. Several joined by commas are launches of one side; `name=` in front
names it.
"""

import dataclasses
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stepmark.comparison import comparison_text as drawn
from stepmark.comparison.compare import Options
from stepmark.comparison.compare import compare as compare_sides
from stepmark.comparison.compare_options import CompareOptions
from stepmark.comparison.comparison import Comparison, Series, Side
from stepmark.comparison.comparison_page import page
from stepmark.comparison.comparison_text import printed
from stepmark.comparison.series import (
    STRICT,
    InputDefaults,
    context,
    log_notes,
    series_of_records,
    series_of_tables,
    series_of_training_log,
    table_list,
)
from stepmark.ground.errors import ConfigError, StepmarkError, not_one_of
from stepmark.ground.files import write_text
from stepmark.ground.units import parse_bytes
from stepmark.ground.waiting import Waiting
from stepmark.job_logs.training_log.step_lines import has_steps
from stepmark.job_logs.training_log.training_log import read_training_log
from stepmark.measuring.delivery import write_files
from stepmark.model.collectives import Collective, collective_named
from stepmark.store.reader import find_run, is_run, list_runs, read, read_info
from stepmark.store.sweeps import is_sweep
from stepmark.store.view import console
from stepmark.text_tables import find, repeat_notes
from stepmark.text_tables.slide_tables import rate_units

_ALLOWED = (
    "a file with a table of times or rates, or the log of a trainer (Megatron-LM, NeMo, "
    "torchtitan, DeepSpeed, Hugging Face, ...: docs/verbs/logs.md); traces: stepmark trace "
    "compare A B"
)
_MOST_PAST_RUNS = 20  # that show how launches of a side vary


def sides(words: Sequence[str], runs: Path, defaults: InputDefaults) -> list[Side]:
    """Return one side per word; of a single table with a column per setting, one per column."""
    all_sides: list[Side] = []
    for word in words:
        name, texts = _split(word)
        sources = [_read(source, runs) for text in texts for source in _expand(text)]
        all_sides += _sides_of(name, word, sources, defaults)
    return _distinct(all_sides)


def side_of_runs(name: str, paths: Sequence[Path]) -> Side:
    """Return the launches of all these runs taken together."""
    return _pooled(name, [_run_source(path) for path in paths], InputDefaults())


def history(compared: Sequence[Side], runs: Path) -> dict[str, tuple[Side, ...]]:
    """Return the newest other runs on the host of a side with all that its context names."""
    inside = {
        launch.partition("/")[0]
        for side in compared
        for series in side.series
        for launch in series.launches
    }
    past: dict[str, list[Side]] = {side.name: [] for side in compared if side.context}
    for path in reversed(list_runs(runs)) if past and runs.is_dir() else ():
        if path.name in inside:
            continue
        with suppress(StepmarkError):  # it is damaged, or has no result
            where = context(read_info(path))
            names = [side.name for side in compared if side.context == where]
            names = [name for name in names if len(past[name]) < _MOST_PAST_RUNS]
            for name in names:
                past[name].append(side_of_runs(path.name, [path]))
    return {name: tuple(of_side) for name, of_side in past.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The series of one file or run by column ("" for all but tables with several)."""

    name: str
    columns: Mapping[str, Callable[[InputDefaults], list[Series]]]
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _split(word: str) -> tuple[str, list[str]]:
    """Split "tcp=a.txt,b.txt" into ("tcp", ["a.txt", "b.txt"]), but no existing path."""
    if not word.strip():
        raise ConfigError("compare", word, "a run or a file")
    if os.path.exists(word):  # False also for a name that is too long
        return "", [word]
    name, equals, rest = word.partition("=")
    if not equals or "/" in name:
        name = ""
        rest = word
    if not rest:
        raise ConfigError("compare", word, "NAME=SOURCE")
    parts = [rest] if os.path.exists(rest) else [part for part in rest.split(",") if part]
    return name, parts


def _expand(text: str) -> list[str]:
    """Return the files of a pattern or a folder; any other text alone."""
    path = Path(text)
    try:
        path.exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("compare", text, f"a name that can be read ({reason})") from None
    if path.is_dir() and not is_run(path) and not is_sweep(path):
        inside = (p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        sources = sorted([*inside, *list_runs(path)])
        if not sources:
            raise ConfigError("compare", text, "a run, a file, or a folder of these")
        return [str(p) for p in sources]
    if any(sign in text for sign in "*?[") and not path.exists():
        matches = sorted(glob.glob(text))
        if not matches:
            raise ConfigError("compare", text, "a pattern that matches files or runs")
        return [source for match in matches for source in _expand(match)]
    return [text]


def _read(text: str, runs: Path) -> _Source:
    path = Path(text)
    if path.is_file():
        return _file_source(path, None)
    head, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and Path(head).is_file():
        return _file_source(Path(head), int(number))
    if path.parent != Path() and not path.exists() and not (runs / path).exists():
        raise ConfigError("compare", text, "a run or a file that exists")
    return _run_source(find_run(runs, text))


def _run_source(path: Path) -> _Source:
    run = read(path)
    series, notes = series_of_records(run.latest)
    return _Source(
        name=path.name,
        columns={"": lambda _: series},
        context=context(run.info) if run.is_known else {},
        notes=(*run.notes, *notes),
    )


def _file_source(path: Path, number: int | None) -> _Source:
    if number is None and has_steps(path):
        log = read_training_log(path)
        series = [series_of_training_log(log)]
        return _Source(name=_stem(path), columns={"": lambda _: series}, notes=log_notes(log))
    tables = find(path)
    if number is not None:
        tables = [table for table in tables if table.index == number]
        if not tables:
            raise ConfigError("compare", f"{path}:{number}", "a table of this file")
    if not tables:
        raise ConfigError("compare", path, _ALLOWED)
    wide = [table for table in tables if table.columns]
    if wide and len(tables) > 1:
        raise ConfigError("compare", path, f"one of its tables: {table_list(path, tables)}")
    units = rate_units(wide[0].columns) if wide and not wide[0].unit else []
    if len(units) > 1:
        raise ConfigError("compare", path, f"a table with one unit, not {' and '.join(units)}")
    name = _stem(path)
    name += f":{number}" if number is not None else ""
    columns = wide[0].columns if wide else ("",)
    wrong = sum(bool(reading.num_wrong) for table in tables for reading in table.readings)
    repeats = {note for table in tables for note in repeat_notes(table)}
    basis = "; --statistic combines the values of a launch (default: median)"
    return _Source(
        name=name,
        columns={name: partial(series_of_tables, path, tables, name) for name in columns},
        notes=(
            *((f"{wrong} wrong results are left out",) if wrong else ()),
            *(note + basis * (note in repeats) for table in tables for note in table.notes),
        ),
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(path.suffix)


def _sides_of(
    name: str, word: str, sources: Sequence[_Source], defaults: InputDefaults
) -> list[Side]:
    several = f"{sources[0].name} and {len(sources) - 1} more" if "," in word else word
    default_name = name or (sources[0].name if len(sources) == 1 else several)
    sides = []
    for column in dict.fromkeys(column for source in sources for column in source.columns):
        side_name = f"{name} {column}".strip() if column else default_name
        with_column = [
            dataclasses.replace(source, columns={"": source.columns[column]})
            for source in sources
            if column in source.columns
        ]
        sides.append(_pooled(side_name, with_column, defaults))
    return sides


def _pooled(name: str, sources: Sequence[_Source], defaults: InputDefaults) -> Side:
    """Merge series that differ in nothing into one, with the launches of all."""
    merged: dict[tuple[object, ...], Series] = {}
    for source in sources:
        for series in source.columns[""](defaults):
            placement = series.fields.get("placement") or None
            if defaults.placement and placement not in (None, defaults.placement):
                continue
            key = (tuple(series.fields.items()), series.size_bytes, series.unit)
            merged[key] = _merged(name, merged[key], series) if key in merged else series
    notes = tuple(dict.fromkeys(note for source in sources for note in source.notes))
    if not merged:
        reason = f" ({'; '.join(notes)})" if notes else ""
        raise ConfigError("compare", name, f"a source with at least one time or rate{reason}")
    contexts = [source.context for source in sources]
    pooled_context = {
        key: ", ".join(dict.fromkeys(context.get(key, "unset") for context in contexts))
        for key in dict.fromkeys(key for context in contexts for key in context)
    }
    return Side(name=name, series=tuple(merged.values()), context=pooled_context, notes=notes)


def _merged(name: str, first: Series, second: Series) -> Series:
    """Merge two series. A launch printed as 0 bounds the whole: a mean would be too high."""
    if twice := first.launches.keys() & second.launches.keys():
        raise ConfigError(
            "compare", name, f"give each launch once, not {sorted(twice)[0]} twice"
        )
    if not first.launches or not second.launches:
        below = max(first.below or 0.0, second.below or 0.0) or None
        return dataclasses.replace(first, launches={}, below=below)
    soaks = first.soak_s, second.soak_s
    return dataclasses.replace(
        first,
        launches={**first.launches, **second.launches},
        starts={**first.starts, **second.starts},
        rounding=max(first.rounding, second.rounding),
        soak_s=None if None in soaks else min(filter(None, soaks), default=0.0),
        busy=first.busy | second.busy,
        num_warmup=first.num_warmup if first.num_warmup == second.num_warmup else None,
    )


def _distinct(sides: Sequence[Side]) -> list[Side]:
    """Number sources of the same name."""
    names = {side.name for side in sides}
    distinct: dict[str, Side] = {}
    for side in sides:
        name = side.name
        count = 1
        while name in distinct or (count > 1 and name in names):
            count += 1
            name = f"{side.name} ({count})"
        distinct[name] = dataclasses.replace(side, name=name)
    return list(distinct.values())


_PLACEMENTS = {"in": "in-place", "out": "out-of-place", "both": None}


def run(options: CompareOptions) -> int:
    """Print and write the comparison. Returns the exit code."""
    options.check_stdout()
    comparison = compared(options)
    _deliver(comparison, options)
    return exit_code(comparison)


def exit_code(comparison: Comparison) -> int:
    """Return 1 if something is too slow, 3 if a limit was given and a line is untested."""
    if comparison.too_slow is None:
        return 0
    others = (line.cells.get(n) for line in comparison.lines for n in comparison.names[1:])
    is_untested = any(c and (c.ratio is None or c.ratio.se_log is None) for c in others)
    return 1 if comparison.too_slow else 3 if is_untested else 0


def compared(options: CompareOptions) -> Comparison:
    """Compare the sources of the options. Raises ConfigError."""
    defaults = InputDefaults(
        collective=_collective(options.collective),
        num_ranks=options.ranks,
        placement=_PLACEMENTS[options.placement],
        unit=options.unit,
    )
    smallest, largest = _sizes(options.size_range)
    with Waiting("reading what is compared"):
        compared = sides(options.sources, options.runs, defaults)
    if len(compared) < 2:
        rule = (
            "there must be two sides or more; a folder, a pattern or a list with commas is one"
        )
        raise ConfigError("compare", ", ".join(options.sources), rule)
    ordered = _baseline_first(compared, options.baseline)
    return compare_sides(
        ordered,
        Options(
            noise=options.noise,
            statistic=options.statistic,
            allowed=_allowed(options.allow, options.force),
            fail_if_slower=options.fail_if_slower,
            smallest_bytes=smallest,
            largest_bytes=largest,
            recorded=tuple(sides(options.noise_from, options.runs, defaults)),
            history=history(ordered, options.runs),
        ),
    )


def _collective(text: str | None) -> str | None:
    if text is None:
        return None
    name = collective_named(text)
    if name not in list(Collective):
        raise not_one_of("collective", text, Collective)
    return name


def _allowed(names: Sequence[str], force: bool) -> tuple[str, ...]:
    fields = tuple(",".join(names).split(",")) if names else ()
    for name in fields:
        if name not in STRICT:
            raise not_one_of("allow", name, STRICT)
    return STRICT if force else fields


def _baseline_first(sides: list[Side], name: str | None) -> list[Side]:
    if name is None:
        return sides
    names = [side.name for side in sides]
    if name not in names:
        raise not_one_of("baseline", name, names)
    return sorted(sides, key=lambda side: side.name != name)


def _sizes(text: str | None) -> tuple[int | None, int | None]:
    """Return the limits of "1M-1G". Raises ConfigError."""
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if not dash:
        raise ConfigError("range", text, "sizes such as 1M-1G")
    smallest = parse_bytes(first, "range")
    largest = parse_bytes(last, "range")
    if smallest > largest:
        raise ConfigError("range", text, "sizes with the smaller one first")
    return smallest, largest


def _deliver(comparison: Comparison, options: CompareOptions) -> None:
    """Print the table, unless stdout is one of the files, and write the files."""
    rows = drawn.rows(comparison)
    document = {
        "names": list(comparison.names),
        "lines": rows,
        "overall": drawn.overall_rows(comparison),
        "notes": list(comparison.notes),
    }
    write_files(options, "compare", document, rows)
    if options.html:
        write_text(options.html, page(comparison).html(), "html")
    if not options.to_stdout:
        printed(comparison, console())
