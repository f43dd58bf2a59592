"""Commands: what reads the words of a verb by its options class, and groups of commands.

A handler is named as text and imported when it is called, so --help reads no other folder.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stepmark.cli import help_page
from stepmark.ground import options
from stepmark.ground.errors import ConfigError, StepmarkError, nearest, not_one_of
from stepmark.ground.options import Option

Values = dict[str, Any]  # text, lists of text, and switches by the name of their field
# The number of ranks, as our commands and frameworks name it.
_NUM_RANKS = ("--gpus", "--nproc", "--world-size", "--ngpus", "--num-gpus")
_HELP = {"--help": "help", "--help-all": "help_all"}


class Answered(Exception):  # noqa: N818 - no error
    """The words ask for a page, which was printed: there is nothing to run."""


class UnknownOptionError(StepmarkError):
    """An option that a command does not have."""

    exit_code = 2

    def __init__(self, option: str, known: Sequence[str], command: str) -> None:
        """known: spellings of the command's options."""
        self.option = option
        near = [word for word in _NUM_RANKS if word in known] if option in _NUM_RANKS else []
        near = near or nearest(option, known)
        rule = f"did you mean {near[0]}?" if near else "one of the options of this command"
        page = "--help-all" if "--help-all" in known else "--help"
        super().__init__(f"{ConfigError(option, 'given', rule)} See {command} {page}.")


class Command:
    """A command that passes its options to a handler.

    examples: command lines without the program's name.
    """

    def __init__(self, cls: type[Any], handler: str, doc: str, *examples: str) -> None:
        """handler: "module:function", which takes the options and may return an exit code."""
        self.cls = cls
        self.handler = handler
        self.doc = doc
        self.examples = examples
        self.options: tuple[Option, ...] = options.options(cls)

    @property
    def words(self) -> list[str]:
        """Return all spellings of options."""
        declared = (option for option in self.options if not option.argument)
        return [*(word for option in declared for word in option.words), *_HELP]

    def valued(self, word: str) -> Option | None:
        """Return the option of this spelling, if it takes a value."""
        taking = (each for each in self.options if not (each.is_switch or each.argument))
        return next((option for option in taking if word in option.words), None)

    def run(self, name: str, words: list[str]) -> int:
        """Parse and call the handler. name: how the command is called. Raises StepmarkError."""
        values = self.parse(name, words)
        try:
            self.check(values)
            code = self.call(
                self.read(values), partial(self.as_typed, values=values, words=words)
            )
        except ConfigError as error:
            raise self.as_typed(error, values, words) from error.__cause__
        return code or 0

    def read(self, values: Values) -> Any:
        """Return what the handler takes. Raises ConfigError."""
        return options.build(self.cls, values)

    def call(self, given: Any, spell: Callable[[ConfigError], ConfigError]) -> int | None:
        """Call the handler. spell: returns an error as as_typed does. Raises StepmarkError."""
        code: int | None = options.load(self.handler)(given)
        return code

    def check(self, values: Values) -> None:
        """Refuse what the handler would find too late. Raises StepmarkError."""

    def parse(self, name: str, words: list[str]) -> Values:
        """Return the values of options and arguments that the words give; None is not given.

        Raises ConfigError or UnknownOptionError; Answered where they ask for help.
        """
        end = words.index("--") if "--" in words else len(words)
        values, rest = self._parsed(words[:end])
        for word in rest:
            if word.startswith("-") and word != "-":
                raise UnknownOptionError(word.partition("=")[0], self.words, name)
        requested = {word: values.pop(key) for word, key in _HELP.items()}
        if any(requested.values()):
            sys.stdout.write(self.page(name, everything=requested["--help-all"]))
            raise Answered
        rest += words[end + 1 :]
        for option in self.options:
            if option.argument:
                taken, rest = (rest, []) if option.is_list else (rest[:1], rest[1:])
                values[option.name] = taken if option.is_list else next(iter(taken), None)
        if rest:
            most = len(help_page.usage(self.cls)) - 1
            takes = f"at most {most} of them" if most else "none"
            raise ConfigError(
                "argument", rest[0], f"it must be left out, since {name} takes {takes}"
            )
        return values

    def _parsed(self, words: list[str]) -> tuple[Values, list[str]]:
        """Return the values of options, and the words that are none. Raises ConfigError."""
        parser = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, exit_on_error=False
        )
        for option in self.options:
            if option.is_switch:
                on, off = _both(option)
                parser.add_argument(*on, dest=option.name, action="store_true", default=None)
                if off:
                    parser.add_argument(
                        *off, dest=option.name, action="store_false", default=None
                    )
            elif not option.argument:
                action = "append" if option.is_list else "store"
                parser.add_argument(*option.spellings, dest=option.name, action=action)
        for word, name in _HELP.items():
            parser.add_argument(word, dest=name, action="store_true")
        try:
            values, rest = parser.parse_known_args(self._joined(words))
        except argparse.ArgumentError as error:
            spellings = (error.argument_name or "").split("/")
            typed = (word.partition("=")[0] for word in reversed(words))
            wrong = next((word for word in typed if word in spellings), spellings[0])
            rule = f"given {'with' if self.valued(wrong) else 'without'} a value"
            raise ConfigError(wrong, "given", rule) from None
        return vars(values), rest

    def _joined(self, words: list[str]) -> list[str]:
        """Return the words, --sac -1/4 as --sac=-1/4: argparse takes it for two options."""
        joined: list[str] = []
        for word in words:
            is_value = word.startswith("-") and word.partition("=")[0] not in self.words
            if joined and is_value and self.valued(joined[-1]):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def page(self, name: str, *, everything: bool) -> str:
        """Return the help. everything: also rare options and all spellings."""
        page = help_page.Page()
        page.usage(name, " ".join(help_page.usage(self.cls)))
        page.summary(self.doc)
        self.write_options(page, name, everything=everything)
        return page.text

    def write_options(self, page: help_page.Page, name: str, *, everything: bool) -> None:
        """Write the sections of a page below its summary."""
        help_page.write(page, name, self.cls, self.examples, everything=everything)

    def as_typed(self, error: ConfigError, values: Values, words: Sequence[str]) -> ConfigError:
        """Return the error with its field spelled as the user typed it, else as in --help."""
        name = error.field.lstrip("-").replace("_", "-")
        heads = {word.partition("=")[0] for word in words}
        typed = heads | {word.replace("_", "-") for word in heads}  # AICB's, of `workload`
        for option in self.options:
            names = {options.dashed(option.name), *(word.lstrip("-") for word in option.words)}
            if option.argument or name not in names:
                continue
            if not typed & {*option.words} and error.value in self._arguments(values):
                break  # no flag was typed
            _, off = _both(option)
            long = [word for word in option.words if word.startswith("--")]
            default = (long or option.words)[0]
            field = next((word for word in option.words if word in typed), default)
            is_off = field in off and error.value == "False"
            return ConfigError(field, "given" if is_off else error.value, error.allowed)
        return error

    def _arguments(self, values: Values) -> Iterator[str]:
        """Yield the arguments that are no options."""
        for option in self.options:
            if option.argument and (value := values.get(option.name)):
                yield from value if option.is_list else [value]


class Group:
    """A command with commands of its own.

    commands: by name a line of help, and a function that makes the command from its words. Only
    the command that is called is made: --help reads none of them. topics: names by heading.
    default: the command that is meant where the first word is no name of a command, but one of
    its options or arguments. An argument that is spelled like a command is given as ./NAME.
    """

    def __init__(
        self,
        doc: str,
        commands: Mapping[str, tuple[str, "Builder"]],
        topics: Mapping[str, Sequence[str]] | None = None,
        version: str = "",
        default: str = "",
    ) -> None:
        self.default = default
        self.doc = doc
        self.commands = commands
        self.version = version
        self.topics = topics or {"Commands": [*commands]}

    @property
    def words(self) -> list[str]:
        """Return the options."""
        return [*(["--version"] if self.version else []), "--help"]

    def run(self, name: str, words: list[str]) -> int:
        """Run the command that the words name; without words print help."""
        first = words[0].partition("=")[0] if words else "--help"
        if first == "--version" and self.version:
            sys.stdout.write(f"{self.version}\n")
            return 0
        if first == "--help":
            sys.stdout.write(self.page(name))
            return 0
        words = self.with_default(words)
        if words[0].startswith("-"):
            raise UnknownOptionError(first, self.words, name)
        return self.command(words).run(f"{name} {words[0]}", words[1:])

    def with_default(self, words: list[str]) -> list[str]:
        """Return the words, after the default command's name where it is left out.

        A word that is nearly the name of a command, and no file's, is taken for a mistyped one.
        """
        if not self.default or words[0] in self.commands:
            return words
        is_mistyped = nearest(words[0], self.commands) and not Path(words[0]).exists()
        return words if is_mistyped else [self.default, *words]

    def command(self, words: list[str]) -> "Command | Group":
        """Return the command that the first word names. Raises ConfigError."""
        if words[0] not in self.commands:
            raise not_one_of("command", words[0], self.commands)
        _, build = self.commands[words[0]]
        return build(words[1:])

    def page(self, name: str) -> str:
        """Return the help."""
        page = help_page.Page()
        command = "[COMMAND]" if self.default else "COMMAND"
        page.usage(name, f"[OPTIONS] {command} [ARGS]...")
        page.summary(self.doc)
        about = {"--version": "print the version", "--help": "Show this message and exit."}
        page.section("Options", [(word, about[word]) for word in self.words])
        width = max(map(len, self.commands)) + 2
        for title, names in self.topics.items():
            rows = [(each.ljust(width), self.commands[each][0]) for each in names]
            page.section(title, rows)
        page.paragraph(f"{name} COMMAND --help: the options of a command, with examples.")
        if self.default:
            page.paragraph(
                f"Without COMMAND it is {self.default}; ./NAME is a path named like a command."
            )
        return page.text


Builder = Callable[[list[str]], Command | Group]  # makes a command from its words


def builder(
    cls: type[Any], handler: str, doc: str, *examples: str, kind: type[Command] = Command
) -> Builder:
    """Return a function that makes a command, see Command."""
    return lambda words: kind(cls, handler, doc, *examples)


def _both(option: Option) -> tuple[list[str], list[str]]:
    """Return the spellings of a switch, and those of its opposite."""
    pairs = [spelling.partition("/") for spelling in option.spellings]
    return [on for on, _, _ in pairs], [off for _, _, off in pairs if off]
