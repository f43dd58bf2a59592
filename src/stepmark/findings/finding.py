"""Findings of readers of files, with the lines that show them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from stepmark.ground.redaction import redact_shapes


class Severity(StrEnum):
    """Severity of a finding.

    NOTE: worth knowing, or harmless although it looks bad. WARNING: likely costs speed, or a
    doubtful figure. PROBLEM: the job fails, hangs or gives wrong data.
    """

    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One line of a file. `line` counts from 1; 0 where the file has no lines."""

    file: str
    line: int
    text: str

    def __post_init__(self) -> None:
        # Jobs print their command lines and what their requests were.
        object.__setattr__(self, "text", redact_shapes(self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`rule` is a short stable name such as "net-socket"; `text` one sentence for people.

    `evidence` holds the first lines that prove it, `count` how many lines there are in all.
    `action` is what to do. `chain` leads from what was set or happened first to this finding,
    each link with its line; `consequences` are what this finding explains. `ranks`: one or all
    of them are the cause; () unknown.
    """

    rule: str
    severity: Severity
    text: str
    evidence: tuple[Evidence, ...] = ()
    count: int = 1
    action: str = ""
    chain: "tuple[Finding, ...]" = ()
    consequences: "tuple[Finding, ...]" = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", redact_shapes(self.text))


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return problems first, then warnings, then notes."""
    return sorted(findings, key=lambda finding: -list(Severity).index(finding.severity))
