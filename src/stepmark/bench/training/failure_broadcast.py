"""Broadcast the failure of one rank to the others, which may hang in a collective."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch.distributed as dist

from stepmark.bench.ranks import Ranks, cause_of

_POLL_S = 0.25
# A rank that does not hang learns of the failure by itself within this: ranks meet in `agreed`.
_GRACE_S = 3.0
# Numbered identically on every rank, so a stale failure cannot trigger a later one.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The failure of the first rank that failed."""

    rank: int
    position: int
    cause: str  # as Failed has it
    message: str
    trace: str


class FailureBroadcast:
    """Ends the wait of all ranks when one fails inside `with broadcast:`.

    on_blocked runs in a thread of rank 0, some seconds after another rank announced a failure,
    if this rank has not left the block by then.
    """

    def __init__(
        self, ranks: Ranks, position: int, on_blocked: Callable[[Problem], None]
    ) -> None:
        self._ranks, self._position, self._on_blocked = ranks, position, on_blocked
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._key = f"stepmark/failure/{next(_numbers)}"

    def __enter__(self) -> Self:
        if self._ranks.num_ranks > 1:
            self._store = dist.distributed_c10d._get_default_store()
            if self._ranks.rank == 0:
                self._thread = threading.Thread(
                    target=self._watch, name="failures", daemon=True
                )
                self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def announced(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the step so that its failure is announced before this rank waits for others."""

        def watched() -> Any:
            try:
                return step()
            except Exception as error:
                if self._store is not None:
                    cause, message, trace = cause_of(error)
                    problem = Problem(
                        rank=self._ranks.rank,
                        position=self._position,
                        cause=cause,
                        message=message,
                        trace=trace,
                    )
                    self._store.set(self._key, msgspec.json.encode(problem))
                raise

        return watched

    def _watch(self) -> None:
        while not self._left.wait(_POLL_S):
            if not self._store.check([self._key]):
                continue
            if self._left.wait(_GRACE_S):
                return
            self._on_blocked(msgspec.json.decode(self._store.get(self._key), type=Problem))
            return
