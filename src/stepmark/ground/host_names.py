"""Names of hosts as users list them: n1,n2 or n[1-4,07], or a file with one per line."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_RANGES = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_MAX_HOSTS = 2**17


def read_hosts(text: str, *, has_users: bool = True) -> tuple[str, ...]:
    """Return the hosts that --hosts names, the first of which leads. Raises ConfigError.

    has_users: a file may name a user and a port of each, which its reader uses.
    """
    if not os.path.isfile(text):  # False for a list that is too long for a name
        if "/" in text:
            raise ConfigError("hosts", text, "a file that exists, or names of hosts")
        return parse_hosts(text, "hosts")
    lines = read_whole(Path(text), "hosts").decode(errors="replace").splitlines()
    entries = [line.split("#")[0].split() for line in lines]
    # pssh's [user@]host[:port]; mpirun's "host slots=8"
    pattern = r"^.*@|:\d+$" if has_users else "^$"
    names = [re.sub(pattern, "", words[0]) for words in entries if words]
    return _checked(names, text, "hosts")


def parse_hosts(text: str, field: str) -> tuple[str, ...]:
    """Return the hosts that a list names, with its ranges expanded. Raises ConfigError."""
    parts = re.split(r",(?![^\[]*\])", text)
    names = [name for part in parts for name in _expanded(part.strip(), text, field)]
    return _checked(names, text, field)


def _checked(names: Sequence[str], text: str, field: str) -> tuple[str, ...]:
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(field, name, "a host name or IPv4 address")
    if len(set(names)) < len(names) or not names:
        repeated = next((name for name in names if names.count(name) > 1), text)
        raise ConfigError(field, repeated, "one or more hosts, each named once")
    return tuple(names)


def _expanded(part: str, text: str, field: str) -> list[str]:
    """Return the names of n[1-4,07]x; zeros in front are kept."""
    if not (ranges := _RANGES.fullmatch(part)):
        return [part]
    head, inside, rest = ranges.groups()
    numbers: list[str] = []
    for span in inside.split(","):
        low, dash, high = span.partition("-")
        last = high if dash else low
        if (
            not (low.isdecimal() and last.isdecimal())
            or not 0 <= int(last) - int(low) <= _MAX_HOSTS
        ):
            raise ConfigError(field, text, "names with ranges such as n[1-4,7]")
        numbers += [f"{n:0{len(low)}}" for n in range(int(low), int(last) + 1)]
    return [
        f"{head}{number}{end}" for number in numbers for end in _expanded(rest, text, field)
    ]
