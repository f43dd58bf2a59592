"""Notes on a prediction, and their order on a screen that has room for few."""

from collections.abc import Iterable, Iterator
from enum import IntEnum, auto

MOST_NOTES = 3  # on a screen that is not asked for all


class Topic(IntEnum):
    """What a note is about; the first changes the most of what a reader concludes.

    A step without some of its work is another step, and then no other note matters. An option
    without effect, or the step without --what-if, answers what was asked. Memory decides
    whether the step runs at all, missing parts of a model what the figures are of, and a
    calibration that misses its own step how far they are off, often by more than 10 %. An
    unknown host may bound a short step. Then come costs without a measurement, by what they are
    off by: rules more than networks, these more than contention. The interval has all of these
    errors and is printed already; where costs are from says nothing against them.
    """

    LOWER_BOUND = auto()
    OPTIONS = auto()
    MEMORY = auto()
    MODEL = auto()
    CALIBRATION = auto()
    HOST = auto()
    RULES = auto()
    NETWORK = auto()
    CONTENTION = auto()
    INTERVAL = auto()
    ORIGIN = auto()


class Note(str):
    """A note that knows its topic; a plain string is one on where costs are from."""

    topic: Topic

    @classmethod
    def of(cls, topic: Topic, text: str) -> "Note":
        note = cls(text)
        note.topic = topic
        return note


def noted(topic: Topic, texts: Iterable[str]) -> Iterator[Note]:
    """Yield texts as notes on a topic; notes keep their own."""
    return (text if isinstance(text, Note) else Note.of(topic, text) for text in texts)


def topic_of(note: str) -> Topic:
    return note.topic if isinstance(note, Note) else Topic.ORIGIN


def note_lines(lines: Iterable[str], most: int | None, rest: str) -> Iterator[str]:
    """Yield the first lines, and how many more there are. rest: what has them."""
    ordered = [*lines]
    most = len(ordered) if most is None else most
    yield from ordered[:most]
    if count := len(ordered[most:]):
        yield f"{count} more {'note' if count == 1 else 'notes'}: {rest}"
