"""Inputs with a known truth, and changes that happen to files on their way to a person."""

import gzip
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

Lines = Sequence[str]


class Effect(StrEnum):
    """What a reader can do about a change.

    HARMLESS: it reads the same, and says nothing. DETECTABLE: it reads the same, or says that
    something is wrong. UNDETECTABLE: the changed text is one that another job would write.
    """

    HARMLESS = "harmless"
    DETECTABLE = "detectable"
    UNDETECTABLE = "undetectable"


@dataclass(frozen=True, slots=True)
class Mutator:
    """A change, by the name under which its rates are printed."""

    name: str
    effect: Effect
    apply: Callable[[Lines, Random], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The lines of one input, what it states, and files that must stand beside it."""

    lines: list[str]
    values: Counter[tuple[object, ...]]
    beside: dict[str, bytes] = field(default_factory=dict)


class Inputs(ABC):
    """One kind of input: how it is made, changed and read.

    samples: of each change, in every run and in the long one.
    """

    samples, all_samples = 8, 150

    @property
    @abstractmethod
    def mutators(self) -> tuple[Mutator, ...]:
        """Return its changes."""

    @abstractmethod
    def output(self, random: Random) -> Output:
        """Return a whole input."""

    @abstractmethod
    def reading(self, path: Path) -> tuple[Counter[tuple[object, ...]], list[str]]:
        """Return (values, all that says that something is wrong) of a file."""

    def verdict(self, output: Output, mutator: Mutator, path: Path) -> str:
        """Return "right" or "wrong", with ", said" where the reader says that something is."""
        values, signs = self.reading(path)
        return verdict(values == self.truth(output, mutator, path), signs)

    def truth(
        self, output: Output, mutator: Mutator, path: Path
    ) -> Counter[tuple[object, ...]]:
        """Return what is right to read of the changed file."""
        return output.values


def verdict(is_right: bool, signs: Sequence[str]) -> str:
    return f"{'right' if is_right else 'wrong'}{', said' if signs else ''}"


def encoded(lines: Lines, end: str = "\n") -> bytes:
    return "".join(line + end for line in lines).encode()


def _prefixed(prefix: Callable[[Random, int], str]) -> Callable[[Lines, Random], bytes]:
    """Return a change that puts one launcher's prefix before every line."""

    def apply(lines: Lines, random: Random) -> bytes:
        return encoded([prefix(random, number) + line for number, line in enumerate(lines)])

    return apply


def _crlf(lines: Lines, _: Random) -> bytes:
    return encoded(lines, "\r\n")


def _compressed(lines: Lines, _: Random) -> bytes:
    return gzip.compress(encoded(lines), 1)


def _byte_order_mark(lines: Lines, _: Random) -> bytes:
    return b"\xef\xbb\xbf" + encoded(lines)


def _utf16(lines: Lines, _: Random) -> bytes:
    return encoded(lines, "\r\n").decode().encode("utf-16")


def _spaces_at_ends(lines: Lines, random: Random) -> bytes:
    return encoded([line + " " * random.randrange(4) for line in lines])


def _without_last_newline(lines: Lines, _: Random) -> bytes:
    return encoded(lines).rstrip(b"\n")


_OTHER_PROGRAMS = (
    "",
    "Loading checkpoint shards:  45%|####5     | 9/20 [00:12<00:14,  1.34s/it]",
    "2026-11-02 10:15:00,123 - INFO - step 120 loss 2.31 lr 3.0e-04 tokens/s 81234",
    "/usr/lib/python3/site-packages/foo.py:12: UserWarning: this will change",
    "W1102 10:15:00.000000 140 torch/run.py:793] Setting OMP_NUM_THREADS to 1 per process",
    "pmixp: node-7: 12 of 128 connected",
    "  0%|          | 0/1000 [00:00<?, ?it/s]",
)


def _lines_of_others(lines: Lines, random: Random) -> bytes:
    mixed = list(lines)
    for _ in range(random.randint(1, 8)):
        mixed.insert(random.randint(0, len(mixed)), random.choice(_OTHER_PROGRAMS))
    return encoded(mixed)


def _colors(lines: Lines, _: Random) -> bytes:
    return encoded([f"\x1b[36m{line}\x1b[0m" for line in lines])


HARMLESS = (
    Mutator("unchanged", Effect.HARMLESS, lambda lines, _: encoded(lines)),
    Mutator("crlf", Effect.HARMLESS, _crlf),
    Mutator("gzip", Effect.HARMLESS, _compressed),
    Mutator("byte-order mark", Effect.HARMLESS, _byte_order_mark),
    Mutator("utf-16", Effect.HARMLESS, _utf16),
    Mutator("spaces at ends", Effect.HARMLESS, _spaces_at_ends),
    Mutator("no last newline", Effect.HARMLESS, _without_last_newline),
    Mutator("lines of others", Effect.HARMLESS, _lines_of_others),
    Mutator("colors", Effect.HARMLESS, _colors),
    Mutator("srun -l", Effect.HARMLESS, _prefixed(lambda *_: "0: ")),
    Mutator("srun -l wide", Effect.HARMLESS, _prefixed(lambda *_: " 12: ")),
    Mutator("mpirun", Effect.HARMLESS, _prefixed(lambda *_: "[1,0]<stdout>:")),
    Mutator("torchrun", Effect.HARMLESS, _prefixed(lambda *_: "[default0]:")),
    Mutator("kubectl", Effect.HARMLESS, _prefixed(lambda *_: "[pod/llm-worker-0/main] ")),
    Mutator(
        "kubectl --timestamps",
        Effect.HARMLESS,
        _prefixed(
            lambda random, n: f"2026-11-02T10:15:{n % 60:02}.{random.randrange(10**9):09}Z "
        ),
    ),
    Mutator("docker compose", Effect.HARMLESS, _prefixed(lambda *_: "worker-1  | ")),
)


def joined_lines(lines: Lines, random: Random) -> bytes:
    """Lose one newline: two processes wrote at once."""
    at = random.randrange(len(lines) - 1)
    return encoded([*lines[:at], lines[at] + lines[at + 1], *lines[at + 2 :]])


def line_within_line(lines: Lines, random: Random) -> bytes:
    """Put one line into the middle of another: two processes wrote at once."""
    at = random.randrange(len(lines) - 1)
    first, second = lines[at : at + 2]
    cut = random.randint(0, len(first))
    return encoded([*lines[:at], first[:cut] + second, first[cut:], *lines[at + 2 :]])


Pick = Callable[[Lines, Random], int]  # the place of a line


def _line_lost(lines: Lines, at: int, _: Random) -> list[str]:
    return [*lines[:at], *lines[at + 1 :]]


def _line_twice(lines: Lines, at: int, _: Random) -> list[str]:
    return [*lines[:at], lines[at], *lines[at:]]


def _end_lost(lines: Lines, at: int, random: Random) -> list[str]:
    return [*lines[:at], lines[at][: random.randrange(len(lines[at]))], *lines[at + 1 :]]


def _start_lost(lines: Lines, at: int, random: Random) -> list[str]:
    return [*lines[:at], lines[at][random.randrange(len(lines[at])) :], *lines[at + 1 :]]


def of_a_line(word: str, pick: Pick) -> tuple[Mutator, ...]:
    """Return what may happen to one of the lines that `pick` chooses; word names them."""

    def mutator(name: str, change: Callable[[Lines, int, Random], list[str]]) -> Mutator:
        def apply(lines: Lines, random: Random) -> bytes:
            return encoded(change(lines, pick(lines, random), random))

        return Mutator(name, Effect.DETECTABLE, apply)

    return (
        mutator(f"{word} lost", _line_lost),
        mutator(f"{word} twice", _line_twice),
        mutator(f"{word} cut", _end_lost),
        mutator(f"start of {word} lost", _start_lost),
    )
