"""Read debug logs of NCCL and RCCL (NCCL_DEBUG=INFO or TRACE), of any size, as facts.

Files are read once, in blocks. One expression finds the calls of a block; each is looked up by
what does not change from call to call (writer, collective, count to communicator), so it is
parsed once. Other lines are dispatched by their first word.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import LogFacts
from stepmark.ground.errors import ConfigError
from stepmark.ground.garbage import no_collection
from stepmark.ground.read_text import printable
from stepmark.job_logs.job_output.lines import has_nccl_line
from stepmark.job_logs.nccl_log import handlers, topology
from stepmark.job_logs.nccl_log.collector import Collector
from stepmark.job_logs.nccl_log.lines import (
    CALL_LINES,
    FIRST,
    MAX_LINE_BYTES,
    OTHER,
    THREAD_BITS,
    UNKNOWN,
    UNKNOWN_WRITER,
    Block,
    CallCounter,
    LogMessage,
    ParsedCall,
    Writer,
    blocks,
    parse_call,
    parse_coll,
    segments,
    unstamped,
    writer_of,
)

_VERSIONS = (b"NCCL version", b"RCCL version", b"HIP version", b"ROCm version")
_MAX_LINES = 2**32 - 1


def looks_like_log(head: bytes) -> bool:
    """Return whether the start of a file has a line of NCCL's or RCCL's debug output."""
    return has_nccl_line(head) or any(
        line.lstrip().startswith(_VERSIONS[:2]) for line in head.split(b"\n")
    )


def read_log(paths: Sequence[Path], *, num_ranks: int | None = None) -> LogFacts:
    """Return the facts of one job's logs: one file, or one per process, plain or gzip.

    num_ranks: of communicators whose size the log does not state. Raises ConfigError where a
    file cannot be read or holds no line of NCCL's.
    """
    if not paths:
        raise ConfigError("file", "", "at least one log file")
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError("num-ranks", num_ranks, "a number from 1")
    reader = _Reader()
    with no_collection():
        for index, path in enumerate(paths):
            reader.read(path, index)
        facts = reader.collector.result(paths, reader.num_lines, num_ranks)
    return replace(facts, has_messages=reader.num_logs > 0)


class _Reader:
    """One pass over all files."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.num_lines = 0
        self.num_logs = 0  # files with messages of NCCL
        self._cache = CallCache()
        self._choices: dict[bytes, list[int]] = {}
        self._writers: dict[bytes, Writer] = {}
        self._file = ""
        self._index = 0
        self._has_messages = False
        self.collector.forget_counters = self._cache.forget

    def read(self, path: Path, index: int) -> None:
        """Read one file. Raises ConfigError."""
        self._file = str(path)
        self._index = index
        self._has_messages = False
        self.collector.output.enter_file(self._file, index)
        num_before = self.collector.output.num_notable
        self._cache.clear()
        self._choices.clear()
        is_empty = True
        for block in blocks(path):
            if block.end >= _MAX_LINES:
                raise ConfigError("file", path, f"a log of fewer than {_MAX_LINES} lines")
            if is_empty and (block.text.strip(b"\n") or block.ahead):
                is_empty = False
                self._refuse_binary(path, block.text)
            self._scan(block)
            self.num_lines += block.end - block.first
        if is_empty:
            raise ConfigError("file", path, "a log with content; this one is empty")
        self.collector.output.leave_file()
        has_failures = self.collector.output.num_notable > num_before
        self.num_logs += self._has_messages
        if not self._has_messages and not has_failures:
            raise ConfigError("file", path, "a log of NCCL or RCCL; no line of either is in it")

    @staticmethod
    def _refuse_binary(path: Path, text: bytes) -> None:
        head = b"\n".join(text.split(b"\n", 64)[:64])[:65536]
        if head.count(b"\0") > len(head) // 10 and not looks_like_log(head):
            allowed = "a text file, or a compressed one; this one is binary"
            raise ConfigError("file", path, allowed)

    def _scan(self, block: Block) -> None:
        """Read the lines of a block; they are separated only where one is new."""
        heads = self._cache.heads
        number = block.first
        rest = block.text
        if b" opCount " in rest:
            *calls_found, rest = CALL_LINES.split(rest)
            fields = iter(calls_found)
            for start, call, comm in zip(fields, fields, fields, strict=True):
                head = heads.get(start)
                if head is None:
                    others, end, own = start.rpartition(b"\n")
                    if end:
                        number = self._read_others(block, others, number)
                    head = heads.get(own) or heads.get(unstamped(own), NO_HEAD)
                try:
                    calls, comms = head
                    comms[comm](calls[call] | number)
                except KeyError:
                    self._parse(block.line(number), number, block.line(number + 1))
                number += 1
        if rest:
            self._read_others(block, rest[:-1], number)

    def _read_others(self, block: Block, text: bytes, first: int) -> int:
        """Read lines without a whole call; return the number of the line after them."""
        choice_of = self._choices.get
        counter_of = self._cache.counters.get
        has_ignored = False
        lines = text.split(b"\n")
        for number, line in enumerate(lines, first):
            choice = choice_of(line)
            if choice is not None:
                choice[0] += 1
                continue
            if b" opCount " not in line:
                at = line.find(b"NCCL ")
                if at < 0:
                    self._plain(line, number)
                    continue
                if line[at + 5 : at + 10] == b"INFO ":
                    end = line.find(b" ", at + 10)
                    if line[at + 10 : end] in _IGNORED:
                        has_ignored = True
                        continue
                elif line[at + 5 : at + 10] == b"CALL ":
                    counter = counter_of(_api_key(line, at))
                    if counter is not None:
                        counter.calls += 1
                        counter.append(counter.base | number)
                        continue
            self._parse(line, number, block.line(number + 1))
        self._has_messages = self._has_messages or has_ignored
        return first + len(lines)

    def _plain(self, line: bytes, number: int) -> None:
        """Read a line that no NCCL wrote, or one of its version."""
        if line.startswith(_VERSIONS):
            self._parse(line, number, b"")
        elif line:
            self.collector.output.read(line, number)

    def _parse(self, line: bytes, number: int, following: bytes) -> None:
        """Read a line that has no counter yet."""
        line = unstamped(line.rstrip(b"\r"))
        parts = segments(line[:MAX_LINE_BYTES])
        for part in parts:
            if b" opCount " in part:
                self._coll(part, number, following, is_cacheable=len(parts) == 1)
            else:
                self._message(part, number, following)

    def _coll(self, line: bytes, number: int, following: bytes, *, is_cacheable: bool) -> None:
        at = line.find(b" opCount ")
        low = line.find(b" count ", at)
        high = line.rfind(b" stream ")
        comm = line.find(b" comm ", low)
        is_whole = at < low < comm < high and low - at < MAX_BUFFERS
        parts = (line[:at], line[low:comm], line[comm:high])
        if is_whole and self._cache.count(parts, number):
            return
        key = line[:at] + line[low:high] if is_whole else b""
        counter = self._cache.counters.get(key) if key else None
        if counter is None:
            self._has_messages = True
            name = max(0, line.rfind(b"NCCL ", 0, at))
            parsed = parse_coll(line)
            if (parsed is None or not parsed.pointer) and b"NCCL" not in following:
                joined = parse_coll(line.rstrip() + b" " + following.strip() + b" ")
                parsed = joined or parsed
            message = self._log_message(line, name, number, following)
            counter = self._call_counter(message, parsed, is_api=False)
            if counter is None:
                return
            if key and is_cacheable and parsed and parsed.pointer:
                if counter.base:
                    self._cache.add_parts(parts, counter, message.process)
                else:
                    self._cache.add(key, counter)
        counter.calls += 1
        counter.append(counter.base | number)

    def _call_counter(
        self, message: LogMessage, parsed: ParsedCall | None, *, is_api: bool
    ) -> CallCounter | None:
        """Return the counter of a call, whose communicator later lines of links refer to."""
        calls = self.collector.calls
        if parsed is None or not parsed.pointer:
            calls.broken.add(message.process)
        if parsed is None:
            calls.unread += 1
            return None
        handle = self.collector.communicators.of(message, parsed.pointer.decode())
        if not handle.process:
            calls.broken.add("")
        handle.num_ranks = handle.num_ranks or parsed.num_ranks
        if handle.rank is None and not handle.comm_id:
            handle.rank = parsed.global_rank
        handle.device = message.device if handle.device is None else handle.device
        sequence = handle.api if is_api else handle.coll
        sequence.enter_file(self._index)
        if sequence.first_op_count is None:
            sequence.first_op_count = parsed.op_count
        thread = UNKNOWN if not message.process else FIRST if message.is_main else OTHER
        counter = calls.counter(sequence, parsed.call, thread, is_compared=bool(handle.pointer))
        if not counter.calls:
            counter.first = (self._index, message.number)
        return counter

    def _message(self, line: bytes, number: int, following: bytes) -> None:
        at = line.find(b"NCCL ")
        kind = line[at + 5 : at + 10] if at >= 0 else b""
        if kind == b"CALL ":
            self._api_call(line, at, number)
        elif kind in (b"INFO ", b"TRACE"):
            text = line[at + 10 :].lstrip() if kind == b"TRACE" else line[at + 10 :]
            message = self._log_message(line, at, number, following, text)
            self._has_messages = True
            self._info(message, line)
        elif kind == b"WARN ":
            message = self._log_message(line, at, number, following, line[at + 10 :])
            self._has_messages = True
            self.collector.warn(message)
        elif line.startswith(_VERSIONS):
            message = self._log_message(line, -1, number, following, line)
            self._has_messages = self._has_messages or line.startswith(_VERSIONS[:2])
            handlers.version(self.collector, message)
        else:
            self.collector.output.read(line, number)

    def _info(self, message: LogMessage, line: bytes) -> None:
        word = message.text.split(" ", 1)[0]
        handler = _HANDLERS.get(word)
        if handler is not None:
            handler(self.collector, message)
        elif word.startswith("GPU/"):
            topology.paths(self.collector, message)
        elif word.startswith("NET/"):
            handlers.net(self.collector, message)
        elif " set by environment to " in message.text:
            handlers.variable(self.collector, message)
        elif " Bytes -> " in message.text:
            self._choice(message, line)
        elif word.isascii() and word.isdecimal():
            handlers.channel_counts(self.collector, message)
        elif " - NET/" in message.text:
            topology.node(self.collector, message)
        elif "|" in message.text:
            handle = self.collector.communicators.latest(message)
            self.collector.predictions.add_row(
                message, handle.key if handle else message.process
            )

    def _choice(self, message: LogMessage, line: bytes) -> None:
        counter = self.collector.choices.counter(message)
        if counter is None:
            return
        counter[0] += 1
        if len(self._choices) >= MAX_CACHED:
            self._choices.clear()
        # A time in the line is constant for a size.
        self._choices[line] = counter

    def _api_call(self, line: bytes, at: int, number: int) -> None:
        self._has_messages = True
        message = self._log_message(line, at, number, b"", line[at + 10 :])
        parsed = parse_call(line[at + 10 :])
        if parsed is None:
            handlers.init_call(self.collector, message)
            return
        counter = self._call_counter(message, parsed, is_api=True)
        if counter is not None:
            self._cache.add(_api_key(line, at), counter)
            counter.calls += 1
            counter.append(counter.base | number)

    def _log_message(
        self, line: bytes, at: int, number: int, following: bytes, text: bytes = b""
    ) -> LogMessage:
        lead = line[: max(at, 0)]
        writer = self._writers.get(lead)
        if writer is None:
            writer = writer_of(line, at) if at > 0 else UNKNOWN_WRITER
            if writer.process and writer.process not in self.collector.processes:
                evidence = Evidence(file=self._file, line=number, text=printable(line))
                self.collector.processes[writer.process] = evidence
            if len(self._writers) >= MAX_CACHED:
                self._writers.clear()
            self._writers[lead] = writer
        self.collector.num_messages[writer.process] += bool(text)
        return LogMessage(
            process=writer.process,
            host=writer.host,
            is_main=writer.is_main,
            device=writer.device,
            text=printable(text),
            file=self._file,
            number=number,
            line=line,
            following=following,
        )


def _api_key(line: bytes, at: int) -> bytes:
    """Return what does not change from call to call: all but the buffers and the stream."""
    head = line.find(b"(", at)
    low = line.find(b",", line.find(b",", head) + 1)
    return line[:head] + line[low : line.rfind(b",")]


def _harmless(collector: Collector, message: LogMessage) -> None:
    if message.text.startswith(HARMLESS):
        collector.count_similar(collector.harmless, message)


def _p2p(collector: Collector, message: LogMessage) -> None:
    if message.text.startswith("P2P is disabled"):
        collector.count_similar(collector.p2p_disabled, message)
    else:
        handlers.plugin_loaded(collector, message)


# Lines that look like errors in virtual machines and containers, and have no effect.
HARMLESS = (
    "dlvsym failed on mlx5dv",
    "Topology detection : could not read",
    "Topology detection: could not read",
    "Could not get speed from",
    "Could not find real path of",
)

_HANDLERS: dict[str, Callable[[Collector, LogMessage], None]] = {
    **dict.fromkeys(("NCCL", "RCCL", "HIP", "ROCm", "cudaDriverVersion"), handlers.version),
    **dict.fromkeys(
        (
            *("NET/Plugin", "NET/Plugin:", "TUNER/Plugin:", "TUNER/Plugin", "ENV/Plugin:"),
            *("PROFILER/Plugin:", "PROFILER/Plugin", "GIN/Plugin:", "RMA/Plugin:"),
        ),
        handlers.plugin,
    ),
    **dict.fromkeys(("Successfully", "External", "Failed"), handlers.plugin_loaded),
    **dict.fromkeys(("Bootstrap", "Bootstrap:"), handlers.bootstrap),
    **dict.fromkeys(
        (
            *("comm", "[Rank", "ncclCommInitRank", "ncclCommInitRankConfig"),
            *("ncclCommInitRankScalable", "ncclCommInitAll", "ncclCommSplit"),
            *("ncclCommShrink", "ncclCommGrow"),
        ),
        handlers.communicator,
    ),
    **dict.fromkeys(("dlvsym", "Topology", "Could"), _harmless),
    "P2P": _p2p,
    "Using": handlers.network,
    "GPU": handlers.net,
    "Init": handlers.init_time,
    "Channel": handlers.channel,
    "Ring": handlers.ring,
    "CollNet": handlers.collnet,
    "Trees": handlers.trees,
    "Pattern": topology.graph,
    "NVLS": handlers.nvls,
}

# First words of frequent lines that state no fact of use here.
_IGNORED = frozenset(
    {
        *(b"New", b"Connected", b"Allocated", b"UDS", b"Imported", b"Tree", b"===", b"+"),
        *(b"threadThresholds", b"[Proxy", b"Setting", b"CC", b"proxyProgressAsync", b"Mem"),
        *(b"ncclPollProxyResponse", b"Received", b"Check", b"Comm", b"TOPO/NET", b"RAS"),
    }
)


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
