"""Align the calls of two ranks over lines that a log lost.

Where the calls agree again after a gap in one, and opCount continues over it, lines were lost.
One other call, before calls that agree, is a difference.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.job_logs.nccl_log.communicators import CommHandle
from stepmark.job_logs.nccl_log.lines import HIGH_HALF, NUMBER, UNORDERED, Calls, quotes

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

    def lose(self, shift: int) -> None:
        """Count lost calls, of the right one if positive, and end here."""
        self.first_gap = self.left if self.first_gap is None else self.first_gap
        self.is_cut = True
        self.lost_right += max(shift, 0)
        self.lost_left += max(-shift, 0)


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
            if alignment.first_gap is None:
                alignment.first_gap = alignment.left
            alignment.num_gaps += 1
            alignment.left += gap[0]
            alignment.right += gap[1]
            alignment.lost_right += gap[0]
            alignment.lost_left += gap[1]

    def _end(self, longest: CommHandle, handle: CommHandle, at: Alignment) -> None:
        """Note a difference, or lost lines if the calls have different numbers: no pair."""
        shift = self._shift(longest, handle, at, at.left, at.right)
        grouped = (self._is_grouped(longest, at.left), self._is_grouped(handle, at.right))
        if shift and not any(grouped):
            at.lose(shift)
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
            at.lose(num_missing)

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
