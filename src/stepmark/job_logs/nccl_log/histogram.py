"""Count the messages of a debug log by kind."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepmark.cases.message import Histogram, MessageKind, Tally, message_bytes
from stepmark.job_logs.nccl_log.communicators import CommHandle
from stepmark.job_logs.nccl_log.lines import (
    DTYPES,
    FIRST,
    NUMBER,
    OTHER,
    THREAD_BITS,
    Call,
    Calls,
)


@dataclass(slots=True)
class _GroupCalls:
    """Calls of a communicator by key, and on how many ranks each was issued."""

    members: list[CommHandle] = field(default_factory=list)
    totals: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    def count(self) -> None:
        """Count the calls of all members; those of most are equal, and are counted once."""
        copies = Counter(map(_calls_of, self.members))
        for (keys, unordered), num_copies in copies.items():
            own = Counter(array("I", keys))
            own.update(dict(unordered))
            for key, num_calls in own.items():
                self.totals[key] += num_calls * num_copies
                self.ranks[key] += num_copies

    def kinds(self, plain: Sequence[int], has_both: bool) -> dict[int, list[int]]:
        """Return the keys of each kind; plain: calls without operation and root, by number."""
        kinds: dict[int, list[int]] = {}
        for key in self.totals:
            thread = key & ~NUMBER if has_both else 0
            kinds.setdefault(thread | plain[key & NUMBER], []).append(key)
        if len(kinds) < len(self.totals):
            first = {key: keys[0] for keys in kinds.values() for key in keys}
            self.ranks.clear()
            for handle in self.members:
                own = set(handle.sequence.keys()) | handle.sequence.unordered.keys()
                self.ranks.update({first[key] for key in own})
        return kinds


def _calls_of(handle: CommHandle) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return the keys of the calls in order, and the numbers of those that have no order."""
    unordered = handle.sequence.unordered.items()
    calls = tuple((key, counter.calls) for key, counter in unordered)
    return handle.sequence.keys().tobytes(), calls


def histogram_of(
    handles: Sequence[CommHandle], calls: Calls, num_ranks: int | None
) -> tuple[Histogram, int]:
    """Return (messages by kind, calls that were counted at a rounded size).

    phase: PyTorch runs the backward pass in a thread of its own (autograd's), so where a
    process issued calls both from its first thread and from another, the first thread's are
    "forward" (including the optimizer's) and the others' "backward". It is "" where all calls
    of a process come from one of the two.
    """
    threads: dict[str, set[int]] = {}
    for handle in handles:
        threads.setdefault(handle.process, set()).update(handle.sequence.threads)
    groups: dict[tuple[str, int | None, bool], _GroupCalls] = {}
    for handle in handles:
        has_both = bool(handle.process) and threads[handle.process] >= {FIRST, OTHER}
        name = (handle.key, handle.num_ranks or num_ranks, has_both)
        groups.setdefault(name, _GroupCalls()).members.append(handle)
    tallies: Histogram = {}
    num_rounded = 0
    numbers: dict[Call, int] = {}
    plain = [
        numbers.setdefault(call._replace(op=None, root=None), number)
        for number, call in enumerate(calls.kinds)
    ]
    bytes_of = [call.num_bytes() for call in calls.kinds]  # by number
    sizes: dict[tuple[int, int | None], int | None] = {}
    for (group, size, has_both), own in groups.items():
        own.count()
        for merged, keys in own.kinds(plain, has_both).items():
            number = merged & NUMBER
            call = calls.kinds[number]
            total = own.totals[keys[0]]
            if len(keys) > 1:
                total = sum(own.totals[key] for key in keys)
            call_bytes = bytes_of[number]
            if call_bytes is None:
                calls.unread += total
                continue
            if (number, size) not in sizes:
                sizes[number, size] = message_bytes(call.collective, call_bytes, size)
            kind = MessageKind(
                collective=call.collective,
                dtype=DTYPES[call.dtype],
                group=group,
                num_ranks=size,
                phase=("backward", "forward", "")[merged >> THREAD_BITS] if has_both else "",
                call_bytes=call_bytes,
                message_bytes=sizes[number, size],
            )
            tallies[kind] = Tally(calls=total, ranks=own.ranks[keys[0]])
            if calls.rounded:
                rounded = (own.totals[key] for key in keys if key & NUMBER in calls.rounded)
                num_rounded += sum(rounded)
    return tallies, num_rounded
