"""Communicators, each made once per launch, and the calls of torch.distributed."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench import nccl
from stepmark.collectives.bench.data import PREMUL_FACTOR, moves
from stepmark.measuring.ranks import Ranks, agreed
from stepmark.model.collectives import Api, Collective, RedOp

# Each takes device memory and threads; a p2p matrix would make one per pair.
_MOST = 8

Issue = Callable[[], object]

# torch 2.13 renamed these two; 2.11 knows the former names only.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
REDOPS = {
    RedOp.SUM: dist.ReduceOp.SUM,
    RedOp.PROD: dist.ReduceOp.PRODUCT,
    RedOp.MIN: dist.ReduceOp.MIN,
    RedOp.MAX: dist.ReduceOp.MAX,
    RedOp.AVG: dist.ReduceOp.AVG,
}


class TorchCommunicator:
    """A new process group: nothing of an earlier one is reused."""

    def __init__(self, ranks: Ranks, case: CommCase) -> None:
        """Make the groups; every rank of the world calls it, member or not."""
        self._device = ranks.device
        self._group: dist.ProcessGroup | None = None
        self._members: tuple[int, ...] = ()  # world ranks
        for members in case.communicators:
            group = dist.new_group(
                list(members), backend=case.backend, pg_options=_options(case)
            )
            if ranks.rank in members:
                self._group = group
                self._members = members

    def bind(self, case: CommCase, index: int, send: Tensor, recv: Tensor) -> Issue:
        """Return the call, ready to be made on the current stream."""
        assert self._group is not None
        issue = self._call(case, index, send, recv)
        if case.calls_per_group == 1:
            return issue
        return functools.partial(self._coalesced, issue, case.calls_per_group)

    def abort(self) -> None:
        """End blocked collectives; to be called from another thread."""
        stop: Callable[[], None] | None = getattr(self._group, "abort", None)
        if stop is not None:
            stop()

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _coalesced(self, issue: Issue, count: int) -> None:
        manager: Any = getattr(dist, "_coalescing_manager")  # noqa: B009  no public name
        with manager(self._group, device=self._device):
            for _ in range(count):
                issue()

    def _call(  # noqa: PLR0911, a row per collective
        self, case: CommCase, index: int, send: Tensor, recv: Tensor
    ) -> Issue:
        """Return the function of torch.distributed for the collective, with its arguments."""
        bound = functools.partial
        group = self._group
        root = self._members[case.root]
        at_root = index == case.root
        match case.collective:
            case Collective.ALL_REDUCE:
                return bound(dist.all_reduce, recv, op=_redop(case), group=group)
            case Collective.ALL_GATHER:
                return bound(all_gather, recv, send, group=group)
            case Collective.REDUCE_SCATTER:
                return bound(reduce_scatter, recv, send, op=_redop(case), group=group)
            case Collective.BROADCAST:
                return bound(dist.broadcast, recv, src=root, group=group)
            case Collective.REDUCE:
                return bound(dist.reduce, recv, dst=root, op=_redop(case), group=group)
            case Collective.ALL_TO_ALL:
                return bound(dist.all_to_all_single, recv, send, group=group)
            case Collective.ALL_TO_ALL_V:
                into = [row[index] for row in case.counts]
                counts = into, list(case.counts[index])
                return bound(dist.all_to_all_single, recv, send, *counts, group=group)
            case Collective.GATHER:
                parts = list(recv.chunk(case.num_ranks)) if at_root else None
                return bound(dist.gather, send, parts, dst=root, group=group)
            case Collective.SCATTER:
                parts = list(send.chunk(case.num_ranks)) if at_root else None
                return bound(dist.scatter, recv, parts, src=root, group=group)
            case Collective.BARRIER:
                places = [send.device.index] if send.device.type == "cuda" else None
                return bound(dist.barrier, group=group, device_ids=places)
            case _:
                return self._sends_and_receives(case, index, send, recv)

    def _sends_and_receives(
        self, case: CommCase, index: int, send: Tensor, recv: Tensor
    ) -> Issue:
        """Return sends and receives in one batch; in turn, where one waits for another."""
        operations = []
        for move in moves(case, index):
            part = (send if move.from_send else recv)[move.at : move.at + move.count]
            kind = dist.isend if move.sends else dist.irecv
            peer = self._members[move.peer]
            operations.append(dist.P2POp(kind, part, peer=peer, group=self._group))
        in_turn = case.collective is Collective.PING_PONG
        batches = [[operation] for operation in operations] if in_turn else [operations]

        def issue() -> None:
            for batch in batches:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return issue


def _redop(case: CommCase) -> Any:
    if case.redop is RedOp.MULSUM:
        make: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  no public name
        return make(PREMUL_FACTOR)
    return REDOPS[case.redop]


def _options(case: CommCase) -> Any:
    if case.backend != "nccl" or case.max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = case.max_ctas
    return options


Communicator = TorchCommunicator | nccl.Communicator


class Communicators:
    """The communicators of one launch; None for a rank outside of one of libnccl."""

    def __init__(self, ranks: Ranks, used_bytes: Callable[[], int] = lambda: 0) -> None:
        """used_bytes: of the device's memory, apart from what torch allocates."""
        self._ranks = ranks
        self._used_bytes = used_bytes
        self._communicators: dict[object, Communicator | None] = {}
        self._init_bytes: dict[object, int] = {}

    def get(self, case: CommCase) -> Communicator | None:
        """Return the case's; every rank calls it. Raises CaseFailedError on all together."""
        key = self._key(case)
        if key not in self._communicators:
            if len(self._communicators) >= _MOST:
                oldest = self._communicators.pop(next(iter(self._communicators)))
                agreed(self._ranks, lambda: oldest and oldest.close())
            before = self._used_bytes()
            self._communicators[key] = agreed(self._ranks, lambda: self._make(case))
            self._init_bytes[key] = self._used_bytes() - before
        return self._communicators[key]

    def init_bytes(self, case: CommCase) -> int:
        """Return the memory that making the case's communicator took on this rank."""
        return self._init_bytes[self._key(case)]

    def forget(self, case: CommCase) -> None:
        """Drop the case's communicator, which may be broken. Every rank calls it."""
        broken = self._communicators.pop(self._key(case), None)
        if broken is not None:
            with contextlib.suppress(Exception):
                broken.abort()
            with contextlib.suppress(Exception):
                broken.close()
        self._ranks.barrier()

    def abort(self) -> None:
        """End all blocked collectives; to be called from another thread."""
        for communicator in list(self._communicators.values()):
            if communicator is not None:
                communicator.abort()

    def close(self) -> None:
        """Close all; every rank calls it. Barriers before and after avoid races in teardown."""
        self._ranks.barrier()
        for communicator in self._communicators.values():
            if communicator is not None:
                communicator.close()
        self._communicators = {}
        self._ranks.barrier()

    @staticmethod
    def _key(case: CommCase) -> object:
        limits = (case.max_ctas, case.cta_policy)
        return case.api, case.backend, tuple(case.communicators), limits

    def _make(self, case: CommCase) -> Communicator | None:
        ranks = self._ranks
        if case.api is not Api.NCCL:
            return TorchCommunicator(ranks, case)
        members = next(
            (members for members in case.communicators if ranks.rank in members), None
        )
        if members is None:
            ranks.gather(None)  # matches the gather in `share` on the members
            return None

        def share(identity: bytes | None) -> bytes:
            identities: list[bytes] = ranks.gather(identity)
            return identities[members[0]]

        return nccl.Communicator(
            num_ranks=len(members),
            index=members.index(ranks.rank),
            share=share,
            max_ctas=case.max_ctas,
            cta_policy=case.cta_policy,
        )
