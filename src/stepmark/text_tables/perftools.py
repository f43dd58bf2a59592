"""Read and check the accelerator tables of HPE Perftools (CrayPat).

pat_report prints columns between bars, with headings over several lines; copied from a page,
cells have tabs and headings lost their columns. A copied row may have one cell too many. It is
read if the places behind the point, which each column keeps, leave one way to do so; other rows
that do not fit are flagged and left out.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from stepmark.ground.units import MIB
from stepmark.text_tables.printed_figures import is_number
from stepmark.text_tables.profiler_table import Communication, Flag, ProfilerTable, TableRow
from stepmark.text_tables.profiler_text import COLLECTIVE, DAMAGED, damage, figure
from stepmark.text_tables.slide_tables import heading_above

_TITLE = re.compile(r"\s*Table \d+:\s+(.*Accelerator Regions.*)")
_NEXT_TITLE = re.compile(r"\s*Table \d+:")
_TOTAL_ROW = re.compile(r"[\s|]*100\.0%")
_LEVEL = re.compile(r"^ *(?:\d\|+|\|+|\d\.(?=\d+\.\d+%))")  # the last is a bar that was lost
_SOURCE_LINE = re.compile(r"line\.\d+")
_HEADINGS = {
    "Time%": ("time_pct", "Time%"),
    "Time": ("time", "Time (s)"),
    "Acc Time%": ("acc_time_pct", "Acc Time%"),
    "Acc Time": ("acc_time", "Acc Time (s)"),
    "Acc Copy In": ("copy_in", "Acc Copy In (MiB)"),
    "Acc Copy Out": ("copy_out", "Acc Copy Out (MiB)"),
    "Acc To Acc": ("copy_peer", "Acc To Acc (MiB)"),
    "Events": ("events", "Events"),
}
# A copy of stacked headings keeps lines; in the first one, only the order tells these apart.
_CUT_HEADINGS = {
    "Acc": ("Acc Time%", "Acc Time"),
    "Acc Copy": ("Acc Copy In", "Acc Copy Out"),
    "Acc To": ("Acc To Acc",),
}
_HEADING = re.compile(
    r"(?P<edge>\w+)<=(?: (?P<side>HtoA|AtoH|AtoA))?|(?P<first>HtoA|AtoH|AtoA)|"
    + "|".join(sorted((*_HEADINGS, *_CUT_HEADINGS), reverse=True))
)
_EMPTY = ("", "-", "--")
_COLLECTIVE = re.compile(rf".*(?:{COLLECTIVE}|\bbroadcast|\bnccl|\brccl)", re.IGNORECASE)
_MAX_HEAD = 16


def read(lines: Sequence[str], file: str) -> list[ProfilerTable]:
    """Return all tables in order."""
    titles = (number for number, line in enumerate(lines) if _TITLE.match(line))
    return [_table(lines, number, file) for number in titles]


def _table(lines: Sequence[str], title: int, file: str) -> ProfilerTable:
    """Return the table whose title is on this line, without rows if its columns are unknown."""
    end = min(len(lines), title + 1 + _MAX_HEAD)
    first = next((n for n in range(title + 1, end) if _TOTAL_ROW.match(lines[n])), end)
    head = lines[title + 1 : first]
    columns = _columns(head)
    total = _split("".join(lines[first : first + 1]))[0]
    entries: list[tuple[int, Sequence[str], list[str]]] = []  # line, figures, words
    flags: list[Flag] = []
    is_known = (
        "acc_time" in columns and "" not in columns and any("MiB" in line for line in head)
    )
    if not is_known or len(columns) != len(total):
        flags.append(damage(title + 1, lines[title], "its columns or its total are not known"))
        first = len(lines)
    is_inside = True
    for number in range(first, len(lines)):
        if _NEXT_TITLE.match(lines[number]):
            break
        cells, words = _split(lines[number])
        is_row = any(cells) and (is_inside or cells[0].endswith("%"))
        is_inside = is_row or (is_inside and bool(lines[number].strip()))
        if is_row and words and (fitting := _fitting(cells, total)):
            entries.append((number + 1, fitting, words))
        elif is_row:
            reason = f"{len(cells)} figures do not fit {len(total)} columns"
            flags.append(damage(number + 1, lines[number], reason))
        elif entries and is_inside and "\t" in lines[number]:
            entries[-1][2].extend(words)
    rows = [
        _row(line, dict(zip(columns, cells, strict=True)), words)
        for line, cells, words in entries
    ]
    sums = rows[0].figures.items() if rows else ()
    totals = {key: total for key, total in sums if key in ("time", "acc_time")}
    name = lines[title].partition(":")[2].strip()
    return ProfilerTable(
        file=file,
        first_line=title + 1,
        title=f"{heading_above(lines, title + 1)}: {name}".removeprefix(": "),
        tool="Perftools",
        columns=columns,
        rows=tuple(rows),
        totals=totals,
        flags=tuple(flags),
    )


def _columns(head: Sequence[str]) -> dict[str, str]:
    """Return headings by key, with "" for those that are not known.

    HtoA_4KiB counts copies from host to accelerator in the bin that begins at 4 KiB.
    """
    stacked = [line.split("|") for line in head if line.count("|") > 2]
    columns_of_words = map(" ".join, zip_longest(*stacked, fillvalue=""))
    copied = next((line for line in head if line.startswith("Time%")), "")
    text = " ".join((" ".join(columns_of_words) or copied).split())
    columns: dict[str, str] = {}
    cut = {word: iter(headings) for word, headings in _CUT_HEADINGS.items()}
    side = ""
    for match in _HEADING.finditer(text):
        if match["edge"] or match["first"]:
            side = match["side"] or match["first"] or side
            edge = match["edge"] or "0"
            columns[f"{side}_{edge}"] = f"{side} from {edge}"
        else:
            words = next(cut[match[0]], "") if match[0] in cut else match[0]
            key, heading = _HEADINGS.get(words, ("", ""))
            columns[key] = heading
            side = "AtoA" if key == "copy_peer" else side
    return columns


def _split(line: str) -> tuple[list[str], list[str]]:
    """Return (figures, words) of a line; figures of a continued source are empty."""
    text = _LEVEL.sub("", line)
    cells = [cell.strip() for cell in text.split("\t" if "\t" in text else "|")]
    plain = [cell.replace(",", "").removesuffix("%") for cell in cells]
    is_word = (n for n, cell in enumerate(plain) if cell not in _EMPTY and not is_number(cell))
    end = next(is_word, len(cells))
    return cells[:end] if len(cells) > 1 else [], list(filter(None, cells[end:]))


def _fitting(cells: Sequence[str], total: Sequence[str]) -> Sequence[str] | None:
    """Return the cells by column, without one surplus empty or zero cell; None if unclear."""
    for surplus in ((), _EMPTY, ("0", "0.0", "0.00")):
        places = [n for n, cell in enumerate(cells) if cell in surplus]
        ways = {(*cells[:n], *cells[n + 1 :]) for n in places} if surplus else {tuple(cells)}
        fitting = [way for way in ways if _is_alike(way, total)]
        if len(fitting) == 1:
            return fitting[0]
    return None


def _is_alike(cells: Sequence[str], total: Sequence[str]) -> bool:
    """Return whether every cell has as many places behind the point as its column."""
    places = [re.sub(r"\d", "0", cell.partition(".")[2]) for cell in (*cells, *total)]
    columns = zip(cells, places, places[len(total) :], strict=False)
    return len(cells) == len(total) and all(
        cell in (*_EMPTY, "0") or own == other for cell, own, other in columns
    )


def _row(line: int, cells: Mapping[str, str], words: Sequence[str]) -> TableRow:
    """Return a row. A copy may put the source of one function on the lines of the next."""
    names = (word for word in words if "/" not in word and not _SOURCE_LINE.fullmatch(word))
    figures = {}
    for key, cell in cells.items():
        scale = 1e9 if key in ("time", "acc_time") else MIB if key.startswith("copy") else 1.0
        if value := figure(cell, {"%": 1.0} if key.endswith("_pct") else {"": scale}):
            figures[key] = value
    return TableRow(line=line, name=next(names, words[0]), figures=figures)


def communication(table: ProfilerTable) -> Communication:
    """Return the largest time of a collective's function: rows may stand below one another."""
    total = table.totals.get("acc_time")
    if not total or total.value <= 0 or any(flag.rule == DAMAGED for flag in table.flags):
        return Communication.unknown("the total or rows of the table may be lost")
    flagged = {flag.line for flag in table.flags}
    rows = [row for row in table.rows if "/" not in row.name and _COLLECTIVE.match(row.name)]
    rows = [row for row in rows if "acc_time" in row.figures and row.line not in flagged]
    shown = [(row.figures["acc_time"], row.name) for row in rows]
    low, name = max(((time.low, name) for time, name in shown), default=(0.0, "no function"))
    return Communication(
        bound=True if low > total.high / 2 else None,
        low_ns=max(low, 0.0),
        device_low_ns=total.low,
        device_high_ns=total.high,
        share_low=max(low, 0.0) / total.high,
        reasons=(
            "device time is the Acc Time of all functions",
            f"the collective's function of the largest Acc Time is {name}",
            "the table does not say which kernels ran under the other functions",
        ),
    )
