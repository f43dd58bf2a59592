"""Tables of measured operators, and below them what takes most of a step."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stepmark.ground.grouping import group_by
from stepmark.ground.units import format_time, plural
from stepmark.operators.op_columns import OP_COLUMNS
from stepmark.tables.columns import COUNT, SECONDS, SHARE, Row, given, number, text
from stepmark.tables.row_tables import (
    describe,
    print_lines,
    print_rows,
    unique_cases,
    validity_counts,
)
from stepmark.tables.table import Table

if TYPE_CHECKING:
    from rich.console import Console

_STEP = ("model", "mbs", "scale", "num_ranks")


def print_operators(rows: Sequence[Row], console: "Console") -> None:
    """Print the rows, the operators of each step, and how many rows are doubtful."""
    print_rows(rows, console, OP_COLUMNS)
    print_lines(
        (
            *wrong_lines(rows),
            *missing_launches(rows),
            *step_lines(rows),
            *ceiling_lines(rows),
            *doubtful_lines(rows),
        ),
        console,
    )


def missing_launches(rows: Sequence[Row]) -> Iterator[str]:
    """Yield which launches of measured cases have no samples, and why."""
    messages = (text(row, "message") for row in unique_cases(rows) if row["launches"])
    for message, count in Counter(messages).items():
        if message.startswith("launch "):
            yield f"not measured, of {plural(count, 'case')}: {message}"


def wrong_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the errors of each wrong result, with their limits."""
    kinds = (("largest", "max_rel_err", "tolerance"), ("rms", "rms_err", "rms_tolerance"))
    for row in unique_cases(rows):
        if row["status"] == "wrong":
            errors = [
                f"{name} error {error:.1e} (limit {limit:.1e})"
                if error < math.inf
                else f"{name} error NaN or infinite"
                for name, column, of_limit in kinds
                if (error := number(row, column)) is not None
                and (limit := number(row, of_limit)) is not None
                and error > limit
            ]
            remarks = text(row, "check_remarks")
            # Parts of a result may have limits of their own, of which a row has the loosest.
            yield f"wrong  {describe(row)}: " + (
                ", ".join(filter(None, (*errors, remarks)))
                or "some elements are over the limits of their part"
            )


def ceiling_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how to learn the limit of the memory that neither a data sheet nor the run has."""
    unlimited = (row["ceiling"] is None and row["pct_hbm"] is None for row in rows)
    if any(map(all, zip(unlimited, (row["bound"] == "memory" for row in rows), strict=True))):
        yield "no data sheet of this machine: compare GB/s with those of stepmark op copy"


def doubtful_lines(rows: Sequence[Row]) -> list[str]:
    """Return how many cases each reason speaks against; none without any."""
    counted = validity_counts(unique_cases(rows))
    return ["", f"doubtful: {counted}"] if counted else []


def step_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how long the measured operators of a step take; nothing of several steps in one.

    A role is the sum of its passes, each by its fastest backend and element type.
    """
    parts = [row for row in rows if row["share_of_total_pct"] is not None]
    for own in group_by(parts, lambda row: tuple(row[name] for name in _STEP)).values():
        total_s = _sum(own)
        if abs(100 - math.fsum(number(row, "share_of_total_pct") or 0.0 for row in own)) > 0.1:
            continue  # measured at several rates
        first = own[0]
        mbs = "" if first["mbs"] is None else f", mbs {first['mbs']}"
        yield ""
        yield (
            f"A step of {text(first, 'model')}{mbs} spends {format_time(total_s)} in these "
            "operators, each by its fastest row, without communication and other operators:"
        )
        yield ""
        roles: list[Row] = [
            {
                "role": role,
                "calls_per_step": sum(
                    int(number(row, "calls_per_step") or 0) for row in of_role
                ),
                "time_per_step_s": _sum(of_role),
                "share_of_total_pct": 100 * _sum(of_role) / total_s,
            }
            for role, of_role in group_by(own, lambda row: text(row, "role")).items()
        ]
        roles.sort(key=lambda row: number(row, "time_per_step_s") or 0.0, reverse=True)
        columns = [
            given("role", heading="operator"),
            given("calls_per_step", COUNT, "x"),
            given("time_per_step_s", SECONDS, "in step"),
            given("share_of_total_pct", SHARE, "of total"),
        ]
        yield from Table(roles, columns).text()
        if missing := _num_missing(rows, own):
            verb = "was" if missing == 1 else "were"
            yield f"{plural(missing, 'operator')} of the step {verb} not measured, or wrong."


def _num_missing(rows: Sequence[Row], parts: Sequence[Row]) -> int:
    """Return how many operators of the step have no right measurement."""

    def places(own: Sequence[Row]) -> set[tuple[object, ...]]:
        return {tuple(row[name] for name in (*_STEP, "role", "pass", "shape")) for row in own}

    of_step = tuple(parts[0][name] for name in _STEP)
    planned = [
        row
        for row in rows
        if row["calls_per_step"] is not None and tuple(row[name] for name in _STEP) == of_step
    ]
    return len(places(planned) - places(parts))


def _sum(rows: Sequence[Row]) -> float:
    return math.fsum(number(row, "time_per_step_s") or 0.0 for row in rows)
