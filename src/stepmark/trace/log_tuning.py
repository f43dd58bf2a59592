"""Lines of the tuner: what it predicts of each algorithm, and what it chose for each call."""

import re
from collections.abc import Sequence

from stepmark.core.log_facts import Choice
from stepmark.trace.log_calls import NAMES, Calls, Handle, message_bytes
from stepmark.trace.log_said import Said

_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_NAME = {name.upper().replace("_", ""): name for name in (*_ALGORITHMS, *_PROTOCOLS)}
_CHOICE = re.compile(
    r"^(?:(\w+)( \[[\w ]+\])?: )?(\d{1,18}) Bytes -> (?:Algo (\w+) proto (\w+)"
    r"(?: time ([\d.]{1,20}))?(?: channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
    r"|Kernel (\S+) nchannels (\d{1,4}).*|(.+))$"
)
_CELL = re.compile(r"^ *(-?[\d.]{1,12})/ *(-?[\d.]{1,12}) *$")
_OLD_HEAD = re.compile(r"(\w+)/ *(\w+)")


class Tables:
    """The printed table: a head names algorithms, three to a block; then rows."""

    def __init__(self) -> None:
        # (communicator, collective, algorithm, protocol) -> (seconds, bytes/s)
        self.cells: dict[tuple[str, str, str, str], tuple[float, float]] = {}
        self._heads: dict[tuple[str, int | None], list[tuple[str, str]]] = {}

    def row(self, said: Said, communicator: str) -> None:
        """A line with columns; others are no part of the table."""
        name, bar, rest = said.text.partition("|")
        if not bar:
            return
        name, columns = name.strip(), [part.strip() for part in rest.split("|")]
        place = (said.process, said.device)
        if name == "Algorithm":
            algorithms = [column for column in columns if column]
            self._heads[place] = [(_known(a), p) for a in algorithms for p in _PROTOCOLS]
        elif name == "Latency/AlgBw":
            found = (_OLD_HEAD.match(column) for column in columns)
            self._heads[place] = [(_known(m[1]), _known(m[2])) for m in found if m]
        elif name in NAMES and place in self._heads:
            self._cells(communicator, str(NAMES[name]), self._heads[place], columns)

    def _cells(
        self,
        communicator: str,
        collective: str,
        head: Sequence[tuple[str, str]],
        columns: Sequence[str],
    ) -> None:
        for (algorithm, protocol), column in zip(head, columns, strict=False):
            found = _CELL.match(column)
            try:
                latency, algbw = (float(part) for part in found.groups()) if found else (0, 0)
            except ValueError:
                continue
            # 0: not available for this collective, or switched off.
            if algbw > 0:
                key = (communicator, collective, algorithm, protocol)
                self.cells.setdefault(key, (latency * 1e-6, algbw * 1e9))


class Choices:
    """TUNING lines. Each kind of line is parsed once: `cells` counts it by process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def cell(self, said: Said) -> list[int] | None:
        """Where lines like this one of this process are counted; None if it is no choice."""
        if _CHOICE.match(said.text) is None:
            return None
        return self._counts.setdefault((said.process, said.text), [0])

    def result(
        self, handles: Sequence[Handle], calls: Calls, num_ranks: int | None
    ) -> tuple[Choice, ...]:
        """All choices; the number of ranks is that of calls of equal size, if these agree."""
        sizes = _ranks_by_size(handles, calls)
        alone = _ranks_by_process(handles)
        found: dict[tuple[object, ...], int] = {}
        for (process, text), (count,) in self._counts.items():
            match = _CHOICE.match(text)
            if match is None:
                continue
            name, variant, digits, algo, proto, time, low, high, kernel, wide, other = (
                match.groups()
            )
            collective, printed = str(NAMES.get(name or "", (name or "").lower())), int(digits)
            ranks = (
                sizes.get((process, collective, printed)) or alone.get(process) or {num_ranks}
            )
            known = next(iter(ranks)) if len(ranks) == 1 else None
            size = printed if time else message_bytes(collective, printed, known)
            channels = int(wide) if wide else int(high) - int(low) + 1 if high else None
            algorithm = _known(algo) if algo else (variant or "").strip(" []") or (other or "")
            protocol = _known(proto, _PROTOCOLS) if proto else (kernel or "")
            key = (collective, printed, size, algorithm, protocol, channels, _seconds(time))
            found[key] = found.get(key, 0) + count
        return tuple(
            Choice(
                collective=str(key[0]),
                printed_bytes=int(str(key[1])),
                message_bytes=None if key[2] is None else int(str(key[2])),
                algorithm=str(key[3]),
                protocol=str(key[4]),
                channels=None if key[5] is None else int(str(key[5])),
                time_s=None if key[6] is None else float(str(key[6])),
                calls=count,
            )
            for key, count in found.items()
        )


def _known(name: str, names: Sequence[str] = _ALGORITHMS) -> str:
    """A name as we write it, of another spelling or of its number."""
    if name.isascii() and name.isdecimal():
        return names[int(name)] if len(name) == 1 and int(name) < len(names) else name
    return _NAME.get(name.upper().replace("_", ""), name)


def _seconds(time: str | None) -> float | None:
    try:
        return None if time is None else float(time) * 1e-6
    except ValueError:
        return None


def _ranks_by_size(
    handles: Sequence[Handle], calls: Calls
) -> dict[tuple[str, str, int], set[int | None]]:
    found: dict[tuple[str, str, int], set[int | None]] = {}
    for handle in handles:
        if handle.num_ranks is None:
            continue
        for key in handle.stream.tallies:
            call = calls.listed[key // 3]
            if (size := call.num_bytes()) is not None:
                place = (handle.process, call.collective, size)
                found.setdefault(place, set()).add(handle.num_ranks)
    return found


def _ranks_by_process(handles: Sequence[Handle]) -> dict[str, set[int | None]]:
    found: dict[str, set[int | None]] = {}
    for handle in handles:
        if handle.num_ranks is not None:
            found.setdefault(handle.process, set()).add(handle.num_ranks)
    return found
