"""Derive the noise of one launch of a collective from repeats of whole tables.

    python validation/launch_noise.py write    src/stepmark/data/launch_noise.toml

Sources: our own repeats of nccl-tests in results/, the published ones of
data/launch-repeats.csv, and for sweeps our own runs and sweeps that repeat what `comm`
measures. A table or a launch of a run is a launch. Collectives and placements of one machine
are taken together, by the method, one host or several, and the size; of the machines and the
sizes of a range the noisiest one counts.
"""

import csv
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from stepmark import text_tables  # noqa: E402
from stepmark.cases.sweep import Outcome  # noqa: E402
from stepmark.comparison.compare_verb import side_of_runs  # noqa: E402
from stepmark.comparison.comparison import Side  # noqa: E402
from stepmark.ground.units import GIB, KIB, MIB  # noqa: E402
from stepmark.store import sweeps  # noqa: E402

OUTPUT = ROOT / "src" / "stepmark" / "data" / "launch_noise.toml"
OWN = "results/*/nccl-tests-*-[0-9].txt"
# Runs of collectives on one machine, and of what they repeat each launch.
RUNS = (
    "results/h100-x4-comm-ahead-[0-9]",
    "results/h100-x4-predictions-[0-9]",
    "results/h200-x4-comm-graph-[0-9]",
    "results/h200-x4-comm-launches",
    "results/h200-x4-comm-queued-[0-9]",
)
SWEEPS = "results/*/sweep.json"
BANDS = (16 * KIB, 128 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 16 * GIB)
HEAD = """\
# Noise of one launch of a collective: standard deviation of the logarithm of the times that
# repeats of a table print. Do not edit: `python validation/launch_noise.py write` derives it.
# from_bytes, up_to_bytes: sizes, both included. sd: of the noisiest machine and size among
# them. df: launches of that machine, less one for each collective; its rows count once.
"""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Launches of one table: times by placement and size."""

    source: str
    method: str
    hosts: str  # "1" or "several"
    launches: tuple[Mapping[tuple[object, int], float], ...]


def own() -> Iterator[Repeats]:
    """Yield our own repeats."""
    files: dict[str, list[Path]] = {}
    for file in sorted(ROOT.glob(OWN)):
        files.setdefault(re.sub(r"-\d+\.txt$", "", str(file)), []).append(file)
    for repeats in files.values():
        tables = [text_tables.find(file)[0] for file in repeats]
        launches = tuple(
            {
                (reading.placement, reading.size_bytes): reading.time_s
                for reading in table.readings
                if reading.size_bytes and reading.time_s
            }
            for table in tables
        )
        yield Repeats(
            source=f"results/{repeats[0].parent.name}",
            method=tables[0].method,
            hosts="1" if tables[0].num_hosts == 1 else "several",
            launches=launches,
        )


def published() -> Iterator[Repeats]:
    """Yield the repeats of others."""
    tables: dict[tuple[str, ...], dict[str, dict[tuple[str, int], float]]] = {}
    with (ROOT / "validation" / "data" / "launch-repeats.csv").open() as file:
        for row in csv.DictReader(file):
            hosts = "1" if row["hosts"] == "1" else "several"
            key = (row["source"], row["method"], hosts, row["collective"])
            times = tables.setdefault(key, {}).setdefault(row["repeat"], {})
            times[row["placement"], int(row["bytes"])] = float(row["time_us"])
    for (source, method, hosts, _), launches in tables.items():
        yield Repeats(
            source=source, method=method, hosts=hosts, launches=tuple(launches.values())
        )


def runs() -> Iterator[Repeats]:
    """Yield what our own runs and sweeps repeat."""
    for pattern in RUNS:
        folders = sorted(ROOT.glob(pattern))
        yield from of_side(side_of_runs(pattern, folders), pattern)
    for file in sorted(ROOT.glob(SWEEPS)):
        sweep = sweeps.read(file.parent)
        for setting in sweep.settings:
            folders = [
                file.parent / "runs" / attempt.run
                for attempt in sweep.tries
                if attempt.setting == setting.name and attempt.outcome is Outcome.DONE
            ]
            if len(folders) > 1:
                side = side_of_runs(setting.name, folders)
                yield from of_side(side, f"results/{file.parent.name}")


def of_side(side: Side, source: str) -> Iterator[Repeats]:
    """Yield the collectives that have several launches, by method."""
    tables: dict[tuple[str, str], dict[str, dict[tuple[object, int], float]]] = {}
    for series in side.series:
        if series.size_bytes is None or len(series.launches) < 2:
            continue
        key = (str(series.fields["method"]), str(series.fields["family"]))
        case = frozenset(series.fields.items())
        for launch, values in series.launches.items():
            times = tables.setdefault(key, {}).setdefault(launch, {})
            times[case, series.size_bytes] = median(values)
    for (method, _), launches in tables.items():
        yield Repeats(
            source=source, method=method, hosts="1", launches=tuple(launches.values())
        )


def noise_by_size(
    members: Sequence[Repeats], source: str, low: int, high: int
) -> Iterator[tuple[float, int]]:
    """Yield the noise of each size of a machine above low, up to high, and its launches."""
    squares: dict[int, list[float]] = {}
    df: Counter[int] = Counter()
    for repeats in (repeats for repeats in members if repeats.source == source):
        common = set.intersection(*(set(launch) for launch in repeats.launches))
        keys = [key for key in repeats.launches[0] if key in common and low < key[1] <= high]
        for key in keys:
            logs = [math.log(launch[key]) for launch in repeats.launches]
            squares.setdefault(key[1], []).append(variance(logs))
        for size in {size for _, size in common}:
            df[size] += len(repeats.launches) - 1
    for size, variances in squares.items():
        yield math.sqrt(fmean(variances)), df[size]


def text() -> str:
    """Return the file."""
    groups: dict[tuple[str, str], list[Repeats]] = {}
    for repeats in (*own(), *published(), *runs()):
        groups.setdefault((repeats.method, repeats.hosts), []).append(repeats)
    parts = [HEAD]
    for (method, hosts), members in groups.items():
        low = 0
        for high in BANDS:
            noises = [
                (*noise, source)
                for source in sorted({repeats.source for repeats in members})
                for noise in noise_by_size(members, source, low, high)
            ]
            if noises:
                sd, df, source = max(noises)
                parts.append(
                    f"[[noise]]\nmethod = '{method}'\nhosts = '{hosts}'\n"
                    f"from_bytes = {low + 1}\nup_to_bytes = {high}\n"
                    f"sd = {sd:.4f}\ndf = {df}\nsource = '{source}'\n"
                )
            low = high
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    OUTPUT.write_text(text())
