"""Derive the published times that `% ref` of an operator compares with.

    python validation/reference_times.py

Writes src/stepmark/data/reference.csv from the runs in results/, by the names of their folders:
the median seconds of every operator that was measured on one kind of device and had no wrong
result. Of several times of a case the last counts.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT / "src") in sys.path else [str(ROOT / "src")]

from stepmark.cases.case import OpCase  # noqa: E402
from stepmark.store.reader import latest, list_runs, read_info, read_records  # noqa: E402
from stepmark.tables.launches import Launches, pooled  # noqa: E402

OUTPUT = ROOT / "src" / "stepmark" / "data" / "reference.csv"
HEAD = ("run", "device", "case", "time_s")


def rows() -> Iterator[tuple[str, str, str, float]]:
    """Yield run_id, device, case_id and median seconds of published operators."""
    for path in list_runs(ROOT / "results"):
        info = read_info(path)
        names = {device.name for device in info.environment.devices}
        if len(names) != 1:
            continue
        [device] = names
        records = (each for each in read_records(path) if isinstance(each.case, OpCase))
        for launches in pooled(latest(records), Launches):
            if launches.measured and not launches.num_wrong:
                yield info.run_id, device, launches.case.case_id, launches.time_s


def main() -> None:
    with OUTPUT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        writer.writerows(rows())


if __name__ == "__main__":
    main()
