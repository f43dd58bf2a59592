"""Options with lists of values: the grid of their combinations."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stepmark.ground.options import Option, build, dashed, options

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Axis:
    """An option with its values."""

    option: Option
    values: tuple[Any, ...]

    @property
    def title(self) -> str:
        """Return the shortest of its long spellings, as a heading: vpp."""
        long = (word for word in self.option.words if word.startswith("--"))
        return min(long, key=len).removeprefix("--")

    @property
    def name(self) -> str:
        """Return the name of its column: the title, as a keyword."""
        return self.title.replace("-", "_")

    def plain(self, value: Any) -> int | str:
        """Return a value as a row has it: a whole number, or the text that was typed."""
        text = self.option.reader.show(value)
        return int(text) if text.isdecimal() else text


@dataclass(frozen=True, slots=True)
class Grid(Generic[T_co]):
    """Options, and the axes along which they vary. options: with the first value of each."""

    options: T_co
    axes: tuple[Axis, ...]

    def __len__(self) -> int:
        """Return the number of combinations."""
        count = 1
        for axis in self.axes:
            count *= len(axis.values)
        return count

    def points(self) -> Iterator[tuple[dict[str, int | str], T_co]]:
        """Yield the place of each combination, by the names of its options, and its options."""
        names = [axis.option.name for axis in self.axes]
        for values in itertools.product(*(axis.values for axis in self.axes)):
            place = {
                axis.name: axis.plain(value)
                for axis, value in zip(self.axes, values, strict=True)
            }
            changes: dict[str, Any] = dict(zip(names, values, strict=True))
            yield place, dataclasses.replace(self.options, **changes)  # type: ignore[type-var]


def read_grid(
    cls: type[T],
    arguments: Mapping[str, object],
    names: Collection[str],
    lists: Collection[str] = (),
) -> Grid[T]:
    """Return the options of a command line's arguments, see `build`.

    names: of the options whose values may be a list with commas between them. lists: those of
    which one value is a list, too. Raises ConfigError for a value that cannot be read, wherever
    it is in a list.
    """
    axes = []
    first = dict(arguments)
    for option in options(cls):
        text = arguments.get(option.name)
        if option.name not in names or not isinstance(text, str):
            continue
        values = tuple(dict.fromkeys(_values(option, text)))
        first[option.name] = option.reader.show(values[0])
        if len(values) > 1 or option.name in lists:
            axes.append(Axis(option, values))
    return Grid(build(cls, first), tuple(axes))


def _values(option: Option, text: str) -> Iterator[Any]:
    """Yield each value of a list; an option that takes several at once has tuples of one."""
    field = dashed(option.name)
    if option.reader.is_sequence:
        yield from ((item,) for item in option.reader.read(text, field))
    else:
        yield from (option.reader.read(word.strip(), field) for word in text.split(","))
