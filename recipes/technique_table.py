"""Which training techniques go together? Each pair is run, in each layout, on a tiny model.

    python recipes/technique_table.py --out techniques.md              # CPU or GPUs
    python recipes/technique_table.py --layouts fsdp,tp --only fp8,head
    python recipes/technique_table.py --layouts fsdp-tp --nproc 4
    python recipes/technique_table.py --jobs 12 --limit 480            # on a large machine
    python recipes/technique_table.py --jobs 12 --resume               # the rest, what broke

What V, a reason and X mean: technique_cells.py. A pair of one kind (two precisions) is no pair.
A technique that needs another brings it: FP8 head means FP8 products, too. On a CPU torchao
emulates FP8.

Cells are dealt out to sets of ranks, of which --jobs work at once; where a set has fewer ranks
than there are GPUs, the sets are spread over them. Ranks start again after a cell that broke.
Beside --out FILE.md are FILE.json, both renewed as cells end, and FILE.logs/ with what each set
said. Exit code 1 where a cell asked for is X or was not run. Over 250 lines: sets and tables.
"""

import argparse
import collections
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import technique_cells
import torch
from technique_cells import LAYOUTS, TECHNIQUES, Cell, Setting, cell_of, pairs

DEFAULT_LAYOUTS = "single,ddp,fsdp,tp,pp,cp"
POLL_S = 1.0
GOOD, REFUSED, BROKEN, NOT_RUN = "V", "refused", "X", "not run"
Row = dict[str, Any]  # mark, text and, of V, losses and command
Found = dict[str, dict[Cell, Row]]  # by layout
OPEN: Row = {"mark": NOT_RUN, "text": NOT_RUN}


def main() -> None:
    asked = arguments()
    about = {"device": asked.device, "model": asked.model, "nproc": asked.nproc}
    results = Results(asked.out, about, resume=asked.resume)
    todo = {name: results.open(name, asked.cells) for name in asked.layouts}
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    ends_at = time.time() + asked.limit
    with ThreadPoolExecutor(asked.jobs) as pool:
        done = [pool.submit(one.work, results, stop, ends_at) for one in rank_sets(todo, asked)]
    for one in done:
        one.result()  # raises what a thread raised
    sys.stdout.write(asked.out.read_text())
    marks = {results.mark(name, cell) for name in todo for cell in asked.cells}
    sys.exit(1 if marks & {BROKEN, NOT_RUN} else 0)


def arguments() -> argparse.Namespace:
    """As given, but layouts as a list and, added, the cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("techniques.md"))
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS, help=", ".join(LAYOUTS))
    parser.add_argument("--only", default="", help="cells with one of these marks")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--nproc", type=int, default=2, help="ranks [2]; single has one")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--jobs", type=int, default=1, help="sets of ranks at once [1]")
    parser.add_argument("--limit", type=float, default=math.inf, help="s; begin no cell after")
    parser.add_argument(
        "--resume", action="store_true", help="keep V and refusals of FILE.json"
    )
    asked = parser.parse_args()
    asked.layouts, asked.only = asked.layouts.split(","), [*filter(None, asked.only.split(","))]
    for words, known in ((asked.layouts, LAYOUTS), (asked.only, TECHNIQUES)):
        if unknown := set(words) - known.keys():
            parser.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    if asked.jobs < 1 or asked.nproc < 1:
        parser.error("--jobs and --nproc are 1 or more")
    if asked.device == "auto":
        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    asked.cells = pairs(asked.device, asked.only)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    return asked


# Sets of ranks


def dealt(todo: dict[str, list[Cell]], jobs: int) -> list[tuple[str, list[Cell]]]:
    """(layout, some of its cells): each cell once, neighbours in different slices.

    At least as many as jobs, but no more than that takes: ranks are slow to start.
    """
    share = -(-jobs // max(1, sum(map(bool, todo.values()))))
    slices = [
        (name, cells[first::share]) for name, cells in todo.items() for first in range(share)
    ]
    return [(name, cells) for name, cells in slices if cells]


def rank_sets(todo: dict[str, list[Cell]], asked: argparse.Namespace) -> Iterator["RankSet"]:
    gpus = visible_gpus() if asked.device == "cuda" else []
    cores = len(os.sched_getaffinity(0))
    for number, (layout, cells) in enumerate(dealt(todo, asked.jobs)):
        ranks = ranks_of(layout, asked.nproc)
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // (asked.jobs * ranks))),
            **os.environ,
        }
        if ranks < len(gpus):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(turn(gpus, ranks, number))
        setting = Setting(
            layout=layout, num_ranks=ranks, device=asked.device, model=asked.model
        )
        log = asked.out.with_suffix(".logs") / f"{layout}-{number}.log"
        yield RankSet(setting=setting, cells=cells, variables=variables, log=log)


def ranks_of(layout: str, nproc: int) -> int:
    return LAYOUTS[layout][1] or nproc


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def turn(gpus: Sequence[str], ranks: int, number: int) -> list[str]:
    """GPUs of one set: those after the GPUs of the set before it."""
    return [gpus[(number * ranks + index) % len(gpus)] for index in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """Ranks that work through some cells of one layout."""

    setting: Setting
    cells: list[Cell]
    variables: dict[str, str]  # of their environment
    log: Path

    def work(self, results: "Results", stop: threading.Event, ends_at: float) -> None:
        """Starts ranks until no cell is left, or the time is over."""
        layout = self.setting.layout
        left = self.cells
        while left and not stop.is_set() and time.time() < ends_at:
            code, lines = self._start(left, results, stop, ends_at)
            left = results.left(layout, self.cells)
            if stop.is_set():
                return
            if lines is None:
                text = f"{layout} does not train at all, see {self.log.parent.name}/"
                results.take(layout, [broken(cell, text) for cell in left])
            elif code and left and not any(line["ended"] for line in lines):
                results.take(
                    layout, [broken(left[0], f"ranks ended with {code}, see {self.log.name}")]
                )
            left = results.left(layout, self.cells)
            done = len(self.cells) - len(left)
            sys.stderr.write(f"{self.log.stem}: {done} of {len(self.cells)} cells\n")

    def _start(
        self, cells: list[Cell], results: "Results", stop: threading.Event, ends_at: float
    ) -> tuple[int, list[Row] | None]:
        """Exit code of ranks for these cells, and what they said."""
        setting, said = self.setting, self.log.with_suffix(f".{os.getpid()}.said")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(setting.num_ranks), technique_cells.__file__]
        command += ["--layout", setting.layout, "--device", setting.device]
        command += ["--model", setting.model, "--until", str(ends_at), "--said", str(said)]
        command += ["--cells", ",".join("+".join(cell) for cell in cells)]
        self.log.parent.mkdir(exist_ok=True)
        # In a session of their own they get one signal, from us.
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command,
                env=self.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as child,
        ):
            while child.poll() is None and not stop.wait(POLL_S):
                results.take(setting.layout, told(said) or [])
            child.terminate()  # if it has not ended
            code = child.wait()
        lines = told(said)
        said.unlink(missing_ok=True)
        results.take(setting.layout, lines or [])
        return code, lines


def told(said: Path) -> list[Row] | None:
    """Lines of the ranks as far as they are whole; None before they have trained at all."""
    text = said.read_text() if said.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in whole[1:]] if whole else None


def broken(cell: Cell, text: str) -> Row:
    return {"cell": "+".join(cell), "mark": BROKEN, "text": text}


# Results


class Results:
    """What became of the cells, in files from the first one on. For several threads."""

    def __init__(self, out: Path, about: dict[str, Any], *, resume: bool) -> None:
        """about: device, model, nproc. Raises SystemExit where earlier cells are of others."""
        self._out, self._about = out, about
        self._lock = threading.Lock()
        self.found: Found = {}
        file = out.with_suffix(".json")
        if not resume or not file.exists():
            return
        earlier = json.loads(file.read_text())
        if earlier.get("about") != about:
            raise SystemExit(f"{file} is of {earlier.get('about')}, not {about}")
        for layout, rows in earlier["layouts"].items():
            self.found[layout] = {cell_of(row["cell"]): row for row in rows}

    def open(self, layout: str, cells: Iterable[Cell]) -> list[Cell]:
        """Those that are to be run: not V or refused by now. Their rows say so."""
        rows = self.found.setdefault(layout, {})
        again = [cell for cell in cells if self.mark(layout, cell) not in (GOOD, REFUSED)]
        for cell in again:
            rows[cell] = {"cell": "+".join(cell), **OPEN}
        self._write()
        return again

    def mark(self, layout: str, cell: Cell) -> str:
        return str(self.found[layout].get(cell, OPEN)["mark"])

    def left(self, layout: str, cells: Iterable[Cell]) -> list[Cell]:
        """Those without an outcome."""
        return [cell for cell in cells if self.mark(layout, cell) == NOT_RUN]

    def take(self, layout: str, lines: Iterable[Row]) -> None:
        """The first line of a cell counts: the first rank that broke knows why."""
        with self._lock:
            before = len(self.left(layout, self.found[layout]))
            for line in lines:
                cell = cell_of(line["cell"])
                if self.mark(layout, cell) == NOT_RUN:
                    self.found[layout][cell] = line
            if len(self.left(layout, self.found[layout])) < before:
                self._write()

    def _write(self) -> None:
        layouts = {name: list(rows.values()) for name, rows in self.found.items()}
        told = json.dumps({"about": self._about, "layouts": layouts}, indent=1) + "\n"
        text = markdown(self.found, self._about["nproc"])
        for file, content in ((self._out.with_suffix(".json"), told), (self._out, text)):
            fresh = file.with_name(f"{file.name}.new")
            fresh.write_text(content)
            fresh.replace(file)  # whole at any time


# The tables


def markdown(found: Found, nproc: int) -> str:
    """All layouts as one table, then each its own; reasons below them."""
    notes: dict[str, str] = {}
    cells = [cell for cell in pairs("cuda") if any(cell in rows for rows in found.values())]
    named = ", ".join(f"{LAYOUTS[one][0]} {one}" for one in found)
    lines = [f"All layouts ({named}). V: all of them; letters: these.", ""]
    lines += table({cell: joined(found, cell, notes) for cell in cells})
    for layout, rows in found.items():
        own = {cell: rows.get(cell, OPEN) for cell in cells}
        counts = collections.Counter(row["mark"] for row in own.values())
        said = ", ".join(f"{count} {mark}" for mark, count in sorted(counts.items()))
        lines += ["", f"{layout}, {ranks_of(layout, nproc)} ranks: {said}.", ""]
        lines += table({cell: shown(row, notes) for cell, row in own.items()})
    lines += ["", *(f"{note}: {text}  " for text, note in notes.items())]
    lines += ["", "; ".join(f"{mark} = {name}" for mark, (name, _) in TECHNIQUES.items())]
    return "\n".join(lines) + "\n"


def joined(found: Found, cell: Cell, notes: dict[str, str]) -> str:
    rows = {name: of_cells.get(cell, OPEN) for name, of_cells in found.items()}
    good = [LAYOUTS[name][0] for name, row in rows.items() if row["mark"] == GOOD]
    if len(good) == len(rows):
        return GOOD
    others = [shown(row, notes) for row in rows.values() if row["mark"] != GOOD]
    return " ".join(["".join(good), *dict.fromkeys(others)]).strip()


def shown(row: Row, notes: dict[str, str]) -> str:
    """V; not run; the note that says why it was refused; X and the note how it broke."""
    if row["mark"] in (GOOD, NOT_RUN):
        return str(row["mark"])
    note = notes.setdefault(row["text"], f"r{1 + len(notes)}")
    return note if row["mark"] == REFUSED else f"{BROKEN} {note}"


def table(texts: dict[Cell, str]) -> Iterator[str]:
    used = set(itertools.chain(*texts))
    marks = [mark for mark in TECHNIQUES if mark in used]
    yield "| | " + " | ".join(marks) + " |"
    yield "|---|" + "---|" * len(marks)
    for row in marks:
        # Below the diagonal stands what is above it.
        line = [texts.get((row, mark), "") for mark in marks]
        yield f"| {row} | " + " | ".join(line) + " |"


if __name__ == "__main__":
    main()
