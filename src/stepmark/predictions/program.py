"""The program of a pipeline stage, from which a step is simulated."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from stepmark.predictions.works import Call, Placed


class Program:
    """One stage's items in issue order, each a Segment or a Call.

    offsets: layer and micro-batch of each. streams: their numbers; 0 is COMPUTE. deps: items of
    the step on other streams that an item waits for; next_dependents wait for one in the next
    step. bounds: items at which a repetition of the steady state begins, and where the last
    ends.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        streams: Sequence[int],
        deps: Sequence[Collection[int]],
        next_dependents: Mapping[int, Sequence[int]],
    ) -> None:
        self.works = [work for work, _, _ in placed]
        self.offsets = [(layer, microbatch) for _, layer, microbatch in placed]
        self.streams = streams
        self.deps = deps
        self.next_dependents = next_dependents
        self.host_s = sum(work.host_s for work in self.works)
        self.bounds: Sequence[int] = ()

    @cached_property
    def queues(self) -> list[list[int]]:
        """Items by stream."""
        queues: list[list[int]] = [[] for _ in range(max(self.streams, default=0) + 1)]
        for item, stream in enumerate(self.streams):
            queues[stream].append(item)
        return queues

    @cached_property
    def dependents(self) -> Mapping[int, Sequence[int]]:
        """Items that wait for an item of the same step."""
        dependents = defaultdict[int, list[int]](list)
        for item, deps in enumerate(self.deps):
            for dep in deps:
                dependents[dep].append(item)
        return dependents

    @cached_property
    def begins(self) -> list[float]:
        """Seconds of the host before it begins to issue each item."""
        return [0.0, *accumulate(work.host_s for work in self.works)][:-1]

    @cached_property
    def issues(self) -> list[float]:
        """Seconds of the host before each item can start."""
        return [
            begin + (work.host_s if isinstance(work, Call) else work.issues[0])
            for begin, work in zip(self.begins, self.works, strict=True)
        ]

    @cached_property
    def calls(self) -> list[tuple[int, Call]]:
        """Items that are calls."""
        return [(item, work) for item, work in enumerate(self.works) if isinstance(work, Call)]

    @cached_property
    def ordinals(self) -> Mapping[int, Sequence[int]]:
        """Of the parts of a call, their number among those of the same key."""
        counts = Counter[object]()
        ordinals = dict[int, list[int]]()
        for item, call in self.calls:
            own = ordinals[item] = list[int]()
            for part in call.parts:
                own.append(counts[part.key])
                counts[part.key] += 1
        return ordinals

    def waits_for(self, item: int, other: int) -> bool:
        """Return whether an item waits for another, or for a later one of its stream."""
        stream = self.streams[other]
        return any(dep >= other and self.streams[dep] == stream for dep in self.deps[item])
