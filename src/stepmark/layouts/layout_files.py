"""The framework's own file of each shown layout: `--files DIR`."""

import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.ground.files import is_special, write_text
from stepmark.ground.options import argv
from stepmark.ground.waiting import Waiting
from stepmark.layouts.cluster import inputs_of_cluster
from stepmark.layouts.layout_search import LayoutSearch
from stepmark.layouts.layout_work import Simulated
from stepmark.layouts.plan_options import PlanOptions
from stepmark.measuring.delivery import make_folder
from stepmark.predictions.predict_options import PredictOptions
from stepmark.predictions.prediction_grid import Row
from stepmark.workloads.formats import FORMATS

FORMAT_OF = {"megatron": "megatron-args", "pytorch": "torchtitan"}  # by rules
_SUFFIXES = {FORMATS[name].suffix for name in FORMAT_OF.values()}
_AXES = ("tp", "pp", "vpp", "cp", "ep")


def check_folder(options: PlanOptions) -> None:
    """Make the folder of --files before a search. Raises ConfigError where it cannot be."""
    if options.files:
        make_folder("files", options.files)


def write_layouts(options: PlanOptions, searches: Sequence[LayoutSearch]) -> list[LayoutSearch]:
    """Write a file for each shown layout, and report on stderr.

    Returns the searches with `file` in their rows. Raises ConfigError.
    """
    if options.files is None:
        return [*searches]
    writer = _Writer(options.files)
    with Waiting(f"writing files of layouts to {options.files}"):
        if len(searches) > 1:
            written = [
                writer.search(own, 1, f"{own.cluster.num_gpus}gpus-") for own in searches
            ]
        else:
            written = [writer.search(own, options.top) for own in searches]
    for line in writer.report(options):
        sys.stderr.write(f"# {line}\n")
    return written


class _Writer:
    """Writes files of layouts. refused: numbers of rows by the reason that they have none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._paths: list[Path] = []
        self._refused: dict[str, list[str]] = defaultdict(list)
        self._losses: dict[str, None] = {}  # a set that keeps the order of rows

    def search(self, own: LayoutSearch, count: int, gpus: str = "") -> LayoutSearch:
        """Write files of the first layouts. gpus: their number, in names of files."""
        paths: list[Path | None] = []
        for layout in own.simulated[:count]:
            self._number += 1
            name = f"{self._number:02}-{gpus}{_name_of(layout.row)}"
            paths.append(self._write(layout, name))
        paths += [None] * (len(own.simulated) - len(paths))
        simulated = [
            replace(layout, row=layout.row | {"file": path and str(path)})
            for layout, path in zip(own.simulated, paths, strict=True)
        ]
        return replace(own, simulated=simulated)

    def _write(self, layout: Simulated, name: str) -> Path | None:
        """Write the file of a layout; return None where its framework's cannot describe it.

        Raises ConfigError for a path that is no regular file.
        """
        kind = FORMAT_OF[layout.candidate.framework]
        module = FORMATS[kind].load()
        workload = layout.candidate.workload()
        try:
            text = "".join(module.write(workload))
        except ConfigError as error:
            self._refused[f"{kind}: {error}"].append(str(self._number))
            return None
        stages = range(len(workload.stages))
        lines = [f"{kind} cannot carry: {line}" for line in module.omissions(workload, stages)]
        self._losses |= dict.fromkeys(lines)
        path = self._folder / f"{name}{FORMATS[kind].suffix}"
        if is_special(path):
            raise ConfigError("files", path, "a name that is free, or a regular file's")
        write_text(path, text, "files")
        self._paths.append(path)
        return path

    def report(self, options: PlanOptions) -> Iterator[str]:
        """Yield how to predict a file, rows without one, what files lack, and other files."""
        folder = self._folder
        if self._paths:
            files = "1 file" if len(self._paths) == 1 else f"{len(self._paths)} files"
            first = PredictOptions(models=(str(self._paths[0]),), **inputs_of_cluster(options))
            command = f"stepmark predict {shlex.join(argv(first))}"
            yield f"wrote {files} to {folder}; to predict the first: {command}"
        for reason, numbers in self._refused.items():
            yield f"no file of row {', '.join(numbers)}: {reason}"
        yield from self._losses
        files_there = {each for each in folder.iterdir() if each.suffix in _SUFFIXES}
        others = files_there - {*self._paths}
        if others:
            first_name = min(each.name for each in others)
            yield f"{folder} has {len(others)} more of earlier searches, as {first_name}"


def _name_of(row: Row) -> str:
    """Return a layout as a part of a file's name, e.g. megatron-tp4-pp8-mbs1."""
    degrees = [f"{axis}{row[axis]}" for axis in _AXES if row[axis] > 1]
    if row["dispatch"]:
        degrees.append(row["dispatch"])
    if row["dp_replicate"] > 1:
        degrees.append(f"replicas{row['dp_replicate']}")
    degrees.append(f"mbs{row['mbs']}")
    if row["recompute"] != "none":
        degrees.append(f"recompute-{row['recompute'].replace('/', '-')}")
    return "-".join((row["framework"], *degrees))
