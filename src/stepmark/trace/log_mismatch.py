"""Where the ranks of a communicator issued different collectives, or one issued fewer.

Ranks are compared by position in the log and not by opCount: some versions leave it at 0, and
calls of one group share it. Only at the first line must it be equal, else parts are missing.
Send and Recv take no part: each rank has its own. Where a line is cut or has lost its process,
its rank (or, as that is unknown, no rank) is compared.
"""

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepmark.core.finding import Evidence
from stepmark.core.log_facts import Behind, CallSide, Mismatch
from stepmark.trace.log_calls import Calls, Handle
from stepmark.trace.log_lines import quotes


class Sequences:
    """Compares what ranks issued; quotes lines of `files`."""

    def __init__(self, calls: Calls, files: Sequence[Path]) -> None:
        self._calls = calls
        self._files = files
        self._texts: dict[tuple[int, int], str] = {}  # by file and line; "" not read yet

    def compared(self, handles: Sequence[Handle]) -> tuple[list[Mismatch], list[Behind]]:
        """The first place where ranks of a communicator differ; else the ranks behind."""
        found = self._compared(handles)
        if not self._texts:
            return found
        for index, path in enumerate(self._files):
            wanted = {line for at, line in self._texts if at == index}
            for line, text in (quotes(path, wanted) if wanted else {}).items():
                self._texts[index, line] = text
        return self._compared(handles)

    def _compared(self, handles: Sequence[Handle]) -> tuple[list[Mismatch], list[Behind]]:
        mismatches: list[Mismatch] = []
        behind: list[Behind] = []
        if "" in self._calls.broken:
            return mismatches, behind
        for group, certain in _groups(list(handles), self._calls.broken):
            position = _first_difference(group)
            if position is not None:
                mismatches.append(self._mismatch(group, position, certain))
            else:
                behind += self._behind(group, certain)
        return mismatches, behind

    def _mismatch(self, group: Sequence[Handle], position: int, certain: bool) -> Mismatch:
        kinds: dict[int, list[Handle]] = {}
        for handle in group:
            if len(handle.stream.calls) > position:
                kinds.setdefault(handle.stream.calls[position] >> 32, []).append(handle)
        ordered = sorted(kinds.values(), key=len, reverse=True)
        return Mismatch(
            communicator=_name(group, certain),
            position=position,
            sides=tuple(self._side(held[0], position) for held in ordered),
            ranks=tuple(len(held) for held in ordered),
            certain=certain,
        )

    def _behind(self, group: Sequence[Handle], certain: bool) -> list[Behind]:
        ahead = max(group, key=lambda handle: len(handle.stream.calls))
        most = len(ahead.stream.calls)
        found = []
        for handle in group:
            issued = len(handle.stream.calls)
            if issued == most:
                continue
            found.append(
                Behind(
                    communicator=_name(group, certain),
                    issued=issued,
                    most=most,
                    last=self._side(handle, issued - 1) if issued else None,
                    missing=self._side(ahead, issued),
                    rank=handle.rank,
                    process=handle.process,
                    certain=certain,
                )
            )
        return found

    def _side(self, handle: Handle, position: int) -> CallSide:
        index, line = handle.stream.place(position)
        path = self._files[index]
        call = self._calls.listed[handle.stream.calls[position] >> 32].text()
        text = self._texts.setdefault((index, line), "")
        return CallSide(
            rank=handle.rank,
            process=handle.process,
            call=call,
            evidence=Evidence(file=str(path), line=line, text=text or call),
        )


def _groups(handles: list[Handle], broken: set[str]) -> Iterable[tuple[list[Handle], bool]]:
    """Ranks that form one communicator, and whether the log says so.

    Without lines of its start, as many ranks as a communicator has, one of each process and
    device, are taken for one.
    """
    by_id: dict[str, list[Handle]] = {}
    by_size: dict[int, list[Handle]] = {}
    talking = {handle.process for handle in handles if handle.stream.calls}
    for handle in handles:
        if handle.comm_id:
            by_id.setdefault(handle.comm_id, []).append(handle)
        elif handle.num_ranks and handle.stream.calls:
            by_size.setdefault(handle.num_ranks, []).append(handle)
    for held in by_id.values():
        # A process that logs no calls at all was not asked to.
        group = [handle for handle in held if handle.process in talking]
        if _are_ranks(group, [handle.rank for handle in group], broken):
            yield group, True
    for size, group in by_size.items():
        places = [(handle.process, handle.device) for handle in group]
        if len(group) == size and _are_ranks(group, places, broken):
            yield group, False


def _are_ranks(group: Sequence[Handle], names: Sequence[object], broken: set[str]) -> bool:
    return (
        len(group) > 1
        and len(set(names)) == len(group)
        and None not in names
        and any(handle.stream.calls for handle in group)
        and not any(handle.process in broken for handle in group)
        and len({handle.stream.first_op_count for handle in group if handle.stream.calls}) == 1
    )


def _name(group: Sequence[Handle], certain: bool) -> str:
    return group[0].key if certain else f"of {len(group)} ranks"


def _first_difference(group: Sequence[Handle]) -> int | None:
    """The first position at which two ranks issued different calls."""
    longest = max(group, key=lambda handle: len(handle.stream.calls))
    numbers = _numbers(longest)
    found = [
        _difference(numbers, _numbers(handle)) for handle in group if handle is not longest
    ]
    return min((position for position in found if position is not None), default=None)


def _numbers(handle: Handle) -> bytes:
    """Four bytes per call: what it is, without its line."""
    halves = array("I", handle.stream.calls.tobytes())
    upper = 1 if _LITTLE else 0
    return halves[upper::2].tobytes()


_LITTLE = array("H", b"\1\0")[0] == 1


def _difference(one: bytes, other: bytes) -> int | None:
    """Bisection: equal prefixes are compared as blocks of memory."""
    shared = min(len(one), len(other)) // 4
    if one[: shared * 4] == other[: shared * 4]:
        return None
    low, high = 0, shared  # equal up to low, not up to high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * 4 : middle * 4] == other[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle
    return low
