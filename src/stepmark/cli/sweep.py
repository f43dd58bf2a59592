"""stepmark sweep: its own options, and those of the command that it repeats."""

from collections.abc import Iterator, Sequence
from itertools import islice, product

from stepmark.cases.sweep import MEASURING, MOST, Setting, split_values
from stepmark.cli.commands import Values
from stepmark.cli.launch import Wrapper, check_arguments


class Sweep(Wrapper):
    """`stepmark sweep`, which refuses what its commands would refuse."""

    def check(self, values: Values) -> None:
        words = values["words"]
        if words and words[0] in MEASURING:
            for command in _commands(words, values["flags"] or ()):
                check_arguments(command, {})


def _commands(words: Sequence[str], swept: Sequence[str]) -> Iterator[list[str]]:
    """Yield the command with the values of each setting's flags."""
    flags = [text.partition("=") for text in swept]
    values = [[(name, value) for value in split_values(text)] for name, _, text in flags]
    for combination in islice(product(*values), MOST):
        yield Setting(flags=combination).command(tuple(words))
