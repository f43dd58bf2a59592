"""Communicators of torch.distributed: what a training framework uses."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepmark.bench.collectives.torch_calls import Issue, Seat, bind
from stepmark.bench.ranks import Ranks
from stepmark.core.comm_case import CommCase


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
        seat = Seat(
            group=self._group,
            members=self._members,
            case=case,
            index=index,
            send=send,
            recv=recv,
        )
        one = bind(seat)
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
