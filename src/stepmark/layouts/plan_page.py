"""A plan as one HTML page: time over memory, ledgers of the best and of its neighbours."""

from collections.abc import Iterator, Sequence

from stepmark.ground.grouping import group_by
from stepmark.ground.units import GIB, format_time
from stepmark.layouts import plan_text
from stepmark.layouts.candidate import place
from stepmark.layouts.layout_search import LayoutSearch
from stepmark.layouts.plan_options import PlanOptions
from stepmark.predictions import ledger_page
from stepmark.predictions.prediction_grid import Row
from stepmark.tables.figures import INK, Axis, Figure, Kind, Series
from stepmark.tables.page import Page, Section, items, preformatted

_MOST_NEIGHBOURS = 4
_NOTE = (
    "Simulated layouts; those on the line are faster than all that need less memory. Points "
    "without a colour are estimates, at the least memory that such a layout can need."
)


def page(options: PlanOptions, searches: Sequence[LayoutSearch], text: Sequence[str]) -> Page:
    """Return the page. text: what the console prints."""
    first = searches[0].best.row
    several = len(searches) > 1
    return Page(
        title=f"Layouts of {first['name']} on {options.device}",
        headline=text[0],
        lead="" if several else "; ".join(line.strip() for line in text[1:4]),
        command="" if several else searches[0].command,
        sections=[
            Section("Layouts", [preformatted(*text[text.index("") + 1 :], is_table=True)]),
            *(section for each in searches for section in _sections(each, several=several)),
        ],
    )


def _sections(result: LayoutSearch, *, several: bool) -> Iterator[Section | Figure]:
    where = f" on {result.cluster.num_gpus} GPUs" if several else ""
    yield scatter(result, where)
    best = result.best
    neighbours = sorted(
        result.neighbours.items(), key=lambda item: float(item[1].row["step_s"])
    )
    for axis, neighbour in neighbours[:_MOST_NEIGHBOURS]:
        names = _name(axis, best.row), _name(axis, neighbour.row)
        yield Section(
            f"{axis} {neighbour.row[axis]} instead of {best.row[axis]}{where}",
            [items([place(best.row), place(neighbour.row)])],
            ledger_page.sections(
                best.ledger, neighbour.ledger, names, step=f"the step with {names[1]}"
            ),
        )


def _name(axis: str, row: Row) -> str:
    """Return what tells two layouts apart."""
    value = row[axis]
    return value if isinstance(value, str) else f"{axis} {value}"


def scatter(result: LayoutSearch, where: str = "") -> Figure:
    """Return step times over memory."""
    rows = result.rows
    by_framework = group_by(rows, lambda row: str(row["framework"]))
    front = sorted((row for row in rows if row["is_pareto"]), key=_memory)
    simulated = {id(each.candidate) for each in result.simulated}
    others = [each for each in result.estimates if id(each.candidate) not in simulated]
    estimated = Series(
        kind=Kind.POINTS,
        name="estimated",
        x=[each.least_bytes / GIB for each in others],
        y=[each.step_s for each in others],
        colour=INK,
        hover=[
            f"{place(each.candidate.row)}\nabout {format_time(each.step_s)}" for each in others
        ],
    )
    line = Series(
        kind=Kind.LINE,
        name="fastest for the memory",
        x=[_memory(row) for row in front],
        y=[row["step_s"] for row in front],
        colour=INK,
    )
    points = [
        Series(
            kind=Kind.POINTS,
            name=plan_text.FRAMEWORKS[name],
            x=[_memory(row) for row in own],
            y=[row["step_s"] for row in own],
            hover=[_hover(row) for row in own],
        )
        for name, own in by_framework.items()
    ]
    times = [*(row["step_s"] for row in rows), *(each.step_s for each in others)]
    most = result.cluster.most_bytes / GIB
    allowed = Series(
        kind=Kind.LINE,
        name=f"allowed: {most:.1f} GiB",
        x=[most, most],
        y=[min(times), max(times)],
        colour=INK,
        dash="dash",
    )
    return Figure(
        title=f"Time and memory{where}",
        note=_NOTE,
        x=Axis(title="GiB of a GPU", has_zero=True),
        y=Axis(title="step (s)"),
        series=[*([estimated] if others else []), allowed, line, *points],
        height=460,
    )


def _memory(row: Row) -> float:
    return float(row["reserved_bytes"]) / GIB


def _hover(row: Row) -> str:
    figures = f"{format_time(row['step_s'])}, {_memory(row):.1f} GiB"
    return f"{place(row)}\n{figures}, {row['tokens_per_s_gpu']:,.0f} tokens/s/GPU"
