"""Names of hosts, as Slurm's ranges, a comma list, or a file as pssh and mpirun read it."""

import os
import re
from pathlib import Path

from stepmark.ground.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_RANGES = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_MAX_HOSTS = 2**17


def read_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts that --hosts names, the first of which leads. Raises ConfigError."""
    if os.path.isfile(text):  # False for a list that is too long for a name
        lines = Path(text).read_text(errors="replace").splitlines()
        entries = [line.split("#")[0].split() for line in lines]
        # pssh's [user@]host[:port]; mpirun's "host slots=8"
        names = [re.sub(r"^.*@|:\d+$", "", words[0]) for words in entries if words]
    elif "/" in text:
        raise ConfigError("hosts", text, "a file that exists, or names of hosts")
    else:
        names = [
            name
            for part in re.split(r",(?![^\[]*\])", text)
            for name in _expanded(part.strip(), text)
        ]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError("hosts", name, "a host name or IPv4 address")
    if len(set(names)) < len(names) or not names:
        repeated = next((name for name in names if names.count(name) > 1), text)
        raise ConfigError("hosts", repeated, "one or more hosts, each named once")
    return tuple(names)


def _expanded(part: str, text: str) -> list[str]:
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
            raise ConfigError("hosts", text, "names with ranges such as n[1-4,7]")
        numbers += [f"{n:0{len(low)}}" for n in range(int(low), int(last) + 1)]
    return [f"{head}{number}{end}" for number in numbers for end in _expanded(rest, text)]
