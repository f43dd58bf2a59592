"""Which training techniques go together? Each pair is run, in each layout, on a tiny model.

    python recipes/technique_table.py --out techniques.md              # CPU or GPUs
    python recipes/technique_table.py --layouts fsdp,tp --only fp8,head
    python recipes/technique_table.py --layouts fsdp-tp --nproc 4

A cell is V when two optimizer steps ran, the technique is seen to be in force, and the losses
before, between and after them are those of the same layout in fp32 without it, but for the
tolerance. It is a reason where planning or the machine refuses the pair, X with the error where
it broke. A pair of one kind (two precisions) is no pair. A technique that needs another
brings it: FP8 head means FP8 products, too. On a CPU torchao emulates FP8.

Ranks of a layout start once, and again after a cell that broke. Beside --out FILE.md are
FILE.json and what the ranks said, FILE.log.
"""

import argparse
import collections
import faulthandler
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli.train_plan import cases
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase

if TYPE_CHECKING:
    from stepmark.bench.rig import Rig
    from stepmark.bench.training.trainer import Trainer

LIMIT_S = 300  # of one cell
ROWS, STEPS = 4, 2  # sequences per data rank and optimizer step; steps before the last loss
BASE: dict[str, Any] = {"scale": "tiny", "mbs": str(ROWS), "lr": 1e-3}
# Of the loss. fp32 sums in another order, TF32 products on a GPU; bf16 has 8 bits, FP8 3 or 4.
TOLERANCE = {"cpu": 2e-4, "cuda": 2e-3}
TOLERANCE_BF16, TOLERANCE_FP8 = 0.01, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """Flags of `stepmark train`, and what heads its column."""

    mark: str
    name: str
    flags: dict[str, Any]
    devices: tuple[str, ...] = ("cpu", "cuda")


def _techniques() -> dict[str, Technique]:
    tensorwise = {"fp8": True, "fp8_recipe": "tensorwise"}
    gpu = ("cuda",)
    found = (
        Technique(mark="amp", name="bf16 autocast", flags={"precision": "amp"}),
        Technique(mark="bf16", name="bf16 weights", flags={"precision": "bf16"}),
        Technique(mark="blk", name="compile, block by block", flags=_compiled("block")),
        Technique(mark="mod", name="compile, whole model", flags=_compiled("model")),
        Technique(mark="fp8", name="FP8 tensorwise", flags=tensorwise),
        Technique(mark="row", name="FP8 rowwise", flags={"fp8": True, "fp8_recipe": "rowwise"}),
        Technique(mark="head", name="FP8 head", flags={"fp8": True, "fp8_head": True}),
        Technique(
            mark="gath", name="FP8 all-gather", flags={"fp8": True, "fp8_all_gather": True}
        ),
        Technique(mark="1/2", name="SAC, 1 of 2 blocks", flags={"sac": "1/2"}),
        Technique(mark="full", name="SAC, every block", flags={"sac": "full"}),
        Technique(mark="ops", name="SAC, per operator", flags={"sac": "ops"}),
        Technique(mark="chk", name="loss in chunks", flags={"loss_chunks": 4}),
        Technique(
            mark="acc", name="accumulation, sync at the last", flags={"grad_accum": 2}
        ),
        Technique(
            mark="ro",
            name="compile mode reduce-overhead",
            flags={"compile": True, "compile_mode": "reduce-overhead"},
            devices=gpu,
        ),
        Technique(mark="cg", name="CUDA graph", flags={"cuda_graph": True}, devices=gpu),
    )
    return {one.mark: one for one in found}


def _compiled(scope: str) -> dict[str, Any]:
    return {"compile": True, "compile_scope": scope}


TECHNIQUES = _techniques()
# Name -> its letter in the joint table, ranks (None: --nproc), flags.
LAYOUTS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "single": ("S", 1, {"strategy": "single"}),
    "ddp": ("D", None, {"strategy": "ddp"}),
    "fsdp": ("F", None, {"strategy": "fsdp"}),
    "tp": ("T", None, {"strategy": "tp"}),
    "pp": ("P", None, {"strategy": "pp"}),
    "fsdp-tp": ("2", None, {"strategy": "fsdp", "tp": 2}),
}
DEFAULT_LAYOUTS = "single,ddp,fsdp,tp,pp"
Cell = tuple[str, str]  # marks; twice the same: that technique alone


def main() -> None:
    asked = arguments()
    if asked.ranks_write:
        work_in_ranks(asked)
        return
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for layout in asked.layouts.split(","):
        begin = time.monotonic()
        found[layout] = run_layout(asked, layout)
        say(f"{layout}: {time.monotonic() - begin:.0f} s")
        asked.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        text = "\n".join(markdown(asked, found))
        asked.out.write_text(text)
    sys.stdout.write(text)
    sys.exit(1 if any(one["mark"] == "X" for rows in found.values() for one in rows) else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("techniques.md"))
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help=", ".join(LAYOUTS))
    parser.add_argument("--only", default="", help="cells with one of these marks")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--nproc", type=int, default=2, help="ranks but for single")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--ranks-write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for word in [*asked.layouts.split(","), *filter(None, asked.only.split(","))]:
        if word not in LAYOUTS and word not in TECHNIQUES:
            parser.error(f"{word}: no layout or mark; {', '.join([*LAYOUTS, *TECHNIQUES])}")
    if asked.device == "auto":
        import torch  # noqa: PLC0415

        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The upper triangle with its diagonal, without pairs of one kind."""
    usable = [mark for mark, one in TECHNIQUES.items() if asked.device in one.devices]
    only = set(filter(None, asked.only.split(",")))
    return [
        cell
        for cell in itertools.combinations_with_replacement(usable, 2)
        if not is_one_kind(cell) and (not only or only & set(cell))
    ]


def is_one_kind(cell: Cell) -> bool:
    a, b = (TECHNIQUES[mark].flags for mark in cell)
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def planned(asked: argparse.Namespace, layout: str, cell: Cell | None) -> TrainCase:
    """The case of a cell; of None, the layout in fp32. Raises ConfigError."""
    _, _, spread = LAYOUTS[layout]
    values = {"model": asked.model, **BASE, **spread}
    for mark in cell or ():
        values |= TECHNIQUES[mark].flags
    fp8 = "fp8" in values
    values.setdefault("precision", "amp" if fp8 else "fp32")
    if fp8 and layout.startswith("fsdp"):
        values.setdefault("fp8_all_gather", False)
    if "grad_accum" in values:
        values["mbs"] = str(ROWS // values["grad_accum"])
        if layout in ("ddp", "fsdp", "fsdp-tp"):
            values["grad_sync"] = "last"
    return cases(values, asked.device, ranks_of(asked, layout))[0]


def ranks_of(asked: argparse.Namespace, layout: str) -> int:
    _, ranks, _ = LAYOUTS[layout]
    return ranks or asked.nproc


# In the parent


def run_layout(asked: argparse.Namespace, layout: str) -> list[dict[str, Any]]:
    """Every cell's result; starts ranks until none is left."""
    todo = cells(asked)
    found: dict[int, dict[str, Any]] = {}
    said = asked.out.with_suffix(".ranks.jsonl")
    while len(found) < len(todo):
        first = len(found)
        said.unlink(missing_ok=True)
        code = start_ranks(asked, layout, first, said)
        lines = said.read_text().splitlines() if said.exists() else []
        for line in map(json.loads, lines):
            found.setdefault(line["position"], line)  # the first rank that broke knows why
        if code and len(found) < len(todo) and not any(line["mark"] == "X" for line in lines_of(lines)):
            position = len(found)
            found[position] = result(position, "X", f"ranks ended with {code}: see the log")
    said.unlink(missing_ok=True)
    return [{**found[index], "cell": cell} for index, cell in enumerate(todo)]
