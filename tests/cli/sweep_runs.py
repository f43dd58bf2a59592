"""Sweeps of a made-up program, as tests start and read them."""

import functools
import json
import sys
from pathlib import Path

from tests.collectives.comm_records import comm_case, comm_measured, comm_run

from stepmark.cases.plan import ROUND
from stepmark.cases.sweep import (
    Outcome,
    Sweep,
    Try,
)
from stepmark.comparison.sweep import settings
from stepmark.comparison.sweep_run import RunSettings
from stepmark.store import codec

from .process import ROOT, environment
from .sweep_program import SIZES

PROGRAM = (sys.executable, "-m", "tests.cli.sweep_program")


COMMAND = ("comm", "all_reduce", "-b", "64K")


def names(*env: str, flags: tuple[str, ...] = (), default: bool = True) -> list[str]:
    return [one.name for one in settings(env, flags, default=default, force=False)]


def sweep_of(*kinds: str, repeats: int = 2, timeout_s: float = 20.0, schema: int = 2) -> Sweep:
    """schema 1: without a race, so that every round measures every setting."""
    found = settings([f"KIND={','.join(kinds)}"], [], default=True, force=False)
    return Sweep(
        schema=schema,
        sweep_id="the-sweep",
        created_at="2025-01-01T00:00:00+00:00",
        stepmark="0.1.0",
        command=COMMAND,
        settings=tuple(found),
        baseline="default",
        repeats=repeats,
        order="interleaved",
        seed=1,
        timeout_s=timeout_s,
    )


@functools.cache
def made_up_run(method: str) -> str:
    """Return what the program writes, but for times: a run, records, and those of `other`."""
    info = codec.encode_run(comm_run(2, KIND="", **{ROUND: ""}))
    records = [
        [
            json.loads(codec.encode(comm_measured(case, [[1.0] * 5] * 2, launch=launch)))
            for size in SIZES
            for case in (comm_case(size=size, num_ranks=2, skew_s=skew_s),)
            for launch in (1, 2)
        ]
        for skew_s in (0.0, 1e-3)
    ]
    for record in (*records[0], *records[1]):
        record["samples"]["method"] = method
    return json.dumps([json.loads(info), *records])


def means(
    folder: Path,
    said: list[str] | None = None,
    *,
    method: str = "comm-queued-ahead/1",
    **more: object,
) -> RunSettings:
    """method: of these records; other machines show how launches of "queued-ahead/1" vary."""
    (folder / "made-up-run.json").write_text(made_up_run(method))
    base = environment() | {
        "SWEEP_PROGRAM": str(folder),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }
    say = (said if said is not None else []).append
    return RunSettings(base=base, program=PROGRAM, report=say, **more)  # type: ignore[arg-type]


def started(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "started").read_text().splitlines()]


def a_try(run: str) -> Try:
    return Try(
        round=1,
        setting="default",
        outcome=Outcome.DONE,
        exit_code=0,
        seconds=1.0,
        started_at=0.0,
        run=run,
    )
