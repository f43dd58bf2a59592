"""Communicators of libnccl itself: every placement and reduction, at the cost of one C call."""

from collections.abc import Callable, Sequence

import torch

from stepmark.bench.collectives.nccl import Communicator
from stepmark.bench.ranks import Ranks
from stepmark.core.collectives import Collective
from stepmark.core.comm_case import CommCase


def unsupported(case: CommCase) -> str | None:
    """Why libnccl cannot run this case, as far as can be told beforehand."""
    if case.calls_per_group > 1 and case.collective is Collective.PING_PONG:
        return "grouped, the way back of a ping_pong would not wait for the way there"
    return None


class NcclCommunicator:
    """This rank's communicator among several side by side; outside of all it has none."""

    def __init__(
        self, ranks: Ranks, communicators: Sequence[tuple[int, ...]], max_ctas: int | None
    ) -> None:
        """Every rank of the world calls this, member or not."""
        self._comm: Communicator | None = None
        mine = next((members for members in communicators if ranks.rank in members), None)
        if mine is None:
            ranks.gather(None)
            return

        def share(identity: bytes | None) -> bytes:
            everyone: list[bytes] = ranks.gather(identity)
            return everyone[mine[0]]

        self._comm = Communicator(
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
