"""Compare stepmark with nccl-tests: the same collectives, alternately, on the same machine.

    python recipes/comparison_with_nccl_tests.py --binaries nccl-tests/build --out comparison/

nccl-tests runs with one thread per device (-t N -g 1), each program once per launch. Then
stepmark runs the same collectives, sizes and type. This repeats --launches times. Every output
is kept in --out; an output that exists is not measured again. The table and side_by_side.json
show per size the times of both over launches, and whether stepmark's median is within 1 % of
nccl-tests' median or inside the range of its launches. The caller sets the environment, such as
NCCL_NVLS_ENABLE=0 and LD_LIBRARY_PATH; both programs must load the same libnccl.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "sendrecv": "sendrecv_perf",
}
# stepmark's --mode; nccl-tests captures graphs (-G) for all but the first.
MODES = {"queued": "queued", "graph": "graph", "ahead": "queued-ahead"}
Key = tuple[str, str, int, str]  # mode, collective, bytes, placement


def main() -> None:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    for launch in range(1, asked.launches + 1):
        for mode in asked.modes.split(","):
            for name in asked.collectives.split(","):
                run_nccl_tests(asked, mode, name, launch)
            run_stepmark(asked, mode, launch)
    rows = compared(asked.out)
    (asked.out / "side_by_side.json").write_text(json.dumps(rows, indent=1))
    show(rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--binaries", type=Path, required=True, help="folder of nccl-tests' programs"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for all outputs")
    parser.add_argument("--devices", type=int, required=True, help="number of devices")
    parser.add_argument("--launches", type=int, default=3, help="launches of each [3]")
    parser.add_argument("--modes", default="queued,graph", help="of queued, graph, ahead")
    parser.add_argument("--collectives", default=",".join(PROGRAMS), help="separated by commas")
    parser.add_argument(
        "--end", default="queued=4G,graph=16M,ahead=4M", help="largest size by mode"
    )
    parser.add_argument("--api", default="nccl", help="stepmark's --api: torch or nccl")
    parser.add_argument("--iters", default="50", help="-n of both")
    parser.add_argument("--stepmark-iters", help="-n of stepmark [that of both]")
    parser.add_argument("--graphs", default="5", help="-G of nccl-tests in graph mode")
    return parser.parse_args()


def largest(asked: argparse.Namespace, mode: str) -> str:
    return dict(part.split("=") for part in asked.end.split(","))[mode]


def common(asked: argparse.Namespace, mode: str, iters: str) -> list[str]:
    """Return the flags of both programs."""
    sizes = ["-b", "1K", "-e", largest(asked, mode), "-f", "4"]
    return [*sizes, "-w", "5", "-c", "1", "-d", "bfloat16", "-n", iters]


def run_nccl_tests(asked: argparse.Namespace, mode: str, name: str, launch: int) -> None:
    command = [str(asked.binaries / PROGRAMS[name]), "-t", str(asked.devices), "-g", "1"]
    command += common(asked, mode, asked.iters)
    command += ["-G", asked.graphs] if mode != "queued" else []
    run(command, asked.out / f"nccl-tests-{mode}-{name}-{launch}.txt")


def run_stepmark(asked: argparse.Namespace, mode: str, launch: int) -> None:
    rows = asked.out / f"stepmark-{mode}-{launch}.json"
    command = [sys.executable, "-m", "stepmark", "comm", *asked.collectives.split(",")]
    command += common(asked, mode, asked.stepmark_iters or asked.iters)
    command += ["--nproc", str(asked.devices)]
    command += ["--out", str(asked.out / "runs"), "--json", str(rows)]
    command += ["-G", asked.graphs] if mode == "graph" else ["--mode", MODES[mode]]
    command += ["--api", asked.api]
    run(command, asked.out / f"stepmark-{mode}-{launch}.txt")


def run(command: list[str], output: Path) -> None:
    """Run the command unless its output exists; an unfinished output has another name."""
    if output.exists():
        return
    begin = time.monotonic()
    partial = output.with_suffix(".partial")
    with partial.open("w") as file:
        code = subprocess.run(
            command, check=False, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    say(f"{time.monotonic() - begin:6.1f} s, exit {code}: {' '.join(command)}")
    if code:
        say(partial.read_text()[-2000:])
    else:
        partial.rename(output)


def compared(folder: Path) -> list[dict[str, Any]]:
    nccl_tests: dict[Key, list[float]] = {}
    stepmark: dict[Key, list[float]] = {}
    for file in sorted(folder.glob("nccl-tests-*.txt")):
        _, _, mode, name, _ = file.stem.split("-")
        for size, placement, seconds in parsed(file.read_text()):
            nccl_tests.setdefault((mode, name, size, placement), []).append(seconds)
    for file in sorted(folder.glob("stepmark-*.json")):
        mode = file.stem.split("-")[1]
        for row in json.loads(file.read_text())["rows"]:
            if row["time_s"]:
                key = (mode, row["family"], row["size_bytes"], row["placement"])
                stepmark.setdefault(key, []).append(row["time_s"])
    return [
        verdict(key, nccl_tests[key], times)
        for key, times in stepmark.items()
        if key in nccl_tests
    ]


def parsed(text: str) -> Iterator[tuple[int, str, float]]:
    """Yield (bytes, placement, seconds) of nccl-tests' table."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 13 and words[0].isdecimal():
            yield int(words[0]), "out-of-place", float(words[5]) * 1e-6
            yield int(words[0]), "in-place", float(words[9]) * 1e-6


def verdict(key: Key, nccl_tests: list[float], stepmark: list[float]) -> dict[str, Any]:
    mode, name, size, placement = key
    base, value = median(nccl_tests), median(stepmark)
    return {
        "mode": mode,
        "collective": name,
        "size_bytes": size,
        "placement": placement,
        "nccl_tests_us": [second * 1e6 for second in nccl_tests],
        "stepmark_us": [second * 1e6 for second in stepmark],
        "ratio": value / base,
        "within_1_pct": abs(value / base - 1) <= 0.01,
        "inside": min(nccl_tests) <= value <= max(nccl_tests),
        "stepmark_spread": (max(stepmark) - min(stepmark)) / value,
        "nccl_tests_spread": (max(nccl_tests) - min(nccl_tests)) / base,
    }


def show(rows: list[dict[str, Any]]) -> None:
    say("| mode | collective | bytes | place | nccl-tests, us | stepmark, us | ratio | agree |")
    say("|---|---|---|---|---|---|---|---|")
    for row in rows:
        words = [row["mode"], row["collective"], row["size_bytes"], row["placement"]]
        for name in ("nccl_tests", "stepmark"):
            time, spread = median(row[name + "_us"]), row[name + "_spread"]
            words.append(f"{time:.2f} (+-{spread / 2:.1%})")
        agree = "yes" if row["within_1_pct"] or row["inside"] else "no"
        say("| " + " | ".join(map(str, [*words, f"{row['ratio']:.3f}", agree])) + " |")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
