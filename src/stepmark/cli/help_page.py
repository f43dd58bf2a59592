"""The help page of a command: options by topic, examples; --help-all adds what is rare."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from stepmark.ground import options
from stepmark.ground.options import Option

WIDTH = 100  # columns, on a terminal that has them
# Share of a page for options; the help of a longer one begins on a line of its own.
_OPTIONS_SHARE = 0.31
_NARROWEST = 50  # of a page
_ARGUMENTS = "Arguments"
# Small groups of options that stand under one heading.
_HEADINGS = {
    "Data": "Data and optimizer",
    "Optimizer step": "Data and optimizer",
    "Precision": "Precision and techniques",
    "Techniques": "Precision and techniques",
    "Device": "Run",
    "Time limits": "Run",
}
Row = tuple[str, str]


def usage(cls: type) -> list[str]:
    """Return the pieces of the usage line."""
    pieces = ["[OPTIONS]"]
    for option in options.options(cls):
        if option.argument and option.help:
            is_repeated = option.is_list and "..." not in option.metavar
            word = f"{option.metavar}..." if is_repeated else option.metavar
            pieces.append(word if option.default is options.REQUIRED else f"[{word}]")
    return pieces


class Page:
    """The text of a page, as wide as the terminal and at most WIDTH columns."""

    def __init__(self) -> None:
        columns = min(shutil.get_terminal_size().columns, WIDTH)
        self._width = max(columns - 2, _NARROWEST)
        self._parts: list[str] = []

    @property
    def widest(self) -> int:
        """Characters of the column of options."""
        return int(self._width * _OPTIONS_SHARE)

    @property
    def text(self) -> str:
        return "\n".join(self._parts)

    def usage(self, name: str, words: str) -> None:
        """Write how the command is called; where its name is long, its words stand below."""
        head = f"Usage: {name} "
        if self._width < len(head) + 20:
            indent = " " * 11
            self._parts.append(f"{head}\n{self._filled(words, indent, indent)}\n")
        else:
            self._parts.append(f"{self._filled(words, head, ' ' * len(head))}\n")

    def summary(self, text: str) -> None:
        self._parts.append(f"{self._filled(text, '  ', '  ')}\n")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"{self._filled(text)}\n")

    def section(self, title: str, rows: Sequence[Row], widest: int = 30) -> None:
        """Write words and what they mean; words wider than `widest` stand on a line alone."""
        column = min(max(len(words) for words, _ in rows), widest) + 2
        indent = " " * (column + 2)
        lines = [f"{title}:"]
        for words, text in rows:
            first, *others = self._filled(text, width=max(self._width - column - 2, 10)).split(
                "\n"
            )
            fits = len(words) <= column - 2
            start = f"{words:{column}}" if fits else f"{words}\n{indent}"
            lines += [f"  {start}{first}".rstrip(), *(f"{indent}{line}" for line in others)]
        self._parts.append("\n".join(lines) + "\n")

    def examples(self, lines: Sequence[str]) -> None:
        self._parts.append("".join(["Examples:\n", *(f"  stepmark {x}\n" for x in lines)]))

    def _filled(
        self, text: str, first: str = "", others: str = "", width: int | None = None
    ) -> str:
        return textwrap.fill(
            text, width or self._width, initial_indent=first, subsequent_indent=others
        )


def write(
    page: Page, name: str, cls: type, examples: Sequence[str], *, everything: bool
) -> None:
    """Write the sections of a page below its usage and summary.

    name: how the command is called. everything: also rare options and all spellings.
    """
    shown, num_left_out = _sections(cls, everything=everything)
    widths = [len(words) for rows in shown.values() for words, _ in rows]
    width = max((each for each in widths if each <= page.widest), default=0)
    for title in sorted(shown, key=lambda title: title != _ARGUMENTS):
        rows = [(words.ljust(width), text) for words, text in shown[title]]
        page.section(title, rows, width)
    if examples:
        page.examples(examples)
    note = "[...] is a default."
    if num_left_out:
        note += f" {name} --help-all: {num_left_out} more options."
    page.paragraph(note)


def _sections(cls: type, *, everything: bool) -> tuple[dict[str, list[Row]], int]:
    """Return the rows of each section, and how many options are left out."""
    declared = [option for option in options.options(cls) if option.help]
    sections: dict[str, list[Row]] = {}
    for option in declared:
        if everything or not option.rare:
            title = _HEADINGS.get(option.group, option.group)
            title = _ARGUMENTS if option.argument else title
            sections.setdefault(title, []).append(_row(option, everything=everything))
    return sections, sum(option.rare for option in declared) * (not everything)


def _row(option: Option, *, everything: bool) -> Row:
    if option.argument:
        return option.metavar, with_default(option)
    short = [word for word in option.spellings if not word.startswith("--")]
    long = [word for word in option.spellings if word.startswith("--")]
    words = [*short, *long] if everything else [*short[:1], *long[:1]]
    names = ", ".join(_both(words))
    return names if option.is_switch else f"{names} {option.metavar}", with_default(option)


def _both(words: Iterable[str]) -> Iterable[str]:
    """Yield --fp8/--no-fp8 as --[no-]fp8, and other spellings as they are."""
    for word in words:
        on, _, off = word.partition("/")
        name = on.removeprefix("--")
        yield f"--[no-]{name}" if off == f"--no-{name}" else word


def with_default(option: Option) -> str:
    """Return the help, with the default unless the help states one itself."""
    default = option.default
    if (
        default in (None, (), "", options.REQUIRED)
        or isinstance(default, bool)
        or option.help.endswith("]")
    ):
        return option.help
    return f"{option.help} [{option.reader.show(default)}]"
