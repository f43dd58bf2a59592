"""Networks: laws of the model, systems and files, and errors on published tables."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.comm_curve import Curve
from stepmark.collectives.network_fit import Point, fit, placement_of, with_hosts_of
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective
from stepmark.model.device import load_devices
from stepmark.model.network import Law, Network, Reduction
from stepmark.model.network_options import NetworkChoice, parse_bits
from stepmark.model.systems import load_laws, load_systems, network_of

sys.path.append(str(Path(__file__).parents[2] / "validation"))
import network_laws

H100 = load_devices()["h100-sxm"]
MEASURED = (
    *(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    *(Collective.BROADCAST, Collective.ALL_TO_ALL, Collective.SENDRECV),
)
SIZES = st.sampled_from([2**power for power in range(3, 34)])


def network(
    name: str = "dgx-h100", device: str = "h100-sxm", **changes: float | Reduction
) -> Network:
    choice = NetworkChoice(network=name, **changes)  # type: ignore[arg-type]
    found = network_of(load_devices()[device], 1024, choice)
    assert found is not None
    return found


def seconds(net: Network, collective: str, num_bytes: float, ranks: range) -> float:
    return net.time_s(collective, num_bytes, net.placement(ranks))


# Published tables


def test_published_tables_that_are_left_out_are_predicted() -> None:
    """60 tables over InfiniBand and RoCE of 2 to 230 hosts; medians and 90th percentiles."""
    errors = network_laws.errors("RDMA")
    assert len(errors) == 60
    rows = {
        name: (count, middle, most) for name, count, middle, most in network_laws.rows(errors)
    }
    assert sum(count for count, _, _ in rows.values()) == 737
    for name, middle, most in (
        ("<= 64 KiB", 0.20, 0.35),
        ("to 4 MiB", 0.18, 0.40),
        ("to 128 MiB", 0.135, 0.33),
        ("above", 0.065, 0.19),
    ):
        assert rows[name][1] < middle
        assert rows[name][2] < most


@pytest.mark.parametrize(("law", "kind"), network_laws.KINDS.items())
def test_constants_are_those_of_the_tables(law: str, kind: str) -> None:
    own = network_laws.fitted(
        point for each in network_laws.tables(kind).values() for point in each
    )
    known = load_laws()[law]
    assert (own.latency, own.transfer, own.ramp) == pytest.approx(
        (known.latency, known.transfer, known.ramp), rel=0.01
    )


def test_tables_of_one_host_are_predicted_where_bandwidth_counts() -> None:
    errors = network_laws.inside_errors()
    rows = {name: middle for name, _, middle, _ in network_laws.rows(errors)}
    assert rows["to 128 MiB"] < 0.08
    assert rows["above"] < 0.05


def test_pairs_of_a_pcie_host_are_predicted_where_bandwidth_counts() -> None:
    """4 x A100 PCIe: NVLink joins pairs, and PCIe the pairs (busbw 28 to 31 GB/s)."""
    errors = network_laws.inside_errors()["nc96v4 all_reduce"]
    large = [error for size, error in errors if size >= 2**24]
    assert len(large) > 3
    assert max(map(abs, large)) < 0.15


# Laws


@given(st.sampled_from(MEASURED), SIZES, st.sampled_from([2, 8, 16, 64, 1024]))
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(
    collective: str, size: int, num_ranks: int
) -> None:
    ranks = range(num_ranks)
    times_s = [
        seconds(network(nic=gbit * 1e9 / 8), collective, size, ranks)
        for gbit in (100, 200, 400, 800)
    ]
    assert times_s == sorted(times_s, reverse=True)
    crowded = seconds(network(oversubscription=4.0), collective, size, ranks)
    own = seconds(network(), collective, size, ranks)
    assert crowded >= own
    # A ring crosses from leaf to leaf once, an all-to-all with most of its bytes.
    if collective == Collective.ALL_TO_ALL:
        assert (crowded > own) == (num_ranks > 256)  # GPUs below a leaf
    assert seconds(network(), collective, 2 * size, ranks) > own
    far = seconds(network(latency=1e-5), collective, size, ranks)
    assert (far > own) == (num_ranks > 8)


@given(st.sampled_from(MEASURED[:5]), SIZES, st.sampled_from([2, 4, 8]))
def test_a_group_across_hosts_is_slower_than_inside_of_one(
    collective: str, size: int, num_ranks: int
) -> None:
    inside = seconds(network(), collective, size, range(num_ranks))
    across = seconds(network(), collective, size, range(0, 8 * num_ranks, 8))
    assert across > inside


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_ranks_of_a_host_share_its_nics(collective: str) -> None:
    """A group of one GPU per host has one of eight NICs, of four per host half of them."""
    size = 2**33
    hosts = range(0, 128, 8)
    one = seconds(network(), collective, size, hosts)  # type: ignore[arg-type]
    four = [host + rank for host in hosts for rank in range(4)]
    assert one / seconds(network(), collective, size, four) == pytest.approx(4, rel=0.15)  # type: ignore[arg-type]
    # 16 hosts with 8 NICs of 50 GB/s: busbw at least 80 and at most 100 % of the wire.
    factor = (2 if collective == "all_reduce" else 1) * 127 / 128
    busbw = size * factor / seconds(network(), collective, size, range(128))
    assert 0.75 * 400e9 < busbw < 400e9


def test_an_all_to_all_sends_what_leaves_the_host() -> None:
    """busbw = W m/(m-1) (n-1)/n: https://github.com/NVIDIA/nccl-tests/issues/130."""
    for hosts in (2, 4, 10):
        n = 8 * hosts
        busbw = 2**34 * (n - 1) / n / seconds(network(), "all_to_all", 2**34, range(n))
        wire = 50e9 * hosts / (hosts - 1) * (n - 1) / n
        assert busbw == pytest.approx(wire, rel=0.05)


def test_nvlink_carries_of_an_all_to_all_what_stays_in_the_domain() -> None:
    """With NICs that are faster than NVLink, of two hosts seven of fifteen parts."""
    fast = network(nic=1e12)
    inside = fast.transfer_s("all_to_all", 2**34, fast.placement(range(8)))
    across = fast.transfer_s("all_to_all", 2**34, fast.placement(range(16)))
    assert across == pytest.approx(inside / 2)


def test_gathers_over_hosts_are_rings_but_for_one_gpu_per_host() -> None:
    """PAT, of NCCL 2.23, is for one GPU per host: its steps are logarithmic."""
    for collective in ("all_gather", "reduce_scatter"):
        net = network()
        ring_s = (6.6 + 896 * 1.0 + 127 * 2.7) * 1e-6
        assert net.latency_s(collective, net.placement(range(1024))) == pytest.approx(ring_s)
        apart = net.placement(range(0, 128, 8))
        pat_s = (8 + 4 * 14 / 3.5 + 16 * 2.8) * 1e-6
        assert net.latency_s(collective, apart) == pytest.approx(pat_s)
        # Also where hops are so slow that PAT would be faster.
        slow = network(latency=1e-4)
        ring_s = (6.6 + 112 * 1.0 + 15 * (2.7 + 100)) * 1e-6
        full = slow.placement(range(128))
        assert slow.latency_s(collective, full) == pytest.approx(ring_s)


def test_an_all_reduce_over_many_hosts_is_a_tree() -> None:
    """Twice seven hops inside of a host and log2(2048) = 11 between hosts."""
    net = network()
    tree_s = (6.8 + 2 * (7 * 0.6 + 11 * 5)) * 1e-6
    assert net.latency_s("all_reduce", net.placement(range(16384))) == pytest.approx(tree_s)
    ring_s = (6.6 + 2 * (14 * 1.0 + 2.7)) * 1e-6
    assert net.latency_s("all_reduce", net.placement(range(16))) < ring_s


def test_switches_that_sum_save_bytes() -> None:
    size = 2**32
    times_s = {
        each: seconds(network(reduction=each), "all_reduce", size, range(64))
        for each in Reduction
    }
    assert times_s[Reduction.NVLS] < times_s[Reduction.NONE]  # inside of hosts
    assert times_s[Reduction.SHARP] < 0.85 * times_s[Reduction.NONE]
    two = [seconds(network(reduction=r), "all_reduce", size, range(16)) for r in Reduction]
    assert two[0] > 1.15 * two[1]


def test_send_receive_has_fewer_channels_in_large_communicators() -> None:
    """As published runs of 2 to 80 ranks have: 46, 26 and 13 GB/s."""
    net = network()
    for ranks, expected in (
        (range(16), 46e9),
        (range(0, 80, 8), 26e9),
        ([host * 8 + rank for host in range(10) for rank in range(4)], 26e9),
        (range(80), 13e9),
    ):
        placement = net.placement(ranks)
        assert 2**34 / net.time_s("sendrecv", 2**34, placement) == pytest.approx(
            expected, rel=0.1
        )


def test_a_domain_of_nvlink_may_have_many_hosts() -> None:
    net = network("gb200-nvl72", "gb200")
    inside = seconds(net, "all_gather", 2**32, range(72))
    across = seconds(net, "all_gather", 2**32, range(144))
    assert across > 1.1 * inside
    assert seconds(net, "all_gather", 2**32, range(0, 144, 72)) > 5 * inside
    assert net.placement(range(72)).num_units == (1, 1)


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("nics", 2, "--nics 2 "),
        ("nic", 25e9, "--nic 200G "),
        ("latency", 1e-6, "--latency 1e-06s "),
        ("oversubscription", 2.0, "--oversubscription 2.0 "),
    ],
)
def test_links_between_hosts_are_refused_for_one_host(
    option: str, value: float, shown: str
) -> None:
    choice = NetworkChoice(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="NVLink 4 joins all 8 GPUs of the job") as error:
        network_of(H100, 8, choice)
    assert shown in str(error.value) or shown.strip("- ") in str(error.value)
    assert network_of(H100, 512, choice) is not None


def test_oversubscription_above_a_leaf_is_refused_below_it() -> None:
    choice = NetworkChoice(network="dgx-h100", oversubscription=2.0)
    with pytest.raises(ConfigError, match="256 GPUs are below one leaf switch"):
        network_of(H100, 256, choice)
    assert network_of(H100, 257, choice) is not None
    # p5 has no leaves: its NICs are oversubscribed.
    assert network_of(H100, 16, replace(choice, network="p5")) is not None


@pytest.mark.parametrize("device", ["h100-nvl", "h100-pcie", "a100-80gb-pcie", "h200-nvl"])
def test_bridges_join_some_gpus_of_a_host(device: str) -> None:
    """Inside a bridge is faster than over PCIe, and PCIe than between hosts."""
    spec = load_devices()[device]
    net = network_of(spec, 16, NetworkChoice(nics=1, nic=12.5e9))
    assert net is not None
    bridged = spec.link_domain
    assert bridged in (2, 4)
    assert [tier.num_gpus for tier in net.tiers] == [bridged, 8, None]
    for collective in MEASURED:
        pair, pcie, hosts = (
            seconds(net, collective, 2**28, range(0, 2 * stride, stride))
            for stride in (1, bridged, 8)
        )
        assert pair < pcie < hosts
    alone = network_of(spec, 8)
    assert alone is not None
    assert "PCIe beyond" in alone.about
    assert alone.time_s("all_reduce", 2**28, alone.placement(range(8))) == seconds(
        net, "all_reduce", 2**28, range(8)
    )


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_host_with_the_fewest_ranks_bounds_a_ring(collective: str) -> None:
    """Three ranks on one host and one on another have one NIC between them, not two."""
    net = network("p5", nics=8, nic=50e9, reduction=Reduction.NONE)
    size = 2**32
    even = net.transfer_s(collective, size, net.placement([0, 1, 8, 9]))
    uneven = net.transfer_s(collective, size, net.placement([0, 1, 2, 8]))
    assert uneven == pytest.approx(2 * even)
    factor = (2 if collective == "all_reduce" else 1) * 3 / 4
    assert uneven == pytest.approx(size * factor / 50e9)


def test_a_rank_alone_on_its_host_sends_most_of_an_all_to_all() -> None:
    """Three of its four parts leave the host, of the others one."""
    net = network()
    size = 2**32
    uneven = net.transfer_s("all_to_all", size, net.placement([0, 1, 2, 8]))
    assert uneven == pytest.approx(size * 3 / 4 / 50e9)
    even = net.transfer_s("all_to_all", size, net.placement([0, 1, 8, 9]))
    assert even == pytest.approx(size * 2 / 4 / 50e9)


def test_ranks_outside_of_all_tiers_are_refused() -> None:
    alone = network_of(H100, 8)
    assert alone is not None
    with pytest.raises(ConfigError, match=r"network h100-sxm .* joins rank 15.* 8 GPUs"):
        alone.placement(range(16))


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ({"gpus_per_host": 6}, "h100-sxm", None),
        ({"gpus_per_host": 3}, "h100-nvl", r"gpus_per_host \(3\) .* the 2 GPUs"),
        ({"gpus_per_host": 2}, "h200-nvl", None),  # a bridge of two
    ],
)
def test_a_unit_of_a_tier_has_whole_units_of_the_one_below(
    choice: dict[str, int], device: str, expected: str | None
) -> None:
    given = NetworkChoice(network="dgx-h100", **choice)  # type: ignore[arg-type]
    if expected:
        with pytest.raises(ConfigError, match=f"network dgx-h100 .* {expected}"):
            network_of(load_devices()[device], 1024, given)
        return
    found = network_of(load_devices()[device], 1024, given)
    assert found is not None
    sizes = [tier.num_gpus for tier in found.tiers if tier.num_gpus]
    assert sizes[-1] == 32 * choice["gpus_per_host"]  # hosts below a leaf
    assert all(upper % lower == 0 for lower, upper in pairwise(sizes))


# Systems and files


def test_every_system_has_a_device_a_law_and_a_source() -> None:
    for name, system in load_systems().items():
        assert system.device in load_devices(), name
        assert system.law in load_laws(), name
        assert system.source.startswith("https://"), name
        assert parse_bits(system.nic, "nic") > 1e9
        for size in (8, 2**20, 2**30):
            times_s = [
                seconds(network(name, system.device), "all_reduce", size, range(count))
                for count in (2, 8, 144, 1024)
            ]
            assert all(low < high for low, high in pairwise(times_s)), name


FILE = """
nics = 4
nic = "200G"
gpus_per_host = 4
leaf_gpus = 16
oversubscription = 2
latency = "3us"
"""


def test_a_file_describes_a_network(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    net = network(str(path))
    assert [tier.num_gpus for tier in net.tiers] == [4, 16, None]
    assert [tier.bytes_per_s for tier in net.tiers[1:]] == [25e9, 12.5e9]
    assert {tier.hop_s for tier in net.tiers[1:]} == {3e-6}
    changed = network(str(path), nics=8, oversubscription=1.0)
    assert [tier.bytes_per_s for tier in changed.tiers[1:]] == [50e9, 50e9]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nics = 8", "missing nic"),
        ('nics = 0\nnic = "1G"', "nics 0 is not a number from 1 to 1024"),
        ('nics = 8\nnic = "400X"', "nic 400X is invalid: .*400G"),
        ('nics = 8\nnic = "400G"\nlaw = "rmda"', "did you mean rdma"),
        ('nics = 8\nnic = "400G"\nspeed = 3', "unknown field speed"),
        ('nics = 8\nnic = "400G"\nlatency = "fast"', "latency fast .* duration"),
        ("nics = 8\nnic = 400", "nic 400 is not a text"),
        ('nics = 8\nnic = "0G"', "nic 0G is invalid: .*400G"),
        ('nics = 8\nnic = "400G"\nleaf_gpus = 12', r"leaf_gpus \(12\) is a multiple of the 8"),
        ('nics = true\nnic = "400G"', "nics True is not a number"),
        ("nics = ", "a TOML file"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        network(str(path))


def test_without_a_usual_system_one_must_be_described() -> None:
    device = load_devices()["l40s"]
    assert network_of(device, 8) is not None
    with pytest.raises(ConfigError, match=r"network is missing: .*dgx-h100.* no usual one"):
        network_of(device, 16)
    with pytest.raises(ConfigError, match="did you mean dgx-h100"):
        network_of(H100, 16, NetworkChoice(network="dgx-h10"))
    described = network_of(device, 16, NetworkChoice(nics=2, nic=12.5e9, gpus_per_host=4))
    assert described is not None
    assert [tier.num_gpus for tier in described.tiers] == [4, None]
    assert described.tiers[1].bytes_per_s == 6.25e9


# Fits


def test_a_fit_finds_the_constants_of_a_law() -> None:
    law = Law(latency=1.7, transfer=0.9, ramp=2.3)
    points = [
        Point(latency, latency * factor, law.time_s(latency, latency * factor))
        for latency in (1e-5, 4e-5)
        for factor in (1e-3, 0.1, 1.0, 10.0, 1000.0)
    ]
    points[3] = points[3]._replace(time_s=5 * points[3].time_s)  # one outlier
    own = fit(points, Law())
    assert (own.latency, own.transfer, own.ramp) == pytest.approx((1.7, 0.9, 2.3), rel=1e-2)
    few = [point._replace(time_s=2 * law.time_s(*point[:2])) for point in points[:2]]
    assert fit(few, law).time_s(1e-5, 1e-5) == pytest.approx(2 * law.time_s(1e-5, 1e-5))


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "units"),
    [(8, None, (1, 1, 1)), (16, 2, (2, 1, 1)), (2, 2, (2, 1, 1)), (512, 64, (64, 2, 1))],
)
def test_a_curve_has_the_place_of_its_ranks(
    num_ranks: int, num_hosts: int | None, units: tuple[int, ...]
) -> None:
    curve = Curve(collective="all_reduce", num_ranks=num_ranks, points=((8, 1e-5),), source="")
    placement = placement_of(replace(curve, num_hosts=num_hosts), network())
    assert placement is not None
    assert placement.num_units == units


def test_hosts_of_curves_are_those_of_the_job() -> None:
    curve = Curve(collective="all_reduce", num_ranks=8, points=((8, 1e-5),), source="")
    four = replace(curve, num_hosts=2)
    sparse = replace(curve, num_ranks=2, num_hosts=2)
    found = with_hosts_of([sparse, four], 16, None)
    assert found is not None
    assert found.gpus_per_host == 4
    net = network_of(H100, 16, found)
    assert net is not None
    placement = placement_of(four, net)
    assert placement == net.placement(range(8))
    assert placement.num_units[0] == 2
    assert with_hosts_of([sparse], 16, None) is None
    assert with_hosts_of([four], 4, None) is None
    given = NetworkChoice(gpus_per_host=8)
    assert with_hosts_of([four], 16, given) is given


def test_one_rank_sends_nothing() -> None:
    network = network_of(load_devices()["h100-sxm"], 16, NetworkChoice())
    assert network is not None
    alone = network.placement([5])
    assert network.time_s("all_reduce", 2**20, alone) == 0.0
    assert network.fixed_s("all_gather", alone) == 0.0
