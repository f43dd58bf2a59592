"""stepmark completion: the script with which a shell asks this program for completions.

The script sets a variable to what typer is to do. Choices and names come from the declarations
of the options, see flags.py.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from typer import completion
from typer._click import shell_completion
from typer.main import get_command

from stepmark.cli.main import COMPLETE, app
from stepmark.ground.errors import StepmarkError
from stepmark.ground.options import REQUIRED, Names, flag, load, words_of

_PROGRAM = "stepmark"
_ZSH_FILES = "compset -P '*='; _files"


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Completion."""

    shell: Annotated[str, words_of("bash", "zsh", "fish")] = flag(
        "shell of the script", default=REQUIRED, argument=True, metavar="bash|zsh|fish"
    )


def run(options: CompletionOptions) -> int:
    """Print the script. Returns the exit code."""
    script = completion.get_completion_script(  # type: ignore[attr-defined]
        prog_name=_PROGRAM, complete_var=COMPLETE, shell=options.shell
    )
    sys.stdout.write(f"{script}\n")
    return 0


def names_of(kind: Names, runs: Path) -> list[str]:
    """Return the names that a shell completes. runs: the folder of runs."""
    match kind:
        case "":
            return []
        case "model":
            return [*load("stepmark.model.model:load_models")()]
        case "device":
            return ["cuda", "cpu", *load("stepmark.model.device:load_devices")()]
        case "framework":
            return [*load("stepmark.workloads.rules:RULES")]
        case "format":
            return [*load("stepmark.workloads.formats:FORMATS")]
        case "run":
            folders = load("stepmark.store.reader:list_runs")(runs)
            return ["latest", *(folder.name for folder in folders)]


def answer() -> int:
    """Print the completions of the words that a shell has put into variables."""
    completion.completion_init()  # type: ignore[attr-defined]
    shell = os.environ[COMPLETE].removeprefix("complete_")
    known: Any = shell_completion.get_completion_class(shell)
    shell_class = type("Shell", (_Completions, known), {})
    with suppress(StepmarkError):  # words before the last are wrong, which their run reports
        text = shell_class(get_command(app()), {}, _PROGRAM, COMPLETE).complete()
        # For zsh a file after an equals sign is a part of the word.
        sys.stdout.write(f"{_ZSH_FILES if text == '_files' else text}\n")
    return 0


class _Completions:
    """The completions of a shell, which know --flag=value.

    It is three words for bash. For the others it is one, of which typer returns the value.
    """

    def get_completions(self, args: list[str], incomplete: str) -> list[Any]:
        words = [
            word
            for before, word in pairwise(["", *args])
            if not (word == "=" and before.startswith("--"))
        ]
        items: list[Any] = super().get_completions(words, incomplete)  # type: ignore[misc]
        flag, equals, _ = incomplete.partition("=")
        if equals and flag.startswith("--"):
            for item in items:
                item.value = f"{flag}={item.value}"
        return items
