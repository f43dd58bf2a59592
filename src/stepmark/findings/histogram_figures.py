"""Histograms of messages as figures, and the section of a page that has them."""

from collections.abc import Iterator, Sequence

from stepmark.findings.finding import Finding
from stepmark.findings.histogram import MESSAGE, lines
from stepmark.ground.units import format_bytes, parse_bytes
from stepmark.tables.columns import Row, number, text
from stepmark.tables.figures import Axis, Figure, Kind, Series
from stepmark.tables.page import Section, paragraph, preformatted
from stepmark.tables.row_tables import grouped


def figures(rows: Sequence[Row], per: str = "rank") -> Iterator[Figure]:
    """Yield calls and bytes by size, and the expected time where it is known.

    per: what the rows count as a rank.
    """
    if not rows:
        return
    note = _note(rows)
    yield bars(rows, "calls_per_rank", title="Calls", unit="calls", note=note, per=per)
    most_bytes = max(number(row, "bytes_per_rank") or 0.0 for row in rows)
    unit = format_bytes(most_bytes).split()[-1]
    num_bytes = parse_bytes(f"1{unit}", "bytes")
    sizes = [row | {"size": (number(row, "bytes_per_rank") or 0.0) / num_bytes} for row in rows]
    yield bars(sizes, "size", title="Bytes", unit=unit, note=note, per=per)
    if any(number(row, "expected_per_rank_s") for row in rows):
        note = "Calls times the time of one by the measured curve; overlap is not subtracted."
        key = "expected_per_rank_s"
        title = "Expected time"
        yield bars(rows, key, title=title, unit="expected seconds", note=note, per=per)


def bars(
    rows: Sequence[Row], key: str, *, title: str, unit: str, note: str, per: str = "rank"
) -> Figure:
    """Return one bar per bin, stacked by collective, dtype, group and phase."""
    order = sorted({(number(row, "from_bytes") or 0.0, _bin(row)) for row in rows})
    named = [row | {"series": _series(row)} for row in rows]
    groups = grouped(named, ["series"])
    return Figure(
        title=f"{title} by message size",
        note=note,
        x=Axis(title="message size", categories=list(dict.fromkeys(name for _, name in order))),
        y=Axis(title=f"{unit} per {per}", has_zero=True),
        series=[
            Series(
                kind=Kind.BARS,
                name=text(group[0], "series"),
                x=[_bin(row) for row in group],
                y=[number(row, key) for row in group],
                hover=[_hover(row, per) for row in group],
            )
            for group in groups
        ],
        height=360 + 20 * (len(groups) // 5),
    )


def section(
    name: str,
    rows: Sequence[Row],
    findings: Sequence[Finding] = (),
    *,
    description: Sequence[str] = (),
    more: Sequence[Figure] = (),
) -> Section:
    """Return a source: its description, findings, histogram, and more figures before that."""
    content = [preformatted(*description, is_table=True)] if description else []
    content += [
        paragraph(
            f"{finding.severity}: {finding.text}",
            "quiet" if finding.severity == "note" else "warning",
        )
        for finding in findings
    ]
    text = [preformatted(*lines(rows), is_table=True)] if rows else []
    return Section(name, content, [*more, *figures(rows), Section("Rows", text)])


def _note(rows: Sequence[Row]) -> str:
    if all(row["size_is"] == MESSAGE for row in rows):
        return "Sizes as nccl-tests counts them: the largest buffer of any rank."
    return "The number of ranks is not known for all: those sizes are of one rank's part."


def _bin(row: Row) -> str:
    """Name a bin; an exact size has its bytes too, because two sizes may round to one."""
    low = number(row, "from_bytes")
    high = number(row, "below_bytes")
    if low is None or high != low + 1:
        return text(row, "bin")
    return f"{format_bytes(low)}\n{low:.0f} B" if low >= 1024 else format_bytes(low)


def _series(row: Row) -> str:
    words = (text(row, key) for key in ("collective", "dtype", "group", "phase"))
    return " ".join(word for word in words if word) or "all"


def _hover(row: Row, per: str) -> str:
    return (
        f"{text(row, 'series')}\n"
        f"{text(row, 'bin')} ({text(row, 'size_is')})\n"
        f"{number(row, 'calls_per_rank') or 0:.6g} calls per {per}, {row['calls']} in all\n"
        f"{format_bytes(number(row, 'bytes_per_rank') or 0)} per {per}"
    )
