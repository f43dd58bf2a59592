"""What one training step computes and sends: generated, or read from a file."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from stepmark.api.keywords import names_of, read, spells_keywords, text
from stepmark.api.ledger import to_plotly
from stepmark.api.model import Model
from stepmark.framework_files import configuration
from stepmark.ground.errors import StepmarkError
from stepmark.step import native
from stepmark.step import workload as core
from stepmark.tables.columns import Row
from stepmark.tables.table import Table
from stepmark.workloads import (
    workload_files,
    workload_flags,
    workload_page,
    workload_show,
    workload_tables,
)
from stepmark.workloads.formats import op_csv
from stepmark.workloads.rules import find_rule
from stepmark.workloads.workload import generate, with_times
from stepmark.workloads.workload_options import Rows


class Workload(Table):
    """One training step of all ranks. Its rows are the operations of every pipeline stage.

    name, world_size, num_stages: of the job. notes: on defaults that were chosen. program: the
    step with its repeated blocks and groups of ranks. flops, comm_bytes: FLOPs, and bytes of
    messages as nccl-tests counts them, of a step of all ranks; None where they are unknown.
    """

    def __init__(self, program: core.Workload) -> None:
        """Keep the program, which has repeated blocks; `ops` writes them out."""
        super().__init__([])
        self.program = program
        self.name = program.name
        self.world_size = program.world_size
        self.num_stages = len(program.stages)
        self.notes = program.all_notes

    def ops(self, stage: int | None = None) -> Iterator[Row]:
        """Yield a row per operation of a rank's step, in issue order; stage None: of all."""
        stages = range(self.num_stages) if stage is None else [self._checked(stage)]
        return op_csv.rows(self.program, stages)

    def rows(self) -> list[Row]:
        """Return `ops()` as a list; a step of many micro-batches has millions."""
        return list(self.ops())

    def __len__(self) -> int:
        return sum(map(self.program.num_operations, range(self.num_stages)))

    def tables(self, stage: int = 0) -> dict[str, Table]:
        """Return the tables of `stepmark workload show` by name, as its --json has them."""
        return workload_tables.tables(self.program, self._checked(stage))

    @cached_property
    def _job(self) -> Row:
        """The totals of all ranks."""
        rows = workload_tables.total_rows(self.program)
        return next(row for row in rows if row["of"] == "job")

    @property
    def flops(self) -> int | None:
        """Return the FLOPs of a step of all ranks."""
        return self._total("flops")

    @property
    def comm_bytes(self) -> int | None:
        """Return the bytes of the messages of a step of all ranks."""
        return self._total("comm_bytes")

    def _total(self, name: str) -> int | None:
        value = self._job[name]
        return value if isinstance(value, int) else None

    def plot(self, stage: int = 0) -> Any:
        """Return a plotly figure: bytes that a rank of a stage sends, by message size."""
        figures = workload_page.sizes(self.program, self._checked(stage))
        if not figures:
            raise StepmarkError(f"{self.name} has no messages to plot.")
        return to_plotly(figures[-1])

    def show(self) -> None:
        """Print what `stepmark workload show` prints."""
        workload_show.show(self.program, Rows())

    def write(
        self,
        path: str | os.PathLike[str],
        format: str = "native",
        *,
        rank: int | None = None,
        stage: int | None = None,
    ) -> None:
        """Write a file that stepmark or another tool reads; a folder/ gets those of all ranks.

        format: native, simai, aicb, param, chakra, aiob, csv, megatron-args, torchtitan,
        deepspeed. rank, stage: the one to write in
        a format that holds only one. Raises ConfigError for what the format cannot express.
        """
        target = workload_files.Target(
            to=format, out=os.fspath(path), rank=rank, stage=workload_files.stage_flag(stage)
        )
        spells_keywords(workload_files.deliver)(self.program, target)

    def __repr__(self) -> str:
        return f"<Workload {self._summary()}>"

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(self._summary())}</p>"]
        for name, table in self.tables().items():
            if name in _IN_HTML:
                parts.append(f"<p><b>{name}</b> of a rank</p>{table._repr_html_()}")
        return "".join(parts)

    def _checked(self, stage: int) -> int:
        return workload_files.number_below(self.num_stages, stage, "stage")

    def _summary(self) -> str:
        stages = f", {self.num_stages} pipeline stages" if self.num_stages > 1 else ""
        ranks = f"{self.world_size:,} rank{'s' if self.world_size > 1 else ''}{stages}"
        count = f"{self.program.num_operations():,} operations per rank and step"
        return f"{self.name}: {ranks}, {count}"


_IN_HTML = ("communication", "computation")


@spells_keywords
def workload(
    model: str | os.PathLike[str] | Model | None = None,
    *,
    framework: str | None = None,
    **options: object,
) -> Workload:
    """Generate what one training step computes and sends.

    model: a name, a config.json, FILE.py:function, or a framework's file (config= with another
    model); without one, its widths. framework: megatron, deepspeed, pytorch (also fsdp, ddp,
    tp, pp) or dlrm; that of the file, else megatron. options: those of `stepmark workload
    generate`, e.g. world_size=8, tp=2, mbs=1; `options("workload", framework)` lists them.
    """
    if framework is None:
        named = (text(each) for each in (model, options.get("config")) if each is not None)
        files = filter(configuration.is_framework_file, named)
        framework = next(map(configuration.framework_of, files), "megatron")
    cls = workload_flags.options_class(find_rule(framework), has_ignored=False)
    for name in options.keys() - names_of(cls).keys():
        workload_flags.refuse_other_framework(name)
    given = read(cls, (), {"model": model, "framework": framework, **options})
    return Workload(with_times(generate(given), given))


@spells_keywords
def read_workload(
    file: str | os.PathLike[str],
    *,
    group_sizes: str | None = None,
    world_size: int | None = None,
) -> Workload:
    """Read a workload in any format: stepmark's, AICB's, SimAI's, PARAM's, Chakra's.

    group_sizes, world_size: facts that files of AICB and of SimAI lack.
    """
    return Workload(workload_files.read(text(file), group_sizes, world_size))


@contextlib.contextmanager
def in_files(words: Sequence[object]) -> Iterator[list[object]]:
    """Yield the words with each workload written to a temporary file."""
    with tempfile.TemporaryDirectory(prefix="stepmark-") as folder:
        named: list[object] = []
        for place, word in enumerate(words):
            if isinstance(word, Workload):
                name = re.sub("[^-.A-Za-z0-9]", "_", word.name)  # runs and predictions show it
                path = Path(folder, f"{place or ''}{name}.json")
                path.write_bytes(native.encode(word.program))
                named.append(path)
            else:
                named.append(word)
        yield named
