"""Follow a Slurm job: its states, its output as it is written, its exit code."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stepmark.ground import signals
from stepmark.ground.errors import ConfigError
from stepmark.launching import slurm

POLL_S = 2.0  # between questions to Slurm's controller, which all users share
_TICK_S = 0.2  # between looks at the job's output


def follow(job_id: str, output: Path | None = None, *, cancel: bool = False) -> int:
    """Print a job's states on stderr and its output on stdout until it ends.

    cancel: an interrupt cancels the job; else the job goes on. output: its file, where Slurm
    does not say. Returns its exit code.
    """
    printed, tail = "", _Tail(output)
    is_known = is_cancelled = False
    with signals.catching() as received:
        while True:
            try:
                job = slurm.look(job_id)
            except slurm.SlurmError as error:
                if not is_known:
                    raise
                job, text = None, str(error)  # the controller may restart
            else:
                if job is None:
                    return _unknown(job_id, is_known=is_known)
                is_known, text = True, job.text
                if job.output and "%" not in job.output:  # some releases show the pattern
                    tail.path = Path(job.output)
            if text != printed:
                _say(job_id, text)
                printed = text
            if job is not None and job.end is not None:
                time.sleep(_TICK_S)
                tail.copy(whole=True)
                return _ended(job_id, job.end, tail.path, received)
            end_s = time.monotonic() + POLL_S
            while time.monotonic() < end_s:
                tail.copy()
                if received and (not cancel or len(received) > 1):
                    return _left(job_id, received)
                if received and not is_cancelled:
                    _say(job_id, "cancelling; a second interrupt leaves it alone")
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


def _say(job_id: str, text: str) -> None:
    sys.stderr.write(f"job {job_id}: {text}\n")


def _cancel(job_id: str) -> bool:
    """Return False where Slurm does not do it now."""
    try:
        slurm.cancel(job_id)
    except slurm.SlurmError as error:
        _say(job_id, f"{error}; trying again")
        time.sleep(POLL_S)
        return False
    return True


def _unknown(job_id: str, *, is_known: bool) -> int:
    if not is_known:
        raise ConfigError("follow", job_id, "a job that Slurm still knows")
    _say(job_id, "Slurm no longer knows it; its run says what it measured")
    return 3


def _ended(
    job_id: str, end: tuple[int, str], path: Path | None, received: Sequence[int]
) -> int:
    code, why = end
    _say(job_id, f"{why} (exit code {code})")
    if path is None or not path.is_file():
        _say(job_id, f"its output {path or ''} cannot be read from this host")
    return 128 + received[0] if received else code


def _left(job_id: str, received: Sequence[int]) -> int:
    again = f"stepmark launch --follow {job_id}"
    _say(job_id, f"it goes on; follow it: {again}; cancel it: scancel {job_id}")
    return 128 + received[0]
