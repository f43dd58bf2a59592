"""Read failures in the output of a job: tracebacks, time-outs, signals, launchers' reports.

Lines of NCCL's own INFO messages are not passed here.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.findings.log_facts import (
    AbsentRank,
    Failure,
    GroupProgress,
    Role,
)
from stepmark.ground.read_text import (
    is_binary,
    open_binary,
    printable,
    read_head,
    without_colors,
)
from stepmark.job_logs.endings import DOUBTFUL, MORE_WORK, NOT_ENDED, ending_of
from stepmark.job_logs.failures import (
    FOREIGN,
    LAUNCHER,
    PEER_CLOSED,
    SERVICE_THREAD,
    TIMEOUT_ELSEWHERE,
    XIDS,
    classify,
)
from stepmark.job_logs.job_output.exits import ProcessExits
from stepmark.job_logs.job_output.lines import has_nccl_line, split_tag
from stepmark.job_logs.job_output.steps import CAUGHT, STEP_WORDS, UNCERTAIN, TrainingSteps
from stepmark.job_logs.job_output.watchdog import WatchdogLines
from stepmark.text_tables.nccl_text import OutputsReader
from stepmark.text_tables.stopped_outputs import stops_of

_MAX_FAILURES = 2000
_MAX_FRAMES = 2000
_MAX_SHAPES = 50_000
_DIGITS = b"0123456789"
_MAX_LINE_BYTES = 64 * 1024
# They say less than any other failure of their role, even an earlier one.
GENERAL = frozenset(
    {"failure-nccl", "failure-exit", "failure-abort", "failure-unknown", LAUNCHER}
)

# A scheduler that ends a job sends its processes these signals.
_ENDS = frozenset({"failure-time-limit", "failure-terminated"})
_KILLS = frozenset({"failure-killed", "failure-signal", "failure-stopped"})
RESTARTED = "restarted"
UNKNOWN_ORDER = "unknown-order"
# Findings on what looks like a failure and is none; "": the failure's own text.
REMARKS: dict[str, tuple[str, Severity, str]] = {
    FOREIGN: ("foreign-connection", Severity.NOTE, ""),
    RESTARTED: (
        RESTARTED,
        Severity.NOTE,
        "torchrun started its workers again after a failure.",
    ),
    CAUGHT: (
        CAUGHT,
        Severity.NOTE,
        "A line looks like a failure; the job printed steps after it and ended well.",
    ),
    UNCERTAIN: (
        UNCERTAIN,
        Severity.WARNING,
        "A line looks like a failure, and more steps are printed after it: the job went on, or "
        "the lines are not in the order of their times.",
    ),
    **{rule: (rule.removeprefix("failure-"), Severity.WARNING, "") for rule in XIDS},
    UNKNOWN_ORDER: (
        UNKNOWN_ORDER,
        Severity.NOTE,
        "The clocks of the files have no common date and are far apart, as around midnight: "
        "which failure came first is not known.",
    ),
}
TEARDOWN = "failure-teardown"
# Ends of schedulers, and of `watch`, are those of a script, which may go on after a program
# that failed.
_OF_SCRIPTS = frozenset({"Slurm", "Kubernetes", "LSF", "PBS", "nccl-tests", "stepmark watch"})

# A line with none of these words states no failure and no end. Plain `in` is faster than one
# expression.
_WORDS = (
    *(b" started ", b"RUNNING", b"PENDING", b" Running", b"Pending", b"Terminat", b"Init:"),
    *(
        b"TIMEOUT",
        b"OUT_OF_MEM",
        b"PREEMPTED",
        b"MPI_ERR",
        b"rc=",
        b"return code",
        b"command not",
    ),
    *(b"rror", b"xception", b"ailed", b"ailure", b"atal", b"FATAL", b"FAILED", b"ignal"),
    *(b"SIG", b"illed", b"imeout", b"imed out", b"bort", b"xit", b"EXIT", b"Traceback"),
    *(b"Xid", b"oom", b"OOM", b"ut of memory", b"Out Of Memory", b"egmentation", b"segfault"),
    *(b"Assertion", b"CANCELLED", b"terminat", b"ismatch", b"PG ", b"collective #", b"panic"),
    *(b"PG_", b"WARN", b"died", b"closed", b"Interrupt", b"bus", b"NODE", b"Root Cause"),
    *(b"truncated", b"peer", b"got stuck", b"eartbeat", b"destroy_process_group", b"Rank "),
    *(b"annot allocate", b"No space left", b"quota", b"llegal ", b"lready in use", b"-capable"),
    *(b"GPUs are", b"insufficient", b"Duplicate GPU", b"ncorrectable", b"misaligned", b"GPU "),
    *(b"TERM_", b"TERMINATION", b"RMINATED", b"Terminat", b"double free", b"smashing", b"(): "),
    *(b"corrupt", b"walltime", b"victed", b"ack-off", b"ackoff", b"exceeded ", b"OUT_OF_ME"),
    *(b"low on resource", b"low on memory", b"can't start new", b"unavailable", b"zsh: "),
    *(
        b"No such file",
        b"open files",
        b"Errno",
        b"ermission denied",
        b"not permitted",
        b"xecve",
        b"enough slots",
    ),
    *(b"error: Unable to", b"ignored in", b"lost communication", b"RUNNING AT", b"ode=dumped"),
    *(b"rocess name", b"raining c", b"raining f", b"raining is", b"raining has", b"COMPLETED"),
    *(b"Completed ", b"uccessfully completed", b"uccessfully finished", b"Succeeded"),
    *(b"train_runtime", b"Trainer.fit", b"Avg bus", b"nThread", b"redop", b"oncluded"),
    *(b"Logging error", b'"run_stop"'),
)
# Phrases with such a word in every step of a trainer, whose lines would take long otherwise.
_OF_STEPS = re.compile(rb"per GPU \(|GPU utilization: |\[Rank \] step=|, RunningAvg")
# With a date of ISO or of glog.
_CLOCK = re.compile(
    r"(?:\b(?:\d{4}-|[EFWI])(\d\d)-?(\d\d))?[ T_](\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)"
)
_DAY_S = 86_400
_MONTH_DAYS = 31
_FIRST_DATE_S = (_MONTH_DAYS + 1) * _DAY_S

_FRAME = re.compile(r'^[\s|]*File "([^"]{1,400})", line (\d{1,7})(?:, in (.{1,120}))?')
_RAISED = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
    r"(?:Error|Exception|Interrupt|Exit|Timeout|Failure|Fault|Expired|Mismatch))(?::\s|:?$)"
)
# torch.distributed.elastic, agent/server/api.py.
_RESTARTED = re.compile(r"attempts left; will restart worker group")
_GROUP_MARGIN = re.compile(r"^\s{2,12}\| ")  # of an ExceptionGroup
_NAMED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::\s|$)")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|^<|/lib/python3|^/usr/lib/python")

_TIME_LIMIT = re.compile(
    r"DUE TO TIME LIMIT|TERM_RUNLIMIT|PBS: job killed: walltime|DeadlineExceeded"
    r"|JobState=TIMEOUT|^State: TIMEOUT"
)
_PREEMPTED = re.compile(r"DUE TO PREEMPTION|TERM_PREEMPT|JobState=PREEMPTED|^State: PREEMPTED")
_ENDED = re.compile(
    rf"{_TIME_LIMIT.pattern}|{_PREEMPTED.pattern}"
    r"|CANCELLED AT(?!.*NODE FAILURE)|Received \d+ death signal|got signal: \d+"
    r"|^(?:Detected )?KeyboardInterrupt|received SIG(?:TERM|INT)|after receiving SIGTERM"
    r"|TERM_(?:OWNER|ADMIN|REQUEUE)|(?:JobState=|^State: )CANCELLED"
)
_TEARDOWN = re.compile(
    r"closing signal SIG|Killing subprocess|destroy_process_group\(\) was not called"
    r"|dump signal|preparing to dump debug info|First PG on this rank"
    r"|terminate called|Stack trace of the failed collective|what\(\):|ChildFailedError"
    r"|Exception raised from |resource_tracker: There appear|taking the entire process down"
    r"|^Failures:|(?<!State:) FAILED$|CalledProcessError|non-zero exit"
    r"|one or more processes exited"
    r"|returned a non-zero|Terminating (?:job step|StepId)|signal_name|Signal \d+ \(SIG"
)
# Warnings that a healthy job may print as well.
_REMARK = re.compile(
    r"destroy_process_group\(\) was not called|resource_tracker: There appear|dump signal"
    r"|preparing to dump debug info|First PG on this rank|what\(\):|^Failures:"
    r"|(?<!State:) FAILED$"
    r"|Stack trace of the failed|Exception raised from |signal_name|Signal \d+ \(SIG"
)
# A logger's level, or words by which a program says that it continues.
_LEVEL = re.compile(
    r"^(?!.*NCCL WARN)(?:[^\s:]{1,200}[\s:|]+){0,4}\[?(?:DEBUG|INFO|WARNING|\w{0,30}Warning)\b"
)
_HANDLED = re.compile(
    rf"{_LEVEL.pattern}"
    r"|\b(?i:retrying|will retry|retry loop|reconnect\w*|recovered|handled|ignored|ignoring)\b"
    r"|choosing another|trying (?:another|port|\d)|^wandb: "
)
# Counters and flags that state that there was none.
_NONE = re.compile(
    r"OOMKilled\W{1,4}false|\boom_kill\w*[ =:]+0\b"
    r"|\b(?:0|no) (?:uncorrectable|fatal|fail\w*|errors?\b)(?!:)"
    r"|\b(?:0|[Nn]o) (?:NCCL|RCCL|CUDA|HIP) errors?\b(?!:)"
    r"|(?:[Ee]rrors?|[Ff]ail(?:ed|ures?)|[Ff]atal)(?: count)?\s*[:=]\s*"
    r"(?:0(?![\dx.])|(?:(?i:none|null|no error|success)|ncclSuccess)[\s.,;)\]}]*$)"
)
_UNKNOWN = re.compile(
    r"(?<![\w=\"'-])(?:FATAL|Fatal|fatal)(?: [Ee]rror|:| )|core dumped|^panic: "
    r"|Unhandled exception|Uncaught exception|\[?F\d{3,4} \d\d:\d\d:\d\d"
    r"|\[E\d{3,4} .*ProcessGroup"
)
# Frames of a stack, rank lines of nccl-tests, a deprecated variable.
_QUIET = re.compile(
    r"^\s*(?:frame #|#\d+ |#\s+Rank +\d+ .*\bPid )|Environment variable \S+ is deprecated"
)


@dataclass(slots=True)
class _Traceback:
    """A traceback that is being printed."""

    rank: int | None = None
    place: str = ""
    place_evidence: Evidence | None = None
    is_user: bool = False
    num_lines: int = 0
    was_indented: bool = False
    is_ignored: bool = False


@dataclass(slots=True)
class OutputReader:
    """Collects failures, line by line."""

    failures: dict[tuple[str, int | None, str, str], Failure] = field(default_factory=dict)
    endings: dict[tuple[str, str], Evidence] = field(default_factory=dict)  # the last of each
    _open: dict[str, _Traceback] = field(default_factory=dict)
    stopped: list[Finding] = field(default_factory=list)  # outputs of benchmarks
    _benchmarks: OutputsReader = field(default_factory=OutputsReader)  # of the current file
    _exits: ProcessExits = field(default_factory=ProcessExits)
    _watchdog: WatchdogLines = field(default_factory=WatchdogLines)
    _ignores_next: bool = False
    # Whether a line without digits has any word, and may state a step.
    _shapes: dict[bytes, tuple[bool, bool]] = field(default_factory=dict)
    _steps: dict[int, TrainingSteps] = field(default_factory=dict)  # by file
    _last_lines: dict[tuple[str, int | None, str, str], int] = field(default_factory=dict)
    _says_why: bool = False  # the next line is NCCL's last error, of any words
    after_ends: dict[str, Evidence] = field(default_factory=dict)  # lines that take an end back
    _num_added: int = 0  # lines that state a failure
    _has_end: bool = False  # of the current file
    _lists_unfinished: set[str] = field(default_factory=set)  # files
    _clock: float | None = None
    _file: str = ""
    _file_index: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether a failure, an end of a process or a time-out was read."""
        is_stated = any(one.role < Role.REMARK for one in self.failures.values())
        return is_stated or bool(self._exits.exits or self._watchdog.timeouts)

    @property
    def num_notable(self) -> int:
        """Number of failures, ends and benchmarks without a footer so far."""
        num_lines = self._num_added + self._exits.num_lines + len(self._watchdog.timeouts)
        num_ends = len(self.endings) + len(self.after_ends) + len(self._lists_unfinished)
        return num_lines + num_ends + len(self.stopped) + self.num_trainings

    @property
    def num_trainings(self) -> int:
        """Number of files with steps of training."""
        return sum(steps.is_training for steps in self._steps.values())

    def enter_file(self, file: str, index: int) -> None:
        self._file = file
        self._file_index = index
        self._clock = self._exits.clock = None
        self._has_end = False
        self._benchmarks = OutputsReader()
        self._steps[index] = TrainingSteps()
        self._exits.block = ""
        self._exits.file_index = index

    def leave_file(self) -> None:
        """Read the end of a file: a traceback or a benchmark that is open there is cut."""
        self.stopped += [
            stop.finding(self._file)
            for stop in stops_of(self._benchmarks.result())
            if not stop.unread  # the reader of tables says so
        ]
        for traceback in self._open.values():
            if traceback.place_evidence is not None and not traceback.is_ignored:
                self._add(
                    "failure-python",
                    Role.CAUSE,
                    "A traceback of Python is cut before its exception.",
                    "Look at the line of code that it names.",
                    traceback.rank,
                    "",
                    traceback.place_evidence,
                    place=traceback.place,
                    place_evidence=traceback.place_evidence,
                )
        self._open.clear()

    def read(self, line: bytes, number: int, process: str = "") -> None:
        """Read a line; process: host:pid of a WARN line of NCCL."""
        is_inside = self._open or self._exits.block or self._says_why
        if (
            self._has_end
            and line[:1] != b"#"
            and MORE_WORK.search(line)
            and not ending_of(printable(line))
        ):
            text = printable(line)
            self._void_end(Evidence(file=self._file, line=number, text=text))
        has_words, may_be_step = self._shape_of(line)
        is_quiet = not (is_inside or has_words)
        if may_be_step:
            self._steps[self._file_index].read(printable(without_colors(line)), number)
        if self._benchmarks.is_inside or (not is_quiet and b"minBytes" in line):
            self._benchmarks.read(printable(line), number)
        if is_quiet:
            return
        self._says_why = line.rstrip().endswith(b"Last error:")
        whole = printable(line)
        rank, tag, body = split_tag(whole)
        evidence = Evidence(file=self._file, line=number, text=whole)
        if clock := _CLOCK.search(whole, 0, 120):
            self._clock = self._exits.clock = _seconds(clock, self._clock)
        if _RESTARTED.search(body):
            self._restart(evidence)
        if self._traceback(body, tag, rank, evidence) or (
            not process and self._progress(body, evidence)
        ):
            return
        if self._exits.block and self._exits.summary(body, evidence):
            return
        if _QUIET.search(body):
            return
        readers = (self._watchdog.read, self._exits.read, self._ended)
        is_read = any(read(body, rank, evidence) for read in readers)
        if not is_read or "due to a collective timeout from" in body:
            self._other(body, rank, process, evidence)

    def _shape_of(self, line: bytes) -> tuple[bool, bool]:
        """Return (has a word that matters, may state a step); digits make no difference."""
        shape = line.translate(None, _DIGITS)
        known = self._shapes.get(shape)
        if known is None:
            # The words have no digit, so they are in the shape of any line that has one.
            words = _OF_STEPS.sub(b"", shape)
            is_step = bool(STEP_WORDS.search(without_colors(shape)))
            known = any(word in words for word in _WORDS), is_step
            if len(self._shapes) < _MAX_SHAPES:
                self._shapes[shape] = known
        return known

    def _progress(self, body: str, evidence: Evidence) -> bool:
        """Read a line of a job that ended well, or of a list of jobs."""
        printed_by = ending_of(body)
        if NOT_ENDED.search(body):
            self._lists_unfinished.add(self._file)
        if printed_by:
            self.endings[self._file, printed_by] = evidence
            self._has_end = True
            if printed_by not in _OF_SCRIPTS:
                self._steps[self._file_index].end_line = evidence.line
        return bool(printed_by)

    def _traceback(self, body: str, tag: str, rank: int | None, evidence: Evidence) -> bool:
        """Read a line of a traceback; return whether it was one."""
        if "Traceback (most recent call last)" in body:
            self._open[tag] = _Traceback(rank=rank, is_ignored=self._ignores_next)
            self._ignores_next = False
            return True
        if self._ignores_next and _RAISED.match(body):
            self._ignores_next = False
            return True
        # logging prints a traceback of its own calls, and goes on.
        self._ignores_next = body.startswith(("Exception ignored in", "--- Logging error ---"))
        current = self._open.get(tag)
        if current is None:
            return False
        body = _GROUP_MARGIN.sub("", body)
        current.num_lines += 1
        if frame := _FRAME.match(body):
            path, number, function = frame.groups()
            is_user = not _LIBRARY.search(path)
            if is_user or not current.is_user:
                current.place = f"{path}:{number}" + (f" in {function}" if function else "")
                current.place_evidence = evidence
                current.is_user = is_user
            current.was_indented = body[:1].isspace()
            return True
        is_raised = _RAISED.match(body) or (current.was_indented and _NAMED.match(body))
        if is_raised and current.place:
            del self._open[tag]
            if not current.is_ignored:
                self._raised(body, rank, current, evidence)
            return True
        if current.num_lines > _MAX_FRAMES:
            del self._open[tag]
        current.was_indented = body[:1].isspace()
        return body[:1].isspace() or not body

    def _raised(
        self, body: str, rank: int | None, traceback: _Traceback, evidence: Evidence
    ) -> None:
        if self._ended(body, rank, evidence) or "ChildFailedError" in body:
            return
        self._exits.read(body, rank, evidence)
        rule = classify(body)
        if (
            rule is None
            and "DistBackendError" in body
            and self._watchdog.read(body, rank, evidence)
        ):
            return
        self._add(
            rule.rule if rule else "failure-python",
            rule.role if rule else Role.CAUSE,
            rule.text if rule else "A Python exception was not caught.",
            rule.action if rule else "Look at the line of code that raised it.",
            rank,
            "",
            evidence,
            detail=body.strip()[:300],
            place=traceback.place,
            place_evidence=traceback.place_evidence,
        )

    def _ended(self, body: str, rank: int | None, evidence: Evidence) -> bool:
        """Read that the job was ended from outside."""
        if not _ENDED.search(body):
            return False
        is_late = _TIME_LIMIT.search(body)
        text = "The job was ended from outside: by a person, the scheduler, or a time limit."
        if is_late:
            text = "The scheduler ended the job at its time limit."
        elif _PREEMPTED.search(body):
            text = "The scheduler preempted the job."
        self._add(
            "failure-time-limit" if is_late else "failure-terminated",
            Role.ENDED,
            text,
            "Look at what the job did last: it may have hung before.",
            None,
            "",
            evidence,
        )
        return True

    def _other(self, body: str, rank: int | None, process: str, evidence: Evidence) -> None:
        """Read an error that one line states."""
        if not process and _NONE.search(body):
            return
        num_before = self._num_added
        self._one_line(body, rank, process, evidence)
        is_known = self._num_added > num_before or _LEVEL.search(body)
        if self._has_end and not is_known and DOUBTFUL.search(body):
            self._void_end(evidence)

    def _restart(self, evidence: Evidence) -> None:
        """Read that torchrun starts its workers again: what failed before is over."""
        for key, failure in self.failures.items():
            if failure.file_index == self._file_index:
                self.failures[key] = replace(failure, role=Role.REMARK)
        self._exits.forget_file()
        self._add(RESTARTED, Role.REMARK, "", "", None, "", evidence)

    def _void_end(self, evidence: Evidence) -> None:
        """Take the ends of a file back: a line after them may state a failure, or more work."""
        for key in [key for key in self.endings if key[0] == self._file]:
            del self.endings[key]
            self.after_ends.setdefault(self._file, evidence)
        self._has_end = False

    def _one_line(self, body: str, rank: int | None, process: str, evidence: Evidence) -> None:
        rule = classify(body)
        is_handled = not (process or _RAISED.match(body)) and _HANDLED.search(body)
        if is_handled and (rule is None or rule.role >= Role.CAUSE):
            rule = None
            if not _TEARDOWN.search(body):
                return
        is_teardown = (
            _TEARDOWN.search(body) and rule is not None and rule.rule != TIMEOUT_ELSEWHERE
        )
        if rule is not None and not (rule.role >= Role.VAGUE and is_teardown):
            # A text that ends in a colon is followed by the line's own words.
            is_quoted = _RAISED.match(body) or rule.text.endswith(":")
            detail = body.rpartition("NCCL WARN ")[2] if is_quoted else ""
            self._add(
                rule.rule,
                rule.role,
                rule.text,
                rule.action,
                rank,
                process,
                evidence,
                detail=detail,
            )
        elif _TEARDOWN.search(body):
            role = Role.REMARK if _REMARK.search(body) else Role.CONSEQUENCE
            text = "Processes of the job were told to stop, or cleaned up, after a failure."
            self._add(TEARDOWN, role, text, "", None, "", evidence)
        elif _RAISED.match(body):
            text = "A Python exception was raised."
            action = "Look for its traceback."
            self._add(
                "failure-python", Role.CAUSE, text, action, rank, process, evidence, detail=body
            )
        elif not process and _UNKNOWN.search(body):
            text = f"A line looks fatal, and no rule knows it: {body.strip()[:160]}"
            action = "Read the lines around it."
            self._add("failure-unknown", Role.VAGUE, text, action, rank, "", evidence)

    def _add(
        self,
        rule: str,
        role: Role,
        text: str,
        action: str,
        rank: int | None,
        process: str,
        evidence: Evidence,
        detail: str = "",
        place: str = "",
        place_evidence: Evidence | None = None,
    ) -> None:
        self._num_added += 1
        key = (rule, rank, process, f"{role}{detail[:120]}")
        self._last_lines[key] = evidence.line
        known = self.failures.get(key)
        if known is not None:
            # Of several lines the one that names the host is shown.
            shown = max(known.evidence, evidence, key=lambda line: "srun: error: " in line.text)
            self.failures[key] = replace(known, lines=known.lines + 1, evidence=shown)
        elif len(self.failures) < _MAX_FAILURES:
            self.failures[key] = Failure(
                rule=rule,
                role=role,
                text=text,
                action=action,
                rank=rank,
                process=process,
                time_s=self._clock,
                file_index=self._file_index,
                evidence=evidence,
                detail=detail.strip()[:300],
                place=place,
                place_evidence=place_evidence,
            )

    def result(
        self, rank_of: Callable[[str], int | None]
    ) -> tuple[tuple[Failure, ...], tuple[GroupProgress, ...], tuple[AbsentRank, ...]]:
        """Return all failures in their order; rank_of: of a process, host:pid or pid."""
        failures = [
            replace(one, rank=rank_of(one.process) if one.rank is None else one.rank)
            for one in self._without_caught()
        ]
        if self._watchdog.timeouts:  # they say it better
            failures = [one for one in failures if one.rule != TIMEOUT_ELSEWHERE]
        visits = (FOREIGN, SERVICE_THREAD) if any(f.rule == FOREIGN for f in failures) else ()
        visited = {one.process for one in failures if one.rule in visits and one.process}
        failures = [
            one for one in failures if one.rule != PEER_CLOSED or one.process not in visited
        ]
        self.endings = {
            (file, printed_by): line
            for (file, printed_by), line in self.endings.items()
            if file not in self._lists_unfinished or printed_by not in ("Slurm", "Kubernetes")
        }
        failures += self._exits.failures(rank_of)
        failures = _in_known_order([_after_end(one, failures) for one in failures])
        failures.sort(
            key=lambda one: (
                one.role,
                one.rule in GENERAL,
                one.rule == LAUNCHER,
                -1.0 if one.time_s is None else one.time_s,
                one.file_index,
                one.evidence.line,
            )
        )
        return tuple(failures), self._watchdog.states(), tuple(self._watchdog.absent)

    def _without_caught(self) -> list[Failure]:
        """Return the failures; those after which the job went on are remarks.

        Where processes ended and nothing else says why, they may be the cause after all.
        """
        rules = {key: self._rule_after(key, one) for key, one in self.failures.items()}
        rest = [
            *(one for key, one in self.failures.items() if not rules[key]),
            *self._exits.failures(lambda process: None),
        ]
        has_cause = any(one.role <= Role.WAIT and one.rule not in GENERAL for one in rest)
        is_ended = self._watchdog.timeouts or any(one.role < Role.REMARK for one in rest)
        if is_ended and not has_cause:
            return list(self.failures.values())
        return [
            replace(one, role=Role.REMARK, rule=rules[key]) if rules[key] else one
            for key, one in self.failures.items()
        ]

    def _rule_after(self, key: tuple[str, int | None, str, str], failure: Failure) -> str:
        """Return how the job went on after the last line of a failure, "" if it did not."""
        tag = split_tag(failure.evidence.text)[1]
        can_be_caught = failure.role in (Role.CAUSE, Role.VAGUE, Role.WAIT, Role.CONSEQUENCE)
        # torch marks the exceptions that nothing caught with the rank.
        if not can_be_caught or failure.rule == TEARDOWN or tag.startswith("rank"):
            return ""
        return self._steps[failure.file_index].rule_after(tag, self._last_lines[key])


def _in_known_order(failures: list[Failure]) -> list[Failure]:
    """Return failures of several files without times, where times do not tell their order."""
    timed = [one for one in failures if one.time_s is not None and one.role < Role.REMARK]
    times = [one.time_s or 0.0 for one in timed] or [0.0]
    spread = max(times) - min(times)
    is_clear = spread < _DAY_S / 2 or (min(times) >= _FIRST_DATE_S and spread < 180 * _DAY_S)
    if is_clear or len({one.file_index for one in timed}) < 2:
        return failures
    remark = replace(timed[0], role=Role.REMARK, rule=UNKNOWN_ORDER, action="")
    return [*(replace(one, time_s=None) for one in failures), remark]


def _after_end(failure: Failure, failures: Sequence[Failure]) -> Failure:
    """Return a process's end by a signal as a consequence, if the job was ended before it."""
    is_end = any(
        one.rule in _ENDS
        and one.file_index == failure.file_index
        and one.evidence.line < failure.evidence.line
        for one in failures
    )
    if is_end and failure.rule in _KILLS:
        return replace(failure, role=Role.CONSEQUENCE)
    return failure


def _seconds(clock: re.Match[str], before: float | None) -> float:
    """Return the time of a line; without a date, of the day next to the line before it."""
    month, day, hours, minutes, seconds = clock.groups()
    of_day = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if month:
        # Years are left out, as glog does: dates only order the lines of a job.
        return (int(month) * _MONTH_DAYS + int(day)) * _DAY_S + of_day
    num_days = 0 if before is None else round((before - of_day) / _DAY_S)
    return of_day + num_days * _DAY_S


def is_job_output(path: Path, *, has_tables: bool = False) -> bool:
    """Return whether a text file has lines of NCCL, or states a failure or an end.

    A table of results (has_tables) is output of a job only if it is unfinished, or if a line
    states a failure. Raises ConfigError.
    """
    if is_binary(read_head(path)):
        return False
    reader = OutputReader()
    reader.enter_file(str(path), 0)
    with open_binary(path) as stream:
        for number, line in enumerate(iter(partial(stream.readline, _MAX_LINE_BYTES), b""), 1):
            reader.read(line, number)
            if has_nccl_line(line) or reader.has_failed:
                return True
    reader.leave_file()
    has_xid = any(rule in XIDS for rule, *_ in reader.failures)
    is_job = has_xid or (bool(reader.endings or reader.num_trainings) and not has_tables)
    return bool(reader.has_failed or reader.stopped or reader.after_ends) or is_job
