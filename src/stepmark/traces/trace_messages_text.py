"""Messages of profiler traces as rows and text, and what a faster network would gain."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from stepmark.cases.message import Histogram, MessageKind
from stepmark.findings import histogram
from stepmark.findings.expected import Expected
from stepmark.ground.units import format_bytes, format_time
from stepmark.tables.columns import (
    BYTES,
    COUNT,
    MEAN,
    NUMBER,
    SECONDS,
    Row,
    digits,
    given,
    number,
    text,
)

Rank = TypeVar("Rank")
_HIDDEN = {
    "time_s",
    "calls",
    "calls_per_rank",
    "bytes",
    "bytes_per_rank",
    "expected_per_rank_s",
}
# Of the step, which a network without transfer time makes shorter by this: below the first
# no network is noticed, from the second on the network is what bounds it.
_NOTICEABLE = 0.1
_BOUND = 0.5
# Of exposed communication: waiting explains it from this on.
_MOST = 0.5


def rows(
    messages: Histogram,
    kernels: Mapping[MessageKind, int],
    partial: Collection[MessageKind],
    *,
    by: Sequence[str],
    bins: histogram.Bins | None,
    num_ranks: int,
    num_rank_steps: int,
    expected: Mapping[MessageKind, Expected] | None,
) -> list[Row]:
    """Return one row per bin and value of `by`.

    Times are of calls that were matched over ranks. latency_s: mean of the shortest kernel of
    any rank; waiting_s: mean of what kernels took beyond it. kernels: nanoseconds. partial:
    kinds of which some ranks have no trace: the shortest kernel of all is unknown.
    """
    bins = bins or histogram.default_bins(messages)
    untimed = {kind: replace(messages[kind], timed_calls=0, seconds=0.0) for kind in partial}
    complete = messages | untimed
    in_kernels = {
        kind: replace(tally, seconds=kernels.get(kind, 0) / 1e9)
        for kind, tally in complete.items()
    }
    tables = [
        histogram.rows(tallies, by=by, bins=bins, num_ranks_seen=num_ranks, expected=times)
        for tallies, times in ((complete, expected), (in_kernels, None))
    ]
    for row, whole in zip(*tables, strict=True):
        transfer = _mean(row)
        kernel = _mean(whole)
        row["latency_s"] = transfer
        row["waiting_s"] = None if transfer is None or kernel is None else kernel - transfer
        covered = number(row, "covered_calls")
        should = number(row, "expected_s")
        row["expected_per_call_s"] = should / covered if covered and should else None
        for key in ("calls", "bytes"):
            row[f"{key}_per_rank_step"] = (number(row, key) or 0) / num_rank_steps
    return tables[0]


def _mean(row: Row) -> float | None:
    """Return the mean time of the timed calls."""
    timed = number(row, "timed_calls")
    seconds = number(row, "time_s")
    return seconds / timed if timed and seconds is not None else None


def lines(table: Sequence[Row]) -> list[str]:
    """Return the rows as aligned text: per rank and step, times of one call."""
    return histogram.lines(table, _HIDDEN)


def copy_rows(copies: Iterable[tuple[str, int, int, int]], num_rank_steps: int) -> list[Row]:
    """Return copies by kind and by Perftools' bins of sizes, from (kind, bytes, number, ns)."""
    bins = histogram.parse_bins("craypat")
    cells: dict[tuple[str, int], list[int]] = {}
    for kind, size, count, nanoseconds in copies:
        low = bins.of(size)[0] if size >= 0 else -1
        cell = cells.setdefault((kind, low), [0, 0, 0])
        for place, value in enumerate((count, count * size, nanoseconds)):
            cell[place] += value
    table: list[Row] = []
    for (kind, low), (count, num_bytes, nanoseconds) in sorted(cells.items()):
        is_known = low >= 0
        seconds = nanoseconds / 1e9
        table.append(
            {
                "kind": kind,
                "bin": bins.label(*bins.of(low)) if is_known else "unknown",
                "from_bytes": low if is_known else None,
                "copies": count,
                "copies_per_rank_step": count / num_rank_steps,
                "bytes": num_bytes if is_known else None,
                "bytes_per_rank_step": num_bytes / num_rank_steps if is_known else None,
                "time_s": seconds,
                "time_per_rank_step_s": seconds / num_rank_steps,
                "gb_s": num_bytes / nanoseconds if is_known and nanoseconds else None,
            }
        )
    return table


COPY_COLUMNS = (
    given("kind", heading="copies"),
    given("bin", COUNT, "size"),
    given("copies_per_rank_step", MEAN, "copies/rank/step"),
    given("bytes_per_rank_step", BYTES, "bytes/rank/step"),
    given("time_per_rank_step_s", SECONDS, "time/rank/step"),
    given("gb_s", NUMBER, "GB/s"),
)
RANK_COLUMNS = (
    given("rank", COUNT),
    given("calls_per_step", MEAN, "calls/step"),
    given("step_s", SECONDS, "step"),
    given("communication_s", SECONDS, "communication"),
    given("exposed_s", SECONDS, "exposed"),
    given("transfer_s", SECONDS, "transfer"),
    given("waiting_s", SECONDS, "waiting"),
    given("exposed_waiting_s", SECONDS, "exposed waiting"),
    given("arrived_last", COUNT, "arrived last"),
    given("early_per_call_s", SECONDS, "early/call"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a faster network takes from the step at most: seconds, and the rank that limits it.

    A step of coupled ranks gets no shorter than that of the rank that gains least; a rank gains
    at most its exposed communication, and at most what its transfers save. At least it gains
    nothing: the host, or a slower rank, may be what the time waits for.
    """

    step_s: float
    seconds: float
    rank: object

    @property
    def share(self) -> float:
        return self.seconds / self.step_s


def gain(ranks: Sequence[Row], share: float, unknown_share: float) -> Gain | None:
    """Return the gain where transfers take less by a share of their time.

    ranks: rows of ranks, with mean times of a step. unknown_share: that of kernels whose call
    or transfer is unknown. None without times of steps.
    """
    steps = [number(row, "step_s") or 0.0 for row in ranks]
    if not all(steps) or not steps:
        return None
    bounds = {}
    for row in ranks:
        busy, exposed, transfer, unknown = (
            number(row, key) or 0.0
            for key in ("communication_s", "exposed_s", "transfer_s", "other_kernels_s")
        )
        # Of calls that run at once, a moment waits for one at most.
        transfer = min(transfer, busy)
        unknown = min(unknown, busy - transfer)
        bounds[row["rank"]] = min(exposed, transfer * share + unknown * unknown_share)
    least = min(bounds, key=lambda rank: bounds[rank])
    return Gain(step_s=sum(steps) / len(steps), seconds=max(bounds[least], 0.0), rank=least)


def verdict(ranks: Sequence[Row], reason: str) -> Iterator[str]:
    """Yield whether the job waits for its network, and why. reason: for unknown times."""
    best = gain(ranks, 1.0, 1.0)
    known = gain(ranks, 1.0, 0.0)
    if best is None or known is None:
        yield f"communication-bound: not known, because {reason}"
        return
    if not any(row["communication_s"] for row in ranks):
        yield f"not communication-bound: nothing is sent in {format_time(best.step_s)} per step"
        return
    exposed = [number(row, "exposed_s") or 0.0 for row in ranks]
    mean = sum(exposed) / len(exposed)
    span = f"; {format_time(min(exposed))} to {format_time(max(exposed))} by rank"
    waits = sum(number(row, "exposed_waiting_s") or 0.0 for row in ranks)
    waited = f"; {waits / sum(exposed):.0%} of it waiting for other ranks" if waits else ""
    yield (
        f"exposed communication: {format_time(mean)} of {format_time(best.step_s)} per step "
        f"({mean / best.step_s:.1%}{span if len(ranks) > 1 else ''}{waited})"
    )
    limit = f"a network without transfer time takes at most {best.share:.1%} from the step"
    limit += f" (rank {best.rank} gains least)" if len(ranks) > 1 else ""
    is_waiting = waits >= _MOST * sum(exposed)
    if known.share >= _NOTICEABLE:
        part = f" ({_NOTICEABLE:.0%} to {_BOUND:.0%} of the step)"
        bound = (
            f"partly communication-bound{part}"
            if known.share < _BOUND
            else "communication-bound"
        )
        doubt = ", though most exposed communication is waiting for others"
        yield f"{bound}{doubt if is_waiting else ''}: {limit}"
    elif best.share >= _NOTICEABLE:
        yield (
            f"perhaps communication-bound: {limit}, but how much of it is waiting for other "
            "ranks is not known"
        )
    elif mean / best.step_s < _NOTICEABLE:
        yield f"not communication-bound: {limit}"
    elif not is_waiting:
        yield (
            "communication-bound: not known, because much communication is exposed and calls "
            f"timed on all their ranks do not explain it as waiting; {limit}"
        )
    else:
        yield (
            "not communication-bound, though much communication is exposed: ranks wait for one "
            f"another; {limit}"
        )
    if len(ranks) > 1:
        yield slow_rank_line(ranks)


def slow_rank(counts: Mapping[Rank, int]) -> Rank | None:
    """Return the rank that arrives last in most calls; None where no rank does.

    counts: calls in which each rank arrives last.
    """
    if len(counts) < 2:
        return None
    slowest = max(counts, key=lambda rank: counts[rank])
    return slowest if 2 * counts[slowest] > sum(counts.values()) else None


def slow_rank_line(rows: Sequence[Row]) -> str:
    """Return which rank the others wait for, as text."""
    known = ((row["rank"], number(row, "arrived_last")) for row in rows)
    counts = {rank: int(times) for rank, times in known if times is not None}
    calls = sum(counts.values())
    if len(counts) < 2 or not calls:
        return "slow rank: not known, as no collective is timed on all its ranks"
    slowest = max(counts, key=lambda rank: counts[rank])
    text = f"rank {slowest} arrives last in {counts[slowest]} of {calls} collectives"
    if slow_rank(counts) is None:
        return f"slow rank: none; {text}"
    others = [row for row in rows if row["rank"] != slowest]
    waits, exposed = (
        [value for row in others for value in [number(row, name)] if value is not None]
        for name in ("waiting_s", "exposed_waiting_s")
    )
    waited = f", and the others wait {format_time(median(waits))} per step" if waits else ""
    waited += f", {format_time(median(exposed))} of it exposed" if exposed else ""
    return f"slow rank: {text}{waited}{' (median rank)' if len(waits) > 1 else ''}"


def gain_line(what: str, result: Gain) -> str:
    """Return the bounds of the step with another network."""
    low = result.step_s - result.seconds
    return (
        f"{what}: {format_time(low)} to {format_time(result.step_s)} per step, "
        f"0 to {result.share:.1%} less; the most if all that transfers save is exposed and "
        "nothing else waits at that time"
    )


def compared(
    messages: Histogram,
    num_rank_steps: int,
    others: Histogram,
    num_ranks: int,
    source: str,
) -> list[Row]:
    """Return the messages of the traces' steps beside those of another file of the job.

    A trace has a few steps, a log the whole job. So what can agree is how many steps' worth of
    each message the other source has: the same number for all. Types are left out, as NCCL
    sends some as others; and groups, which each source names in its own way.
    """
    trace_sizes = _sizes(messages)
    other_sizes = _sizes(others)
    table: list[Row] = []
    for key in sorted(trace_sizes.keys() | other_sizes.keys(), key=str):
        per_step = trace_sizes[key] / num_rank_steps if key in trace_sizes else None
        per_rank = other_sizes[key] / max(num_ranks, 1) if key in other_sizes else None
        table.append(
            {
                "source": source,
                **dict(zip(("collective", "num_ranks", "size_bytes"), key, strict=True)),
                "calls_per_rank_step": per_step,
                "calls_per_rank": per_rank,
                "steps_worth": per_rank / per_step if per_rank and per_step else None,
            }
        )
    return table


def _sizes(messages: Histogram) -> Counter[tuple[str, int | None, int]]:
    sums: Counter[tuple[str, int | None, int]] = Counter()
    for kind, tally in messages.items():
        size = histogram.size_of(kind)[0]
        sums[kind.collective, kind.num_ranks, size] += tally.calls
    return sums


def compared_lines(source: str, num_files: int, table: Sequence[Row]) -> Iterator[str]:
    """Yield what another source says of the messages, and where it disagrees."""
    head = f"{source} ({num_files} file{'s' if num_files > 1 else ''})"
    worth = Counter(round(number(row, "steps_worth") or 0, 6) for row in table)
    del worth[0]
    if not worth:
        yield f"{head} disagrees: it has none of the messages of these steps"
        return
    usual = max(worth, key=lambda steps: (worth[steps], steps == round(steps)))
    of_steps = [row for row in table if row["calls_per_rank_step"] is not None]
    odd = [row for row in of_steps if round(number(row, "steps_worth") or 0, 6) != usual]
    verb = "disagrees" if odd else "agrees"
    yield (
        f"{head} {verb}: {len(of_steps) - len(odd)} of {len(of_steps)} kinds of message are "
        f"there as often as in {usual:g} step{'' if usual == 1 else 's'}"
    )
    for row in odd:
        per_rank = number(row, "calls_per_rank")
        what = "none" if per_rank is None else f"{digits(per_rank)} per rank"
        per_step = digits(number(row, "calls_per_rank_step"))
        yield f"  {_message_text(row)}: {what}, where the traces have {per_step} per step"
    for row in table:
        if row["calls_per_rank_step"] is None:
            calls = digits(number(row, "calls_per_rank"))
            yield f"  {_message_text(row)}: {calls} per rank, none in the steps of the traces"


def _message_text(row: Row) -> str:
    size = format_bytes(number(row, "size_bytes") or 0)
    return f"{text(row, 'collective')} of {size} over {text(row, 'num_ranks') or '?'} ranks"
