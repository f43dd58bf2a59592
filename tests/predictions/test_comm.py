"""Times of collectives: curves where there are any, else links."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stepmark.cases.comm_curve import Curve
from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, collective_named
from stepmark.model.device import load_devices
from stepmark.model.ops import Phase
from stepmark.predictions.comm import CommCosts
from stepmark.step.workload import CommOp, Group
from stepmark.timeline.step_cost import Source

NCCL_TESTS = Path(__file__).parents[1] / "data" / "nccl-tests"
PUBLISHED = Path(__file__).parents[2] / "validation" / "data"
EIGHT = Group(digits=((8, 1),))
H100 = load_devices()["h100-sxm"]


def op(collective: str, num_bytes: int, size: int = 8) -> CommOp:
    is_whole = collective in (Collective.ALL_REDUCE, Collective.BROADCAST, SEND, RECV)
    count = num_bytes // 2 if is_whole else num_bytes // 2 // size
    return CommOp(
        collective=collective,
        dtype=DType.BF16,
        count=count,
        group="g",
        phase=Phase.FWD,
        module="m",
        peer=1 if collective in (SEND, RECV) else None,
    )


def nccl_times_s(path: Path) -> dict[int, float]:
    """Return the out-of-place times of nccl-tests by bytes; rows begin with these."""
    rows = (line.split() for line in path.read_text().splitlines() if line[:1] == " ")
    return {int(row[0]): float(row[5]) * 1e-6 for row in rows}


def curve(collective: str, ranks: int, *points: tuple[int, float]) -> Curve:
    return Curve(collective=collective, num_ranks=ranks, points=points, source="test")


def test_a_measured_size_has_its_time() -> None:
    costs = CommCosts([curve("all_gather", 8, (2**20, 1e-5), (2**24, 1e-4))], None)
    assert costs(op("all_gather", 2**20), EIGHT) == pytest.approx(1e-5)
    assert 1e-5 < costs(op("all_gather", 2**22), EIGHT) < 1e-4
    assert costs(op("all_gather", 2**25), EIGHT) == pytest.approx(2e-4)
    assert costs.sources == {"all_gather": Source.MEASURED}


def test_another_number_of_ranks_keeps_the_bus_bandwidth() -> None:
    costs = CommCosts([curve("all_reduce", 2, (2**24, 1e-4))], None)
    # 2 (n - 1) / n of the buffer is on the bus: 1 for two ranks, 1.75 for eight.
    assert costs(op("all_reduce", 2**24), EIGHT) == pytest.approx(1.75e-4)
    assert costs.sources == {"all_reduce": Source.SCALED}


def test_a_side_of_a_pair_has_the_time_of_a_transfer() -> None:
    costs = CommCosts([curve("p2p", 2, (2**20, 4e-6))], None)
    assert costs(op(SEND, 2**20), EIGHT) == costs(op(RECV, 2**20), EIGHT) == 4e-6


def test_links_bound_what_no_curve_tells() -> None:
    costs = CommCosts([], H100)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        large = op(collective, 2**30)
        time_s = costs(large, EIGHT)
        assert time_s > large.bus_bytes(EIGHT) / 450e9
        assert time_s < large.bus_bytes(EIGHT) / 450e9 * 1.5
    assert costs(op("all_reduce", 2), EIGHT) > 1e-6  # latency
    assert costs.sources["all_reduce"] is Source.ROOFLINE


@pytest.mark.parametrize("num_bytes", [2**10, 2**20, 2**32])
def test_an_all_reduce_by_links_is_a_reduce_scatter_and_an_all_gather(num_bytes: int) -> None:
    """A ring passes a message on twice: in bytes, and in hops."""
    costs = CommCosts([], H100)
    whole, *halves = (
        costs(op(name, num_bytes), EIGHT)
        for name in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert whole == pytest.approx(sum(halves))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "alltoall"])
def test_links_carry_what_nccl_tests_measured(name: str) -> None:
    """On 8 x H200, 4 GiB; and what a small all-reduce takes, within a factor of two."""
    times_s = nccl_times_s(NCCL_TESTS / f"8xH200-{name}.txt")
    collective = name.replace("alltoall", "all_to_all")
    costs = CommCosts([], load_devices()["h200-sxm"])
    assert costs(op(collective, 2**32), EIGHT) == pytest.approx(times_s[2**32], rel=0.06)
    if name == "all_reduce":
        assert 0.5 < costs(op(collective, 2**16), EIGHT) / times_s[2**16] < 2


def test_nothing_to_send_takes_no_time() -> None:
    costs = CommCosts([], None)
    assert costs(op("all_reduce", 0), EIGHT) == 0
    assert costs(op("all_reduce", 2**20), Group(digits=((1, 1),))) == 0


def test_unknown_links_are_refused() -> None:
    with pytest.raises(ConfigError, match="calibration is missing: give one with all_reduce"):
        CommCosts([], None)(op("all_reduce", 2**20), EIGHT)
    bare = replace(H100, link_bytes_per_s=None)
    with pytest.raises(ConfigError, match=r"device h100-sxm is invalid: .* links are known"):
        CommCosts([], bare)(op("all_reduce", 2**20), EIGHT)


def test_groups_over_hosts_have_the_curves_over_hosts() -> None:
    """Of 16 GPUs on two hosts: groups in a host, over both, and pairs over both."""
    size, inside_s, over_s = 2**24, 1e-4, 9e-4
    inside = replace(curve("all_reduce", 8, (size, inside_s)), num_hosts=1)
    over = replace(curve("all_reduce", 16, (size, over_s)), num_hosts=2)
    near = replace(curve("p2p", 2, (size, inside_s)), num_hosts=1)
    far = replace(curve("p2p", 2, (size, over_s)), num_hosts=2)
    sixteen, apart = Group(digits=((16, 1),)), Group(digits=((2, 8),))
    one, both = op("all_reduce", size), op(SEND, size)
    for curves in ([inside, over, near, far], [far, near, over, inside]):
        costs = CommCosts(curves, None, 8)
        assert costs(one, EIGHT) == pytest.approx(inside_s)
        assert costs(one, sixteen) == pytest.approx(over_s)
        assert costs(one, apart) == pytest.approx(over_s / (2 * 15 / 16))
        assert costs(both, apart) == over_s
        assert costs(both, Group(digits=((2, 4),))) == inside_s
    assert costs.of_one_host == set()
    # Without a curve over hosts the nearest is scaled, and the prediction is a lower bound.
    costs = CommCosts([inside], None, 8)
    assert costs(one, sixteen) == pytest.approx(inside_s * (15 / 16) / (7 / 8))
    far_apart = Group(digits=((8, 8),))
    assert costs(one, far_apart) == pytest.approx(inside_s)
    assert costs.sources == {"all_reduce": Source.SCALED}
    assert costs.of_one_host == {"all_reduce"}


# Over hosts: a lower bound


def over_hosts(num_ranks: int, per_host: int = 8) -> tuple[CommCosts, Group]:
    return CommCosts([], H100, per_host), Group(digits=((num_ranks, 1),))


def read_csv(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((PUBLISHED / name).read_text().splitlines()))


def published_rows() -> Iterator[tuple[str, CommCosts, Group, CommOp, float]]:
    """Yield rows of healthy tables over hosts, with their seconds."""
    tables = {
        facts["id"]: facts
        for facts in read_csv("collective-tables.csv")
        if facts["healthy"] == "yes" and int(facts["hosts"]) > 1 and facts["device"]
    }
    for row in read_csv("collective-rows.csv"):
        if row["id"] not in tables or not row["time_us"]:
            continue
        facts = tables[row["id"]]
        per_host = int(facts["gpus_per_host"])
        device = load_devices()[facts["device"]]
        if device.link_bytes_per_s is None:
            continue
        group = Group(digits=((per_host * int(facts["hosts"]), 1),))
        name = collective_named(facts["collective"])
        message = op(SEND if name == "sendrecv" else name, int(row["bytes"]), group.size)
        yield row["id"], CommCosts([], device, per_host), group, message, float(row["time_us"])


def test_over_hosts_nothing_measured_is_faster_than_the_bound() -> None:
    """Of 8 B to 16 GiB, on 2 to 230 hosts with 1 to 8 GPUs."""
    rows = list(published_rows())
    assert len({name for name, *_ in rows}) > 40
    assert {group.size for _, _, group, _, _ in rows} >= {2, 16, 32, 64, 80}
    for name, costs, group, message, time_us in rows:
        bound_us = costs(message, group) * 1e6
        assert bound_us <= time_us, (name, message.message_bytes(group))


@pytest.mark.parametrize("per_host", [1, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_latency_over_hosts_grows_with_the_hosts(collective: str, per_host: int) -> None:
    costs, _ = over_hosts(8, per_host)
    groups = [Group(digits=((count, 1),)) for count in (16, 64, 1024, 16384)]
    times_s = [costs.latency_s(op(collective, 2**20, g.size), g) for g in groups]
    assert times_s == sorted(times_s)
    assert times_s[0] < times_s[-1]


def test_an_all_reduce_over_many_hosts_is_a_tree() -> None:
    """Twice seven hops inside of a host and log2(2048) = 11 between hosts."""
    costs, group = over_hosts(16384)
    tree_s = 2 * (7 * 0.6 + 11 * 5) * 1e-6
    assert costs.latency_s(op("all_reduce", 2**20), group) == pytest.approx(tree_s)
    # 16384 GPUs of a ring would take 2 x 16383 hops.
    assert costs(op("all_reduce", 2**20), group) < 2e-4
    costs, group = over_hosts(16, 8)
    ring_s = 2 * (14 * 1.0 + 2.7) * 1e-6
    assert costs.latency_s(op("all_reduce", 2**20), group) < ring_s


def test_gathers_over_hosts_are_rings_but_for_one_gpu_per_host() -> None:
    """PAT, of NCCL 2.23, is for one GPU per host."""
    for collective in ("all_gather", "reduce_scatter"):
        costs, group = over_hosts(1024)
        ring_s = (896 * 1.0 + 127 * 2.7) * 1e-6
        assert costs.latency_s(op(collective, 2**20, 1024), group) == pytest.approx(ring_s)
        strided = Group(digits=((1024, 8),))
        pat_s = 10 * 14 / 3.5 * 1e-6
        assert costs.latency_s(op(collective, 2**20, 1024), strided) == pytest.approx(pat_s)
    one_hop_s = 2.7e-6
    for collective in ("broadcast", "all_to_all", SEND):
        assert costs.latency_s(op(collective, 2**20, 1024), group) == pytest.approx(one_hop_s)
