"""Runs: measure and get one, or read one that was measured earlier."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from stepmark.api.keywords import read, spells_keywords, text
from stepmark.api.step import Step, steps_of
from stepmark.api.workload import Workload, in_files
from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.kind import KINDS
from stepmark.cases.plan import Plan
from stepmark.cases.record import AnyCase, Failed, Record, RunInfo, Skipped
from stepmark.cases.replay_case import ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.collectives import comm
from stepmark.collectives.comm_options import CommOptions
from stepmark.ground import outer_launcher
from stepmark.ground.errors import ConfigError, StepmarkError, not_one_of
from stepmark.ground.option_groups import MeasureOptions
from stepmark.ground.options import argv, plain
from stepmark.ground.units import counts_text
from stepmark.measuring.machine import Machine, machine
from stepmark.measuring.measure import measured
from stepmark.model.collectives import Collective, collective_named
from stepmark.model.ops import ALL_FAMILIES
from stepmark.operators import op
from stepmark.operators.op_options import FAMILY_WORDS, options_class
from stepmark.replays import replay_verb
from stepmark.replays.replay_log_text import ReplayLog
from stepmark.replays.replay_log_verb import of_run
from stepmark.replays.replay_options import ReplayOptions
from stepmark.runs.run_options import RunOptions
from stepmark.runs.runs import print_run
from stepmark.store import view
from stepmark.store.commands import options_of
from stepmark.store.reader import find_run
from stepmark.tables.columns import Row, number
from stepmark.tables.launches import message_of
from stepmark.tables.row_tables import ran
from stepmark.tables.table import Table
from stepmark.training import train
from stepmark.training.train_options import TrainOptions

# By verb: options, None: those of a family, and the function that plans the cases of options.
VERBS: dict[str, tuple[type[MeasureOptions] | None, Callable[[Any, Machine], Plan]]] = {
    "op": (None, op.plan_of),
    "comm": (CommOptions, comm.plan),
    "train": (TrainOptions, train.plan),
    "replay": (ReplayOptions, replay_verb.plan),
}


class Run(Table):
    """A run that was measured: a row per case, and per rank if a case has figures of ranks.

    path: the folder of the run, which other functions take in place of the run.

    Figures of the training step, None without one, and with several, which `rows` has: step_s:
    seconds of an optimizer step (median); tokens_per_s, tokens_per_s_gpu: tokens per second of
    all GPUs and of one; mfu_pct: model FLOPs utilization (causal) in percent.
    """

    def __init__(self, path: Path) -> None:
        """Read a run folder. Raises ConfigError where it is none."""
        self.path = path
        self._view = view.view(path)
        super().__init__(self._view.all_rows)
        steps = [row for row in self._view.train_rows if _is_step(row)]
        step = steps[0] if len(steps) == 1 else {}
        sample_s = number(step, "time_s")
        self.step_s = sample_s and sample_s * (number(step, "cycle") or 1)
        self.tokens_per_s = number(step, "tokens_per_s")
        self.tokens_per_s_gpu = number(step, "tokens_per_s_gpu")
        self.mfu_pct = number(step, "mfu_pct")

    @property
    def info(self) -> RunInfo:
        """Return the command, the machine and the software of the run."""
        return self._view.run

    @property
    def records(self) -> list[Record]:
        """Return the outcome of each case, with the seconds of every rank and sample."""
        return self._view.records

    @property
    def cases(self) -> list[AnyCase]:
        """Return the cases, each of which `measure` accepts."""
        return list(dict.fromkeys(record.case for record in self.records))

    @cached_property
    def steps(self) -> list[Step]:
        """The steps of `run` and their predictions. Raises ConfigError for a changed one."""
        return steps_of(self.path, self._view)

    def show(self) -> None:
        """Print what `stepmark runs show` prints."""
        print_run(self.path, self._view)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Run {self._summary()}>"

    def _repr_html_(self) -> str:
        run = self._view
        parts = [f"<p>{escape(self._summary())}</p>"]
        for kind in KINDS:
            rows = run.rows if kind == "op" else getattr(run, f"{kind}_rows")
            table = ran(rows, view.columns(kind))
            parts += [table._repr_html_()] if len(table) else []
        parts += [f"<p>{escape(line)}</p>" for line in self._unmeasured()]
        return "".join(parts)

    def _summary(self) -> str:
        names = counts_text(device.name for device in self.info.environment.devices)
        return f"{self.path}: {self.info.command} on {names or 'an unknown device'}"

    def _unmeasured(self) -> list[str]:
        """Return a line per case that was skipped or has failed."""
        return [
            f"{record.kind}: {record.case.family}: {message_of(record)}"
            for record in self.records
            if isinstance(record, Skipped | Failed)
        ]


def _is_step(row: Row) -> bool:
    """Return whether a row is a whole training step of all ranks, no part that calibrates."""
    is_whole = row["rank"] is None and not row["calibrates"]
    return is_whole and row["status"] == "measured"


class Replay(ReplayLog, Table):
    """The log of a replay; a row per message of a step, by its median over the passes.

    Times are in seconds, not a number where nothing was timed. seconds: [rank][iteration].
    spans: [rank][pass][operation][start, duration], of passes of their own.
    """

    _declared = ()
    kind_of = staticmethod(lambda _: "")

    def rows(self) -> list[Row]:
        """Return the messages of a step: `comm_logs`."""
        return self.comm_logs

    def show(self) -> None:
        """Print what `stepmark replay` prints."""
        print("\n".join(self.lines()))  # noqa: T201

    def __repr__(self) -> str:
        seconds = float(median(self.epoch_times))
        return f"<Replay of {self.workload.name}: {seconds * 1e3:.2f} ms per iteration>"


@spells_keywords
def read_run(
    run: str | os.PathLike[str] = "latest", *, runs: str | os.PathLike[str] = "runs"
) -> Run:
    """Read a run by its path, its id, the beginning of one, or "latest".

    runs: the folder that holds them. Raises ConfigError where there is none.
    """
    return Run(find_run(Path(text(runs)), text(run)))


@spells_keywords
def measure(what: str | AnyCase | Workload, *words: object, **options: object) -> Run:
    """Measure on processes of this machine, as the command line does, and return the run.

    what: a verb, "op", "comm", "train" or "replay", followed by the positional arguments of its
    command: `measure("op", "gemm", m=512, n=512, k=512, dtype="bf16")`; or a workload, to
    replay; or a case of an earlier run, to measure again. options: those of the verb, which
    `options("op", "gemm")`, `options("comm")` and so on list; `out` is the folder of runs.

    Two things are only on the command line: `find_max` of `stepmark op`, a search over several
    runs, and measuring as a rank of torchrun, srun or mpirun.

    A case that fails is a row with status "failed", not an exception. Raises ConfigError for
    bad options, StepmarkError where nothing was measured.
    """
    if isinstance(what, str):
        return _measured(what, words, options)
    if isinstance(what, Workload):
        return _measured("replay", (what, *words), options)
    if not isinstance(what, OpCase | CommCase | TrainCase | ReplayCase):
        raise ConfigError("measure", what, "a verb such as 'op', a workload or a case")
    if words:
        raise ConfigError("arguments", words[0], "left out: a case says what is measured")
    own = options_of(what)
    return _carry_out(what.kind, read(type(own), (), options, base=plain(own)))


@spells_keywords
def replay(workload: str | os.PathLike[str] | Workload, **options: object) -> Replay:
    """Replay a workload on processes of this machine, and return its log of every message.

    options: those of `stepmark replay`, e.g. nproc=4, iters=5, compute="sleep". The run is in
    `out` (runs). Raises ConfigError for bad options, StepmarkError where a rank failed or the
    ranks' memory is too small.
    """
    with in_files((workload,)) as named:
        given = read(ReplayOptions, named, options)
        run = _carry_out("replay", given)
    for _, log in of_run(run.path, run.records, replay_verb.curves_of(given)):
        return Replay(**{field.name: getattr(log, field.name) for field in fields(log)})
    raise StepmarkError("; ".join(run._unmeasured()) or f"run {run.path}: no replay")


def _measured(verb: str, words: Sequence[object], options: dict[str, object]) -> Run:
    with in_files(words) as named:
        return _carry_out(verb, read(class_of(verb, named), named, options))


def _carry_out(verb: str, options: MeasureOptions) -> Run:
    """Measure as the verb does, and return the run."""
    _, make_plan = VERBS[verb]
    return measure_plan(verb, options, make_plan, resume=options.resume, force=options.force)


def measure_plan(
    verb: str,
    options: MeasureOptions | RunOptions,
    make_plan: Callable[[Any, Machine], Plan],
    *,
    resume: str | None = None,
    force: bool = False,
) -> Run:
    """Measure a plan and return the run. Raises KeyboardInterrupt after Ctrl-C."""
    if outer_launcher.is_rank():
        text = "measure starts its own ranks: under torchrun, srun or mpirun use the command"
        raise StepmarkError(f"{text} stepmark {verb} instead.")

    def planned() -> Plan:
        plan = make_plan(options, machine(options.device))
        return replace(plan, argv=(verb, *argv(options)))

    code, path = measured(planned, options.device, options.out, resume=resume, force=force)
    if code in (130, 143):
        raise KeyboardInterrupt
    if path is None or code == 2 or not (path / "run.json").is_file():
        raise StepmarkError(f"run {path}: nothing was measured.")
    return Run(path)


def class_of(verb: str, words: Sequence[object] = ()) -> type[MeasureOptions]:
    """Return the options of a verb that measures. Raises ConfigError."""
    if verb not in VERBS:
        raise ConfigError("measure", verb, _allowed(verb))
    options, _ = VERBS[verb]
    if options is not None:
        return options
    family = str(words[0]) if words else None
    if family is not None and family not in FAMILY_WORDS:
        raise not_one_of("family", family, FAMILY_WORDS)
    return options_class(family)


def _allowed(verb: str) -> str:
    """Return what a verb must be, for somebody who names an operator or a collective."""
    name = verb.lower().replace("-", "_")
    families = {family.replace("-", "_"): family for family in ALL_FAMILIES}
    if name in families:
        return f'a verb; did you mean measure("op", "{families[name]}", ...)?'
    if (name := collective_named(verb)) in list(Collective):
        return f'a verb; did you mean measure("comm", "{name}", ...)?'
    return f"one of {', '.join(VERBS)}, a workload or a case"
