"""Predicted steps of a run beside what was measured of them, as text."""

from collections.abc import Iterator
from dataclasses import dataclass

from stepmark.timeline.ledger import Ledger, MeasuredLedger, StepPower
from stepmark.timeline.ledger_text import difference_lines, power_lines, source_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Something worth doing. gain_ns: of the step, at most; None: not known."""

    text: str
    command: str
    gain_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was predicted, then measured and profiled."""

    case_id: str
    name: str
    predicted: Ledger | None  # of the stage of the measured rank
    measured: MeasuredLedger
    power: tuple[StepPower, StepPower]  # predicted, measured
    sentence: str
    replayed: tuple[str, ...] = ()  # what its operators and messages take by themselves
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a run says of its steps. commitment: when their predictions were committed."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    commitment: str

    def lines(self) -> Iterator[str]:
        """Yield the report as text; it ends with a sentence per step."""
        for step in self.steps:
            yield ""
            if step.predicted is not None:
                yield from difference_lines(step.predicted, step.measured.ledger)
                yield ""
                yield from power_lines(*step.power)
            yield source_line(step.measured)
            yield from step.replayed
        yield from (f"note: {note}" for note in self.notes)
        yield self.commitment
        yield from (f"\n{step.sentence}" for step in self.steps)
