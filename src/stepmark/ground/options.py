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
from typing import Annotated, Any, Literal, TypeVar

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.units import GIB, KIB, MIB, parse_bytes, parse_duration, parse_share

T = TypeVar("T")
Names = Literal["", "model", "device", "framework", "format", "run", "network"]
_MAX_CHOICES = 40  # characters of a placeholder
WHOLE = "N"
REAL = "NUMBER"
_LIST = ",..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Conversion of a value from text, and back to text that reads as the same value.

    read: text and field to value, raises ConfigError. metavar: what help calls a value; without
    one it is the name of the option. choices: of a closed set, else empty.
    is_sequence: a value is a tuple of all that the text lists.
    """

    read: Callable[[str, str], Any]
    show: Callable[[Any], str] = str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    is_sequence: bool = False


@dataclass(frozen=True, slots=True)
class Flag:
    """Declaration of an option. help: one line; spellings: the first one is printed.

    help: "" leaves it out of every list. rare: only --help-all lists it. names: of what a
    shell completes, where other values are valid, too.
    """

    help: str
    spellings: tuple[str, ...] = ()
    argument: bool = False
    metavar: str = ""
    rare: bool = False
    names: Names = ""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def group(cls: type[T]) -> type[T]:
    """Declare a group of options for other classes to inherit.

    A dataclass without methods, which take most of the time that defining one takes.
    """
    return dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)(cls)


REQUIRED: Any = dataclasses.MISSING


def flag(
    help: str,
    *spellings: str,
    default: Any = None,
    argument: bool = False,
    metavar: str = "",
    rare: bool = False,
    names: Names = "",
) -> Any:
    """Declare a dataclass field as an option or a positional argument, see Flag.

    default=REQUIRED: it must be given.
    """
    declaration = Flag(help, spellings, argument, metavar, rare, names)
    return dataclasses.field(default=default, metadata={"flag": declaration})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Flag):
    """One field of an options class, as the command line and its help need it.

    spellings: of a switch --on/--no-on or --on.
    """

    name: str
    group: str
    default: Any
    reader: Reader
    is_switch: bool
    is_list: bool  # given several times, or several words

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the opposite ones of a switch too."""
        return tuple(word for spelling in self.spellings for word in spelling.split("/"))


_OPTIONS: dict[type, tuple[Option, ...]] = {}  # functools.cache rejects classes in mypy


def options(cls: type) -> tuple[Option, ...]:
    """Return the options of a class, its own first and then those of its base classes."""
    if cls in _OPTIONS:
        return _OPTIONS[cls]
    hints = typing.get_type_hints(cls, include_extras=True)
    groups = _groups(cls)
    declared = []
    for field in dataclasses.fields(cls):
        declaration: Flag = field.metadata["flag"]
        kind, is_list = _element(hints[field.name])
        reader = _reader(kind)
        declared.append(
            Option(
                name=field.name,
                group=groups[field.name],
                help=declaration.help,
                spellings=declaration.spellings or (f"--{dashed(field.name)}",),
                argument=declaration.argument,
                default=field.default,
                reader=reader,
                is_switch=kind is bool,
                is_list=is_list,
                metavar=declaration.metavar
                or _metavar(reader, declaration.names or field.name),
                rare=declaration.rare,
                names=declaration.names,
            )
        )
    order = list(dict.fromkeys(groups.values()))
    _OPTIONS[cls] = tuple(sorted(declared, key=lambda option: order.index(option.group)))
    return _OPTIONS[cls]


def _metavar(reader: Reader, name: str) -> str:
    """Return what help calls a value: for text the last word of the option's name."""
    if reader.metavar not in ("", _LIST):
        return reader.metavar
    word = name.rpartition("_")[2].upper()
    return f"{word.removesuffix('S')}{_LIST}" if reader.metavar else word


def _groups(cls: type) -> dict[str, str]:
    """Return the group of each field: the first line of its class's docstring."""
    groups: dict[str, str] = {}
    for owner in cls.__mro__:
        for name in inspect.get_annotations(owner):
            title = (owner.__doc__ or owner.__name__).partition("\n")[0]
            groups.setdefault(name, title.rstrip("."))
    return groups


def dashed(name: str) -> str:
    """Return a field's name as options and messages spell it, without leading dashes."""
    return name.replace("_", "-")


def _element(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value (int of `int | None`) and whether there may be several."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _reader(kind: Any) -> Reader:
    if typing.get_origin(kind) is Annotated:
        reader: Reader = kind.__metadata__[0]
        return reader
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
    """Format a number so that reading it gives the same value; 4.0 is 4."""
    return repr(value).removesuffix(".0")


_READERS: dict[Any, Reader] = {
    str: Reader(read=lambda text, field: text),
    int: Reader(read=_whole, metavar=WHOLE),
    float: Reader(read=_number, show=exact, metavar=REAL),
    bool: Reader(read=lambda text, field: text == "True"),
    Path: Reader(read=lambda text, field: Path(text), metavar="PATH"),
}


def one_of(kind: type[StrEnum]) -> Reader:
    """Return a reader of a member of an enumeration, whatever its case."""

    def read(text: str, field: str) -> StrEnum:
        try:
            return kind(text.lower())
        except ValueError:
            raise not_one_of(field, text, kind) from None

    return Reader(read=read, metavar=_choices(tuple(kind)), choices=tuple(kind))


def words_of(*allowed: str) -> Reader:
    """Return a reader of one of these words."""

    def read(text: str, field: str) -> str:
        if text not in allowed:
            raise not_one_of(field, text, allowed)
        return text

    return Reader(read=read, metavar=_choices(allowed), choices=allowed)


def text_of(*choices: str) -> Reader:
    """Return a reader of text that is checked later, because commas may separate choices."""
    return Reader(read=_READERS[str].read, metavar=_choices(choices), choices=choices)


def _choices(words: tuple[str, ...]) -> str:
    """Return the choices as a placeholder; many are better in a sentence of the help."""
    text = "|".join(words)
    return text if words and len(text) <= _MAX_CHOICES else ""


def between(low: float, high: float) -> Reader:
    """Return a reader of a number within limits; whole where the limits are."""
    is_whole = isinstance(low, int) and isinstance(high, int)

    def read(text: str, field: str) -> float:
        value = (_whole if is_whole else _number)(text, field)
        if not math.isfinite(value) or not low <= value <= high:
            raise ConfigError(field, text, f"from {exact(low)} to {exact(high)}")
        return value

    return Reader(read=read, show=exact, metavar=WHOLE if is_whole else REAL)


def _size(num_bytes: int) -> str:
    """Format a size exactly, in the largest unit without a remainder; 1536 stays 1536."""
    for letter, unit in (("T", 2**40), ("G", GIB), ("M", MIB), ("K", KIB)):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def comma_list(of: Reader, everything: tuple[Any, ...] = ()) -> Reader:
    """Return a reader of values with commas between them; `all` stands for everything."""

    def read(text: str, field: str) -> tuple[Any, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ConfigError(field, text, "at least one word")
        if everything and words == ["all"]:
            return everything
        return tuple(of.read(word, field) for word in words)

    def show(values: tuple[Any, ...]) -> str:
        return "all" if values and values == everything else ",".join(map(of.show, values))

    return Reader(
        read=read,
        show=show,
        metavar=f"{of.metavar}{_LIST}",
        choices=of.choices,
        is_sequence=True,
    )


def read_ranges(text: str, field: str, least: int = 1, most: int = 2**20) -> tuple[int, ...]:
    """Read '1,2' or '1-8'. least, most: limits of a number."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(part) > 40:
            raise ConfigError(field, text, "whole numbers such as 1, 1,2 or 1-8")
        last = int(high) if dash else int(low)
        if not least <= int(low) <= last <= most or last - int(low) > 4096:
            allowed = f"whole numbers from {least}, in rising order in a range"
            raise ConfigError(field, text, allowed)
        numbers += range(int(low), last + 1)
    return tuple(numbers)


Words = Annotated[tuple[str, ...], comma_list(_READERS[str])]
WholeNumbers = Annotated[
    tuple[int, ...],
    Reader(
        read=read_ranges,
        show=lambda numbers: ",".join(map(str, numbers)),
        metavar="1,2|1-8",
        is_sequence=True,
    ),
]
Size = Annotated[int, Reader(read=parse_bytes, show=_size, metavar="SIZE")]
Share = Annotated[float, Reader(read=parse_share, show=exact, metavar="SHARE")]
Duration = Annotated[
    float, Reader(read=parse_duration, show=lambda s: f"{exact(s)}s", metavar="DURATION")
]


def load(name: str) -> Any:
    """Import what "module:name" names, such as a handler of a verb."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(cls: type[T], arguments: Mapping[str, object]) -> T:
    """Return the options of a command line's arguments: text, lists of text, and switches.

    Only this function reads text; None is the default. Raise ConfigError.
    """
    values: dict[str, object] = {}
    for option in options(cls):
        value = arguments.get(option.name)
        if value is None or (option.is_list and not value):
            if option.default is REQUIRED:
                choices = option.reader.choices
                rule = f"one of {', '.join(choices)}" if choices else option.help
                name = dashed(option.name)
                name = name.removesuffix("s") if option.is_list else name
                raise ConfigError(name, "missing", rule)
            continue
        if isinstance(value, list | tuple):
            values[option.name] = tuple(_read(option, item) for item in value)
        else:
            values[option.name] = _read(option, value)
    return cls(**values)


def _read(option: Option, value: object) -> object:
    return option.reader.read(value, dashed(option.name)) if isinstance(value, str) else value


def _changed(instance: object) -> Iterator[tuple[Option, Any]]:
    """Yield each option that differs from its default, with its value."""
    for option in options(type(instance)):
        value = getattr(instance, option.name)
        if value is not None and value != option.default:
            yield option, value


def plain(instance: object) -> dict[str, Any]:
    """Return what differs from the defaults as plain data, from which `build` restores it."""
    data: dict[str, Any] = {}
    for option, value in _changed(instance):
        show = (lambda item: item) if option.is_switch else option.reader.show
        data[option.name] = [show(item) for item in value] if option.is_list else show(value)
    return data


def argv(instance: object) -> list[str]:
    """Return the command-line words of these options: only what differs from the default."""
    words: list[str] = []
    arguments: list[str] = []
    for option, value in _changed(instance):
        values = value if option.is_list else (value,)
        if option.argument:
            arguments += map(option.reader.show, values)
        else:
            words += (word for item in values for word in _spelled(option, item))
    if any(word.startswith("-") for word in arguments):
        return [*words, "--", *arguments]
    return [*arguments, *words]


def _spelled(option: Option, value: object) -> Iterator[str]:
    name = option.spellings[0]
    if option.is_switch:
        on, _, off = name.partition("/")
        yield on if value else off
        return
    text = option.reader.show(value)
    if text.startswith("-") or not text:
        long = next((word for word in option.spellings if word.startswith("--")), name)
        yield f"{long}={text}"
        return
    yield name
    yield text
