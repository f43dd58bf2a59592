"""A command for the tests of sweep: writes a run of made-up times, or goes wrong.

python -m tests.cli.sweep_program comm all_reduce ... --out DIR, with KIND in the environment:
fast, fast2, slow, fading (fast until it is selected), other (measures otherwise), or a fault.
A hang leaves a grandchild in a session of its own. With a debug file asked for, it logs what a
made-up NCCL chooses; NCCL_ALGO=Tree is fast.

Sweeps start it some hundred times, so it imports little: what it writes is a run that
tests/cli/sweep_runs.py has left in $SWEEP_PROGRAM, with other times.
"""

import json
import os
import random
import secrets
import sys
import time
from typing import Any

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
    import subprocess

    folder = os.environ["SWEEP_PROGRAM"]
    subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD, f"{folder}/grandchild"], start_new_session=True
    )
    time.sleep(60)


def written(folder: str, speed: float) -> None:
    """Two launches in one run, with a noise of 0.3 %."""
    kind = os.environ.get("KIND", "")
    info, records, others = loaded(f"{os.environ['SWEEP_PROGRAM']}/made-up-run.json")
    run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    info["run_id"] = run_id
    variables = info["environment"]["variables"]
    variables |= {name: os.environ.get(name, "") for name in variables}
    noise = random.Random(os.path.basename(folder))  # by round and setting
    os.makedirs(f"{folder}/{run_id}")
    with open(f"{folder}/{run_id}/run.json", "w") as file:
        json.dump(info, file)
    with open(f"{folder}/{run_id}/records.jsonl", "w") as file:
        for record in others if kind == "other" else records:
            size = record["size_bytes"]
            time_s = 1e-5 * (1 + size / 2**20) / speed * noise.gauss(1, 0.003)
            record["run_id"] = run_id
            record["samples"]["seconds"] = [[time_s] * 5] * 2
            file.write(f"{json.dumps(record)}\n")


def loaded(file: str) -> Any:
    with open(file) as stream:
        return json.load(stream)


def chosen(name: str, size: int) -> tuple[str, str, int]:
    """Of this NCCL: by size, or as forced, or as a tuner file says if a plugin reads it."""
    if plugin := os.environ.get("NCCL_TUNER_PLUGIN"):
        from tests.comparison.tuner_file import parse

        from stepmark.comparison.tuner_text import first_match

        with open(os.environ["NCCL_TUNER_CONFIG_FILE"]) as file:
            rules = parse(file.read())
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
    folder = sys.argv[sys.argv.index("--out") + 1]
    runs = os.path.dirname(folder)
    with open(f"{os.environ['SWEEP_PROGRAM']}/started", "a") as file:
        file.write(f"{kind or 'default'} {' '.join(sys.argv[1:])}\n")
    if kind == "hang":
        hang()
    broken = f"{os.environ['SWEEP_PROGRAM']}/broken"  # kinds that fail until it is changed
    if os.path.exists(broken) and (kind or "default") in loaded(broken):
        kind = "broken"
    if kind == "broken":
        sys.stderr.write("stepmark: it is\nbroken\n")
        return 3
    if kind == "crowded":  # another process writes runs to the folder of the sweep meanwhile
        written(runs, 9.0)
    if kind == "fading" and loaded(f"{os.path.dirname(runs)}/sweep.json")["selection"]:
        kind = ""
    if target := os.environ.get("NCCL_DEBUG_FILE"):
        log(target, sys.argv)
    written(folder, 1.25 if os.environ.get("NCCL_ALGO") == "Tree" else SPEED.get(kind, 1.0))
    return 1 if kind == "wrong" else 0


if __name__ == "__main__":
    sys.exit(main())
