"""Time analysers of profiler traces on the same files, in one run.

    python tests/traces/time_analysers.py FOLDER... [--tools stepmark,hta,tracelens]
        [--hta HTA_PYTHON] [--tracelens TRACELENS_BIN] [--repeats 1]

For each folder of traces (big_trace.py writes them) and each tool a new process is started:

- stepmark: `stepmark trace breakdown` and `stepmark trace messages`
- hta: load, temporal breakdown, overlap and kernel breakdown of HolisticTraceAnalysis
- tracelens: its performance report of one file, or its collective report of several

It prints wall and CPU seconds (of all processes) and the largest sum of the resident sets of a
tool's processes, looked at ten times a second; and the load of the machine when it started.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HTA = """
import logging, sys, warnings
logging.disable(logging.CRITICAL); warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])), trace_dir="/")
print(analysis.get_temporal_breakdown(visualize=False))
print(analysis.get_comm_comp_overlap(visualize=False))
print(analysis.get_gpu_kernel_breakdown(visualize=False)[0])
"""
INTERVAL_S = 0.1


def commands(options: argparse.Namespace, folder: Path, scratch: str) -> dict[str, list[str]]:
    """Return by name what is timed for a folder."""
    files = sorted(str(file) for file in folder.glob("*.json*"))
    stepmark = [sys.executable, "-m", "stepmark", "trace"]
    if len(files) == 1:
        report = ["TraceLens_generate_perf_report_pytorch", "--profile_json_path", files[0]]
    else:
        report = [
            "TraceLens_generate_multi_rank_collective_report_pytorch",
            "--use_multiprocessing",
        ]
        report += ["--trace_pattern", files[0].replace("rank0", "rank*")]
        report += ["--world_size", str(len(files))]
    report[0] = f"{options.tracelens}/{report[0]}"
    return {
        "stepmark breakdown": [*stepmark, "breakdown", str(folder)],
        "stepmark messages": [*stepmark, "messages", str(folder)],
        "hta": [options.hta, "-c", HTA, *files],
        "tracelens": [*report, "--output_csvs_dir", scratch],
    }


def resident(process: psutil.Process) -> int:
    """Return the bytes in memory of a process and of those it started."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def timed(command: list[str]) -> str:
    """Run a command and return one line of figures."""
    before, start, peak = os.times(), time.perf_counter(), 0
    with tempfile.TemporaryFile() as errors:
        done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        watched = psutil.Process(done.pid)
        while done.poll() is None:
            try:
                peak = max(peak, resident(watched))
            except psutil.NoSuchProcess:
                break
            time.sleep(INTERVAL_S)
        code, wall, after = done.wait(), time.perf_counter() - start, os.times()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    cpu = after.children_user + after.children_system - before.children_user
    cpu -= before.children_system
    failed = f"  exit {code}: {''.join(last)}" if code else ""
    return f"{wall:8.1f} s wall {cpu:8.1f} s CPU {peak / 1e6:8.0f} MB{failed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--tools", default="stepmark,hta,tracelens")
    parser.add_argument("--hta", default="python")
    parser.add_argument("--tracelens", default=".")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    tools = options.tools.split(",")
    for folder in options.folders:
        total = sum(file.stat().st_size for file in folder.glob("*.json*"))
        load = os.getloadavg()[0]
        sys.stdout.write(f"{folder.name}: {total / 1e6:.0f} MB, load {load:.1f}\n")
        with tempfile.TemporaryDirectory() as scratch:
            for name, command in commands(options, folder, scratch).items():
                if name.split()[0] not in tools:
                    continue
                for _ in range(options.repeats):
                    sys.stdout.write(f"  {name:20}{timed(command)}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
