"""What the collectives of a run found, one finding per line, as report/summary.py."""

from collections import Counter
from collections.abc import Sequence

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.units import format_bytes, format_time
from stepmark.report.nccl_remarks import straggler
from stepmark.report.p2p_matrix import matrices, slow_lines
from stepmark.report.row_tables import describe
from stepmark.report.summary import LEAD

_WAY = ("collective", "dtype", "num_ranks", "mode", "api", "split", "beside")


def comm_lines(rows: Sequence[Row]) -> list[str]:
    """Empty without rows. Each line starts with what it is about, LEAD columns wide."""
    if not rows:
        return []
    statuses = Counter(text(row, "status") for row in rows)
    said = [("collective", ", ".join(f"{n} {status}" for status, n in statuses.items()))]
    right = [row for row in rows if row["status"] == "measured"]
    for held in _ways([row for row in right if not row["pair"]]):
        said += [("busbw" if held[0]["busbw_gb_s"] is not None else "time", _best(held))]
        said += [
            ("straggler", f"{_way(held[0])}: {line}")
            for line in straggler(held)
            if line.startswith("rank")
        ]
    for matrix in matrices(rows):
        said += [("pairs", f"{matrix.title}: {line}") for line in slow_lines(matrix)]
    said += [("wrong", describe(row)) for row in rows if row["status"] == "wrong"]
    said += [
        ("impossible", f"{describe(row)}: busbw above the link")
        for row in rows
        if row["over_limit"]
    ]
    return [f"{lead:<{LEAD}}{line}" for lead, line in said]


def _ways(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _WAY), []).append(row)
    return list(found.values())


def _way(row: Row) -> str:
    words = [text(row, "collective"), text(row, "dtype"), f"x{row['num_ranks']}"]
    words += [text(row, "mode")] if row["mode"] != "queued" else []
    words += [text(row, "api")] if row["api"] != "torch" else []
    words += [f"split {row['split']}"] if row["split"] else []
    words += [f"beside {row['beside']}"] if row["beside"] else []
    return " ".join(words)


def _best(held: Sequence[Row]) -> str:
    """The highest busbw of one way of calling, and the shortest time."""
    soonest = min(number(row, "time_s") or 0.0 for row in held)
    best = max(held, key=lambda row: number(row, "busbw_gb_s") or 0.0)
    if best["busbw_gb_s"] is None:
        return f"{_way(best)} {format_time(soonest)}"
    share = number(best, "pct_link")
    link = "" if share is None else f", {share:.0f} % of the link"
    size = format_bytes(number(best, "size_bytes") or 0)
    rate = digits(number(best, "busbw_gb_s"))
    return f"{_way(best)} {rate} GB/s at {size}{link}; at least {format_time(soonest)}"
