"""Message histograms of a job: calls by collective, type, size, group and phase."""

from dataclasses import dataclass

from stepmark.model.collectives import FACTS, Collective, Parts

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
    if collective in (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V):
        return (largest // num_ranks if num_ranks else largest), largest
    gathers = collective in (Collective.ALL_GATHER, Collective.GATHER)
    part, total = (sent, received) if gathers else (received, sent)
    # Ranks other than the root do not have the whole buffer, but it follows from their part.
    return part, total or (part * num_ranks if num_ranks else None)
