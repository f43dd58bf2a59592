"""From keyword arguments to the options of a verb: the same names, checks and messages."""

import difflib
import functools
import inspect
import keyword
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import ParamSpec, TypeGuard, TypeVar

from stepmark.comparison.sweep_options import SweepOptions
from stepmark.ground.errors import ConfigError
from stepmark.ground.option_groups import RunFolder
from stepmark.ground.options import REQUIRED, Option, build, dashed
from stepmark.ground.options import options as declared
from stepmark.tables.columns import Row, given

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Options of files and printed tables: objects have methods for both.
_ONLY_PRINTED = {
    *("json", "csv", "html", "timeline", "aicb_log", "output_file", "dry_run", "distinct"),
    *("wide", "style", "print_as", "list_all", "details", "to", "rank", "pp_rank"),
    *("stages", "notes", "pipeline_stage", "average", "report_cputime", "report_timestamps"),
    *("memory", "emit_tuner", "tuner_plugin"),
}
_HINTS = {
    "dry_run": "it is for the command line: stepmark VERB --dry-run lists what would run",
    **{
        name: f"it is an argument of show() of the object that is returned: show({name}=True)"
        for name in ("stages", "notes", "details")
    },
}
# Words of other tools and functions, each with what is meant.
_OTHER_NAMES = {
    **dict.fromkeys(("gpus", "num_gpus", "ngpus", "world_size", "nproc"), ("nproc", "gpus")),
    "rank": ("ranks",),
    "fp8": ('precision="fp8"',),
}
# A flag in a sentence, but none of a command that the sentence quotes.
_FLAG = re.compile(r"`[^`]*`|\bstepmark [a-zA-Z][^;,]*|(?<![\w-])--([a-z][a-z0-9-]*)")


def read(
    cls: type[T],
    words: Sequence[object],
    keywords: Mapping[str, object],
    base: Mapping[str, object] | None = None,
) -> T:
    """Return the options of arguments. Raises ConfigError for unknown ones and bad values.

    base: values, as `plain` returns them, of what is not given. Others: see `as_typed`.
    """
    return build(cls, {**(base or {}), **as_typed(cls, words, keywords)})


def as_typed(
    cls: type, words: Sequence[object], keywords: Mapping[str, object]
) -> dict[str, object]:
    """Return arguments as a command line has them. Raises ConfigError for unknown ones.

    words: the positional arguments of the command line. Of a field's several spellings each is
    a keyword, with _ for -.
    """
    names = names_of(cls)
    values: dict[str, object] = {}
    for name, value in keywords.items():
        option = names.get(name)
        if option is None:
            known = _hint(name, names, is_printed=_is_printed(cls, name))
            raise ConfigError(name, "given" if value is None else value, known)
        if option.name in values:
            raise ConfigError(name, value, f"it is given twice: it is {option.name}")
        values[option.name] = _text_of(option, name, value)
    if words:
        place = next((option for option in declared(cls) if option.argument), None)
        most = 0 if place is None else len(words) if place.is_list else 1
        if place is None or len(words) > most:
            allowed = f"at most {most} without a keyword"
            raise ConfigError("arguments", " ".join(map(text, words)), allowed)
        values[place.name] = _text_of(place, place.name, words if place.is_list else words[0])
    return values


OPTION_COLUMNS = tuple(map(given, ("keyword", "value", "default", "help")))


def describe(cls: type) -> list[Row]:
    """Return a row per keyword: its name, the form of its value, its default, its meaning."""
    return [
        {
            "keyword": option.name,
            "value": "True or False" if option.is_switch else option.metavar,
            "default": None
            if option.default in (None, (), REQUIRED)
            else option.default
            if option.is_switch
            else option.reader.show(option.default),
            "help": option.help,
        }
        for option in _usable(cls)
        if option.help  # --help hides others, which only a message explains
    ]


def spells_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function name flags in a ConfigError as keywords: world_size."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            names = [word for word in signature.parameters if word not in ("self", "options")]
            allowed = f"it has the arguments {', '.join(names)} ({error})"
            raise ConfigError(
                function.__qualname__.removesuffix(".__init__"), "given", allowed
            ) from None
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise in_keywords(error) from error.__cause__

    return call


def in_keywords(error: ConfigError) -> ConfigError:
    """Return the error with flags named as keywords: world_size."""
    field = error.field
    if re.fullmatch("-{0,2}[a-z][a-z0-9-]*", field):
        field = keyword_of(field.lstrip("-"))
    allowed = _FLAG.sub(lambda m: keyword_of(m[1]) if m[1] else m[0], error.allowed)
    return ConfigError(field, error.value, allowed)


def with_options(function: Callable[..., object], cls: type) -> inspect.Signature:
    """Return the signature of a function with the options of a class, which others precede."""
    own = inspect.signature(function)
    *first, others = own.parameters.values()
    keywords = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for option in _usable(cls)
        if option.help
    ]
    return own.replace(parameters=[*first, *keywords, others])


def keyword_of(name: str) -> str:
    """Return the keyword of a flag without its dashes; a word of Python has a _ at its end."""
    word = name.replace("-", "_")
    return f"{word}_" if keyword.iskeyword(word) else word


def names_of(cls: type) -> dict[str, Option]:
    """Return the options by keyword: the field's name first, then its other spellings."""
    usable = _usable(cls)
    names = {option.name: option for option in usable}
    for option in usable:
        for spelling in option.spellings:
            word = spelling.partition("/")[0]
            if word.startswith("--"):
                names.setdefault(keyword_of(word.removeprefix("--")), option)
    return names


def _usable(cls: type) -> list[Option]:
    """Return the options that are keywords: positional arguments are so in Python, too."""
    return [
        option
        for option in declared(cls)
        if not (option.argument or _is_printed(cls, option.name))
    ]


def _is_printed(cls: type, name: str) -> bool:
    """Return whether an option only says what is printed or written; `out` may be of runs."""
    measures = issubclass(cls, (RunFolder, SweepOptions))
    return name in _ONLY_PRINTED or (name == "out" and not measures)


def _hint(name: str, names: Mapping[str, Option], *, is_printed: bool) -> str:
    if name in _HINTS:
        return _HINTS[name]
    others = [word for word in _OTHER_NAMES.get(name, ()) if word.partition("=")[0] in names]
    if is_printed and not others:
        return "it is for the command line; the object that is returned has rows() and show()"
    near = others or difflib.get_close_matches(name, names, 3, 0.6)
    if near:
        return f"it is no keyword here; did you mean {' or '.join(near)}?"
    return "it is no keyword here; options(VERB) lists those that are"


def _text_of(option: Option, name: str, value: object) -> object:
    """Return a value as the command line has it: a switch, text, or a list of texts."""
    if value is None:
        return None
    if option.is_switch:
        if not isinstance(value, bool):
            once = "; call the function once for each" if is_list(value) else ""
            raise ConfigError(dashed(name), repr(value), f"True or False{once}")
        return value
    if isinstance(value, bool):
        raise ConfigError(dashed(name), repr(value), f"a value ({option.metavar}), no switch")
    if hasattr(value, "tolist"):  # arrays of numpy, columns of pandas
        value = value.tolist()
    items = value if is_list(value) else [value]
    for item in items:
        if not isinstance(item, str | Number | Enum | os.PathLike | list | tuple):
            allowed = f"text, a number or a path, or a list of these, not {type(item).__name__}"
            raise ConfigError(dashed(name), repr(item), allowed)
    texts = [text(item) for item in items]
    return texts if option.is_list else ",".join(texts)


def is_list(value: object) -> TypeGuard[Iterable[object]]:
    """Return whether a value is a list of values: also arrays of numpy, columns of pandas."""
    return isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0


def text(value: object) -> str:
    """Return the text of a value; that of launches of one side, or of ranges, has commas."""
    if isinstance(value, list | tuple):
        return ",".join(map(text, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
