"""Cells of technique_table.py and the ranks that work through them; started by it.

A cell is V when two optimizer steps ran (with CUDA graphs five), FP8 layers, recomputed blocks
and compiled graphs are seen where they were asked for and nowhere else, and the losses before,
between and after them are those of the same layout in fp32 without it, but for the tolerance.
It is a reason where planning or the machine refuses the pair, X with the error where it broke.
Over 250 lines: the tables of techniques and layouts stand beside what ranks do.
"""

import argparse
import faulthandler
import itertools
import json
import math
import os
import time
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from stepmark.bench.context import MeasureContext, make_context, release
from stepmark.bench.training import trainer
from stepmark.bench.training.mesh import Share, place_of
from stepmark.bench.training.refusals import why_not
from stepmark.bench.training.weights import canonical_name
from stepmark.cli.train_plan import cases
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase

LIMIT_S = 300  # of one cell
ROWS = 4  # sequences per data rank and optimizer step
# Before the last loss. Graphs of compile are replayed from the third on.
STEPS, STEPS_GRAPHED = 2, 5
BASE: dict[str, Any] = {"scale": "tiny", "mbs": str(ROWS), "lr": 3e-3}
# Of the loss. fp32 sums in another order; bf16 has 8 bits, FP8 3 or 4.
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
TOLERANCE_BF16, TOLERANCE_FP8 = 5e-3, 5e-3

# What heads its column -> what it is, and its flags of `stepmark train`.
TECHNIQUES: dict[str, tuple[str, dict[str, Any]]] = {
    "amp": ("bf16 autocast", {"precision": "amp"}),
    "bf16": ("bf16 weights", {"precision": "bf16"}),
    "mast": ("bf16 weights, fp32 masters", {"precision": "master"}),
    "blk": ("compile, block by block", {"compile": True, "compile_scope": "block"}),
    "mod": ("compile, whole model", {"compile": True, "compile_scope": "model"}),
    "ro": ("reduce-overhead", {"compile": True, "compile_mode": "reduce-overhead"}),
    "cg": ("CUDA graph", {"cuda_graph": True}),
    "fp8": ("FP8 tensorwise", {"fp8": True, "fp8_recipe": "tensorwise"}),
    "row": ("FP8 rowwise", {"fp8": True, "fp8_recipe": "rowwise"}),
    "head": ("FP8 head", {"fp8": True, "fp8_head": True}),
    "gath": ("FP8 all-gather", {"fp8": True, "fp8_all_gather": True}),
    "1/2": ("SAC, 1 of 2 blocks", {"sac": "1/2"}),
    "full": ("SAC, every block", {"sac": "full"}),
    "ops": ("SAC, per operator", {"sac": "ops"}),
    "chk": ("loss in 4 chunks", {"loss_chunks": 4}),
    "acc": ("accumulation over 2, gradients reduced at the last", {"grad_accum": 2}),
}
CUDA_ONLY = ("ro", "cg")
# Name -> its letter in the joint table, ranks (None: --nproc), flags.
LAYOUTS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "single": ("S", 1, {"strategy": "single"}),
    "ddp": ("D", None, {"strategy": "ddp"}),
    "fsdp": ("F", None, {"strategy": "fsdp"}),
    "tp": ("T", None, {"strategy": "tp"}),
    "pp": ("P", None, {"strategy": "pp"}),
    "cp": ("C", None, {"strategy": "cp"}),
    "fsdp-tp": ("2", None, {"strategy": "fsdp", "tp": 2}),
}
Cell = tuple[str, str]  # marks; twice the same: that technique alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the cells of one table have in common."""

    layout: str
    num_ranks: int
    device: str
    model: str


def pairs(device: str, only: Collection[str] = ()) -> list[Cell]:
    """The upper triangle with its diagonal, without pairs of one kind; only: with these."""
    usable = [one for one in TECHNIQUES if device == "cuda" or one not in CUDA_ONLY]
    return [
        cell
        for cell in itertools.combinations_with_replacement(usable, 2)
        if not is_one_kind(cell) and (not only or set(only) & set(cell))
    ]


def cell_of(text: str) -> Cell:
    """Of "amp+chk"."""
    first, second = text.split("+")
    return first, second


def is_one_kind(cell: Cell) -> bool:
    a, b = (TECHNIQUES[mark][1] for mark in cell)
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def planned(setting: Setting, cell: Cell | None) -> TrainCase:
    """The case of a cell; of None, the layout in fp32. Raises ConfigError."""
    layout = setting.layout
    _, _, spread = LAYOUTS[layout]
    values = {"model": setting.model, **BASE, **spread}
    for mark in cell or ():
        values |= TECHNIQUES[mark][1]
    fp8 = "fp8" in values
    values.setdefault("precision", "amp" if fp8 else "fp32")
    if fp8 and layout.startswith("fsdp"):
        values.setdefault("fp8_all_gather", False)
    if "grad_accum" in values:
        values["mbs"] = str(ROWS // values["grad_accum"])
        if layout in ("ddp", "fsdp", "cp", "fsdp-tp"):
            values["grad_sync"] = "last"
    return cases(values, setting.device, setting.num_ranks)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cells", required=True, help="amp+chk,amp+amp,...")
    parser.add_argument("--until", type=float, required=True, help="Unix time; no cell after")
    parser.add_argument("--said", type=Path, required=True, help="JSON lines, one per cell")
    asked = parser.parse_args()
    work(
        Setting(
            layout=asked.layout,
            num_ranks=int(os.environ["WORLD_SIZE"]),
            device=asked.device,
            model=asked.model,
        ),
        [cell_of(text) for text in asked.cells.split(",")],
        said=asked.said,
        until_s=asked.until,
    )


def work(setting: Setting, todo: list[Cell], *, said: Path, until_s: float) -> None:
    """Cell by cell. A rank that broke says so and ends them all."""
    context = make_context(setting.device, for_meshes=True)
    want = Attempt(context, planned(setting, None)).losses(STEPS_GRAPHED)
    if want[0] - want[STEPS] < 4 * TOLERANCE_FP8 * want[0]:
        raise SystemExit(f"{setting.layout} learns too little for the tolerances: {want}")
    if context.ranks.rank == 0:
        said.write_text("ready\n")
    for cell in todo:
        if any(context.ranks.gather(time.time() > until_s)):
            break
        begin = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        line: dict[str, Any] = {"cell": "+".join(cell), "ended": False}
        try:
            line |= outcome(setting, context, cell, want)
        except Exception as error:  # noqa: BLE001  the next cell is to be run, too
            traceback.print_exc()
            line |= {"mark": "X", "text": first_line(error), "ended": True}
        line["wall_s"] = round(time.monotonic() - begin, 1)
        if line["ended"] or context.ranks.rank == 0:
            with said.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if line["ended"]:
            os._exit(1)  # no other rank can be reached any more
    faulthandler.cancel_dump_traceback_later()
    context.ranks.close()


def first_line(error: Exception) -> str:
    """Or two, where the first one ends in a colon."""
    lines = [*filter(None, f"{type(error).__name__}: {error}".split("\n")), ""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:300]


def outcome(
    setting: Setting, context: MeasureContext, cell: Cell, want: list[float]
) -> dict[str, Any]:
    """Mark, text and losses of a cell. Every rank calls it."""
    try:
        case = planned(setting, cell)
    except ConfigError as error:
        return {"mark": "refused", "text": str(error)}
    if reason := next(filter(None, context.ranks.gather(why_not(case, context))), None):
        return {"mark": "refused", "text": reason}
    attempt = Attempt(context, case)
    is_graphed = case.cuda_graph or case.compiles_graphs
    got = attempt.losses(STEPS_GRAPHED if is_graphed else STEPS)
    want = want[: len(got)]
    missing = next(filter(None, context.ranks.gather(attempt.not_in_force())), "")
    most = tolerance(case)
    off = math.nan
    if all(map(math.isfinite, got)):
        off = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
    if not off <= most:
        missing = missing or f"loss is off by {off:.2g}, more than {most:g}"
    if case.precision != "fp32" and got == want:
        missing = missing or f"losses are those of fp32, not {case.precision}"
    return {
        "mark": "X" if missing else "V",
        "text": missing,
        "losses": got,
        "off": off if math.isfinite(off) else None,
        "graph_breaks": attempt.graph_breaks,
        "command": case.command(),
    }


def tolerance(case: TrainCase) -> float:
    if case.fp8 != "none":
        return TOLERANCE_FP8
    return TOLERANCE[case.device] if case.precision == "fp32" else TOLERANCE_BF16


class Attempt:
    """A case trained for a few optimizer steps on this rank."""

    def __init__(self, context: MeasureContext, case: TrainCase) -> None:
        self._context, self._case = context, case
        self.graphs = self.graph_breaks = 0
        self._models: list[Any] = []

    def losses(self, steps: int) -> list[float]:
        """Before, between and after the steps, mean over the global batch; on every rank."""
        release(self._context)
        torch._dynamo.reset()
        counters.clear()
        made = trainer.make(self._case, self._context.ranks.device)
        found = [self._step(made) for _ in range(steps + 1)]
        self._models = made.models
        self.graphs = counters["stats"]["unique_graphs"]
        self.graph_breaks = sum(counters["graph_break"].values())
        return found

    def _step(self, made: trainer.Trainer) -> float:
        case, ranks = self._case, self._context.ranks
        place = place_of(ranks.rank, case.parallel)
        share = Share(rank=place.cp, num_ranks=case.parallel.cp)
        tokens, labels = (share.of(one, dim=1) for one in batch(case, place.data_rank))
        mine: list[Any] = []
        for index in range(case.grad_accum):
            rows = slice(index * case.mbs, (index + 1) * case.mbs)
            loss = made.micro_step(
                tokens[rows].to(ranks.device),
                labels[rows].to(ranks.device),
                is_last=index == case.grad_accum - 1,
                mark=lambda _name: None,
            )
            mine += [] if loss is None else [loss.clone()]
        made.optimizer_step()
        told = [one for some in ranks.gather([float(one) for one in mine]) for one in some]
        return float(sum(told) / len(told))

    def not_in_force(self) -> str:
        """A technique that was asked for and is not to be seen on this rank, or ""."""
        case = self._case
        layers = {
            canonical_name(name): module
            for model in self._models
            for name, module in model.named_modules()
        }
        kinds = {name: type(module).__name__ for name, module in layers.items()}
        scaled = [part for name, part in layers.items() if kinds[name] == "Float8Linear"]
        weights = [getattr(one.weight, "_local_tensor", one.weight) for one in scaled]
        held = [type(one).__name__ for one in weights]
        head = ("Float8Linear" if case.fp8_head else "Linear", None)  # of another stage
        modules = itertools.chain(*(model.modules() for model in self._models))
        wrapped = sum(isinstance(module, CheckpointWrapper) for module in modules)
        blocks = {name.split(".")[1] for name in kinds if name.startswith("blocks.")}
        seen = {
            "FP8": bool(scaled) == (case.fp8 != "none"),
            "the head's format": kinds.get("output.head") in head,
            "FP8 all-gather": any("Float8Cast" in one for one in held) == case.fp8_all_gather,
            "checkpointing": wrapped == sum(case.is_checkpointed[int(one)] for one in blocks),
            "compile": (self.graphs > 0) == (case.compile != "none"),
        }
        return ", ".join(f"{name} is not as asked" for name, so in seen.items() if not so)


def batch(case: TrainCase, data_rank: int) -> tuple[Tensor, Tensor]:
    """The same ROWS sequences in every step, so that each step shows in the next loss."""
    generator = torch.Generator().manual_seed(data_rank)
    shape = (ROWS, case.model.seq_len + 1)
    tokens = torch.randint(0, case.model.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    main()
