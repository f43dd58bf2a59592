"""A command for the tests of sweep: writes a run of made-up times, or goes wrong.

python -m tests.cli.sweep_program comm all_reduce ... --out DIR, with KIND in the environment:
fast, fast2, slow, fading (fast until it is selected), other (measures otherwise), or a fault.
A hang leaves a grandchild in a session of its own. With a debug file asked for, it logs what a
made-up NCCL chooses; NCCL_ALGO=Tree is fast.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.collectives.comm_records import comm_case, comm_measured, comm_run
from tests.comparison.tuner_file import parse
from tests.store.writers import new_run

from stepmark.cases.plan import ROUND
from stepmark.comparison.tuner_text import first_match
from stepmark.store.runs import new_run_id
from stepmark.store.sweeps import FILE

SIZES = (2**16, 2**20, 2**24)
NCCL_NAMES = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}
SPEED = {"fast": 1.25, "fast2": 1.25, "slow": 0.8, "fading": 1.25}
GRANDCHILD = (
    "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
)


def hang() -> None:
    folder = os.environ["SWEEP_PROGRAM"]
    subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD, f"{folder}/grandchild"], start_new_session=True
    )
    time.sleep(60)


def written(folder: Path, speed: float) -> None:
    """Two launches in one run, with a noise of 0.3 %."""
    now = datetime.now(UTC)
    info = comm_run(2, KIND=os.environ.get("KIND", ""), **{ROUND: os.environ.get(ROUND, "")})
    info = dataclasses.replace(info, run_id=new_run_id(now))
    noise = random.Random(os.getpid())
    with new_run(folder, info) as writer:
        for size in SIZES:
            for launch in (1, 2):
                time_s = 1e-5 * (1 + size / 2**20) / speed * noise.gauss(1, 0.003)
                more = {"skew_s": 1e-3} if os.environ.get("KIND") == "other" else {}
                case = comm_case(size=size, num_ranks=2, **more)
                record = comm_measured(case, [[time_s] * 5] * 2, launch=launch)
                writer.append(dataclasses.replace(record, run_id=info.run_id))


def chosen(name: str, size: int) -> tuple[str, str, int]:
    """Of this NCCL: by size, or as forced, or as a tuner file says if a plugin reads it."""
    if plugin := os.environ.get("NCCL_TUNER_PLUGIN"):
        rules = parse(Path(os.environ["NCCL_TUNER_CONFIG_FILE"]).read_text())
        rule = first_match(rules, name, size, num_nodes=1, num_ranks=2)
        assert rule is not None
        channels = 1 if plugin == "trap" else rule.num_channels
        return rule.algorithm.upper(), rule.protocol.upper(), channels
    if os.environ.get("NCCL_ALGO") == "Tree":
        assert name == "all_reduce", "no algorithm available"
        return "TREE", "LL128", 16
    return ("RING", "LL", 2) if size < 2**16 else ("RING", "SIMPLE", 24)


def log(target: str, words: list[str]) -> None:
    """TUNING lines as NCCL 2.24 and later write them, one per call."""
    file = target.replace("%h", "node1").replace("%p", "7")
    sizes = [2**power for power in range(10, 31)] if "1G" in words else SIZES
    names = {name: NCCL_NAMES[name] for name in words if name in NCCL_NAMES}
    with open(file, "w") as stream:
        for name, theirs in names.items():
            for size in sizes:
                algorithm, protocol, channels = chosen(name, size)
                printed = size // 2 if name in ("all_gather", "reduce_scatter") else size
                stream.write(
                    f"node1:7:9 [0] NCCL INFO {theirs}: {printed} Bytes -> Algo {algorithm} "
                    f"proto {protocol} channel{{Lo..Hi}}={{0..{channels - 1}}}\n"
                )


def main() -> int:
    kind = os.environ.get("KIND", "")
    folder = Path(sys.argv[sys.argv.index("--out") + 1])
    with open(f"{os.environ['SWEEP_PROGRAM']}/started", "a") as file:
        file.write(f"{kind or 'default'} {' '.join(sys.argv[1:])}\n")
    if kind == "hang":
        hang()
    if kind == "broken":
        sys.stderr.write("stepmark: it is\nbroken\n")
        return 3
    if kind == "crowded":  # another process writes runs to the folder of the sweep meanwhile
        written(folder.parent, 9.0)
    if kind == "fading" and json.loads((folder.parents[1] / FILE).read_text())["selection"]:
        kind = ""
    if target := os.environ.get("NCCL_DEBUG_FILE"):
        log(target, sys.argv)
    written(folder, 1.25 if os.environ.get("NCCL_ALGO") == "Tree" else SPEED.get(kind, 1.0))
    return 1 if kind == "wrong" else 0


if __name__ == "__main__":
    sys.exit(main())
