"""stepmark completion: the script with which a shell asks this program for completions.

A script sets a variable to the shell's name and calls the program with the words of the line,
the last of which is completed; the answer has a completion per line. Choices and names come
from the declarations of the options.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from stepmark.cli.commands import Answered, Command, Group, Values
from stepmark.cli.main import COMPLETE, program
from stepmark.ground.errors import StepmarkError
from stepmark.ground.options import REQUIRED, Names, Option, flag, load, words_of

# bash divides --flag=value into three words; where there is no completion it offers files.
_SCRIPTS = {
    "bash": f"""\
_stepmark() {{
  local IFS=$'\\n'
  COMPREPLY=($({COMPLETE}=bash "$1" "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _stepmark stepmark
""",
    "zsh": f"""\
#compdef stepmark
_stepmark() {{
  local -a found
  found=("${{(@f)$({COMPLETE}=zsh stepmark "${{(@Q)words[2,CURRENT]}}" 2>/dev/null)}}")
  if [[ -n $found ]]; then
    compadd -- $found
  else
    compset -P '*='
    _files
  fi
}}
compdef _stepmark stepmark
""",
    "fish": f"""\
function __stepmark
  {COMPLETE}=fish stepmark (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c stepmark -n 'test (count (__stepmark)) -gt 0' -f -a '(__stepmark)'
""",
}
# What has the names of each kind, or a function that returns them.
_NAMES: dict[Names, str] = {
    "model": "stepmark.model.model_tables:load_models",
    "device": "stepmark.model.device:load_devices",
    "framework": "stepmark.workloads.rules:RULES",
    "format": "stepmark.workloads.formats:FORMATS",
    "network": "stepmark.model.systems:load_systems",
}


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Completion."""

    shell: Annotated[str, words_of(*_SCRIPTS)] = flag(
        "shell of the script", default=REQUIRED, argument=True, metavar="|".join(_SCRIPTS)
    )


def run(options: CompletionOptions) -> None:
    """Print the script."""
    sys.stdout.write(_SCRIPTS[options.shell])


def names_of(kind: Names, runs: Path) -> list[str]:
    """Return the names that a shell completes. runs: the folder of runs."""
    if kind == "run":
        folders = load("stepmark.store.reader:list_runs")(runs)
        return ["latest", *(folder.name for folder in folders)]
    found = load(_NAMES[kind]) if kind else ()
    return [
        *(("cuda", "cpu") if kind == "device" else ()),
        *(found() if callable(found) else found),
    ]


def answer(words: list[str]) -> int:
    """Print the completions of the last word, one per line."""
    before = _undivided(words[:-1])
    last = "".join(words[-1:]).removeprefix("=")  # bash: --flag= without a value yet
    with suppress(StepmarkError, Answered):  # words before are wrong, which their run reports
        sys.stdout.write("".join(f"{word}\n" for word in _completions(before, last)))
    return 0


def _undivided(words: list[str]) -> list[str]:
    """Return the words without the = that bash takes from between a flag and its value."""
    return [
        word
        for before, word in pairwise(["", *words])
        if not (word == "=" and before.startswith("--"))
    ]


def _completions(words: list[str], last: str) -> Iterator[str]:
    """Yield what the last word may become. words: those before it. Raises StepmarkError."""
    at: Command | Group = program()
    while isinstance(at, Group) and words:
        words = at.with_default(words)
        at = at.command(words)
        words = words[1:]
    if isinstance(at, Group):
        names: Iterable[str] = at.words if last.startswith("-") else at.commands
        yield from (name for name in names if name.startswith(last))
        if not at.default:
            return
        at = at.command([at.default])  # its options and arguments may follow at once
    assert isinstance(at, Command)
    name, equals, value = last.partition("=")
    if equals and name.startswith("--"):
        for word in _of_value(at.valued(name), _values(at, words), value):
            yield f"{name}={word}"
    elif last.startswith("-") and "--" not in words:
        yield from (word for word in _options(at, words) if word.startswith(last))
    else:
        values = _values(at, words)
        option = at.valued(words[-1]) if words else None
        yield from _of_value(option or _argument(at, values), values, last)


def _options(command: Command, words: list[str]) -> Iterator[str]:
    """Yield spellings of options that can be given yet."""
    given = {word.partition("=")[0] for word in words}
    for option in command.options:
        if (
            option.help
            and not option.argument
            and (option.is_list or not given & {*option.words})
        ):
            yield from option.words
    yield from ("--help", "--help-all")


def _argument(command: Command, values: Values) -> Option | None:
    """Return the first argument that can take one more word."""
    arguments = (option for option in command.options if option.argument)
    return next((each for each in arguments if each.is_list or not values.get(each.name)), None)


def _values(command: Command, words: list[str]) -> Values:
    """Return what the words before give; nothing where they are wrong."""
    try:
        return command.parse("", [word for word in words if not word.startswith("--help")])
    except StepmarkError:
        return {}


def _of_value(option: Option | None, values: Values, text: str) -> Iterator[str]:
    """Yield the values of an option that begin so; after , or NAME= another one begins."""
    if option is None:
        return
    folder = Path(values.get("runs") or values.get("out") or "runs")
    names = option.reader.choices or names_of(option.names, folder)
    start = max(map(text.rfind, ",=")) + 1
    before = text[:start]
    word = text[start:]
    yield from (f"{before}{name}" for name in names if name.startswith(word))
