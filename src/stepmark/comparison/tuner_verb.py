"""--emit-tuner: NCCL's choices under the winners, read from its log, as a tuner file."""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from stepmark.cases.record import Environment
from stepmark.cases.sweep import DEFAULT, Selection, Setting, Sweep, TunerChoice, cut
from stepmark.collectives.comm_options import CommOptions
from stepmark.collectives.comm_plan import refuse
from stepmark.comparison import sweep_run, tuner_text
from stepmark.comparison.recommendation import Advice
from stepmark.comparison.sweep_run import RunSettings
from stepmark.findings.log_facts import Choice
from stepmark.ground.errors import ConfigError, StepmarkError
from stepmark.ground.files import write_text
from stepmark.ground.options import argv, build
from stepmark.ground.options import options as options_in
from stepmark.ground.units import GIB, KIB, counts_text
from stepmark.job_logs.nccl_log import read_log
from stepmark.measuring import child
from stepmark.measuring.machine import machine
from stepmark.store.reader import read_info
from stepmark.store.sweeps import Journal

CHOSEN = ("NCCL_ALGO", "NCCL_PROTO")
# Variables that a line of the file can express; the others set the number of channels.
_EXPRESSIBLE = (
    *CHOSEN,
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
)
Logged = dict[tuple[str, int], TunerChoice]  # by collective and size
PLUGIN = "NCCL_TUNER_PLUGIN"
CONFIG = "NCCL_TUNER_CONFIG_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The file to write, the plugin that reads it, and the options of the command."""

    target: Path
    plugin: str | None
    options: CommOptions


def request(path: Path, plugin: str | None, sweep: Sweep, *, force: bool) -> Request:
    """Validate a sweep for a tuner file before anything is measured. Raises ConfigError."""
    if sweep.command[0] != "comm":
        raise ConfigError("emit-tuner", sweep.command[0], "only for comm")
    options = comm_options(sweep.command[1:])
    if others := [name for name in options.names if name not in tuner_text.COLLECTIVES]:
        supported = ", ".join(tuner_text.COLLECTIVES)
        raise ConfigError("emit-tuner", ", ".join(others), f"only for {supported}")
    variables = [name for name, _ in sweep.settings[0].variables]
    has_more = any(setting.flags or setting.python for setting in sweep.settings)
    if not set(variables) & set(CHOSEN) or has_more:
        rule = f"one of {' or '.join(CHOSEN)}, without --set and --python"
        raise ConfigError("emit-tuner", "the sweep", rule)
    if others := [name for name in variables if name not in _EXPRESSIBLE]:
        raise ConfigError(
            "emit-tuner",
            ", ".join(others),
            f"one of the variables that a file can say: {', '.join(_EXPRESSIBLE)}",
        )
    if any(note.startswith(f"{PLUGIN}=") for note in sweep.notes):
        raise ConfigError("emit-tuner", PLUGIN, "a sweep measured without a tuner plugin")
    if sweep.baseline != DEFAULT:
        raise ConfigError("baseline", sweep.baseline, "the default, for a tuner file")
    rule = "left out, for a tuner file: one communicator of all"
    refuse(options, ("group_split", "max_ctas", "ranks"), rule)
    refuse(
        options,
        ("register", "unalign", "cta_policy"),
        "left out: a tuner file is for all buffers",
    )
    if path.exists() and not force:
        raise ConfigError("emit-tuner", path, "a file that does not exist yet, or --force")
    if not path.resolve().parent.is_dir():
        raise ConfigError("emit-tuner", path, "a file in a folder that exists")
    return Request(target=path, plugin=plugin, options=options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("command", message, "words that stepmark comm reads")


def comm_options(words: Sequence[str]) -> CommOptions:
    """Return the options of a comm command, as its verb reads them. Raises ConfigError."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option in options_in(CommOptions):
        if option.argument:
            parser.add_argument(option.name, nargs="*")
        elif option.is_switch:
            parser.add_argument(
                *option.spellings, dest=option.name, action="store_const", const=True
            )
        else:
            parser.add_argument(*option.spellings, dest=option.name)
    return build(CommOptions, vars(parser.parse_intermixed_args(words)))


def check_device(request: Request) -> None:
    """Refuse a device on which NCCL does not run. Raises ConfigError."""
    if machine(request.options.device).device != "cuda":
        raise ConfigError("emit-tuner", "cpu", "only on accelerators: gloo has no tuner")


def emit(
    journal: Journal,
    advice: Advice,
    request: Request,
    settings: RunSettings,
    signals: Sequence[int],
) -> tuple[list[str], int]:
    """Probe, write, and with a plugin verify. Returns remarks and the exit code.

    Raises ProbeError where NCCL's choices could not be read. No file is written where the
    baseline stays: it would pin what NCCL does anyway.
    """
    winners = {pick.winner for pick in advice.picks if pick.winner}
    if not winners:
        return ["no tuner file: the default stays everywhere"], 0
    environment, size = _measured_on(journal, advice)
    every = tuple(tuner_text.COLLECTIVES)
    probe = Probe(
        journal=journal,
        options=request.options,
        num_ranks=size["num_ranks"],
        settings=settings,
        signals=signals,
    )
    # NCCL refuses a collective without the algorithm that a winner forces, so only these.
    logged = {advice.baseline: probe.logged(advice.baseline, "default", every)}
    for number, name in enumerate(sorted(winners), 1):
        logged[name] = probe.logged(name, f"winner{number}", request.options.names)
    choices = choose(logged, advice)
    try:
        rules = tuner_text.rules(choices, **size)
    except ConfigError as error:
        raise ProbeError(str(error)) from None
    text = tuner_text.text_of(rules, _facts(journal.sweep, environment, **size))
    write_text(request.target, text, "emit-tuner")
    remarks = [f"tuner file: {request.target} ({len(rules)} lines)"]
    if not request.plugin:
        return [*remarks, "not verified: no tuner plugin (--tuner-plugin PATH)"], 0
    more = {PLUGIN: request.plugin, CONFIG: str(request.target.resolve())}
    verified = probe.logged(advice.baseline, "verify", every, more)
    wrong = tuner_text.mismatches(rules, verified.values(), **size)
    wrong += [
        f"{choice.collective} {choice.size_bytes} bytes: not in NCCL's log"
        for choice in choices
        if (choice.collective, choice.size_bytes) not in verified
    ]
    counts = Counter(collective for collective, _ in verified)
    sizes = ", ".join(f"{collective} {count}" for collective, count in counts.items())
    outcome = f"sizes seen: {sizes}; {len(wrong)} not as told"
    return [*remarks, f"verified with {request.plugin}, {outcome}", *wrong], 1 if wrong else 0


def choose(logged: Mapping[str, Logged], advice: Advice) -> list[TunerChoice]:
    """Return the winner's choice at each size, or the baseline's where no winner is known.

    Lines that differ in placement or type share a size: it is won when one setting wins all.
    """
    won: dict[str, dict[int, set[str | None]]] = {}
    for pick in advice.picks:
        name = str(pick.line.fields.get("family"))
        size = pick.line.size_bytes
        if size is not None:
            won.setdefault(name, {}).setdefault(size, set()).add(pick.winner)
    choices = []
    for collective, size in sorted({key for by_size in logged.values() for key in by_size}):
        winner = _winner(won.get(collective, {}), size) or advice.baseline
        if (choice := logged[winner].get((collective, size))) is not None:
            choices.append(choice)
    return choices


def _winner(won: Mapping[int, set[str | None]], size: int) -> str | None:
    """Return the winner at the nearest measured size; None outside the measured range."""
    sizes = sorted(won)
    if not sizes or not sizes[0] <= size <= sizes[-1]:
        return None
    nearest = sizes[0]
    for smaller, larger in itertools.pairwise(sizes):
        nearest = larger if size > cut(smaller, larger) else nearest
    return next(iter(won[nearest])) if len(won[nearest]) == 1 else None


def _measured_on(journal: Journal, advice: Advice) -> tuple[Environment, dict[str, int]]:
    """Return the environment of a run of the sweep, and its numbers of nodes and ranks."""
    sweep = journal.sweep
    run = next(each.run for each in sweep.tries if (each.round, each.setting) in sweep.done)
    environment = read_info(journal.path / "runs" / run).environment
    ranks = {pick.line.fields.get("num_ranks") for pick in advice.picks}
    if len(ranks) != 1 or not isinstance(num_ranks := ranks.pop(), int):
        raise ConfigError("emit-tuner", "several", "communicators of one number of ranks")
    hosts = {device.host for device in environment.devices}
    return environment, {"num_nodes": max(1, len(hosts)), "num_ranks": num_ranks}


def _facts(sweep: Sweep, environment: Environment, num_nodes: int, num_ranks: int) -> list[str]:
    devices = counts_text(device.name for device in environment.devices)
    settings = "; ".join(setting.name for setting in sweep.settings)
    versions = environment.versions
    rounds = sweep.selection or Selection(rounds=sweep.repeats)
    nccl = versions.get("nccl") or versions.get("rccl") or "unknown"
    return [
        f"Written by stepmark {sweep.stepmark}, {datetime.now(UTC):%Y-%m-%d}, "
        f"sweep {sweep.sweep_id}.",
        f"Measured with NCCL {nccl} on {devices}: {num_ranks} ranks, "
        f"{num_nodes} node{'s' if num_nodes > 1 else ''}.",
        f"Command: stepmark {' '.join(sweep.command)}",
        f"Settings: {settings}. Rounds: {rounds.rounds}, and {rounds.fresh} fresh ones.",
    ]


class ProbeError(StepmarkError):
    """NCCL's choices could not be read. The measurements are kept."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A run of the command with NCCL's log on, whose times are not used."""

    journal: Journal
    options: CommOptions  # of the command
    num_ranks: int
    settings: RunSettings
    signals: Sequence[int]

    def logged(
        self,
        name: str,
        folder: str,
        names: tuple[str, ...],
        more: Mapping[str, str] | None = None,
    ) -> Logged:
        """Return NCCL's choices for these collectives at powers of two and measured sizes."""
        settings = {setting.name: setting for setting in self.journal.sweep.settings}
        measured = replace(
            self.options, iters=1, warmup_iters=1, check=0, launches=1, budget=None
        )
        # Every power of two, in every form that a collective has.
        powers = replace(
            measured,
            names=names,
            begin=KIB,
            end=GIB,
            factor=2.0,
            step=None,
            placement="both",
            model=None,
            mbs=None,
            seq_len=None,
            message=None,
            imbalance=None,
        )
        choices: Logged = {}
        for part, options in (("powers", powers), ("measured", measured)):
            path = self.journal.path / "probe" / folder / part
            self._run(path, settings[name], options, more or {})
            choices |= logged_in(path, self.num_ranks)
        return choices

    def _run(
        self,
        folder: Path,
        setting: Setting,
        options: CommOptions,
        more: Mapping[str, str],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("nccl.*"):
            stale.unlink()
        log = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,TUNING,ENV",
            "NCCL_DEBUG_FILE": f"{folder.resolve()}/nccl.%h.%p",
        }
        self.settings.report(f"probe {folder.relative_to(self.journal.path)}: {setting.name}")
        ended = child.run(
            [*self.settings.program, "comm", *argv(replace(options, out=str(folder)))],
            {**sweep_run.environment(setting, self.settings.base), **log, **more},
            out=folder / "out",
            err=folder / "err",
            limit_s=self.journal.sweep.timeout_s,
            signals=self.signals,
        )
        if ended.exit_code or ended.timed_out or ended.interrupted:
            cut_short = ended.timed_out or ended.interrupted
            why = "was cut short" if cut_short else f"ended with {ended.exit_code}"
            raise ProbeError(f"probe of {setting.name} {why}: see {folder / 'err'}")


def logged_in(folder: Path, num_ranks: int) -> Logged:
    """Return NCCL's choices by collective and size; of several the most frequent.

    Symmetric kernels and copy engines are left out: no tuner decides on them.
    Raises ProbeError where there is no line, as before NCCL 2.24, whose lines lack channels.
    """
    calls: dict[tuple[str, int], Counter[TunerChoice]] = {}
    for file in _with_text(folder):
        for line in read_log([file], num_ranks=num_ranks).choices:
            if (choice := _choice(line)) is not None:
                key = (choice.collective, choice.size_bytes)
                calls.setdefault(key, Counter())[choice] += line.calls
    if not calls:
        raise ProbeError(
            f"no choice with channels in NCCL's log: {folder} (needs NCCL 2.24 or later)"
        )
    return {key: counter.most_common(1)[0][0] for key, counter in calls.items()}


def _with_text(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("nccl.*")) if file.stat().st_size]


def _choice(line: Choice) -> TunerChoice | None:
    algorithm = tuner_text.spelled(line.algorithm)
    protocol = tuner_text.spelled(line.protocol)
    if not (line.message_bytes is not None and line.channels and algorithm and protocol):
        return None
    if line.collective not in tuner_text.COLLECTIVES:
        return None
    return TunerChoice(
        collective=line.collective,
        size_bytes=line.message_bytes,
        algorithm=algorithm,
        protocol=protocol,
        num_channels=line.channels,
    )
