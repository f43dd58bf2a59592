"""The order of a PARAM trace: numbered requests, and each wait where it belongs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepmark.core.workload import COMPUTE, CommOp, Operation, Workload
from stepmark.workload.formats.ranks import Issued


@dataclass(frozen=True, slots=True)
class Line:
    """An operation's entry but for its request; "" where PARAM has none."""

    operation: Operation
    text: str
    pair: tuple[int, int] | None  # source and destination of a message


class Queue:
    """Numbers requests, puts waits where they belong: of calls in one behind the last."""

    def __init__(self, workload: Workload) -> None:
        self._issued = Issued(workload)
        self._outstanding: set[int] = set()
        self._held: list[Line] = []  # sends and receives that may be one call
        self._next = 0

    def add(self, line: Line) -> Iterator[str]:
        one = line.operation
        joins = self._held and line.pair and isinstance(one, CommOp) and one.fused
        if not joins:
            yield from self.flush()
        for request in self._issued.find(one.after):
            if request in self._outstanding:
                self._outstanding.discard(request)
                yield _wait(request)
        if line.pair:
            self._held.append(line)
        elif line.text and isinstance(one, CommOp):
            yield from self._post([line])
        elif line.text:
            yield line.text + "}"

    def flush(self) -> Iterator[str]:
        if self._held:
            held, self._held = self._held, []
            yield from self._post(sorted(held, key=lambda line: line.pair or ()))

    def _post(self, lines: Sequence[Line]) -> Iterator[str]:
        first = self._next
        for request, line in enumerate(lines, first):
            yield f'{line.text},"req":{request}}}'
        self._next += len(lines)
        for request, line in enumerate(lines, first):
            one = line.operation
            if self._issued.note(one.name, request) and one.stream != COMPUTE:
                self._outstanding.add(request)
            if one.stream == COMPUTE:
                yield _wait(request)


def _wait(request: int) -> str:
    return f'{{"comms":"wait","req":{request}}}'
