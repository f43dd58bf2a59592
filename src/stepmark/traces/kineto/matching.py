"""Calls of the ranks of a job, matched into messages.

The nth call of a group is one message on all its ranks, as a communicator demands this order of
every rank. Its time is the shortest kernel of any rank: the last to arrive waits for nobody, so
that this is the transfer; what other ranks take beyond it is waiting.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from stepmark.cases.message import RECV, SEND, Histogram, MessageKind, Tally
from stepmark.ground.units import ranks_text
from stepmark.model.collectives import ALL_TO_ALLS, is_synchronizing
from stepmark.timeline.trace_columns import NONE, CommArgs, RankInfo
from stepmark.traces.kineto.instances import PHASES
from stepmark.traces.kineto.intervals import union
from stepmark.traces.kineto.messages import RankMessages, kind_of, members_of


@dataclass(slots=True)
class RankWaits:
    """Calls of one rank that were matched over ranks; times in ns.

    kernels, transfer, waited: time in which any of the calls is in that state, so that calls
    which run at once count once; one may wait while another transfers.
    """

    calls: int = 0
    timed: int = 0  # calls that are matched over all their ranks, which they synchronize
    kernels: int = 0  # time of these
    transfer: int = 0  # time: the end of each, as long as the shortest kernel of any rank
    waited: int = 0  # time: what is before it
    other_kernels: int = 0  # sum of kernels of other calls, or of no call
    last: int = 0  # timed calls in which its kernel was the shortest: it arrived last
    early: int = 0  # sum over these: how long before the last rank it arrived, if clocks agree
    # Of each timed call: start and end of the wait, which is before the transfer, and the
    # rank that arrived last, or NONE.
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    # Start and end of those timed calls in which it arrived last.
    transfers: list[tuple[MessageKind, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Messages:
    """Messages of all ranks in the selected steps.

    Times of `histogram` are transfers, over the timed calls; times in ns are of: kernels, those
    of the same calls; end_spread, the median of how far apart the ends of a call lie, which the
    error of the clocks does not exceed (None where no call tells it).
    partial: kinds of which some ranks have no trace, so that their transfers may contain
    waiting. unmatched, uncounted: why, and how many calls. groups: ranks of the world between
    which a kind is sent.
    """

    histogram: Histogram = field(default_factory=dict)
    kernels: dict[MessageKind, int] = field(default_factory=dict)
    ranks: dict[int, RankWaits] = field(default_factory=dict)
    num_steps: int = 0  # of all ranks together
    unmatched: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    end_spread: float | None = None
    clocks_agree: bool = False
    partial: set[MessageKind] = field(default_factory=set)
    groups: dict[MessageKind, set[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of one kind over all ranks; times in ns."""

    kind: MessageKind
    is_partial: bool = False  # some ranks of its group have no trace
    calls: int = 0
    ranks: set[int] = field(default_factory=set)
    groups: set[tuple[int, ...]] = field(default_factory=set)
    timed: int = 0
    transfer: int = 0
    kernels: int = 0
    signature: tuple[object, ...] = field(init=False)  # what is equal on all ranks of a call
    is_synchronizing: bool = field(init=False)

    def __post_init__(self) -> None:
        kind = self.kind
        self.signature = (kind.collective, kind.dtype, kind.message_bytes)
        if kind.collective in ALL_TO_ALLS:  # uneven parts differ over ranks
            self.signature = ("all_to_all", kind.dtype)
        elif kind.collective in (SEND, RECV):
            self.signature = ("pair", kind.dtype, kind.call_bytes)
        self.is_synchronizing = is_synchronizing(kind.collective)


@dataclass(slots=True, eq=False)
class _Call:
    """One call of one rank. transfer: the shortest kernel of any rank, where it is matched."""

    rank: int
    kind: _Kind
    step: int
    seq: int
    start: int
    end: int
    transfer: int | None = None
    last: int = NONE  # the rank that arrived last
    latest: int = NONE  # and when


# Group, its ranks, and of a pair also source and target: calls of one are in order.
_Channel = tuple[str, tuple[int, ...], tuple[int | None, int | None] | None]


def match(
    by_rank: Mapping[int, tuple[RankInfo, RankMessages]], has_step: Callable[[int], bool]
) -> Messages:
    """Return the messages of the selected steps, with calls matched over ranks."""
    result = Messages()
    channels: dict[_Channel, dict[int, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[MessageKind, _Kind] = {}
    for rank, (info, messages) in sorted(by_rank.items()):
        result.ranks[rank] = RankWaits()
        selected = messages.selected(has_step)
        result.num_steps += len(selected)
        for channel, call in _calls(
            rank, info, messages, set(selected), kinds, result.uncounted
        ):
            channels[channel][rank].append(call)
        for _, _, nanoseconds in messages.calls.unlinked:
            result.ranks[rank].other_kernels += nanoseconds
        result.uncounted["calls that say neither collective nor size (old torch)"] += (
            messages.calls.without_args
        )
    spreads: list[tuple[int, int, int]] = []
    is_disjoint = disjoint([info for info, _ in by_rank.values()]) != ""
    for channel, lists in channels.items():
        if is_disjoint:
            result.unmatched["traces do not overlap in time"] += sum(map(len, lists.values()))
            continue
        for group in _matched(channel, lists, by_rank.keys(), result.unmatched):
            _time(group, spreads)
    if spreads:  # arrivals are known if they differ by more than ends, as clocks do
        ends, starts, after = zip(*spreads, strict=True)
        result.end_spread = median(ends)
        result.clocks_agree = 2 * result.end_spread < median(starts) and min(after) >= 0
    for rank, waits in result.ranks.items():
        _sum_up([call for lists in channels.values() for call in lists.get(rank, ())], waits)
    for own in kinds.values():
        result.histogram[own.kind] = Tally(
            calls=own.calls,
            ranks=len(own.ranks),
            timed_calls=own.timed,
            seconds=own.transfer / 1e9,
        )
    result.kernels = {own.kind: own.kernels for own in kinds.values() if own.timed}
    result.partial = {own.kind for own in kinds.values() if own.is_partial}
    result.groups = {own.kind: own.groups for own in kinds.values()}
    return result


def disjoint(infos: Sequence[RankInfo]) -> str:
    """Return which traces were not taken at the same time; "" where all were."""
    late = max(infos, key=lambda info: info.first or 0)
    early = min(infos, key=lambda info: info.last or math.inf)
    if (late.first or 0) <= (early.last or math.inf):
        return ""
    return (
        f"The traces of ranks {early.rank} and {late.rank} do not overlap in time: they are of "
        "two jobs, or of two windows, and how ranks wait for each other is not known."
    )


def _calls(
    rank: int,
    info: RankInfo,
    messages: RankMessages,
    selected: set[int],
    kinds: dict[MessageKind, _Kind],
    uncounted: Counter[str],
) -> Iterator[tuple[_Channel, _Call]]:
    calls = messages.calls
    known: dict[tuple[int, int], tuple[_Channel, _Kind] | str] = {}
    columns = (calls.comm, calls.step, calls.phase, calls.seq, calls.start, calls.end)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for comm, step, phase, seq, start, end in rows:
        if step not in selected:
            continue
        if (comm, phase) not in known:
            args = calls.args[comm]
            members = members_of(args, info)
            kind = kind_of(args, members, PHASES[phase])
            if isinstance(kind, str):
                known[comm, phase] = kind
            else:
                pair = _pair(rank, kind, args, members)
                own = kinds.setdefault(kind, _Kind(kind))
                own.groups.add(_participants(members, pair))
                known[comm, phase] = ((kind.group, members, pair), own)
        series = known[comm, phase]
        if isinstance(series, str):
            uncounted[series] += 1
        else:
            yield series[0], _Call(rank, series[1], messages.numbers[step], seq, start, end)


def _pair(
    rank: int, kind: MessageKind, args: CommArgs, members: Sequence[int]
) -> tuple[int | None, int | None] | None:
    """Return source and target of a send or a receive, as ranks of the world."""
    if kind.collective not in (SEND, RECV):
        return None
    peer = args.target if kind.collective == SEND else args.source
    if peer is not None and not args.group and args.group_size is None:  # gloo: of the group
        peer = members[peer] if peer < len(members) else None
    return (rank, peer) if kind.collective == SEND else (peer, rank)


def _participants(
    members: Sequence[int], pair: tuple[int | None, int | None] | None
) -> tuple[int, ...]:
    """Return the ranks between which a message is sent, as far as they are known."""
    return tuple(rank for rank in (members if pair is None else pair) if rank is not None)


def _matched(
    channel: _Channel,
    lists: Mapping[int, list[_Call]],
    ranks: Collection[int],
    unmatched: Counter[str],
) -> Iterator[list[_Call]]:
    """Yield the calls of all ranks of each message that is matched; count the others."""
    group, members, pair = channel
    label = f"group {group}" if group else "a group"
    participants = _participants(members, pair)
    if not members or (pair is not None and len(participants) < 2):
        text = f"the ranks of {label} are not in the trace"
        unmatched[text] += sum(map(len, lists.values()))
        return
    present = [rank for rank in dict.fromkeys(participants) if rank in ranks]
    if len(present) < len(set(participants)):
        for calls in lists.values():
            for call in calls:
                call.kind.is_partial = True
    by_step: dict[int, dict[int, list[_Call]]] = defaultdict(lambda: {r: [] for r in present})
    for rank in present:
        for call in lists.get(rank, ()):
            by_step[call.step][rank].append(call)
    for step, own in sorted(by_step.items()):
        yield from _in_step(label, step, own, unmatched)


def _in_step(
    label: str, step: int, by_rank: Mapping[int, Sequence[_Call]], unmatched: Counter[str]
) -> Iterator[list[_Call]]:
    """Match by the number of the call where it is known, else the nth of a collective."""
    has_numbers = all(call.seq != NONE for calls in by_rank.values() for call in calls)
    groups: dict[tuple[object, int], list[_Call]] = defaultdict(list)
    counts: dict[object, dict[int, int]] = defaultdict(lambda: dict.fromkeys(by_rank, 0))
    for rank, calls in by_rank.items():
        for call in calls:
            name = call.seq if has_numbers else call.kind.signature[0]
            groups[name, counts[name][rank]].append(call)
            counts[name][rank] += 1
    for (name, _), calls in groups.items():
        numbers = counts[name]
        common = Counter(numbers.values()).most_common(1)[0][0]
        odd = next((number for number in numbers.values() if number != common), None)
        if odd is not None and not has_numbers:
            ranks = [rank for rank, number in numbers.items() if number == odd]
            text = (
                f"in step {step} {ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} "
                f"{odd} {name} call{'' if odd == 1 else 's'} of {label}, others {common}"
            )
        elif len(calls) < len(by_rank):
            text = f"in step {step} some ranks lack calls of {label} that others have"
        elif len({call.kind.signature for call in calls}) > 1:
            text = f"in step {step} ranks differ in a collective or size of {label}"
        else:
            yield calls
            continue
        unmatched[text] += len(calls)


def _time(calls: Sequence[_Call], spreads: list[tuple[int, int, int]]) -> None:
    """Note the transfer of a message on all its ranks, and how its ranks arrived and ended."""
    if any(call.end == NONE for call in calls):
        return
    known = [call.end - call.start for call in calls]
    shortest = min(known)
    for call in calls:
        call.transfer = shortest
    if not calls[0].kind.is_synchronizing or len(calls) < 2:
        return
    starts = [call.start for call in calls]
    ends = [call.end for call in calls]
    is_one = known.count(shortest) == 1
    for call in calls:
        call.latest = max(starts)
        call.last = calls[known.index(shortest)].rank if is_one else NONE
    spreads.append((max(ends) - min(ends), max(starts) - min(starts), min(ends) - max(starts)))


def _sum_up(calls: Sequence[_Call], waits: RankWaits) -> None:
    """Add the calls of a rank to its sums, and to those of their kinds."""
    timed = []
    for call in calls:
        kind = call.kind
        transfer = call.transfer
        kind.calls += 1
        kind.ranks.add(call.rank)
        if transfer is not None:
            kind.timed += 1
            kind.transfer += transfer
            kind.kernels += call.end - call.start
        if transfer is not None and kind.is_synchronizing and not kind.is_partial:
            timed.append((call.start, call.end - transfer, call.end))
            waits.waiting.append((call.start, call.end - transfer, call.last))
            if call.last in (NONE, call.rank):
                waits.transfers.append((kind.kind, call.end - transfer, call.end))
            waits.last += call.last == call.rank
            waits.early += max(call.latest - call.start, 0)
        elif call.end != NONE:
            waits.other_kernels += call.end - call.start
    waits.calls, waits.timed = len(calls), len(timed)
    start, wait_end, end = np.array(timed, np.int64).reshape(-1, 3).T
    waits.kernels, waits.waited = union(start, end).total, union(start, wait_end).total
    waits.transfer = union(wait_end, end).total
