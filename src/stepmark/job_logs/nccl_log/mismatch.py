"""Find where the ranks of a communicator issued different collectives, or one issued fewer.

Ranks are compared by position in the log and not by opCount: some versions leave it at 0, and
calls of one group share it. Only at the first line must it be equal, else parts are missing.
Send and Recv differ by rank: what one rank sent is compared with what its peer received. A rank
with a cut line is not compared; where a line has lost its process, no rank is.
"""

from collections.abc import Iterator, Sequence
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
from stepmark.job_logs.nccl_log.alignment import Aligner, Alignment, QuotedLines
from stepmark.job_logs.nccl_log.communicators import CommHandle
from stepmark.job_logs.nccl_log.lines import NUMBER, UNORDERED, Calls, type_name

_MAX_SHOWN = 4
_MAX_PASSES = 8


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
        kinds: dict[int, list[CommHandle]] = {}
        for handle in group:
            if len(handle.sequence.calls) > position:
                kinds.setdefault(handle.sequence.number(position), []).append(handle)
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
                    certain=is_certain,
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
    by_id: dict[str, list[CommHandle]] = {}
    by_size: dict[int, list[CommHandle]] = {}
    for handle in handles:
        if handle.comm_id:
            by_id.setdefault(handle.comm_id, []).append(handle)
        elif handle.num_ranks and handle.sequence.calls:
            by_size.setdefault(handle.num_ranks, []).append(handle)
    # In a process without any logged call, logging of calls is off.
    with_calls = {handle.process for handle in handles if handle.sequence.calls}
    for members in by_id.values():
        group = [handle for handle in members if handle.process in with_calls]
        # The log has the start of these: a rank that begins at a later call has lost some.
        has_pairs = any(handle.sequence.unordered for handle in group)
        if _are_ranks(group, [handle.rank for handle in group], broken, has_pairs):
            yield group, True
    for size, group in by_size.items():
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
