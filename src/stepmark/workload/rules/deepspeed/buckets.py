"""When DeepSpeed reduces gradients, and how much at a time: its buckets.

DeepSpeed 0.19.8, deepspeed/runtime: zero/stage_1_and_2.py
(reduce_independent_p_g_buckets_and_remove_grads, average_tensor, allreduce_and_scatter,
allreduce_no_retain), zero/stage3.py (the same, __avg_scatter_grads),
comm/coalesced_collectives.py (reduce_scatter_coalesced), engine.py (allreduce_no_retain).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stepmark.core.collectives import Collective
from stepmark.workload.rules.deepspeed.modules import Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of the data-parallel group. elements: of the whole buffer."""

    collective: Collective
    elements: int
    root: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Which rank owns which elements of the flat parameters of stages 1 and 2.

    starts: of each parameter by its index. The end is padded so that every rank's share has an
    even number of elements (nccl_start_alignment_factor).
    """

    starts: dict[int, int]
    share: int
    ranks: int

    @property
    def total(self) -> int:
        return self.share * self.ranks

    def slices(self, param: Param) -> Iterator[tuple[int, int]]:
        """(rank, elements) of a parameter that may lie on several ranks."""
        start = self.starts[param.index]
        end = start + param.numel
        while start < end:
            owner = start // self.share
            stop = min(end, (owner + 1) * self.share)
            yield owner, stop - start
            start = stop


def shares(params: Iterable[Param], ranks: int, *, round_robin: bool = False) -> Shares:
    """round_robin: parameter i first by i modulo ranks, then by i (_round_robin_reorder)."""
    listed = list(params)
    if round_robin:
        listed = [param for first in range(ranks) for param in listed[first::ranks]]
    starts, total = {}, 0
    for param in listed:
        starts[param.index] = total
        total += param.numel
    return Shares(starts=starts, share=-(-total // (2 * ranks)) * 2, ranks=ranks)


def all_reduced(params: Iterable[Param], at_least: int) -> Iterator[Message]:
    """Stage 0: a bucket goes when it holds more than this (engine.py: allreduce_no_retain)."""
    numel = 0
    for param in params:
        numel += param.numel
        if numel > at_least:
            yield Message(collective=Collective.ALL_REDUCE, elements=numel)
            numel = 0
    if numel:
        yield Message(collective=Collective.ALL_REDUCE, elements=numel)


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Gradients on their way. shares: of stages 1 and 2; None at stage 3.

    A parameter that does not fit sends what is there; one larger than the bucket goes with the
    next that is ready, alone.
    """

    size: int
    ranks: int
    shares: Shares | None
    scatter: bool  # reduce_scatter
    contiguous: bool  # contiguous_gradients
    multi_rank: bool  # use_multi_rank_bucket_allreduce
    params: list[Param] = field(default_factory=list)
    elements: int = 0

    def ready(self, param: Param) -> list[Message]:
        """What is sent before this parameter's gradient is put in."""
        sent = self.flush() if self.elements + param.numel > self.size else []
        self.params.append(param)
        self.elements += param.numel
        return sent

    def flush(self) -> list[Message]:
        """What is sent at the end of a backward pass, or for want of room."""
        if not self.params:
            return []
        if self.shares is None:
            sent = [self._scattered()]
        elif not (self.scatter and self.contiguous):
            sent = [Message(collective=Collective.ALL_REDUCE, elements=self.elements)]
        elif self.multi_rank:
            sent = list(self._cut(numel for _, numel in self._owned(self.shares)))
        else:
            sent = list(self._to_owners(self.shares))
        self.params.clear()
        self.elements = 0
        return sent

    def _scattered(self) -> Message:
        """Each parameter is padded to a multiple of the ranks; without scatter none is."""
        if not self.scatter and self.contiguous and self.elements <= self.size:
            return Message(collective=Collective.ALL_REDUCE, elements=self.elements)
        padded = sum(-(-param.numel // self.ranks) * self.ranks for param in self.params)
        return Message(collective=Collective.REDUCE_SCATTER, elements=padded)

    def _owned(self, shares: Shares) -> Iterator[tuple[int, int]]:
        """(owner, elements) of what lies on one rank each."""
        for param in self.params:
            yield from shares.slices(param)

    def _cut(self, numels: Iterable[int], root: int | None = None) -> Iterator[Message]:
        """Slices together until they are more than a bucket: only a large parameter's are."""
        collective = Collective.ALL_REDUCE if root is None else Collective.REDUCE
        held = 0
        for numel in numels:
            held += numel
            if held > self.size:
                yield Message(collective=collective, elements=held, root=root)
                held = 0
        if held:
            yield Message(collective=collective, elements=held, root=root)

    def _to_owners(self, shares: Shares) -> Iterator[Message]:
        by_owner: dict[int, list[int]] = {}
        for owner, numel in self._owned(shares):
            by_owner.setdefault(owner, []).append(numel)
        for owner, numels in by_owner.items():
            yield from self._cut(numels, owner)
