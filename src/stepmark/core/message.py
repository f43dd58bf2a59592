"""Messages that a job sent: how often which size, by collective, type, group and phase."""

from dataclasses import dataclass

from stepmark.core.collectives import FACTS, Collective, Parts

SEND, RECV = "send", "recv"  # the sides of a pair, beside the names of collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKind:
    """What is counted together. call_bytes is what the call's `count` says on one rank.

    num_ranks and message_bytes (as nccl-tests counts: the largest buffer of any rank) are None
    where the source does not tell how many ranks take part.
    """

    collective: str  # as core/collectives names it; "send", "recv" for one side of a pair
    dtype: str
    group: str  # communicator: commId, process group's name; "" unknown
    num_ranks: int | None
    phase: str  # "forward", "backward", ... as far as the source tells; "" unknown
    call_bytes: int
    message_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many calls of a kind, over how many ranks, and their time where it is known."""

    calls: int  # over all ranks seen
    ranks: int  # of how many ranks calls were seen
    timed_calls: int = 0
    seconds: float = 0.0  # of the timed calls together


Histogram = dict[MessageKind, Tally]


def sized(
    collective: str, sent: int, received: int, num_ranks: int | None
) -> tuple[int, int | None]:
    """(call_bytes, message_bytes) of a call in which this rank sends and receives bytes.

    As nccl-tests counts (`*GetCollByteCount` in its sources; core.collectives): the count is a
    rank's part of a collective that splits its buffer, else the buffer. message_bytes is None
    where neither buffer nor num_ranks tells it, and of names unknown here.
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
    part, whole = (sent, received) if gathers else (received, sent)
    # Ranks other than the root lack the whole, but their part tells it.
    return part, whole or (part * num_ranks if num_ranks else None)
