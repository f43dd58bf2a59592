"""Messages that a job sent: how often which size, by collective, type, group and phase."""

from dataclasses import dataclass


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
