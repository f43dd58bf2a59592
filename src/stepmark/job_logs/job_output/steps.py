"""Steps of training that a job printed, and whether it went on after a failure.

Python prints a traceback at once and, into a file, its other lines when it ends: steps below a
failure do not prove that they came later, unless the program then says that it ended well.
"""

import re
from dataclasses import dataclass, field

from stepmark.job_logs.job_output.lines import split_tag

CAUGHT = "caught-failure"
UNCERTAIN = "uncertain-failure"
# A line, without its digits, that may state a step of a trainer.
STEP_WORDS = re.compile(
    rb"(?i)^(?=.*(?:\bloss|_loss|grad_norm|elapsed time per|skipped=|samplespersec)).*"
    rb"\b(?:global_step|steps?|iteration|iter|epoch)\b|\[batch="
)
# torchtitan, Megatron-LM, DeepSpeed and others; llm-foundry; Hugging Face's Trainer.
_STEP = re.compile(
    r"(?:\b(?:global_step|[Ss]teps?|STEP|[Ii]teration|[Ii]ter)\b['\"]?[ \[:=#|]{0,16}|\[batch=)"
    r"(\d{1,12})\b|'epoch': '?(\d{1,6}(?:\.\d{1,9})?)"
)
_NUM_LAST = 3


@dataclass(slots=True)
class _Run:
    """Steps under one launcher's tag, each with a higher number than the one before."""

    number: float = -1.0
    line: int = 0
    last_lines: list[int] = field(default_factory=list)
    # Last line before steps began anew, and the line where they did.
    restarts: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class TrainingSteps:
    """Steps in one file, by launcher's tag."""

    runs: dict[str, _Run] = field(default_factory=dict)
    end_line: int = 0  # of a program that says that it ended well
    is_training: bool = False  # whether a step follows another

    def read(self, text: str, number: int) -> None:
        """Read a line that may state a step."""
        _, tag, body = split_tag(text)
        match = _STEP.search(body)
        if match is None:
            return
        step = float(match[match.lastindex or 0])
        run = self.runs.setdefault(tag, _Run())
        is_first_again = step == run.number and match[1] in ("0", "1")
        if is_first_again or 0 < run.number >= 2 * step:
            run.restarts.append((run.line, number))
            run.number = -1.0
            run.last_lines = []
        run.line = number
        if step > run.number:
            run.number = step
            self.is_training = self.is_training or bool(run.last_lines)
            run.last_lines = [*run.last_lines[1 - _NUM_LAST :], number]

    def rule_after(self, tag: str, line: int) -> str:
        """Return how the job went on after a failure in a line; "" if no line shows it.

        Several steps of the same process, or one of any and its end. Steps that begin anew
        are those of another start.
        """
        runs = {
            name: run
            for name, run in self.runs.items()
            if run.last_lines[-1] > line
            and not any(before < line < after for before, after in run.restarts)
        }
        if any(run.last_lines[-1] < self.end_line for run in runs.values()):
            return CAUGHT
        own = runs[tag].last_lines if tag in runs else []
        return UNCERTAIN if len(own) == _NUM_LAST and own[0] > line else ""
