"""A bench without torch: its cases sleep, wait for the other ranks, and go wrong as told.

app.rank imports this module before it begins (STEPMARK_TEST_HOOK). Faults come in the variable
FAULTS: words RANK:POSITION:FAULT. What a rank did lies in the folder that LOG names.
"""

import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.collectives.comm_records import comm_case, comm_measured, comm_run

from stepmark.cases.plan import CommHow, Entry, How, Plan, entries
from stepmark.cases.record import Failed, Levels
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.measuring import heartbeat

LIMIT_S = 3.0
RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(os.environ.get("LOG", "."))


def plan(
    num_ranks: int, num_cases: int, *, launches: int = 1, timeout: str = "", budget: str = ""
) -> Plan:
    """Case i has 2^i KiB. timeout, budget: as the options have them."""
    cases = [comm_case(size=2 ** (10 + i), num_ranks=num_ranks) for i in range(num_cases)]
    return Plan(
        command="comm",
        device="cpu",
        world_size=num_ranks,
        how=How(comm=CommHow(timeout_s=LIMIT_S)),
        entries=entries(cases, launches),
        options={
            name: value for name, value in (("timeout", timeout), ("budget", budget)) if value
        },
    )


class LostPeersError(StepmarkError):
    exit_code = 3


@dataclass(frozen=True)
class Ranks:
    """They meet in files: nobody gets on before everybody is here."""

    rank: int = RANK
    num_ranks: int = NUM_RANKS
    device: str = "cpu"

    def gather(self, value: Any) -> list[Any]:
        folder = Path(os.environ["STEPMARK_HEARTBEATS"])
        _meetings.append(0)
        number = len(_meetings)
        mine = folder / f"meet-{number}-{RANK}"
        mine.with_suffix(".tmp").write_bytes(pickle.dumps(value))
        mine.with_suffix(".tmp").rename(mine)
        return [wait_for(folder / f"meet-{number}-{rank}") for rank in range(NUM_RANKS)]

    def decide(self, decision: Callable[[], Any]) -> Any:
        return self.gather(decision() if RANK == 0 else None)[0]

    def close(self) -> None:
        say("closed")


_meetings: list[int] = []


def wait_for(file: Path) -> Any:
    while not file.exists():
        time.sleep(0.005)
    return pickle.loads(file.read_bytes())


@dataclass(frozen=True)
class Context:
    ranks: Ranks = Ranks()
    run_id: str = ""
    folder: Path | None = None
    failures: tuple[Failed, ...] = ()
    on_blocked: Callable[[Failed, int], None] = print
    workload: object = None
    levels: Levels | None = None
    end_s: float = math.inf

    def left_s(self) -> float:
        return self.end_s - time.monotonic()


def make_context(device: str, **_: object) -> Context:
    if told(0, "join"):
        stuck_in_this_function()
    return Context()


class Bench:
    def abort(self) -> None:
        say("aborted")

    def completed(self, entry: Entry) -> Entry:
        return entry


def make_benches(plan: Plan, context: Context) -> dict[str, Bench]:
    return {"comm": Bench()}


def say(text: str) -> None:
    with (FOLDER / f"rank-{RANK}").open("a") as file:
        file.write(f"{time.monotonic():.3f} {text}\n")


def told(position: int, fault: str) -> bool:
    return f"{RANK}:{position}:{fault}" in os.environ.get("FAULTS", "").split()


def run(
    todo: Sequence[Entry],
    context: Context,
    benches: object,
    guard: Any,
    sink: Any,
    *,
    start_s: float,
) -> int | None:
    say(f"left {context.left_s():.0f}")
    for entry in todo:
        if entry.launch != todo[0].launch:
            return entry.position
        position = entry.position
        if told(position, "set-up"):
            guard.idle(0.5)
            hold = stuck_and_nobody_else_can_run
            (hold if told(position, "hold") else stuck_in_this_function)()
        guard.begin(position, 30.0 if told(position, "long") else LIMIT_S)
        for name, fault in FAULTS.items():
            if told(position, name):
                fault()
        if told(position, "blocked"):
            message = "rank 1 broke"
            record = Failed(
                run_id=context.run_id,
                case=entry.case,
                cause="error",
                message=message,
                ranks=(1,),
            )
            context.on_blocked(record, position)
        context.ranks.gather(None)
        if RANK == 0:
            times = [[1e-5] * 5] * NUM_RANKS
            record = replace(comm_measured(entry.case, times), run_id=context.run_id)  # type: ignore[arg-type, assignment]
            sink(replace(record, launch=entry.launch))
        if told(position, "recorded"):
            time.sleep(0.3 if RANK else 0.0)
            die()
        if told(position, "waits"):
            time.sleep(1000)
        guard.idle(5.0)
        say(f"done {position}")
        if told(position, "restart"):
            return position + 1
    return None


def stuck_in_this_function() -> None:
    time.sleep(1000)


def stuck_and_nobody_else_can_run() -> None:
    """One call into C that keeps the GIL."""
    sum(range(10**12))


def start_child() -> None:
    """As a compiler's worker, in a session of its own; named so that a test finds it."""
    subprocess.Popen(["sh", "-c", "sleep 1000; :"], start_new_session=True)


def die() -> None:
    time.sleep(0.1)  # by then the others have begun this case, too
    os.kill(os.getpid(), signal.SIGKILL)


def deaf() -> None:
    """To every signal that can be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def raise_error() -> None:
    raise RuntimeError("a mistake of ours")


def refuse() -> None:
    raise ConfigError("mode", "fast", "queued")


def lose_peers() -> None:
    raise LostPeersError("connection closed by peer")


FAULTS: dict[str, Callable[[], object]] = {
    "deaf": deaf,
    "child": start_child,
    "hang": stuck_in_this_function,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": die,
    "exit7": lambda: os._exit(7),
    "leave": lambda: os._exit(0),
    "raise": raise_error,
    "refuse": refuse,
    "lost": lose_peers,
    "long": lambda: time.sleep(30),
}


def fake(name: str, **contents: object) -> None:
    """Stand in for a module, which a forked rank has imported."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    setattr(importlib.import_module(package), last, module)


def install() -> None:
    environment = comm_run(NUM_RANKS).environment
    devices = environment.devices
    if "drifts" in os.environ.get("FAULTS", "") and os.environ["STEPMARK_FIRST"] != "0":
        environment = replace(environment, torch="another")
    fake(
        "stepmark.measuring.environment",
        local_device=lambda device, rank: devices[rank],
        capture=lambda found: environment,
        levels=lambda ranks: Levels(machine="n1", process=f"{os.getpid()}", communicator=1),
        process_age_s=lambda: 0.0,
    )
    fake("stepmark.measuring.context", make_context=make_context)
    fake(
        "stepmark.measuring.ranks",
        LostPeersError=LostPeersError,
        dump_flight_recorder=lambda: f'{{"rank": {RANK}}}',
    )
    fake("stepmark.measuring.run_cases", make_benches=make_benches, run=run)
    say(f"up {os.getpid()} {os.environ['STEPMARK_FIRST']} {os.environ['STEPMARK_HEARTBEATS']}")


if "RANK" in os.environ:
    heartbeat._LEAST_SET_UP_S = 0.5
    install()
    if "never" in os.environ.get("FAULTS", ""):
        time.sleep(60)
