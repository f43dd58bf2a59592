"""--env and --set to settings: which values are tried, and what cannot be."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark.core.errors import ConfigError
from stepmark.core.sweep import DEFAULT, Setting, flag_of

MOST = 64  # settings that are tried without --force
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# With these a process would be a rank, of a job that is not there, or not be found again.
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Flags of the command that the sweep gives itself, or that would make its tries overwrite
# each other's files.
_TAKEN = ("--out", "--resume", "--dry-run", "--json", "--csv", "--html", "-J", "--output-file")

Values = list[tuple[str, list[str]]]


def settings(
    env: Sequence[str], flags: Sequence[str], *, default: bool, force: bool
) -> list[Setting]:
    """Every combination, in the order given; with `default`, also that with nothing set."""
    variables = _parsed(env, "env", _VARIABLE)
    swept = _parsed(flags, "set", _FLAG)
    if not variables and not swept:
        raise ConfigError("env", "missing", "--env NAME=A,B or --set FLAG=A,B, or both")
    for name, _ in variables:
        if name in _OURS or name.startswith("STEPMARK_"):
            raise ConfigError("env", name, "a variable that no launcher sets")
    for name, _ in swept:
        if flag_of(name) in _TAKEN:
            raise ConfigError("set", name, "a flag that says how is measured")
    names = [name for name, _ in variables], [name for name, _ in swept]
    made = [Setting(variables=_unset(names[0]), flags=_unset(names[1]))] if default else []
    for values in itertools.product(*(v for _, v in variables), *(v for _, v in swept)):
        split = len(variables)
        made.append(
            Setting(
                variables=tuple(zip(names[0], values[:split], strict=True)),
                flags=tuple(zip(names[1], values[split:], strict=True)),
            )
        )
    found = list({one.name: one for one in made}.values())
    if len(found) < 2:
        raise ConfigError("env", found[0].name, "two settings or more, to be compared")
    if len(found) > MOST and not force:
        raise ConfigError("env", f"{len(found)} settings", f"at most {MOST}, or --force")
    return found


def _unset(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, "") for name in names)


def _parsed(texts: Sequence[str], field: str, allowed: "re.Pattern[str]") -> Values:
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not allowed.fullmatch(name):
            raise ConfigError(field, text, "NAME=VALUE,VALUE; an empty value leaves it unset")
        if name in found:
            raise ConfigError(field, name, "given once: NAME=VALUE,VALUE")
        values = split_values(rest)
        if len(set(values)) < len(values):
            raise ConfigError(field, text, "different values")
        if any(not value.isprintable() for value in values):
            raise ConfigError(field, text, "values in one line of printable characters")
        found[name] = values
    return list(found.items())


def split_values(text: str) -> list[str]:
    r"""At commas; `\,` is a comma and `\\` a backslash within a value."""
    values, escaped = [""], False
    for letter in text:
        if escaped:
            values[-1] += letter if letter in ",\\" else "\\" + letter
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter == ",":
            values.append("")
        else:
            values[-1] += letter
    values[-1] += "\\" if escaped else ""
    return values


def named(name: str | None, found: Sequence[Setting]) -> str:
    """The baseline's name: as asked, in any order of words; else the one with nothing set."""
    by_words = {frozenset(one.name.split()): one.name for one in found}
    if name is None:
        return by_words.get(frozenset([DEFAULT]), found[0].name)
    if (known := by_words.get(frozenset(name.split()))) is None:
        shown = ", ".join(one.name for one in found[:8])
        raise ConfigError("baseline", name, f"one of {shown}")
    return known


def check_command(command: Sequence[str], verbs: Sequence[str], known: Sequence[str]) -> None:
    """The command after `--`. Raises ConfigError for what a sweep cannot run."""
    allowed = f"-- and a measuring verb: {', '.join(verbs)}"
    if not command:
        raise ConfigError("command", "missing", allowed)
    verb = command[0]
    if verb not in verbs:
        measures = "one that measures" if verb in known else "a verb"
        raise ConfigError("command", verb, f"{measures}: {', '.join(verbs)}")
    for word in command:
        if word.partition("=")[0] in _TAKEN:
            raise ConfigError("command", word, "left out: the sweep keeps runs and makes files")


def check_flags(command: Sequence[str], found: Sequence[Setting]) -> None:
    """A flag is given or swept, not both."""
    words = {word.partition("=")[0] for word in command}
    for name, _ in found[0].flags:
        if flag_of(name) in words:
            raise ConfigError("set", name, "a flag that the command itself does not give")


def environment(setting: Setting, base: Mapping[str, str]) -> dict[str, str]:
    """Of a try: the user's own but for what is swept."""
    swept = {name for name, _ in setting.variables}
    kept = {name: value for name, value in base.items() if name not in swept}
    return kept | {name: value for name, value in setting.variables if value}


def notes(found: Sequence[Setting], base: Mapping[str, str]) -> tuple[str, ...]:
    """What else of the environment decides: overridden, constant, or in a file."""
    swept = [name for name, _ in found[0].variables]
    said = [
        f"{name}={base[name]} of your environment is overridden"
        for name in swept
        if name in base
    ]
    constant = {
        name: value
        for name, value in sorted(base.items())
        if name.startswith(("NCCL_", "RCCL_")) and name not in swept
    }
    said += [f"{name}={value} is the same for all" for name, value in constant.items()]
    if any(name.startswith("NCCL_") for name in swept):
        files = [Path(base.get("NCCL_CONF_FILE", "~/.nccl.conf")).expanduser()]
        files.append(Path("/etc/nccl.conf"))
        said += [f"NCCL also reads {file}" for file in files if os.path.isfile(file)]
    return tuple(said)
