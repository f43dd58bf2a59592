"""A rank that failed tells the others, who may hang in a collective that it never joins."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import torch.distributed as dist

from stepmark.bench.agree import cause_of
from stepmark.bench.ranks import Ranks

_POLL_S = 0.25
# So long a rank that does not hang needs to notice by itself: everyone meets in `agreed`.
_GRACE_S = 3.0
# Every rank makes the same alarms one after the other; an old problem rings none of the new.
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What the first rank that failed says."""

    rank: int
    position: int
    cause: str  # as Failed has it
    message: str
    trace: str


class Alarm:
    """Within `with alarm:` on every rank, a failure of one ends the wait of all.

    on_stuck runs in a thread of rank 0, some seconds after another rank raised the alarm, if
    this rank has not left the block by then.
    """

    def __init__(
        self, ranks: Ranks, position: int, on_stuck: Callable[[Problem], None]
    ) -> None:
        self._ranks, self._position, self._on_stuck = ranks, position, on_stuck
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._key = f"stepmark/alarm/{next(_numbers)}"

    def __enter__(self) -> Self:
        if self._ranks.num_ranks > 1:
            self._store = dist.distributed_c10d._get_default_store()
            if self._ranks.rank == 0:
                self._thread = threading.Thread(target=self._watch, name="alarm", daemon=True)
                self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def raised_by(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The step; if it fails, all ranks hear of it before this one waits for them."""

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
            told = msgspec.json.decode(self._store.get(self._key), type=Problem)
            self._on_stuck(told)
            return
