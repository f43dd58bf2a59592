"""A comparison as rows, sentences and the table of a terminal.

`speed` is always B's speed over the baseline's: above 1 is faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from stepmark.comparison.comparison import TIME, Cell, Comparison, Line, Overall
from stepmark.ground.ratio import OF_REPEATS, Ratio, Verdict
from stepmark.ground.units import GB, format_bytes, format_time
from stepmark.ground.verdicts import FALSE_SHARE
from stepmark.model.ops import CUSTOM
from stepmark.tables.columns import (
    BYTES,
    CONSOLE,
    COUNT,
    NUMBER,
    PAGE,
    SHOWN,
    Column,
    Row,
    View,
    digits,
    rows_of,
    text,
)
from stepmark.tables.row_tables import print_lines, print_table
from stepmark.tables.table import Table

if TYPE_CHECKING:
    from rich.console import Console

# Fields in the order in which they are read; all others follow.
_ORDER = (
    *("family", "shape", "label", "phase", "dtype", "redop", "placement", "num_ranks"),
    *("model", "strategy", "mbs", "seq_len", "schedule"),
    *("precision", "fp8", "fp8_head", "compile", "recompute"),
)
_HEAD = (
    *("family", "model", "strategy", "shape", "label", "phase", "dtype", "redop"),
    "placement",
)
# Operators have these, which include most other fields.
_IN_SHAPE = ("shape", "label")


def rows(comparison: Comparison) -> list[Row]:
    """Return one flat row per line and side other than the baseline."""
    base, *others = comparison.names
    slow = set(comparison.too_slow or ())
    table: list[Row] = []
    for place, line in enumerate(comparison.lines):
        for name in others:
            if (cell := line.cells.get(name)) is None:
                continue
            row = (
                _describe_line(line)
                | _own_fields(line, cell)
                | {"baseline": base, "side": name}
            )
            row |= _values(line, line.cells[base], "baseline_")
            row |= _values(line, cell, "") | _describe_ratio(cell.ratio)
            if (limit := comparison.fail_if_slower) is not None:
                is_within = bool(cell.ratio and cell.ratio.is_within(limit))
                row["too_slow"] = (
                    True if (place, name) in slow else False if is_within else None
                )
            table.append(row)
    return table


def overall_rows(comparison: Comparison) -> list[Row]:
    """Return the geometric means: one row per side other than the baseline."""
    return [
        {
            "baseline": comparison.names[0],
            "side": mean.name,
            **_describe_ratio(mean.ratio),
            "num_lines": mean.num_lines,
            "smallest_bytes": mean.smallest_bytes,
            "largest_bytes": mean.largest_bytes,
        }
        for mean in comparison.overall
    ]


def _describe_line(line: Line) -> Row:
    names = (*(n for n in _ORDER if n in line.fields), *line.fields)
    row: Row = {name: line.fields[name] for name in names}
    return row | {"size_bytes": line.size_bytes}


def shown_busbw_gb_s(line: Line, cell: Cell) -> float | None:
    """Return the bus bandwidth that a line shows; None where it shows times or other rates."""
    return _busbw_gb_s(line, cell) if _shows_busbw(line) else None


def _own_fields(line: Line, cell: Cell) -> Row:
    """Return a side's own fields where they differ, beside the baseline's."""
    own: Row = {}
    for name, value in cell.series.fields.items():
        base = line.fields.get(name)
        if value != base and value not in (None, "") and base not in (None, ""):
            own |= {name: value, f"baseline_{name}": base}
    return own


def _values(line: Line, cell: Cell, prefix: str) -> Row:
    is_time = line.unit == "s"
    return {
        f"{prefix}time_s": cell.value if is_time else None,
        f"{prefix}busbw_gb_s": _busbw_gb_s(line, cell),
        f"{prefix}rate": None if is_time else cell.value,
        f"{prefix}below": cell.series.below,
        f"{prefix}launches": len(cell.series.launches),
        f"{prefix}values": sum(map(len, cell.series.launches.values())),
    }


def _busbw_gb_s(line: Line, cell: Cell) -> float | None:
    if line.unit == "busbw":
        return None if cell.value is None else cell.value / GB
    if not (line.unit == "s" and _has_busbw(cell) and cell.value):
        return None
    series = cell.series
    return (series.size_bytes or 0) * (series.busbw_factor or 0.0) / cell.value / GB


def _has_busbw(cell: Cell) -> bool:
    return bool(cell.series.busbw_factor and cell.series.size_bytes)


def _shows_busbw(line: Line) -> bool:
    """Return whether all cells of a line have a bus bandwidth; else all show times."""
    return line.unit == "busbw" or (
        line.unit == "s" and all(map(_has_busbw, line.cells.values()))
    )


def _describe_ratio(ratio: Ratio | None) -> Row:
    if ratio is None:
        return dict.fromkeys(("speed", "low", "high")) | {
            "verdict": Verdict.CANNOT_TELL.value,
            "reason": "printed as 0",
        }
    return {
        "speed": ratio.speed,
        "low": ratio.low,
        "high": ratio.high,
        "verdict": ratio.verdict.value,
        "reason": ratio.reason,
    }


def split_fields(lines: Sequence[Line]) -> tuple[dict[str, object], list[str]]:
    """Return fields with one value, and the names of those that distinguish lines."""
    names = dict.fromkeys(name for line in lines for name in line.fields)
    constant: dict[str, object] = {}
    varying = []
    shaped = any(line.fields.get(name) for line in lines for name in _IN_SHAPE)
    for name in (*(n for n in _ORDER if n in names), *(n for n in names if n not in _ORDER)):
        values = {line.fields.get(name) for line in lines}
        if len(values) == 1:
            constant[name] = values.pop()
        elif name in ("redop", "root") and _follows_family(name, lines):
            continue
        elif name in _ORDER or not shaped or name in ("backend", "rate_kind", "method"):
            varying.append(name)
    return constant, varying


def _follows_family(name: str, lines: Sequence[Line]) -> bool:
    pairs = {(line.fields.get("family"), line.fields.get(name)) for line in lines}
    return len(pairs) == len({family for family, _ in pairs})


def headline(comparison: Comparison, constant: dict[str, object]) -> str:
    # Differences between sides are below the table; the fields are the baseline's.
    same = {
        name: value
        for name, value in constant.items()
        if not any(note.startswith(f"{name} differs") for note in comparison.notes)
    }
    words = [str(same[name]) for name in _HEAD if same.get(name) not in (None, "", "none")]
    if same.get("mbs") is not None and same.get("seq_len") is not None:
        words.append(f"mbs {same['mbs']} seq {same['seq_len']}")
    if ranks := same.get("num_ranks"):
        words.append(f"{ranks} rank{'s' if ranks != 1 else ''}")
    if method := same.get("method"):
        words.append(str(method))
    units = {unit_text(line) for line in comparison.lines}
    unit = units.pop() if len(units) == 1 else "values with their units"
    return ", ".join([*words, unit]) + "; ratios are of speed: above 1 is faster"


def unit_text(line: Line) -> str:
    if _shows_busbw(line):
        return "bus bandwidth in GB/s"
    named = {"s": "time", "rate": "rates as printed", TIME: "times as printed"}
    return named.get(line.unit, f"in {line.unit}" if line.unit else "values as printed")


def value_text(line: Line, cell: Cell | None) -> str:
    if cell is None:
        return ""
    scale = GB if line.unit == "busbw" else 1.0
    if cell.value is None:
        return "" if cell.series.below is None else f"< {cell.series.below / scale:g}"
    busbw = shown_busbw_gb_s(line, cell)
    if busbw is not None:
        return f"{busbw:.2f}"
    return format_time(cell.value) if line.unit == "s" else digits(cell.value, 6)


def shown_value(line: Line, name: str) -> float | None:
    """Return the number that a side shows: its bus bandwidth in GB/s, or its value."""
    if name not in line.cells:
        return None
    busbw = shown_busbw_gb_s(line, line.cells[name])
    return line.cells[name].value if busbw is None else busbw


def verdict_text(ratio: Ratio) -> str:
    """Return the verdict, and why it is uncertain or rests on other machines."""
    has_reason = ratio.verdict is Verdict.CANNOT_TELL or ratio.reason.endswith(OF_REPEATS)
    return ratio.verdict.value + (f" ({ratio.reason})" if has_reason else "")


def ratio_text(ratio: Ratio) -> str:
    """Return e.g. 1.052 [1.031, 1.074]: the speed and its 99 % interval, if that is narrow."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.speed:.3f}"
    if ratio.high > _LARGEST_FACTOR * ratio.speed:
        return f"{ratio.speed:.3f} [unknown]"
    return f"{ratio.speed:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def mean_text(overall: Overall) -> str:
    over = f"{overall.num_lines} line{'s' if overall.num_lines != 1 else ''}"
    low = overall.smallest_bytes
    high = overall.largest_bytes
    if low is not None and high is not None:
        over = f"{format_bytes(low)} to {format_bytes(high)}, {over}"
    mean = f"geometric mean {ratio_text(overall.ratio)} over {over}"
    return f"{overall.name}: {mean}: {verdict_text(overall.ratio)}"


def closing(comparison: Comparison) -> list[str]:
    """Return notes on chance, missing repeats, differences, and lines that are too slow."""
    ratios = [
        cell.ratio
        for line in comparison.lines
        for cell in line.cells.values()
        if cell.ratio is not None
    ]
    judged = sum(ratio.low is not None for ratio in ratios)
    sentences = []
    if sum(ratio.df is not None for ratio in ratios) > 1:  # not by stated noise
        sentences.append(
            f"judged as a table: {FALSE_SHARE:.1%} of faster and slower are wrong on average"
        )
    if comparison.by_round:
        sentences += _of_few_rounds(ratios)
    elif any(ratio.reason.endswith(OF_REPEATS) for ratio in ratios):
        sentences.append(
            "one value is as noisy as on other machines on which such tables were repeated: "
            "--noise 2% states what yours is"
        )
    if any(ratio.low is None for ratio in ratios) and not comparison.by_round:
        is_custom = all(line.fields.get("family") == CUSTOM for line in comparison.lines)
        sentences.append(
            "no verdict without repeats: measure with --launches 3, and a --budget for them all"
            if is_custom
            else "no verdict without repeats: give several launches a side (A1,A2,A3), a run "
            "with several (--noise-from RUN), or how much one varies (--noise 2%)"
        )
    sentences += comparison.notes
    if comparison.too_slow is not None:
        sentences += [
            _too_slow_text(comparison, place, name) for place, name in comparison.too_slow
        ]
        count = len(comparison.too_slow)
        limit = comparison.fail_if_slower or 0.0
        left = len(ratios) - judged
        sentences.append(
            f"{count} of {judged} certainly slower by more than {limit:.1%}"
            + (f"; {left} without an interval were not tested" if left else "")
        )
    return sentences


def _of_few_rounds(ratios: Sequence[Ratio]) -> Iterator[str]:
    """Yield what the verdicts of a sweep rest on that has too few rounds to show its noise."""
    if any(ratio.repeats_df for ratio in ratios):
        yield (
            "these rounds are too few to show how launches vary: they count as noisy as the "
            "noisiest repeats on other machines (docs/definitions.md, Sweeps)"
        )
    if any(ratio.low is None for ratio in ratios):
        yield "one round does not show how launches vary, and no repeats on other machines do"


def _too_slow_text(comparison: Comparison, place: int, name: str) -> str:
    line = comparison.lines[place]
    ratio = line.cells[name].ratio
    words = [
        str(line.fields.get(n) or "") for n in _HEAD if n not in ("phase", "dtype", "redop")
    ]
    words.append("" if line.size_bytes is None else format_bytes(line.size_bytes))
    speed = "" if ratio is None else ratio_text(ratio)
    return f"too slow: {name} {' '.join(word for word in words if word)}: {speed}"


_STYLE = {Verdict.FASTER.value: "green", Verdict.SLOWER.value: "red"}
_LARGEST_FACTOR = 100.0  # from a speed to the bounds of an interval that is shown
# Up to this many sides besides the baseline have values, intervals and verdicts in the table;
# more have the ratio and a mark.
_WIDE = 2
_MARKS = {
    Verdict.FASTER: "+",
    Verdict.SLOWER: "-",
    Verdict.SAME: "=",
    Verdict.CANNOT_TELL: "?",
}
_MARKS_SAY = "ratios with + faster, - slower, = same, ? cannot tell; intervals: --json, --csv"


def table_of(comparison: Comparison) -> Table:
    """Return the table: fields that distinguish lines, size, values, ratios, verdicts."""
    columns = _columns(comparison)
    return Table(rows_of(columns, comparison.lines), columns)


def _columns(comparison: Comparison) -> list[Column[Line]]:
    _, varying = split_fields(comparison.lines)
    is_wide = len(comparison.names) > _WIDE + 1
    columns = [
        *map(_field_column, varying),
        Column("size_bytes", lambda line: line.size_bytes, BYTES, "size", SHOWN),
    ]
    for name in comparison.names:
        is_shown = not is_wide or name == comparison.names[0]
        columns += _value_columns(name, SHOWN if is_shown else PAGE)
    for name in comparison.names[1:]:
        columns += _ratio_columns(comparison, name, is_wide=is_wide)
    return columns


def _field_column(name: str) -> Column[Line]:
    return Column(name, lambda line: line.fields.get(name), views=SHOWN)


def _value_columns(name: str, views: frozenset[View]) -> list[Column[Line]]:
    """Return the value of a side, by which lines are sorted, and its words."""
    words = f"{name} words"
    return [
        Column(
            f"{name} value",
            lambda line: shown_value(line, name),
            NUMBER,
            name,
            views,
            words=itemgetter(words),
        ),
        Column(words, lambda line: value_text(line, line.cells.get(name))),
    ]


def _ratio_columns(comparison: Comparison, name: str, *, is_wide: bool) -> list[Column[Line]]:
    """Return the ratio of a side, its interval and verdict; of one of many, also its mark."""
    verdict = f"{name} verdict"
    # Without intervals there is no verdict to show.
    ratios = (ratio_of(line, name) for line in comparison.lines)
    has_verdicts = any(ratio and ratio.low is not None for ratio in ratios)
    return [
        Column(
            f"{name} speed",
            lambda line: getattr(ratio_of(line, name), "speed", None),
            NUMBER,
            f"{name} / {comparison.names[0]}",
            PAGE if is_wide else SHOWN,
            words=itemgetter(f"{name} ratio"),
        ),
        Column(f"{name} ratio", partial(_ratio, name)),
        Column(
            verdict,
            partial(_verdict, name),
            heading="verdict",
            views=SHOWN if has_verdicts and not is_wide else PAGE,
            style=partial(_style, verdict),
        ),
        Column(
            f"{name} mark",
            partial(_marked, name),
            COUNT,
            name,
            CONSOLE if is_wide else frozenset(),
            style=partial(_style, verdict),
        ),
    ]


def ratio_of(line: Line, name: str) -> Ratio | None:
    """Return the ratio of a side; None where it has no value, and for the baseline."""
    cell = line.cells.get(name)
    return cell.ratio if cell else None


def _ratio(name: str, line: Line) -> str:
    ratio = ratio_of(line, name)
    return "" if ratio is None else ratio_text(ratio)


def _verdict(name: str, line: Line) -> str:
    if name not in line.cells:
        return ""
    ratio = ratio_of(line, name)
    return verdict_text(ratio) if ratio else "cannot tell (printed as 0)"


def _marked(name: str, line: Line) -> str:
    ratio = ratio_of(line, name)
    return f"{ratio.speed:.3f} {_MARKS[ratio.verdict]}" if ratio else ""


def _style(verdict: str, row: Row) -> str:
    """Return the colour of a verdict, or of a ratio with its mark."""
    return _STYLE.get(text(row, verdict), "")


def _lettered(
    columns: Sequence[Column[Any]], names: Sequence[str], console: "Console"
) -> list[Column[Any]]:
    """Return columns with letters in place of the names of sides; print whose they are."""
    letters = dict(zip(names, ascii_uppercase, strict=False))
    print_lines((f"{letter} = {name}" for name, letter in letters.items()), console)
    base = letters[names[0]]
    titles = letters | {f"{n} / {names[0]}": f"{own} / {base}" for n, own in letters.items()}
    return [
        replace(column, heading=titles.get(column.title, column.title)) for column in columns
    ]


def printed(comparison: Comparison, console: "Console") -> None:
    """Print the constants, a line per size or shape, geometric means and notes."""
    constant, _ = split_fields(comparison.lines)
    print_lines([headline(comparison, constant)], console)
    table = table_of(comparison)
    columns = table.shown(View.CONSOLE)
    if console.is_terminal and max(map(len, table.text(columns)), default=0) > console.width:
        columns = _lettered(columns, comparison.names, console)
    print_table(table, columns, console)
    marks = [_MARKS_SAY] if len(comparison.names) > _WIDE + 1 else []
    print_lines((*marks, *map(mean_text, comparison.overall), *closing(comparison)), console)
