"""Connections and adapters of a log: which are slow, and that the quoted line shows it."""

import re
from collections.abc import Callable

import pytest

from stepmark.findings.finding import Finding, Severity
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose
from stepmark.job_logs.nccl_log.start_rules import healthy_facts

from . import test_diagnose
from .nccl_lines import DATA, FSDP8, Issued, coll, facts_of, info, start

TWO_HOSTS = [line for r in (0, 1) for line in start(r, num_nodes=2, host=f"node-{r}")]


def on(rank: int, text: str) -> str:
    return info(rank, text, host=f"node-{rank}")


def via(rank: int, channel: int, way: str, *, side: str = "send") -> str:
    source, target = (rank, 1 - rank) if side == "send" else (1 - rank, rank)
    text = f"Channel {channel:02}/0 : {source}[0] -> {target}[0] [{side}] via NET/IB/{way}"
    return on(rank, text)


def network(lines: list[str], rule: str) -> list[Finding]:
    return [one for one in diagnose(facts_of([*TWO_HOSTS, *lines])) if one.rule == rule]


MIXED = [
    via(0, 0, "0/GDRDMA"),
    via(0, 1, "1"),
    via(1, 0, "0/GDRDMA"),
    via(1, 1, "0/GDRDMA"),
]


def test_gpudirect_is_counted_by_channel_and_adapter() -> None:
    (one,) = network(MIXED, "no-gpudirect")
    assert one.text.startswith(
        "1 of 4 connections over NET/IB goes without GPUDirect RDMA (NET/IB/1 of rank 0)"
    )
    assert one.evidence[0].text == MIXED[1]
    assert one.count == 1
    ways = {way.source: way for way in facts_of([*TWO_HOSTS, *MIXED]).transports}
    assert [(ways[r].gdrdma, ways[r].gdrdma_channels) for r in (0, 1)] == [
        (False, 1),
        (True, 2),
    ]


def test_a_connection_without_gpudirect_on_both_sides_is_one() -> None:
    lines = [via(0, 0, "1"), via(1, 0, "3", side="receive"), via(0, 1, "0/GDRDMA")]
    lines += [via(1, 1, "4", side="receive")]
    (one,) = network(lines, "no-gpudirect")
    assert one.text.startswith("2 of 2 connections over NET/IB go without")
    lines[-1] += "/GDRDMA/Shared"
    (one,) = network(lines, "no-gpudirect")
    assert one.text.startswith("1 of 2 connections over NET/IB goes without GPUDirect RDMA (")
    assert "(NET/IB/1 of rank 0, NET/IB/3 of rank 1)" in one.text


@pytest.mark.parametrize("ending", ["1", "1/", "1/G", "1/GDRDM"])
def test_a_cut_line_is_no_adapter_without_gpudirect(ending: str) -> None:
    """GPU, adapter and direction decide: other lines of them show what a cut one was."""
    lines = [via(0, n, "1/GDRDMA") for n in range(2)] + [via(0, 2, ending)]
    assert not network(lines, "no-gpudirect")
    (way,) = facts_of([*TWO_HOSTS, *lines]).transports
    assert (way.channels, way.gdrdma_channels) == (3, 3)
    other_direction = [*lines, via(0, 2, "1", side="receive")]
    assert network(other_direction, "no-gpudirect")


def test_a_line_whose_end_stands_on_the_next_is_whole() -> None:
    assert not network([via(0, 0, "1") + "\n/GDRDMA"], "no-gpudirect")


def test_a_reason_of_another_adapter_is_no_reason() -> None:
    far = "GPU Direct RDMA Disabled for GPU 0 / HCA {} (distance 6 > 4)"
    for index, is_named in ((1, True), (7, False)):
        (one,) = network([*MIXED, on(0, far.format(index))], "no-gpudirect")
        assert ("6 apart" in one.text) is is_named


# What the first quoted line of each finding on the network must show.
SHOWS: dict[str, Callable[[Finding, str], object]] = {
    "no-gpudirect": lambda one, line: (
        "Disabled" in line or "disabling GDR" in line
        if "switched off" in one.text
        else "NET/" in line and "GDRDMA" not in line
    ),
    "net-socket": lambda one, line: "Socket" in line,
    "shm-instead-of-p2p": lambda one, line: "SHM" in line or "shared memory" in line,
    "nic-imbalance": lambda one, line: re.search(r"via NET/|GDRDMA", line),
    "wrong-interface": lambda one, line: re.search(r" uses (\S+)", one.text)[1] in line,  # type: ignore[index]
    "slow-adapter": lambda one, line: "speed=" in line or "+ NET[" in line,
    "far-adapter": lambda one, line: re.search(r"SYS|PHB", line),
    "one-channel": lambda one, line: "1 coll channels" in line,
    "idle-adapters": lambda one, line: "via NET/" in line,
    "mixed-interfaces": lambda one, line: "Bootstrap" in line,
}


def test_the_quoted_line_shows_what_the_sentence_says() -> None:
    logs = [lines for _, _, lines in test_diagnose.FIRES] + [[*TWO_HOSTS, *MIXED]]
    logs += [[*TWO_HOSTS, *lines] for _, lines, _ in ADAPTERS] + [[*FOUR, *used(0)]]
    files = [*DATA.glob("*.txt"), *DATA.parent.glob("faults/*/output.txt.gz")]
    facts = [*map(facts_of, logs), *(read_log([path]) for path in files)]
    rules = set()
    for finding in (one for each in facts for one in diagnose(each)):
        if shows := SHOWS.get(finding.rule):
            rules.add(finding.rule)
            assert shows(finding, finding.evidence[0].text), finding
    assert rules == SHOWS.keys()


def test_reductions_in_the_network_have_gpudirect_by_channel() -> None:
    text = "CollNet {:02}/0 : 0 [send] via COLLNET/SHARP/{}"
    lines = [on(0, text.format(n, way)) for n, way in enumerate(("0/GDRDMA", "1"))]
    (way,) = facts_of([*TWO_HOSTS, *lines]).transports
    assert (way.kind, way.channels, way.gdrdma_channels) == ("COLLNET/SHARP", 2, 1)
    assert [end.device for end in way.staged] == [1]


HEALTHY = [
    "2 ranks on 2 hosts",
    "1 communicator started on every rank",
    "NET/IB with GPUDirect RDMA on 4 of 4 connections",
    "no line of a call is lost, torn or cut",
]


def test_a_healthy_log_says_what_is_in_order() -> None:
    direct = [via(r, n, "0/GDRDMA") for r in (0, 1) for n in (0, 1)]
    calls = [coll(r, Issued()).replace("node-1.cluster", f"node-{r}") for r in (0, 1)]
    assert healthy_facts(facts_of([*TWO_HOSTS, *direct, *calls])) == HEALTHY
    assert healthy_facts(facts_of([*TWO_HOSTS, *MIXED])) == HEALTHY[:2]
    for lines in (calls[:1], [*calls, calls[0]], [*calls, calls[0][:120]]):
        assert healthy_facts(facts_of([*TWO_HOSTS, *lines])) == HEALTHY[:2]


def test_what_is_not_in_the_log_is_not_said_to_be_in_order() -> None:
    """Excerpts have calls of one rank; a start that did not end is no start."""
    started = [line for line in TWO_HOSTS if "COMPLETE" not in line]
    assert healthy_facts(facts_of(started)) == []
    assert healthy_facts(read_log([DATA / "mismatch-429.txt"])) == []
    direct = [info(0, f"Channel {n:02}/0 : 0[0] -> 1[1] via P2P/CUMEM") for n in range(2)]
    shared = [info(0, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")]
    text = "GPU to GPU (P2P) on 2 of 2 connections without network"
    assert healthy_facts(facts_of(direct)) == [text]
    assert healthy_facts(facts_of([*direct, *shared])) == []
    assert "8 ranks on 1 host" in healthy_facts(read_log(FSDP8))


PORT = "NET/IB: [{0}] mlx5_{0}:uverbs{0}:1/IB provider=Mlx5 speed={1} context=0x5 ar=0"
NODE = "                            + NET[{0:.1f}] - NET/0-{1:x} (0/d4f9fc/1/{0:.6f})"
PATH = (
    "GPU/0-{0:x} :GPU/0-1000 (2/20.6/NVL) CPU/0-0 (2/24.0/PHB) NET/0-0 (9/9.0/SYS) "
    "NET/0-1 ({1})"
)
RING = "Pattern 4, crossNic 0, nChannels 8, {} 24.0/24.0, type NVL/{}, sameChannels 1"
LIST = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
FOUR = [
    line for r in range(4) for line in start(r, num_ranks=4, num_nodes=2, host=f"node-{r // 2}")
]


def one_channel(count: int) -> list[str]:
    counts = f"{count} coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels"
    return [on(0, LIST), on(0, counts)]


def used(*devices: int) -> list[str]:
    """Two hosts of two ranks and two listed adapters; rank i connects over devices[i]."""
    text = "Channel 00/0 : {0}[0] -> {1}[0] [send] via NET/IB/{2}/GDRDMA"
    lines = [info(0, LIST, host=f"node-{host}") for host in (0, 1)]
    return lines + [
        info(rank, text.format(rank, 3 - rank, device), host=f"node-{rank // 2}")
        for rank, device in enumerate(devices)
    ]


ADAPTERS: list[tuple[str, list[str], str]] = [
    (
        "slow-adapter",
        [
            on(r, PORT.format(n, 200000 if r + n == 2 else 400000))
            for r in (0, 1)
            for n in (0, 1)
        ],
        "1 network adapter is slow: mlx5_1 of node-1 at 200 Gb/s, and 3 at 400 Gb/s",
    ),
    (
        "slow-adapter",
        [on(r, NODE.format(12.5 if r else 25.0, 12)) for r in (0, 1)],
        "1 network adapter is slow: NET/0-c of node-1 at 100 Gb/s, and 1 at 200 Gb/s",
    ),
    (
        "far-adapter",
        [
            on(0, PATH.format(gpu, way))
            for gpu, way in ((0x4000, "3/24.0/PIX"), (0x8000, "5/9.0/SYS"))
        ],
        "Far from a network adapter: GPU/0-8000 of node-0 (SYS); others are at PIX.",
    ),
    (
        "far-adapter",
        [on(0, RING.format("bw", "PXB")), on(1, RING.format("speed", "PHB"))],
        "Far from a network adapter: a GPU of node-1 (PHB); others are at PXB.",
    ),
    ("one-channel", one_channel(1), "spans 2 nodes over 1 channel: one of 2 network adapters"),
]


@pytest.mark.parametrize(("rule", "lines", "text"), ADAPTERS)
def test_a_slow_or_far_adapter_is_a_warning(rule: str, lines: list[str], text: str) -> None:
    (one,) = network(lines, rule)
    assert text in one.text
    assert one.severity is Severity.WARNING
    assert one.evidence[0].text in lines


def test_an_adapter_that_carries_nothing_is_named() -> None:
    for lines, is_idle in ((used(0, 1), False), (used(0), True), (used(0, 1, 1), True)):
        rules = {one.rule: one for one in diagnose(facts_of([*FOUR, *lines]))}
        assert ("idle-adapters" in rules) is is_idle
    text = "On node-1, 1 of 2 network adapters (0) carry nothing in the connections of 2 ranks."
    assert rules["idle-adapters"].text == text


HEALTHY_ADAPTERS: list[tuple[str, list[str]]] = [
    ("slow-adapter", [on(r, PORT.format(n, 400000)) for r in (0, 1) for n in (0, 1)]),
    ("slow-adapter", [on(0, NODE.format(25.0, 1)), on(1, NODE.format(24.0, 1))]),
    ("far-adapter", [on(0, PATH.format(gpu, "5/9.0/PHB")) for gpu in (0x4000, 0x8000)]),
    ("far-adapter", [on(r, RING.format("bw", "PHB")) for r in (0, 1)]),
    ("far-adapter", [on(0, "GPU/0-1000 :GPU/0-1000 (0/5000.0/LOC) CPU/0-0 (2/24.0/PHB)")]),
    ("one-channel", one_channel(2)),
    ("one-channel", one_channel(1)[1:]),
]


@pytest.mark.parametrize(("rule", "lines"), HEALTHY_ADAPTERS)
def test_equal_adapters_are_no_finding(rule: str, lines: list[str]) -> None:
    assert not network(lines, rule)


def test_the_same_slow_adapter_of_all_hosts_is_no_warning() -> None:
    """It is for storage or management, as is one that no connection uses."""
    lines = [on(r, PORT.format(n, 400000 if n else 25000)) for r in (0, 1) for n in (0, 1, 2)]
    (one,) = network(lines, "slow-adapter")
    assert one.severity is Severity.NOTE
    lines = [on(0, NODE.format(50.0 if n else 3.125, n)) for n in (0, 1, 2)]
    for device, severity in ((1, Severity.NOTE), (0, Severity.WARNING)):
        (one,) = network([*lines, via(0, 0, f"{device}/GDRDMA")], "slow-adapter")
        assert one.severity is severity
