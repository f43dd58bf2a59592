"""Settings of a sweep, and the outcome of each try."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT = "default"
# values of a flag that takes none
_ON = "on"
_OFF = "off"
# Verbs whose runs can be compared, and that have --out and --dry-run.
MEASURING = ("comm", "op", "train", "run")
MOST = 64  # settings that are tried without --force
MIN_GAIN = 0.01  # share by which a setting must be faster to be recommended
# Of sweep.json. Version 1 has no races: every round measures all settings, and there are no
# fresh rounds.
SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Environment variables, flags of the command, interpreter. "": unset, or not given.

    python: interpreter or virtual environment as it was typed. executable: its absolute path.
    """

    variables: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()
    python: str = ""
    executable: str = ""

    @property
    def name(self) -> str:
        """Return e.g. "NCCL_ALGO=Ring --mode graph"; unique within a sweep."""
        words = [f"python {self.python}"] if self.python else []
        words += [f"{name}={value}" for name, value in self.variables if value]
        words += [f"{flag_of(name)} {value}" for name, value in self.flags if value]
        return " ".join(words) or DEFAULT

    def command(self, command: tuple[str, ...]) -> list[str]:
        """Return the command with this setting's flags."""
        # Fields of an operator are always long flags, even one letter: op gemm --m 64.
        is_op = command[:1] == ("op",)
        words = list(command)
        for name, value in self.flags:
            if value not in ("", _OFF):
                words.append(f"--{name}" if is_op else flag_of(name))
            if value not in ("", _OFF, _ON):
                words.append(value)
        return words

    def program(self, program: Sequence[str]) -> list[str]:
        """Return a program, which begins with an interpreter, with this setting's own."""
        return [self.executable or program[0], *program[1:]]


_PIECE = re.compile(r"\\[,\\]|.", re.DOTALL)  # an escaped letter is one piece


def split_values(text: str) -> list[str]:
    r"""Split at commas; `\,` is a comma and `\\` a backslash within a value."""
    values = [""]
    for piece in _PIECE.findall(text):
        if piece == ",":
            values.append("")
        else:
            values[-1] += piece[-1]
    return values


def flag_of(name: str) -> str:
    """Return a flag such as -n or --mode."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


class Outcome(StrEnum):
    """Outcome of a try. Only DONE tries are compared; interrupted ones are repeated.

    Those that failed are repeated by --resume.
    """

    DONE = "done"
    FAILED = "failed"
    WRONG = "wrong data"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


FAILURES = (Outcome.FAILED, Outcome.WRONG, Outcome.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One measurement of one setting, in new processes."""

    round: int  # from 1
    setting: str  # name
    outcome: Outcome
    exit_code: int | None  # negative: the signal that ended it
    seconds: float
    started_at: float  # Unix time
    run: str = ""  # folder name under the sweep's runs/; "" where none was written
    stderr: tuple[str, ...] = ()  # last lines of a try that failed
    differs: tuple[str, ...] = ()  # from the environment of the first try


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Settings that were the fastest somewhere in the first `rounds` rounds.

    They and the baseline are measured in `fresh` more rounds, which had no part in selecting
    them. No settings: nothing was certainly faster than the baseline.
    """

    rounds: int
    settings: tuple[str, ...] = ()  # names
    fresh: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """sweep.json: the settings, and all tries so far in the order in which they ended.

    repeats: rounds in which settings are selected, at most. dropped: last round of settings
    that are certainly not the fastest. selection: None until it is made.
    """

    sweep_id: str
    created_at: str  # ISO 8601, UTC
    stepmark: str
    command: tuple[str, ...]  # without "stepmark"
    settings: tuple[Setting, ...]
    baseline: str  # name
    repeats: int
    order: str
    seed: int
    timeout_s: float
    notes: tuple[str, ...] = ()
    tries: tuple[Try, ...] = ()
    min_gain: float = MIN_GAIN
    dropped: Mapping[str, int] = field(default_factory=dict)
    selection: Selection | None = None
    repeated: int = 0  # of so many first tries, those that failed are repeated
    schema: int = SCHEMA

    @property
    def has_race(self) -> bool:
        """Return whether settings are dropped, selected and confirmed."""
        return self.schema > 1

    @property
    def last_round(self) -> int:
        """Return the number of the last round, as far as it is known."""
        if self.selection is None:
            return self.repeats
        return self.selection.rounds + self.selection.fresh

    def is_fresh(self, number: int) -> bool:
        """Return whether a round follows the selection."""
        return self.selection is not None and number > self.selection.rounds

    def members(self, number: int) -> frozenset[str]:
        """Return the names of the settings that a round measures, unless they failed."""
        if self.selection is not None and self.is_fresh(number):
            return frozenset((self.baseline, *self.selection.settings))
        return frozenset(
            setting.name
            for setting in self.settings
            if number <= self.dropped.get(setting.name, number)
        )

    @property
    def failed(self) -> dict[str, Try]:
        """Return the settings that are not tried again, each with its failed try."""
        tries = self.tries[self.repeated :]
        return {run.setting: run for run in tries if run.outcome in FAILURES}

    @property
    def done(self) -> set[tuple[int, str]]:
        """Return (round, setting) of each completed try."""
        return {(run.round, run.setting) for run in self.tries if run.outcome is Outcome.DONE}

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is left to be measured."""
        is_selected = self.selection is not None or not self.has_race
        return is_selected and all(
            (number, name) in self.done
            for number in range(1, self.last_round + 1)
            for name in self.members(number) - self.failed.keys()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerChoice:
    """Algorithm and protocol of NCCL for a message, named as in its tuner plugin."""

    collective: str  # name in model/collectives
    size_bytes: int  # as in nccl-tests: the largest buffer of any rank
    algorithm: str
    protocol: str
    num_channels: int

    @property
    def how(self) -> tuple[str, str, int]:
        return self.algorithm, self.protocol, self.num_channels


def cut(smaller: int, larger: int) -> int:
    """Return the boundary between two neighbouring sizes: their geometric mean."""
    return min(larger - 1, math.isqrt(smaller * larger))
