"""Communicators by what they are made of, each made once per launch."""

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from stepmark.bench.agree import agreed
from stepmark.bench.collectives.nccl_api import NcclCommunicator
from stepmark.bench.collectives.torch_api import TorchCommunicator
from stepmark.bench.ranks import Ranks
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
        for one in list(self._made.values()):
            one.abort()

    def close(self) -> None:
        """Every rank calls it. Ranks meet before and after: teardown races otherwise."""
        self._ranks.barrier()
        for one in self._made.values():
            one.close()
        self._made = {}
        self._ranks.barrier()

    @staticmethod
    def _key(case: CommCase) -> object:
        return case.api, case.backend, tuple(case.communicators), case.max_ctas

    def _make(self, case: CommCase, members: list[tuple[int, ...]]) -> Communicator:
        if case.api is Api.NCCL:
            return NcclCommunicator(self._ranks, members, case.max_ctas)
        return TorchCommunicator(self._ranks, members, case.backend, case.max_ctas)
