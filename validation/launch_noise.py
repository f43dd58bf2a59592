"""Derive the noise of one launch of a collective from repeats of whole tables.

    python validation/launch_noise.py write    src/stepmark/data/launch_noise.toml

Sources: our own repeats of nccl-tests in results/ and the published ones of
data/launch-repeats.csv. A table is a launch. Machines, collectives and placements are taken
together, by the method, one host or several, and the size.
"""

import csv
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import variance

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

from stepmark import text_tables  # noqa: E402
from stepmark.ground.units import GIB, KIB, MIB  # noqa: E402

OUTPUT = ROOT / "src" / "stepmark" / "data" / "launch_noise.toml"
OWN = "results/*/nccl-tests-*-[0-9].txt"
BANDS = (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 16 * GIB)
HEAD = """\
# Noise of one launch of a collective: standard deviation of the logarithm of the times that
# repeats of a table print. Do not edit: `python validation/launch_noise.py write` derives it.
# from_bytes, up_to_bytes: sizes, both included. sd: over all rows of these sizes. df: launches
# of each machine and collective, less one, in which the rows of a launch count once.
"""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Launches of one table: times by placement and size."""

    source: str
    method: str
    hosts: str  # "1" or "several"
    launches: tuple[Mapping[tuple[str, int], float], ...]


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


def text() -> str:
    """Return the file."""
    groups: dict[tuple[str, str], list[Repeats]] = {}
    for repeats in (*own(), *published()):
        groups.setdefault((repeats.method, repeats.hosts), []).append(repeats)
    parts = [HEAD]
    for (method, hosts), members in groups.items():
        low = 0
        for high in BANDS:
            squares, rows, df = 0.0, 0, 0
            sources = set()
            for repeats in members:
                common = set.intersection(*(set(launch) for launch in repeats.launches))
                sizes = [key for key in common if low < key[1] <= high]
                for key in sizes:
                    logs = [math.log(launch[key]) for launch in repeats.launches]
                    squares += variance(logs) * (len(logs) - 1)
                    rows += len(logs) - 1
                if sizes:
                    df += len(repeats.launches) - 1
                    sources.add(repeats.source)
            if rows:
                parts.append(
                    f"[[noise]]\nmethod = '{method}'\nhosts = '{hosts}'\n"
                    f"from_bytes = {low + 1}\nup_to_bytes = {high}\n"
                    f"sd = {math.sqrt(squares / rows):.4f}\ndf = {df}\n"
                    f"source = '{', '.join(sorted(sources))}'\n"
                )
            low = high
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    OUTPUT.write_text(text())
