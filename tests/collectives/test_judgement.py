"""Verdicts on tables of collectives: figures of public tables, faults of shape, and texts."""

import json
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from validation import normal_ranges

from stepmark.cli.main import status
from stepmark.collectives.judgement import BELOW, Judgement, judge, parse_nics
from stepmark.collectives.reference_ranges import (
    Hardware,
    hardware_of,
    possible_shares,
    rate,
    send_channel_share,
    tuner_latency_s,
)
from stepmark.findings.finding import Finding, Severity
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import IN_PLACE, OUT_OF_PLACE, Reading, Table
from stepmark.ground.units import GIB, KIB, MIB
from stepmark.model.device import find_device
from stepmark.text_tables import tables_of

ALL_REDUCE_8 = Path(__file__).parents[1] / "data" / "nccl-tests" / "8xH200-all_reduce.txt"
SAMPLES = {sample.name: sample for sample in normal_ranges.samples()}
H100 = "NVIDIA H100 80GB HBM3"
NDR = (8, 400.0)


def counts(kind: str, left_out: str, *, with_nics: bool = True) -> Counter[str]:
    judged = normal_ranges.scores(tuple(SAMPLES.values()), left_out, with_nics=with_nics)
    return Counter(
        judged[name].value
        for name, sample in SAMPLES.items()
        if (sample.is_own if kind == "own" else sample.healthy.startswith(kind))
        and sample.is_own is (kind == "own")
    )


def test_the_figures_are_those_of_the_tables() -> None:
    healthy = normal_ranges.derive(normal_ranges.samples())
    assert normal_ranges.OUTPUT.read_text() == normal_ranges.toml(healthy)


def test_the_documents_have_the_ranges() -> None:
    page = normal_ranges.ROOT / "docs" / "howto" / "check-nodes.md"
    assert "\n".join(normal_ranges.ranges_table()) in page.read_text()


def test_no_table_is_a_reference_for_itself() -> None:
    """Each gets the verdict that it gets where the data never had it."""
    for sample in SAMPLES.values():
        without = [other for other in SAMPLES.values() if other is not sample]
        alone = judge(sample.table, nics=sample.nics, healthy=normal_ranges.derive(without))
        assert judge(sample.table, nics=sample.nics) == alone


def test_an_example_is_judged_by_the_other_runs() -> None:
    [table] = tables_of(ALL_REDUCE_8.read_text(), "copy.txt")
    times = [replace(each, time_s=1.001 * (each.time_s or 0)) for each in table.readings]
    slower = replace(table, readings=tuple(times))
    [same], [other] = judge(table), judge(slower)
    assert num_tables(same) == num_tables(other) - 1


def num_tables(judgement: Judgement) -> int:
    [row] = [row for row in judgement.rows if row["figure"] == "healthy tables"]
    return int(row["value"].split(",")[0])


def test_public_tables_are_called_what_their_sources_call_them() -> None:
    """A table is judged by the others, or by those of other sources."""
    assert counts("yes", "table") == {"normal": 79, BELOW: 2, "unknown": 14, "not normal": 1}
    assert counts("yes", "source") == {"normal": 76, BELOW: 2, "unknown": 17, "not normal": 1}
    assert counts("no", "table") == {"not normal": 8, "unknown": 2}
    assert counts("own", "source") == {"normal": 41, "unknown": 3}


def test_without_the_nics_no_healthy_table_is_called_not_normal() -> None:
    assert counts("yes", "table", with_nics=False) == {"normal": 67, BELOW: 1, "unknown": 28}
    assert counts("no", "table", with_nics=False) == {"not normal": 6, "unknown": 4}


def test_what_is_not_seen_ends_before_the_bandwidth_is_compared() -> None:
    """A tuner's wrong table for 32 to 224 MiB, and one NIC of four in rows up to 32 MiB."""
    for name, nics in (("mi350-2-before", None), ("ntest232", (4, 400.0))):
        [judgement] = judge(SAMPLES[name].table, nics=nics)
        assert judgement.value == "unknown"
        assert any(
            words in judgement.text
            for words in (
                "no reference for these sizes of",
                "the peak is judged from 256 MiB on",
            )
        )


@pytest.mark.parametrize("with_nics", [True, False])
def test_no_part_of_a_healthy_table_is_called_not_normal(with_nics: bool) -> None:
    """A table may end or begin at any size."""
    for sample in SAMPLES.values():
        if sample.healthy != "yes":
            continue
        nics = sample.nics if with_nics else None
        for size in {reading.size_bytes or 0 for reading in sample.table.readings}:
            readings = sample.table.readings
            first = tuple(each for each in readings if (each.size_bytes or 0) <= size)
            last = tuple(each for each in readings if (each.size_bytes or 0) >= size)
            for part in (part for part in (first, last) if part != readings):
                for judgement in judge(replace(sample.table, readings=part), nics=nics):
                    assert judgement.value != "not normal", (sample.name, size)


def named(name: str, nics: tuple[int, float] | None = None) -> Judgement:
    [judgement] = judge(SAMPLES[name].table, nics=nics)
    return judgement


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        (
            "rtx6000d-a2a-bad",
            "fall",
            "34.3 GB/s at 16 MiB to 0.904 GB/s at 32 MiB (34.79 ms) and low up to 2 GiB",
        ),
        ("nccl1453", "fall", "29.5 GB/s at 32 MiB to 5.27 GB/s at 64 MiB"),
        ("xx-c00-2x1-slowpair-sendrecv", "fall", "7.82 GB/s at 512 MiB to 5.02 GB/s at 2 GiB"),
        ("gcp-a3-cold", "floor", "every size up to 1 GiB takes 4.654 ms and more"),
        ("rtx5090-tcp", "floor", "every size up to 16 MiB takes 4.366 ms and more"),
        ("h200-cetus-bad", "slow-rows", "256 KiB (25.0 x), 8 MiB (10.1 x), 32 MiB (5.8 x)"),
        ("h100-2x2", "slow-rows", "256 KiB (2.5 x), 512 KiB (3.9 x), 1 MiB (2.0 x)"),
        ("rtx6000d-ar", "slow-rows", "512 KiB"),
    ],
)
def test_each_fault_of_a_curve_has_its_sizes(name: str, rule: str, words: str) -> None:
    judgement = named(name)
    assert judgement.value == "not normal"
    [finding] = [each for each in judgement.findings if each.rule == f"not-normal-{rule}"]
    assert finding.severity is Severity.WARNING
    assert finding.action
    assert words in finding.text
    assert words[1:] in judgement.text
    assert "Usual cause: " in judgement.text


def test_a_part_of_the_nics() -> None:
    judgement = named("ntest290-2ring", NDR)
    assert [each.rule for each in judgement.findings] == ["not-normal-plateau"]
    assert "about the rate of 2 of 8 NICs" in judgement.text
    unstated = named("ntest290-2ring")
    assert unstated.value == "unknown"
    assert "(--nics 8x400G)" in unstated.text


def test_one_slow_row_is_named_and_no_verdict() -> None:
    judgement = named("ntest309-8", NDR)
    assert (judgement.value, judgement.findings) == ("normal", ())
    assert "8 MiB (" in judgement.text


def test_small_messages_of_a_slow_path() -> None:
    table = SAMPLES["ntest309-2"].table
    slow = tuple(
        replace(reading, time_s=(reading.time_s or 0.0) + 250e-6, printed=None)
        for reading in table.readings
    )
    [judgement] = judge(replace(table, readings=slow), nics=NDR)
    assert [each.rule for each in judgement.findings] == ["not-normal-latency"]


@pytest.mark.parametrize("name", ["aws-p5-1", "ntest309-2", "gcp-a3ultra-ag", "mi355x-2"])
def test_a_third_of_the_bandwidth_is_not_normal(name: str) -> None:
    sample = SAMPLES[name]
    readings = tuple(
        replace(
            reading,
            time_s=3 * (reading.time_s or 0.0),
            busbw_bytes_per_s=(reading.busbw_bytes_per_s or 0.0) / 3,
        )
        for reading in sample.table.readings
        if (reading.size_bytes or 0) >= MIB
    )
    [judgement] = judge(replace(sample.table, readings=readings), nics=sample.nics)
    assert "not-normal-plateau" in [each.rule for each in judgement.findings] or (
        judgement.value == "unknown" and "only one table" in judgement.text
    )


def plain_table(sizes_and_times: dict[int, float], **facts: Any) -> Table:
    readings = tuple(
        Reading(line=line, size_bytes=size, time_s=time, placement=place, dtype="fp32")
        for line, (size, time) in enumerate(sizes_and_times.items(), 1)
        for place in (OUT_OF_PLACE, IN_PLACE)
    )
    known: dict[str, Any] = {
        "num_ranks": 8,
        "num_hosts": 1,
        "device": H100,
        "collective": "all_reduce",
    }
    base = Table(
        file="x", first_line=1, last_line=1, title="", tool="nccl-tests", readings=readings
    )
    return replace(base, **(known | facts))


GOOD = {KIB: 15e-6, MIB: 30e-6, 256 * MIB: 1.1e-3, GIB: 4.1e-3}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"num_hosts": None, "device": ""}, "hardware is not stated"),
        ({"num_hosts": 3}, "different numbers of ranks"),
        ({"device": "GPU of tomorrow"}, "no reference for these sizes of GPU of tomorrow"),
        ({"collective": "broadcast"}, "no reference"),
    ],
)
def test_what_is_missing_is_said(facts: dict[str, object], words: str) -> None:
    [judgement] = judge(plain_table(GOOD, **facts))
    assert judgement.value == "unknown"
    assert words in judgement.text
    assert "Its curve, single rows aside, has no fault." in judgement.text


def test_nics_that_are_assumed_are_named() -> None:
    """As fast as tables with the fastest NICs of this GPU is normal; slower is no verdict."""
    [judgement] = judge(plain_table(GOOD, num_ranks=16, num_hosts=2))
    assert judgement.value == "normal"
    assert (
        "The NICs of a host are not stated: 400G EFA or RDMA for each GPU fit."
        in judgement.text
    )
    slow = {size: 3 * time for size, time in GOOD.items()}
    [judgement] = judge(plain_table(slow, num_ranks=16, num_hosts=2))
    assert judgement.value == "unknown"
    assert "(--nics 8x400G)" in judgement.text


def test_other_tables_have_no_verdict() -> None:
    assert judge(plain_table(GOOD, collective="images")) == ()
    assert judge(plain_table(GOOD, method="nccl-tests queued, time to enqueue")) == ()
    assert judge(plain_table({})) == ()
    assert judge(plain_table({0: 1e-6})) == ()


def test_one_row_is_judged_by_what_it_has() -> None:
    [judgement] = judge(plain_table({4 * GIB: 15.8e-3}))
    assert judgement.value == "normal"
    [judgement] = judge(plain_table({MIB: 30e-6}))
    assert judgement.value == "unknown"


def test_wrong_results_are_not_normal_however_fast() -> None:
    table = plain_table(GOOD)
    wrong = tuple(replace(reading, num_wrong=3) for reading in table.readings)
    [judgement] = judge(replace(table, readings=wrong))
    assert judgement.value == "not normal"
    assert "Times of wrong results do not count." in judgement.text
    [judgement] = judge(plain_table(GOOD, notes=("the footer counts values out of bounds: 7",)))
    assert judgement.value == "not normal"


def test_missing_rows_are_said() -> None:
    note = "rows are missing: 2 of those that the parameters ask for"
    [judgement] = judge(plain_table(GOOD, notes=(note,)))
    assert judgement.value == "normal"
    assert "Rows are missing: 2 of those" in judgement.text


def test_each_type_has_its_verdict() -> None:
    table = plain_table(GOOD)
    slow = tuple(
        replace(reading, dtype="fp16", time_s=4 * (reading.time_s or 0.0))
        for reading in plain_table(GOOD | {4 * GIB: 16e-3}).readings
    )
    judgements = judge(replace(table, readings=(*table.readings, *slow)))
    assert [each.value for each in judgements] == ["normal", "not normal"]
    assert "fp16" in judgements[1].text


def test_ranks_that_one_thread_launches_have_no_latency() -> None:
    [judgement] = judge(plain_table({KIB: 90e-6, **GOOD}, gpus_per_thread=8))
    assert judgement.value == "normal"
    assert "one thread launches on 8 GPUs in turn" in judgement.text


def hardware(ranks: int, hosts: int, gbit: float = 400.0) -> Hardware:
    device = find_device(H100)
    return Hardware(device=device, num_ranks=ranks, num_hosts=hosts, nic_gbit=gbit)


def test_rates_are_those_of_links_and_nics() -> None:
    assert rate(hardware(8, 1), "all_reduce", 0) == 450e9
    assert rate(hardware(16, 2), "all_reduce", 400) == 400e9
    assert rate(hardware(16, 2), "sendrecv", 400) == 50e9
    # https://github.com/NVIDIA/nccl-tests/issues/130: W m/(m-1) (n-1)/n
    assert rate(hardware(16, 2), "all_to_all", 400) == pytest.approx(93.75e9)
    assert rate(hardware(80, 10), "all_to_all", 400) == pytest.approx(50e9 * 10 / 9 * 79 / 80)
    assert rate(hardware(16, 0), "all_reduce", 400) == 0


def test_latency_is_that_of_the_tuner() -> None:
    """Measured on H100 with InfiniBand: 24.9 us on two hosts, 34.8 us on four."""
    assert tuner_latency_s("all_reduce", hardware(16, 2)) == pytest.approx(25.2e-6)
    assert tuner_latency_s("all_reduce", hardware(32, 4)) == pytest.approx(35.2e-6)


@pytest.mark.parametrize(("ranks", "channels"), [(16, 4), (32, 4), (40, 2), (64, 2), (80, 1)])
def test_send_receive_has_fewer_channels_in_larger_groups(ranks: int, channels: int) -> None:
    assert send_channel_share(ranks, 400) == pytest.approx(min(channels * 13 / 50, 1))


def test_nics_change_nothing_on_one_host() -> None:
    table = plain_table(GOOD)
    assert judge(table, nics=NDR) == judge(table)


@pytest.mark.parametrize(
    ("ranks", "hosts", "family", "limits"),
    [
        (256, 32, "all_reduce", (32 / 31 * 255 / 256, 2 * 255 / 256)),
        (16, 2, "all_reduce", (1.875, 1.875)),
        (8, 1, "all_reduce", (1.0, 1.75)),
        (16, 2, "gather", (1.875, 1.875)),
        (8, 1, "gather", (1.0, 1.0)),
        (16, 2, "all_to_all", (1.0, 1.0)),
        (16, 2, "sendrecv", (8.0, 8.0)),
        (16, 2, "broadcast", (inf, inf)),
        (16, 0, "all_reduce", (inf, inf)),
    ],
)
def test_what_links_can_carry(
    ranks: int, hosts: int, family: str, limits: tuple[float, float]
) -> None:
    assert possible_shares(hardware(ranks, hosts), family) == pytest.approx(limits)


def test_domains_of_nvlink_over_several_hosts_have_no_limit() -> None:
    gb200 = replace(hardware(144, 36), device=find_device("NVIDIA GB200"))
    assert possible_shares(gb200, "all_reduce") == (inf, inf)


def test_no_healthy_table_is_faster_than_its_links() -> None:
    for sample in SAMPLES.values():
        if sample.healthy == "yes":
            for judgement in judge(sample.table, nics=sample.nics):
                assert "can carry at most" not in judgement.text


def at_rate(gb_s: float, ranks: int, hosts: int) -> Table:
    sizes = (256 * MIB, GIB, 4 * GIB, 8 * GIB)
    factor = 2 * (ranks - 1) / ranks
    times = {size: factor * size / (gb_s * 1e9) for size in sizes}
    return plain_table(times, num_ranks=ranks, num_hosts=hosts)


@pytest.mark.parametrize(
    ("gb_s", "ranks", "hosts", "nics", "words"),
    [
        (347.6, 256, 32, (4, 400.0), "can carry at most 205.6 GB/s unless the network's"),
        (347.6, 256, 32, (4, 200.0), "can carry at most 199.2 GB/s: --nics"),
        (500.0, 256, 32, None, "the NICs (400G for each GPU, assumed) can carry at most"),
        (760.0, 16, 2, (8, 400.0), "can carry at most 750 GB/s: --nics"),
        (700.0, 16, 2, (8, 400.0), "no healthy table reaches more than 487.2 GB/s"),
        (800.0, 8, 1, None, "NVLink 4 can carry at most 787.5 GB/s: the GPU"),
    ],
)
def test_more_than_links_or_healthy_tables_carry_is_unknown(
    gb_s: float, ranks: int, hosts: int, nics: tuple[int, float] | None, words: str
) -> None:
    [judgement] = judge(at_rate(gb_s, ranks, hosts), nics=nics)
    assert judgement.value == "unknown"
    assert words.lower() in judgement.text.lower()


@pytest.mark.parametrize(
    ("gb_s", "value"),
    [(310, "normal"), (300, BELOW), (275.4, BELOW), (270, "not normal")],
)
def test_below_the_healthy_range(gb_s: float, value: str) -> None:
    """Healthy tables reach 320.7 to 393.1 GB/s."""
    [judgement] = judge(at_rate(gb_s, 256, 32), nics=NDR)
    assert judgement.value == value
    assert ("95% is normal, less than 85% not normal" in judgement.text) is (value == BELOW)
    reference = judgement.rows[0]["reference"]
    assert reference.endswith("normal from 304.6 GB/s, not normal below 272.6 GB/s")


def test_a_lower_bandwidth_has_no_better_verdict() -> None:
    """With one table, with tables of other GPUs, or with NICs that are assumed, too."""
    order = ("normal", BELOW, "unknown", "not normal")
    for sample in SAMPLES.values():
        for nics in (sample.nics, None):
            places = []
            for slower in (1.001, 1.04, 1.08, 1.12, 1.2, 1.5, 2.5):
                readings = tuple(
                    replace(
                        each,
                        time_s=slower * (each.time_s or 0.0),
                        busbw_bytes_per_s=(each.busbw_bytes_per_s or 0.0) / slower,
                    )
                    for each in sample.table.readings
                )
                judgement = judge(replace(sample.table, readings=readings), nics=nics)[0]
                if "can carry" not in judgement.text and "check" not in judgement.text:
                    places.append(order.index(judgement.value))
            assert places == sorted(places), sample.name


def test_nothing_judged_is_no_verdict() -> None:
    """A table of small messages without a range for their times."""
    sample = SAMPLES["nccl652"]
    [judgement] = judge(sample.table, nics=sample.nics)
    assert judgement.value == "unknown"


def test_one_table_is_no_reference_for_small_messages() -> None:
    times = {KIB: 60e-6, GIB: 6e-3, 4 * GIB: 24e-3}
    [judgement] = judge(plain_table(times, num_ranks=256, num_hosts=32), nics=NDR)
    assert judgement.value == "normal"
    assert "us): one healthy table is no range" in judgement.text


@pytest.mark.parametrize(
    ("facts", "limit", "value"),
    [
        ({}, "5 times that of healthy tables (54.65 us)", "not normal"),
        (
            {"device": "NVIDIA A100-SXM4-80GB"},
            "5 times that of healthy tables of other GPUs or NICs (54.65 us)",
            "unknown",
        ),
    ],
)
def test_a_latency_far_beyond_healthy_ones_is_not_normal(
    facts: dict[str, object], limit: str, value: str
) -> None:
    """One table, or none of this GPU: a limit that is wide."""
    busbw = 2 * 127 / 128 / 380e9
    table = {
        size: 60e-6 + busbw * size for size in (KIB, MIB, 256 * MIB, GIB, 4 * GIB, 8 * GIB)
    }
    [good] = judge(plain_table(table, num_ranks=128, num_hosts=16, **facts), nics=NDR)
    late = {size: time + 1.2e-3 for size, time in table.items()}
    [judgement] = judge(plain_table(late, num_ranks=128, num_hosts=16, **facts), nics=NDR)
    assert "more than 5 times" not in good.text
    assert "The shortest time is 1.26 ms, more than" in judgement.text
    assert limit in judgement.text
    assert judgement.value == value


def damaged(table: Table, factors: dict[int, float]) -> Table:
    """Return the table with times that are longer by the factor of their size."""
    readings = [
        replace(
            each,
            time_s=factors[each.size_bytes or 0] * (each.time_s or 0.0) or None,
            busbw_bytes_per_s=(each.busbw_bytes_per_s or 0.0) / factors[each.size_bytes or 0],
            printed=None,
        )
        for each in table.readings
    ]
    return replace(table, readings=tuple(readings))


def test_more_damage_has_no_better_verdict() -> None:
    """Of tables with ten sizes and more; noise of 5 % makes none "not normal"."""
    random = Random(7)
    num_faults = 0
    for sample in SAMPLES.values():
        sizes = sorted({each.size_bytes or 0 for each in sample.table.readings})
        [judgement, *_] = judge(sample.table, nics=sample.nics)
        if sample.healthy != "yes" or judgement.value != "normal" or len(sizes) < 10:
            continue
        noise = {size: random.uniform(0.95, 1.05) for size in sizes}
        [noisy, *_] = judge(damaged(sample.table, noise), nics=sample.nics)
        assert noisy.value != "not normal", sample.name
        factors = dict.fromkeys(sizes, 1.0)
        was_faulty = False
        for size in random.sample(sizes, len(sizes)):
            factors[size] = random.uniform(2, 10)
            [judgement, *_] = judge(damaged(sample.table, factors), nics=sample.nics)
            is_faulty = judgement.value not in ("normal", BELOW)
            assert is_faulty >= was_faulty, (sample.name, factors)
            was_faulty = is_faulty
        num_faults += was_faulty
    assert num_faults > 30


def test_a_block_of_slow_rows() -> None:
    """1 to 16 MiB take five times as long: each is slow, and 16 MiB takes longer than 32."""
    sizes = [2**place for place in range(10, 34)]
    times = {size: 105e-6 + 2 * 127 / 128 * size / 385e9 for size in sizes}
    slow = {size: 5 * time if MIB <= size <= 16 * MIB else time for size, time in times.items()}
    one = {size: 5 * time if size == 4 * MIB else time for size, time in times.items()}
    alone = {size: 10 * time if size == 4 * MIB else time for size, time in times.items()}
    for rows, value, shape in (
        (times, "normal", "no fault"),
        (slow, "not normal", "slow-rows"),
        (one, "normal", "slow-row"),
        (alone, "not normal", "slow-rows"),
    ):
        [judgement] = judge(plain_table(rows, num_ranks=128, num_hosts=16), nics=NDR)
        assert (judgement.value, judgement.rows[2]["value"]) == (value, shape)


def test_busbw_of_another_number_of_ranks_is_unknown() -> None:
    busbw = Finding(rule="ranks-factor", severity=Severity.WARNING, text="not 8 ranks")
    [judgement] = judge(plain_table(GOOD), findings=[busbw])
    assert judgement.value == "unknown"
    assert "Not 8 ranks." in judgement.text


def test_what_a_range_hides_is_told() -> None:
    """One slow host among 16, and a peak just above what the NICs carry."""
    [judgement] = judge(at_rate(340, 128, 16), nics=NDR)
    assert judgement.value == "normal"
    assert "16% faster: a slow host or link may hide in that range (stepmark doctor" in (
        judgement.text
    )
    [judgement] = judge(at_rate(152, 128, 16), nics=NDR)
    assert "or one slow host or link" in judgement.text
    assert "comm p2p-matrix" in judgement.findings[0].action


def test_causes_on_one_host_are_not_those_of_a_network() -> None:
    slow = {KIB: 90e-6, MIB: 95e-6, 256 * MIB: 1.1e-3, GIB: 4.1e-3}
    fall = {KIB: 15e-6, MIB: 30e-6, 256 * MIB: 9e-3, GIB: 36e-3}
    floor = {KIB: 2e-3, 16 * KIB: 2e-3, MIB: 2.1e-3}
    for times in (slow, fall, floor):
        [judgement] = judge(plain_table(times))
        assert judgement.value == "not normal"
        for word in ("TCP", "Socket", "PFC", "NICs", "-w 5"):
            assert word not in judgement.text
    [judgement] = judge(plain_table(floor, num_ranks=16, num_hosts=2), nics=NDR)
    assert "a network over TCP" in judgement.text


def test_a_domain_of_nvlink_is_one_host() -> None:
    table = plain_table(GOOD, device="NVIDIA GB200", num_ranks=32, num_hosts=8)
    assert hardware_of(table, None).num_hosts == 1


def test_nics_are_a_number_and_a_rate() -> None:
    assert parse_nics("8x400G") == (8, 400.0)
    assert parse_nics(" 32 X 100 ") == (32, 100.0)
    for text in ("", "400G", "0x400G", "8x0", "8x400Gb"):
        with pytest.raises(ConfigError, match="as in 8x400G"):
            parse_nics(text)


def printed(hosts: tuple[str, ...], per_host: int = 2, gpu: str = H100) -> Table:
    lines = [
        f"#  Rank {rank:2} Group  0 Pid  {rank + 100} on {host} device {index} "
        f"[0000:0{index}:00] {gpu}"
        for rank, (host, index) in enumerate(
            (host, index) for host in hosts for index in range(per_host)
        )
    ]
    figures = "time  algbw  busbw  #wrong "
    rows = [f"#  size  count  type  redop  root  {figures} {figures}"]
    rows += ["1048576 262144 float sum -1 100.0 10.49 15.73 0 100.0 10.49 15.73 0"]
    [table] = tables_of("\n".join([*lines, *rows]), "x")
    return table


def test_hosts_and_gpus_are_those_of_the_rank_lines() -> None:
    table = printed(("a", "b"))
    assert (table.num_ranks, table.num_hosts, table.device) == (4, 2, H100)
    assert printed(("a",), gpu="AMD Instinct MI300X OAM").device == "AMD Instinct MI300X OAM"
    # Two containers of one name: which ranks share a host is not known.
    assert printed(("vm", "vm")).num_hosts is None


def test_ranks_on_cpus_have_hosts() -> None:
    """Our own output has the address 0000:00:00 for each of them."""
    lines = [
        f"#  Rank  {rank} Group  0 Pid  {rank + 9} on vm device  0 [0000:00:00] AMD EPYC"
        for rank in range(2)
    ]
    head = "#  size  count  type  redop  root  time  algbw  busbw  #wrong "
    row = "1048576 262144 float sum -1 1811.7 0.58 0.58 0"
    tool = "# stepmark 0.1.0, torch 2.13.0; layout of nccl-tests, run x"
    [table] = tables_of("\n".join([tool, *lines, head, row]), "x")
    assert (table.num_hosts, table.device) == (1, "AMD EPYC")
    [judgement] = judge(replace(table, collective="all_reduce"))
    assert judgement.value == "unknown"
    assert "no reference for these sizes of AMD EPYC" in judgement.text
    assert judgement.rows[-1]["value"] == "none to compare with"


def test_the_folder_of_a_run_is_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["logs", "results/h200-x2-gemm"]) == 2
    assert "(a run: `stepmark runs show`)" in capsys.readouterr().err


def test_logs_answers_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["logs", str(ALL_REDUCE_8)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = " ".join(" ".join(lines).partition(str(ALL_REDUCE_8))[0].split())
    num_facts = lines.index(next(line for line in lines if "nccl-tests queued" in line))
    assert max(len(line) for line in lines[:num_facts] if "/" not in line) <= 80
    for words in (
        "normal: ",
        "365.4 GB/s at 4 GiB",
        "81% of",
        "NVLink 4",
        "59.32 us at 16 KiB",
    ):
        assert words in first
    assert "with NVLS" in first


def test_logs_writes_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["logs", str(ALL_REDUCE_8), "--json", "-"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert table["judgements"][0]["verdict"] == "normal"
    assert table["device"] == "NVIDIA H200"


def test_a_table_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["report"], ["runs", "show"]):
        assert status([*verb, str(ALL_REDUCE_8)]) == 2
        assert f"`stepmark logs {ALL_REDUCE_8}`" in capsys.readouterr().err
