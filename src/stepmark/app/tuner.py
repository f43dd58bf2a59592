"""--emit-tuner: what NCCL runs under the winners, read from its log, as a tuner file."""

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from stepmark.app.machine import machine
from stepmark.app.sweep_run import Means, environment
from stepmark.core.comm_options import CommOptions
from stepmark.core.errors import ConfigError, StepmarkError
from stepmark.core.log_facts import Choice
from stepmark.core.options import argv, build, plain
from stepmark.core.options import options as options_in
from stepmark.core.record import RunInfo
from stepmark.core.sweep import DEFAULT, Setting, Sweep, TunerChoice, cut
from stepmark.core.units import GIB, KIB
from stepmark.launch import child
from stepmark.report import tuner
from stepmark.report.recommendation import Advice
from stepmark.store.files import write_text
from stepmark.store.reader import read_info
from stepmark.store.sweeps import Journal
from stepmark.trace.nccl_log import read_log

CHOSEN = ("NCCL_ALGO", "NCCL_PROTO")
# What else a line of the file can express: the number of channels.
_CARRIED = (
    *CHOSEN,
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
)
Logged = dict[tuple[str, int], TunerChoice]  # by collective and size
PLUGIN, CONFIG = "NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where the file is to be, the plugin that reads it, and the options of the command."""

    target: Path
    plugin: str | None
    options: CommOptions


def request(path: Path, plugin: str | None, sweep: Sweep, *, force: bool) -> Request:
    """Refuses, before anything is measured, what no tuner file can say."""
    if sweep.command[0] != "comm":
        raise ConfigError("emit-tuner", sweep.command[0], "only for comm")
    options = comm_options(sweep.command[1:])
    if others := [name for name in options.names if name not in tuner.COLLECTIVES]:
        known = ", ".join(tuner.COLLECTIVES)
        raise ConfigError("emit-tuner", ", ".join(others), f"only for {known}")
    variables = [name for name, _ in sweep.settings[0].variables]
    if not set(variables) & set(CHOSEN) or sweep.settings[0].flags:
        raise ConfigError(
            "emit-tuner", "the sweep", f"one of {' or '.join(CHOSEN)}, without --set"
        )
    if others := [name for name in variables if name not in _CARRIED]:
        raise ConfigError(
            "emit-tuner",
            ", ".join(others),
            f"one of the variables that a file can say: {', '.join(_CARRIED)}",
        )
    if any(note.startswith(f"{PLUGIN}=") for note in sweep.notes):
        raise ConfigError("emit-tuner", PLUGIN, "a sweep measured without a tuner plugin")
    if sweep.baseline != DEFAULT:
        raise ConfigError("baseline", sweep.baseline, "the default, for a tuner file")
    given = plain(options)
    for name in ("group_split", "max_ctas", "ranks"):
        if name in given:
            allowed = "left out, for a tuner file: one communicator of all"
            raise ConfigError(name, given[name], allowed)
    if path.exists() and not force:
        raise ConfigError("emit-tuner", path, "a file that does not exist yet, or --force")
    if not path.resolve().parent.is_dir():
        raise ConfigError("emit-tuner", path, "a file in a folder that exists")
    return Request(target=path, plugin=plugin, options=options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("command", message, "words that stepmark comm reads")


def comm_options(words: Sequence[str]) -> CommOptions:
    """The options of a comm command, as its verb reads them. Raises ConfigError."""
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
    """Raises ConfigError where NCCL does not run."""
    if machine(request.options.device).device != "cuda":
        raise ConfigError("emit-tuner", "cpu", "only on accelerators: gloo has no tuner")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a file is measured with, besides the settings."""

    info: RunInfo
    num_nodes: int
    num_ranks: int


def emit(
    journal: Journal, advice: Advice, asked: Request, means: Means, signals: Sequence[int]
) -> tuple[list[str], int]:
    """Probe, write, and with a plugin verify; what to say and the exit code.

    Raises ProbeError where NCCL's choices could not be read. No file is written where the
    baseline stays: it would pin what NCCL does anyway.
    """
    winners = {pick.winner for pick in advice.picks if pick.winner}
    if not winners:
        return ["no tuner file: the default stays everywhere"], 0
    place = _place(journal, advice)
    every = tuple(tuner.COLLECTIVES)
    probe = Probe(
        journal=journal,
        options=asked.options,
        num_ranks=place.num_ranks,
        means=means,
        signals=signals,
    )
    # NCCL refuses a collective that has not the algorithm which a winner forces.
    logged = {advice.baseline: probe.logged(advice.baseline, "default", every)}
    for at, name in enumerate(sorted(winners), 1):
        logged[name] = probe.logged(name, f"winner{at}", asked.options.names)
    chosen = choose(logged, advice)
    try:
        found = tuner.rules(chosen, num_nodes=place.num_nodes, num_ranks=place.num_ranks)
    except ConfigError as error:
        raise ProbeError(str(error)) from None
    text = tuner.text_of(found, _facts(journal.sweep, place))
    write_text(asked.target, text, "emit-tuner")
    said = [f"tuner file: {asked.target} ({len(found)} lines)"]
    if not asked.plugin:
        return [*said, "not verified: no tuner plugin (--tuner-plugin PATH)"], 0
    more = {PLUGIN: asked.plugin, CONFIG: str(asked.target.resolve())}
    seen = probe.logged(advice.baseline, "verify", every, more)
    wrong = _verified(found, chosen, seen, place)
    shown = ", ".join(
        f"{name} {count}" for name, count in Counter(name for name, _ in seen).items()
    )
    said.append(f"verified with {asked.plugin}, sizes seen: {shown}; {len(wrong)} not as told")
    return said + wrong, 1 if wrong else 0


def _verified(
    found: Sequence[tuner.Rule], chosen: Sequence[TunerChoice], seen: Logged, place: "_Place"
) -> list[str]:
    """What NCCL did not do as the file says, and what it was not seen to do at all."""
    missing = [one for one in chosen if (one.collective, one.size_bytes) not in seen]
    return tuner.mismatches(
        found, seen.values(), num_nodes=place.num_nodes, num_ranks=place.num_ranks
    ) + [f"{one.collective} {one.size_bytes} bytes: not in NCCL's log" for one in missing]


def choose(logged: Mapping[str, Logged], advice: Advice) -> list[TunerChoice]:
    """At each size the winner's choice; the baseline's where none won or none was measured.

    Lines that differ in placement or type share a size: it is won when one setting wins all.
    """
    won: dict[str, dict[int, set[str | None]]] = {}
    for pick in advice.picks:
        name, size = str(pick.line.fields.get("family")), pick.line.size_bytes
        if size is not None:
            won.setdefault(name, {}).setdefault(size, set()).add(pick.winner)
    found = []
    for collective, size in sorted({key for held in logged.values() for key in held}):
        winner = _winner(won.get(collective, {}), size) or advice.baseline
        if (choice := logged[winner].get((collective, size))) is not None:
            found.append(choice)
    return found


def _winner(won: Mapping[int, set[str | None]], size: int) -> str | None:
    """Between measured sizes the nearer one's; outside of them nothing is known."""
    sizes = sorted(won)
    if not sizes or not sizes[0] <= size <= sizes[-1]:
        return None
    at = sizes[0]
    for smaller, larger in itertools.pairwise(sizes):
        at = larger if size > cut(smaller, larger) else at
    return next(iter(won[at])) if len(won[at]) == 1 else None


def _place(journal: Journal, advice: Advice) -> _Place:
    run = next(
        one.run for one in journal.sweep.tries if (one.round, one.setting) in journal.sweep.done
    )
    info = read_info(journal.path / "runs" / run)
    ranks = {pick.line.fields.get("num_ranks") for pick in advice.picks}
    if len(ranks) != 1 or not isinstance(found := ranks.pop(), int):
        raise ConfigError("emit-tuner", "several", "communicators of one number of ranks")
    hosts = {one.host for one in info.environment.devices}
    return _Place(info=info, num_nodes=max(1, len(hosts)), num_ranks=found)


def _facts(sweep: Sweep, place: _Place) -> list[str]:
    found = place.info.environment
    devices = Counter(device.name for device in found.devices)
    shown = ", ".join(f"{count} x {name}" for name, count in devices.items())
    settings = "; ".join(one.name for one in sweep.settings)
    nccl = found.versions.get("nccl") or found.versions.get("rccl") or "unknown"
    return [
        f"Written by stepmark {sweep.stepmark}, {datetime.now(UTC):%Y-%m-%d}, "
        f"sweep {sweep.sweep_id}.",
        f"Measured with NCCL {nccl} on {shown}: {place.num_ranks} ranks, "
        f"{place.num_nodes} node{'s' if place.num_nodes > 1 else ''}.",
        f"Command: stepmark {' '.join(sweep.command)}",
        f"Settings: {settings}. Rounds: {sweep.repeats}.",
    ]


class ProbeError(StepmarkError):
    """What NCCL chooses could not be read; what was measured is kept."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Runs the command with NCCL's log on; no time is taken from these runs."""

    journal: Journal
    options: CommOptions  # of the command
    num_ranks: int
    means: Means
    signals: Sequence[int]

    def logged(
        self,
        name: str,
        folder: str,
        names: tuple[str, ...],
        more: Mapping[str, str] | None = None,
    ) -> Logged:
        """What NCCL chose for these collectives, at powers of two and at the measured sizes."""
        setting = next(one for one in self.journal.sweep.settings if one.name == name)
        measured = replace(
            self.options, iters=1, warmup_iters=1, check=0, launches=1, budget=None
        )
        # Every power of two, of every form that a collective has; the rest stays.
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
        at = self.journal.path / "probe" / folder
        found: Logged = {}
        for part, options in (("powers", powers), ("measured", measured)):
            self._run(at / part, setting, options, more or {})
            found |= logged_in(at / part, self.num_ranks)
        return found

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
        self.means.say(f"probe {folder.relative_to(self.journal.path)}: {setting.name}")
        ended = child.run(
            [*self.means.program, "comm", *argv(replace(options, out=str(folder)))],
            {**environment(setting, self.means.base), **log, **more},
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
    """NCCL's TUNING lines by collective and size; of several the most frequent.

    Symmetric kernels and copy engines are left out: no tuner decides on them.
    Raises ProbeError where there is no line, as before NCCL 2.24, whose lines lack channels.
    """
    calls: dict[tuple[str, int], Counter[TunerChoice]] = {}
    for file in _with_text(folder):
        for one in read_log([file], num_ranks=num_ranks).choices:
            if (choice := _choice(one)) is not None:
                key = (choice.collective, choice.size_bytes)
                calls.setdefault(key, Counter())[choice] += one.calls
    if not calls:
        raise ProbeError(
            f"no choice with channels in NCCL's log: {folder} (needs NCCL 2.24 or later)"
        )
    return {key: held.most_common(1)[0][0] for key, held in calls.items()}


def _with_text(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("nccl.*")) if file.stat().st_size]


def _choice(one: Choice) -> TunerChoice | None:
    algorithm, protocol = tuner.spelled(one.algorithm), tuner.spelled(one.protocol)
    if not (one.message_bytes is not None and one.channels and algorithm and protocol):
        return None
    if one.collective not in tuner.COLLECTIVES:
        return None
    return TunerChoice(
        collective=one.collective,
        size_bytes=one.message_bytes,
        algorithm=algorithm,
        protocol=protocol,
        num_channels=one.channels,
    )
