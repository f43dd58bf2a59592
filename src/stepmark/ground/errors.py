"""Exceptions that a user can see.

StepmarkError
├── ConfigError    bad input: exit code 2, one sentence that names field, value and rule
├── NothingToMeasureError    every case of a valid plan is left out: exit code 3
└── MissingPackageError    an optional package is not installed; also an ImportError
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from stepmark.ground.redaction import redact


class StepmarkError(Exception):
    """Base of all errors that are shown as one line instead of a traceback."""

    exit_code = 1


class ConfigError(StepmarkError):
    """Input that cannot be used. The message is one sentence: field, value, rule.

    allowed is what the value must be ("a multiple of 3"), "only with ..." for a field that
    needs another, or a whole clause ("it has no effect with ...").
    """

    exit_code = 2

    def __init__(self, field: str, value: object, allowed: str) -> None:
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        text = "missing" if value is None else redact(str(value))
        self.field = field
        self.value = _shortened(text, 80)
        self.allowed = _shortened(allowed, _MAX_RULE)  # it may quote a file
        super().__init__(_sentence(self.field, self.value, self.allowed))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str, str]]:
        """Pickle the __init__ arguments, because rank 0 sends the error to its peers."""
        return ConfigError, (self.field, self.value, self.allowed)


_MAX_RULE = 1200  # characters


def _shortened(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[: half - 2]}...{text[1 - half :]}"


def nearest(word: str, words: Iterable[str], most: int = 1) -> list[str]:
    """Return the words that are spelled most like this one; case, - and _ do not matter."""
    by_key = {_key(each): each for each in reversed(list(words))}
    return [by_key[key] for key in get_close_matches(_key(word), by_key, n=most)]


def _key(word: str) -> str:
    return word.lower().replace("_", "-").lstrip("-")


def not_one_of(
    field: str,
    value: object,
    words: Iterable[str],
    condition: str = "",
    aliases: Iterable[str] = (),
) -> ConfigError:
    """Return the error of a value outside a closed set, with the nearest one that is inside.

    condition: what follows the list of words, such as " for gemm". aliases: other spellings
    that are inside, which the list leaves out.
    """
    choices = [str(word) for word in words]
    rule = f"one of {', '.join(choices)}{condition}"
    if value is not None and (near := nearest(str(value), [*choices, *aliases])):
        rule = f"did you mean {near[0]}? It must be {rule}"
    return ConfigError(field, value, rule)


class NothingToMeasureError(StepmarkError):
    """A plan whose cases are all left out, for these reasons."""

    exit_code = 3

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        super().__init__(f"nothing to measure: {'; '.join(self.reasons) or 'no case is left'}")

    def __reduce__(self) -> tuple[type["NothingToMeasureError"], tuple[tuple[str, ...]]]:
        """Pickle the __init__ arguments, because rank 0 sends the error to its peers."""
        return NothingToMeasureError, (self.reasons,)


class MissingPackageError(StepmarkError, ImportError):
    """A package that only one method needs, and that is not installed."""


_SWITCH_VALUES = ("True", "yes", "given")  # nobody types them
_CLAUSES = ("it ", "there ", "give ", "use ", "did you ")


def _sentence(field: str, value: str, allowed: str) -> str:
    rule = " ".join(allowed.split())
    if value == "missing":
        text = f"{field} is missing: " + (rule if rule.startswith(_CLAUSES) else f"give {rule}")
    else:
        is_plain = value.isprintable() and value and " " not in value
        shown = "" if value in _SWITCH_VALUES else f" {value if is_plain else repr(value)}"
        if " " in field.rpartition(": ")[2]:  # a place, such as line 2
            shown = f": {value!r}"
        if rule.startswith("only "):
            rule = f"it works {rule}"
        elif not rule.startswith(_CLAUSES):
            rule = f"it must be {rule}"
        text = f"{field}{shown} is invalid: {rule}"
    return text if text.endswith((".", "?", "!")) else f"{text}."


# What the text of an error says has run out, whoever raised it, and what to do.
_SHORTAGES = {
    "no space left|disk quota": "free some space, or write to another place (--out, TMPDIR)",
    "file too large": "raise the limit of the size of files (ulimit -f)",
    "too many open files": "raise the limit of open files (ulimit -n)",
    "allocate memory|map segment|memoryerror|bad_alloc": (
        "memory is used up: free some, or raise its limit (ulimit -v)"
    ),
    r"new thread|\[Errno 11\] Resource temp": (
        "raise the limit of processes and threads (ulimit -u)"
    ),
    "find interface": "its network interface is down (lo of 127.0.0.1: ip link set lo up)",
    "usable temporary": "set TMPDIR to a folder that can be written",
    "surrogates not allowed": "names, options and the locale (LANG) must be UTF-8",
}


def sentence_of(error: BaseException) -> str:
    """Return the sentence of an error that the system causes; "" for a mistake of ours."""
    text = str(error).strip() or type(error).__name__
    for pattern, advice in _SHORTAGES.items():
        if match := re.search(rf".*(?:{pattern}).*", text, re.IGNORECASE):
            # gloo's errors begin with the place in its source.
            return f"{re.sub(r'^.*enforce fail .*?] ', '', match[0])}: {advice}"
    return text if isinstance(error, OSError) else ""


# In order of precedence, the last one is the strongest; 130 and 143 are interrupts.
EXIT_CODES = (0, 3, 1, 2, 143, 130)


def worst(*codes: int) -> int:
    """Return the strongest of these exit codes."""
    return max(codes, key=EXIT_CODES.index)
