"""Message histograms of a job: calls by collective, type, size, group and phase."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepmark.model.collectives import ALL_TO_ALLS, FACTS, Collective, Parts, num_parts

# the two sides of a point-to-point message
SEND = "send"
RECV = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKind:
    """Key of a histogram. call_bytes is the size of the call's `count` on one rank.

    num_ranks and message_bytes (as in nccl-tests, the largest buffer of any rank) are None if
    the source does not say how many ranks take part.
    """

    collective: str  # name in model/collectives, or "send", "recv" for one side of a pair
    dtype: str
    group: str  # communicator: commId, process group's name; "" unknown
    num_ranks: int | None
    phase: str  # "forward", "backward", ... if the source says it; "" unknown
    call_bytes: int
    message_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Number of calls of a kind, number of ranks, and the time of calls if it is known."""

    calls: int  # over all ranks
    ranks: int  # number of ranks with such calls
    timed_calls: int = 0
    seconds: float = 0.0  # sum over the timed calls


Histogram = dict[MessageKind, Tally]


def summed(
    messages: Iterable[tuple[MessageKind, Tally]], ranks: Callable[[int, int], int] = max
) -> Histogram:
    """Add up kinds that occur several times, kinds in the order in which they first appear.

    ranks: of two tallies of a kind, the number of ranks: the larger, or of disjoint ranks the
    sum.
    """
    total: Histogram = {}
    for kind, tally in messages:
        before = total.get(kind, Tally(calls=0, ranks=0))
        total[kind] = Tally(
            calls=before.calls + tally.calls,
            ranks=ranks(before.ranks, tally.ranks),
            timed_calls=before.timed_calls + tally.timed_calls,
            seconds=before.seconds + tally.seconds,
        )
    return total


def message_bytes(collective: str, call_bytes: int, num_ranks: int | None) -> int | None:
    """Return the size as nccl-tests counts it; None where it depends on unknown ranks."""
    if collective in (SEND, RECV):
        return call_bytes
    if collective not in list(Collective):
        return None
    name = Collective(collective)
    if FACTS[name].parts is Parts.WHOLE:
        return call_bytes
    return None if num_ranks is None else call_bytes * num_parts(name, num_ranks)


def sized(
    collective: str, sent: int, received: int, num_ranks: int | None
) -> tuple[int, int | None]:
    """Return (call_bytes, message_bytes) of a call in which this rank sends and receives bytes.

    Sizes are counted as in nccl-tests (`*GetCollByteCount` in its sources; core.collectives):
    call_bytes is one rank's part if the collective splits its buffer, else the buffer.
    message_bytes is None if neither buffer nor num_ranks determines it, and for unknown names.
    """
    largest = max(sent, received)
    if collective == SEND:
        return sent, sent
    if collective == RECV:
        return received, received
    if collective not in list(Collective):
        return largest, None
    if FACTS[Collective(collective)].parts is Parts.WHOLE:
        return largest, largest
    if collective in ALL_TO_ALLS:
        return (largest // num_ranks if num_ranks else largest), largest
    gathers = collective in (Collective.ALL_GATHER, Collective.GATHER)
    part, total = (sent, received) if gathers else (received, sent)
    # Ranks other than the root do not have the whole buffer, but it follows from their part.
    return part, total or (part * num_ranks if num_ranks else None)
