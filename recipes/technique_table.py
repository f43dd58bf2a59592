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
FILE.json and what the ranks said, FILE.log. Over 250 lines: cells, what ranks do and tables.
"""

import argparse
import collections
import faulthandler
import itertools
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from stepmark.bench.rig import Rig, release
from stepmark.bench.training import trainer
from stepmark.bench.training.mesh import place_of
from stepmark.bench.training.refusals import why_not
from stepmark.bench.training.weights import canonical_name
from stepmark.cli.session import make_rig
from stepmark.cli.train_plan import cases
from stepmark.core.errors import ConfigError
from stepmark.core.train_case import TrainCase

LIMIT_S = 300  # of one cell
ROWS, STEPS = 4, 2  # sequences per data rank and optimizer step; steps before the last loss
BASE: dict[str, Any] = {"scale": "tiny", "mbs": str(ROWS), "lr": 3e-3}
# Of the loss. fp32 sums in another order; bf16 has 8 bits, FP8 3 or 4.
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-3}
TOLERANCE_BF16, TOLERANCE_FP8 = 5e-3, 0.02

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
        sys.stderr.write(f"{layout}: {time.monotonic() - begin:.0f} s\n")
        asked.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        text = markdown(asked, found)
        asked.out.write_text(text)
    sys.stdout.write(text)
    sys.exit(1 if any(one["mark"] == "X" for rows in found.values() for one in rows) else 0)


def arguments() -> argparse.Namespace:
    ranks = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun takes --nproc for its own
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("techniques.md"))
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help=", ".join(LAYOUTS))
    parser.add_argument("--only", default="", help="cells with one of these marks")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--nproc", type=int, default=ranks, help="but for single")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--ranks-write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for text, known in ((asked.layouts, LAYOUTS), (asked.only, TECHNIQUES)):
        if unknown := set(filter(None, text.split(","))) - known.keys():
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    if asked.device == "auto":
        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The upper triangle with its diagonal, without pairs of one kind."""
    usable = [one for one in TECHNIQUES if asked.device == "cuda" or one not in CUDA_ONLY]
    only = set(filter(None, asked.only.split(",")))
    return [
        cell
        for cell in itertools.combinations_with_replacement(usable, 2)
        if not is_one_kind(cell) and (not only or only & set(cell))
    ]


def is_one_kind(cell: Cell) -> bool:
    a, b = (TECHNIQUES[mark][1] for mark in cell)
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def planned(asked: argparse.Namespace, layout: str, cell: Cell | None) -> TrainCase:
    """The case of a cell; of None, the layout in fp32. Raises ConfigError."""
    _, _, spread = LAYOUTS[layout]
    values = {"model": asked.model, **BASE, **spread}
    for mark in cell or ():
        values |= TECHNIQUES[mark][1]
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
    """What became of every cell; starts ranks until none is left."""
    todo = cells(asked)
    found: dict[int, dict[str, Any]] = {}
    said = asked.out.with_suffix(".ranks")
    while len(found) < len(todo):
        said.unlink(missing_ok=True)
        code = start_ranks(asked, layout, len(found), said)
        ready, *told = said.read_text().splitlines() or [""]
        if not ready:
            raise SystemExit(f"{layout} does not train at all: see {asked.out.stem}.log")
        lines = [json.loads(one) for one in told]
        for line in lines:
            found.setdefault(line["position"], line)  # the first rank that broke knows why
        if code and not any(line["ended"] for line in lines):
            found[len(found)] = {"mark": "X", "text": f"ranks ended with {code}, see the log"}
        sys.stderr.write(f"{layout}: {len(found)} of {len(todo)} cells\n")
    said.unlink()
    return [{**found[index], "cell": cell} for index, cell in enumerate(todo)]


def start_ranks(asked: argparse.Namespace, layout: str, first: int, said: Path) -> int:
    """Exit code of the ranks, which go on from cell `first`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks_of(asked, layout)), __file__]
    command += ["--ranks-write", str(said), "--first", str(first), "--layouts", layout]
    command += ["--device", asked.device, "--model", asked.model, "--only", asked.only]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    said.touch()
    with asked.out.with_suffix(".log").open("a") as log:
        log.write(f"--- {layout} from {first}\n")
        log.flush()
        return subprocess.run(
            command, check=False, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode


# In the ranks


def work_in_ranks(asked: argparse.Namespace) -> None:
    """Cells from asked.first on. A rank that broke says so and ends them all."""

    rig, layout = make_rig(asked.device, for_meshes=True), asked.layouts
    want = Attempt(rig, planned(asked, layout, None)).losses()
    if want[0] - want[-1] < 2 * TOLERANCE_FP8 * want[0]:
        raise SystemExit(f"{layout} learns too little for the tolerances: {want}")
    if rig.ranks.rank == 0:
        asked.ranks_write.write_text("ready\n")
    for position, cell in list(enumerate(cells(asked)))[asked.first :]:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        line: dict[str, Any] = {"position": position, "ended": False}
        try:
            line |= outcome(asked, rig, cell, want)
        except Exception as error:  # noqa: BLE001  the next cell is to be run, too
            traceback.print_exc()
            line |= {"mark": "X", "text": first_line(error), "ended": True}
        line["wall_s"] = round(time.monotonic() - begin, 1)
        if line["ended"] or rig.ranks.rank == 0:
            with asked.ranks_write.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if line["ended"]:
            os._exit(1)  # no other rank can be reached any more
    faulthandler.cancel_dump_traceback_later()
    rig.ranks.close()


def first_line(error: Exception) -> str:
    """Or two, where the first one ends in a colon."""
    lines = [*filter(None, f"{type(error).__name__}: {error}".split("\n")), ""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:300]


def outcome(
    asked: argparse.Namespace, rig: Rig, cell: Cell, want: list[float]
) -> dict[str, Any]:
    """Mark, text and losses of a cell. Every rank calls it."""
    try:
        case = planned(asked, asked.layouts, cell)
    except ConfigError as error:
        return {"mark": "refused", "text": str(error)}
    if reason := next(filter(None, rig.ranks.gather(why_not(case, rig))), None):
        return {"mark": "refused", "text": reason}
    attempt = Attempt(rig, case)
    got = attempt.losses()
    missing = next(filter(None, rig.ranks.gather(attempt.not_in_force())), "")
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
    """A case trained for STEPS optimizer steps on this rank."""

    def __init__(self, rig: Rig, case: TrainCase) -> None:
        self._rig, self._case = rig, case
        self.graphs = self.graph_breaks = 0
        self._models: list[Any] = []

    def losses(self) -> list[float]:
        """Before, between and after the steps, mean over the global batch; on every rank."""
        release(self._rig)
        torch._dynamo.reset()
        counters.clear()
        made = trainer.make(self._case, self._rig.ranks.device)
        found = [self._step(made) for _ in range(STEPS + 1)]
        self._models = made.models
        self.graphs = counters["stats"]["unique_graphs"]
        self.graph_breaks = sum(counters["graph_break"].values())
        return found

    def _step(self, made: trainer.Trainer) -> float:
        case, ranks = self._case, self._rig.ranks
        place = place_of(ranks.rank, case.parallel)
        tokens, labels = batch(case, place.data_rank)
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


# The tables


def markdown(asked: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> str:
    """All layouts as one table, then each its own; reasons below them."""
    notes: dict[str, str] = {}
    joint = {cell: joined(found, cell, notes) for cell in cells(asked)}
    named = ", ".join(f"{LAYOUTS[one][0]} {one}" for one in found)
    lines = [f"All layouts ({named}). V: all of them; letters: these.", ""]
    lines += table(asked, joint)
    for layout, rows in found.items():
        own = {row["cell"]: shown(row, notes) for row in rows}
        counts = collections.Counter(row["mark"] for row in rows)
        said = ", ".join(f"{count} {mark}" for mark, count in sorted(counts.items()))
        lines += ["", f"{layout}, {ranks_of(asked, layout)} ranks: {said}.", ""]
        lines += table(asked, own)
    lines += ["", *(f"{note}: {text}  " for text, note in notes.items())]
    lines += ["", "; ".join(f"{mark} = {name}" for mark, (name, _) in TECHNIQUES.items())]
    return "\n".join(lines) + "\n"


def joined(found: dict[str, list[dict[str, Any]]], cell: Cell, notes: dict[str, str]) -> str:
    rows = {name: row for name, rows in found.items() for row in rows if row["cell"] == cell}
    good = [LAYOUTS[name][0] for name, row in rows.items() if row["mark"] == "V"]
    if len(good) == len(rows):
        return "V"
    others = [shown(row, notes) for row in rows.values() if row["mark"] != "V"]
    return " ".join(["".join(good), *dict.fromkeys(others)]).strip()


def shown(row: dict[str, Any], notes: dict[str, str]) -> str:
    """V; the note that says why it was refused; X and the note that says how it broke."""
    if row["mark"] == "V":
        return "V"
    note = notes.setdefault(row["text"], f"r{1 + len(notes)}")
    return note if row["mark"] == "refused" else f"X {note}"


def table(asked: argparse.Namespace, texts: dict[Cell, str]) -> Iterator[str]:
    used = set(itertools.chain(*cells(asked)))
    marks = [mark for mark in TECHNIQUES if mark in used]
    yield "| | " + " | ".join(marks) + " |"
    yield "|---|" + "---|" * len(marks)
    for row in marks:
        # Below the diagonal stands what is above it.
        line = [texts.get((row, mark), "") for mark in marks]
        yield f"| {row} | " + " | ".join(line) + " |"


if __name__ == "__main__":
    main()
