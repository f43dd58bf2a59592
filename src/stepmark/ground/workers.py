"""Work in several processes of this program."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

from stepmark.ground.processes import tie_to_parent
from stepmark.ground.waiting import Waiting

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

_state: Any = None  # of the pool to which this process belongs


def cores() -> int:
    """Return the cores this process may use, among those of a launcher's ranks here."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Workers(Generic[S]):
    """Processes that have a state each, a copy of the given one; one: this process.

    They are forked by the first `map`, which is before any thread of ours: one would be lost.
    """

    def __init__(self, count: int, state: S) -> None:
        self.count = count
        self._state = state
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("fork")
            begin = tie_to_parent(signal.SIGKILL)
            self._pool = ProcessPoolExecutor(
                count, mp_context=context, initializer=_begin, initargs=(state, begin)
            )

    def __enter__(self) -> "Workers[S]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=kind is not None)

    def map(self, work: Callable[[S, T], R], items: Iterable[T]) -> Iterator[R]:
        """Return an iterator over the results, in the order of the items.

        work: a function of a module, of the state and an item. Its errors are raised here;
        BrokenProcessPool says that a process ended.
        """
        if self._pool is None:
            return (work(self._state, item) for item in items)
        return self._pool.map(_call, ((work, item) for item in items))


def _begin(state: Any, begin: Callable[[], None]) -> None:
    global _state  # noqa: PLW0603 - a process belongs to one pool
    _state = state
    begin()
    Waiting.leave_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it


def _call(task: tuple[Callable[[Any, T], R], T]) -> R:
    work, item = task
    return work(_state, item)
