"""What ran on the streams of a GPU during one step, in few bars."""

from dataclasses import dataclass
from typing import NamedTuple


class Bar(NamedTuple):
    """Events of one stream that follow one another closely, as one bar.

    group: of most of their time; name: of the longest; busy: sum of their times, ns.
    """

    stream: str
    start: int
    end: int
    group: str
    name: str
    num_events: int
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The window of a step on one rank. joined_ns: shorter pauses are inside bars."""

    step: int | None  # None: the trace has no marks of steps
    start: int
    end: int
    joined_ns: int
    bars: tuple[Bar, ...]
