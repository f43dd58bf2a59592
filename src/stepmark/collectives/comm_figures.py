"""Figures of collectives."""

from collections.abc import Iterator, Sequence

from stepmark.cases.comm_case import SETTINGS, CommCase
from stepmark.cases.fields import declared
from stepmark.cases.record import RunInfo
from stepmark.collectives.comm_remarks import PairMatrix, matrices
from stepmark.ground.units import GB, format_bytes, format_time
from stepmark.model.device import DeviceSpec
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.figures import (
    INK,
    Axis,
    Cells,
    Figure,
    Kind,
    Mark,
    Panel,
    Series,
    unique,
)
from stepmark.tables.row_tables import describe, grouped

_SIZE = Axis(title="message size", base=2, words=format_bytes)
# What distinguishes curves of one figure; that which differs makes up their names.
_CURVE = ("placement", "redop", "root", *SETTINGS)
_WORDS_OF = {field.name: field.describe for field in declared(CommCase) if field.words}


def figures(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Iterator[Figure]:
    """Yield the figures of the collectives of a run; none for what was not measured."""
    right = [row for row in rows if row["status"] == "measured"]
    for group in _grouped([row for row in right if not row["pair"]], ("collective", "dtype")):
        if len({row["size_bytes"] for row in group}) >= 2:
            yield over_size(group, run, device)
    if any(row["slowdown"] or row["slowdown_beside"] for row in right):
        yield contention(right, run)
    for matrix in matrices(rows, run.environment.devices):
        yield heat_map(matrix)


def over_size(rows: Sequence[Row], run: RunInfo, device: DeviceSpec | None) -> Figure:
    """Return bus bandwidth and time over the message size, a curve for each setting."""
    curves = _grouped(rows, _CURVE)
    names = _names(curves)

    def series(key: str) -> list[Series]:
        return [
            Series(
                kind=Kind.CURVE,
                name=name,
                x=[number(row, "size_bytes") for row in curve],
                y=[number(row, key) or 0.0 for row in curve],
                hover=[_hover(row, run) for row in curve],
            )
            for name, curve in zip(names, curves, strict=True)
        ]

    has_link = device and device.link_bytes_per_s and any(row["pct_link"] for row in rows)
    return Figure(
        title=f"{text(rows[0], 'collective')} {text(rows[0], 'dtype')}",
        note="Median of the slowest rank: bus bandwidth, and time.",
        x=_SIZE,
        y=Axis(title="busbw (GB/s)", has_zero=True),
        series=series("busbw_gb_s") + ([_link(device, rows)] if device and has_link else []),
        right=Panel(
            x=_SIZE,
            y=Axis(title="time", base=10, words=format_time),
            series=series("time_s"),
        ),
        height=400 + 20 * (len(curves) // 5),
    )


def _link(device: DeviceSpec, rows: Sequence[Row]) -> Series:
    """Return the limit of the link over the sizes."""
    sizes = [size for row in rows if (size := number(row, "size_bytes"))]
    rate = (device.link_bytes_per_s or 0.0) / GB
    return Series(
        kind=Kind.LINE,
        name=f"{device.link_kind or 'link'}, {rate:g} GB/s per direction",
        x=[min(sizes), max(sizes)],
        y=[rate, rate],
        colour=INK,
        dash="dash",
    )


def contention(rows: Sequence[Row], run: RunInfo) -> Figure:
    """Return how much slower collective and compute are together than alone."""
    overlapped = [row for row in rows if row["beside"]]
    keys = ("collective", "dtype", *_CURVE)
    curves = _grouped(overlapped, keys)
    series = []
    for index, (curve, name) in enumerate(zip(curves, _names(curves, keys), strict=True)):
        for key, what, dash in (
            ("slowdown", text(curve[0], "collective"), "solid"),
            ("slowdown_beside", text(curve[0], "beside"), "dash"),
        ):
            measured = [row for row in curve if row[key] is not None]
            series.append(
                Series(
                    kind=Kind.CURVE,
                    name=f"{what}, {name}" if len(curves) > 1 else what,
                    x=[number(row, "size_bytes") for row in measured],
                    y=[number(row, key) for row in measured],
                    index=index,
                    dash=dash,
                    hover=[f"{number(row, key):.3f} x\n{_hover(row, run)}" for row in measured],
                )
            )
    return Figure(
        title="Beside compute",
        note="Time together over time alone: 1 is undisturbed.",
        x=_SIZE,
        y=Axis(title="time together / alone", base=10),
        series=series,
        marks=[Mark(y=(1, 1))],
        height=360,
    )


def heat_map(matrix: PairMatrix) -> Figure:
    """Return source by line, destination by column; a frame around each slow link."""
    names = [matrix.name(rank) for rank in matrix.ranks]
    place = {rank: index for index, rank in enumerate(matrix.ranks)}
    values = [link.value for link in matrix.links]
    # Half the median wide at least: a few percent of noise must not look like a pattern.
    low, high = (0.5, 1.05) if matrix.more_is_better else (0.95, 1.5)
    cells = Cells(
        x=[place[link.destination] for link in matrix.links],
        y=[place[link.source] for link in matrix.links],
        values=values,
        limits=(min([matrix.median * low, *values]), max([matrix.median * high, *values])),
        unit=matrix.unit,
        more_is_better=matrix.more_is_better,
        labels=[] if len(names) > 24 else [digits(value, 3) for value in values],
        hover=[
            f"{matrix.name(link.source)} to {matrix.name(link.destination)}: "
            f"{digits(link.value, 3)} {matrix.unit}"
            for link in matrix.links
        ],
    )
    around = {rank: (index - 0.5, index + 0.5) for rank, index in place.items()}
    ticks = dict(enumerate(names))
    end = len(names) - 0.5
    noun = "host" if matrix.places else "rank"
    return Figure(
        title=f"Pairs: {matrix.title}",
        note=f"{format_bytes(matrix.size_bytes)} {matrix.setting}; from line to column.",
        x=Axis(title=f"to {noun}", ticks=ticks, limits=(-0.5, end)),
        y=Axis(title=f"from {noun}", ticks=ticks, limits=(end, -0.5)),
        cells=cells,
        marks=[Mark(x=around[link.destination], y=around[link.source]) for link in matrix.slow],
        height=min(900, 150 + 44 * len(names)),
        width=min(1100, 260 + 76 * len(names)),
    )


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
    """Return rows that agree in all keys, each group by size."""
    groups = grouped(rows, keys)
    return [sorted(group, key=lambda row: number(row, "size_bytes") or 0) for group in groups]


def _names(curves: Sequence[Sequence[Row]], keys: Sequence[str] = _CURVE) -> list[str]:
    """Name each curve by the settings that not all have."""
    heads = [curve[0] for curve in curves]
    differing = [key for key in keys if len({head[key] for head in heads}) > 1]
    words = ([_word(head, key) for key in differing or ["placement"]] for head in heads)
    return unique([" ".join(filter(None, own)) or "plain" for own in words])


def _word(row: Row, key: str) -> str:
    if key in _WORDS_OF:
        return _WORDS_OF[key](row[key])
    if key == "num_ranks":
        return f"x{row[key]}"
    is_number = isinstance(row[key], int)
    return f"{key} {row[key]}" if is_number else text(row, key)


def _hover(row: Row, run: RunInfo) -> str:
    rate = number(row, "busbw_gb_s")
    low, high = (format_time(number(row, key) or 0.0) for key in ("p10_s", "p99_s"))
    lines = [
        describe(row),
        f"{format_time(number(row, 'time_s') or 0.0)}, {digits(rate)} GB/s busbw",
        f"p10 {low}, p99 {high}, {row['n']} samples in {row['launches']} launches",
        f"run {run.run_id}",
    ]
    return "\n".join(lines)
