"""Typed options of a verb: frozen dataclasses that read, check, spell and group themselves.

A field is declared with `flag(help, *spellings)`. Its type reads and spells the value:
`Size = Annotated[int, Reader(...)]`. The class that declares it is its group in `--help`.
"""

import dataclasses
import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from stepmark.core.errors import ConfigError
from stepmark.core.units import GIB, KIB, MIB, parse_bytes, parse_duration, parse_share

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How a value is read from text, and spelled so that reading gives it back.

    read: text and field to value, raises ConfigError.
    """

    read: Callable[[str, str], Any]
    show: Callable[[Any], str] = str
    metavar: str = "<str>"


@dataclass(frozen=True, slots=True)
class Flag:
    """What `flag` declares. help: one line; spellings: the first is the one that is printed."""

    help: str
    spellings: tuple[str, ...] = ()
    argument: bool = False
    metavar: str = ""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def group(cls: type[T]) -> type[T]:
    """Declare a group of options for other classes to inherit.

    A dataclass without methods, which take most of the time that defining one takes.
    """
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(cls)


REQUIRED: Any = dataclasses.MISSING


def flag(
    help: str, *spellings: str, default: Any = None, argument: bool = False, metavar: str = ""
) -> Any:
    """A dataclass field that is an option, or a positional argument.

    default=REQUIRED: it must be given.
    """
    declared = Flag(help, spellings, argument, metavar)
    return dataclasses.field(default=default, metadata={"flag": declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One field of an options class, as the command line and its help need it."""

    name: str
    group: str
    help: str
    spellings: tuple[str, ...]  # of a switch: --on/--no-on or --on
    argument: bool
    default: Any
    reader: Reader
    is_switch: bool
    is_list: bool  # given several times, or several words
    metavar: str

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the opposite ones of a switch too."""
        return tuple(word for one in self.spellings for word in one.split("/"))


def options(cls: type) -> tuple[Option, ...]:
    """The options of a class, those of its own first and then by base class."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _declared(cls)
    return _KNOWN[cls]


_KNOWN: dict[type, tuple[Option, ...]] = {}


def _declared(cls: type) -> tuple[Option, ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    groups = _groups(cls)
    found = []
    for field in dataclasses.fields(cls):
        declared: Flag = field.metadata["flag"]
        kind, is_list = _element(hints[field.name])
        reader = _reader(kind)
        found.append(
            Option(
                name=field.name,
                group=groups[field.name],
                help=declared.help,
                spellings=declared.spellings or (_dashed(field.name),),
                argument=declared.argument,
                default=field.default,
                reader=reader,
                is_switch=kind is bool,
                is_list=is_list,
                metavar=declared.metavar or reader.metavar,
            )
        )
    order = list(dict.fromkeys(groups[name] for name in groups))
    return tuple(sorted(found, key=lambda one: order.index(one.group)))


def _groups(cls: type) -> dict[str, str]:
    """The class that declares each field, by the title that its docstring is."""
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        for name in inspect.get_annotations(owner):
            title = (owner.__doc__ or owner.__name__).partition("\n")[0]
            found.setdefault(name, title.rstrip("."))
    return found


def _dashed(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")


def _element(hint: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there may be several; of `int | None` it is int."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _reader(kind: Any) -> Reader:
    if typing.get_origin(kind) is Annotated:
        found: Reader = kind.__metadata__[0]
        return found
    if kind in _READERS:
        return _READERS[kind]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return one_of(kind)
    raise TypeError(f"{kind} has no Reader")


def _whole(text: str, field: str) -> int:
    try:
        if len(text) > 40:
            raise ValueError
        return int(text)
    except ValueError:
        raise ConfigError(field, text, "a whole number") from None


def _number(text: str, field: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(field, text, "a number") from None


def exact(value: float) -> str:
    """A number so that reading it gives the same; 4.0 is 4."""
    return repr(value).removesuffix(".0")


_READERS: dict[Any, Reader] = {
    str: Reader(read=lambda text, field: text),
    int: Reader(read=_whole, metavar="<int>"),
    float: Reader(read=_number, show=exact, metavar="<float>"),
    bool: Reader(read=lambda text, field: text == "True"),
    Path: Reader(read=lambda text, field: Path(text), metavar="PATH"),
}


def one_of(kind: type[StrEnum]) -> Reader:
    """A member of an enumeration, in any case of letters."""

    def read(text: str, field: str) -> StrEnum:
        try:
            return kind(text.lower())
        except ValueError:
            raise ConfigError(field, text, f"one of {', '.join(kind)}") from None

    return Reader(read=read)


def words_of(*allowed: str) -> Reader:
    """One of these words."""

    def read(text: str, field: str) -> str:
        if text not in allowed:
            raise ConfigError(field, text, f"one of {', '.join(allowed)}")
        return text

    return Reader(read=read)


def between(low: float, high: float) -> Reader:
    """A number within limits; whole where the limits are."""
    is_whole = isinstance(low, int) and isinstance(high, int)

    def read(text: str, field: str) -> float:
        value = (_whole if is_whole else _number)(text, field)
        if not math.isfinite(value) or not low <= value <= high:
            raise ConfigError(field, text, f"from {exact(low)} to {exact(high)}")
        return value

    return Reader(read=read, show=exact, metavar="<int>" if is_whole else "<float>")


def _duration(seconds: float) -> str:
    return f"{exact(seconds)}s"


def _size(num_bytes: int) -> str:
    """Exactly, in the largest unit that has no remainder; 1536 stays 1536."""
    for letter, unit in (("T", 2**40), ("G", GIB), ("M", MIB), ("K", KIB)):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def comma_list(of: Reader, everything: tuple[Any, ...] = ()) -> Reader:
    """A tuple of values with commas between them; `all` stands for everything."""

    def read(text: str, field: str) -> tuple[Any, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ConfigError(field, text, "at least one word")
        if everything and words == ["all"]:
            return everything
        return tuple(of.read(word, field) for word in words)

    def show(values: tuple[Any, ...]) -> str:
        return "all" if values and values == everything else ",".join(map(of.show, values))

    return Reader(read=read, show=show, metavar=f"{of.metavar},...")


def _ranges(text: str, field: str) -> tuple[int, ...]:
    """'1,2' or '1-8'."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 40:
            raise ConfigError(field, text, "whole numbers such as 1, 1,2 or 1-8")
        last = int(high) if dash else int(low)
        if not 1 <= int(low) <= last <= 2**20 or last - int(low) > 4096:
            raise ConfigError(field, text, "a rising range from 1")
        numbers += range(int(low), last + 1)
    return tuple(numbers)


Words = Annotated[tuple[str, ...], comma_list(_READERS[str])]
WholeNumbers = Annotated[
    tuple[int, ...],
    Reader(read=_ranges, show=lambda numbers: ",".join(map(str, numbers)), metavar="1,2|1-8"),
]
Size = Annotated[int, Reader(read=parse_bytes, show=_size, metavar="SIZE")]
Share = Annotated[float, Reader(read=parse_share, show=exact, metavar="SHARE")]
Duration = Annotated[float, Reader(read=parse_duration, show=_duration, metavar="DURATION")]


def load(name: str) -> Any:
    """Import what "module:name" names, such as a handler of a verb."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(cls: type[T], given: Mapping[str, object]) -> T:
    """Options from what a command line gave: text, lists of text, and switches.

    The only place that reads text; None is the default. Raises ConfigError.
    """
    values: dict[str, object] = {}
    for option in options(cls):
        value = given.get(option.name)
        if value is None or (option.is_list and not value):
            if option.default is REQUIRED:
                raise ConfigError(_field(option), "missing", option.help)
            continue
        if isinstance(value, list | tuple):
            values[option.name] = tuple(_read(option, one) for one in value)
        else:
            values[option.name] = _read(option, value)
    return cls(**values)


def _read(option: Option, value: object) -> object:
    return option.reader.read(value, _field(option)) if isinstance(value, str) else value


def _field(option: Option) -> str:
    return option.name.rstrip("_").replace("_", "-")


def plain(given: object) -> dict[str, Any]:
    """What differs from the defaults, as plain data; `build` makes the same options of it."""
    found: dict[str, Any] = {}
    for option in options(type(given)):
        value = getattr(given, option.name)
        if value is None or value == option.default:
            continue
        show = (lambda one: one) if option.is_switch else option.reader.show
        found[option.name] = [show(one) for one in value] if option.is_list else show(value)
    return found


def argv(given: object) -> list[str]:
    """The words that give these options again: only what differs from the default."""
    found: list[str] = []
    arguments: list[str] = []
    for option in options(type(given)):
        value = getattr(given, option.name)
        if value is None or value == option.default:
            continue
        values = value if option.is_list else (value,)
        if option.argument:
            arguments += map(option.reader.show, values)
            continue
        found += (word for one in values for word in _spelled(option, one))
    apart = ["--"] if any(word.startswith("-") for word in arguments) else []
    return [*found, "--", *arguments] if apart else [*arguments, *found]


def _spelled(option: Option, value: object) -> Iterator[str]:
    name = option.spellings[0]
    if option.is_switch:
        on, _, off = name.partition("/")
        yield on if value else off
        return
    text = option.reader.show(value)
    if text.startswith("-") or not text:
        long = next((one for one in option.spellings if one.startswith("--")), name)
        yield f"{long}={text}"
        return
    yield name
    yield text
