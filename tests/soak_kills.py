"""Kill measuring verbs at drawn times, go on: python -m tests.soak_kills SEED COUNT [FIRST].

A kill is drawn by its seed and number: when or after which record, of whom (the command, one of
its ranks, or all its processes), and by which signal. Then the run is resumed, or where a verb
has no runs started again. No record may be lost or changed, no case may be measured twice, the
second command must measure the rest, and no process and no shared memory of the killed one may
be left. The last hundred: results/kills.txt.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from stepmark.cases.record import Measured, Record, Skipped
from stepmark.cases.sweep import Outcome
from stepmark.ground.processes import is_alive, marked
from stepmark.measuring.heartbeat import FOLDER, MEMORY
from stepmark.store import plans, sweeps
from stepmark.store.reader import is_run, list_runs, read_records

ROOT = Path(__file__).parents[1]
SEED = 20261128
COUNT = 100
MARK = "STEPMARK_TEST_KILL"  # variable that all processes of a kill have
LIMIT_S = 300.0
# A user's own job may live on, as its launcher decides, and then ends by itself.
LINGER_S = 60.0

_COPY = "op copy --num-bytes 131072 --device cpu"
_JOB = ROOT / "examples" / "plain_ddp.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A command that is killed within `lasts_s` or after one of its `records`.

    before: what it needs to have run. again: what continues it. rank: a word of the command
    lines of its ranks. codes: with which the second command may end; a check on a busy host may
    not be able to tell.
    """

    words: str
    records: int
    lasts_s: float
    before: str = ""
    again: str = "resume latest"
    rank: str = "stepmark.measuring.rank"
    codes: tuple[int, ...] = (0,)


VERBS = {
    "op": Verb(
        words="op gemm --m 64,96,128 --n 64 --k 64 --device cpu --budget 2s --launches 2",
        records=6,
        lasts_s=12.0,
    ),
    "comm": Verb(
        words="comm all_reduce -b 1K -e 64K -f 2 --nproc 2 -n 20 -w 1 --device cpu",
        records=7,
        lasts_s=9.0,
    ),
    "train": Verb(
        words="train gpt2-125m --scale tiny --strategy ddp --nproc 2 --mbs 1,2 --device cpu "
        "--steps 4",
        records=2,
        lasts_s=12.0,
    ),
    "run": Verb(
        words="run gpt2-125m --scale tiny --strategy single --mbs 2 --device cpu --budget 5s",
        records=4,
        lasts_s=20.0,
    ),
    "replay": Verb(
        before="workload generate --framework ddp --model gpt2-125m --scale tiny --mbs 2 "
        "--world-size 2 -o w.json",
        words="replay w.json --iters 20 --device cpu",
        records=1,
        lasts_s=8.0,
    ),
    "calibrate": Verb(
        words="calibrate gpt2-125m --scale tiny --strategy ddp --nproc 2 --mbs 2 --device cpu "
        "--budget 5s",
        records=3,
        lasts_s=12.0,
    ),
    "check": Verb(
        before=f"{_COPY} --launches 3 --budget 1s",
        words="check --baseline latest --launches 3 --floor 1 --budget 2s",
        again="resume --out runs/checks latest",
        records=3,
        lasts_s=12.0,
        codes=(0, 1, 3),
    ),
    "sweep": Verb(
        words=f"sweep --env OMP_NUM_THREADS=1,2 --repeats 2 -- {_COPY} --budget 1s",
        again="sweep --resume latest",
        records=6,
        lasts_s=30.0,
    ),
    "watch": Verb(
        words=f"watch --steps 3 -- torchrun --nproc-per-node 2 {_JOB}",
        again="",
        rank=_JOB.name,
        records=0,
        lasts_s=10.0,
    ),
}


@dataclass(slots=True, kw_only=True)
class Kill:
    """One command, killed once and continued. `events` is its line in the log."""

    number: int
    seed: int
    folder: Path
    events: list[str] = field(default_factory=list)
    heartbeats: set[Path] = field(default_factory=set)

    @property
    def name(self) -> str:
        return list(VERBS)[self.number % len(VERBS)]

    def check(self) -> str:
        """Kill and continue. Returns what is wrong; "" if nothing is."""
        verb = VERBS[self.name]
        if verb.before:
            done = self.stepmark(verb.before)
            assert done.returncode == 0, done.stderr
        before = self.killed(verb)
        if problem := self.left(LINGER_S if self.name == "watch" else 10.0):
            return problem
        again = verb.again if self.places() else ""
        own = set(self.places())
        done = self.stepmark(again or verb.words)
        after = {place: lines(place) for place in self.places()}
        new = sum(map(len, after.values())) - sum(map(len, before.values()))
        word = "continued" if again else "started again"
        self.events.append(f"{word}: {new} records more, exit code {done.returncode}")
        if done.returncode not in verb.codes:
            return f"{again or verb.words} ended with {done.returncode}: {done.stderr}"
        problems = [
            self.left(10.0),
            *(f"{folder} is left" for folder in self.heartbeats if folder.exists()),
            *(
                wrong(place, before.get(place, []))
                for place in sorted(own | set(self.places()))
            ),
        ]
        return next(filter(None, problems), "")

    def killed(self, verb: Verb) -> dict[Path, list[bytes]]:
        """Start the command, and kill it. Returns the lines that its files then have."""
        rng = random.Random(f"{self.seed} {self.number}")
        # Most are killed by what they have done: how long that takes depends on the machine.
        after = rng.randint(1, verb.records) if verb.records and rng.random() < 0.7 else 0
        delay_s = rng.uniform(0.0, 2.0) if after else rng.uniform(0.3, verb.lasts_s)
        whom = rng.choice(("the command", "a rank", "all processes"))
        number = rng.choice((signal.SIGKILL, signal.SIGTERM))
        began_s = time.monotonic()
        with (self.folder / "killed.txt").open("wb") as output:
            job = psutil.Popen(
                self.command(verb.words),
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        victims: list[psutil.Process] = []
        due_s = None
        while job.poll() is None and time.monotonic() < began_s + LIMIT_S:
            if due_s is None and sum(map(len, map(lines, self.places()))) >= after:
                due_s = time.monotonic() + delay_s
            is_due = due_s is not None and time.monotonic() >= due_s
            if is_due and (victims := self.victims(job, whom, verb, rng)):
                break
            time.sleep(0.05)
        self.note_heartbeats()
        passed_s = time.monotonic() - began_s
        complete = {place: lines(place) for place in self.places()}
        for process in victims:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        code = job.wait(LIMIT_S)
        kept = {place: lines(place) for place in self.places()}
        when = f"after {passed_s:.1f} s" + f", {delay_s:.1f} s after record {after}" * bool(
            after
        )
        what = f"{number.name} to {whom} {when}" if victims else "not killed: done"
        count = sum(map(len, kept.values()))
        self.events.append(f"{self.name}: {what}; exit code {code}, {count} records")
        for place, own in complete.items():
            assert kept[place][: len(own)] == own or place.name == sweeps.FILE
        return kept

    def victims(
        self, job: psutil.Process, whom: str, verb: Verb, rng: random.Random
    ) -> list[psutil.Process]:
        """Return whom to kill; nobody as long as there is no rank to be killed."""
        if whom == "the command":
            return [job]
        own = sorted(marked(MARK, self.mark), key=lambda process: process.pid)
        if whom == "all processes":
            return own
        ranks = [process for process in own if verb.rank in " ".join(cmdline(process))]
        return [rng.choice(ranks)] if ranks else []

    def note_heartbeats(self) -> None:
        for process in marked(MARK, self.mark):
            with contextlib.suppress(psutil.Error, OSError):
                folder = Path(process.environ().get(FOLDER, "/"))
                if folder.parent == MEMORY:
                    self.heartbeats.add(folder)

    def left(self, limit_s: float) -> str:
        """Return which processes are left after a while; "" if none is."""
        end_s = time.monotonic() + limit_s
        while own := [process for process in marked(MARK, self.mark) if is_alive(process)]:
            if time.monotonic() > end_s:
                names = "; ".join(" ".join(cmdline(process)) for process in own)
                for process in own:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                return f"processes are left: {names}"
            time.sleep(0.1)
        return ""

    def places(self) -> list[Path]:
        """Return the runs or the sweep of the verb, whose baseline is no part of it."""
        found = [path.parent for path in self.folder.glob(f"sweeps/*/{sweeps.FILE}")]
        if self.name == "sweep":
            return found
        root = self.folder / "runs"
        return list_runs(root / "checks" if self.name == "check" else root)

    @property
    def mark(self) -> str:
        return f"{self.seed}-{self.number}-{self.folder}"

    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", MARK: self.mark}
        return {**os.environ, **own}

    def command(self, words: str) -> list[str]:
        return [sys.executable, "-m", "stepmark", *words.split()]

    def stepmark(self, words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(words),
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def lines(place: Path) -> list[bytes]:
    """Return what is complete on disk: lines of records, or tries of a sweep that are done."""
    if (place / sweeps.FILE).is_file():
        return [repr(t).encode() for t in sweeps.read(place).tries if t.outcome is Outcome.DONE]
    file = place / "records.jsonl"
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def wrong(place: Path, before: Sequence[bytes]) -> str:
    """Return what is wrong with a run or sweep that was continued; "" if nothing is."""
    if lines(place)[: len(before)] != before:
        return f"{place}: records that were there have changed"
    if (place / sweeps.FILE).is_file():
        sweep = sweeps.read(place)
        if not sweep.is_complete or sweep.failed:
            return f"{place}: {sweep.failed or 'incomplete'} after --resume"
        keys = [(t.round, t.setting) for t in sweep.tries if t.outcome is Outcome.DONE]
        return "" if len(set(keys)) == len(keys) else f"{place}: a try was repeated"
    if not is_run(place):
        return f"{place}: it is no run"
    records = read_records(place)
    done = [key(record) for record in records if is_finished(record)]
    if len(set(done)) < len(done):
        return f"{place}: a case was measured twice"
    # What a budget skipped has another one in the next command.
    skipped = [key(record) for record in records if isinstance(record, Skipped)]
    planned = {(entry.case.case_id, entry.launch) for entry in plans.read(place).entries}
    missing = planned.difference(done, skipped)
    return f"{place}: {len(missing)} cases were not measured" if missing else ""


def key(record: Record) -> tuple[str, int]:
    return record.case.case_id, record.launch


def is_finished(record: Record) -> bool:
    """Return whether resume keeps a record."""
    if not isinstance(record, Measured):
        return False
    return not (record.training and record.training.interrupted)


def main(seed: int, count: int, first: int = 0) -> int:
    """Return the number of problems. first: number of the first kill."""
    say(f"# python -m tests.soak_kills {seed} {count} {first}")
    problems = 0
    for number in range(first, count):
        with tempfile.TemporaryDirectory(prefix="stepmark-kill-") as folder:
            kill = Kill(number=number, seed=seed, folder=Path(folder))
            problem = kill.check()
        problems += bool(problem)
        say(f"{number}: {'; '.join(kill.events)}" + (f"; WRONG: {problem}" if problem else ""))
    say(f"# {problems} problems in {count - first} kills")
    return problems


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(min(1, main(*(numbers or (SEED, COUNT)))))
