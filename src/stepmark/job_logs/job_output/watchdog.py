"""What ProcessGroupNCCL prints on collectives that did not end."""

import re
from dataclasses import dataclass, field, replace

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import AbsentRank, GroupProgress
from stepmark.job_logs.job_output.lines import numbers_of
from stepmark.model.collectives import collective_named

_WATCHDOG = re.compile(
    r"\[Rank (\d{1,8})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum="
    r"(\d{1,12}), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?, Timeout\(ms\)=\d+\) "
    r"ran for (\d{1,12}) milliseconds"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(\S{1,20})(?: \([^()]{1,80}\))?"
    r"(?: PG GUID ([^\]]{1,120}?))? Rank (\d{1,8})\].{0,120}?"
    r"(?:(?:at work(?: sequence id)?|Timeout at NCCL work): (\d{1,12}).{0,40}?)?"
    r"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,12}), "
    r"last completed (?:NCCL )?work: (-?\d{1,12})"
)
_REPORT = re.compile(r"\] ?Rank (\d{1,8})\s*$")
_ABSENT = re.compile(
    r"\[([\d, \-]{1,400})\] finished collective #\d+, but didn't join collective #(\d{1,12})"
)


@dataclass(slots=True)
class _TimedOut:
    group_rank: int
    rank: int
    number: int
    call: str
    seconds: float
    evidence: Evidence
    group: str | None = None


@dataclass(slots=True)
class WatchdogLines:
    """Time-outs, states of groups, and ranks that were reported absent."""

    timeouts: list[_TimedOut] = field(default_factory=list)
    absent: list[AbsentRank] = field(default_factory=list)
    _progress: dict[tuple[str, int], GroupProgress] = field(default_factory=dict)
    _reporter: int | None = None

    def read(self, body: str, rank: int | None, evidence: Evidence) -> bool:
        """Read a line; return whether it was one of these."""
        is_known = False
        for match in _WATCHDOG.finditer(body):
            group_rank, number, kind, numel, _, milliseconds = match.groups()
            call = collective_named(kind.lower().strip("_").removesuffix("_base"))
            call += f" of {numel} elements" if numel else ""
            timeout = _TimedOut(
                group_rank=int(group_rank),
                rank=int(group_rank) if rank is None else rank,
                number=int(number),
                call=call,
                seconds=int(milliseconds) / 1000,
                evidence=evidence,
            )
            same = (timeout.rank, timeout.number, timeout.call, timeout.group_rank)
            if same not in {
                (t.rank, t.number, t.call, t.group_rank) for t in self.timeouts[-64:]
            }:
                self.timeouts.append(timeout)
            is_known = True
        if status := _STATUS.search(body):
            self._status(status, rank, evidence)
            is_known = True
        if report := _REPORT.search(body):
            self._reporter = int(report[1])
            is_known = True
        if (missing := _ABSENT.search(body)) and self._reporter is not None:
            for absent in numbers_of(missing[1]):
                self.absent.append(
                    AbsentRank(
                        group="?",
                        rank=absent,
                        reporter=self._reporter,
                        position=int(missing[2]),
                        evidence=evidence,
                    )
                )
            is_known = True
        return is_known or "collective #" in body or "Timeout at collective" in body

    def _status(self, match: re.Match[str], rank: int | None, evidence: Evidence) -> None:
        number, guid, group_rank, at, enqueued, completed = match.groups()
        group = guid or number
        key = (group, int(group_rank))
        for timed_out in self.timeouts:
            fits = at is None or timed_out.number == int(at)
            if (
                timed_out.group is None
                and at is not None
                and fits
                and timed_out.group_rank == key[1]
            ):
                timed_out.group = group
        if at is not None:
            self.absent = [
                replace(absent, group=group)
                if absent.group == "?" and absent.reporter == key[1]
                else absent
                for absent in self.absent
            ]
        if key not in self._progress or at is not None:
            self._progress[key] = GroupProgress(
                group=group,
                group_rank=key[1],
                rank=key[1] if rank is None else rank,
                enqueued=None if int(enqueued) < 0 else int(enqueued),
                completed=None if int(completed) < 0 else int(completed),
                waits_in=None,
                call="",
                seconds=None,
                evidence=evidence,
            )

    def states(self) -> tuple[GroupProgress, ...]:
        """Return the state of each group and rank, with the collective that timed out."""
        states = dict(self._progress)
        for timed_out in self.timeouts:
            group = "" if timed_out.group is None else timed_out.group
            key = (group, timed_out.group_rank)
            state = states.get(key)
            if state is not None and state.waits_in is not None:
                continue
            states[key] = GroupProgress(
                group=group,
                group_rank=timed_out.group_rank,
                rank=timed_out.rank,
                enqueued=state.enqueued if state else None,
                completed=state.completed if state else None,
                waits_in=timed_out.number,
                call=timed_out.call,
                seconds=timed_out.seconds,
                evidence=timed_out.evidence,
            )
        return tuple(states.values())
