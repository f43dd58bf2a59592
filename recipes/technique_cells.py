"""Cells of technique_table.py, and the ranks that run them (started by technique_table.py).

A cell is V if two optimizer steps ran (five with CUDA graphs), if FP8 layers, recomputed blocks
and compiled graphs exist exactly where they were requested, and if the losses before, between
and after the steps equal those of the same layout in plain fp32 within the tolerance. It is
refused, with the reason, if planning or the machine refuses the pair, and X, with the error, if
it failed. Over 250 lines: the tables of techniques and layouts, and the work of the ranks.
"""

import argparse
import faulthandler
import itertools
import json
import math
import os
import statistics
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

from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build
from stepmark.measuring.context import MeasureContext, make_context, release
from stepmark.store.commands import command_of
from stepmark.training import trainer
from stepmark.training.bench import refusal
from stepmark.training.model_parallel import SequenceShard, coordinates_of
from stepmark.training.train_options import TrainOptions
from stepmark.training.train_plan import cases
from stepmark.training.transformer import canonical_name

LIMIT_S = 300  # per cell
ROWS = 4  # sequences per data rank and optimizer step
# Steps before the last loss. compile's CUDA graphs are replayed from the third step on.
STEPS, STEPS_GRAPHED = 2, 5
BASE: dict[str, Any] = {"scale": "tiny", "mbs": str(ROWS), "lr": 3e-3}
# Relative tolerance of the loss: fp32 sums in another order; bf16 has 8 bits, FP8 3 or 4.
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
TOLERANCE_BF16, TOLERANCE_FP8 = 5e-3, 5e-3

# Key on the command line -> column head, and options of `stepmark train`.
TECHNIQUES: dict[str, tuple[str, dict[str, Any]]] = {
    "amp": ("bf16 autocast", {"precision": "amp"}),
    "bf16": ("bf16 weights", {"precision": "bf16"}),
    "mast": ("master weights", {"precision": "master"}),
    "blk": ("compile per block", {"compile": True, "compile_scope": "block"}),
    "mod": ("compile the model", {"compile": True, "compile_scope": "model"}),
    "ro": ("reduce-overhead", {"compile": True, "compile_mode": "reduce-overhead"}),
    "cg": ("CUDA graph", {"cuda_graph": True}),
    "fp8": ("FP8 tensorwise", {"fp8": True, "fp8_recipe": "tensorwise"}),
    "row": ("FP8 rowwise", {"fp8": True, "fp8_recipe": "rowwise"}),
    "head": ("FP8 head", {"fp8": True, "fp8_head": True}),
    "gath": ("FP8 all-gather", {"fp8": True, "fp8_all_gather": True}),
    "1/2": ("AC, 1 of 2 blocks", {"ac": "1/2"}),
    "full": ("AC, every block", {"ac": "full"}),
    "ops": ("AC, per operator", {"ac": "ops"}),
    "chk": ("loss in 4 chunks", {"loss_chunks": 4}),
    "acc": ("accumulation over 2", {"grad_accum": 2}),
}
CUDA_ONLY = ("ro", "cg")
# Name -> letter in the table, number of ranks (None: --nproc), flags.
LAYOUTS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "single": ("S", 1, {"strategy": "single"}),
    "ddp": ("D", None, {"strategy": "ddp"}),
    "fsdp": ("F", None, {"strategy": "fsdp"}),
    "tp": ("T", None, {"strategy": "tp"}),
    "pp": ("P", None, {"strategy": "pp"}),
    "cp": ("C", None, {"strategy": "cp"}),
    "fsdp-tp": ("2", None, {"strategy": "fsdp", "tp": 2}),
}
Cell = tuple[str, str]  # keys; the same key twice means that technique alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Properties that the cells of one layout share."""

    layout: str
    num_ranks: int
    device: str
    model: str


def pairs(device: str, only: Collection[str] = ()) -> list[Cell]:
    """Return the upper triangle with its diagonal, without pairs of one kind.

    `only` selects the pairs that contain one of these techniques.
    """
    usable = [key for key in TECHNIQUES if device == "cuda" or key not in CUDA_ONLY]
    return [
        cell
        for cell in itertools.combinations_with_replacement(usable, 2)
        if not is_one_kind(cell) and (not only or set(only) & set(cell))
    ]


def cell_of(text: str) -> Cell:
    """Parse "amp+chk"."""
    first, second = text.split("+")
    return first, second


def is_one_kind(cell: Cell) -> bool:
    a, b = (TECHNIQUES[mark][1] for mark in cell)
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def planned(setting: Setting, cell: Cell | None) -> TrainCase:
    """Return the case of a cell, or of the layout in fp32 for None. Raise ConfigError."""
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
    return cases(build(TrainOptions, values), setting.device, setting.num_ranks)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cells", required=True, help="amp+chk,amp+amp,...")
    parser.add_argument(
        "--until", type=float, required=True, help="Unix time of the last start"
    )
    parser.add_argument("--outcomes", type=Path, required=True, help="file of JSON lines")
    asked = parser.parse_args()
    work(
        Setting(
            layout=asked.layout,
            num_ranks=int(os.environ["WORLD_SIZE"]),
            device=asked.device,
            model=asked.model,
        ),
        [cell_of(text) for text in asked.cells.split(",")],
        outcomes=asked.outcomes,
        until_s=asked.until,
    )


def work(setting: Setting, todo: list[Cell], *, outcomes: Path, until_s: float) -> None:
    """Run cell by cell. A rank that fails records the error and ends all ranks."""
    context = make_context(setting.device, for_meshes=True)
    want = Attempt(context, planned(setting, None)).losses(STEPS_GRAPHED)
    if want[0] - want[STEPS] < 4 * TOLERANCE_FP8 * want[0]:
        raise SystemExit(
            f"{setting.layout}: the loss falls too little for the tolerances: {want}"
        )
    if context.ranks.rank == 0:
        outcomes.write_text("ready\n")
    for cell in todo:
        if any(context.ranks.gather(time.time() > until_s)):
            break
        begin = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        line: dict[str, Any] = {"cell": "+".join(cell), "ended": False}
        try:
            line |= outcome(setting, context, cell, want)
        except Exception as error:  # noqa: BLE001  the next cell must still run
            traceback.print_exc()
            line |= {"mark": "X", "text": first_line(error), "ended": True}
        line["wall_s"] = round(time.monotonic() - begin, 1)
        if line["ended"] or context.ranks.rank == 0:
            with outcomes.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if line["ended"]:
            os._exit(1)  # the other ranks may hang in a collective
    faulthandler.cancel_dump_traceback_later()
    context.ranks.close()


def first_line(error: Exception) -> str:
    """Return the first line of the error, or two if the first one ends in a colon."""
    lines = [*filter(None, f"{type(error).__name__}: {error}".split("\n")), ""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:300]


def outcome(
    setting: Setting, context: MeasureContext, cell: Cell, want: list[float]
) -> dict[str, Any]:
    """Return mark, text and losses of a cell. Every rank calls it."""
    try:
        case = planned(setting, cell)
    except ConfigError as error:
        return {"mark": "refused", "text": str(error)}
    if reason := next(filter(None, context.ranks.gather(refusal(case, context))), None):
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
        missing = missing or f"the relative error of the loss is {off:.2g}, over {most:g}"
    if case.precision != "fp32" and got == want:
        missing = missing or f"the losses are those of fp32, not of {case.precision}"
    return {
        "mark": "X" if missing else "V",
        "text": missing,
        "losses": got,
        "off": off if math.isfinite(off) else None,
        "graph_breaks": attempt.graph_breaks,
        "command": command_of(case),
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
        """Return the losses before, between and after the steps, over the global batch."""
        release(self._context)
        torch._dynamo.reset()
        counters.clear()
        built = trainer.make(self._case, self._context.ranks.device)
        losses = [self._step(built) for _ in range(steps + 1)]
        self._models = built.models
        self.graphs = counters["stats"]["unique_graphs"]
        self.graph_breaks = sum(counters["graph_break"].values())
        return losses

    def _step(self, built: trainer.Trainer) -> float:
        case, ranks = self._case, self._context.ranks
        place = coordinates_of(ranks.rank, case.parallel)
        share = SequenceShard(rank=place.cp, num_ranks=case.parallel.cp)
        tokens, labels = (share.of(part, dim=1) for part in batch(case, place.data_rank))
        losses: list[Any] = []
        for index in range(case.grad_accum):
            rows = slice(index * case.mbs, (index + 1) * case.mbs)
            loss = built.micro_step(
                tokens[rows].to(ranks.device),
                labels[rows].to(ranks.device),
                is_last=index == case.grad_accum - 1,
                mark=lambda _name: None,
            )
            losses += [] if loss is None else [loss.clone()]
        built.optimizer_step()
        gathered = itertools.chain(*ranks.gather([float(loss) for loss in losses]))
        return statistics.fmean(gathered)

    def not_in_force(self) -> str:
        """Return the requested techniques that are not in effect on this rank, or ""."""
        case = self._case
        layers = {
            canonical_name(name): module
            for model in self._models
            for name, module in model.named_modules()
        }
        kinds = {name: type(module).__name__ for name, module in layers.items()}
        scaled = [part for name, part in layers.items() if kinds[name] == "Float8Linear"]
        weights = [getattr(part.weight, "_local_tensor", part.weight) for part in scaled]
        tensor_types = [type(weight).__name__ for weight in weights]
        head = ("Float8Linear" if case.fp8_head else "Linear", None)  # None: on another stage
        modules = itertools.chain(*(model.modules() for model in self._models))
        wrapped = sum(isinstance(module, CheckpointWrapper) for module in modules)
        blocks = {name.split(".")[1] for name in kinds if name.startswith("blocks.")}
        seen = {
            "FP8": bool(scaled) == (case.fp8 != "none"),
            "the head's format": kinds.get("output.head") in head,
            "FP8 all-gather": any("Float8Cast" in name for name in tensor_types)
            == case.fp8_all_gather,
            "checkpointing": wrapped
            == sum(case.is_checkpointed[int(index)] for index in blocks),
            "compile": (self.graphs > 0) == (case.compile != "none"),
        }
        return ", ".join(f"{name} is not as requested" for name, ok in seen.items() if not ok)


def batch(case: TrainCase, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return the same ROWS sequences in every step, so that each step changes the next loss."""
    generator = torch.Generator().manual_seed(data_rank)
    shape = (ROWS, case.model.seq_len + 1)
    tokens = torch.randint(0, case.model.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


if __name__ == "__main__":
    main()
