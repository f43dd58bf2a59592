"""A job of Slurm: submit its script, and follow its states, its output and its end."""

import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stepmark.ground import signals
from stepmark.ground.errors import EXIT_CODES, ConfigError, StepmarkError
from stepmark.ground.package_data import data_text

_LIMIT_S = 60.0  # of one of Slurm's commands; a busy controller takes seconds
# Exit code and sentence of the states in which a job ends, but COMPLETED and FAILED.
ENDS = {
    "TIMEOUT": (143, "it reached its time limit"),
    "DEADLINE": (143, "it reached its deadline"),
    "CANCELLED": (143, "it was cancelled"),
    "PREEMPTED": (143, "a job of higher priority took its hosts"),
    "REVOKED": (143, "another cluster runs it"),
    "NODE_FAIL": (3, "a host failed; with --requeue the job would restart"),
    "OUT_OF_MEMORY": (3, "a process ran out of memory of the host"),
    "BOOT_FAIL": (3, "a host did not boot"),
}
_NOT_STARTED = 53  # Slurm's signal number for an output file that cannot be opened
_KEPT = "finished cases are recorded"


@cache
def pending_reasons() -> Mapping[str, str]:
    """Return why a job is pending, by the beginning of Slurm's reason."""
    reasons: dict[str, str] = tomllib.loads(data_text("slurm.toml"))["pending"]
    return reasons


class SlurmError(StepmarkError):
    """A command of Slurm that is missing, refuses, or does not reach its server."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as Slurm shows it. exit_code: CODE:SIGNAL; output: path, "" where unknown."""

    state: str
    reason: str = ""
    exit_code: str = "0:0"
    nodes: str = ""
    restarts: int = 0
    output: str = ""

    @property
    def text(self) -> str:
        """State, with the reason of a pending job."""
        if self.state == "PENDING" and self.reason not in ("", "None"):
            fits = [name for name in pending_reasons() if self.reason.startswith(name)]
            why = f": {pending_reasons()[max(fits, key=len)]}" if fits else ""
            return f"PENDING ({self.reason}){why}"
        again = f", restart {self.restarts}" if self.restarts else ""
        return f"{self.state} on {self.nodes}{again}" if self.state == "RUNNING" else self.state

    @property
    def end(self) -> tuple[int, str] | None:
        """Exit code and a sentence; None for a job that has not ended."""
        if self.state in ENDS:
            code, why = ENDS[self.state]
            return code, f"{why}; {_KEPT}"
        if self.state == "COMPLETED":
            return 0, "done"
        return self._failure() if self.state == "FAILED" else None

    def _failure(self) -> tuple[int, str]:
        code, number = (int(part) for part in self.exit_code.split(":")[:2])
        if number == _NOT_STARTED or not (code or number):
            return 3, "Slurm could not start its script: is the working directory there?"
        code = 128 + number if number else code
        if code in EXIT_CODES:
            return code, f"stepmark ended with exit code {code}"
        if code - 128 in set(signal.Signals):
            return 3, f"{signal.Signals(code - 128).name} ended stepmark; {_KEPT}"
        return 3, f"its script ended with exit code {code}"


def submit(script: str) -> str:
    """Return the id of a new job. Raises SlurmError for what sbatch refuses."""
    done = _run(["sbatch", "--parsable"], script)
    if done.returncode:
        raise SlurmError(f"sbatch refused the job: {_complaint(done)}")
    return done.stdout.strip().partition(";")[0]  # ID;CLUSTER


def query_job(job_id: str) -> Job | None:
    """Return a job; None for one that Slurm does not know, or no longer.

    squeue is used where scontrol is refused, sacct where the job has been forgotten. Raises
    SlurmError where the controller does not answer.
    """
    shown = _run(["scontrol", "-o", "show", "job", job_id])
    if shown.returncode == 0 and "JobState=" in shown.stdout:
        line = shown.stdout.splitlines()[0]
        fields = dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", line))
        return Job(
            state=fields["JobState"].partition(" ")[0],
            reason=fields.get("Reason", ""),
            exit_code=fields.get("ExitCode", "0:0"),
            nodes=fields.get("NodeList", ""),
            restarts=int(fields.get("Restarts", 0)),
            output=fields.get("StdOut", ""),
        )
    if "Invalid job id" not in shown.stderr:
        queue = _run(["squeue", "--noheader", "-j", job_id, "-o", "%T|%r|%N"])
        if queue.returncode == 0 and queue.stdout.strip():
            state, reason, nodes = queue.stdout.splitlines()[0].split("|")
            return Job(state=state, reason=reason, nodes=nodes)
        if queue.returncode and "Invalid job id" not in queue.stderr:
            raise SlurmError(f"Slurm does not answer: {_complaint(shown)}")
    return _accounted(job_id)


def _accounted(job_id: str) -> Job | None:
    """Return a job of the accounting database, which many sites do not have."""
    try:
        done = _run(["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode"])
    except SlurmError:
        return None
    if done.returncode or "|" not in done.stdout:
        return None
    state, exit_code = done.stdout.splitlines()[0].split("|")
    return Job(state=state.partition(" ")[0], exit_code=exit_code)  # CANCELLED by 1000


def _run(command: list[str], text: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
            start_new_session=True,  # a Ctrl-C is not its
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is missing: submit and follow jobs on a login node of Slurm, or "
            "print the script without --submit"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} does not answer within {_LIMIT_S:.0f} s") from None


def _complaint(done: "subprocess.CompletedProcess[str]") -> str:
    lines = [re.sub(r"^\w+: (error|fatal): ", "", text) for text in done.stderr.splitlines()]
    return "; ".join(filter(None, lines)) or f"exit code {done.returncode}"


POLL_S = 2.0  # between questions to Slurm's controller, which all users share
_TICK_S = 0.2  # between looks at the job's output


def follow(job_id: str, output: Path | None = None, *, cancel: bool = False) -> int:
    """Print a job's states on stderr and its output on stdout until it ends.

    cancel: an interrupt cancels the job; else the job goes on. output: its file, where Slurm
    does not say. Returns its exit code.
    """
    printed = ""
    tail = _Tail(output)
    is_known = is_cancelled = False
    with signals.catching() as received:
        while True:
            try:
                job = query_job(job_id)
            except SlurmError as error:
                if not is_known:
                    raise
                job = None
                text = str(error)  # the controller may restart
            else:
                if job is None:
                    if not is_known:
                        raise ConfigError("follow", job_id, "a job that Slurm still knows")
                    _report(job_id, "Slurm no longer knows it; its run says what it measured")
                    return 3
                is_known = True
                text = job.text
                if job.output and "%" not in job.output:  # some releases show the pattern
                    tail.path = Path(job.output)
            if text != printed:
                _report(job_id, text)
                printed = text
            if job is not None and job.end is not None:
                time.sleep(_TICK_S)
                tail.copy(whole=True)
                return _ended(job_id, job.end, tail.path, received)
            end_s = time.monotonic() + POLL_S
            while time.monotonic() < end_s:
                tail.copy()
                if received and (not cancel or len(received) > 1):
                    again = f"stepmark launch --follow {job_id}"
                    _report(
                        job_id, f"it goes on; follow it: {again}; cancel it: scancel {job_id}"
                    )
                    return 128 + received[0]
                if received and not is_cancelled:
                    _report(job_id, "cancelling; a second interrupt leaves it alone")
                    is_cancelled = _cancel(job_id)
                time.sleep(_TICK_S)


class _Tail:
    """Copies what is appended to a file to stdout, line by line."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._offset = 0

    def copy(self, *, whole: bool = False) -> None:
        """Copy new lines; with whole, also one without an end."""
        try:
            with open(self.path or "", "rb") as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:  # not written yet, or on another host's disk
            return
        new = new if whole else new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        if new:
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()


def _report(job_id: str, text: str) -> None:
    sys.stderr.write(f"job {job_id}: {text}\n")


def _cancel(job_id: str) -> bool:
    """Return False where Slurm does not do it now."""
    try:
        done = _run(["scancel", job_id])
        problem = f"scancel refused: {_complaint(done)}" if done.returncode else ""
    except SlurmError as error:
        problem = str(error)
    if problem:
        _report(job_id, f"{problem}; trying again")
        time.sleep(POLL_S)
    return not problem


def _ended(
    job_id: str, end: tuple[int, str], path: Path | None, received: Sequence[int]
) -> int:
    code, why = end
    _report(job_id, f"{why} (exit code {code})")
    if path is None or not path.is_file():
        _report(job_id, f"its output {path or ''} cannot be read from this host")
    return 128 + received[0] if received else code
