"""Settings of a sweep, and the outcome of each try."""

import math
from dataclasses import dataclass
from enum import StrEnum

DEFAULT = "default"
SCHEMA = 1  # of sweep.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Environment variables and flags of the command. "": unset, or not given."""

    variables: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return e.g. "NCCL_ALGO=Ring --mode graph"; unique within a sweep."""
        words = [f"{name}={value}" for name, value in self.variables if value]
        words += [f"{flag_of(name)} {value}" for name, value in self.flags if value]
        return " ".join(words) or DEFAULT

    def command(self, command: tuple[str, ...]) -> list[str]:
        """Return the command with this setting's flags."""
        # Fields of an operator are always long flags, even one letter: op gemm --m 64.
        is_op = command[:1] == ("op",)
        words = [
            (f"--{name}" if is_op else flag_of(name), value)
            for name, value in self.flags
            if value
        ]
        return [*command, *(word for pair in words for word in pair)]


def flag_of(name: str) -> str:
    """Return a flag such as -n or --mode."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


class Outcome(StrEnum):
    """Outcome of a try. Only DONE tries are compared; interrupted ones are repeated."""

    DONE = "done"
    FAILED = "failed"
    WRONG = "wrong data"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


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
class Sweep:
    """sweep.json: the settings, and all tries so far in the order in which they ended."""

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
    schema: int = SCHEMA

    @property
    def failed(self) -> dict[str, Try]:
        """Return the settings that are not tried again, each with its failed try."""
        return {
            run.setting: run
            for run in self.tries
            if run.outcome not in (Outcome.DONE, Outcome.INTERRUPTED)
        }

    @property
    def done(self) -> set[tuple[int, str]]:
        """Return (round, setting) of each completed try."""
        return {(run.round, run.setting) for run in self.tries if run.outcome is Outcome.DONE}

    @property
    def is_complete(self) -> bool:
        """Return whether every setting that did not fail was measured in every round."""
        names = {setting.name for setting in self.settings} - set(self.failed)
        return all(
            (number, name) in self.done
            for number in range(1, self.repeats + 1)
            for name in names
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerChoice:
    """Algorithm and protocol of NCCL for a message, named as in its tuner plugin."""

    collective: str  # name in core/collectives
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
