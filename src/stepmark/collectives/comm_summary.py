"""Last lines of a run about collectives: one finding per line."""

from collections.abc import Sequence

from stepmark.cases.comm_case import CommCase, default_mode
from stepmark.cases.fields import in_words
from stepmark.collectives.comm_remarks import NO_STRAGGLER, matrices, slow_lines, straggler
from stepmark.ground.units import format_bytes, format_time
from stepmark.model.collectives import Collective
from stepmark.tables.columns import Row, digits, number, text
from stepmark.tables.row_tables import LEAD, describe, grouped, statuses, validity_counts

_SETTING = ("collective", "dtype", "num_ranks", "mode", "api", "split", "beside")


def comm_lines(rows: Sequence[Row]) -> list[str]:
    """Return findings about collectives; none without rows."""
    if not rows:
        return []
    entries = [("collective", statuses(rows))]
    if counted := validity_counts(rows):
        entries.append(("doubtful", counted))
    right = [row for row in rows if row["status"] == "measured"]
    for group in grouped([row for row in right if not row["pair"]], _SETTING):
        entries += [("busbw" if group[0]["busbw_gb_s"] is not None else "time", _best(group))]
        entries += [
            ("straggler", f"{_setting(group[0])}: {line}")
            for line in straggler(group)
            if line != NO_STRAGGLER
        ]
    for matrix in matrices(rows):
        entries += [("pairs", f"{matrix.title}: {line}") for line in slow_lines(matrix)]
    entries += [("wrong", describe(row)) for row in rows if row["status"] == "wrong"]
    entries += [
        ("impossible", f"{describe(row)}: busbw above the link")
        for row in rows
        if row["over_limit"]
    ]
    return [f"{lead:<{LEAD}}{line}" for lead, line in entries]


def _setting(row: Row) -> str:
    words = [text(row, "collective"), text(row, "dtype"), f"x{row['num_ranks']}"]
    default = default_mode(
        text(row, "device"), text(row, "backend"), Collective(text(row, "collective"))
    )
    words += [text(row, "mode")] if row["mode"] != default else []
    words += [text(row, "api")] if row["api"] != "torch" else []
    return " ".join([*words, *in_words(CommCase, {name: row[name] for name in _SETTING[1:]})])


def _best(group: Sequence[Row]) -> str:
    """Return the highest busbw of one setting, and the shortest time."""
    shortest = min(number(row, "time_s") or 0.0 for row in group)
    best = max(group, key=lambda row: number(row, "busbw_gb_s") or 0.0)
    if best["busbw_gb_s"] is None:
        return f"{_setting(best)} {format_time(shortest)}"
    share = number(best, "pct_link")
    link = "" if share is None else f", {share:.0f} % of the link"
    size = format_bytes(number(best, "size_bytes") or 0)
    rate = digits(number(best, "busbw_gb_s"))
    return f"{_setting(best)} {rate} GB/s at {size}{link}; at least {format_time(shortest)}"
