"""CSV that `stepmark comm --csv` and `stepmark op --csv` wrote.

Its columns are in SI units but for GB/s. Rows of one collective that were called alike are
one table; operators are one table per family, told apart by their label.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stepmark.core.reading import Reading, Table
from stepmark.core.units import GB
from stepmark.trace.numerals import value_of, whole_of

_NEEDED = {"family", "dtype", "case_id", "run_id", "time_s"}
# What is equal in all rows of a table of collectives.
_SAME = (
    *("num_ranks", "world_size", "mode", "api", "backend", "device", "split", "pair", "beside"),
    *("aligned", "spread", "skew_s", "max_ctas", "calls_per_group", "method"),
)
# What names an operator, and what two tables of collectives may differ in.
_LABEL = (
    "model",
    "role",
    "pass",
    "shape",
    "layout",
    "scale",
    "dtype",
    "backend",
    "device",
    "rate",
)
_TITLE = ("mode", "api", "backend", "split", "pair", "beside", "max_ctas")
Row = Mapping[str, str]


def is_ours(head: str) -> bool:
    """Whether a header of ours is among the first lines: `# name` may stand above it."""
    return any(_is_header(line) for line in head[:16384].split("\n")[:3])


def read(text: str, file: str) -> list[Table]:
    """The tables of all parts of the file, in order."""
    collectives: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    operators: dict[str, list[tuple[int, Row]]] = {}
    cut = 0
    for number, row in _rows(text):
        if row is None:
            cut = number
        elif row.get("collective") and row.get("size_bytes"):
            key = (row["collective"], *(row.get(name, "") for name in _SAME))
            collectives.setdefault(key, []).append((number, row))
        elif not row.get("collective"):
            operators.setdefault(row.get("family", ""), []).append((number, row))
    notes = (f"line {cut}: a row that is cut off is left out",) if cut else ()
    tables = [_collective_table(rows, file) for rows in collectives.values()]
    tables += [_operator_table(rows, file) for rows in operators.values()]
    return [_with_notes(table, notes) for table in tables if table.readings]


def _with_notes(table: Table, notes: tuple[str, ...]) -> Table:
    return replace(table, notes=notes) if notes else table


def _is_header(line: str) -> bool:
    return {cell.strip() for cell in line.split(",")} >= _NEEDED


def _rows(text: str) -> Iterator[tuple[int, Row | None]]:
    """(line, row) of the whole run: not of single ranks. None for a row that is cut off."""
    names: list[str] = []
    reader = csv.reader(io.StringIO(text))
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            continue
        if set(cells) >= _NEEDED:
            names = cells
        elif names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            if not row.get("rank"):
                yield number, row
        elif names and len(cells) > 1:
            yield number, None


def _collective_table(rows: Sequence[tuple[int, Row]], file: str) -> Table:
    first = rows[0][1]
    num_ranks = whole_of(first.get("num_ranks", ""))
    words = [first[name] for name in _TITLE if first.get(name)]
    return Table(
        file=file,
        index=0,
        first_line=rows[0][0],
        last_line=rows[-1][0],
        title=" ".join((first["collective"], f"x{num_ranks}", *words)),
        tool="stepmark",
        collective=first["collective"],
        collective_from="its column",
        num_ranks=num_ranks,
        num_ranks_from="its column" if num_ranks else "",
        method=first.get("method", ""),
        readings=tuple(
            reading for number, row in rows if (reading := _of_collective(number, row))
        ),
    )


def _of_collective(number: int, row: Row) -> Reading | None:
    time_s = value_of(row["time_s"])
    if not time_s or time_s < 0:
        return None
    algbw, busbw = value_of(row.get("algbw_gb_s", "")), value_of(row.get("busbw_gb_s", ""))
    return Reading(
        line=number,
        size_bytes=whole_of(row["size_bytes"]),
        count=whole_of(row.get("count", "")),
        dtype=row["dtype"],
        redop=row.get("redop", ""),
        root=whole_of(row.get("root", "")),
        placement=row.get("placement", ""),
        time_s=time_s,
        algbw_bytes_per_s=None if algbw is None else algbw * GB,
        busbw_bytes_per_s=None if busbw is None else busbw * GB,
        num_wrong=whole_of(row.get("num_wrong", "")),
    )


def _operator_table(rows: Sequence[tuple[int, Row]], file: str) -> Table:
    methods = {row.get("method", "") for _, row in rows if row.get("time_s")}
    return Table(
        file=file,
        index=0,
        first_line=rows[0][0],
        last_line=rows[-1][0],
        title=rows[0][1]["family"],
        tool="stepmark",
        collective=rows[0][1]["family"],
        collective_from="its column",
        method=methods.pop() if len(methods) == 1 else "",
        readings=tuple(
            Reading(
                line=number,
                label=" ".join(row[name] for name in _LABEL if row.get(name)),
                dtype=row["dtype"],
                time_s=time_s,
                num_wrong=whole_of(row.get("num_wrong", "")),
            )
            for number, row in rows
            if (time_s := value_of(row["time_s"])) and time_s > 0
        ),
    )
