"""Time questions about traces in relation to json.loads of them, and their memory.

    python tests/traces/time_relative.py FILE... [--repeats 5]

big_trace.py writes files. In one process, in turns, the least CPU time of so many repeats:
json.loads of the JSON; a breakdown without a cache; a breakdown that fills the cache; each verb
that is then answered from it. Then the largest resident set of a process of its own, and of
several files how it grows from the smallest to the largest one.
"""

import argparse
import contextlib
import gc
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from stepmark.cli.main import status

PEAK = """
import contextlib, io, re, sys
from pathlib import Path
from stepmark.cli.main import status
with contextlib.redirect_stdout(io.StringIO()):
    code = status(sys.argv[1:])
print(re.search(r"VmHWM:\\s*([0-9]+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""
SECOND = ("breakdown", "messages", "kernels", "critical-path", "ledger")


def cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def text(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def ask(verb: str, file: Path, *flags: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if status(["trace", verb, str(file), *flags]):
            raise SystemExit(f"trace {verb} {file} fails")


def times(file: Path, repeats: int) -> dict[str, float]:
    """Return the least CPU seconds of each work."""
    taken: dict[str, list[float]] = defaultdict(list)
    for verb in SECOND:
        ask(verb, file)  # imports
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            taken["json.loads"].append(cpu_s(lambda: json.loads(text(file))))
            taken["no cache"].append(cpu_s(lambda: ask("breakdown", file, "--no-cache")))
            taken["first"].append(cpu_s(lambda: ask("breakdown", file)))
            for verb in SECOND:
                taken[verb].append(cpu_s(lambda verb=verb: ask(verb, file)))  # type: ignore[misc]
    return {name: min(seconds) for name, seconds in taken.items()}


def peak_mb(file: Path, *flags: str) -> float:
    """Return the largest resident set of a breakdown in a process of its own.

    The process says it itself: what wait4 returns is at least the set of the one that forked.
    """
    words = [sys.executable, "-c", PEAK, "trace", "breakdown", str(file), *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for file in options.files:
            size = len(text(file)) / 1e6
            sizes.append((size, peak_mb(file, "--no-cache")))
            sys.stdout.write(f"{file}: {size:.0f} MB of JSON, {sizes[-1][1]:.0f} MB resident")
            sys.stdout.write(f", {peak_mb(file):.0f} and then {peak_mb(file):.0f} with cache\n")
            taken = times(file, options.repeats)
            for name, seconds in taken.items():
                sys.stdout.write(
                    f"  {name:14}{seconds:8.3f} s CPU"
                    f"{seconds / taken['json.loads']:7.2f} of json.loads"
                    f"{seconds / taken['first']:7.2f} of the first\n"
                )
    (low, low_mb), (high, high_mb) = min(sizes), max(sizes)
    if high > low:
        slope = (high_mb - low_mb) * 1e6 / 2**20 / (high - low)
        sys.stdout.write(f"{slope:.3f} MiB resident per MB of JSON\n")


if __name__ == "__main__":
    main()
