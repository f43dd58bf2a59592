"""Kill whole jobs of two hosts at random times: python -m tests.cluster.kills [COUNT] [SEED].

Each job is killed by SIGKILL, all its processes at once, and resumed by the next one. No record
of a finished case may be lost or changed, and no case may be measured twice.
"""

import random
import re
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster import network
from tests.cluster.job import Job

from stepmark.store.reader import read_records

# Cases of some 50 ms each.
WORDS = ("comm", "all_reduce", "-b", "1K", "-e", "131K", "-i", "256", "-n", "20", "-w", "1")
NUM_CASES = 521


def main(count: int, seed: int) -> int:
    """Return the number of problems."""
    rng = random.Random(seed)
    hosts = network.up(2)
    folder = Path(tempfile.mkdtemp(prefix="stepmark-kills-"))
    kept: list[str] = []
    problems = 0
    say(f"seed {seed}: {count} kills")
    try:
        for number in range(count):
            words = ("resume", "latest") if kept else (*WORDS, "--device", "cpu")
            if not kept:
                folder = Path(tempfile.mkdtemp(prefix="stepmark-kills-"))
            own = folder / f"kill{number}"
            own.mkdir()
            job = Job(hosts, own, *words, leader_folder=folder)
            limit_s = time.monotonic() + rng.uniform(3.0, 8.0)
            while time.monotonic() < limit_s and job.agents[0].poll() is None:
                time.sleep(0.01)
            is_done = job.agents[0].poll() is not None
            job.kill()
            time.sleep(0.1)
            job.kill()
            problem = check(job, kept)
            lines = [line for line in text(job).split("\n")[:-1] if line]
            say(
                f"kill {number}: {len(lines) - len(kept)} new records, {len(lines)} in all"
                f"{', the job was done' if is_done else ''}{f': {problem}' if problem else ''}"
            )
            problems += bool(problem)
            kept = [] if is_done else lines
    finally:
        network.down(hosts)
    say(f"{problems} problems in {count} kills")
    return problems


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def text(job: Job) -> str:
    files = list(job.folder.glob("runs/*/records.jsonl"))
    return files[0].read_text() if files else ""


def check(job: Job, kept: list[str]) -> str:
    """Return what is wrong with the run after a kill; "" if nothing is."""
    lines = text(job).split("\n")
    if lines[: len(kept)] != kept:
        return "records that were there have changed"
    if job.agents[0].returncode not in (-signal.SIGKILL, 0):
        return f"it ended with exit code {job.agents[0].returncode}: {job.err()[-500:]}"
    if job.agents[0].returncode == 0 and len(lines) - 1 != NUM_CASES:
        return f"{len(lines) - 1} records of a job that is done, not {NUM_CASES}"
    if left := job.left():
        return f"processes live on: {left}"
    runs = list(job.folder.glob("runs/*/records.jsonl"))
    records = read_records(runs[0].parent) if runs else []
    announced = len(re.findall(r"^\[\d+/\d+\] ", job.err(), re.MULTILINE))
    if announced > len(records) - len(kept):
        return f"{announced} cases were announced, {len(records) - len(kept)} are recorded"
    keys = [(record.case.case_id, record.launch) for record in records]
    return "a case is measured twice" if len(set(keys)) < len(keys) else ""


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    count = numbers[0] if numbers else 100
    seed = numbers[1] if len(numbers) > 1 else secrets.randbelow(10**6)
    sys.exit(min(1, main(count, seed)))
