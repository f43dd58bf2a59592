"""Measure how long the host takes for an operation of a step, by pass and technique.

    python validation/host_times.py > host-times.csv
    python validation/host_times.py --device cpu --scale tiny --seconds 120

The steps are so small that the host bounds them. Those of one rank and of two are in turn
eager, compiled and in FP8; what matters most is measured first, and nothing begins after
--seconds. The first line has the machine and its launch: of a small kernel in a loop, eagerly.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from stepmark.cases.record import Measured  # noqa: E402
from stepmark.predictions.host_times import pass_times  # noqa: E402
from stepmark.store.reader import list_runs  # noqa: E402
from stepmark.store.view import read_with_warnings  # noqa: E402

MODELS = {"gpt2-1.5b": "1/8", "llama-3.1-8b": "1/16", "mixtral-8x7b": "1/16"}
COLUMNS = (
    *("model", "layers", "strategy", "ranks", "precision", "compile"),
    *("pass", "time_ms", "computes", "collectives", "us_per_operation"),
)
GPT, LLAMA, MIXTRAL = MODELS
# Models, and options of a step of each
STEPS: tuple[tuple[str, str], ...] = (
    (LLAMA, "--nproc 1"),
    (GPT, "--nproc 1"),
    (MIXTRAL, "--nproc 1"),
    (LLAMA, "--nproc 2 --strategy fsdp,ddp,tp"),
    (LLAMA, "--nproc 1 --compile"),
    (LLAMA, "--nproc 2 --strategy fsdp,tp --compile"),
    (LLAMA, "--nproc 1 --precision bf16"),
    (LLAMA, "--nproc 1 --ac full"),
    (LLAMA, "--nproc 1 --precision fp8"),
    (GPT, "--nproc 2 --strategy fsdp,ddp"),
    (MIXTRAL, "--nproc 1 --compile"),
    (GPT, "--nproc 1 --compile"),
)
NUM_LAUNCHES = 2000


def launch_s(device: str) -> float:
    """Return the time of the host for a small kernel, the least of five loops."""
    sink = torch.zeros(1, device=device)
    times = []
    for _ in range(5):
        begin_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            sink.add_(1.0)
        times.append((time.perf_counter() - begin_s) / NUM_LAUNCHES)
        if device == "cuda":
            torch.cuda.synchronize()
    return min(times)


def measure(options: argparse.Namespace, out: Path) -> None:
    """Train the steps into runs in a folder, until the time is up."""
    end_s = time.monotonic() + options.seconds
    num_ranks = torch.cuda.device_count() if options.device == "cuda" else 2
    for model, flags in STEPS:
        if "--nproc 2" in flags and num_ranks < 2:
            print("left out, it needs two GPUs:", model, flags, file=sys.stderr)
            continue
        words = ["train", model, *flags.split(), "--device", options.device, "--out", str(out)]
        words += ["--scale", options.scale or MODELS[model], "--seq-len", "64", "--mbs", "1"]
        words += ["--num-layers", str(options.layers), "--steps", "20"]
        command = [sys.executable, "-m", "stepmark", *words]
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            print("left out, the time is up:", *words, file=sys.stderr)
            continue
        try:
            subprocess.run(command, stdout=sys.stderr, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            print("out of time:", *words, file=sys.stderr)


def rows(out: Path) -> Iterator[tuple[object, ...]]:
    """Yield the passes of all measured steps."""
    for path in sorted(list_runs(out)):
        for record in read_with_warnings(path).latest:
            if not isinstance(record, Measured):
                continue
            case = record.train
            step = (case.model.name, case.model.num_layers, case.strategy, case.num_ranks)
            for each in pass_times(record):
                yield (
                    *(*step, case.precision, case.compile, each.name),
                    f"{each.time_s * 1e3:.3f}",
                    each.num_computes,
                    each.num_collectives,
                    f"{each.per_operation_s * 1e6:.1f}",
                )


def cpu_name() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if "model name" in line), "unknown")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="layers of the steps")
    parser.add_argument("--scale", help="of all models, instead of their own")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all")
    options = parser.parse_args(argv)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    launch_us = launch_s(options.device) * 1e6
    print(f"# {name}, {cpu_name()}, torch {torch.__version__}: launch {launch_us:.2f} us")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(Path(folder)))


if __name__ == "__main__":
    main()
