"""Remarks on measured collectives: comment lines of a table, and matrices of pairs of ranks.

Also the last lines of a run about collectives, one finding per line.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from stepmark.cases.comm_case import CommCase, default_mode
from stepmark.cases.fields import in_words
from stepmark.cases.record import DeviceInfo
from stepmark.ground.fit import MIN_POINTS, Segment, piecewise
from stepmark.ground.grouping import group_by
from stepmark.ground.units import GB, format_bytes, format_time, plural
from stepmark.model.collectives import FACTS, Collective
from stepmark.tables.columns import COUNT, NUMBER, TEXT, Row, digits, given, number, text
from stepmark.tables.row_tables import LEAD, describe, grouped, statuses, validity_counts
from stepmark.tables.table import Table

# A rank is named if it delays the others by this share of the time and by this long, in at
# least this share of the sizes.
WAIT_SHARE = 0.05
WAIT_S = 1e-6
OF_SIZES = 1 / 3
NO_STRAGGLER = "slowest rank: none that delays the others"
# A fit that misses a point by more than this is not shown.
WORST_FIT = 0.3

MODES = {
    "queued-ahead": "calls back to back on the stream, enqueued before the first one starts",
    "queued": "calls back to back on the stream, as nccl-tests",
    "graph": "calls captured into one graph, as nccl-tests -G",
    "blocking": "the host waits for each call, as nccl-tests -z",
}


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return comment lines below one table; none for pairs, which have a matrix."""
    ran = [row for row in rows if number(row, "time_s")]
    if not ran or FACTS[Collective(text(ran[0], "collective"))].pair:
        return []
    lines = [_spread(ran), *straggler(ran), *fits(ran), _host(ran), *_beside(ran)]
    if counted := validity_counts(ran):
        lines.append(f"doubtful: {counted}; --wide shows which")
    return [f"# {line}" for line in lines if line]


def setting_line(rows: Sequence[Row]) -> str:
    """Return how the calls were made: the mode and all that is not the default."""
    row = rows[0]
    mode = text(row, "mode")
    api = "torch.distributed" if row["api"] == "torch" else "libnccl"
    how = MODES[mode] if row["device"] != "cpu" else MODES[mode].replace(" on the stream", "")
    words = [f"mode {mode} ({how})", f"{api}, backend {row['backend']}"]
    words += [note for note in [issued_from(rows)] if note]
    words += [f"{row['num_ranks']} ranks each, all groups in one row"] if row["split"] else []
    words += in_words(CommCase, row)
    return f"# {'; '.join(words)}"


def issued_from(rows: Sequence[Row]) -> str:
    """Return what issued calls of libnccl, where samples have the host's time; "" elsewhere."""
    joined = ", ".join(text(row, "method") for row in rows if row["api"] == "nccl")
    methods = {method.partition("/")[0] for method in joined.split(", ")}
    methods &= {"queued", "queued-compiled"}
    if not methods:
        return ""
    if methods == {"queued-compiled"}:
        return "a compiled loop issues the calls"
    return (
        "Python issues the calls, which takes the host longer than the compiled loop that a C "
        "compiler would give"
    )


def straggler(rows: Sequence[Row]) -> list[str]:
    """Return a line about the rank that delays the others."""
    if not FACTS[Collective(text(rows[0], "collective"))].synchronizing:
        return []
    sizes = {row["size_bytes"] for row in rows}
    costly = [
        row
        for row in rows
        if row["waited_for_rank"] is not None
        and (wait := number(row, "waited_for_s") or 0.0) > WAIT_S
        and wait > WAIT_SHARE * (number(row, "time_s") or 0.0)
    ]
    of_rank = Counter(
        rank for rank, _ in {(row["waited_for_rank"], row["size_bytes"]) for row in costly}
    )
    rank, num_sizes = max(of_rank.items(), key=lambda item: item[1], default=(None, 0))
    if num_sizes < OF_SIZES * len(sizes) or not num_sizes:
        return [NO_STRAGGLER]
    delayed = [row for row in costly if row["waited_for_rank"] == rank]
    worst = max(delayed, key=lambda row: number(row, "waited_for_s") or 0.0)
    wait = number(worst, "waited_for_s") or 0.0
    time_s = number(worst, "time_s") or 1.0
    return [
        f"slowest rank: {rank}, which delays the others in {num_sizes} of {len(sizes)} sizes "
        f"by up to {format_time(wait)} ({100 * wait / time_s:.0f} % of the time at "
        f"{format_bytes(number(worst, 'size_bytes') or 0)})"
    ]


def fits(rows: Sequence[Row]) -> list[str]:
    """Return time = alpha + S / beta of each placement, by segment of sizes."""
    if text(rows[0], "collective") == Collective.BARRIER:
        return []
    lines = []
    for group in grouped(rows, ("placement",)):
        placement = group[0]["placement"]
        points = [(number(row, "size_bytes") or 0, number(row, "time_s") or 0) for row in group]
        segments = piecewise(points)
        if not segments:
            lines.append(f"fit {placement}: none, it needs {MIN_POINTS} sizes")
        elif max(segment.fit.worst_rel for segment in segments) > WORST_FIT:
            lines.append(f"fit {placement}: none, no line comes within {WORST_FIT:.0%}")
        else:
            lines += [f"fit {placement}, {_segment(segment)}" for segment in segments]
    return lines


def _segment(segment: Segment) -> str:
    beta = segment.fit.beta_bytes_per_s
    line = format_time(segment.fit.alpha_s)
    line += " whatever the size" if beta is None else f" + size / {beta / GB:.4g} GB/s"
    sizes = f"{format_bytes(segment.first_bytes)} to {format_bytes(segment.last_bytes)}"
    return f"{sizes}: {line}, off by at most {100 * segment.fit.worst_rel:.1f} %"


def _spread(rows: Sequence[Row]) -> str:
    samples = sorted(int(number(row, "n") or 0) for row in rows)
    launches = int(max(number(row, "launches") or 0 for row in rows))
    spreads = [s for row in rows if (s := number(row, "launch_spread_pct")) is not None]
    counts = f"{samples[0]} to {samples[-1]}" if samples[0] != samples[-1] else f"{samples[0]}"
    apart = f", medians of launches at most {max(spreads):.1f} % apart" if spreads else ""
    ending = "" if counts == "1" else "s"
    return f"{counts} sample{ending} each in {plural(launches, 'launch')}{apart}"


def _beside(rows: Sequence[Row]) -> list[str]:
    """Return how much collective and compute slow each other down, by size."""
    return [
        f"beside {row['beside']}, {format_bytes(number(row, 'size_bytes') or 0)}"
        f" {row['placement']}: {_times(row, 'slowdown')} its time alone, the compute"
        f" {_times(row, 'slowdown_beside')}"
        for row in rows
        if row["beside"]
    ]


def _times(row: Row, key: str) -> str:
    value = number(row, key)
    return "n/a" if value is None else f"x {value:.3g}"


def _host(rows: Sequence[Row]) -> str:
    issues = [value for row in rows if (value := number(row, "issue_s")) is not None]
    lates = [value for row in rows if (value := number(row, "late_s")) is not None]
    words = [f"host launch overhead {_range(issues)} per call"] if issues else []
    words += [f"arrival skew {_range(lates)}"] if lates else []
    return "; ".join(words)


def _range(values: Sequence[float]) -> str:
    low = format_time(min(values))
    high = format_time(max(values))
    return low if low == high else f"{low} to {high}"


# A link this far under the median (over it, for a time) is named.
SLOW = 0.9
_MOST_INTERMITTENT = 5  # links that the text lists

# A call whose issuing takes this share of its time is bound by the host.
HOST_SHARE = 0.5

_KINDS = {
    "p2p": ("bandwidth, one direction", "GB/s", True),
    "p2p_both": ("bandwidth per direction, both at once", "GB/s", True),
    "ping_pong": ("latency, one way of a ping-pong", "us", False),
}


_MATRIX_SETTING = ("dtype", "mode", "api")


class Link(NamedTuple):
    """One measured direction between two ranks."""

    source: int
    destination: int
    value: float
    best: float  # of its best sample: a slow link is slow even then


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMatrix:
    """Measured links between ranks."""

    family: str
    title: str
    unit: str
    more_is_better: bool
    size_bytes: int
    setting: str  # values of _MATRIX_SETTING
    host_bound: bool  # issuing a call takes about as long as the call
    links: tuple[Link, ...]  # by source, then by destination
    places: Mapping[int, str]  # by rank: its host, where ranks are on several
    doubts: tuple[str, ...]  # cases without samples or with reasons to doubt, counted

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for link in self.links for rank in link[:2]})

    def name(self, rank: int) -> str:
        return self.places.get(rank, str(rank))

    @property
    def median(self) -> float:
        return median(link.value for link in self.links)

    @property
    def slow(self) -> list[Link]:
        """Return links whose best sample is worse than SLOW of the median link, worst first.

        There is none where the host bounds the latency.
        """
        return [link for link in self.worse_links if self._is_worse(link.best)]

    @property
    def worse_links(self) -> list[Link]:
        """Return links that are as slow by their value, too, worst first."""
        worse = [link for link in self.links if self._is_worse(link.value)]
        return sorted(worse, key=lambda link: link.value, reverse=not self.more_is_better)

    def _is_worse(self, value: float) -> bool:
        low, high = sorted((value, self.median))
        is_far = low < SLOW * high and not self.host_bound
        return is_far and (value < self.median) is self.more_is_better


def places_of(devices: Sequence[DeviceInfo]) -> dict[int, str]:
    """Return the host of each rank, with the rank's number there if it has several.

    There is none for ranks of a single host.
    """
    by_host = {
        host: [device.rank for device in members]
        for host, members in group_by(devices, lambda device: device.host).items()
    }
    if len(by_host) < 2:
        return {}
    short = {host: host.partition(".")[0] for host in by_host}
    if len(set(short.values())) < len(short):
        short = {host: host for host in by_host}
    if len(by_host) == len(devices):
        return {device.rank: short[device.host] for device in devices}
    return {
        rank: f"{short[host]}/{index}"
        for host, ranks in by_host.items()
        for index, rank in enumerate(sorted(ranks))
    }


def matrices(rows: Sequence[Row], devices: Sequence[DeviceInfo] = ()) -> list[PairMatrix]:
    """Return bandwidths at the largest size measured, latencies at the smallest."""
    places = places_of(devices)
    pairs = (row for row in rows if row["pair"] and row["family"] in _KINDS)
    groups = grouped(pairs, ("family", *_MATRIX_SETTING))
    return [
        _matrix(measured, places, _doubts(group))
        for group in groups
        if (measured := [row for row in group if row["status"] == "measured"])
    ]


def _doubts(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return lines that count cases without samples, and reasons to doubt the others."""
    without = [row for row in rows if row["status"] != "measured"]
    num_partial = sum(text(row, "message").startswith("launch ") for row in rows)
    counted = validity_counts(rows)
    lines = (
        (without, f"without a result: {statuses(without)} (of {len(rows)})"),
        (num_partial, f"launches are missing: {num_partial} (of {len(rows)}); --csv has why"),
        (counted, f"doubtful: {counted}; --wide shows which"),
    )
    return tuple(line for is_any, line in lines if is_any)


def _matrix(
    rows: Sequence[Row], places: Mapping[int, str], doubts: tuple[str, ...]
) -> PairMatrix:
    family = text(rows[0], "family")
    title, unit, more_is_better = _KINDS[family]
    sizes = [int(number(row, "size_bytes") or 0) for row in rows]
    size = max(sizes) if more_is_better else min(sizes)
    links: dict[tuple[int, int], Link] = {}
    issues = []
    for row in rows:
        value = (
            number(row, "busbw_gb_s")
            if more_is_better
            else (number(row, "time_s") or 0.0) * 1e6
        )
        if row["size_bytes"] == size and value is not None:
            source, destination = map(int, text(row, "pair").split("-"))
            time_s = number(row, "time_s") or 0.0
            min_s = number(row, "min_s") or 0.0
            share = min_s / time_s if time_s else 1.0
            best = value / share if more_is_better else value * share
            links[source, destination] = Link(source, destination, value, best)
            # One call goes there and back, the time is one way.
            issues.append((number(row, "issue_s") or 0.0) / 2 / time_s if time_s else 0.0)
    return PairMatrix(
        family=family,
        title=title,
        unit=unit,
        more_is_better=more_is_better,
        size_bytes=size,
        setting=" ".join(text(rows[0], key) for key in _MATRIX_SETTING),
        host_bound=not more_is_better
        and rows[0]["mode"] not in ("graph", "queued-ahead")
        and median(issues) > HOST_SHARE,
        links=tuple(link for _, link in sorted(links.items())),
        places=places,
        doubts=doubts,
    )


def matrix_lines(matrix: PairMatrix) -> list[str]:
    """Return the matrix, source by line and destination by column, then the slow links."""
    columns = [
        given("from", TEXT if matrix.places else COUNT, "from \\ to"),
        *(given(matrix.name(rank), NUMBER) for rank in matrix.ranks),
    ]
    values = {link[:2]: digits(link.value, 3) for link in matrix.links}
    rows: list[Row] = []
    for rank in matrix.ranks:
        rates = {matrix.name(to): values.get((rank, to), "-") for to in matrix.ranks}
        rows.append({**rates, "from": matrix.name(rank) if matrix.places else rank})
    unit = f"{matrix.title} ({matrix.unit})"
    return [
        f"{unit}, {format_bytes(matrix.size_bytes)} {matrix.setting}, medians of samples",
        *Table(rows, columns).text(),
        *slow_lines(matrix),
    ]


def slow_lines(matrix: PairMatrix) -> list[str]:
    """Return slow and intermittent links, the rule, and how much of the matrix is doubtful."""
    middle = f"median {digits(matrix.median, 3)}"
    if matrix.host_bound:
        whose = f"{middle} {matrix.unit}, which is the host's: --mode graph times the link"
        return [whose, *matrix.doubts]
    worse = f"{1 - SLOW:.0%} {'below' if matrix.more_is_better else 'above'} it"
    slow = matrix.slow
    intermittent = [link for link in matrix.worse_links if link not in slow]
    none = f"no slow link, {middle} {matrix.unit}: no best sample is {worse}"
    lines = [] if slow else [none]
    for link in (*slow, *intermittent[:_MOST_INTERMITTENT]):
        kind = "slow" if link in slow else "intermittent"
        best = "" if link in slow else f", best sample {digits(link.best, 3)}"
        ends = f"{matrix.name(link.source)} -> {matrix.name(link.destination)}"
        lines.append(f"{kind}: {ends} {digits(link.value, 3)} {matrix.unit}, {middle}{best}")
    if len(intermittent) > _MOST_INTERMITTENT:
        lines.append(f"intermittent: {len(intermittent)} in all")
    return [*lines, *matrix.doubts]


_SETTING = ("collective", "dtype", "num_ranks", "mode", "api", "split", "beside")


def comm_lines(rows: Sequence[Row], devices: Sequence[DeviceInfo] = ()) -> list[str]:
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
    for matrix in matrices(rows, devices):
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
