"""What NCCL runs a message with, read from its own log of short runs that time nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepmark.cli.sweep_run import Means
from stepmark.cli.sweep_settings import environment
from stepmark.core.errors import StepmarkError
from stepmark.core.sweep import Setting, TunerChoice
from stepmark.core.units import GIB, KIB
from stepmark.launch import child
from stepmark.report import tuner
from stepmark.store.sweeps import Journal

if TYPE_CHECKING:
    from stepmark.core.log_facts import Choice

# Every power of two, of every form that a collective has; the rest of the command stays.
_SIZES = {"begin": str(KIB), "end": str(GIB), "factor": 2.0}
_NO_MORE = dict.fromkeys(("step", "placement", "model", "mbs", "seq_len", "message", "spread"))
_BRIEF = {"iters": 1, "warmup_iters": 1, "check": 0, "launches": None, "budget": None}

Logged = dict[tuple[str, int], TunerChoice]


class ProbeError(StepmarkError):
    """What NCCL chooses could not be read; what was measured is kept."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Runs the command with NCCL's log on; no time is taken from these runs."""

    journal: Journal
    values: Mapping[str, Any]  # of the command, as comm's flags
    names: tuple[str, ...]  # collectives of the command
    num_ranks: int
    means: Means
    signals: Sequence[int]

    def logged(
        self,
        name: str,
        folder: str,
        names: Sequence[str],
        more: Mapping[str, str] | None = None,
    ) -> Logged:
        """What NCCL chose for these collectives, at powers of two and at the measured sizes."""
        setting = next(one for one in self.journal.sweep.settings if one.name == name)
        given = {**self.values, **_BRIEF}
        everywhere = {**given, **_SIZES, **_NO_MORE}
        at = self.journal.path / "probe" / folder
        found: Logged = {}
        for part, held, values in (
            ("powers", names, everywhere),
            ("measured", self.names, given),
        ):
            self._run(at / part, setting, held, values, more or {})
            found |= logged_in(at / part, self.num_ranks)
        return found

    def _run(
        self,
        folder: Path,
        setting: Setting,
        names: Sequence[str],
        values: Mapping[str, Any],
        more: Mapping[str, str],
    ) -> None:
        from stepmark.cli.comm import as_arguments  # noqa: PLC0415

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
            [*self.means.program, *as_arguments(list(names), values), "--out", str(folder)],
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
    from stepmark.trace.nccl_log import read_log  # noqa: PLC0415

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


def _choice(one: "Choice") -> TunerChoice | None:
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
