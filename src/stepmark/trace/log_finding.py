"""What rules on a debug log share: how a finding is made of lines, and where a job ran."""

from collections.abc import Iterable

from stepmark.core.finding import Evidence, Finding, Severity
from stepmark.core.log_facts import LogFacts, Seen

MOST_EVIDENCE = 4
SOCKET = "NET/Socket"


def finding(
    rule: str, severity: Severity, text: str, seen: Iterable[Seen | Evidence]
) -> Finding:
    """A finding with the first lines of each kind, and the number of all lines."""
    held = list(seen)
    firsts: list[Evidence] = []
    more: list[Evidence] = []
    count = 0
    for one in held:
        lines: tuple[Evidence, ...] = one.evidence if isinstance(one, Seen) else (one,)
        count += one.lines if isinstance(one, Seen) else 1
        firsts += lines[:1]
        more += lines[1:]
    evidence = tuple(dict.fromkeys([*firsts, *more]))[:MOST_EVIDENCE]
    return Finding(rule=rule, severity=severity, text=text, evidence=evidence, count=count)


def is_multi_node(facts: LogFacts) -> bool | None:
    """Whether the job spans nodes; None where no line tells.

    NCCL's own count decides: containers of one machine have several host names.
    """
    known = [one.num_nodes for one in facts.communicators if one.num_nodes is not None]
    if known:
        return max(known) > 1
    if len(facts.hosts) > 1 or any(way.same_host is False for way in facts.transports):
        return True
    return None


def listed(words: Iterable[object], most: int = 8) -> str:
    """The first of many, e.g. "0, 1, 2 and 5 more"."""
    held = [str(word) for word in words]
    more = f" and {len(held) - most} more" if len(held) > most else ""
    return ", ".join(held[:most]) + more


def plural(number: int, noun: str) -> str:
    """E.g. "1 line", "3 lines"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
