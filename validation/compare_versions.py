"""Compare the figures of two versions of stepmark, measured alternately in one sitting.

Each launch runs the same `stepmark op` or `stepmark comm` commands once with either version,
in alternating order, so that drift of the machine cancels. A row's ratio is new time / old
time of a launch; what repeats is the launch: its interval is a 99 % t interval over launches,
and that of the geometric mean over rows is one over the launches' means. Collectives under
4 MiB are listed but are not in the mean: they vary from launch to launch.

    python validation/compare_versions.py ../old/src src --kind op --device cuda --out /tmp/op
    python validation/compare_versions.py ../old/src src --kind comm --nproc 2 --out /tmp/comm

It stops after --limit seconds (default 500) where launches are left; the same command with
--resume goes on. --only REGEX keeps commands that match. Results: OUT/launches.jsonl (one line
per command and version), OUT/result.json, OUT/result.txt. Exit code 1 where the mean or a row
is certainly off.
"""

import argparse
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepmark.ground.ratio import t_quantile
from stepmark.ground.units import MIB

CASE_S = 0.9  # of the budget, per case
MEAN_FLOOR, ROW_FLOOR = 0.01, 0.02
CONFIDENCE = 0.99
COMMAND_TIMEOUT_S = 240.0
# On a busy CPU threads of one call wait for each other, milliseconds or not at all.
THREADS: dict[str, dict[str, str]] = {"cpu": {"OMP_NUM_THREADS": "1"}, "cuda": {}}
# Commands by kind and device, with the number of their cases.
COMMANDS: dict[tuple[str, str], list[tuple[str, int]]] = {
    ("op", "cuda"): [
        ("gemm --m 1024,8192 --n 4096 --k 1024,8192 --dtype bf16,fp32 --backend torch", 8),
        (
            "attention --seq-q 4096 --heads 8,32 --head-dim-qk 128 --dtype bf16"
            " --backend flash,math --pass fwd",
            4,
        ),
        ("norm --tokens 8192 --hidden 1024,4096 --dtype bf16 --backend torch", 4),
        ("cross-entropy --tokens 8192 --vocab 32000 --dtype bf16 --backend torch", 2),
        ("copy --num-bytes 67108864,1073741824", 2),
    ],
    ("op", "cpu"): [
        ("gemm --m 64,256 --n 256 --k 64,256 --dtype fp32,bf16 --backend torch", 8),
        (
            "attention --seq-q 128 --heads 2,4 --head-dim-qk 64 --dtype fp32"
            " --backend flash,math --pass fwd",
            4,
        ),
        ("norm --tokens 512 --hidden 256,1024 --dtype fp32 --backend torch", 4),
        ("cross-entropy --tokens 256 --vocab 1000 --dtype fp32 --backend torch", 2),
        ("copy --num-bytes 1048576,16777216", 2),
    ],
    ("comm", "cuda"): [
        (
            "all_reduce all_gather reduce_scatter all_to_all -b 64K -e 512K -f 8 --dtype bf16",
            12,
        ),
        (
            "all_reduce all_gather reduce_scatter all_to_all -b 4M -e 256M -f 8 --dtype bf16",
            18,
        ),
    ],
    ("comm", "cpu"): [
        (
            "all_reduce all_gather reduce_scatter all_to_all -b 1K -e 4M -f 8 --dtype fp32",
            30,
        ),
    ],
}
# Time of a row that is measured, by (case_id, method), and what it is called.
Times = dict[tuple[str, str], tuple[str, float, int]]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A ratio of new time to old, and its interval over launches."""

    name: str
    ratio: float
    low: float
    high: float
    num_launches: int

    def is_off_by(self, floor: float) -> bool:
        """Return whether the ratio is certainly further than floor from 1."""
        return self.low > 1 + floor or self.high < 1 - floor


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "launches.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if done and not args.resume:
        sys.exit(f"{log} holds results: use --resume, or another --out")
    commands = [
        (f"{words} --device {args.device} --nproc {args.nproc}", count)
        for words, count in COMMANDS[args.kind, args.device]
        if re.search(args.only, words)
    ]
    if not commands:
        sys.exit(f"--only {args.only} matches no command")
    is_complete = measure(args, commands, done, log)
    return report(args.out, args.kind, done, is_complete=is_complete)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="PYTHONPATH of the old version")
    parser.add_argument("new", type=Path, help="PYTHONPATH of the new version")
    parser.add_argument("--kind", choices=("op", "comm"), default="op")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, help="default: 1 for op, 2 for comm")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--only", default="", help="regular expression for commands")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds [500]")
    parser.add_argument("--out", type=Path, default=Path("compare-versions"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.nproc = args.nproc or (1 if args.kind == "op" else 2)
    return args


def measure(
    args: argparse.Namespace,
    commands: list[tuple[str, int]],
    done: list[dict[str, Any]],
    log: Path,
) -> bool:
    """Run what is not done; returns False where the time limit came first."""
    end = time.monotonic() + args.limit
    slowest_s = 0.0
    known = {(entry["launch"], entry["command"], entry["version"]) for entry in done}
    for launch in range(1, args.launches + 1):
        versions = [("old", args.old), ("new", args.new)]
        for command, num_cases in commands:
            for version, path in versions if launch % 2 else reversed(versions):
                if (launch, command, version) in known:
                    continue
                # A command that the limit would cut would be measured for nothing.
                if time.monotonic() + slowest_s > end:
                    return False
                begin = time.monotonic()
                rows = measured_rows(args.kind, args.device, command, num_cases, path)
                slowest_s = max(slowest_s, time.monotonic() - begin)
                entry = {
                    "launch": launch,
                    "command": command,
                    "version": version,
                    "wall_s": round(time.monotonic() - begin, 2),
                    "rows": rows,
                }
                done.append(entry)
                with log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
                sys.stderr.write(
                    f"launch {launch} {version}: {entry['wall_s']:.1f} s, "
                    f"{len(rows)} rows: {command}\n"
                )
    return True


def measured_rows(
    kind: str, device: str, command: str, num_cases: int, path: Path
) -> list[dict[str, Any]]:
    """Run one command with one version; its measured rows."""
    with tempfile.TemporaryDirectory(prefix="compare-versions-") as folder:
        rows_file = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "stepmark", kind, *shlex.split(command)]
        words += ["--budget", f"{num_cases * CASE_S:g}s", "--out", folder]
        result = subprocess.run(
            [*words, "--json", str(rows_file)],
            env={**os.environ, **THREADS[device], "PYTHONPATH": str(path.resolve())},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if not rows_file.exists():
            sys.exit(f"{shlex.join(words)}: exit {result.returncode}\n{result.stderr[-3000:]}")
        rows = json.loads(rows_file.read_text())["rows"]
    keys = ("case_id", "method", "family", "shape", "dtype", "backend", "pass", "time_s")
    keys = (*keys, "size_bytes", "num_wrong", "n")
    return [{key: row.get(key) for key in keys} for row in rows if row["status"] == "measured"]


def report(out: Path, kind: str, done: list[dict[str, Any]], *, is_complete: bool) -> int:
    """Write result.json and result.txt. Returns the exit code."""
    sides: dict[tuple[str, int], Times] = {}
    for entry in done:
        times = sides.setdefault((entry["version"], entry["launch"]), {})
        for row in entry["rows"]:
            words = (row["family"], row["pass"], row["shape"], row["dtype"], row["backend"])
            name = " ".join(str(word) for word in words if word)
            size = row["size_bytes"] or 0
            times[row["case_id"], row["method"]] = (name, row["time_s"], size)
    logs: dict[tuple[str, str], dict[int, float]] = {}
    names: dict[tuple[str, str], tuple[str, int]] = {}
    unpaired: set[str] = set()
    for launch in sorted({launch for _, launch in sides}):
        old, new = sides.get(("old", launch), {}), sides.get(("new", launch), {})
        if is_complete:
            unpaired |= {
                (old | new)[key][0] + f" ({key[1]})" for key in old.keys() ^ new.keys()
            }
        for key in old.keys() & new.keys():
            name, old_s, size = old[key]
            names[key] = name, size
            logs.setdefault(key, {})[launch] = math.log(new[key][1] / old_s)
    rows = [interval(names[key][0], list(by.values())) for key, by in logs.items()]
    in_mean = [by for key, by in logs.items() if kind == "op" or names[key][1] >= 4 * MIB]
    launches = sorted(set.intersection(*(set(by) for by in in_mean))) if in_mean else []
    means = [statistics.fmean(by[launch] for by in in_mean) for launch in launches]
    mean = interval(f"geometric mean of {len(in_mean)} rows", means)
    small = {names[key][0] for key in logs if kind == "comm" and names[key][1] < 4 * MIB}
    off = [row for row in rows if row.is_off_by(ROW_FLOOR) and row.name not in small]
    mean_is_off = mean.low < 1 - MEAN_FLOOR or mean.high > 1 + MEAN_FLOOR
    result = {
        "complete": is_complete,
        "mean": asdict(mean),
        "mean_within_1_pct": not mean_is_off,
        "rows": [asdict(row) for row in rows],
        "rows_certainly_over_2_pct": [row.name for row in off],
        "not_in_mean": sorted(small),
        "unpaired": sorted(unpaired),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["new / old time      99 % interval     launches  row"]
    for row in [*sorted(rows, key=lambda row: row.ratio), mean]:
        mark = " (not in the mean)" if row.name in small else ""
        mark += " CERTAINLY OVER 2 %" if row in off else ""
        span = f"{row.low:.4f} to {row.high:.4f}"
        lines.append(f"{row.ratio:14.4f}  {span:>18}  {row.num_launches:8d}  {row.name}{mark}")
    lines.append(f"interval of the mean within +-1 %: {'no' if mean_is_off else 'yes'}")
    lines += [f"measured by one version only: {name}" for name in sorted(unpaired)]
    if not is_complete:
        lines.append("the time limit came first: go on with --resume")
    text = "\n".join(lines) + "\n"
    (out / "result.txt").write_text(text)
    sys.stdout.write(text)
    return 1 if off or mean_is_off or unpaired else 0


def interval(name: str, logs: list[float]) -> Interval:
    """Return the geometric mean of ratios, given as logarithms by launch."""
    if not logs:
        return Interval(name=name, ratio=math.nan, low=0.0, high=math.inf, num_launches=0)
    mean, half = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        half = t_quantile((1 + CONFIDENCE) / 2, len(logs) - 1) * error
    high = math.exp(mean + half) if half < math.inf else math.inf
    return Interval(
        name=name,
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=high,
        num_launches=len(logs),
    )


if __name__ == "__main__":
    sys.exit(main())
