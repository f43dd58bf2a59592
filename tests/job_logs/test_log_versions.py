"""What logs of real jobs, and lines of all versions, say."""

import pytest

from stepmark.cases.message import MessageKind, Tally
from stepmark.job_logs.nccl_log import read_log

from .nccl_lines import (
    DATA,
    FSDP8,
    Issued,
    api_call,
    coll,
    facts_of,
    info,
    pid_of,
    pointer,
    start,
)


def test_a_step_of_fsdp_on_eight_ranks() -> None:
    facts = read_log(FSDP8)
    assert facts.hosts == ("vm",)
    assert [int(name.split(":")[1]) for name in facts.processes] == list(range(3084, 3092))
    values = dict(facts.versions.keys())
    assert values == {"nccl": "2.28.9", "cuda": "13.0", "cuda_driver": "13.0"}
    assert all(seen.processes == 8 for seen in facts.versions.values())
    (one,) = facts.communicators
    assert (one.key, one.num_ranks, one.num_nodes) == ("0x414b9b8a0ac25253", 8, 1)
    assert [member.rank for member in one.members] == list(range(8))
    assert one.rings == ((tuple(range(8)), 24),)
    assert one.num_trees == 24
    assert one.channels is not None
    assert (one.channels.coll, one.channels.nvls, one.channels.p2p) == (24, 0, 32)
    first = one.members[0].init
    assert first is not None
    assert (first.total_s, dict(first.parts_s)["bootstrap"]) == (1.6, 0.59)
    ring = {(rank, (rank + 1) % 8) for rank in range(8)}
    assert {(way.source, way.target) for way in facts.transports} == ring
    assert {(w.kind, w.channels, w.same_host) for w in facts.transports} == {
        ("P2P/CUMEM", 24, True)
    }
    cells = {(p.collective, p.algorithm, p.protocol): p for p in facts.predictions}
    assert cells["all_reduce", "Tree", "LL"].latency_s == pytest.approx(15.2e-6)
    assert cells["all_gather", "Ring", "Simple"].algbw_bytes_per_s == pytest.approx(411.4e9)
    assert ("broadcast", "Tree", "LL") not in cells
    assert {(c.algorithm, c.protocol, c.channels) for c in facts.choices} == {
        ("Ring", "Simple", 24)
    }
    assert sum(c.calls for c in facts.choices) == 260
    sizes = {(c.printed_bytes, c.message_bytes) for c in facts.choices}
    assert sizes == {(32768512, 8 * 32768512), (11797504, 8 * 11797504)}


def test_the_messages_of_that_step() -> None:
    messages = read_log(FSDP8).messages

    def kind(collective: str, phase: str, call_bytes: int) -> MessageKind:
        return MessageKind(
            collective=collective,
            dtype="bf16",
            group="0x414b9b8a0ac25253",
            num_ranks=8,
            phase=phase,
            call_bytes=call_bytes,
            message_bytes=8 * call_bytes,
        )

    # 10 steps: the root and 8 layers are gathered forward, the layers again backward.
    assert messages == {
        kind("all_gather", "forward", 32768512): Tally(calls=80, ranks=8),
        kind("all_gather", "forward", 11797504): Tally(calls=640, ranks=8),
        kind("all_gather", "backward", 11797504): Tally(calls=640, ranks=8),
        kind("reduce_scatter", "backward", 11797504): Tally(calls=640, ranks=8),
        kind("reduce_scatter", "backward", 32768512): Tally(calls=80, ranks=8),
    }


def test_lines_cut_by_a_terminal_still_count() -> None:
    path = DATA / "cut-rccl.txt"
    for num_ranks in (None, 8):
        messages = read_log([path], num_ranks=num_ranks).messages
        size = 106956800 * 2
        whole = None if num_ranks is None else size * 8
        assert {(k.collective, k.dtype, k.call_bytes, k.message_bytes) for k in messages} == {
            ("reduce_scatter", "bf16", size, whole),
            ("all_gather", "bf16", size, whole),
        }
        assert {(kind.group, kind.phase, kind.num_ranks) for kind in messages} == {
            ("", "", num_ranks)
        }


@pytest.mark.parametrize(
    ("name", "kind", "gdrdma", "ends"),
    [
        ("wrapped-socket", "NET/Socket", False, (36, 45)),
        ("wrapped-libfabric", "NET/AWS Libfabric", False, (70, 74)),
        ("wrapped-gdr", "NET/AWS Libfabric", True, (14, 18)),
    ],
)
def test_wrapped_lines_are_joined(
    name: str, kind: str, gdrdma: bool, ends: tuple[int, int]
) -> None:
    (way,) = read_log([DATA / f"{name}.txt"]).transports
    assert (way.kind, way.gdrdma, (way.source, way.target)) == (kind, gdrdma, ends)


def test_a_wrapped_call_is_joined() -> None:
    line = coll(0, Issued(count=77))
    for word in (" sendbuff", " count", " op 0", " comm"):
        low, high = line.split(word, 1)
        facts = facts_of([low + word, high.strip()])
        assert [k.call_bytes for k in facts.messages] == [308], word
        assert [k.num_ranks for k in facts.messages] == [2]


def test_processes_mixed_inside_a_line() -> None:
    facts = read_log([DATA / "mixed-147.txt"])
    assert sum(tally.calls for tally in facts.messages.values()) == 6
    groups = {kind.group for kind in facts.messages if kind.call_bytes == 424}
    assert "learnfair062:32629:0x7f372005a260" in groups
    half = coll(0, Issued(count=8))
    glued = f"{half[:60]}{coll(1, Issued(count=9))}"
    assert [kind.call_bytes for kind in facts_of([glued]).messages] == [36]


@pytest.mark.parametrize(
    ("via", "kind", "gdrdma", "pxn"),
    [
        (
            "Channel 02 : 0[d9000] -> 1[de000] [send] via NET/Socket/4",
            "NET/Socket",
            False,
            False,
        ),
        ("Channel 02/0 : 0[1] -> 1[0] [receive] via NET/IB/3/GDRDMA", "NET/IB", True, False),
        (
            "Channel 02/0 : 0[1] -> 1[0] [send] via NET/IB/3(5)/GDRDMA(PCI)",
            "NET/IB",
            True,
            True,
        ),
        (
            "Channel 0/0 : 0[1] -> 1[0] [send] via NET/IBext_v8/1/Shared",
            "NET/IBext_v8",
            False,
            False,
        ),
        (
            "Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read",
            "P2P/direct pointer",
            False,
            False,
        ),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/CE", "P2P/IPC", False, False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/indirect/3[3]", "P2P/indirect", False, False),
        ("Channel 00 : 0[0] -> 1[1] via direct shared memory", "SHM", False, False),
        ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM", False, False),
        ("Ring 00 : 0[0] -> 1[1] via P2P/IPC", "P2P/IPC", False, False),
    ],
)
def test_transports_of_all_versions(via: str, kind: str, gdrdma: bool, pxn: bool) -> None:
    facts = facts_of([*start(0), info(0, via)])
    (way,) = facts.transports
    assert (way.kind, way.gdrdma, way.pxn, way.channels) == (kind, gdrdma, pxn, 1)
    assert (way.source, way.target, way.communicator) == (0, 1, "0xabc0")
    assert len(facts.nics) == (kind.startswith("NET/") and not pxn)


def test_one_side_of_a_connection_is_enough_for_pxn_and_both_must_have_gdr() -> None:
    """PXN is the sender's way to another GPU's NIC; the receiver's line does not have it."""
    sender = info(0, "Channel 02/0 : 0[1] -> 1[0] [send] via NET/IB/3(5)/GDRDMA(PCI)")
    receiver = info(1, "Channel 02/0 : 0[1] -> 1[0] [receive] via NET/IB/3")
    (way,) = facts_of([*start(0), *start(1), sender, receiver]).transports
    assert (way.pxn, way.gdrdma) == (True, False)


def test_one_process_with_several_devices() -> None:
    def by(device: int, message: str) -> str:
        return f"h:7:{70 + device} [{device}] NCCL INFO {message}"

    text = "ncclCommInitAll comm 0x{0}a rank {0} nranks 2 cudaDev {0} nvmlDev {0} busId {0}0 "
    lines = [by(d, text.format(d) + "commId 0xabc - Init START") for d in (0, 1)]
    way = "Channel 00/0 : {0}[{0}] -> {1}[{1}] via P2P/direct pointer"
    lines += [by(1 - d, way.format(1 - d, d)) for d in (0, 1)]
    lines += [by(d, "8 coll channels, 0 nvls channels, 8 p2p channels") for d in (0, 1)]
    facts = facts_of(lines)
    assert {(way.communicator, way.source, way.target) for way in facts.transports} == {
        ("0xabc", 0, 1),
        ("0xabc", 1, 0),
    }
    (one,) = facts.communicators
    assert [member.device for member in one.members] == [0, 1]
    assert facts.processes == ("h:7",)


def test_both_ends_of_a_connection_are_one() -> None:
    text = "Channel {:02}/0 : 0[0] -> 1[0] [{}] via NET/IB/2/GDRDMA"
    hosts = ("node-1", "node-2")
    lines = [line for r in (0, 1) for line in start(r, num_nodes=2, host=hosts[r])]
    lines += [info(0, text.format(c, "send"), host="node-1") for c in range(4)]
    lines += [info(1, text.format(c, "receive"), host="node-2") for c in range(4)]
    facts = facts_of(lines)
    (way,) = facts.transports
    assert (way.channels, way.same_host) == (4, False)
    assert {(use.rank, use.host, use.device) for use in facts.nics} == {
        (0, "node-1", 2),
        (1, "node-2", 2),
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "1026048 Bytes -> Algo 1 proto 2 time 34.693867",
            ("", 1026048, 1026048, "Ring", "Simple", None),
        ),
        (
            "AllReduce: 64 Bytes -> Algo 0 proto 0 time 9.5",
            ("all_reduce", 64, 64, "Tree", "LL", None),
        ),
        (
            "AllGather: 64 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={2..17}",
            ("all_gather", 64, 128, "NVLS", "Simple", 16),
        ),
        (
            "ReduceScatter: 64 Bytes -> Algo COLLNET_DIRECT proto LL128 channel{Lo..Hi}={0..0}",
            ("reduce_scatter", 64, 128, "CollNetDirect", "LL128", 1),
        ),
        (
            "AllReduce [Symmetric]: 64 Bytes -> Kernel AGxLLMC_R nchannels 3 nthreads 512",
            ("all_reduce", 64, 64, "Symmetric", "AGxLLMC_R", 3),
        ),
        (
            "AllGather [Copy Engine]: 64 Bytes -> cudaMemcpy; CE synchronization with NVLS",
            ("all_gather", 64, 128, "Copy Engine", "", None),
        ),
    ],
)
def test_choices_of_all_versions(line: str, expected: tuple[object, ...]) -> None:
    (one,) = facts_of([*start(0), info(0, line), info(0, line)]).choices
    found = (one.collective, one.printed_bytes, one.message_bytes, one.algorithm)
    assert (*found, one.protocol, one.channels) == expected
    assert one.calls == 2


def test_old_tables_of_predictions() -> None:
    lines = [
        "Latency/AlgBw |    Tree/    LL |    Tree/ LL128 |    Ring/Simple |",
        "    AllReduce |    15.2/   6.1 |     0.0/   0.0 |    20.0/  21.5 |",
    ]
    cells = facts_of([info(0, line) for line in lines]).predictions
    assert {(c.algorithm, c.protocol, c.algbw_bytes_per_s) for c in cells} == {
        ("Tree", "LL", 6.1e9),
        ("Ring", "Simple", 21.5e9),
    }


def test_versions_of_both_libraries() -> None:
    found = set(read_log([DATA / "rccl-versions-163.txt"]).versions)
    assert found == {
        ("rccl", "2.21.5-HEAD:9a0e6a1"),
        ("hip", "6.3.42134-a9a80e791"),
        ("rocm", "6.3.3.0-74-cbc70b5"),
    }
    for line in ("NCCL version 2.10.3+cuda11.4", "RCCL version 2.18.6+hip6.1 HEAD:b3d6"):
        ((library, number), _) = facts_of([line]).versions
        assert (library, number) in (("nccl", "2.10.3"), ("rccl", "2.18.6"))


def test_text_copied_without_its_prefix() -> None:
    facts = read_log([DATA / "unprefixed-1584.txt"])
    assert facts.processes == ()
    loaded = {(p.kind, p.name, p.api) for p in facts.plugins if p.event == "loaded"}
    assert ("COLLNET", "SHARP", 8) in loaded
    adapters = [one.name for one in facts.interfaces if one.role == "ib"]
    assert adapters == [f"ibp{index}" for index in range(8)]
    assert facts.environment.keys() == {
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_IB_PCI_RELAXED_ORDERING", "1"),
    }


def test_init_calls_of_a_trace_name_the_communicator() -> None:
    first = f"node-1.cluster:{pid_of(0)}:{pid_of(0)} NCCL CALL ncclCommInitRank"
    lines = [f"{first}({pointer(0)}, 4, 0xfeed, 3, 0)", api_call(0, Issued("AllGather"))]
    ((kind, tally),) = facts_of(lines).messages.items()
    assert (kind.group, kind.num_ranks, kind.message_bytes) == ("0xfeed", 4, 16384)
    assert tally == Tally(calls=1, ranks=1)


@pytest.mark.parametrize(
    "line",
    [
        "comm {0} rank 1 nranks 4 cudaDev 1 busId 60 - Init COMPLETE",
        "comm {0} rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 60 commId 0xabc - Init COMPLETE",
        "ncclCommInitAll comm {0} rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 60 commId 0xabc - "
        "Init COMPLETE",
        "ncclCommSplit comm {0} rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 60 parent 0x66 "
        "color 0 key 1 commId 0xabc - Init COMPLETE",
        "[Rank 1] ncclCommInitRankConfig comm {0} rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 60 "
        "commId 0xabc - Init START",
    ],
)
def test_starts_of_all_versions(line: str) -> None:
    facts = facts_of([info(1, line.format(pointer(1))), coll(1, Issued(), num_ranks=4)])
    (one,) = facts.communicators
    (member,) = one.members
    found = (one.num_ranks, member.rank, member.device, member.bus_id, member.completed)
    assert found == (4, 1, 1, "60", True)
    assert (one.key == "0xabc") == ("commId" in line)
    assert {kind.group for kind in facts.messages} == {one.key}


@pytest.mark.parametrize("old", [True, False])
def test_start_times_of_all_versions(old: bool) -> None:
    name = "" if old else " - ncclCommInitRank"
    line = f"Init timings{name}: rank 0 nranks 2 total 1.08 (kernels 0.51, bootstrap 0.22)"
    ((member,),) = (one.members for one in facts_of([*start(0), info(0, line)]).communicators)
    assert member.init is not None
    assert member.init.total_s == 1.08
    assert member.init.parts_s == (("kernels", 0.51), ("bootstrap", 0.22))


def test_a_file_with_nothing_to_keep_is_a_log_still() -> None:
    facts = facts_of(
        [info(0, "New proxy recv connection 0 from local rank 0, transport 0")] * 3
    )
    assert (facts.num_lines, facts.processes) == (3, ())


def test_calls_that_repeat_are_counted_from_memory() -> None:
    issued = [Issued(count=n % 3 + 1) for n in range(30)]
    for line in (coll, api_call):
        messages = facts_of([line(0, call) for call in issued]).messages
        assert {(k.call_bytes, t.calls) for k, t in messages.items()} == {
            (4, 10),
            (8, 10),
            (12, 10),
        }


@pytest.mark.parametrize(
    ("threads", "phases"),
    [((0,), {""}), ((5,), {""}), ((0, 5), {"forward", "backward"}), ((5, 6), {""})],
)
def test_phases_need_both_threads(threads: tuple[int, ...], phases: set[str]) -> None:
    lines = [coll(0, Issued(count=1 + t), thread=t) for t in threads]
    messages = facts_of(lines).messages
    assert {kind.phase for kind in messages} == phases
    if phases != {""}:
        assert {(k.phase, k.call_bytes) for k in messages} == {("forward", 4), ("backward", 24)}


def test_warnings_that_differ_in_numbers_are_one() -> None:
    texts = list(read_log([DATA / "warns.txt"]).warnings)
    assert len(texts) == 6
    lines = [f"h:1:2 [0] net.cc:5 NCCL WARN peer {index} is lost" for index in range(9)]
    (remark,) = facts_of(lines).warnings.items()
    text, occurrences = remark
    assert (text, occurrences.lines) == ("peer 0 is lost", 9)
    assert len(occurrences.evidence) == 3


def test_user_made_operations_have_numbers_of_their_own() -> None:
    lines = [*start(0), *start(1), coll(0, Issued(op=5)), coll(1, Issued(op=6))]
    assert not facts_of(lines).mismatches


def test_a_line_that_lost_its_process_is_known_by_its_pointer() -> None:
    lost = coll(0, Issued()).split(" NCCL INFO ")[1]
    ((kind, tally),) = facts_of([*start(0), coll(0, Issued()), lost]).messages.items()
    assert (kind.group, kind.phase, tally.calls) == ("0xabc0", "", 2)


def test_predictions_name_their_communicator() -> None:
    (key,) = {cell.communicator for cell in read_log(FSDP8[:1]).predictions}
    assert key == "0x414b9b8a0ac25253"
