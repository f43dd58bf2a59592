"""Histograms of messages to rows and text: bins, groupings, totals, aligned lines.

A size is the message as nccl-tests counts it; where the number of ranks is unknown it is what
one rank's call says, and the row says so ("per rank"). No binning loses a call or a byte.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.cases.message import RECV, SEND, Histogram, MessageKind, message_bytes, summed
from stepmark.findings.expected import Expected
from stepmark.findings.log_facts import MAX_RANKS
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import GB, KIB, MIB, format_bytes, parse_bytes
from stepmark.model.collectives import Collective, busbw_factor
from stepmark.tables.columns import BYTES, COUNT, MEAN, NUMBER, SECONDS, Column, Row, given
from stepmark.tables.table import Table

BY = ("collective", "dtype", "group", "phase")
MESSAGE = "message"
PER_RANK = "per rank"
# CrayPat's bins of message sizes.
CRAYPAT = (16, 256, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
POW2 = (1, *(2**power for power in range(1, 51)))
FEW_SIZES = 16  # more distinct ones are binned unless asked otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Lower edges, ascending, of all bins but the first; "exact" has none."""

    name: str
    edges: tuple[int, ...]

    def of(self, num_bytes: int) -> tuple[int, int | None]:
        """Return [low, high) that a size falls into; high is None for the last bin."""
        if self.name == "exact":
            return num_bytes, num_bytes + 1
        place = bisect_right(self.edges, num_bytes)
        low = self.edges[place - 1] if place else 0
        return low, self.edges[place] if place < len(self.edges) else None

    def label(self, low: int, high: int | None) -> str:
        """Return e.g. '256 B<=<4 KiB', '<16 B', '>=16 MiB', or an exact size in bytes."""
        if self.name == "exact":
            return str(low)
        if high is None:
            return f">={format_bytes(low)}"
        return f"{f'{format_bytes(low)}<=' if low else ''}<{format_bytes(high)}"


def parse_bins(name: str) -> Bins:
    """Parse craypat, pow2, exact, or edges such as 1K,64K,1M. Raises ConfigError."""
    edges_by_name = {"craypat": CRAYPAT, "pow2": POW2, "exact": ()}
    if (key := name.strip().lower()) in edges_by_name:
        return Bins(name=key, edges=edges_by_name[key])
    allowed = "craypat, pow2, exact, or ascending sizes above 0 such as 1K,64K,1M,16M"
    try:
        edges = tuple(parse_bytes(part, "bins") for part in name.split(",") if part.strip())
    except ConfigError:
        raise ConfigError("bins", name, allowed) from None
    if not edges or list(edges) != sorted(set(edges)) or not edges[0]:
        raise ConfigError("bins", name, allowed)
    return Bins(name="edges", edges=edges)


def default_bins(histogram: Histogram) -> Bins:
    """Return a bin for each size while they are few, else powers of two."""
    sizes = {size_of(kind)[0] for kind in histogram}
    return parse_bins("exact" if len(sizes) <= FEW_SIZES else "pow2")


def parse_by(words: str) -> tuple[str, ...]:
    """Parse collective,dtype,group,phase or fewer. Raises ConfigError."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    for word in names:
        if word not in BY:
            raise ConfigError("by", word, f"some of {','.join(BY)}")
    return tuple(key for key in BY if key in names)


def with_ranks(histogram: Histogram, num_ranks: int) -> Histogram:
    """Give this number of ranks to kinds without one. Raises ConfigError below 1."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ConfigError("ranks", num_ranks, "from 1 to 16777216")
    return summed(
        (kind if kind.num_ranks else _sized(kind, num_ranks), tally)
        for kind, tally in histogram.items()
    )


def _sized(kind: MessageKind, num_ranks: int) -> MessageKind:
    size = kind.message_bytes
    if size is None:
        size = message_bytes(kind.collective, kind.call_bytes, num_ranks)
    return replace(kind, num_ranks=num_ranks, message_bytes=size)


def calls_and_bytes(histogram: Histogram) -> tuple[int, int]:
    """Return the number of calls, and their bytes."""
    calls = sum(tally.calls for tally in histogram.values())
    return calls, sum(tally.calls * size_of(kind)[0] for kind, tally in histogram.items())


def size_of(kind: MessageKind) -> tuple[int, str]:
    """Return bytes, and whether they are of the message or of one rank."""
    if kind.message_bytes is None:
        return kind.call_bytes, PER_RANK
    return kind.message_bytes, MESSAGE


def ranks_seen(histogram: Histogram) -> int:
    """Return the least number of ranks that sent these messages."""
    return max((tally.ranks for tally in histogram.values()), default=0)


def rows(
    histogram: Histogram,
    *,
    by: Sequence[str] = BY,
    bins: Bins | None = None,
    num_ranks_seen: int | None = None,
    expected: Mapping[MessageKind, Expected] | None = None,
) -> list[Row]:
    """Return one row per bin and value of `by`; per-rank figures are means over all ranks."""
    bins = bins or default_bins(histogram)
    num_ranks = num_ranks_seen or ranks_seen(histogram) or 1
    cells: dict[tuple[object, ...], Histogram] = {}
    for kind, tally in histogram.items():
        size, size_is = size_of(kind)
        key = (*(getattr(kind, name) for name in by), size_is, bins.of(size)[0])
        cells.setdefault(key, {})[kind] = tally
    table = []
    # Numbers by size, among texts.
    for key in sorted(
        cells, key=lambda key: [(v, "") if isinstance(v, int) else (0, str(v)) for v in key]
    ):
        messages = cells[key]
        low, high = bins.of(size_of(next(iter(messages)))[0])
        row: Row = dict(zip((*by, "size_is"), key, strict=False))
        row |= {"bin": bins.label(low, high), "from_bytes": low, "below_bytes": high}
        row |= _counts(messages, num_ranks)
        row |= _times(messages, num_ranks, expected) if expected is not None else {}
        table.append(row)
    return table


def _counts(messages: Histogram, num_ranks: int) -> Row:
    calls, num_bytes = calls_and_bytes(messages)
    sizes = {kind.num_ranks for kind in messages}
    timed = sum(tally.timed_calls for tally in messages.values())
    seconds = sum(tally.seconds for tally in messages.values())
    return {
        "num_ranks": next(iter(sizes)) if len(sizes) == 1 else None,
        "calls": calls,
        "calls_per_rank": calls / num_ranks,
        "bytes": num_bytes,
        "bytes_per_rank": num_bytes / num_ranks,
        "timed_calls": timed,
        "time_s": seconds if timed else None,
        "busbw_gb_s": _busbw(messages),
    }


def _busbw(messages: Histogram) -> float | None:
    """Return bytes x factor over time, of timed calls whose number of ranks is known."""
    wire = 0.0
    seconds = 0.0
    for kind, tally in messages.items():
        if not tally.timed_calls or kind.message_bytes is None or not tally.seconds:
            continue
        if kind.collective in (SEND, RECV):
            factor = 1.0
        elif kind.num_ranks:
            factor = busbw_factor(Collective(kind.collective), kind.num_ranks)
        else:
            continue
        wire += tally.timed_calls * kind.message_bytes * factor
        seconds += tally.seconds
    return wire / seconds / GB if seconds and wire else None


def _times(
    messages: Histogram, num_ranks: int, expected: Mapping[MessageKind, Expected]
) -> Row:
    """Return the expected time of a row's calls, and their time over it."""
    times = [(tally, expected[kind]) for kind, tally in messages.items() if kind in expected]
    covered = sum(tally.calls for tally, _ in times)
    total = sum(tally.calls * time.seconds for tally, time in times)
    should = sum(tally.timed_calls * time.seconds for tally, time in times)
    took = sum(tally.seconds for tally, _ in times if tally.timed_calls)
    marks = {time.mark for _, time in times}
    return {
        "expected_s": total if times else None,
        "expected_per_rank_s": total / num_ranks if times else None,
        "covered_calls": covered,
        "curve": ", ".join(sorted(marks)) if marks else "none",
        "times_expected": took / should if should else None,
    }


COLUMNS: tuple[Column[Row], ...] = (
    *map(given, BY),
    given("num_ranks", COUNT, "ranks"),
    given("bin", COUNT, "size"),
    given("size_is", heading="size is"),
    given("calls_per_rank_step", MEAN, "calls/rank/step"),
    given("calls_per_rank", MEAN, "calls/rank"),
    given("calls", COUNT),
    given("bytes_per_rank_step", BYTES, "bytes/rank/step"),
    given("bytes_per_rank", BYTES, "bytes/rank"),
    given("bytes", BYTES),
    given("time_s", SECONDS, "time"),
    given("latency_s", SECONDS, "latency"),
    given("waiting_s", SECONDS, "waiting"),
    given("busbw_gb_s", NUMBER, "busbw GB/s"),
    given("expected_per_call_s", SECONDS, "expected"),
    given("expected_per_rank_s", SECONDS, "expected/rank"),
    given("times_expected", NUMBER, "took / expected"),
    given("curve"),
)


def lines(table: Sequence[Row], hidden: Collection[str] = ()) -> list[str]:
    """Return rows as text. hidden: columns that are not shown."""
    return Table(table, [column for column in COLUMNS if column.name not in hidden]).text()


def summary(histogram: Histogram, num_ranks_seen: int | None = None) -> list[str]:
    """Return a line per collective: its calls, bytes and range of sizes."""
    num_ranks = num_ranks_seen or ranks_seen(histogram) or 1
    sentences = []
    for name in sorted({kind.collective for kind in histogram}):
        messages = {kind: t for kind, t in histogram.items() if kind.collective == name}
        sizes = sorted({size_of(kind)[0] for kind in messages})
        calls, num_bytes = calls_and_bytes(messages)
        span = format_bytes(sizes[0])
        span += f" to {format_bytes(sizes[-1])}" if len(sizes) > 1 else ""
        plural = "s" if calls != num_ranks else ""
        is_known = all(size_of(kind)[1] == MESSAGE for kind in messages)
        unknown = "" if is_known else ", sizes of one rank's part"
        sentences.append(
            f"{name}: {calls / num_ranks:.6g} call{plural} per rank, {len(sizes)} "
            f"size{'s' if len(sizes) > 1 else ''} ({span}{unknown}), "
            f"{format_bytes(num_bytes / num_ranks)} per rank"
        )
    return sentences


def unknown_ranks(histogram: Histogram) -> str:
    """Return a line about kinds whose message size is unknown; "" where all are known."""
    calls = sum(tally.calls for kind, tally in histogram.items() if kind.message_bytes is None)
    if not calls:
        return ""
    return (
        f"the number of ranks is unknown for {calls} calls: their sizes are one rank's part; "
        "--ranks N gives it"
    )
