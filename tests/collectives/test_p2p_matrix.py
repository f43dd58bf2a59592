"""Every link is where it was measured, and the slow one is named."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from tests.tables.records import RUN_ID

from stepmark.cases.comm_case import CommCase
from stepmark.cases.record import Record, Skipped
from stepmark.collectives.comm_columns import rows
from stepmark.collectives.comm_figures import heat_map
from stepmark.collectives.comm_remarks import PairMatrix, comm_lines, matrices, matrix_lines
from stepmark.model.collectives import Collective, Mode

from .comm_records import (
    NUM_RANKS,
    SLOW_PAIR,
    comm_case,
    comm_device,
    comm_measured,
    comm_run,
    flat,
    pair_times,
)


def found() -> list[PairMatrix]:
    return matrices(rows(pair_times(Random(3)), comm_run(), comm_device()))


def test_a_third_of_the_rate_is_named() -> None:
    bandwidth, latency = found()
    ((source, destination, value, _),) = bandwidth.slow
    assert (source, destination) == SLOW_PAIR
    assert value == pytest.approx(bandwidth.median / 3, rel=0.03)
    assert latency.slow == []
    text = "\n".join(matrix_lines(bandwidth))
    assert f"slow: 3 -> 5 {value:.3g} GB/s, median {bandwidth.median:.3g}" in text
    assert "no slow link" in "\n".join(matrix_lines(latency))


def pings(mode: Mode, issue_s: float, times_s: list[float]) -> PairMatrix:
    """Latencies of the six ordered pairs of three ranks; the last sample is the best."""
    records = [
        comm_measured(
            comm_case(Collective.PING_PONG, 8, num_ranks=2, world_size=3, pair=pair, mode=mode),
            [[time_s] * 7 + [min(time_s, 7e-6)]] * 2 if index else [[time_s] * 8] * 2,
            issue_s=issue_s,
        )
        for index, (pair, time_s) in enumerate(
            zip(permutations(range(3), 2), times_s, strict=True)
        )
    ]
    (matrix,) = matrices(rows(records, comm_run(3)))
    return matrix


def test_a_latency_is_slow_if_its_best_sample_is() -> None:
    """The first link never gets under 20 us; the second once reaches the others' 7 us."""
    found = pings(Mode.GRAPH, 0.0, [20e-6, 20e-6, 7e-6, 7e-6, 7e-6, 7e-6])
    assert [link[:2] for link in found.slow] == [(0, 1)]


def test_links_that_are_slow_most_of_the_time_are_listed() -> None:
    """The verdict is by the best sample, the cells are medians: the text shows both."""
    found = pings(Mode.GRAPH, 0.0, [7e-6, 20e-6, 7e-6, 7e-6, 7e-6, 7e-6])
    lines = matrix_lines(found)
    assert lines[0].endswith("medians of samples")
    assert lines[-2] == "no slow link, median 7 us: no best sample is 10% above it"
    assert lines[-1] == "intermittent: 0 -> 2 20 us, median 7, best sample 7"
    found = pings(Mode.GRAPH, 0.0, [20e-6, 20e-6, *[7e-6] * 4])
    assert [line.split(":")[0] for line in matrix_lines(found)[-2:]] == ["slow", "intermittent"]


def test_pairs_and_launches_without_a_result_are_counted() -> None:
    def case(pair: tuple[int, int]) -> CommCase:
        return comm_case(Collective.P2P, 2**28, num_ranks=2, world_size=4, pair=pair)

    def skipped(pair: tuple[int, int], launch: int) -> Skipped:
        reason = "--budget leaves nothing"
        return Skipped(run_id=RUN_ID, case=case(pair), reason=reason, launch=launch)

    records: list[Record] = [flat(case(pair), 1e-3) for pair in ((0, 1), (1, 0), (1, 2))]
    records += [skipped((1, 2), 2), skipped((2, 1), 1), skipped((2, 1), 2)]
    table = rows(records, comm_run(4))
    (matrix,) = matrices(table)
    lines = matrix_lines(matrix)
    assert "without a result: 1 skipped (of 4)" in lines
    assert "launches are missing: 1 (of 4); --csv has why" in lines
    assert any("without a result: 1 skipped" in line for line in comm_lines(table))
    doubtful = [{**row, "validity": "busy host"} for row in table]
    assert "doubtful: busy host 4 (of 4); --wide shows which" in matrix_lines(
        matrices(doubtful)[0]
    )


def test_a_latency_of_the_host_is_not_judged() -> None:
    """A ping-pong of 2 x 7 us whose call takes 12 us to issue."""
    times_s = [20e-6, *[7e-6] * 5]
    found = pings(Mode.QUEUED, 12e-6, times_s)
    assert found.slow == []
    assert "which is the host's" in matrix_lines(found)[-1]
    assert pings(Mode.GRAPH, 12e-6, times_s).slow, "a graph's calls take no host"


def test_every_pair_has_its_place_and_the_diagonal_none() -> None:
    for matrix in found():
        assert len({link[:2] for link in matrix.links}) == NUM_RANKS * (NUM_RANKS - 1)
        assert all(link.source != link.destination for link in matrix.links)
        lines = matrix_lines(matrix)[2 : 2 + NUM_RANKS]
        assert [len(line.split()) for line in lines] == [NUM_RANKS + 1] * NUM_RANKS


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (["n07", "n07", "n07", "n07"], ["0", "1", "2", "3"]),
        (["n09.a", "n07.a", "n19.a", "n21.a"], ["n09", "n07", "n19", "n21"]),
        (["n7.a", "n7.b", "n8.a", "n8.b"], ["n7.a", "n7.b", "n8.a", "n8.b"]),
        (["n07", "n07", "n19", "n19"], ["n07/0", "n07/1", "n19/0", "n19/1"]),
    ],
)
def test_ranks_of_several_hosts_have_their_names(hosts: list[str], names: list[str]) -> None:
    run = comm_run(4)
    devices = [
        replace(device, host=host)
        for device, host in zip(run.environment.devices, hosts, strict=True)
    ]
    records = [
        flat(
            comm_case(Collective.P2P, 2**28, num_ranks=2, world_size=4, pair=pair),
            3e-3 if pair == (3, 1) else 1e-3,
        )
        for pair in permutations(range(4), 2)
    ]
    table = rows(records, run)
    (matrix,) = matrices(table, devices)
    _, head, *lines = matrix_lines(matrix)
    assert head.split()[-4:] == names
    assert [line.split()[0] for line in lines[:4]] == names
    assert f"slow: {names[3]} -> {names[1]} " in lines[4]
    assert f"slow: {names[3]} -> {names[1]} " in "\n".join(comm_lines(table, devices))
    assert heat_map(matrix).x.ticks == dict(enumerate(names))


def test_direction_and_size() -> None:
    records = [
        flat(comm_case(Collective.P2P, size, num_ranks=2, world_size=4, pair=pair), time_s)
        for size, pair, time_s in (
            (2**20, (0, 2), 1e-3),
            (2**28, (0, 2), 1e-3),
            (2**28, (2, 0), 2e-3),
        )
    ]
    (matrix,) = matrices(rows(records, comm_run(4)))
    assert (matrix.size_bytes, matrix.ranks) == (2**28, [0, 2])
    forth, back = matrix.links
    assert (forth[:2], back[:2]) == ((0, 2), (2, 0))
    assert forth.value == pytest.approx(2**28 / 1e-3 / 1e9)
    assert back.value == pytest.approx(forth.value / 2)


def test_without_pairs_there_is_no_matrix() -> None:
    assert matrices(rows([flat(comm_case(), 1e-3)], comm_run())) == []
