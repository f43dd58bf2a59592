"""Measure llm-train-bench's README table on this machine, next to its H100 figures.

    python recipes/llm_train_bench.py --out results/NAME              # all rows, all GPUs
    python recipes/llm_train_bench.py --out DIR --only 'proxy.*fp8'   # some rows
    python recipes/llm_train_bench.py --out DIR --resume              # continue
    python recipes/llm_train_bench.py --out DIR --print               # print the table
    python recipes/llm_train_bench.py --out DIR --device cpu          # a trial with tiny models

Figures are TFLOP/s per GPU in that project's convention (palm-all): tokens of whole cycles of
eight micro-steps over their time, so that one optimizer step in eight is included. As in that
project, gradients are reduced in every micro-step. Further columns show the median micro-step,
and steps that each include the optimizer (schedule step). The published figures are those of
its README, for one or eight H100 SXM, rounded there to 10. Over 250 lines: the list of rows.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPT2, PROXY, LLAMA = "gpt2-1.5b", "llama-3.1-70b-proxy-1l", "llama-3.1-8b"
BATCH = {GPT2: 8, PROXY: 2, LLAMA: 4}
MP: tuple[str, ...] = ()
COMPILE = ("--compile",)
WHOLE = (*COMPILE, "--compile-scope", "model")
FP8_BLOCKS = (*COMPILE, "--fp8")
# llm-train-bench and TransformerEngine's LayerNormLinear also have Llama's head in FP8.
FP8 = (*FP8_BLOCKS, "--fp8-head")
MASTER = ("--precision", "master")
# Inductor times persistent and looping reductions and uses the faster: 1.6 % on GPT-2.
MULTI_KERNEL = ("TORCHINDUCTOR_MULTI_KERNEL", "1")
CAST_ONCE = "weights cast once per optimizer step"
REDUCED_IN_BF16 = f"{CAST_ONCE}, gradients reduced in bf16"
SOURCES = {
    "H100": "https://github.com/kimbochen/llm-train-bench (README), one or eight H100 SXM",
    "H200": "https://github.com/ROCm/TransformerEngine/issues/72 and /79, H200, FP8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell of the table. document: published TFLOP/s; None if it crashes or is absent."""

    name: str
    model: str
    strategy: str
    flags: tuple[str, ...] = ()
    mbs: int | None = None
    document: float | None = None
    published_on: str = "H100"
    note: str = ""
    variables: tuple[tuple[str, str], ...] = ()  # environment variables


# Published TFLOP/s; None: crashes.
_PUBLISHED: tuple[tuple[str, str, str, tuple[str, ...], float | None], ...] = (
    ("gpt2-single-mp", GPT2, "single", MP, 350),
    ("gpt2-single-pc", GPT2, "single", COMPILE, 400),
    ("gpt2-single-fp8", GPT2, "single", FP8, 400),
    ("gpt2-ddp-mp", GPT2, "ddp", MP, 325),
    ("gpt2-ddp-pc", GPT2, "ddp", COMPILE, 360),
    ("gpt2-ddp-fp8", GPT2, "ddp", FP8, 350),
    ("gpt2-fsdp-mp", GPT2, "fsdp", MP, 320),
    ("gpt2-fsdp-pc", GPT2, "fsdp", COMPILE, 330),
    ("gpt2-fsdp-fp8", GPT2, "fsdp", FP8, 250),
    ("proxy-single-mp", PROXY, "single", MP, 700),
    ("proxy-single-pc", PROXY, "single", COMPILE, 790),
    ("proxy-single-fp8", PROXY, "single", FP8, 1200),
    ("proxy-ddp-mp", PROXY, "ddp", MP, 600),
    ("proxy-ddp-pc", PROXY, "ddp", COMPILE, 650),
    ("proxy-ddp-fp8", PROXY, "ddp", FP8, 950),
    ("proxy-fsdp-mp", PROXY, "fsdp", MP, 650),
    ("proxy-fsdp-pc", PROXY, "fsdp", COMPILE, 680),
    ("proxy-fsdp-fp8", PROXY, "fsdp", FP8, 1000),
    ("gpt2-fsdp-sac", GPT2, "fsdp", ("--ac", "1/8"), 320),
    ("gpt2-fsdp-sac-pc", GPT2, "fsdp", ("--ac", "1/8", *COMPILE), 330),
    ("8b-fsdp-sac", LLAMA, "fsdp", ("--ac", "1/4"), 330),
    ("8b-fsdp-sac-pc", LLAMA, "fsdp", ("--ac", "1/4", *COMPILE), None),
)
# Rows without a published figure.
_FURTHER: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    ("gpt2-single-pc-master", GPT2, "single", (*WHOLE, *MASTER), CAST_ONCE),
    ("gpt2-ddp-pc-master", GPT2, "ddp", (*COMPILE, *MASTER), REDUCED_IN_BF16),
    ("proxy-single-fp8-head-bf16", PROXY, "single", FP8_BLOCKS, "compare proxy-single-fp8"),
    ("proxy-ddp-fp8-head-bf16", PROXY, "ddp", FP8_BLOCKS, "compare proxy-ddp-fp8"),
    ("proxy-fsdp-fp8-head-bf16", PROXY, "fsdp", FP8_BLOCKS, "compare proxy-fsdp-fp8"),
)
ROWS = (
    *(
        Row(
            name=name,
            model=model,
            strategy=strategy,
            flags=flags,
            document=document,
            note="" if document else "crashes in llm-train-bench",
        )
        for name, model, strategy, flags, document in _PUBLISHED
    ),
    *(
        Row(name=name, model=model, strategy=strategy, flags=flags, note=note)
        for name, model, strategy, flags, note in _FURTHER
    ),
    Row(
        name="gpt2-best-bf16",
        model=GPT2,
        strategy="single",
        mbs=40,
        flags=(*WHOLE, *MASTER),
        note=f"{CAST_ONCE}, {MULTI_KERNEL[0]}={MULTI_KERNEL[1]}",
        variables=(MULTI_KERNEL,),
    ),
    Row(
        name="gpt2-best-fp8",
        model=GPT2,
        strategy="single",
        mbs=48,
        flags=(*FP8, *MASTER),
        document=630.1,
        published_on="H200",
        note=f"{CAST_ONCE}; published with bsz 38",
    ),
    Row(
        name="8b-fsdp-fp8",
        model=LLAMA,
        strategy="fsdp",
        flags=FP8,
        document=897.6,
        published_on="H200",
    ),
)


def command(row: Row, given: argparse.Namespace) -> list[str]:
    """Return the stepmark train command of a row: all schedules in the same processes."""
    count = "1" if row.strategy == "single" else str(given.nproc)
    words = [sys.executable, "-m", "stepmark", "train", row.model, "--strategy", row.strategy]
    words += ["--nproc", count, "--mbs", str(row.mbs or BATCH[row.model])]
    words += ["--schedule", given.schedules]
    # llm-train-bench trains Llama at 4096 tokens.
    words += ["--seq-len", "4096"] if row.model != GPT2 else []
    # llm-train-bench uses torch's buckets of 25 MB and gathers block by block. Larger messages
    # bring NCCL closer to its peak; fewer messages keep the host ahead of the GPUs.
    words += ["--bucket-mb", "250"] if row.strategy == "ddp" else []
    small_blocks = row.model == GPT2 and row.strategy == "fsdp" and given.device == "cuda"
    words += ["--blocks-per-group", "4"] if small_blocks else []
    words += [*row.flags, *given.more.split(), "--out", str(given.out / "runs")]
    if given.device == "cpu":
        words = [word for word in words if word not in MASTER]
        words = ["1/2" if word in ("1/4", "1/8") else word for word in words]  # two layers
        words += ["--device", "cpu", "--scale", "tiny", "--precision", "bf16"]
    return words


def measure(row: Row, given: argparse.Namespace) -> int:
    """Run one row, write its figures to the row's file, and return the exit code."""
    file = _file(row, given)
    if given.resume and "tflops_palm_all" in _figures(row, given).get("micro", {}):
        return 0
    file.unlink(missing_ok=True)  # left by an earlier run
    words = [*command(row, given), "--json", str(file)]
    settings = [f"{name}={value}" for name, value in row.variables]
    sys.stderr.write(" ".join([*settings, *words[1:]]) + "\n")
    # In its own session the child receives one signal; a second one would kill it.
    variables = {**os.environ, **dict(row.variables)}
    with subprocess.Popen(words, start_new_session=True, env=variables) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            file.unlink(missing_ok=True)
            raise
    if code in (130, 143):
        file.unlink(missing_ok=True)  # it has fewer samples than a row needs
        raise KeyboardInterrupt
    if code:
        sys.stderr.write(f"{row.name}: exit code {code}\n")
    return code


def _file(row: Row, given: argparse.Namespace) -> Path:
    folder: Path = given.out
    return folder / f"{row.name}.json"


def _figures(cell: Row, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the rows over all ranks, by schedule."""
    file = _file(cell, given)
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {row["schedule"]: row for row in rows if row.get("rank") is None}


def table(rows: Sequence[Row], given: argparse.Namespace) -> str:
    """Return the table as Markdown."""
    lines = [
        "| row | ranks | mbs | published TFLOP/s | measured TFLOP/s | measured / published "
        "| causal TFLOP/s | median ms | TFLOP/s, schedule step | GiB | W | remark |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = _figures(row, given)
        micro, step = figures.get("micro", {"message": "not run"}), figures.get("step", {})
        measured = micro.get("tflops_palm_all")
        ratio = f"{measured / row.document:.2f}" if measured and row.document else ""
        cells = [
            row.name,
            micro.get("num_ranks"),
            micro.get("mbs"),
            f"{row.document:g} ({row.published_on})" if row.document else row.note or "-",
            _number(measured),
            ratio,
            _number(micro.get("tflops")),
            _number((micro.get("time_s") or 0) * 1e3 or None),
            _number(step.get("tflops_palm_all")),
            _number(micro.get("allocated_gib")),
            _number(micro.get("power_w"), 0),
            micro.get("message") or (row.note if row.document else ""),
        ]
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    notes = [f"{name}: {source}" for name, source in SOURCES.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and tables")
    parser.add_argument("--only", default="", help="regular expression for row names")
    parser.add_argument("--schedules", default="micro,step", help="separated by commas")
    parser.add_argument("--nproc", default="all", help="ranks of ddp and fsdp [all GPUs]")
    parser.add_argument("--more", default="", help="additional flags of stepmark train")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--resume", action="store_true", help="skip rows that are already measured"
    )
    parser.add_argument("--print", action="store_true", help="only print the table")
    given = parser.parse_args()
    given.nproc = "2" if given.device == "cpu" and given.nproc == "all" else given.nproc
    rows = [row for row in ROWS if re.search(given.only, row.name)]
    if not rows:
        parser.error(
            f"--only {given.only} matches no row of {', '.join(row.name for row in ROWS)}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the row's ranks
    code = 0
    try:
        for row in [] if given.print else rows:
            code = measure(row, given) or code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; continue with --resume\n")
        code = 130
    text = table(ROWS if given.print else rows, given)
    (given.out / "table.md").write_text(table(ROWS, given))
    sys.stdout.write(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
