"""Predictions that are committed before their measurement, and the table of them.

    python validation/prediction_rows.py draw --nproc 2
    python validation/prediction_rows.py measure --nproc 2 --drawn --only 1-3
    python validation/prediction_rows.py measure --nproc 1 --only 1-6 --out runs/predictions
    python validation/prediction_rows.py measure --nproc 1 --resume runs/predictions/ID
    python validation/prediction_rows.py table runs/predictions predictions.csv
    python validation/prediction_rows.py pack runs/predictions packed
    python validation/prediction_rows.py again results

`draw` prints rows that a seed draws, so that nobody chooses what is measured. `measure`
calibrates for several steps in one sitting, commits all their predictions, and measures
each step in two launches. `table` writes a row per step, the package's
data/predictions.csv: predicted and measured time (the mean of both launches), clock, power,
memory, the largest line errors, and the baseline that predicts every step from one constant
rate. `pack` copies runs with the ledgers of
the measured steps in place of their traces, which are large. `again` predicts measured steps
once more, by the predictor as it is now, and prints its errors; these are no past predictions.
"""

import argparse
import csv
import itertools
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepmark.cases.flops import per_token
from stepmark.cases.plan import STEP_LAUNCH
from stepmark.cases.record import Measured
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Fp8
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.option_groups import ResumeOptions
from stepmark.ground.options import WholeNumbers, build, flag
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import measure_quietly, resume
from stepmark.model.device import find_device
from stepmark.predictions.predicted_steps import Step
from stepmark.predictions.prediction import ledgers_of
from stepmark.runs import run as main_job
from stepmark.runs import step_report
from stepmark.runs.run_options import RunOptions
from stepmark.step_memory import memory
from stepmark.store import ledgers, plans, predictions, view
from stepmark.store.reader import list_runs
from stepmark.timeline.ledger_text import absolute_ns, differences
from stepmark.workloads.rules.pytorch.case import of_case

# By number of ranks: model and options of `stepmark run`.
ROWS: dict[int, tuple[str, ...]] = {
    1: (
        "gpt2-1.5b --mbs 8",
        "gpt2-1.5b --mbs 8 --no-compile",
        "gpt2-1.5b --mbs 16",
        "gpt2-1.5b --mbs 4 --no-compile",
        "gpt2-1.5b --mbs 12 --ac full",
        "gpt2-1.5b --mbs 12 --ac selective",
        "llama-3.1-8b --mbs 1 --seq-len 4096 --precision bf16",
        "llama-3.1-8b --mbs 1 --seq-len 4096 --precision bf16 --no-compile",
        "llama-3.1-8b --mbs 2 --seq-len 4096 --precision bf16 --ac full",
        "qwen3-8b --mbs 1 --seq-len 4096 --precision bf16",
        "qwen3-8b --mbs 1 --seq-len 4096 --precision bf16 --no-compile --ac full",
        "llama-3.1-70b-proxy-1l --mbs 2",
        "llama-3.1-70b-proxy --mbs 1 --precision bf16",
        "llama-3.1-70b-proxy-1l --mbs 2 --no-compile",
        "gpt2-125m --mbs 32",
        "gpt2-125m --mbs 8 --no-compile",
        "gpt2-125m --mbs 16 --grad-accum 4",
        "gpt2-1.5b --mbs 4 --grad-accum 4",
        "gpt2-1.5b --mbs 1 --no-compile",
        "mixtral-8x7b --scale 1/4 --mbs 2 --no-compile",
        "gpt2-1.5b --mbs 12 --no-compile",
        "gpt2-1.5b --mbs 8 --precision bf16 --no-compile",
        "gpt2-125m --mbs 32 --no-compile",
        "llama-3.1-70b-proxy --mbs 1 --precision bf16 --no-compile",
        "llama-3.1-70b-proxy-1l --mbs 2 --fp8",
        "gpt2-1.5b --mbs 8 --fp8",
        "gpt2-1.5b --mbs 8 --precision master",
        "gpt2-125m --mbs 2 --no-compile",
        "gpt2-125m --mbs 4 --grad-accum 4 --no-compile",
        "gpt2-1.5b --mbs 2 --no-compile",
        "gpt2-125m --mbs 4 --no-compile --ac full",
        "gpt2-125m --mbs 2 --precision bf16 --no-compile",
        "qwen3-8b --scale 1/4 --mbs 1 --no-compile",
        "llama-3.1-8b --scale 1/4 --mbs 1 --no-compile",
        "gpt2-1.5b --mbs 1",
    ),
    2: (
        *(f"gpt2-1.5b --strategy {s} --mbs 8" for s in ("ddp", "fsdp")),
        "gpt2-125m --strategy tp --mbs 16",
        *(f"gpt2-1.5b --strategy {s} --mbs 8 --no-compile" for s in ("ddp", "fsdp")),
        "gpt2-125m --strategy tp --mbs 16 --no-compile",
        "llama-3.1-8b --strategy fsdp --mbs 1 --seq-len 8192",
        "llama-3.1-8b --strategy fsdp --mbs 1 --seq-len 8192 --ac full",
        "llama-3.1-8b --strategy fsdp --mbs 1 --seq-len 4096 --ac selective --no-compile",
        "llama-3.1-8b --strategy tp --mbs 1 --seq-len 4096 --precision bf16",
        "qwen3-8b --strategy fsdp --mbs 1 --seq-len 4096",
        "qwen3-8b --strategy fsdp --mbs 2 --seq-len 4096 --ac full --no-compile",
        "llama-3.1-70b-proxy --strategy fsdp --mbs 1",
        "llama-3.1-70b-proxy --strategy ddp --mbs 1 --precision bf16",
        "mixtral-8x7b --scale 1/4 --strategy fsdp --ep 2 --mbs 2 --no-compile",
        "mixtral-8x7b --scale 1/4 --strategy fsdp --mbs 2 --no-compile",
        "gpt2-125m --strategy ddp --mbs 16",
        "gpt2-125m --strategy fsdp --mbs 16 --no-compile",
        "gpt2-1.5b --strategy ddp --mbs 4 --grad-accum 4",
        "gpt2-1.5b --strategy fsdp --mbs 12 --ac full",
    ),
    4: (
        *(f"gpt2-1.5b --strategy {s} --mbs 8" for s in ("ddp", "fsdp")),
        *(f"gpt2-1.5b --strategy {s} --mbs 8 --no-compile" for s in ("ddp", "fsdp")),
        "gpt2-125m --strategy fsdp --tp 2 --mbs 16",
        "gpt2-125m --strategy fsdp --tp 2 --mbs 16 --no-compile",
        *(f"llama-3.1-8b --strategy fsdp --mbs {m} --seq-len 8192" for m in (1, 2)),
        "llama-3.1-8b --strategy fsdp --mbs 2 --seq-len 8192 --ac full",
        "llama-3.1-8b --strategy fsdp --mbs 1 --seq-len 8192 --no-compile",
        "llama-3.1-8b --strategy fsdp --tp 2 --mbs 2 --seq-len 4096",
        "llama-3.1-8b --strategy fsdp --tp 2 --mbs 2 --seq-len 4096 --no-compile",
        "llama-3.1-8b --strategy tp --mbs 2 --seq-len 4096",
        "llama-3.1-8b --strategy tp --mbs 2 --seq-len 4096 --no-compile",
        "qwen3-8b --strategy fsdp --mbs 2 --seq-len 4096",
        "qwen3-8b --strategy fsdp --tp 2 --mbs 2 --seq-len 4096",
        "llama-3.1-70b-proxy --strategy fsdp --mbs 2",
        "llama-3.1-70b-proxy --strategy ddp --mbs 1 --precision bf16",
        "mixtral-8x7b --scale 1/4 --strategy fsdp --ep 4 --mbs 2 --no-compile",
        "gpt2-125m --strategy ddp --mbs 16",
        "gpt2-125m --strategy fsdp --mbs 16 --no-compile",
        "gpt2-1.5b --strategy fsdp --mbs 16 --ac selective",
        "gpt2-1.5b --strategy ddp --mbs 4 --grad-accum 4",
        "llama-3.1-8b --strategy fsdp --mbs 1 --seq-len 4096 --grad-accum 2",
    ),
    # Rows of llm-train-bench's table.
    8: (
        *(f"gpt2-1.5b --strategy {s} --mbs 8" for s in ("ddp", "fsdp")),
        *(f"llama-3.1-70b-proxy-1l --strategy {s} --mbs 2" for s in ("ddp", "fsdp")),
        *(f"llama-3.1-70b-proxy-1l --strategy {s} --mbs 2 --fp8" for s in ("ddp", "fsdp")),
        "llama-3.1-8b --strategy fsdp --mbs 4 --seq-len 4096 --ac 1/4",
        "llama-3.1-8b --strategy fsdp --mbs 4 --seq-len 4096 --fp8",
    ),
}
# Rows that a seed draws, on H200: by number of ranks how many, of which options.
SEED = "2026-11-30"
_DENSE = (
    "llama-3.1-8b --seq-len 4096 --mbs {1,2,4}",
    "qwen3-8b --seq-len 4096 --mbs {1,2,4}",
    "gpt2-1.5b --mbs {4,8,16}",
)
_TECHNIQUES = ("", "--no-compile"), ("", "--ac full", "--ac selective")
_SHARED = ("--strategy fsdp", "--strategy ddp", "--strategy tp")
_DRAWN: dict[int, tuple[int, tuple[tuple[str, ...], ...]]] = {
    1: (
        8,
        (
            (
                "gpt2-1.5b --mbs {4,8,16} --fp8",
                "llama-3.1-70b-proxy-1l --mbs {1,2,4} --fp8",
                "mixtral-8x7b --scale 1/4 --mbs {1,2,4}",
                "qwen3-30b-a3b --scale 1/4 --seq-len 4096 --mbs {1,2,4}",
            ),
            *_TECHNIQUES,
        ),
    ),
    2: (12, (_DENSE, _SHARED, *_TECHNIQUES)),
    4: (12, (_DENSE, (*_SHARED, "--strategy fsdp --tp 2"), *_TECHNIQUES)),
}
_LAUNCHES, _STEPS = 2, 15  # steady steps of a launch, and as many as last 2 s


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """Rows."""

    only: WholeNumbers = flag("numbers of rows", default=())


_RECORDS = "records.jsonl"
_H200 = Machine(device="cuda", name="NVIDIA H200", num_accelerators=8, capability=(9, 0))


_MORE_ERRORS = (
    *("clock_error_pct", "energy_error_pct", "lines_error_pct", "largest_line_error_pct"),
    *("allocated_error_pct", "reserved_error_pct", "constant_rate_error_pct"),
)
_SMALL_SHARE = 0.05  # lines above this share of the step count in the table


def _options(words: str, nproc: int, device: str | None) -> RunOptions:
    model, *flags = words.split()
    values: dict[str, Any] = {"models": (model,), "nproc": str(nproc), "device": device}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            values[name] = True
        else:
            values[name] = word
    if values.pop("no_compile", False):
        values["compile"] = False
    return build(RunOptions, values)


def drawn(nproc: int) -> list[str]:
    """Return the rows that the seed draws: in its order, those that fit."""
    count, parts = _DRAWN[nproc]
    models = [
        re.sub("{.*}", mbs, words)
        for words in parts[0]
        for mbs in re.findall("{(.*)}", words)[0].split(",")
    ]
    rows = [" ".join(filter(None, each)) for each in itertools.product(models, *parts[1:])]
    random.Random(f"{SEED} {nproc}").shuffle(rows)
    return list(itertools.islice((row for row in rows if _fits(row, nproc)), count))


def _fits(words: str, nproc: int) -> bool:
    device = find_device(_H200.name)
    assert device is not None
    try:
        case = main_job.step_case(_options(words, nproc, "cuda"), _H200, [])
    except ConfigError:  # a step that there is not
        return False
    allocated, reserved = memory.calibrated(case, ())
    size = device.hbm_bytes or 0
    return memory.verdict(case, allocated, reserved, size) == memory.FITS


def _draw(arguments: argparse.Namespace) -> int:
    for number, words in enumerate(drawn(arguments.nproc), 1):
        sys.stdout.write(f"{number} {words}\n")
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.resume:
        return resume(ResumeOptions(run=arguments.resume, out=Path(arguments.out)))
    rows = drawn(arguments.nproc) if arguments.drawn else ROWS[arguments.nproc]
    numbers = build(_Numbers, {"only": arguments.only or f"1-{len(rows)}"}).only
    chosen = [rows[number - 1] for number in numbers if number <= len(rows)]
    here = machine(arguments.device)
    cases: list[TrainCase] = []
    for words in chosen:
        notes: list[str] = []
        options = _options(words, arguments.nproc, arguments.device)
        cases.append(main_job.step_case(options, here, notes))
        for note in notes:
            sys.stderr.write(f"{words}: {note}\n")
    plan = main_job.plan_of_steps(cases, here, RunOptions(), launches=_LAUNCHES)
    plan = replace(plan, how=replace(plan.how, train=replace(plan.how.train, steps=_STEPS)))
    code, path = measure_quietly(plan, arguments.out)
    sys.stderr.write(f"run {path}\n")
    return code


def _table(arguments: argparse.Namespace) -> int:
    rows = [row for path in list_runs(Path(arguments.runs)) for row in _rows_of(path)]
    code = _print(rows, arguments.runs)
    if not code:
        with Path(arguments.csv).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return code


def _again(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for path in list_runs(Path(arguments.runs)):
            if not (path / plans.FILE).is_file() or predictions.read(path) is None:
                continue
            copy = Path(folder) / path.name
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("prediction.*"))
            # Predictions are made of what was measured before the steps.
            whole = (copy / _RECORDS).read_bytes()
            before = [
                x for x in whole.splitlines(True) if json.loads(x)["launch"] < STEP_LAUNCH
            ]
            (copy / _RECORDS).write_bytes(b"".join(before))
            document = step_report.predicted_steps(copy, plans.read(copy))
            (copy / _RECORDS).write_bytes(whole)
            predictions.commit(copy, document)
            rows += _rows_of(copy)
    for row in rows:
        techniques = f"{row['precision']} ac {row['ac']} accum {row['grad_accum']}"
        step = f"{row['model']} mbs {row['mbs']} {row['compiled']} {techniques}"
        times = f"{1e3 * row['measured_s']:.1f} ms, predicted {row['error_pct']:+.1f} %"
        errors = (
            f", {name.removesuffix('_error_pct')} {row[name]:+.1f} %"
            for name in _MORE_ERRORS
            if row.get(name) is not None
        )
        sys.stdout.write(f"{step}: {times}{''.join(errors)}\n")
    return _print(rows, arguments.runs)


def _pack(arguments: argparse.Namespace) -> int:
    for path in list_runs(Path(arguments.runs)):
        packed = Path(arguments.results) / path.name
        steps = _measured_steps(path, view.view(path))
        shutil.copytree(
            path, packed, ignore=shutil.ignore_patterns("*-launch*.json*", "*.html")
        )
        ledgers.write(packed, {case_id: step.measured for case_id, step in steps.items()})
    return 0


def _measured_steps(path: Path, run: view.View) -> dict[str, Step]:
    """Return the measured steps of a run that have a ledger, by case."""
    report = step_report.step_report(path, run)
    return {step.case_id: step for step in (report.steps if report else ())}


def _print(rows: list[dict[str, Any]], runs: str) -> int:
    """Add the error of the constant-rate baseline; print the errors. Returns the exit code."""
    if not rows:
        sys.stderr.write(f"{runs}: no predicted step\n")
        return 3
    for row in rows:
        others = [o["flops_per_s"] for o in rows if o["model"] != row["model"]]
        rate = statistics.median(others) if others else None
        row["constant_rate_error_pct"] = 100 * (row["flops_per_s"] / rate - 1) if rate else None
    strata = sorted({(row["bound"], row["strategy"], row["compiled"]) for row in rows})
    for stratum in strata:
        own = [r for r in rows if (r["bound"], r["strategy"], r["compiled"]) == stratum]
        sys.stdout.write(f"{' '.join(stratum)}: {_errors(own, 'error_pct')}\n")
    sys.stdout.write(f"all: {_errors(rows, 'error_pct')}\n")
    for name in _MORE_ERRORS:
        sys.stdout.write(f"{name}: {_errors(rows, name)}\n")
    return 0


def _errors(rows: list[dict[str, Any]], name: str) -> str:
    errors = [abs(row[name]) for row in rows if row[name] is not None]
    if not errors:
        return "unknown"
    mean, most = statistics.mean(errors), max(errors)
    return f"{len(errors)} rows, mean {mean:.2f} %, max {most:.2f} %"


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    found = predictions.read(path)
    if found is None:
        return
    document, digest = found
    committed = {
        "run": path.name,
        "version": document["version"],
        "sha256": digest,
        "committed_at": document["created_at"],
    }
    run = view.view(path)
    steps = _measured_steps(path, run)
    for entry in document["predictions"]:
        records = step_report.records_of(run, entry["case_id"])
        if len(records) < _LAUNCHES or entry["problem"]:
            sys.stderr.write(f"{path.name}: left out: {entry['problem'] or 'not measured'}\n")
            continue
        step = steps.get(entry["case_id"])
        yield {**committed, **_row(entry["prediction"], records, step)}


def _row(own: Mapping[str, Any], records: list[Measured], step: Step | None) -> dict[str, Any]:
    """Return the figures of a step. own: the document of its prediction."""
    case = records[0].train
    facts = records[0].training
    assert facts is not None
    measured_s = statistics.mean(view.median_s(record) * case.cycle for record in records)
    bound, strategy, compiled = _stratum(case, own["bound"])
    tokens = case.tokens_per_step * case.micro_steps
    sizes = own["memory"] or {}
    row = {
        "device": own["device"],
        "model": case.model.name,
        "ranks": case.num_ranks,
        "mbs": case.mbs,
        "seq_len": case.model.seq_len,
        "precision": str(case.precision) if case.fp8 is Fp8.NONE else f"{case.precision} fp8",
        "ac": str(case.recompute),
        "grad_accum": case.grad_accum,
        "bound": bound,
        "strategy": strategy,
        "compiled": compiled,
        "predicted_s": own["step_s"],
        "measured_s": measured_s,
        "error_pct": 100 * (own["step_s"] / measured_s - 1),
        "flops_per_s": per_token(case).causal * tokens / measured_s / case.num_ranks,
        "clock_error_pct": None,
        "energy_error_pct": None,
        "lines_error_pct": None,
        "largest_line_error_pct": None,
        "predicted_allocated": sizes.get("allocated_bytes"),
        "measured_allocated": max((b for b in facts.allocated_bytes if b), default=None),
        "predicted_reserved": sizes.get("reserved_bytes"),
        "measured_reserved": max((b for b in facts.reserved_bytes if b), default=None),
    }
    for name in ("allocated", "reserved"):
        first, second = row[f"predicted_{name}"], row[f"measured_{name}"]
        row[f"{name}_error_pct"] = 100 * (first / second - 1) if first and second else None
    if step is None:
        return row
    for name, first, second in (
        ("clock_error_pct", own["clock_hz"], step.power[1].clock_hz),
        ("energy_error_pct", own["energy_j"], step.power[1].energy_j),
    ):
        row[name] = 100 * (first / second - 1) if first and second else None
    ledger = step.measured.ledger
    predicted = ledgers_of(own)[of_case(case).stage_of(step.measured.rank)]
    row["lines_error_pct"] = 100 * absolute_ns(predicted, ledger) / ledger.window_ns
    large = [
        100 * abs(each.ns) / each.second_ns
        for each in differences(predicted, ledger)
        if each.second_ns > _SMALL_SHARE * ledger.window_ns
    ]
    row["largest_line_error_pct"] = max(large, default=None)
    return row


def _stratum(case: TrainCase, bound: str) -> tuple[str, str, str]:
    """Return the bound and the type of device, the strategy, and whether it is compiled."""
    strategy = case.data_parallel.value if case.num_ranks > 1 else "single"
    if max(case.parallel.tp, case.parallel.pp) > 1:
        strategy = case.strategy
    is_compiled = case.compile is not CompileScope.NONE
    where = bound if case.device == "cuda" else f"{bound}, {case.device}"
    return where, strategy, "compiled" if is_compiled else "eager"


def main() -> int:
    """Run a command of this script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("--nproc", type=int, choices=sorted(ROWS), default=1)
    measure.add_argument("--drawn", action="store_true", help="the rows of `draw`")
    measure.add_argument("--only", help="numbers of rows, e.g. 1-6,9")
    measure.add_argument("--resume", help="run to go on with")
    measure.add_argument("--device")
    measure.add_argument("--out", default="runs/predictions")
    measure.set_defaults(call=_measure)
    draw = commands.add_parser("draw")
    draw.add_argument("--nproc", type=int, choices=sorted(_DRAWN), default=1)
    draw.set_defaults(call=_draw)
    table = commands.add_parser("table")
    table.add_argument("runs")
    table.add_argument("csv")
    table.set_defaults(call=_table)
    pack = commands.add_parser("pack")
    pack.add_argument("runs")
    pack.add_argument("results")
    pack.set_defaults(call=_pack)
    again = commands.add_parser("again")
    again.add_argument("runs")
    again.set_defaults(call=_again)
    arguments = parser.parse_args()
    try:
        code: int = arguments.call(arguments)
    except StepmarkError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
