"""Look up the line of a call by its parts, each of which was parsed once."""

from collections.abc import Callable

from stepmark.job_logs.nccl_log.lines import THREAD_BITS, CallCounter

MAX_CACHED = 100_000
MAX_BUFFERS = 96  # bytes of opCount and two addresses; more is another line inside
_Parts = tuple[bytes, bytes, bytes]
_Head = tuple[dict[bytes, int], dict[bytes, Callable[[int], None]]]
NO_HEAD: _Head = ({}, {})


class CallCache:
    """Lines of calls: writer and collective, then the call, then its communicator.

    heads: what stands before opCount -> (keys of calls, appenders of communicators), the first
    by collective and thread, the second by writer. counters: by whole line, but for its
    buffers, for calls that have no order.
    """

    def __init__(self) -> None:
        self.heads: dict[bytes, _Head] = {}
        self.counters: dict[bytes, CallCounter] = {}
        self._heads_of: dict[str, list[bytes]] = {}  # by process
        self._comms: dict[bytes, dict[bytes, Callable[[int], None]]] = {}
        self._calls: dict[tuple[bytes, int], dict[bytes, int]] = {}

    def count(self, parts: _Parts, number: int) -> bool:
        """Count a line by its parts; return False if one is new."""
        start, call, comm = parts
        try:
            calls, comms = self.heads[start]
            comms[comm](calls[call] | number)
        except KeyError:
            return False
        return True

    def add_parts(self, parts: _Parts, counter: CallCounter, process: str) -> None:
        """Note the parts of a line of this process."""
        start, call, comm = parts
        name = start[start.rfind(b" ") :]
        head = self.heads.get(start)
        if head is None:
            if len(self.heads) >= MAX_CACHED:
                self.clear()
            thread = counter.base >> 32 + THREAD_BITS
            comms = self._comms.setdefault(start[: start.rfind(b"NCCL ")], {})
            head = self.heads[start] = (self._calls.setdefault((name, thread), {}), comms)
            self._heads_of.setdefault(process, []).append(start)
        if len(head[0]) < MAX_CACHED:
            head[0][call] = counter.base
        head[1][comm] = counter.append

    def add(self, key: bytes, counter: CallCounter) -> None:
        if len(self.counters) >= MAX_CACHED:
            self.counters.clear()
        self.counters[key] = counter

    def forget(self, process: str) -> None:
        """Forget the communicators of a process: a pointer may name another one now."""
        self.counters.clear()
        for name in (process, ""):
            for start in self._heads_of.pop(name, ()):
                self.heads.pop(start)[1].clear()

    def clear(self) -> None:
        """Forget all communicators: lines go to the sequences of another file now."""
        for table in (self.counters, self.heads, self._heads_of, self._comms):
            table.clear()
