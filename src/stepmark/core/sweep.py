"""Settings that are tried one against another, and what came of each try."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT = "default"
SCHEMA = 1  # of sweep.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Variables of the environment and flags of the command; "" is unset, or not given."""

    variables: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What is set, e.g. "NCCL_ALGO=Ring --mode graph"; unique within a sweep."""
        words = [f"{name}={value}" for name, value in self.variables if value]
        words += [f"{flag_of(name)} {value}" for name, value in self.flags if value]
        return " ".join(words) or DEFAULT

    def command(self, command: tuple[str, ...]) -> list[str]:
        """The command with this setting's flags."""
        # An operator's fields are long flags however short: op gemm --m 64.
        is_op = command[:1] == ("op",)
        words = [
            (f"--{name}" if is_op else flag_of(name), value)
            for name, value in self.flags
            if value
        ]
        return [*command, *(word for pair in words for word in pair)]


def flag_of(name: str) -> str:
    """-n, --mode."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


class Outcome(StrEnum):
    """Of a try. Only DONE ones are compared; an interrupted one is made again."""

    DONE = "done"
    FAILED = "failed"
    WRONG = "wrong data"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One setting measured once, in processes of its own."""

    round: int  # from 1
    setting: str  # name
    outcome: Outcome
    exit_code: int | None  # negative: the signal that ended it
    seconds: float
    started_at: float  # Unix time
    run: str = ""  # folder name under the sweep's runs/; "" where none was written
    stderr: tuple[str, ...] = ()  # last lines, of a try that went wrong
    differs: tuple[str, ...] = ()  # of its environment from that of the first try


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """sweep.json: what is tried, and all tries so far in the order in which they ended."""

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
    schema: int = field(default=SCHEMA)

    @property
    def failed(self) -> dict[str, Try]:
        """Settings that are not tried again, with the try that says why."""
        return {
            one.setting: one
            for one in self.tries
            if one.outcome not in (Outcome.DONE, Outcome.INTERRUPTED)
        }

    @property
    def done(self) -> set[tuple[int, str]]:
        """Round and setting."""
        return {(one.round, one.setting) for one in self.tries if one.outcome is Outcome.DONE}

    @property
    def is_complete(self) -> bool:
        """Whether every setting that did not go wrong was measured in every round."""
        names = {setting.name for setting in self.settings} - set(self.failed)
        return all(
            (number, name) in self.done
            for number in range(1, self.repeats + 1)
            for name in names
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerChoice:
    """What NCCL runs a message with. Names as its tuner plugin spells them."""

    collective: str  # as core/collectives names it
    size_bytes: int  # as nccl-tests counts: the largest buffer of any rank
    algorithm: str
    protocol: str
    num_channels: int

    @property
    def how(self) -> tuple[str, str, int]:
        return self.algorithm, self.protocol, self.num_channels


def cut(smaller: int, larger: int) -> int:
    """The last size that goes with the smaller of two neighbours: their geometric mean."""
    return min(larger - 1, math.isqrt(smaller * larger))
