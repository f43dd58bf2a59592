"""Transfers between pairs of ranks as matrices: bandwidth and latency, and which are slow."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stepmark.core.columns import Row, digits, number, text
from stepmark.core.units import format_bytes

# A link this far under the median (over it, for a time) is named.
SLOW = 0.9

# Where issuing a call takes this share of it, its time is the host's.
HOST_SHARE = 0.5

_KINDS = {
    "p2p": ("bandwidth, one direction", "GB/s", True),
    "p2p_both": ("bandwidth per direction, both at once", "GB/s", True),
    "ping_pong": ("latency, one way of a ping-pong", "us", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMatrix:
    """values[i][j] is from ranks[i] to ranks[j]; None where nothing was measured."""

    family: str
    title: str
    unit: str
    more_is_better: bool
    size_bytes: int
    setting: str  # dtype, mode and api
    ranks: tuple[int, ...]
    # The best that each link reached: a slow one is slow even then.
    best: tuple[tuple[float | None, ...], ...]
    host_bound: bool  # issuing a call takes about as long as the call
    values: tuple[tuple[float | None, ...], ...]

    @property
    def known(self) -> list[tuple[int, int, float]]:
        """(source, destination, value) of all measured links."""
        return [
            (self.ranks[i], self.ranks[j], value)
            for i, line in enumerate(self.values)
            for j, value in enumerate(line)
            if value is not None
        ]

    @property
    def median(self) -> float:
        return median(value for *_, value in self.known)

    @property
    def slow(self) -> list[tuple[int, int, float]]:
        """Links whose best sample is worse than SLOW of the median link, the worst first.

        None of a latency that is its host's.
        """
        if self.host_bound:
            return []
        found = [
            link
            for link, best in zip(self.known, self._bests, strict=True)
            if self._is_slow(best)
        ]
        return sorted(found, key=_value, reverse=not self.more_is_better)

    @property
    def _bests(self) -> list[float]:
        return [value for line in self.best for value in line if value is not None]

    def _is_slow(self, best: float) -> bool:
        if self.more_is_better:
            return best < SLOW * self.median
        return best * SLOW > self.median


def _value(link: tuple[int, int, float]) -> float:
    return link[2]


def matrices(rows: Sequence[Row]) -> list[PairMatrix]:
    """Bandwidths at the largest size measured, latencies at the smallest."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] == "measured" and row["pair"] and row["family"] in _KINDS:
            setting = " ".join(text(row, key) for key in ("dtype", "mode", "api"))
            groups.setdefault((text(row, "family"), setting), []).append(row)
    return [_matrix(family, setting, held) for (family, setting), held in groups.items()]


def _matrix(family: str, setting: str, held: Sequence[Row]) -> PairMatrix:
    title, unit, more_is_better = _KINDS[family]
    sizes = [int(number(row, "size_bytes") or 0) for row in held]
    size = max(sizes) if more_is_better else min(sizes)
    cells: dict[tuple[int, int], float] = {}
    bests: dict[tuple[int, int], float] = {}
    issues = []
    for row in held:
        value = (
            number(row, "busbw_gb_s")
            if more_is_better
            else (number(row, "time_s") or 0.0) * 1e6
        )
        if row["size_bytes"] == size and value is not None:
            source, destination = map(int, text(row, "pair").split("-"))
            cells[source, destination] = value
            time_s, min_s = number(row, "time_s") or 0.0, number(row, "min_s") or 0.0
            share = min_s / time_s if time_s else 1.0
            bests[source, destination] = value / share if more_is_better else value * share
            # One call goes there and back, the time is one way.
            issues.append((number(row, "issue_s") or 0.0) / 2 / time_s if time_s else 0.0)
    ranks = tuple(sorted({rank for pair in cells for rank in pair}))
    return PairMatrix(
        family=family,
        title=title,
        unit=unit,
        more_is_better=more_is_better,
        size_bytes=size,
        setting=setting,
        ranks=ranks,
        best=tuple(tuple(bests.get((i, j)) for j in ranks) for i in ranks),
        host_bound=not more_is_better
        and held[0]["mode"] != "graph"
        and median(issues) > HOST_SHARE,
        values=tuple(tuple(cells.get((i, j)) for j in ranks) for i in ranks),
    )


def matrix_text(found: PairMatrix) -> str:
    """The matrix, source by line and destination by column, then the slow links."""
    shown = [["" if v is None else digits(v, 3) for v in line] for line in found.values]
    width = max(len(cell) for line in [*shown, list(map(str, found.ranks))] for cell in line)
    lines = [
        f"{found.title} ({found.unit}), {format_bytes(found.size_bytes)} {found.setting}",
        "from \\ to" + "".join(f"  {rank:>{width}}" for rank in found.ranks),
    ]
    for rank, line in zip(found.ranks, shown, strict=True):
        lines.append(f"{rank:>9}" + "".join(f"  {cell or '-':>{width}}" for cell in line))
    return "\n".join([*lines, *slow_lines(found)]) + "\n"


def slow_lines(found: PairMatrix) -> list[str]:
    middle = f"median {digits(found.median, 3)}"
    if found.host_bound:
        return [f"{middle} {found.unit}, which is the host's: --mode graph times the link"]
    return [
        f"slow: {source} -> {destination} {digits(value, 3)} {found.unit}, {middle}"
        for source, destination, value in found.slow
    ] or [f"no slow link, {middle} {found.unit}"]
