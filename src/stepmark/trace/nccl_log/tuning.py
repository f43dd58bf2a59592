"""Lines of the tuner: predicted speeds of algorithms, and the choice for each call."""

import re
from collections.abc import Sequence
from dataclasses import replace

from stepmark.core.log_facts import Choice, Prediction
from stepmark.trace.nccl_log.calls import NAMES, Calls, message_bytes
from stepmark.trace.nccl_log.communicators import CommHandle
from stepmark.trace.nccl_log.lines import LogMessage

_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_SPELLINGS = {name.upper().replace("_", ""): name for name in (*_ALGORITHMS, *_PROTOCOLS)}
_CHOICE = re.compile(
    r"^(?:(\w+)( \[[\w ]+\])?: )?(\d{1,18}) Bytes -> (?:Algo (\w+) proto (\w+)"
    r"(?: time ([\d.]{1,20}))?(?: channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
    r"|Kernel (\S+) nchannels (\d{1,4}).*|(.+))$"
)
_CELL = re.compile(r"^ *(-?[\d.]{1,12})/ *(-?[\d.]{1,12}) *$")
_OLD_HEAD = re.compile(r"(\w+)/ *(\w+)")


class PredictionTable:
    """The printed table: a head names algorithms, three to a block; then rows."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str, str], Prediction] = {}
        self._heads: dict[tuple[str, int | None], list[tuple[str, str]]] = {}

    def add_row(self, message: LogMessage, communicator: str) -> None:
        """Add a line with columns; other lines are no part of the table."""
        name, _, rest = message.text.partition("|")
        name, columns = name.strip(), [part.strip() for part in rest.split("|")]
        place = (message.process, message.device)
        if name == "Algorithm":
            algorithms = [_spelled(column) for column in columns if column]
            self._heads[place] = [(name, p) for name in algorithms for p in _PROTOCOLS]
        elif name == "Latency/AlgBw":
            heads = (_OLD_HEAD.match(column) for column in columns)
            self._heads[place] = [(_spelled(m[1]), _spelled(m[2])) for m in heads if m]
        elif name in NAMES and place in self._heads:
            for head, column in zip(self._heads[place], columns, strict=False):
                self._add_cell(communicator, str(NAMES[name]), *head, column)

    def _add_cell(
        self, communicator: str, collective: str, algorithm: str, protocol: str, text: str
    ) -> None:
        match = _CELL.match(text)
        latency, algbw = (_float(digits) for digits in match.groups()) if match else (0.0, 0.0)
        if latency is None or not algbw or algbw < 0:  # 0: not available, or switched off
            return
        prediction = Prediction(
            communicator=communicator,
            collective=collective,
            algorithm=algorithm,
            protocol=protocol,
            latency_s=latency * 1e-6,
            algbw_bytes_per_s=algbw * 1e9,
        )
        self.cells.setdefault((communicator, collective, algorithm, protocol), prediction)


class TuningChoices:
    """TUNING lines. Each kind of line is parsed once and counted by process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def counter(self, message: LogMessage) -> list[int] | None:
        """Return the counter of such lines of this process; None if the line is no choice."""
        if _CHOICE.match(message.text) is None:
            return None
        return self._counts.setdefault((message.process, message.text), [0])

    def result(
        self, handles: Sequence[CommHandle], calls: Calls, num_ranks: int | None
    ) -> tuple[Choice, ...]:
        """Return all choices; ranks are those of calls of equal size, if these agree."""
        by_size, by_process = _ranks(handles, calls)
        counts: dict[Choice, int] = {}
        for (process, text), (count,) in self._counts.items():
            match = _CHOICE.match(text)
            assert match is not None
            choice = _choice(match)
            place = (process, choice.collective, choice.printed_bytes)
            ranks = by_size.get(place) or by_process.get(process) or {num_ranks}
            known = next(iter(ranks)) if len(ranks) == 1 else None
            if match[6] is None:  # a line with a time has the size of the message
                size = message_bytes(choice.collective, choice.printed_bytes, known)
                choice = replace(choice, message_bytes=size)
            counts[choice] = counts.get(choice, 0) + count
        return tuple(replace(choice, calls=count) for choice, count in counts.items())


def _choice(match: re.Match[str]) -> Choice:
    """Return the choice of a line, not yet counted, of a message of the printed size."""
    name, variant, size, algorithm, protocol, time, low, high, kernel, channels, other = (
        match.groups()
    )
    seconds = None if time is None else _float(time)
    named = (variant or "").strip(" []") or (other or "")
    return Choice(
        collective=str(NAMES.get(name or "", (name or "").lower())),
        printed_bytes=int(size),
        message_bytes=int(size),
        algorithm=_spelled(algorithm) if algorithm else named,
        protocol=_spelled(protocol, _PROTOCOLS) if protocol else (kernel or ""),
        channels=int(channels) if channels else int(high) - int(low) + 1 if high else None,
        time_s=None if seconds is None else seconds * 1e-6,
        calls=0,
    )


def _spelled(name: str, names: Sequence[str] = _ALGORITHMS) -> str:
    """Return our spelling of a name, or of its number."""
    if name.isascii() and name.isdecimal():
        return names[int(name)] if len(name) == 1 and int(name) < len(names) else name
    return _SPELLINGS.get(name.upper().replace("_", ""), name)


def _float(digits: str) -> float | None:
    """Return None for what is no number, such as 1.2.3 in a mangled line."""
    try:
        return float(digits)
    except ValueError:
        return None


def _ranks(
    handles: Sequence[CommHandle], calls: Calls
) -> tuple[dict[tuple[str, str, int], set[int | None]], dict[str, set[int | None]]]:
    """Return numbers of ranks by (process, collective, size) and by process."""
    by_size: dict[tuple[str, str, int], set[int | None]] = {}
    by_process: dict[str, set[int | None]] = {}
    for handle in handles:
        if handle.num_ranks is None:
            continue
        by_process.setdefault(handle.process, set()).add(handle.num_ranks)
        for key in handle.sequence.counters:
            call = calls.listed[key // 3]
            if (size := call.num_bytes()) is not None:
                place = (handle.process, call.collective, size)
                by_size.setdefault(place, set()).add(handle.num_ranks)
    return by_size, by_process
