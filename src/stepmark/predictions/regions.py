"""Regions: parts of a program that begin and end with computation, simulated once."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from stepmark.predictions.step_events import Lane
from stepmark.predictions.works import Placed, Segment
from stepmark.step.workload import COMPUTE


class Region(Segment):
    """Computation with calls beside it, which begin after it does and end before it does.

    Nothing outside waits for what is inside or slows it, and its host is ahead of it. placed:
    the items. streams: those of the calls beside. run_alone: returns a stage that has run the
    items alone, from second 0 to total_s.
    """

    def __init__(
        self, placed: Sequence[Placed], total_s: float, run_alone: Callable[[], Lane]
    ) -> None:
        works = [work for work, _, _ in placed]
        self.placed = placed
        self.total_s = total_s
        self._run_alone = run_alone
        self.streams = {work.ops[0].stream for work in works} - {COMPUTE}
        for work in works:
            if isinstance(work, Region):
                self.streams |= work.streams
        self.ops = works[0].ops
        self.host_s = sum(work.host_s for work in works)
        self.issues = [self.host_s]
        self.num_kernels = sum(work.num_kernels for work in works)
        self.computed_s = sum(work.computed_s for work in works if isinstance(work, Segment))

    @cached_property
    def lane(self) -> Lane:
        """The stage that has run the expanded items alone."""
        return self._run_alone()


def expanded(placed: Placed) -> Iterator[Placed]:
    """Yield the items of a Region and of those inside of it, or the item itself."""
    work, layer, microbatch = placed
    if not isinstance(work, Region):
        yield placed
        return
    for each, own, mb in work.placed:
        yield from expanded((each, layer + own, microbatch + mb))
