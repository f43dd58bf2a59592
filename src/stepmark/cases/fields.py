"""Fields of cases, each declared once with all that options, tables and comparisons know of it.

The class of a case declares its fields. Identities, the options of the verb, its plan, the
command that measures a case again, columns, words and comparisons read the declarations.
"""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import Flag, dashed, plain

T = TypeVar("T")
_KEY = "case"  # in the metadata of a dataclass's field


class Role(Enum):
    """Part in the comparison of two measurements of a field that defines what is measured."""

    NAME = "it names a line"
    STRICT = "a difference makes figures incomparable, unless it is allowed"
    SETTING = "a difference may be what is compared"
    ELSEWHERE = "family, size, method or layout tell it"


class Shown(Enum):
    """Where its column is shown; files have every column."""

    FILES = "files"
    PAGE = "page"
    TABLES = "page and console"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Condition for a field to have an effect. is_met: by a case. words: after `only with`."""

    words: str
    is_met: Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseField:
    """Declaration of a field.

    role: None is no part of the identity. name: of its column, and in comparisons. heading,
    shown, leaves: of the column; shown None: there is none. words: of another value than the
    default, with {}. cell: from the value to what columns and comparisons have. option: of the
    verb that measures; reads: the option's type, where a list of values makes a case of each;
    group: its title in `--help`. varies: the default depends on the device or other options, in
    every case or in those that a function tells.
    formerly: what cases had before the field was added, whose identities stay; ...: nothing.
    """

    role: Role | None
    attribute: str = ""
    kind: Any = None
    default: Any = None
    name: str = ""
    heading: str = ""
    shown: Shown | None = Shown.FILES
    leaves: int = 0
    words: str | Callable[[Any], str] = ""
    cell: Callable[[Any], Any] | None = None
    option: Flag | None = None
    reads: Any = None
    group: str = ""
    needs: Need | None = None
    varies: bool | Callable[[Any], bool] = False
    formerly: Any = ...

    @property
    def option_name(self) -> str:
        """Return the field of the options: its first long spelling, or the case's field."""
        for word in self.option.spellings if self.option else ():
            if word.startswith("--"):
                return word.partition("/")[0].removeprefix("--").replace("-", "_")
        return self.attribute

    @property
    def is_swept(self) -> bool:
        """Return whether the option takes several values, each of them for a case."""
        (kind, *_) = typing.get_args(self.reads) or (None,)
        return typing.get_origin(kind) is tuple

    def value(self, case: object) -> Any:
        """Return the plain value that columns and comparisons have; None for an empty one.

        It is None where a field that was added later has no effect, too.
        """
        is_there = self.formerly is ... or self.is_effective(case)
        return self._plain(getattr(case, self.attribute)) if is_there else None

    def is_effective(self, case: object) -> bool:
        """Return whether the case meets what the field needs to have an effect."""
        return self.needs is None or self.needs.is_met(case)

    def describe(self, value: Any) -> str:
        """Return the words of a plain value; "" of the default one."""
        if not self.words or value is None or value == self._plain(self.default):
            return ""
        return self.words.format(value) if isinstance(self.words, str) else self.words(value)

    def _plain(self, value: Any) -> Any:
        if self.cell is not None:
            return self.cell(value)
        value = value.value if isinstance(value, Enum) else value
        return None if value == "" else value


def field_of(
    role: Role | None,
    default: Any = dataclasses.MISSING,
    help: str = "",
    *spellings: str,
    rare: bool = True,
    **more: Any,
) -> Any:
    """Declare a field of a case, see CaseField. With help it is an option, see Flag."""
    option = Flag(help, spellings, rare=rare) if help else None
    declaration = CaseField(role=role, option=option, **more)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


_DECLARED: dict[type, tuple[CaseField, ...]] = {}  # functools.cache rejects classes in mypy


def declared(case: type) -> tuple[CaseField, ...]:
    """Return the declarations of a class of cases, in their order."""
    if case not in _DECLARED:
        fields = ((field, field.metadata[_KEY]) for field in dataclasses.fields(case))
        _DECLARED[case] = tuple(
            dataclasses.replace(
                declaration,
                attribute=field.name,
                kind=field.type,
                default=field.default,
                name=declaration.name or field.name,
            )
            for field, declaration in fields
        )
    return _DECLARED[case]


def former_values(cls: type) -> dict[str, Any]:
    """Return what cases of this class had before fields were added; {} for other classes."""
    declarations = [field.metadata.get(_KEY) for field in dataclasses.fields(cls)]
    if None in declarations:
        return {}
    return {
        field.attribute: field.formerly for field in declared(cls) if field.formerly is not ...
    }


def identity(case: Any) -> dict[str, object]:
    """Return the values that define what is measured and how."""
    values = {}
    for field in declared(type(case)):
        value = getattr(case, field.attribute)
        is_absent = field.formerly is not ... and (
            value == field.formerly or not field.is_effective(case)
        )
        if field.role is not None and not is_absent:
            values[field.attribute] = value
    return values


def compared(case: Any) -> dict[str, Any]:
    """Return what a comparison of two cases reads, apart from what the series itself tells."""
    return {
        field.name: field.value(case)
        for field in declared(type(case))
        if field.role not in (None, Role.ELSEWHERE)
    }


def differences(one: Any, other: Any) -> list[str]:
    """Return the fields whose values differ, where they have an effect in both cases."""
    return [
        field.attribute
        for field in declared(type(one))
        if field.is_effective(one)
        and field.is_effective(other)
        and getattr(one, field.attribute) != getattr(other, field.attribute)
    ]


def in_words(case: type, values: typing.Mapping[str, Any]) -> list[str]:
    """Return the words of plain values by name, but of defaults and of those without words."""
    words = []
    for field in declared(case):
        if text := field.describe(values.get(field.name)):
            words.append(text)
    return words


def with_fields(case: type) -> Callable[[type[T]], type[T]]:
    """Add the options of a case's fields to the group that they name, before `group`."""

    def add(cls: type[T]) -> type[T]:
        title = (cls.__doc__ or "").partition(".")[0]
        for field in declared(case):
            if field.option and field.group == title:
                cls.__annotations__[field.option_name] = field.reads | None
                default = False if field.reads is bool and not field.default else None
                option = dataclasses.field(default=default, metadata={"flag": field.option})
                setattr(cls, field.option_name, option)
        return cls

    return add


def given_values(case: type, options: object) -> Iterator[dict[str, Any]]:
    """Yield the fields that options give a case, one time for each combination of values."""
    given: dict[str, Iterable[Any]] = {}
    for field in declared(case):
        value = getattr(options, field.option_name) if field.option else None
        if value is not None:
            given[field.attribute] = value if field.is_swept else (value,)
    for values in itertools.product(*given.values()):
        yield dict(zip(given, values, strict=True))


def option_values(case: Any, explicit: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that give the case these fields, without those that are defaults.

    explicit: options that are given whatever their value.
    """
    values: dict[str, Any] = {}
    for field in declared(type(case)):
        value = getattr(case, field.attribute)
        varies = field.varies(case) if callable(field.varies) else field.varies
        is_given = varies or value != field.default or field.option_name in explicit
        if field.option and is_given and field.is_effective(case):
            values[field.option_name] = (value,) if field.is_swept else value
    return values


def check_needs(case: Any, options: Any) -> None:
    """Refuse options that are given and have no effect in this case. Raises ConfigError."""
    given = plain(options)
    for field in declared(type(case)):
        name = field.option_name
        if name in given and field.needs and not field.is_effective(case):
            raise ConfigError(dashed(name), given[name], f"only with {field.needs.words}")
