"""A verdict on nodes as rows and as the tables of a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepmark.ground.units import GB, TFLOP
from stepmark.nodes.node_check import NodeCheck
from stepmark.nodes.node_verdict import FigureVerdict, FleetVerdict, Outcome
from stepmark.tables.columns import Row, digits, text
from stepmark.tables.row_tables import print_lines
from stepmark.tables.table import aligned

if TYPE_CHECKING:
    from rich.console import Console

_SCALES = {"FLOP/s": (TFLOP, "TFLOP/s"), "B/s": (GB, "GB/s")}
_MOST_FIGURES = 40  # of those that are healthy, on a terminal
_HEAD = ("where", "figure", "rate", "", "of peak", "of others", "99 % interval", "outcome")


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
        cells = [_HEAD, *(_cells(_row(figure)) for figure in shown)]
        right = [False, False, True, False, True, True, True, False]
        print_lines([*aligned(cells, right), ""], console)
    nodes = [("node", "GPUs", "outcome", "why")]
    for node in verdict.nodes:
        first, *others = node.reasons or ("",)
        nodes.append((node.host, str(node.num_devices), node.outcome.value, first))
        nodes += [("", "", "", reason) for reason in others]
    print_lines(aligned(nodes, [False, True, False, False]), console)
    print_lines(_remarks(checks), console)


def _cells(row: Row) -> Sequence[str]:
    def show(name: str, form: str) -> str:
        return "" if row[name] is None else format(row[name], form)

    rate = row["rate"]
    return (
        text(row, "where"),
        text(row, "figure"),
        digits(rate) if isinstance(rate, float) else "",
        text(row, "unit"),
        f"{show('pct_peak', '.0f')} %" if row["pct_peak"] else "",
        show("of_others", ".3f"),
        f"{show('low', '.3f')} to {show('high', '.3f')}" if row["low"] else "",
        text(row, "outcome"),
    )


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
