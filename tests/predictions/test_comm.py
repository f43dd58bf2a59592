"""Times of collectives: curves where there are any, else links."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.comm_curve import Curve
from stepmark.cases.message import RECV, SEND
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.device import load_devices
from stepmark.model.network import Network, Reduction
from stepmark.model.network_options import NetworkChoice
from stepmark.model.ops import Phase
from stepmark.model.systems import network_of
from stepmark.predictions.comm import CommCosts
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.predict_options import PredictOptions
from stepmark.step.workload import CommOp, Group
from stepmark.timeline.step_cost import Source


def find_network(device: str, name: str) -> Network:
    network = network_of(load_devices()[device], 1024, NetworkChoice(network=name))
    assert network is not None
    return network


NCCL_TESTS = Path(__file__).parents[1] / "data" / "nccl-tests"
EIGHT = Group(digits=((8, 1),))
SIXTEEN = Group(digits=((16, 1),))
H100 = network_of(load_devices()["h100-sxm"], 8)
CLUSTER = find_network("h100-sxm", "dgx-h100")


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
        assert time_s < large.bus_bytes(EIGHT) / 450e9 * 1.6
    assert costs(op("all_reduce", 2), EIGHT) > 1e-6  # latency
    assert costs.sources["all_reduce"] is Source.SHEET


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "alltoall"])
def test_links_carry_what_nccl_tests_measured(name: str) -> None:
    """On 8 x H200 without multicast, from 1 GiB on."""
    times_s = nccl_times_s(NCCL_TESTS / f"8xH200-{name}.txt")
    collective = name.replace("alltoall", "all_to_all")
    choice = NetworkChoice(reduction=Reduction.NONE)
    network = network_of(load_devices()["h200-sxm"], 8, choice)
    costs = CommCosts([], network)
    for size in (2**30, 2**32):
        assert costs(op(collective, size), EIGHT) == pytest.approx(times_s[size], rel=0.11)


def test_nothing_to_send_takes_no_time() -> None:
    costs = CommCosts([], None)
    assert costs(op("all_reduce", 0), EIGHT) == 0
    assert costs(op("all_reduce", 2**20), Group(digits=((1, 1),))) == 0


def test_unknown_links_are_refused() -> None:
    with pytest.raises(ConfigError, match="calibration is missing: give one with all_reduce"):
        CommCosts([], None)(op("all_reduce", 2**20), EIGHT)
    bare = replace(load_devices()["h100-sxm"], link_bytes_per_s=None)
    assert network_of(bare, 8) is None
    with pytest.raises(ConfigError, match=r"device h100-sxm .* whose links are known"):
        network_of(bare, 8, NetworkChoice(network="dgx-h100"))


def test_a_curve_of_more_ranks_than_the_links_join_is_refused(tmp_path: Path) -> None:
    text = (NCCL_TESTS / "8xH200-all_reduce.txt").read_text()
    (rank7,) = re.findall(r"#  Rank  7 .*\n", text)
    more = "".join(rank7.replace("Rank  7", f"Rank {rank:2}") for rank in range(7, 16))
    file = tmp_path / "16.txt"
    file.write_text(text.replace(rank7, more))
    options = PredictOptions(models=("llama-3.1-8b",), device="h100", curve=str(file))
    with pytest.raises(ConfigError, match=r"curve .*16\.txt .* h100-sxm joins, not of 16"):
        inputs_of(replace(options, nproc="8"))
    assert inputs_of(replace(options, nproc="64")).network is not None


def test_groups_have_the_curves_of_ranks_placed_as_theirs() -> None:
    """Of 16 GPUs on two hosts: groups in a host, over both, and pairs over both."""
    size, inside_s, over_s = 2**24, 1e-4, 9e-4
    inside = replace(curve("all_reduce", 8, (size, inside_s)), num_hosts=1)
    over = replace(curve("all_reduce", 16, (size, over_s)), num_hosts=2)
    near = replace(curve("p2p", 2, (size, inside_s)), num_hosts=1)
    far = replace(curve("p2p", 2, (size, over_s)), num_hosts=2)
    apart = Group(digits=((2, 8),))
    one, both = op("all_reduce", size), op(SEND, size)
    for curves in ([inside, over, near, far], [far, near, over, inside]):
        costs = CommCosts(curves, CLUSTER, 16)
        assert costs(one, EIGHT) == pytest.approx(inside_s)
        assert costs(one, SIXTEEN) == pytest.approx(over_s)
        assert costs(both, apart) == over_s
        assert costs(both, Group(digits=((2, 4),))) == inside_s
        assert set(costs.sources.values()) == {Source.MEASURED}
    # Two ranks of a host, and one each of two hosts.
    pair = replace(curve("all_reduce", 2, (size, inside_s)), num_hosts=1)
    distant = replace(curve("all_reduce", 2, (size, over_s)), num_hosts=2)
    for curves in ([pair, distant], [distant, pair]):
        costs = CommCosts(curves, CLUSTER, 16)
        assert costs(one, apart) == pytest.approx(over_s)
        assert costs(one, Group(digits=((2, 1),))) == pytest.approx(inside_s)
    # Hosts that a file does not tell are full ones.
    costs = CommCosts([curve("all_reduce", 16, (size, over_s))], CLUSTER, 16)
    assert costs(one, SIXTEEN) == pytest.approx(over_s)


def test_other_ranks_have_the_constants_of_measured_curves() -> None:
    """A cluster three times as slow between hosts as published ones, seen on two of them."""
    sizes = [2**power for power in range(3, 34, 2)]
    plain = CommCosts([], CLUSTER, 64)
    points = [(size, 3 * plain(op("all_reduce", size, 16), SIXTEEN)) for size in sizes]
    costs = CommCosts([curve("all_reduce", 16, *points)], CLUSTER, 64)
    many = Group(digits=((64, 1),))
    for size in (2**12, 2**22, 2**32):
        for name in ("all_reduce", "all_gather"):
            message = op(name, size, 64)
            assert costs(message, many) == pytest.approx(3 * plain(message, many), rel=0.01)
    assert costs.sources == {"all_reduce": Source.SCALED, "all_gather": Source.SCALED}
    # Inside a host nothing was measured.
    assert costs(op("all_reduce", 2**22), EIGHT) == plain(op("all_reduce", 2**22), EIGHT)
    assert costs.sources["all_reduce"] is Source.SHEET


def test_a_group_that_crosses_hosts_for_some_ranks_pays_for_all() -> None:
    """Of six ranks each, the second group is on two hosts of eight."""
    costs = CommCosts([], CLUSTER, 24)
    six = Group(digits=((6, 1),))
    message = op("all_reduce", 2**26, 6)
    inside_s = CommCosts([], CLUSTER, 6)(message, six)
    assert costs(message, six) > 1.4 * inside_s
    twelve = Group(digits=((12, 1),))
    assert costs(op("all_reduce", 2**26, 12), twelve) > costs(message, six) / 2


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4),
    st.sampled_from([(8, 256), (4, 12), (6, 36), (72, None)]),
)
def test_units_of_a_group_are_those_of_its_ranks(
    sizes: list[int], domains: tuple[int, int | None]
) -> None:
    """Every second mesh dimension is a group; all groups of the job are listed here."""
    digits = list[tuple[int, int]]()
    stride = 1
    for index, size in enumerate(sizes):
        if index % 2 == 0:
            digits.append((size, stride))
        stride *= size
    group = Group(digits=tuple(digits))
    outermost = CLUSTER.tiers[-1]
    tiers = [replace(outermost, num_gpus=size) for size in domains if size]
    network = replace(CLUSTER, tiers=(*tiers, outermost))
    costs = CommCosts([], network, stride)
    placements = {network.placement(group.members(rank)).num_units for rank in range(stride)}
    assert costs._place(group).num_units == max(placements)
