"""Every rule fires on lines that prove it, quotes them, and is silent on lines that do not."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stepmark.findings.finding import Finding, Severity
from stepmark.job_logs.failures import FAILURES
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

from .nccl_lines import DATA, FSDP8, Issued, coll, info, start, warn, written

PROBLEM, WARNING, NOTE = Severity.PROBLEM, Severity.WARNING, Severity.NOTE
HOSTS = ("node-1", "node-2")


def flat(findings: Iterable[Finding]) -> list[Finding]:
    """Findings with the links of their chains and their consequences."""
    return [
        part for one in findings for part in (one, *flat(one.chain), *flat(one.consequences))
    ]


def findings(lines: Sequence[str]) -> list[Finding]:
    with TemporaryDirectory() as folder:
        return flat(diagnose(read_log([written(Path(folder), lines)])))


def of(path: Path | Sequence[Path]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for one in flat(diagnose(read_log([path] if isinstance(path, Path) else path))):
        found.setdefault(one.rule, []).append(one)
    return found


def one_node(*more: str) -> list[str]:
    return [*start(0), *start(1), *more]


def two_nodes(*more: str) -> list[str]:
    lines = [line for r in (0, 1) for line in start(r, num_nodes=2, host=HOSTS[r])]
    return [*lines, *more]


def on(rank: int, message: str) -> str:
    return info(rank, message, host=HOSTS[rank])


SOCKET = "Using network Socket"
MISSING = "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."
IB_LINK = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"
EIGHT = "[0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_2:1/IB"
NVLINK = "Pattern 4, crossNic 0, nChannels 2, bw 20.0/20.0, type NVL/PIX, sameChannels 1"
PCI = "Pattern 4, crossNic 0, nChannels 2, bw 20.0/20.0, type PHB/PIX, sameChannels 1"
LOOP = "Bootstrap : Using lo:127.0.0.1<0>"
BRIDGES = "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]virbr0:192.168.122.1<0>"
NO_GDR = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
DLVSYM = "dlvsym failed on mlx5dv_reg_dmabuf_mr - libmlx5.so: undefined symbol"
TOPOLOGY = "Topology detection : could not read /sys/max_link_speed, ignoring"


def counts(coll: int, nvls: int) -> str:
    return (
        f"{coll} coll channels, {coll} collnet channels, {nvls} nvls channels, 4 p2p channels, "
        "2 p2p channels per peer"
    )


def times(total: str, bootstrap: str) -> str:
    return (
        f"Init timings - ncclCommInitRank: rank 0 nranks 2 total {total} (kernels 0.5, "
        f"bootstrap {bootstrap}, rest 0.1)"
    )


def meets(*addresses: str) -> list[str]:
    """Two nodes that start on these interfaces."""
    found = (on(rank, f"Bootstrap : Using {at}<0>") for rank, at in enumerate(addresses))
    return two_nodes(*found)


def shared(*devices: int) -> list[str]:
    """Three ranks of one host, each through its network device; the host lists three."""
    lines = [line for r in range(4) for line in start(r, num_ranks=4, num_nodes=2)]
    lines.append(info(0, f"NET/IB : Using {EIGHT} [RO]; OOB eth0:10.0.0.1<0>"))
    text = "Channel 0{0}/0 : {0}[0] -> 3[0] [send] via NET/IB/{1}/GDRDMA"
    return lines + [
        info(rank, text.format(rank, device)) for rank, device in enumerate(devices)
    ]


GOT = "Got completion from peer 10.0.0.1<5>"
WARNS = (
    ("failure-version", "Mismatched NCCL version detected : rank 0 version 22809 rank 1"),
    (
        "failure-mismatch",
        "NET/IB : req 0/1 tag 0 peer a<5> collective mismatch error, local size 4",
    ),
    (
        "failure-ib-connect",
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev m",
    ),
    ("failure-ib-retry", f"NET/IB : {GOT} with status=12 opcode=1 len=0 vendor err 129 (Send)"),
    ("failure-ib-retry", f"NET/IB: {GOT} with status=IBV_WC_RETRY_EXC_ERR(12) opcode=SEND(1)"),
    ("failure-ib", f"NET/IB : {GOT} with error 4, opcode 8983, len 0"),
    ("failure-peer-closed", "socketProgress: Connection closed by remote peer node2<42830>"),
    ("failure-no-algorithm", "Error : no algorithm/protocol available for function AllGather"),
    (
        "failure-nvls",
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA",
    ),
    (
        "failure-p2p",
        "P2P is disabled between NVLINK connected GPUs 0 and 1. This should not be",
    ),
    ("failure-no-interface", "Bootstrap : no socket interface found"),
    (
        "failure-connect",
        "socketStartConnect: Connect to 10.0.0.1<5> failed : Connection refused",
    ),
    ("failure-cuda", "Cuda failure 1 'invalid argument'"),
)

# A process, and a line of it that is torn in front.
TORN = [*[info(0, "Using network IB")] * 9, info(0, "Using network IB")[2:]]

FIRES: list[tuple[str, Severity, list[str]]] = [
    ("net-socket", WARNING, two_nodes(on(0, SOCKET))),
    ("net-socket", NOTE, one_node(info(0, SOCKET))),
    ("net-socket", WARNING, [info(0, "Channel 0/0 : 3[a] -> 4[b] [send] via NET/Socket/0")]),
    (
        "net-socket",
        WARNING,
        one_node(info(0, SOCKET), info(0, IB_LINK.replace("IB", "Socket"))),
    ),
    ("plugin-missing", WARNING, two_nodes(on(0, MISSING), on(0, SOCKET))),
    ("plugin-missing", NOTE, two_nodes(on(0, MISSING), on(0, "Using network IB"))),
    ("plugin-missing", NOTE, one_node(info(0, MISSING), info(0, SOCKET))),
    (
        "plugin-not-loaded",
        WARNING,
        [
            info(0, "NET/Plugin: Plugin name set by env to libnccl-net-ofi.so"),
            info(0, "NET/Plugin: Could not find: libnccl-net-ofi.so."),
        ],
    ),
    (
        "plugin-not-loaded",
        WARNING,
        [info(0, "NET/Plugin: Failed to find ncclNetPlugin_v8 symbol.")],
    ),
    (
        "plugin-older-api",
        NOTE,
        [
            info(0, "NET/Plugin: Failed to find ncclNetPlugin_v6 symbol."),
            info(0, "NET/Plugin: Loaded net plugin AWS Libfabric (v5)"),
        ],
    ),
    ("no-gpudirect", WARNING, two_nodes(on(0, IB_LINK))),
    (
        "no-gpudirect",
        WARNING,
        two_nodes(
            on(0, "Using network IB"),
            on(0, NO_GDR),
        ),
    ),
    (
        "shm-instead-of-p2p",
        WARNING,
        one_node(info(0, "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct")),
    ),
    (
        "mixed-versions",
        WARNING,
        [info(0, "NCCL version 2.28.9+cuda13.0"), info(1, "NCCL version 2.27.7+cuda13.0")],
    ),
    (
        "mixed-versions",
        WARNING,
        [info(0, "cudaDriverVersion 12040"), info(1, "cudaDriverVersion 12020")],
    ),
    (
        "wrong-interface",
        PROBLEM,
        meets("lo:127.0.0.1", "eth0:10.0.0.2"),
    ),
    ("wrong-interface", WARNING, two_nodes(on(0, "Bootstrap: Using docker0:172.17.0.1<0>"))),
    (
        "wrong-interface",
        WARNING,
        two_nodes(
            on(0, SOCKET),
            on(0, BRIDGES),
        ),
    ),
    (
        "mixed-interfaces",
        NOTE,
        meets("eno1:10.0.0.1", "eth0:10.0.0.2"),
    ),
    (
        "mixed-interfaces",
        NOTE,
        meets("eth0:10.1.0.1", "eth0:10.2.0.2"),
    ),
    ("nic-imbalance", WARNING, shared(0, 0, 1)),
    ("nvls-off", WARNING, [info(0, "NCCL_NVLS_ENABLE set by environment to 0.")]),
    ("nvls-off", NOTE, [info(0, "NVLS multicast support is not available on dev 0")]),
    (
        "nvls-off",
        WARNING,
        [
            info(r, f"NVLS multicast support is {'not ' * r}available on dev {r}")
            for r in (0, 1)
        ],
    ),
    ("nvls-off", NOTE, [*start(0, num_ranks=8), info(0, counts(16, 0))]),
    ("few-channels", WARNING, one_node(info(1, NVLINK), info(1, counts(4, 0)))),
    (
        "few-channels",
        WARNING,
        one_node(
            info(1, "NCCL_MAX_NCHANNELS set by environment to 2."),
            info(1, counts(2, 0)),
        ),
    ),
    ("slow-init", WARNING, [*start(0), info(0, times("61.20", "58.00"))]),
    ("init-incomplete", WARNING, [*start(0), *start(1, state=("START",))]),
    ("forced-setting", WARNING, [info(0, "NCCL_ALGO set by environment to Tree")]),
    ("forced-setting", WARNING, [info(0, "NCCL_PROTO set by environment to LL128")]),
    *(
        ("forced-setting", WARNING, [info(0, f"NCCL_{way}_DISABLE set by environment to 1.")])
        for way in ("P2P", "IB", "SHM")
    ),
    ("call-mismatch", PROBLEM, one_node(coll(0, Issued(count=5)), coll(1, Issued(count=6)))),
    ("call-mismatch", WARNING, [coll(0, Issued(root=0)), coll(1, Issued("AllGather"))]),
    ("behind", WARNING, one_node(coll(0, Issued()), coll(0, Issued()), coll(1, Issued()))),
    ("cut-lines", NOTE, [coll(0, Issued())[:100]]),
    (
        "harmless",
        NOTE,
        [info(0, DLVSYM)],
    ),
    (
        "harmless",
        NOTE,
        [info(0, TOPOLOGY)],
    ),
    ("warning", WARNING, [warn(0, "Something nobody has seen before")]),
    ("warning", WARNING, [warn(0, "Could not parse NCCL_X, using default")]),
    ("failure-unknown", PROBLEM, [warn(0, "The widget is unable to spin")]),
    ("torn-lines", WARNING, TORN),
    ("failure-unknown", PROBLEM, [warn(0, "Unexpected widget: internal error 7")]),
    ("harmless", NOTE, [warn(0, "Failed to open libibverbs.so[.1]")]),
    ("harmless", NOTE, [warn(0, "NUMA auto balancing enabled which can lead to variability")]),
    *((rule, PROBLEM, [warn(0, text)]) for rule, text in WARNS),
]

SILENT: list[tuple[str, list[str]]] = [
    ("net-socket", two_nodes(on(0, "Using network IB"))),
    ("net-socket", two_nodes(on(0, "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"))),
    ("plugin-missing", one_node(info(0, "TUNER/Plugin: Could not find: libnccl-tuner.so"))),
    ("plugin-missing", [info(0, "NET/Plugin: Loaded net plugin AWS Libfabric (v5)")]),
    (
        "plugin-not-loaded",
        [
            info(0, "NET/Plugin: Plugin name set by env to libnccl-net-ofi.so"),
            info(0, "NET/Plugin: Loaded net plugin AWS Libfabric (v10)"),
        ],
    ),
    ("plugin-not-loaded", [info(0, MISSING)]),
    ("plugin-older-api", [info(0, "NET/Plugin: Loaded net plugin AWS Libfabric (v10)")]),
    ("no-gpudirect", two_nodes(on(0, IB_LINK + "/GDRDMA"))),
    ("no-gpudirect", two_nodes(on(0, IB_LINK.replace("IB", "Socket")))),
    (
        "no-gpudirect",
        one_node(info(0, "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'")),
    ),
    ("shm-instead-of-p2p", one_node(info(0, "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"))),
    ("mixed-versions", [info(r, "NCCL version 2.28.9+cuda13.0") for r in (0, 1)]),
    ("wrong-interface", one_node(info(0, LOOP))),
    ("wrong-interface", two_nodes(on(0, "Bootstrap : Using eth0:10.0.0.1<0>"))),
    (
        "wrong-interface",
        two_nodes(on(0, "Using network IB"), on(0, BRIDGES)),
    ),
    (
        "mixed-interfaces",
        meets("eth0:10.1.0.1", "eth0:10.1.9.2"),
    ),
    ("nic-imbalance", shared(0, 1, 2)),
    ("nic-imbalance", shared(0, 1)),
    ("nvls-off", [info(0, "NVLS multicast support is available on dev 0")]),
    ("nvls-off", [info(0, "NCCL_NVLS_ENABLE set by environment to 1.")]),
    ("few-channels", one_node(info(1, NVLINK), info(1, counts(24, 16)))),
    ("few-channels", one_node(info(1, PCI), info(1, counts(2, 0)))),
    ("slow-init", [*start(0), info(0, times("1.60", "0.90"))]),
    ("init-incomplete", one_node()),
    ("init-incomplete", [*start(0, state=("START",)), coll(0, Issued())]),
    ("forced-setting", [info(0, "NCCL_IB_DISABLE set by environment to 0.")]),
    ("forced-setting", [info(0, "NCCL_DEBUG set by environment to INFO")]),
    ("call-mismatch", one_node(coll(0, Issued()), coll(1, Issued()))),
    # As many ranks as one communicator has, but of two.
    ("call-mismatch", [coll(0, Issued(), num_ranks=4), coll(1, Issued(count=9), num_ranks=4)]),
    ("behind", one_node(coll(0, Issued()), coll(1, Issued()))),
    # The other rank logs no calls at all.
    ("behind", one_node(coll(0, Issued()))),
    ("cut-lines", [coll(0, Issued())]),
    ("harmless", [info(0, "Could not connect")]),
    ("warning", [info(0, "Using network IB")]),
    ("failure-unknown", [warn(0, "Could not read the speed, defaulting to 10 Gb/s")]),
    ("torn-lines", [*start(0), *TORN[:2], *TORN[-1:]]),
    (
        "failure-ib-retry",
        [warn(0, f"NET/IB : {GOT} with status=5 opcode=0")],
    ),
    ("failure-cuda", [info(0, "Cuda failure 1 'invalid argument'")]),
]


@pytest.mark.parametrize(("rule", "severity", "lines"), FIRES)
def test_a_rule_fires_and_quotes(rule: str, severity: Severity, lines: list[str]) -> None:
    found = [one for one in findings(lines) if one.rule == rule]
    assert [one.severity for one in found] == [severity]
    text = "\n".join(lines).split("\n")
    for shown in found[0].evidence:
        assert text[shown.line - 1] == shown.text
        assert Path(shown.file).name == "nccl.log"
    assert bool(found[0].evidence) == (rule != "cut-lines")
    assert found[0].count >= len(found[0].evidence)
    assert found[0].text.endswith((".", "before"))


@pytest.mark.parametrize(("rule", "lines"), SILENT)
def test_a_rule_is_silent(rule: str, lines: list[str]) -> None:
    assert rule not in {one.rule for one in findings(lines)}


def test_every_rule_is_tested_both_ways() -> None:
    fired = {rule for rule, _, _ in FIRES}
    assert fired - {rule for rule, _ in SILENT} <= {one.rule for one in FAILURES}


def test_problems_come_first() -> None:
    found = findings([info(0, SOCKET), warn(0, "Cuda failure 1"), warn(0, "Odd")])
    assert [one.severity for one in found] == [PROBLEM, WARNING, NOTE]


def test_the_step_on_eight_ranks_has_one_warning() -> None:
    found = of(FSDP8)
    assert found.keys() == {"nvls-off", "net-socket", "plugin-missing", "harmless"}
    assert {rule for rule, held in found.items() if held[0].severity is not NOTE} == {
        "nvls-off"
    }
    assert "on one node" in found["net-socket"][0].text
    assert found["nvls-off"][0].count == 9


def test_the_failed_symbol_of_a_newer_interface_is_harmless() -> None:
    found = of(DATA / "wrapped-plugin.txt")
    assert found.keys() == {"plugin-older-api", "plugin-no-collnet"}
    text = found["plugin-older-api"][0].text
    assert "AWS Libfabric (v5)" in text
    assert "Harmless" in text


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("wrapped-socket", {"net-socket"}),
        ("wrapped-libfabric", {"no-gpudirect"}),
        ("wrapped-gdr", set()),
        ("rccl-1026", {"net-socket"}),
        ("ib-707", set()),
        ("efa-1597", set()),
        ("loopback-300", {"plugin-missing"}),
        ("cut-rccl", set()),
        ("ray-1193", set()),
        ("mixed-147", set()),
        ("tp-1369", set()),
        (
            "warns",
            {"failure-ib-retry", "failure-nvls", "failure-mismatch", "failure-plugin"},
        ),
    ],
)
def test_real_excerpts(name: str, rules: set[str]) -> None:
    assert of(DATA / f"{name}.txt").keys() == rules


def test_the_reason_of_missing_gpudirect_is_told() -> None:
    (one,) = of(DATA / "gdr-1657.txt")["no-gpudirect"]
    assert "6 apart and NCCL_NET_GDR_LEVEL allows 4" in one.text
    assert len(one.evidence) == 2


def test_a_mismatch_names_ranks_and_calls() -> None:
    lines = [line for rank in range(4) for line in start(rank, num_ranks=4)]
    calls = [
        Issued("AllGather", 59205120, 0) if r == 2 else Issued(count=9984512) for r in range(4)
    ]
    lines += [coll(rank, call, num_ranks=4) for rank, call in enumerate(calls)]
    (one,) = [one for one in findings(lines) if one.rule == "call-mismatch"]
    assert "Ranks disagree on call 1 of communicator 0xabc0" in one.text
    assert "ranks 0-1, 3: all_reduce of 9984512 fp32, sum" in one.text
    assert "rank 2: all_gather of 59205120 int8" in one.text
    assert "Rank 2 differs from all others" in one.text
    assert one.ranks == (2,)


def test_a_rank_behind_is_named_with_what_it_did_not_do() -> None:
    lines = one_node(*(coll(0, Issued(count=n)) for n in (1, 2, 3)), coll(1, Issued(count=1)))
    (one,) = [one for one in findings(lines) if one.rule == "behind"]
    assert "rank 1 issued 1 of 3" in one.text
    assert "its last is all_reduce of 1 fp32" in one.text
    assert "did not issue all_reduce of 2 fp32, sum, which rank 0 did" in one.text
