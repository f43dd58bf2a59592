"""Tables of the PyTorch profiler and Perftools as text, flat rows and plain values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from stepmark.core.columns import Row, aligned
from stepmark.core.profiler_table import (
    COPY_EDGES,
    Communication,
    Flag,
    ProfilerTable,
    TableRow,
)
from stepmark.core.units import format_bytes, format_time

_MAX_ROWS, _MAX_FLAGS, _MAX_NAME = 40, 80, 52
_NS = 1e9
_DIRECTIONS = {
    "copy_in": "host to accelerator",
    "copy_out": "accelerator to host",
    "copy_peer": "accelerator to accelerator",
}
_SHOWN = (
    *("calls", "self_cpu", "cpu", "self_device", "device", "self_device_mem", "flops"),
    *("time", "acc_time", *_DIRECTIONS, "events"),
)
_ANSWERS = {True: "yes", False: "no", None: "the table cannot tell"}


def text(table: ProfilerTable) -> Iterator[str]:
    """Yield a table: the answer and what it rests on, its rows, its impossible figures."""
    yield f"{table.file}:{table.index}  {table.title}".rstrip()
    order = ", ".join(table.columns[key] for key in table.sorted_by)
    order = f"sorted by {order}" if order else "sorted by no column shown"
    yield f"    {table.tool}, {len(table.rows)} rows, {order}"
    if table.communication:
        yield from (f"    {line}" for line in _answer(table.communication))
    yield ""
    yield from (f"    {line}" for line in _rows(table))
    yield from (f"    {line}" for line in _copies_text(table))
    yield from (f"    {line}" for line in _flags(table.flags))


def _answer(answer: Communication) -> Iterator[str]:
    """Yield whether communication bounds the job, and what this rests on."""
    yield f"communication-bound: {_ANSWERS[answer.bound]}"
    if answer.low_ns is not None:
        least, most = f"{answer.share_low or 0:.1%}", answer.share_high
        share = f"at least {least}" if most is None else f"at most {most:.1%}"
        share = f"{least} to {most:.1%}" if answer.low_ns and most is not None else share
        times = _span(answer.low_ns, answer.high_ns)
        whole = _span(answer.device_low_ns, answer.device_high_ns)
        yield f"  communication: {share} of the device time ({times} of {whole})"
        yield f"  device time: {answer.definition}"
    yield from (f"  rests on: {reason}" for reason in answer.reasons)
    yield from filter(None, [answer.largest and f"  largest: {answer.largest}"])
    if answer.low_ns is None or not answer.steps_ns or not answer.device_high_ns:
        return
    steps = f"{answer.steps} steps" if answer.steps else "the steps"
    yield f"  steps: {steps} take {_seconds(answer.steps_ns)} on the host"
    exposed = 2 * answer.low_ns - answer.device_high_ns
    if exposed > 0:
        words = "beside no other kernel, unless collectives overlap each other"
        yield f"  exposed: at least {_seconds(exposed)} of communication is {words}"
    if answer.high_ns is not None and answer.high_ns < answer.steps_ns:
        share = f"{answer.high_ns / answer.steps_ns:.1%}"
        yield f"  gain: a network without cost would save at most {share} of the steps"


def _span(low: float | None, high: float | None) -> str:
    first, last = _seconds(low), _seconds(high)
    if not low:
        return f"up to {last}"
    return first if last in ("", first) else f"{first} to {last}"


def _seconds(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else format_time(nanoseconds / _NS)


def _rows(table: ProfilerTable) -> Iterator[str]:
    """Yield the first rows as printed, with their kinds."""
    keys = [key for key in _SHOWN if key in table.columns]
    flagged = {flag.line for flag in table.flags}
    cells = [["", *(table.columns[key] for key in keys), "kind", "name"]]
    for row in table.rows[:_MAX_ROWS]:
        figures = [row.figures[key].printed if key in row.figures else "" for key in keys]
        mark = "!" if row.line in flagged else ""
        cells.append([mark, *figures, row.kind or "", "  " * row.level + row.name[:_MAX_NAME]])
    if not any(row.kind for row in table.rows):
        cells = [[*line[:-2], line[-1]] for line in cells]
    width = len(cells[0])
    is_right = [False, *(True for _ in keys), *(False for _ in range(width - 1 - len(keys)))]
    yield from aligned(cells, is_right)
    if len(table.rows) > _MAX_ROWS:
        yield f"... and {len(table.rows) - _MAX_ROWS} more rows; --json has all"


def _copies_text(table: ProfilerTable) -> Iterator[str]:
    """Yield the copies of the whole job by size."""
    total = [copy for row in table.rows[:1] for copy in _copies(row)]
    for direction in dict.fromkeys(copy["direction"] for copy in total):
        counts = [
            f"{copy['count']:g} of {_bin(copy['min_bytes'], copy['below_bytes'])}"
            for copy in total
            if copy["direction"] == direction and copy["count"]
        ]
        yield f"copies {direction}: {', '.join(counts) or 'none'}"


def _bin(low: object, high: object) -> str:
    assert isinstance(low, int)
    if not isinstance(high, int):
        return f"{format_bytes(low)} and more"
    return f"{format_bytes(low)} to under {format_bytes(high)}"


def _copies(row: TableRow) -> Iterator[Row]:
    """Yield the bins of a row's copies. A bin ends where Perftools' next one begins."""
    for key, direction in _DIRECTIONS.items():
        for edge, above in zip(COPY_EDGES, (*COPY_EDGES[1:], None), strict=True):
            if (count := row.value(f"{key}_{edge}")) is not None:
                bounds = {"min_bytes": edge, "below_bytes": above}
                yield {"function": row.name, "direction": direction, **bounds, "count": count}


def _flags(flags: Sequence[Flag]) -> Iterator[str]:
    for flag in flags[:_MAX_FLAGS]:
        figure = " ".join(filter(None, (flag.column, flag.printed)))
        where = f"line {flag.line}: " + (f"{flag.row}: " if flag.row else "")
        yield f"! {where}{figure}{': ' if figure else ''}{flag.reason} [{flag.rule}]"
    if len(flags) > _MAX_FLAGS:
        yield f"... and {len(flags) - _MAX_FLAGS} more; --json has all"


def document(tables: Sequence[ProfilerTable]) -> dict[str, object]:
    """Return everything as plain values: seconds, bytes, percent."""
    return {
        "tables": [
            asdict(table)
            | {
                "totals": {f"{key}_s": sum_.value / _NS for key, sum_ in table.totals.items()},
                "communication": table.communication and _plain_answer(table.communication),
                "rows": [_row(row) for row in table.rows],
                "copies": [copy for row in table.rows for copy in _copies(row)],
            }
            for table in tables
        ]
    }


def _plain_answer(answer: Communication) -> Row:
    plain: Row = {"share_low": answer.share_low, "share_high": answer.share_high}
    for key, value in asdict(answer).items():
        is_time = key.endswith("_ns") and value is not None
        plain[key.replace("_ns", "_s")] = value / _NS if is_time else value
    return plain


def csv_rows(tables: Sequence[ProfilerTable]) -> dict[str, list[Row]]:
    """Return rows, flags and copies of all tables, flat."""
    rows: dict[str, list[Row]] = {"rows": [], "flags": [], "copies": []}
    for table in tables:
        name = {"table": f"{table.file}:{table.index}"}
        rows["rows"] += [name | _row(row) for row in table.rows]
        rows["flags"] += [name | asdict(flag) for flag in table.flags]
        rows["copies"] += [name | copy for row in table.rows for copy in _copies(row)]
    return {key: values for key, values in rows.items() if values or key == "rows"}


def _row(row: TableRow) -> Row:
    """Return a row with its figures in seconds, bytes, percent or counts, by their keys."""
    plain: Row = {"line": row.line, "name": row.name, "kind": row.kind, "level": row.level}
    for key, figure in row.figures.items():
        unit, scale = _unit(key)
        plain[f"{key}{unit}"] = figure.value / scale if scale > 1 else figure.value
    return plain | row.words


def _unit(key: str) -> tuple[str, float]:
    if key.endswith("_mem") or key in _DIRECTIONS:
        return "_bytes", 1.0
    is_count = key.endswith("_pct") or key[-1].isdigit()
    is_count = is_count or key in ("calls", "node_id", "flops", "events")
    return ("", 1.0) if is_count else ("_s", _NS)
