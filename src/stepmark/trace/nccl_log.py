"""Debug logs of NCCL and RCCL (NCCL_DEBUG=INFO or TRACE), of any size, as facts.

Files are read once, in blocks. A line of a call is looked up by what does not change from call
to call (who, which collective, from its count to its communicator), so its parts are taken
apart once; other lines go by their first word.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.log_facts import LogFacts
from stepmark.trace import log_start, log_transport
from stepmark.trace.log_calls import (
    FIRST,
    OTHER,
    UNKNOWN,
    Cell,
    Parsed,
    parsed_call,
    parsed_coll,
)
from stepmark.trace.log_facts import Collector
from stepmark.trace.log_lines import (
    MAX_LINE_BYTES,
    NOBODY,
    Writer,
    batches,
    segments,
    text_of,
    unstamped,
    writer_of,
)
from stepmark.trace.log_said import Said

_MARKS = (b"NCCL INFO ", b"NCCL WARN ", b"NCCL CALL ", b"NCCL TRACE ")
_VERSIONS = (b"NCCL version", b"RCCL version", b"HIP version", b"ROCm version")
_MAX_CELLS = 100_000
_MAX_LINES = 2**32 - 1


def looks_like_log(head: bytes) -> bool:
    """Whether the start of a file has a line of NCCL's or RCCL's debug output."""
    return any(mark in head for mark in _MARKS) or any(
        line.lstrip().startswith(_VERSIONS[:2]) for line in head.split(b"\n")
    )


def read_log(paths: Sequence[Path], *, num_ranks: int | None = None) -> LogFacts:
    """Facts of one job's logs: one file, or one per process, plain or gzipped.

    num_ranks: of communicators whose size the log does not tell. Raises ConfigError where a
    file cannot be read or holds no line of NCCL's.
    """
    if not paths:
        raise ConfigError("file", "", "at least one log file")
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError("num-ranks", num_ranks, "a number from 1")
    reader = _Reader(Collector())
    for index, path in enumerate(paths):
        reader.read(path, index)
    return reader.held.result(paths, reader.num_lines, num_ranks)


class _Reader:
    """One pass over all files."""

    def __init__(self, held: Collector) -> None:
        self.held = held
        self.num_lines = 0
        self._cells: dict[bytes, Cell] = {}
        self._choices: dict[bytes, list[int]] = {}
        self._writers: dict[bytes, Writer] = {}
        self._file, self._index, self._found = "", 0, False
        held.forget_cells = self._cells.clear

    def read(self, path: Path, index: int) -> None:
        """One file. Raises ConfigError."""
        self._file, self._index, self._found = str(path), index, False
        self._cells.clear()
        self._choices.clear()
        empty = True
        for first, lines in batches(path):
            if first + len(lines) > _MAX_LINES:
                raise ConfigError("file", path, f"a log of fewer than {_MAX_LINES} lines")
            if empty and not any(lines):
                lines[:] = [b""]
            elif empty:
                empty = False
                self._refuse_binary(path, lines)
            self._scan(lines, first)
            self.num_lines += len(lines) - 1
        if empty:
            raise ConfigError("file", path, "a log with content; this one is empty")
        if not self._found:
            raise ConfigError("file", path, "a log of NCCL or RCCL; no line of either is in it")

    @staticmethod
    def _refuse_binary(path: Path, lines: Sequence[bytes]) -> None:
        head = b"\n".join(lines[:64])[:65536]
        if head.count(b"\0") > len(head) // 10 and not looks_like_log(head):
            raise ConfigError(
                "file", path, "a text file, or one that gzip packed; it is binary"
            )

    def _scan(self, lines: list[bytes], first: int) -> None:
        """All lines but the last, which is only to look ahead."""
        cell_of, choice_of, other = self._cells.get, self._choices.get, self._other
        ahead, silent = lines.pop(), False
        for number, line in enumerate(lines, first):
            at = line.find(b" opCount ")
            if at >= 0:
                low = line.find(b" count ", at)
                high = line.rfind(b" stream ")
                if 0 < low < high:
                    cell = cell_of(line[:at] + line[low:high])
                    if cell is not None:
                        cell.calls += 1
                        cell.append(cell.base | number)
                        continue
            else:
                choice = choice_of(line)
                if choice is not None:
                    choice[0] += 1
                    continue
                at = line.find(b"NCCL ")
                if at < 0:
                    if line.startswith(_VERSIONS):
                        other(line, number, b"")
                    continue
                if line[at + 5 : at + 10] == b"INFO ":
                    end = line.find(b" ", at + 10)
                    if line[at + 10 : end] in _SILENT:
                        silent = True
                        continue
                elif line[at + 5 : at + 10] == b"CALL ":
                    cell = cell_of(_api_key(line, at))
                    if cell is not None:
                        cell.calls += 1
                        cell.append(cell.base | number)
                        continue
            offset = number - first + 1
            other(line, number, lines[offset] if offset < len(lines) else ahead)
        lines.append(ahead)
        self._found = self._found or silent

    def _other(self, line: bytes, number: int, following: bytes) -> None:
        """A line that was not seen before."""
        line = unstamped(line.rstrip(b"\r"))
        parts = segments(line[:MAX_LINE_BYTES])
        for part in parts:
            if b" opCount " in part:
                self._coll(part, number, following, cached=len(parts) == 1)
            else:
                self._message(part, number, following)

    def _coll(self, line: bytes, number: int, following: bytes, *, cached: bool) -> None:
        at = line.find(b" opCount ")
        low, high = line.find(b" count ", at), line.rfind(b" stream ")
        key = line[:at] + line[low:high] if 0 < low < high else b""
        cell = self._cells.get(key) if key else None
        if cell is None:
            self._found = True
            name = max(0, line.rfind(b"NCCL ", 0, at))
            parsed, said = parsed_coll(line), self._said(line, name, number, following)
            if (parsed is None or not parsed.pointer) and b"NCCL" not in following:
                joined = parsed_coll(line.rstrip() + b" " + following.strip() + b" ")
                parsed = joined or parsed
            cell = self._cell(said, parsed, api=False)
            if cell is None:
                return
            if key and cached and parsed and parsed.pointer:
                self._cache(key, cell)
        cell.calls += 1
        cell.append(cell.base | number)

    def _cell(self, said: Said, parsed: Parsed | None, *, api: bool) -> Cell | None:
        """Where a call is counted; its communicator is what later lines of transports mean."""
        calls = self.held.calls
        if parsed is None or not parsed.pointer:
            calls.broken.add(said.process)
        if parsed is None:
            calls.unread += 1
            return None
        handle = self.held.handles.of(said, parsed.pointer.decode())
        if not handle.process:
            calls.broken.add("")
        handle.num_ranks = handle.num_ranks or parsed.num_ranks
        if handle.rank is None and not handle.comm_id:
            handle.rank = parsed.global_rank
        handle.device = said.device if handle.device is None else handle.device
        stream = handle.api if api else handle.coll
        stream.entered(self._index)
        if stream.first_op_count is None:
            stream.first_op_count = parsed.op_count
        thread = UNKNOWN if not said.process else FIRST if said.is_main else OTHER
        return calls.cell(stream, parsed.call, thread, compared=bool(handle.pointer))

    def _cache(self, key: bytes, cell: Cell) -> None:
        if len(self._cells) >= _MAX_CELLS:
            self._cells.clear()
        self._cells[key] = cell

    def _message(self, line: bytes, number: int, following: bytes) -> None:
        at = line.find(b"NCCL ")
        kind = line[at + 5 : at + 10] if at >= 0 else b""
        if kind == b"CALL ":
            self._api_call(line, at, number)
        elif kind in (b"INFO ", b"TRACE"):
            said = self._said(line, at, number, following)
            said.text = text_of(
                line[at + 10 :].lstrip() if kind == b"TRACE" else line[at + 10 :]
            )
            self._found = True
            self._info(said, line)
        elif kind == b"WARN ":
            said = self._said(line, at, number, following)
            said.text = text_of(line[at + 10 :])
            self._found = True
            self.held.remark(self.held.warnings, said.text, said)
        elif line.startswith(_VERSIONS):
            said = self._said(line, -1, number, following)
            said.text = text_of(line)
            self._found = self._found or line.startswith(_VERSIONS[:2])
            log_start.version(self.held, said)

    def _info(self, said: Said, line: bytes) -> None:
        word = said.text.split(" ", 1)[0]
        handler = _HANDLERS.get(word)
        if handler is not None:
            handler(self.held, said)
        elif word.startswith("NET/"):
            log_start.net(self.held, said)
        elif " set by environment to " in said.text:
            log_start.variable(self.held, said)
        elif " Bytes -> " in said.text:
            self._choice(said, line)
        elif word.isascii() and word.isdecimal():
            log_start.channel_counts(self.held, said)
        elif "|" in said.text:
            handle = self.held.handles.latest(said)
            self.held.tables.row(said, handle.key if handle else said.process)

    def _choice(self, said: Said, line: bytes) -> None:
        cell = self.held.choices.cell(said)
        if cell is None:
            return
        cell[0] += 1
        if len(self._choices) >= _MAX_CELLS:
            self._choices.clear()
        # A time in the line differs from call to call as little as its size does.
        self._choices[line] = cell

    def _api_call(self, line: bytes, at: int, number: int) -> None:
        self._found = True
        said = self._said(line, at, number, b"")
        parsed = parsed_call(line[at + 10 :])
        if parsed is None:
            said.text = text_of(line[at + 10 :])
            log_start.init_call(self.held, said)
            return
        cell = self._cell(said, parsed, api=True)
        if cell is not None:
            self._cache(_api_key(line, at), cell)
            cell.calls += 1
            cell.append(cell.base | number)

    def _said(self, line: bytes, at: int, number: int, following: bytes) -> Said:
        """Who said it; `text` is left to the caller."""
        lead = line[: max(at, 0)]
        writer = self._writers.get(lead)
        if writer is None:
            writer = writer_of(line, at) if at > 0 else NOBODY
            if writer.process:
                self.held.processes[writer.process] = None
                self.held.hosts[writer.host] = None
            if len(self._writers) >= _MAX_CELLS:
                self._writers.clear()
            self._writers[lead] = writer
        return Said(
            process=writer.process,
            host=writer.host,
            is_main=writer.is_main,
            device=writer.device,
            text="",
            file=self._file,
            number=number,
            line=line,
            following=following,
        )


def _api_key(line: bytes, at: int) -> bytes:
    """What does not change from call to call: all but the buffers and the stream."""
    head = line.find(b"(", at)
    low = line.find(b",", line.find(b",", head) + 1)
    return line[:head] + line[low : line.rfind(b",")]


def _harmless(held: Collector, said: Said) -> None:
    if any(said.text.startswith(start) for start in HARMLESS):
        held.remark(held.harmless, said.text, said)


def _p2p(held: Collector, said: Said) -> None:
    if said.text.startswith("P2P is disabled"):
        held.remark(held.p2p_disabled, said.text, said)
    else:
        log_start.plugin_loaded(held, said)


def _nvls(held: Collector, said: Said) -> None:
    log_start.multicast(held, said)
    log_transport.multicast_group(held, said)


# Lines that look like errors in virtual machines and containers, and change nothing.
HARMLESS = (
    "dlvsym failed on mlx5dv",
    "Topology detection : could not read",
    "Topology detection: could not read",
    "Could not get speed from",
    "Could not find real path of",
)

_HANDLERS: dict[str, Callable[[Collector, Said], None]] = {
    "NCCL": log_start.version,
    "RCCL": log_start.version,
    "HIP": log_start.version,
    "ROCm": log_start.version,
    "cudaDriverVersion": log_start.version,
    "NET/Plugin": log_start.plugin,
    "NET/Plugin:": log_start.plugin,
    "TUNER/Plugin:": log_start.plugin,
    "TUNER/Plugin": log_start.plugin,
    "PROFILER/Plugin:": log_start.plugin,
    "PROFILER/Plugin": log_start.plugin,
    "ENV/Plugin:": log_start.plugin,
    "GIN/Plugin:": log_start.plugin,
    "RMA/Plugin:": log_start.plugin,
    "Successfully": log_start.plugin_loaded,
    "External": log_start.plugin_loaded,
    "Failed": log_start.plugin_loaded,
    "P2P": _p2p,
    "Bootstrap": log_start.bootstrap,
    "Bootstrap:": log_start.bootstrap,
    "Using": log_start.network,
    "GPU": log_start.net,
    "comm": log_start.communicator,
    "ncclCommInitRank": log_start.communicator,
    "ncclCommInitRankConfig": log_start.communicator,
    "ncclCommInitRankScalable": log_start.communicator,
    "ncclCommInitAll": log_start.communicator,
    "ncclCommSplit": log_start.communicator,
    "ncclCommShrink": log_start.communicator,
    "ncclCommGrow": log_start.communicator,
    "[Rank": log_start.communicator,
    "Init": log_start.init_time,
    "Channel": log_transport.channel,
    "Ring": log_transport.ring,
    "CollNet": log_transport.collnet,
    "Trees": log_transport.trees,
    "Pattern": log_start.graph,
    "NVLS": _nvls,
    "dlvsym": _harmless,
    "Topology": _harmless,
    "Could": _harmless,
}

# First words of frequent lines that say nothing we keep.
_SILENT = frozenset(
    {
        *(b"New", b"Connected", b"Allocated", b"UDS", b"Imported", b"Tree", b"===", b"+"),
        *(b"threadThresholds", b"[Proxy", b"Setting", b"CC", b"proxyProgressAsync", b"Mem"),
        *(b"ncclPollProxyResponse", b"Received", b"Check", b"Comm", b"TOPO/NET", b"RAS"),
    }
)
