"""llm-train-bench's README table on this machine, row by row beside its H100 figures.

    python recipes/llm_train_bench.py --out results/NAME              # all rows, all GPUs
    python recipes/llm_train_bench.py --out DIR --only 'proxy.*fp8'   # some
    python recipes/llm_train_bench.py --out DIR --resume              # go on
    python recipes/llm_train_bench.py --out DIR --print               # the table again
    python recipes/llm_train_bench.py --out DIR --device cpu          # rows run, tiny models

TFLOP/s per GPU as that project counts them (palm-all), tokens of whole cycles of eight
micro-steps over their time, so that one optimizer step in eight counts; gradients are reduced
in every micro-step, as there. Beside: the median micro-step, and every step with its optimizer
(schedule step). Document figures: its README, one H100 SXM or eight, rounded there to 10.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPT2, PROXY, LLAMA = "gpt2-1.5b", "llama-3.1-70b-proxy-1l", "llama-3.1-8b"
BATCH = {GPT2: 8, PROXY: 2, LLAMA: 1}
COMPILE = ("--compile",)
# Both that project and TransformerEngine's LayerNormLinear have Llama's head in FP8.
MASTER = ("--precision", "master")
FP8 = (*COMPILE, "--fp8", "--fp8-head")
SOURCES = {
    "H100": "https://github.com/kimbochen/llm-train-bench (README), one or eight H100 SXM",
    "H200": "https://github.com/ROCm/TransformerEngine/issues/72 and /79, H200, FP8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell of the table. document: TFLOP/s, None for "Crashes" or no such cell."""

    name: str
    model: str
    strategy: str
    flags: tuple[str, ...] = ()
    mbs: int | None = None
    document: float | None = None
    published_on: str = "H100"
    note: str = ""


def _rows() -> list[Row]:
    figures = {
        (GPT2, "single"): (350, 400, 400),
        (GPT2, "ddp"): (325, 360, 350),
        (GPT2, "fsdp"): (320, 330, 250),
        (PROXY, "single"): (700, 790, 1200),
        (PROXY, "ddp"): (600, 650, 950),
        (PROXY, "fsdp"): (650, 680, 1000),
    }
    short = {GPT2: "gpt2", PROXY: "proxy", LLAMA: "8b"}
    rows = [
        Row(
            name=f"{short[model]}-{strategy}-{technique}",
            model=model,
            strategy=strategy,
            flags=flags,
            document=document,
        )
        for (model, strategy), of_cell in figures.items()
        for technique, flags, document in zip(
            ("mp", "pc", "fp8"), ((), COMPILE, FP8), of_cell, strict=True
        )
    ]
    rows += [
        Row(
            name=f"{short[model]}-fsdp-sac{'-pc' if flags else ''}",
            model=model,
            strategy="fsdp",
            flags=("--sac", share, *flags),
            mbs=mbs,
            document=document,
            note="" if document else "crashes there",
        )
        for model, share, mbs, flags, document in (
            (GPT2, "1/8", 8, (), 320),
            (GPT2, "1/8", 8, COMPILE, 330),
            (LLAMA, "1/4", 4, (), 330),
            (LLAMA, "1/4", 4, COMPILE, None),
        )
    ]
    best = ("--compile-scope", "model")
    return [
        *rows,
        Row(
            name="gpt2-single-pc-master",
            model=GPT2,
            strategy="single",
            flags=(*COMPILE, *best, *MASTER),
            note="weights cast once per optimizer step",
        ),
        Row(
            name="gpt2-best-bf16",
            model=GPT2,
            strategy="single",
            mbs=48,
            flags=(*COMPILE, *best, *MASTER),
            note="weights cast once per optimizer step",
        ),
        Row(
            name="gpt2-best-fp8",
            model=GPT2,
            strategy="single",
            mbs=48,
            flags=(*FP8, *MASTER),
            document=630.1,
            published_on="H200",
            note="weights cast once per optimizer step; there bsz 38",
        ),
        Row(
            name="8b-fsdp-fp8",
            model=LLAMA,
            strategy="fsdp",
            mbs=4,
            flags=FP8,
            document=897.6,
            published_on="H200",
        ),
        *(
            Row(
                name=f"{row.name}-head-bf16",
                model=row.model,
                strategy=row.strategy,
                flags=(*COMPILE, "--fp8"),
                note="beside the row above",
            )
            for row in rows
            if row.name.startswith("proxy") and row.name.endswith("fp8")
        ),
    ]


def command(row: Row, schedule: str, given: argparse.Namespace) -> list[str]:
    """The stepmark train command of a row."""
    count = "1" if row.strategy == "single" else str(given.nproc)
    words = [sys.executable, "-m", "stepmark", "train", row.model, "--strategy", row.strategy]
    words += ["--nproc", count, "--mbs", str(row.mbs or BATCH[row.model])]
    words += ["--schedule", schedule, "--steps", "80" if schedule == "micro" else "10"]
    # That project trains Llama at 4096 tokens. Its DDP has torch's buckets of 25 MB; larger
    # ones keep NCCL nearer to its peak.
    words += ["--seq-len", "4096"] if row.model != GPT2 else []
    words += ["--bucket-mb", "250"] if row.strategy == "ddp" else []
    words += [*row.flags, *given.more.split(), "--out", str(given.out / "runs")]
    if given.device == "cpu":
        words = [word for word in words if word not in MASTER]
        words = ["1/2" if word in ("1/4", "1/8") else word for word in words]  # two layers
        words += ["--device", "cpu", "--scale", "tiny", "--precision", "bf16"]
    return words


def measure(row: Row, schedule: str, given: argparse.Namespace) -> None:
    """Run one row; its rows of figures go to a file of its own."""
    file = _file(row, schedule, given)
    if given.resume and file.exists():
        return
    told = [*command(row, schedule, given), "--json", str(file)]
    sys.stderr.write(" ".join(told[1:]) + "\n")
    # In a session of its own it gets one signal, from us: a second one would kill it.
    with subprocess.Popen(told, start_new_session=True) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            child.wait()
            file.unlink(missing_ok=True)
            raise
    if code in (130, 143):
        file.unlink(missing_ok=True)  # of fewer samples than a row has
        raise KeyboardInterrupt
    if code:
        sys.stderr.write(f"{row.name}: exit code {code}\n")


def _file(row: Row, schedule: str, given: argparse.Namespace) -> Path:
    folder: Path = given.out
    return folder / f"{row.name}.{schedule}.json"


def _figures(row: Row, schedule: str, given: argparse.Namespace) -> dict[str, Any]:
    file = _file(row, schedule, given)
    if not file.exists():
        return {"message": "not run"}
    told = json.loads(file.read_text())
    found = told["rows"] if isinstance(told, dict) else told
    last: dict[str, Any] = next((one for one in found if one.get("rank") is None), {})
    return last


def table(rows: list[Row], given: argparse.Namespace) -> str:
    """Markdown."""
    lines = [
        "| row | ranks | mbs | document | here | / document | causal | median ms "
        "| step schedule | GiB | W | remark |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, step = (_figures(row, schedule, given) for schedule in ("micro", "step"))
        here = found.get("tflops_palm_all")
        ratio = f"{here / row.document:.2f}" if here and row.document else ""
        cells = [
            row.name,
            found.get("num_ranks"),
            found.get("mbs"),
            f"{row.document:g} ({row.published_on})" if row.document else row.note or "-",
            _number(here),
            ratio,
            _number(found.get("tflops")),
            _number((found.get("time_s") or 0) * 1e3 or None),
            _number(step.get("tflops_palm_all")),
            _number(found.get("allocated_gib")),
            _number(found.get("power_w"), 0),
            found.get("message") or (row.note if row.document else ""),
        ]
        lines.append("| " + " | ".join("" if c is None else str(c) for c in cells) + " |")
    notes = [f"{name}: {source}" for name, source in SOURCES.items()]
    return "\n".join([*lines, "", *notes]) + "\n"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="regular expression over row names")
    parser.add_argument("--schedules", default="micro,step")
    parser.add_argument("--nproc", default="all", help="ranks of ddp and fsdp [all GPUs]")
    parser.add_argument("--more", default="", help="further flags of stepmark train")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--resume", action="store_true", help="skip rows that are there")
    parser.add_argument("--print", action="store_true", help="only print the table")
    given = parser.parse_args()
    given.nproc = "2" if given.device == "cpu" and given.nproc == "all" else given.nproc
    rows = [row for row in _rows() if re.search(given.only, row.name)]
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the row's ranks, too
    code = 0
    try:
        for row in [] if given.print else rows:
            for schedule in given.schedules.split(","):
                measure(row, schedule, given)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; go on with --resume\n")
        code = 130
    text = table(_rows() if given.print else rows, given)
    (given.out / "table.md").write_text(table(_rows(), given))
    sys.stdout.write(text)
    sys.exit(code)


if __name__ == "__main__":
    main()
