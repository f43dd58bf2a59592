"""Find where the ranks of a communicator issued different collectives, or one issued fewer.

Ranks are compared by position in the log and not by opCount: some versions leave it at 0, and
calls of one group share it. Only at the first line must it be equal, else parts are missing.
Send and Recv differ by rank: what one rank sent is compared with what its peer received. A rank
with a cut line is not compared; where a line has lost its process, no rank is.

Where the calls agree again after a gap in one, and opCount continues over it, lines were lost.
One other call, before calls that agree, is a difference.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import (
    IssuedCall,
    LaggingRank,
    LostCalls,
    Mismatch,
    PeerDifference,
)
from stepmark.ground.grouping import group_by
from stepmark.job_logs.nccl_log.communicators import CommHandle
from stepmark.job_logs.nccl_log.lines import (
    HIGH_HALF,
    NUMBER,
    UNORDERED,
    Calls,
    quotes,
    type_name,
)

_MAX_SHOWN = 4
_MAX_PASSES = 8
_MAX_GAP = 16  # lines in a row that may be lost
_REJOIN = 4  # calls that agree after a gap
_MAX_CHECKED = 64  # gaps of a rank over which opCount is read
_OP_COUNT = re.compile(r" opCount ([0-9a-f]+) ")


class QuotedLines:
    """Lines that are needed as text, and are read again together."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        # By file and line; None not read yet, "" cannot be read.
        self._texts: dict[tuple[int, int], str | None] = {}

    def text(self, place: tuple[int, int]) -> str | None:
        """Return a line; None while it is not read, which this asks for."""
        return self._texts.setdefault(place, None)

    def read(self) -> bool:
        """Read the lines that were asked for; return whether there were any."""
        unread: dict[int, set[int]] = {}
        for (file, line), text in self._texts.items():
            if text is None:
                unread.setdefault(file, set()).add(line)
        for file, numbers in unread.items():
            texts = quotes(self._files[file], numbers)
            self._texts.update({(file, line): texts.get(line, "") for line in numbers})
        return bool(unread)

    def op_count(self, handle: CommHandle, position: int) -> int | None:
        """Return the opCount of a call; None if its line is not read or has none."""
        match = _OP_COUNT.search(self.text(handle.sequence.place(position)) or "")
        return int(match[1], 16) if match else None


@dataclass(slots=True)
class Alignment:
    """How far the calls of two ranks agree: positions in both, and lines that each has lost."""

    left: int = 0
    right: int = 0
    lost_left: int = 0
    lost_right: int = 0
    num_gaps: int = 0
    differs: bool = False  # at these positions
    first_gap: int | None = None  # in the left one
    is_cut: bool = False  # what follows cannot be aligned

    def lose(self, num_right: int, num_left: int) -> None:
        """Count calls that the right and the left log lack at these positions."""
        if self.first_gap is None:
            self.first_gap = self.left
        self.lost_right += num_right
        self.lost_left += num_left


class Aligner:
    """Aligns calls of ranks. While the lines of a gap are not read, they are taken as lost."""

    def __init__(self, lines: QuotedLines, calls: Calls) -> None:
        self._lines = lines
        self._calls = calls

    def align(self, longest: CommHandle, handle: CommHandle) -> Alignment:
        """Follow the calls of two ranks over lost lines, to a difference or the end of one."""
        left = _numbers(longest)
        right = _numbers(handle)
        alignment = Alignment()
        while True:
            count = _num_common(left, alignment.left, right, alignment.right)
            alignment.left += count
            alignment.right += count
            if 4 * alignment.left >= len(left) or 4 * alignment.right >= len(right):
                self._add_lost_end(longest, handle, alignment)
                return alignment
            gap = self._gap((longest, left), (handle, right), alignment)
            if gap is None:
                self._end(longest, handle, alignment)
                return alignment
            alignment.lose(*gap)
            alignment.num_gaps += 1
            alignment.left += gap[0]
            alignment.right += gap[1]

    def _end(self, longest: CommHandle, handle: CommHandle, at: Alignment) -> None:
        """Note a difference, or lost lines if the calls have different numbers: no pair."""
        shift = self._shift(longest, handle, at, at.left, at.right)
        grouped = (self._is_grouped(longest, at.left), self._is_grouped(handle, at.right))
        if shift and not any(grouped):
            at.lose(max(shift, 0), max(-shift, 0))
            at.is_cut = True
        else:
            at.differs = True

    def _add_lost_end(self, longest: CommHandle, handle: CommHandle, at: Alignment) -> None:
        """Count missing calls as lost if the last calls of both ranks have one opCount."""
        num_missing = len(longest.sequence.calls) - at.left
        if not num_missing or not at.right:
            return
        last = self._lines.op_count(longest, len(longest.sequence.calls) - 1)
        # Calls of one group share it, and a rank may stop inside a group.
        shared = self._lines.op_count(longest, at.left - 1)
        if last is not None and self._lines.op_count(handle, at.right - 1) == last != shared:
            at.lose(num_missing, 0)
            at.is_cut = True

    def _gap(
        self,
        left: tuple[CommHandle, bytes],
        right: tuple[CommHandle, bytes],
        at: Alignment,
    ) -> tuple[int, int] | None:
        """Return how many calls of each to skip so that they agree; None if none was lost."""
        gaps = []
        shift = self._shift(left[0], right[0], at, at.left, at.right)
        if not shift and _agree(left[1], at.left + 1, right[1], at.right + 1, _REJOIN):
            return None  # one call is another one
        for count in range(1, _MAX_GAP + 1):
            for skipped in ((count, 0), (0, count)):
                i = at.left + skipped[0]
                j = at.right + skipped[1]
                # One call that agrees at the end of one rank's log alone proves nothing.
                if not _agree(left[1], i, right[1], j, 2):
                    continue
                if at.num_gaps >= _MAX_CHECKED or self._continues(left[0], right[0], at, i, j):
                    gaps.append(skipped)
        return gaps[0] if gaps else None

    def _continues(
        self, left: CommHandle, right: CommHandle, at: Alignment, i: int, j: int
    ) -> bool:
        """Return whether opCount goes on over a gap; True while its lines are not read.

        A rank that issued fewer calls counts fewer. Lines of the API have no opCount.
        """
        shift = self._shift(left, right, at, i, j)
        places = ((left, i), (right, j))
        texts = [
            self._lines.text(handle.sequence.place(position)) for handle, position in places
        ]
        return shift == 0 or (shift is None and "" not in texts)

    def _shift(
        self, left: CommHandle, right: CommHandle, at: Alignment, i: int, j: int
    ) -> int | None:
        """Return by how much opCount of the right call is larger; None where it is unknown.

        0 as well if it was as much before and Send and Recv count, on some ranks only.
        """
        low = self._lines.op_count(left, i)
        high = self._lines.op_count(right, j)
        is_first = not at.left or not at.right
        low_before = 0 if is_first else self._lines.op_count(left, at.left - 1)
        high_before = 0 if is_first else self._lines.op_count(right, at.right - 1)
        if low is None or high is None or low_before is None or high_before is None:
            return None
        has_pairs = self._has_pairs(left) or self._has_pairs(right)
        return 0 if has_pairs and high - low == high_before - low_before else high - low

    def _has_pairs(self, handle: CommHandle) -> bool:
        kinds = (self._calls.kinds[key & NUMBER] for key in handle.sequence.unordered)
        return any(call.collective in UNORDERED for call in kinds)

    def _is_grouped(self, handle: CommHandle, position: int) -> bool:
        """Return whether a call has the opCount of the one before, as calls of a group do."""
        count = self._lines.op_count(handle, position)
        return position > 0 and count == self._lines.op_count(handle, position - 1)


def _numbers(handle: CommHandle) -> bytes:
    """Return four bytes per call: its number, without its thread and line."""
    numbers = bytearray(handle.sequence.keys().tobytes())
    numbers[3 * HIGH_HALF :: 4] = bytes(len(numbers) // 4)
    return bytes(numbers)


def _agree(left: bytes, i: int, right: bytes, j: int, least: int) -> bool:
    """Return whether the next `least` calls agree, or all of both logs up to their end."""
    rests = (len(left) // 4 - i, len(right) // 4 - j)
    num = min(_REJOIN, *rests)
    is_enough = num >= least or (num > 0 and rests[0] == rests[1])
    return is_enough and left[4 * i : 4 * (i + num)] == right[4 * j : 4 * (j + num)]


def _num_common(left: bytes, i: int, right: bytes, j: int) -> int:
    """Return how many calls from these positions on are equal, in blocks of growing size."""
    most = min(len(left) // 4 - i, len(right) // 4 - j)
    equal = 0
    block = 64
    while equal < most:
        high = min(most, equal + block)
        if left[4 * (i + equal) : 4 * (i + high)] == right[4 * (j + equal) : 4 * (j + high)]:
            equal = high
            block = block * 2
        elif high - equal == 1:
            break
        else:
            block = (high - equal) // 2
            most = high
    return equal


# Elements and type -> number of calls, and file and line of the first.
_Calls = dict[tuple[int, int], tuple[int, tuple[int, ...]]]


class Comparison(NamedTuple):
    """Where ranks of a communicator differ."""

    mismatches: list[Mismatch]
    lagging: list[LaggingRank]
    peers: list[PeerDifference]
    lost: list[LostCalls]


def compare_sequences(
    handles: Sequence[CommHandle], calls: Calls, files: Sequence[Path]
) -> Comparison:
    """Return the first call at which ranks of a communicator differ; else the ranks behind.

    Lines that decide between lost lines and a difference are read again, until none is missing.
    """
    comparison = _Comparison(calls, files)
    result = comparison.run(handles)
    for _ in range(_MAX_PASSES):
        if not comparison.lines.read():
            break
        result = comparison.run(handles)
    return result


class _Comparison:
    """Compares the calls of ranks, and notes which lines of `files` must be quoted."""

    def __init__(self, calls: Calls, files: Sequence[Path]) -> None:
        self._calls = calls
        self._files = files
        self.lines = QuotedLines(files)

    def run(self, handles: Sequence[CommHandle]) -> Comparison:
        result = Comparison([], [], [], [])
        if "" in self._calls.broken:
            return result
        aligner = Aligner(self.lines, self._calls)
        for group, is_certain in _groups(handles, self._calls.broken):
            longest = max(group, key=lambda handle: len(handle.sequence.calls))
            aligned = [(h, aligner.align(longest, h)) for h in group if h is not longest]
            lost = list(self._lost(group, longest, aligned, is_certain))
            result.lost.extend(lost)
            different = [pair for pair in aligned if pair[1].differs]
            if different and not lost:
                position = min(alignment.left for _, alignment in different)
                result.mismatches.append(self._mismatch(group, position, is_certain))
            elif different:
                handle, first = min(different, key=lambda pair: pair[1].left)
                result.mismatches.append(
                    Mismatch(
                        communicator=_name_of(group, is_certain),
                        position=first.left,
                        sides=(
                            self._issued(longest, first.left),
                            self._issued(handle, first.right),
                        ),
                        issuers=(_issuers([longest]), _issuers([handle])),
                        certain=is_certain,
                    )
                )
            else:
                result.lagging.extend(self._lagging_ranks(group, longest, aligned, is_certain))
            if self._calls.has_all_peers:
                result.peers.extend(self._peers(group, is_certain))
        return result

    def _peers(self, group: Sequence[CommHandle], is_certain: bool) -> Iterator[PeerDifference]:
        """Yield pairs of ranks of which one sent something else than the other received."""
        ranks = {handle.rank for handle in group}
        ways: dict[tuple[int, int], tuple[_Calls, _Calls]] = {}
        for handle in group:
            for key, counter in handle.sequence.unordered.items():
                call = self._calls.kinds[key & NUMBER]
                if call.collective not in UNORDERED or call.root not in ranks:
                    continue
                if call.root is None or handle.rank is None:
                    continue
                is_send = call.collective == "send"
                way = (handle.rank, call.root) if is_send else (call.root, handle.rank)
                side = ways.setdefault(way, ({}, {}))[0 if is_send else 1]
                size = (call.elements, call.dtype)
                side[size] = (side.get(size, (0, ()))[0] + counter.calls, counter.first)
        for (source, target), (sent, received) in ways.items():
            if {size: n for size, (n, _) in sent.items()} == {
                size: n for size, (n, _) in received.items()
            }:
                continue
            yield self._difference(
                _name_of(group, is_certain), (source, target), sent, received, is_certain
            )

    def _difference(
        self,
        communicator: str,
        way: tuple[int, int],
        sent: "_Calls",
        received: "_Calls",
        is_certain: bool,
    ) -> PeerDifference:
        sides: list[tuple[str, ...]] = []
        evidence = []
        for own, other in ((sent, received), (received, sent)):
            sizes = [s for s in own if own[s][0] != other.get(s, (0, ()))[0]][:_MAX_SHOWN]
            sides.append(tuple(f"{elements} {type_name(dtype)}" for elements, dtype in sizes))
            for size in sizes[:2]:
                index, line = own[size][1]
                text = self.lines.text((index, line))
                file = str(self._files[index])
                evidence.append(Evidence(file=file, line=line, text=text or sides[-1][0]))
        return PeerDifference(
            communicator=communicator,
            source=way[0],
            target=way[1],
            num_sent=sum(calls for calls, _ in sent.values()),
            num_received=sum(calls for calls, _ in received.values()),
            sent=sides[0],
            received=sides[1],
            evidence=tuple(evidence),
            certain=is_certain,
        )

    def _mismatch(
        self, group: Sequence[CommHandle], position: int, is_certain: bool
    ) -> Mismatch:
        issuers = [handle for handle in group if len(handle.sequence.calls) > position]
        kinds = group_by(issuers, lambda handle: handle.sequence.number(position))
        by_size = sorted(kinds.values(), key=len, reverse=True)
        return Mismatch(
            communicator=_name_of(group, is_certain),
            position=position,
            sides=tuple(self._issued(ranks[0], position) for ranks in by_size),
            issuers=tuple(map(_issuers, by_size)),
            certain=is_certain,
        )

    def _lagging_ranks(
        self,
        group: Sequence[CommHandle],
        longest: CommHandle,
        aligned: Sequence[tuple[CommHandle, Alignment]],
        is_certain: bool,
    ) -> Iterator[LaggingRank]:
        num_calls = len(longest.sequence.calls)
        for handle, alignment in aligned:
            if alignment.left < num_calls and not alignment.is_cut:
                own = len(handle.sequence.calls)
                yield LaggingRank(
                    communicator=_name_of(group, is_certain),
                    issued=own + alignment.lost_right,
                    most=num_calls + alignment.lost_left,
                    last=self._issued(handle, own - 1) if own else None,
                    missing=self._issued(longest, alignment.left),
                    rank=handle.rank,
                    process=handle.process,
                )

    def _lost(
        self,
        group: Sequence[CommHandle],
        longest: CommHandle,
        aligned: Sequence[tuple[CommHandle, Alignment]],
        is_certain: bool,
    ) -> Iterator[LostCalls]:
        """Yield ranks whose log lacks calls in its middle."""
        counts = [(handle, alignment.lost_right) for handle, alignment in aligned]
        counts.append((longest, max(alignment.lost_left for _, alignment in aligned)))
        gaps = [a.first_gap for _, a in aligned if a.first_gap is not None]
        for handle, count in counts:
            if count:
                yield LostCalls(
                    communicator=_name_of(group, is_certain),
                    rank=handle.rank,
                    process=handle.process,
                    lines=count,
                    before=self._issued(longest, min(gaps)),
                    certain=bool(self.lines.op_count(longest, min(gaps))),
                )

    def _issued(self, handle: CommHandle, position: int) -> IssuedCall:
        index, line = handle.sequence.place(position)
        call = self._calls.kinds[handle.sequence.number(position)].text()
        text = self.lines.text((index, line)) or call
        return IssuedCall(
            rank=handle.rank,
            process=handle.process,
            call=call,
            evidence=Evidence(file=str(self._files[index]), line=line, text=text),
        )


def _issuers(handles: Sequence[CommHandle]) -> tuple[tuple[str, int | None], ...]:
    return tuple((handle.process, handle.rank) for handle in handles)


def _groups(
    handles: Sequence[CommHandle], broken: set[str]
) -> Iterator[tuple[list[CommHandle], bool]]:
    """Yield ranks that form one communicator, and whether the log states that they do.

    Where its start was not logged, ranks of different processes and devices are assumed to form
    one communicator if there are as many of them as it has ranks.
    """
    started = [handle for handle in handles if handle.comm_id]
    others = [h for h in handles if not h.comm_id and h.num_ranks and h.sequence.calls]
    # In a process without any logged call, logging of calls is off.
    with_calls = {handle.process for handle in handles if handle.sequence.calls}
    for members in group_by(started, lambda handle: handle.comm_id).values():
        group = [handle for handle in members if handle.process in with_calls]
        # The log has the start of these: a rank that begins at a later call has lost some.
        has_pairs = any(handle.sequence.unordered for handle in group)
        if _are_ranks(group, [handle.rank for handle in group], broken, has_pairs):
            yield group, True
    for size, group in group_by(others, lambda handle: handle.num_ranks).items():
        places = [(handle.process, handle.device) for handle in group]
        if len(group) == size and _are_ranks(group, places, broken, True):
            yield group, False


def _are_ranks(
    group: Sequence[CommHandle],
    names: Sequence[object],
    broken: set[str],
    begin_together: bool,
) -> bool:
    first_counts = {handle.sequence.first_op_count for handle in group if handle.sequence.calls}
    return (
        len(group) > 1
        and len(set(names)) == len(group)
        and None not in names
        and not any(handle.process in broken for handle in group)
        and (len(first_counts) == 1 or not begin_together)
    )


def _name_of(group: Sequence[CommHandle], is_certain: bool) -> str:
    return group[0].key if is_certain else f"of {len(group)} ranks"
