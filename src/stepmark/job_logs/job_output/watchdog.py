"""What ProcessGroupNCCL prints on collectives that did not end.

A line names the rank in the job by its tag ([rank8]:) and the rank in its group ([Rank 1]); the
group stands in the same line, in another one of that rank, or nowhere.
"""

import re
from dataclasses import dataclass, field, replace

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import AbsentRank, GroupProgress
from stepmark.job_logs.job_output.lines import numbers_of
from stepmark.model.collectives import collective_named

_UNKNOWN_ELEMENTS = 2**64 - 1  # what torch prints for -1
_WATCHDOG = re.compile(
    r"\[Rank (\d{1,8})\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum="
    r"(\d{1,12}), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?, Timeout\(ms\)=\d+\) "
    r"ran for (\d{1,12}) milliseconds"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(\S{1,20}(?: \([^()]{1,80}\))?)"
    r"(?: PG GUID ([^\]]{1,120}?))? Rank (\d{1,8})\](\s*$)?"
)
_STATUS = re.compile(
    r"(?:(?:at work(?: sequence id)?|Timeout at NCCL work): (\d{1,12}).{0,40}?)?"
    r"[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,12}), "
    r"last completed (?:NCCL )?work: (-?\d{1,12})"
)
_REPORT = re.compile(r"\] ?Rank (\d{1,8})\s*$")
_STARTED_RANKS = re.compile(r"#(\d{1,12}) started ranks:\s*$")
_STARTED = re.compile(r"^\s*\[([\d, \-]{1,400})\] started (\w{1,40})\s*$")
_ABSENT = re.compile(
    r"\[([\d, \-]{1,400})\] finished collective #\d+, but didn't join collective #\d{1,12}"
    r"|ranks \[([\d, ]{1,400})\] are the lagging ranks that caused this timeout"
)


@dataclass(slots=True)
class _TimedOut:
    """A collective that timed out on a rank; rank: in the job, as far as the line says."""

    group_rank: int
    rank: int
    number: int
    call: str
    seconds: float
    evidence: Evidence
    group: str = ""  # unknown


@dataclass(slots=True)
class WatchdogLines:
    """Time-outs, states of groups, and ranks that were reported absent."""

    timeouts: list[_TimedOut] = field(default_factory=list)
    absent: list[AbsentRank] = field(default_factory=list)
    # By rank in the job and in the group.
    _by_rank: dict[tuple[int, int], list[_TimedOut]] = field(default_factory=dict)
    _progress: dict[tuple[str, int], GroupProgress] = field(default_factory=dict)
    _reporter: int | None = None  # its rank in the job
    _started_in: int | None = None  # number of the collective whose ranks a report lists
    # A line that ends before its call, with its rank.
    _broken: tuple[str, int | None, Evidence] | None = None

    def read(self, body: str, rank: int | None, evidence: Evidence) -> bool:
        """Read a line; return whether it was one of these."""
        if self._broken is not None and body.startswith(("WorkNCCL(", "by watchdog at work")):
            start, rank, evidence = self._broken
            body = start + body
        self._broken = None
        if body.rstrip().endswith(("operation timeout:", "error or timeout) detected")):
            self._broken = (f"{body.rstrip()} ", rank, evidence)
            return True
        named = _GROUP.search(body)
        group = None if named is None else (named[2] or named[1], int(named[3]))
        timeouts = [
            self._timed_out(match, rank, evidence) for match in _WATCHDOG.finditer(body)
        ]
        if group is not None:
            self._state(group, _STATUS.search(body), rank, evidence, timeouts)
        report = _REPORT.search(body) or (named if named and named[4] is not None else None)
        if report:
            place = int(report[3] if report is named else report[1])
            self._reporter = place if rank is None else rank
        if started := _STARTED_RANKS.search(body):
            self._started_in = int(started[1])
        self._others_started(body, evidence)
        missing = _ABSENT.search(body)
        if missing and self._reporter is not None:
            for absent in numbers_of(missing[1] or missing[2]):
                self.absent.append(
                    AbsentRank(
                        group="?",
                        rank=absent,
                        reporter=self._reporter,
                        evidence=evidence,
                    )
                )
        is_known = bool(timeouts or report or missing) or (
            group is not None and "ast enqueued" in body
        )
        return is_known or "collective #" in body or "Timeout at collective" in body

    def _others_started(self, body: str, evidence: Evidence) -> None:
        """Read the ranks that wait with the reporter, by its report on the group."""
        reported = next((t for t in self.timeouts if t.rank == self._reporter), None)
        started = _STARTED.search(body)
        if started is None or reported is None or reported.number != self._started_in:
            return
        for place in numbers_of(started[1]):
            if (place, place) not in self._by_rank and reported.rank == reported.group_rank:
                other = replace(reported, rank=place, group_rank=place, evidence=evidence)
                other.seconds = 0.0
                self._by_rank[place, place] = [other]
                self.timeouts.append(other)

    def _timed_out(
        self, match: re.Match[str], rank: int | None, evidence: Evidence
    ) -> _TimedOut:
        """Return the time-out of a line, or the same one of an earlier line."""
        group_rank, number, kind, numel, _, milliseconds = match.groups()
        call = collective_named(kind.lower().strip("_").removesuffix("_base"))
        is_coalesced = call == "coalesced"  # its size is never given
        if numel and int(numel) != _UNKNOWN_ELEMENTS and not is_coalesced:
            call += f" of {numel} element{'' if numel == '1' else 's'}"
        new = _TimedOut(
            group_rank=int(group_rank),
            rank=int(group_rank) if rank is None else rank,
            number=int(number),
            call=call,
            seconds=int(milliseconds) / 1000,
            evidence=evidence,
        )
        same = self._by_rank.setdefault((new.rank, new.group_rank), [])
        for known in same:
            if (new.number, new.call) == (known.number, known.call):
                return known
        same.append(new)
        self.timeouts.append(new)
        return new

    def _state(
        self,
        group: tuple[str, int],
        status: re.Match[str] | None,
        rank: int | None,
        evidence: Evidence,
        timeouts: list[_TimedOut],
    ) -> None:
        """Note the group of the time-outs of a rank, and how far it came in the group."""
        name, group_rank = group
        job_rank = group_rank if rank is None else rank
        at, enqueued, completed = status.groups() if status else (None, "-1", "-1")
        own = self._by_rank.get((job_rank, group_rank), ())
        for timed_out in own if at is not None else timeouts:
            if not timed_out.group and at in (None, str(timed_out.number)):
                timed_out.group = name
        if at is not None:
            self.absent = [
                replace(absent, group=name)
                if absent.group == "?" and absent.reporter == job_rank
                else absent
                for absent in self.absent
            ]
        key = (name, job_rank)
        known = self._progress.get(key)
        if known is None or at is not None or (known.enqueued is None and status):
            self._progress[key] = GroupProgress(
                group=name,
                group_rank=group_rank,
                rank=job_rank,
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
            key = (timed_out.group, timed_out.rank)
            state = states.get(key)
            if state is not None and state.waits_in is not None:
                continue
            states[key] = GroupProgress(
                group=timed_out.group,
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
