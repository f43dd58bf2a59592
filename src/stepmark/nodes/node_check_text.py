"""A verdict on nodes as rows and as the tables of a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepmark.ground.units import GB, TFLOP
from stepmark.nodes.node_check import NodeCheck
from stepmark.nodes.node_verdict import FigureVerdict, FleetVerdict, Outcome
from stepmark.tables.columns import (
    COUNT,
    NO_HEADING,
    NUMBER,
    RATIO,
    WHOLE_SHARE,
    Row,
    given,
)
from stepmark.tables.row_tables import print_lines
from stepmark.tables.table import Table

if TYPE_CHECKING:
    from rich.console import Console

_SCALES = {"FLOP/s": (TFLOP, "TFLOP/s"), "B/s": (GB, "GB/s")}
_MOST_FIGURES = 40  # of those that are healthy, on a terminal


def _interval(row: Row) -> str:
    return f"{RATIO.show(row['low'])} to {RATIO.show(row['high'])}" if row["low"] else ""


_COLUMNS = (
    given("where"),
    given("figure"),
    given("rate", NUMBER),
    given("unit", heading=NO_HEADING),
    given("pct_peak", WHOLE_SHARE, "of peak"),
    given("of_others", RATIO, "of others"),
    given("low", RATIO, "99 % interval", _interval),
    given("outcome"),
)
_NODE_COLUMNS = (
    given("node"),
    given("num_devices", COUNT, "GPUs"),
    given("outcome"),
    given("why"),
)


def rows(verdict: FleetVerdict) -> list[Row]:
    """Return one row per figure. A host without figures has one row, with its outcome."""
    table = [_row(figure) for figure in verdict.figures]
    places = {place.partition("/")[0] for f in verdict.figures for place in f.figure.where}
    return table + [
        dict.fromkeys(table[0] if table else ("where",), None)
        | {"where": node.host, "outcome": node.outcome.value, "reason": "; ".join(node.reasons)}
        for node in verdict.nodes
        if node.host not in places
    ]


def _row(verdict: FigureVerdict) -> Row:
    figure = verdict.figure
    scale, unit = _SCALES[figure.unit]
    value = figure.value
    return {
        "where": "-".join(figure.where),
        "figure": figure.name,
        "device": figure.device,
        "rate": None if value is None else value / scale,
        "unit": unit,
        "launches": len(figure.values),
        "pct_peak": 100 * value / figure.peak if value and figure.peak else None,
        "of_others": verdict.speed,
        "low": verdict.low,
        "high": verdict.high,
        "outcome": verdict.outcome.value,
        "reason": verdict.reason,
    }


def printed(verdict: FleetVerdict, checks: Sequence[NodeCheck], console: "Console") -> None:
    """Print the figures, the nodes with their reasons, and what was not tested."""
    good = [f for f in verdict.figures if f.outcome is Outcome.HEALTHY]
    shown = verdict.figures
    if len(good) > _MOST_FIGURES:
        shown = tuple(f for f in shown if f.outcome is not Outcome.HEALTHY)
        print_lines([f"{len(good)} healthy figures are not shown; --csv has them"], console)
    if shown:
        print_lines([*Table([*map(_row, shown)]).text(_COLUMNS), ""], console)
    nodes: list[Row] = []
    for node in verdict.nodes:
        first, *others = node.reasons or ("",)
        facts = {"num_devices": node.num_devices, "outcome": node.outcome.value}
        nodes.append({"node": node.host, **facts, "why": first})
        nodes += [{"why": reason} for reason in others]
    print_lines(Table(nodes).text(_NODE_COLUMNS), console)
    print_lines(_remarks(checks), console)


def _remarks(checks: Sequence[NodeCheck]) -> list[str]:
    """Return what was not tested, and notes; equal ones of several places are one line."""
    lines: list[str] = []
    for title in ("not_tested", "notes"):
        places: dict[str, list[str]] = {}
        for check in checks:
            for remark in getattr(check, title):
                places.setdefault(remark.text, []).append(remark.where)
        lines += ["", f"{title.replace('_', ' ')}:"] if places else []
        for what, where in places.items():
            more = f" and {len(where) - 4} more" if len(where) > 4 else ""
            lines.append(f"  {what} ({', '.join(where[:4])}{more})")
    return lines
