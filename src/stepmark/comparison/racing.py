"""A race of settings in rounds: which are dropped, when it is decided, how it is confirmed.

After each round a setting is dropped if at every line (size) it is
certainly not faster by the gain that counts than the fastest one there, or than the baseline
where it is the fastest itself. The test of a look is one-sided. All looks together drop a given
setting, which is the fastest somewhere by more than that gain, with probability WRONGLY_DROPPED
at most: look k may spend 1 / (k (k + 1)) of it, the sum of which is 1 for any number of looks
(Lan and DeMets, Biometrika 70, 1983), divided by the number of settings that may be the fastest
one (Bonferroni). Lines need no correction, because a setting is dropped only if it is beaten at
all of them (Berger, Technometrics 24, 1982). One round shows no variance: it is judged only
where repeats on other machines do.
validation/verdicts.py counts the errors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from stepmark.ground.launches import Row
from stepmark.ground.ratio import CONFIDENCE, Ratio, Verdict, t_quantile
from stepmark.ground.verdicts import judge

WRONGLY_DROPPED = 0.01
LEAST_ROUNDS = 2  # that show a variance
LEAST_FRESH = 3  # fresh rounds that confirm a gain, if the budget has room for them
_POWER = 0.9  # with which a gain that is as large as it was seen is confirmed

Lines = Mapping[int, Row]  # a setting against the baseline, by line; a launch is a round


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceState:
    """The settings that are out of the race, and whether more rounds can change the result."""

    dropped: frozenset[str]
    is_decided: bool


def level(rounds: int, num_settings: int) -> float:
    """Return the level of the test of one setting after these rounds."""
    return WRONGLY_DROPPED / (rounds * (rounds + 1)) / num_settings


def standing(
    settings: Mapping[str, Lines], *, rounds: int, num_settings: int, gain: float
) -> RaceState:
    """Return the standing after some rounds, which all these settings have.

    settings: those that are still in the race, apart from the baseline. num_settings: how many
    began, apart from the baseline. gain: a share of the time; smaller differences do not count.
    """
    if not settings:
        return RaceState(dropped=frozenset(), is_decided=True)
    fastest = _fastest(settings)
    p_limit = level(rounds, num_settings)
    beaten = {name: _beaten(name, settings, fastest, p_limit, gain) for name in settings}
    out = {name for name, lines in settings.items() if beaten[name] == lines.keys()}
    compromise = _compromise(settings, gain)
    if (
        compromise in out
        and _beaten(compromise, settings, {}, p_limit, gain) != beaten[compromise]
    ):
        out.remove(compromise)
    dropped = frozenset(out)
    return RaceState(
        dropped=dropped,
        is_decided=_is_decided(settings, fastest, beaten, dropped),
    )


def _log_speed(row: Row) -> float:
    return row.base.mean - row.other.mean


def _fastest(settings: Mapping[str, Lines]) -> dict[int, str | None]:
    """Return the fastest setting of each line; None where it is the baseline."""
    fastest: dict[int, str | None] = {}
    for line in {line for lines in settings.values() for line in lines}:
        speeds = {
            name: _log_speed(rows[line]) for name, rows in settings.items() if line in rows
        }
        name = max(speeds, key=speeds.__getitem__)
        fastest[line] = name if speeds[name] > 0 else None
    return fastest


def _compromise(settings: Mapping[str, Lines], gain: float) -> str | None:
    """Return the fastest on average of those that lose nowhere; None for the baseline.

    It stays in the race, although others may be faster at every line: they may lose elsewhere.
    """
    means = {
        name: fmean(map(_log_speed, lines.values()))
        for name, lines in settings.items()
        if all(_log_speed(row) > -math.log1p(gain) for row in lines.values())
    }
    name = max(means, key=means.__getitem__, default=None)
    return name if name is not None and means[name] > 0 else None


def _beaten(
    name: str,
    settings: Mapping[str, Lines],
    fastest: Mapping[int, str | None],
    p_limit: float,
    gain: float,
) -> set[int]:
    """Return the lines at which it is certainly not faster than the fastest one by `gain`.

    It is compared with the baseline where it is the fastest itself, or none is named.
    """
    rows: dict[int, Row] = {}
    for line, row in settings[name].items():
        rows[line], first = row, fastest.get(line)
        if first is not None and first != name:
            rows[line] = replace(row, base=settings[first][line].other)
    ratios = judge(list(rows.values()))
    limit = 1 / (1 + gain) - 1  # slower by a negative share: faster
    p_values = {line: r.p_slower(limit) for line, r in zip(rows, ratios, strict=True)}
    return {line for line, p in p_values.items() if p is not None and p <= p_limit}


def _is_decided(
    settings: Mapping[str, Lines],
    fastest: Mapping[int, str | None],
    beaten: Mapping[str, set[int]],
    dropped: frozenset[str],
) -> bool:
    """Whether every line has a fastest setting, and a verdict on it against the baseline."""
    left = settings.keys() - dropped
    if not left:
        return True
    if any(
        line not in beaten[name]
        for name in left
        for line in settings[name]
        if name != fastest[line]
    ):
        return False
    for name in left & set(fastest.values()):
        ratios = judge(list(settings[name].values()))
        won = (
            ratio
            for line, ratio in zip(settings[name], ratios, strict=True)
            if fastest[line] == name
        )
        if any(ratio.verdict is Verdict.CANNOT_TELL for ratio in won):
            return False
    return True


def fresh_rounds(gains: Sequence[Ratio], *, rounds: int, least: int, most: int) -> int:
    """Return how many fresh rounds confirm these gains, if launches vary as those of now.

    gains: ratios over `rounds` rounds. At least `least`; `most` if that is more and fewer do
    not confirm all of them.
    """
    counts = range(least, most + 1)
    return next(
        (count for count in counts if all(_confirms(g, gains, rounds, count) for g in gains)),
        max(least, most),
    )


def _confirms(gain: Ratio, gains: Sequence[Ratio], rounds: int, count: int) -> bool:
    """Whether so many rounds show a gain with _POWER, in Holm's first step over all gains."""
    if gain.se_log is None or gain.df is None:
        return False
    error = gain.se_log * math.sqrt(rounds / count)
    own_df = (gain.df - gain.repeats_df) * (count - 1) // max(1, rounds - 1)
    df = max(1, gain.repeats_df + own_df)
    p_row = 1 - (1 - CONFIDENCE) / len(gains)
    slow = gain.slow if count < LEAST_FRESH else 0.0
    needed = slow + (t_quantile(p_row, df) + t_quantile(_POWER, df)) * error
    return math.log(gain.speed) >= needed
