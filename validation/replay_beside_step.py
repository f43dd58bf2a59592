"""Replay real training steps beside them; write a table of both.

    python validation/replay_beside_step.py --out results/replay-beside-step
    python validation/replay_beside_step.py --only gpt2-1.5b,llama-eager --out DIR

Each step is trained and profiled, its trace becomes a workload, and this is replayed: with
busy times (sleep), the same with every operation waited for (blocking), and, of a generated
workload of the same step, with real operators. Steps that need more GPUs than there are, are
left out. A step whose files are in the folder is only tabulated: an interrupted call goes on.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepmark.step import native
from stepmark.step.workload import COMPUTE, CommOp, ComputeOp, Workload, pass_of

Json = Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step in the words of `train` and of `workload generate`. num_gpus: that it needs."""

    train: str
    generate: str
    num_gpus: int = 1


STEPS = {
    "gpt2-1.5b": Step(
        train="gpt2-1.5b --mbs 8 --compile",
        generate="--framework ddp --model gpt2-1.5b --mbs 8 --gbs 8 --world-size 1",
    ),
    "llama-4-layers": Step(
        train="llama-3.1-8b --layers 4 --mbs 1 --compile",
        generate="--framework ddp --model llama-3.1-8b --num-layers 4 --mbs 1 --gbs 1"
        " --world-size 1",
    ),
    "llama-eager": Step(
        train="llama-3.1-8b --layers 4 --mbs 1",
        generate="--framework ddp --model llama-3.1-8b --num-layers 4 --mbs 1 --gbs 1"
        " --world-size 1",
    ),
    "gpt2-125m-eager": Step(
        train="gpt2-125m --mbs 2",
        generate="--framework ddp --model gpt2-125m --mbs 2 --gbs 2 --world-size 1",
    ),
    "gpt2-1.5b-ddp2": Step(
        train="gpt2-1.5b --mbs 8 --compile --strategy ddp --nproc 2",
        generate="--framework ddp --model gpt2-1.5b --mbs 8 --gbs 16 --world-size 2",
        num_gpus=2,
    ),
    "llama-16-layers-fsdp2": Step(
        train="llama-3.1-8b --layers 16 --mbs 1 --compile --strategy fsdp --nproc 2",
        generate="--framework fsdp --model llama-3.1-8b --num-layers 16 --mbs 1 --gbs 2"
        " --world-size 2 --reduce-dtype bf16",
        num_gpus=2,
    ),
    "llama-8-layers-tp2-eager": Step(
        train="llama-3.1-8b --layers 8 --mbs 1 --strategy tp --tp 2 --nproc 2",
        generate="--framework fsdp --model llama-3.1-8b --num-layers 8 --mbs 1 --gbs 1 --tp 2"
        " --world-size 2",
        num_gpus=2,
    ),
    "gpt2-1.5b-ddp4": Step(
        train="gpt2-1.5b --mbs 8 --compile --strategy ddp --nproc 4",
        generate="--framework ddp --model gpt2-1.5b --mbs 8 --gbs 32 --world-size 4",
        num_gpus=4,
    ),
    "llama-fsdp4": Step(
        train="llama-3.1-8b --mbs 1 --compile --strategy fsdp --nproc 4",
        generate="--framework fsdp --model llama-3.1-8b --mbs 1 --gbs 4 --world-size 4"
        " --reduce-dtype bf16",
        num_gpus=4,
    ),
    "llama-tp4-eager": Step(
        train="llama-3.1-8b --mbs 1 --strategy tp --tp 4 --nproc 4",
        generate="--framework fsdp --model llama-3.1-8b --mbs 1 --gbs 1 --tp 4 --world-size 4",
        num_gpus=4,
    ),
    "llama-tp2-fsdp2-eager": Step(
        train="llama-3.1-8b --mbs 1 --strategy fsdp --tp 2 --nproc 4",
        generate="--framework fsdp --model llama-3.1-8b --mbs 1 --gbs 2 --tp 2 --world-size 4",
        num_gpus=4,
    ),
}


def main() -> None:
    asked = arguments()
    ends_at = time.monotonic() + asked.limit
    for name in asked.only:
        if STEPS[name].num_gpus <= torch.cuda.device_count():
            measure(STEPS[name], asked.out / name, ends_at)
        elif not (asked.out / name).exists():
            sys.stderr.write(f"{name}: needs {STEPS[name].num_gpus} GPUs\n")
    done = [name for name in asked.only if (asked.out / name / "sleep.json").exists()]
    text = "\n".join(table([(name, row(asked.out / name)) for name in done]))
    (asked.out / "table.md").write_text(text + "\n")
    sys.stdout.write(text + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(STEPS))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds to begin more in")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(STEPS):
        parser.error(f"--only {min(unknown)}: one of {', '.join(STEPS)}")
    return asked


def measure(step: Step, folder: Path, ends_at: float) -> None:
    """Run what the folder lacks, in order, while there is time."""
    folder.mkdir(parents=True, exist_ok=True)
    profiled = f"--profile-ranks {','.join(map(str, range(step.num_gpus)))}"
    alone = "--alone --budget 15s" if step.num_gpus > 1 else ""
    commands = {
        "train.json": f"train {step.train} --profile {profiled} --out {folder}/runs",
        "trace.json": f"trace to-workload {folder}/runs/* --starts --out {folder}/trace.json",
        "sleep.json": f"replay {folder}/trace.json --iters 20 {alone}",
        "blocking.json": f"replay {folder}/trace.json --iters 20 --blocking",
        "generated.json": f"workload generate {step.generate} -o {folder}/generated.json",
        "real.json": f"replay {folder}/generated.json --compute real --check --iters 20",
    }
    for file, words in commands.items():
        if (folder / file).exists():
            continue
        if time.monotonic() > ends_at:
            sys.stderr.write(f"{folder}: {file} and what follows are left to the next call\n")
            return
        more = f" --out {folder}/replays" if words.startswith("replay") else ""
        if words.startswith(("train", "replay")):
            more += f" --json {folder / file}"
        command = f"{shlex.quote(sys.executable)} -m stepmark {words}{more}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        (folder / file).with_suffix(".txt").write_text(f"{words}\n{done.stdout}{done.stderr}")
        if done.returncode:
            sys.stderr.write(f"{words}: exit code {done.returncode}\n{done.stderr[-800:]}\n")
            return


def row(folder: Path) -> dict[str, Json]:
    """Return the figures of one step, in seconds."""
    trained: Json = load(folder / "train.json")
    real = next(each for each in trained if each.get("status") == "measured")
    workload = native.read(folder / "trace.json")
    kernels = busy(workload)
    slept = load(folder / "sleep.json")
    of_rank = [each for each in slept["phases"] if each["rank"] == 0]
    computing = {each["pass"]: each["computing_s"] for each in of_rank}
    phases = {
        name: computing[name] / kernels[name] - 1
        for name in ("forward", "backward", "optimizer")
        if kernels.get(name)
    }
    other = {name: load(folder / f"{name}.json") for name in ("blocking", "real")}
    has_messages = any(isinstance(op, CommOp) for op in workload.tally(0))
    return {
        "real_s": real["time_s"],
        "real_min_s": real["min_s"],
        "trace_s": slept["iterations"]["step_of_trace_s"],
        "kernels_s": kernels[""],
        "computing_s": computing[""],
        "replayed_s": slept["iterations"]["median_s"],
        "phases": phases,
        "exposed_s": of_rank[0]["exposed_comm_s"] if has_messages else None,
        "blocking_s": other["blocking"] and other["blocking"]["iterations"]["median_s"],
        "operators_s": other["real"] and other["real"]["iterations"]["median_s"],
    }


def busy(workload: Workload) -> dict[str, float]:
    """Return the time in which the first stage of a trace computes, by pass; "": of all.

    Without start times it is that of its stream of computation alone.
    """
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    times: dict[str, float] = defaultdict(float)
    for op in workload.expand(0):
        if isinstance(op, ComputeOp) and op.time_s:
            for name in ("", pass_of(op)):
                if op.start_s is not None:
                    spans[name].append((op.start_s, op.start_s + op.time_s))
                elif op.stream == COMPUTE:
                    times[name] += op.time_s
    for name, own in spans.items():
        end = 0.0
        for first, last in sorted(own):
            times[name] += max(0.0, last - max(first, end))
            end = max(end, last)
    return dict(times)


def load(path: Path) -> Json:
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    return document.get("rows", document)


def table(rows: list[tuple[str, dict[str, Json]]]) -> list[str]:
    """Return the table in Markdown, in ms."""
    heads = (
        *("step", "real (shortest)", "profiled", "kernels", "replayed", "to the real step"),
        *("computing to kernels", "worst phase", "exposed", "blocking", "real operators"),
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, own in rows:
        worst = max(own["phases"].values(), key=abs, default=0.0)
        cells = [
            name,
            f"{ms(own['real_s'])} ({ms(own['real_min_s'])})",
            *(ms(own[key]) for key in ("trace_s", "kernels_s", "replayed_s")),
            percent(own["replayed_s"], own["real_s"]),
            percent(own["computing_s"], own["kernels_s"]),
            f"{100 * worst:+.1f} %",
            *(ms(own[key]) for key in ("exposed_s", "blocking_s", "operators_s")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def percent(value: float, of: float) -> str:
    return f"{100 * (value / of - 1):+.1f} %"


if __name__ == "__main__":
    main()
