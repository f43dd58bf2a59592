"""PARAM's line: percentiles over ranks, of each rank's mean."""

import numpy as np
import pytest

from stepmark.collectives.peer_formats import param_comms
from stepmark.model.collectives import Collective

from .comm_records import comm_case, comm_measured, comm_run, flat, full_comm_run


def cells(text: str) -> list[str]:
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("\tCOMMS-RES-") and "p50" not in line
    )
    return line.split()


def test_percentiles_are_over_means_of_ranks() -> None:
    seconds = [[1e-4 * (rank + 1), 3e-4 * (rank + 1)] for rank in range(8)]
    case = comm_case(size=2**26)
    ((name, text),) = param_comms([comm_measured(case, seconds)], comm_run()).items()
    assert name == "all_reduce-bfloat16"
    lead, size, elements, p50, p75, p95, low, high, algbw, busbw, total = cells(text)
    assert lead == "COMMS-RES-all_reduce-bfloat16"
    assert (int(size), int(elements)) == (2**26, 2**25)
    means = [200.0 * (rank + 1) for rank in range(8)]
    wanted = [*np.percentile(means, [50, 75, 95]), 200.0, 1600.0]
    assert [float(v) for v in (p50, p75, p95, low, high)] == pytest.approx(wanted)
    assert float(algbw) == pytest.approx(2**26 / 900e-6 / 1e9, abs=5e-4)
    assert float(busbw) == pytest.approx(float(algbw) * 2 * 7 / 8, abs=1e-3)
    assert total == "0.0"


def test_heading_stands_over_its_column() -> None:
    text = param_comms([flat(comm_case(Collective.ALL_TO_ALL), 1e-3)], comm_run())
    note, heading, line = text["all_to_all-bfloat16"].splitlines()
    assert "TotalTime is not measured there" in note
    assert len(heading) == len(line)
    for words, cell in (("nElementsPerRank", str(2**25 // 8)), ("AlgBW(GB/s)", "67.109")):
        end = heading.index(words) + len(words)
        assert line[:end].endswith(cell)


def test_pairs_barriers_and_wrong_data_are_left_out() -> None:
    names = param_comms(full_comm_run(), comm_run())
    assert {"all_reduce-bfloat16", "all_reduce-bfloat16-in-place-graph"} <= names.keys()
    assert not [
        name for name in names if "p2p" in name or "barrier" in name or "gather-b" in name
    ]
