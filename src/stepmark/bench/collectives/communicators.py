"""Communicators by what they are made of, each made once per launch."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from stepmark.bench.collectives import nccl
from stepmark.bench.collectives.torch_calls import Endpoint, Issue, bind
from stepmark.bench.ranks import Ranks, agreed
from stepmark.core.collectives import Api
from stepmark.core.comm_case import CommCase

# Each takes device memory and threads; a p2p matrix would make one per pair.
_MOST = 8


class Communicator(Protocol):
    """Ranks that can be reached together."""

    def bind(
        self, case: CommCase, index: int, send: torch.Tensor, recv: torch.Tensor
    ) -> Callable[[], object]: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Communicators:
    """The communicators of one launch."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._made: dict[object, Communicator] = {}

    def get(self, case: CommCase) -> Communicator:
        """For this case; every rank calls it. Raises CaseFailedError on all together."""
        members, key = case.communicators, self._key(case)
        if key not in self._made:
            if len(self._made) >= _MOST:
                oldest = next(iter(self._made))
                agreed(self._ranks, self._made.pop(oldest).close)
            self._made[key] = agreed(self._ranks, lambda: self._make(case, members))
        return self._made[key]

    def forget(self, case: CommCase) -> None:
        """After a failure: what carried this case is broken, perhaps. Every rank calls it."""
        broken = self._made.pop(self._key(case), None)
        if broken is not None:
            with contextlib.suppress(Exception):
                broken.abort()
            with contextlib.suppress(Exception):
                broken.close()
        self._ranks.barrier()

    def abort(self) -> None:
        """End whatever hangs; to be called from another thread."""
        for communicator in list(self._made.values()):
            communicator.abort()

    def close(self) -> None:
        """Every rank calls it. Ranks meet before and after: teardown races otherwise."""
        self._ranks.barrier()
        for communicator in self._made.values():
            communicator.close()
        self._made = {}
        self._ranks.barrier()

    @staticmethod
    def _key(case: CommCase) -> object:
        return case.api, case.backend, tuple(case.communicators), case.max_ctas

    def _make(self, case: CommCase, members: list[tuple[int, ...]]) -> Communicator:
        if case.api is Api.NCCL:
            return NcclCommunicator(self._ranks, members, case.max_ctas)
        return TorchCommunicator(self._ranks, members, case.backend, case.max_ctas)


class TorchCommunicator:
    """A process group, made anew: nothing of an earlier one is reused."""

    def __init__(
        self,
        ranks: Ranks,
        communicators: Sequence[tuple[int, ...]],
        backend: str,
        max_ctas: int | None,
    ) -> None:
        """Every rank of the world calls this, member or not."""
        self._device = ranks.device
        self._group: dist.ProcessGroup | None = None
        self._members: tuple[int, ...] = ()
        for members in communicators:
            group = dist.new_group(
                list(members), backend=backend, pg_options=_options(backend, max_ctas)
            )
            if ranks.rank in members:
                self._group, self._members = group, members

    def bind(self, case: CommCase, index: int, send: torch.Tensor, recv: torch.Tensor) -> Issue:
        """The call, ready to be made on the current stream."""
        assert self._group is not None
        end = Endpoint(
            group=self._group,
            members=self._members,
            case=case,
            index=index,
            send=send,
            recv=recv,
        )
        one = bind(end)
        if case.calls_per_group == 1:
            return one
        return functools.partial(self._coalesced, one, case.calls_per_group)

    def abort(self) -> None:
        """End whatever hangs in it; to be called from another thread."""
        stop: Callable[[], None] | None = getattr(self._group, "abort", None)
        if stop is not None:
            stop()

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _coalesced(self, one: Issue, count: int) -> None:
        manager: Any = getattr(dist, "_coalescing_manager")  # noqa: B009  no public name
        with manager(self._group, device=self._device):
            for _ in range(count):
                one()


def _options(backend: str, max_ctas: int | None) -> Any:
    if backend != "nccl" or max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = max_ctas
    return options


class NcclCommunicator:
    """This rank's communicator among several side by side; outside of all it has none."""

    def __init__(
        self, ranks: Ranks, communicators: Sequence[tuple[int, ...]], max_ctas: int | None
    ) -> None:
        """Every rank of the world calls this, member or not."""
        self._comm: nccl.Communicator | None = None
        mine = next((members for members in communicators if ranks.rank in members), None)
        if mine is None:
            ranks.gather(None)
            return

        def share(identity: bytes | None) -> bytes:
            everyone: list[bytes] = ranks.gather(identity)
            return everyone[mine[0]]

        self._comm = nccl.Communicator(
            num_ranks=len(mine),
            index=mine.index(ranks.rank),
            share=share,
            max_ctas=max_ctas,
        )

    def bind(
        self, case: CommCase, index: int, send: torch.Tensor, recv: torch.Tensor
    ) -> Callable[[], object]:
        """The call, ready to be made on what is the current stream now."""
        assert self._comm is not None
        stream = torch.cuda.current_stream().cuda_stream
        return self._comm.bind(case, index, send, recv, stream)

    def abort(self) -> None:
        if self._comm is not None:
            self._comm.abort()

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close()
            self._comm = None
