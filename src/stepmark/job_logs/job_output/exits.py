"""How processes of a job ended, as their launchers, shells and the kernel report it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from stepmark.findings.finding import Evidence
from stepmark.findings.log_facts import Failure, Role
from stepmark.job_logs.failures import SIGNALS, classify, signal_of
from stepmark.job_logs.job_output.lines import numbers_of

FIRST_FAILURE = "first observed failure"
_CHILD = re.compile(r"failed \(exitcode: (-?\d{1,4})\) local_rank: \d+ \(pid: (\d+)\)")
_BLOCK_RANK = re.compile(r"^\s*rank\s+: (\d{1,8}) \(local_rank")
_BLOCK_EXIT = re.compile(r"^\s*exitcode\s+: (-?\d{1,4}) +\(pid: (\d+)\)")
_SRUN = re.compile(
    r"srun: error: ([\w.\-\[\],]+): tasks? ([\d,\-\[\]]{1,200}): (Killed|Segmentation fault"
    r"|Bus error|Aborted|Terminated|Exited with exit code (\d{1,3}))"
)
_ON_SIGNAL = re.compile(
    r"process rank (\d+) with PID (\d+) on node \S+ exited on signal (\d{1,2})"
    r"|(?:died with <Signals\.\w+: |Caught signal )(\d{1,2})\b"
    r"|(?:(?:terminated|received|ended) (?:with |by )?signal |killed by signal: )"
    r"(SIG[A-Z]+|Killed|Aborted|Segmentation fault)"
    r"|(?:line \d+: +\d+ |^\[\d+\]\s*[+-]?\s+\d* *)(Killed|Segmentation fault|Bus error"
    r"|Aborted|Terminated)\b"
    r"|^(Killed|Segmentation fault|Bus error|Aborted)(?: +\(core dumped\))?(?: {3,}\S.*)?$"
    r"|^zsh: (killed|segmentation fault|abort|bus error)\b"
    r"|Fatal Python error: (Segmentation fault|Aborted|Bus error)"
    r"|\[\d+\]: (segfault) at "
)
# Signals with their number: Open MPI's handler, Hydra, Intel MPI, systemd, torchrun.
_NUMBERED = re.compile(
    r"(?:\[[\w.\-]+:0*(?P<handler_pid>\d{1,10})\] Signal: .{1,60}\("
    r"|EXIT STRING: .{1,60}\(signal |KILLED BY SIGNAL: |Signal "
    r"|code=(?:killed|dumped), status=)(?P<signal>\d{1,2})"
    r"(?:\)|/[A-Z]| \(SIG\w+\) received by PID (?P<pid>\d{1,10})| \(\w)"
)
_HANDLER = re.compile(
    r"^\[[\w.\-]+:\d+\] (?:\*\*\* (?:Process received signal|End of error message) \*\*\*"
    r"|Signal code:|Failing at address:|\[ ?\d+\] )"
)
_NAMED_PROCESS = re.compile(
    r"^=?\s*(?:RANK (?P<rank>\d{1,8}) )?PID (?P<pid>\d{1,10}) RUNNING AT "
    r"|Process name: \[\[\d+,\s?\d+\],\s?(?P<mpi>\d{1,8})\]"
)
_EXIT_CODE = re.compile(
    r"(?:exits with return code = |return(?:ed)? (?:non-zero )?exit (?:code|status) "
    r"|returned non-zero (?:code|status) |\bExited \(|[Ee]xit_status ?= ?"
    r"|EXIT CODE: |[Ee]xit(?:ed with)?(?: exit)? (?:[Cc]ode|status):? +"
    r"|exit_?[cC]ode\\?\"? ?[:=] ?)"
    r"(-?[1-9]\d{0,2})\b"
)
# The program says that it goes on.
_SKIPPED = re.compile(r"\b(?:skipping|skipped|ignored|ignoring|continuing)\b")
_SIGNAL_NUMBERS = {
    **{"Killed": 9, "SIGKILL": 9, "Segmentation fault": 11, "SIGSEGV": 11, "segfault": 11},
    **{"Bus error": 7, "SIGBUS": 7, "Aborted": 6, "SIGABRT": 6, "Terminated": 15},
    **{"SIGTERM": 15, "SIGINT": 2},
    **{"killed": 9, "segmentation fault": 11, "abort": 6, "bus error": 7},  # zsh
}


@dataclass(slots=True)
class _Exit:
    """How a process ended, as its launcher reports it."""

    code: int
    rank: int | None
    process: str
    is_first: bool  # torchrun's "first observed failure"
    evidence: Evidence
    time_s: float | None
    file_index: int


@dataclass(slots=True)
class ProcessExits:
    """Ends of processes, one per process."""

    exits: dict[tuple[int, str], _Exit] = field(default_factory=dict)  # by file and process
    num_lines: int = 0  # that state one
    block: str = ""  # of torchrun's summary that is being read: "first", "other"
    clock: float | None = None
    file_index: int = 0
    _block_rank: int | None = None
    _launcher_names: tuple[int | None, str] = (
        None,
        "",
    )  # rank and process that a launcher names

    def failures(self, rank_of: Callable[[str], int | None]) -> list[Failure]:
        return [_of_exit(exit_, rank_of) for exit_ in self.exits.values()]

    def forget_file(self) -> None:
        """Forget the ends in the current file: their processes were started again."""
        self.exits = {k: exit_ for k, exit_ in self.exits.items() if k[0] != self.file_index}

    def summary(self, body: str, evidence: Evidence) -> bool:
        """Read a line of torchrun's list of failures."""
        if body.startswith("====="):
            self.block = ""
        elif match := _BLOCK_RANK.match(body):
            self._block_rank = int(match[1])
        elif end := _BLOCK_EXIT.match(body):
            is_first = self.block == "first"
            exit_ = self._add_exit(int(end[1]), self._block_rank, f"pid {end[2]}", evidence)
            exit_.is_first = exit_.is_first or is_first
        elif "Root Cause (first observed failure)" in body:
            self.block = "first"
        else:
            return bool(
                re.match(r"^\s*(?:time|host|error_file|traceback)\s+:|^-{5}|^\[\d+\]:", body)
            )
        return True

    def read(self, body: str, rank: int | None, evidence: Evidence) -> bool:
        """Read how a process ended."""
        if child := _CHILD.search(body):
            self._add_exit(int(child[1]), None, f"pid {child[2]}", evidence)
        elif tasks := _SRUN.search(body):
            code = int(tasks[4]) if tasks[4] else -_SIGNAL_NUMBERS[tasks[3]]
            for task in numbers_of(tasks[2].strip("[]"))[:64]:
                # A task may be a launcher of several ranks.
                self._add_exit(code, None, f"task {task}", evidence)
        elif numbered := _NUMBERED.search(body):
            by_pid = numbered["handler_pid"] or numbered["pid"]
            process = f"pid {by_pid}" if by_pid else f"? {rank} {numbered['signal']}"
            self._add_exit(-int(numbered["signal"]), rank, process, evidence)
        elif named := _NAMED_PROCESS.search(body):
            mpi_rank = named["rank"] or named["mpi"]
            process = f"pid {named['pid']}" if named["pid"] else f"rank {mpi_rank}"
            self._launcher_names = (int(mpi_rank) if mpi_rank else None, process)
        elif signal := _ON_SIGNAL.search(body):
            mpi_rank, pid, on, by, *names = signal.groups()
            name = next((name for name in names if name), "")
            number = int(on or by) if on or by else _SIGNAL_NUMBERS.get(name, 0)
            who = int(mpi_rank) if mpi_rank else rank
            self._add_exit(-number, who, f"pid {pid}" if pid else f"? {who} {number}", evidence)
        elif (code_line := _EXIT_CODE.search(body)) and not (
            classify(body) or _SKIPPED.search(body)
        ):
            self._add_exit(int(code_line[1]), rank, f"? {rank} {code_line[1]}", evidence)
        elif _HANDLER.search(body):
            return True
        elif "Root Cause (first observed failure)" in body or body.startswith("Failures:"):
            self.block = "first" if "Root" in body else "other"
        else:
            return False
        return True

    def _add_exit(self, code: int, rank: int | None, process: str, evidence: Evidence) -> _Exit:
        if process.startswith("?") and self._launcher_names[1]:
            rank, process = self._launcher_names
        new = _Exit(code, rank, process, False, evidence, self.clock, self.file_index)
        exit_ = self.exits.setdefault((self.file_index, process), new)
        self.num_lines += 1
        exit_.rank = rank if exit_.rank is None else exit_.rank
        if signal_of(code) is not None and signal_of(exit_.code) is None:
            # Hydra's EXIT CODE: 9 is a signal
            exit_.code = code
            exit_.evidence = evidence
        return exit_


def _of_exit(exit_: _Exit, rank_of: Callable[[str], int | None]) -> Failure:
    rule, role, text, action = _meaning_of(exit_.code)
    if role is Role.CONSEQUENCE and exit_.is_first:
        role = Role.ENDED
    return Failure(
        rule=rule,
        role=role,
        text=text,
        action=action,
        rank=exit_.rank if exit_.rank is not None else rank_of(exit_.process),
        process="" if exit_.process.startswith("?") else exit_.process,
        time_s=exit_.time_s,
        file_index=exit_.file_index,
        evidence=exit_.evidence,
        detail=FIRST_FAILURE if exit_.is_first else "",
    )


def _meaning_of(code: int) -> tuple[str, Role, str, str]:
    """Return (rule, role, text, action); the text is a predicate of the process."""
    number = signal_of(code)
    if number in SIGNALS:
        return SIGNALS[number]
    if number is not None:
        text = f"ended on signal {number}"
        return "failure-signal", Role.SIGNAL, text, "Look at the lines before it."
    action = "Look for its traceback or last line; set TORCHELASTIC_ERROR_FILE to keep it."
    return "failure-exit", Role.VAGUE, f"ended with exit code {code}", action
