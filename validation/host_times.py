"""Measure how long the host takes for an operation of a step, and fit kinds of operations.

    python validation/host_times.py measure > host-times.csv
    python validation/host_times.py measure --device cpu --scale tiny --seconds 120
    python validation/host_times.py fit
    python validation/host_times.py score

measure: the steps are so small that the host bounds them. Those of one rank and of two are in
turn eager and compiled; what matters most is measured first, and nothing begins after
--seconds. The first line has the machine and its launch: of a small kernel in a loop, eagerly.

fit: prints the constants of src/stepmark/data/host_times.toml: hosts, and ratios of kinds of
operations to an eager one, with the least squares of errors of log times over the passes
of data/host-times.csv and of the host's part of the calibrations in results/. Steps of one
layer are left out, because what surrounds layers outweighs it, and experts of calibrations,
which ran one by one then.

score: prints the errors of our own measured steps of results/ by data sheet, with each host and
with none, where a typical host bounds the step. The fit has the small steps of the same
machines, not these.
"""

import argparse
import csv
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from stepmark.cases.record import Measured  # noqa: E402
from stepmark.cases.train_case import TrainCase  # noqa: E402
from stepmark.cases.training import Recompute  # noqa: E402
from stepmark.ground.options import build  # noqa: E402
from stepmark.ground.stats import slowest_per_sample  # noqa: E402
from stepmark.model.ops import Phase  # noqa: E402
from stepmark.predictions.costs import pass_of  # noqa: E402
from stepmark.predictions.host_times import pass_times, passes_s  # noqa: E402
from stepmark.predictions.hosts import (  # noqa: E402
    DEFAULT,
    HOST,
    HostTimes,
    launch_of,
    load_hosts,
    ratio,
)
from stepmark.predictions.inputs import no_host  # noqa: E402
from stepmark.predictions.predict import predict  # noqa: E402
from stepmark.predictions.predict_inputs import inputs_of, of_training  # noqa: E402
from stepmark.predictions.predict_options import PredictOptions  # noqa: E402
from stepmark.step.workload import ComputeOp  # noqa: E402
from stepmark.store.reader import list_runs  # noqa: E402
from stepmark.store.view import read_with_warnings  # noqa: E402
from stepmark.workloads.rules.pytorch.case import of_case  # noqa: E402

MODELS = {"gpt2-1.5b": "1/8", "llama-3.1-8b": "1/16", "mixtral-8x7b": "1/16"}
COLUMNS = (
    *("model", "scale", "layers", "strategy", "ranks", "precision", "compile", "ac"),
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
    (GPT, "--nproc 2 --strategy fsdp,ddp"),
    (MIXTRAL, "--nproc 1 --compile"),
    (GPT, "--nproc 1 --compile"),
)
NUM_LAUNCHES = 2000
TABLE = ROOT / "validation" / "data" / "host-times.csv"
FOUR_H100 = "h100-x4-predictions"  # runs on one machine
SMALLEST_STEP = 1e-4
TINY = 1e-12


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
            name = case.model.name.partition("@")[0]
            layers = case.model.num_layers
            ac = "none" if case.recompute is Recompute.NONE else "full"
            for each in pass_times(record):
                yield (
                    *(name, case.scale, layers, case.strategy, case.num_ranks),
                    *(case.precision, case.compile, ac, each.name),
                    f"{each.time_s * 1e3:.3f}",
                    each.num_computes,
                    each.num_collectives,
                    f"{each.per_operation_s * 1e6:.1f}",
                )


def score() -> None:
    """Print the errors of measured steps that a typical host bounds."""
    errors = defaultdict[str, list[float]](list)
    for path in sorted(list_runs(ROOT / "results")):
        run = read_with_warnings(path)
        device = run.info.environment.devices[0].name
        for record in run.latest:
            if not isinstance(record, Measured) or not isinstance(record.case, TrainCase):
                continue
            case = record.case
            if case.labels or record.training is None:
                continue
            step_s = fmean(slowest_per_sample(record.samples.seconds)) * record.training.cycle
            inputs = {
                name: of_training(case, None, device, options=PredictOptions(host=name))
                for name in load_hosts()
            }
            inputs["no host"] = replace(inputs[DEFAULT], host_s=no_host)
            predictions = {name: predict(own) for name, own in inputs.items()}
            if predictions[DEFAULT].step.is_host_bound:
                for name, prediction in predictions.items():
                    errors[name].append(prediction.step_s / step_s - 1)
    for name, own in errors.items():
        sizes = [abs(error) for error in own]
        shown = f"mean {fmean(sizes):.1%}, median {median(sizes):.1%}, signed {fmean(own):+.1%}"
        print(f"{name:8} {len(own)} steps: {shown}")


def cpu_name() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if "model name" in line), "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSample:
    """A measured pass. amounts: of its operations, by forward or backward and by kinds."""

    host: str
    time_s: float
    amounts: Counter[tuple[bool, tuple[str, ...]]]


def samples_of(host: str, case: TrainCase, times_s: dict[str, float]) -> Iterator[PassSample]:
    """Yield the passes of a step."""
    workload = of_case(case)
    times = HostTimes(load_hosts()[DEFAULT], workload, launch_of(workload, case))
    amounts: defaultdict[str, Counter[tuple[bool, tuple[str, ...]]]] = defaultdict(Counter)
    for op in workload.expand():
        if not (isinstance(op, ComputeOp) and op.is_wait):
            name = "bwd" if op.recompute else pass_of(op.phase)
            amounts[name][op.phase is Phase.FWD, times.kinds(op)] += times.amount(op)
    for name, time_s in times_s.items():
        yield PassSample(host=host, time_s=time_s, amounts=amounts[name])


def calibrated() -> Iterator[PassSample]:
    """Yield the passes of the host's part of our calibrations."""
    for path in sorted(list_runs(ROOT / "results")):
        run = read_with_warnings(path)
        for record in run.latest:
            if not isinstance(record, Measured) or not isinstance(record.case, TrainCase):
                continue
            case = record.case
            is_host = HOST in {label.role for label in case.labels}
            if is_host and case.model.num_layers > 1 and not case.model.moe:
                name = FOUR_H100 if path.name.startswith(FOUR_H100) else path.name
                yield from samples_of(name, case, passes_s(record))


def tabled() -> Iterator[PassSample]:
    """Yield the passes of data/host-times.csv."""
    with TABLE.open() as file:
        rows = [*csv.DictReader(line for line in file if not line.startswith("#"))]
    for row in rows:
        values = {
            "models": [row["model"]],
            "strategy": row["strategy"],
            "nproc": row["ranks"],
            "num_layers": int(row["layers"]),
            "seq_len": 64,
            "compile": row["compile"] != "none",
            "device": "h200",
            **{name: row[name] for name in ("scale", "precision", "ac")},
        }
        options = build(PredictOptions, values)
        case = inputs_of(options).case
        assert case
        times_s = {row["pass"]: float(row["time_ms"]) * 1e-3}
        yield from samples_of(TABLE.name, case, times_s)


def fit() -> None:
    """Print the hosts and the ratios."""
    samples = [*calibrated(), *tabled()]
    eager_s = {(each.host, way): 1e-4 for each in samples for way in (True, False)}
    kinds = {kind for each in samples for _, own in each.amounts for kind in own}
    ratios = {kind: ratio(kind) for kind in kinds}

    def error() -> float:
        return fmean(
            math.log(_predicted(each, eager_s, ratios) / each.time_s) ** 2 for each in samples
        )

    values = [
        *((eager_s, key) for key in eager_s),
        *((ratios, kind) for kind in sorted(kinds - {"collective"})),
    ]
    step = 0.3
    while step > SMALLEST_STEP:
        improved = [_is_improved(table, key, step, error) for table, key in values]
        if not any(improved):
            step /= 2
    print(f"{len(samples)} passes, standard error of the logarithm {math.sqrt(error()):.2f}")
    for host in sorted({host for host, _ in eager_s}):
        forward_us, backward_us = (eager_s[host, way] * 1e6 for way in (True, False))
        print(f"{host}: forward {forward_us:.0f} us, backward {backward_us:.0f} us")
    for kind in sorted(ratios):
        print(f"{kind}: {ratios[kind]:.2f}")


def _predicted(
    sample: PassSample, eager_s: dict[tuple[str, bool], float], ratios: dict[str, float]
) -> float:
    return sum(
        amount * eager_s[sample.host, way] * math.prod(ratios[kind] for kind in kinds)
        for (way, kinds), amount in sample.amounts.items()
    )


def _is_improved(
    table: MutableMapping[Any, float], key: Any, step: float, error: Callable[[], float]
) -> bool:
    """Change a value by a step up or down where this lowers the error."""
    value, least = table[key], error()
    for factor in (math.exp(step), math.exp(-step)):
        table[key] = value * factor
        if error() < least - TINY:
            return True
    table[key] = value
    return False


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("measure", "fit", "score"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="layers of the steps")
    parser.add_argument("--scale", help="of all models, instead of their own")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for all")
    options = parser.parse_args(argv)
    if options.action != "measure":
        fit() if options.action == "fit" else score()
        return
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
