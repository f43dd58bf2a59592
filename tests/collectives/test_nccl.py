"""Calls to NCCL against a library that only writes down what it is asked, one line a call."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.collectives.nccl_library import (
    COMM,
    HOT,
    NEWER,
    STREAM,
    Fake,
    PythonLibrary,
    c_library,
    case_of,
    join,
)

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench import nccl
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.collectives import Collective, RedOp


@pytest.fixture(scope="module", params=["c", "python"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    in_c = c_library(tmp_path_factory.mktemp("nccl")) if request.param == "c" else None
    return in_c or Fake(PythonLibrary())


@pytest.fixture
def fake(built: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(nccl, "load", lambda path: built.library)
    built.reset()
    return built


def issued(fake: Fake, case: CommCase, index: int) -> list[str]:
    """The lines of one call; pointers as s+bytes and r+bytes, the last two as their names."""
    dtype = TORCH_DTYPE[case.dtype]
    send = torch.empty(case.send_count(index), dtype=dtype)
    recv = send if case.in_place else torch.empty(case.recv_count(index), dtype=dtype)
    issue = join(case.num_ranks, index).bind(case, index, send, recv, STREAM)
    fake.reset()
    issue()
    named = {COMM: "comm", STREAM: "stream"}

    def word(text: str, letter: str) -> str:
        if letter != "p":
            return text
        value = int(text)
        for name, buffer in (("s", send), ("r", recv)):
            at = value - buffer.data_ptr()
            if buffer.numel() and 0 <= at < buffer.nbytes:
                return f"{name}+{at}" if at else name
        return named.get(value, "0" if not value else "elsewhere")

    lines = []
    for line in fake.lines:
        name, *words = line.split()
        letters = (HOT | NEWER)[name]
        shown = [word(text, letter) for text, letter in zip(words, letters, strict=True)]
        lines.append(" ".join([name.removeprefix("nccl"), *shown]))
    return lines


E = "comm stream"
# bf16 is 9; root is 1 of three ranks; 10 elements are 20 bytes.
WANTED: dict[tuple[Collective, int], list[str]] = {
    (Collective.ALL_REDUCE, 0): [f"AllReduce s r 10 9 0 {E}"],
    (Collective.REDUCE_SCATTER, 2): [f"ReduceScatter s r 10 9 0 {E}"],
    (Collective.REDUCE, 0): [f"Reduce s r 10 9 0 1 {E}"],
    (Collective.ALL_GATHER, 1): [f"AllGather s r 10 9 {E}"],
    (Collective.BROADCAST, 0): [f"Broadcast s r 10 9 1 {E}"],
    (Collective.ALL_TO_ALL, 1): [
        "GroupStart",
        *(
            f"{name} {b}{at} 10 9 {peer} {E}"
            for peer, at in enumerate(("", "+20", "+40"))
            for name, b in (("Send", "s"), ("Recv", "r"))
        ),
        "GroupEnd",
    ],
    (Collective.GATHER, 0): [f"Send s 10 9 1 {E}"],
    (Collective.GATHER, 1): [
        "GroupStart",
        f"Send s 10 9 1 {E}",
        f"Recv r 10 9 0 {E}",
        f"Recv r+20 10 9 1 {E}",
        f"Recv r+40 10 9 2 {E}",
        "GroupEnd",
    ],
    (Collective.SCATTER, 2): [f"Recv r 10 9 1 {E}"],
    (Collective.SCATTER, 1): [
        "GroupStart",
        f"Send s 10 9 0 {E}",
        f"Send s+20 10 9 1 {E}",
        f"Send s+40 10 9 2 {E}",
        f"Recv r 10 9 1 {E}",
        "GroupEnd",
    ],
    (Collective.SENDRECV, 0): [
        "GroupStart",
        f"Send s 10 9 1 {E}",
        f"Recv r 10 9 2 {E}",
        "GroupEnd",
    ],
    (Collective.SENDRECV, 2): [
        "GroupStart",
        f"Send s 10 9 0 {E}",
        f"Recv r 10 9 1 {E}",
        "GroupEnd",
    ],
    (Collective.P2P, 0): [f"Send s 10 9 1 {E}"],
    (Collective.P2P, 1): [f"Recv r 10 9 0 {E}"],
    (Collective.P2P_BOTH, 1): [
        "GroupStart",
        f"Send s 10 9 0 {E}",
        f"Recv r 10 9 0 {E}",
        "GroupEnd",
    ],
    (Collective.PING_PONG, 0): [f"Send s 10 9 1 {E}", f"Recv r 10 9 1 {E}"],
    (Collective.PING_PONG, 1): [f"Recv r 10 9 0 {E}", f"Send r 10 9 0 {E}"],
    (Collective.INCAST, 0): [f"Send s 10 9 1 {E}"],
    (Collective.INCAST, 1): [
        "GroupStart",
        f"Recv r 10 9 0 {E}",
        f"Recv r+20 10 9 2 {E}",
        "GroupEnd",
    ],
    (Collective.MULTICAST, 2): [f"Recv r 10 9 1 {E}"],
    (Collective.MULTICAST, 1): [
        "GroupStart",
        f"Send s 10 9 0 {E}",
        f"Send s+20 10 9 2 {E}",
        "GroupEnd",
    ],
    (Collective.BARRIER, 0): [f"AllReduce elsewhere elsewhere 1 7 0 {E}"],
}


@pytest.mark.parametrize(("collective", "index"), WANTED)
def test_each_collective_is_these_calls(fake: Fake, collective: Collective, index: int) -> None:
    assert issued(fake, case_of(collective), index) == WANTED[collective, index]


@pytest.mark.parametrize(
    ("collective", "call"),
    [
        (Collective.ALL_TO_ALL, f"AlltoAll s r 10 9 {E}"),
        (Collective.GATHER, f"Gather s r 10 9 1 {E}"),
        (Collective.SCATTER, f"Scatter s r 10 9 1 {E}"),
    ],
)
def test_a_newer_library_has_one_call(fake: Fake, collective: Collective, call: str) -> None:
    if fake.is_c:
        return
    fake.library.newer = True
    try:
        assert issued(fake, case_of(collective), 1) == [call]
    finally:
        fake.library.newer = False
        for name in NEWER:
            vars(fake.library).pop(name, None)


def test_every_collective_is_covered() -> None:
    covered = {collective for collective, _ in WANTED} | {Collective.ALL_TO_ALL_V}
    assert covered == set(Collective)


def test_uneven_parts_and_no_empty_ones(fake: Fake) -> None:
    matrix = ((1, 0, 2), (3, 4, 0), (5, 6, 7))
    case = case_of(Collective.ALL_TO_ALL_V, matrix=matrix, dtype=DType.INT32)
    assert issued(fake, case, 0) == [
        "GroupStart",
        f"Send s 1 2 0 {E}",
        f"Recv r 1 2 0 {E}",
        f"Recv r+4 3 2 1 {E}",
        f"Send s+4 2 2 2 {E}",
        f"Recv r+16 5 2 2 {E}",
        "GroupEnd",
    ]


def test_what_is_sent_is_received_in_the_same_order(fake: Fake) -> None:
    # Between two ranks, sends and receives must pair up with equal counts.
    for collective in (
        Collective.ALL_TO_ALL,
        Collective.GATHER,
        Collective.SCATTER,
        Collective.SENDRECV,
        Collective.INCAST,
        Collective.MULTICAST,
    ):
        case = case_of(collective)
        sent, received = set(), set()
        for me in range(3):
            for line in issued(fake, case, me):
                name, *words = line.split()
                if name == "Send":
                    sent.add((me, int(words[3]), words[1]))
                elif name == "Recv":
                    received.add((int(words[3]), me, words[1]))
        assert sent == received, collective


@pytest.mark.parametrize(
    ("redop", "number"), [("sum", 0), ("prod", 1), ("max", 2), ("min", 3), ("avg", 4)]
)
def test_reductions_by_number(fake: Fake, redop: str, number: int) -> None:
    case = case_of(Collective.ALL_REDUCE, redop=RedOp(redop), in_place=True)
    assert issued(fake, case, 0) == [f"AllReduce s s 10 9 {number} {E}"]


def test_types_by_number(fake: Fake) -> None:
    names = "int8 uint8 int32 uint32 int64 uint64 fp16 fp32 fp64 bf16 fp8_e4m3 fp8_e5m2"
    assert {DType(name) for name in names.split()} == set(MESSAGE_DTYPES)
    for number, name in enumerate(names.split()):
        case = case_of(Collective.ALL_GATHER, dtype=DType(name))
        assert issued(fake, case, 0)[0].split()[4] == str(number)


@pytest.mark.parametrize(("dtype", "byte"), [(DType.FP8_E4M3, "40"), (DType.INT32, "02")])
def test_mulsum_is_an_operation_made_once(fake: Fake, dtype: DType, byte: str) -> None:
    case = case_of(Collective.ALL_REDUCE, redop=RedOp.MULSUM, dtype=dtype)
    buffer = torch.empty(10, dtype=TORCH_DTYPE[dtype])
    joined = join(3, 0)
    fake.reset()
    for _ in range(2):
        joined.bind(case, 0, buffer, buffer, STREAM)()
    number = {DType.FP8_E4M3: 10, DType.INT32: 2}[dtype]
    made, *calls = fake.lines
    assert made == f"ncclRedOpCreatePreMulSum {byte} {number} 1 {COMM}"
    assert [line.split()[5] for line in calls] == [str(1000 + number)] * 2
    fake.reset()
    joined.close()
    assert fake.lines == [f"ncclRedOpDestroy {1000 + number} {COMM}", f"ncclCommDestroy {COMM}"]


def test_grouped_calls_and_groups_in_groups(fake: Fake) -> None:
    one = issued(fake, case_of(Collective.ALL_REDUCE), 0)
    case = case_of(Collective.ALL_REDUCE, calls_per_group=3)
    assert issued(fake, case, 0) == ["GroupStart", *one * 3, "GroupEnd"]
    both = issued(fake, case_of(Collective.SENDRECV), 0)
    case = case_of(Collective.SENDRECV, calls_per_group=2)
    assert issued(fake, case, 0) == ["GroupStart", *both * 2, "GroupEnd"]
    with pytest.raises(ConfigError, match="ping_pong"):
        issued(fake, case_of(Collective.PING_PONG, calls_per_group=2), 0)


def test_ranks_share_the_identity_of_rank_0(fake: Fake) -> None:
    join(4, 0)
    join(4, 3)
    assert fake.lines == ["ncclCommInitRank 4 7 0", "ncclCommInitRank 4 9 3"]


def test_a_limit_of_thread_blocks_goes_into_the_configuration(fake: Fake) -> None:
    join(4, 0, max_ctas=8)
    (line,) = fake.lines
    assert line.startswith("ncclCommInitRankConfig 4 7 0")
    if fake.is_c:
        assert line.endswith(
            "size=48 magic=cafebeef version=22809 most=8 undefined=1 net=(nil)"
        )


def test_a_policy_of_thread_blocks_is_a_field_of_newer_configurations(fake: Fake) -> None:
    join(4, 0, cta_policy=2)
    (line,) = fake.lines
    assert line.startswith("ncclCommInitRankConfig 4 7 0")
    if fake.is_c:
        undefined = -(2**31)
        assert line.endswith(
            f"size=64 magic=cafebeef version=22809 most={undefined} undefined=1 net=(nil)"
            f" name=(nil) collnet={undefined} policy=2"
        )


@pytest.mark.parametrize("name", ["ncclSend", "ncclGroupEnd", "ncclGroupStart"])
def test_errors_say_what_the_library_says_and_close_the_group(fake: Fake, name: str) -> None:
    case, buffer = case_of(Collective.SENDRECV), torch.empty(10, dtype=torch.bfloat16)
    issue = join(3, 0).bind(case, 0, buffer, buffer, STREAM)
    fake.reset(failing=name)
    with pytest.raises(nccl.NcclError) as caught:
        issue()
    assert str(caught.value) == f"{name}: invalid usage (5): message truncated"
    names = [line.split()[0] for line in fake.lines]
    assert names.count("ncclGroupEnd") == 1 - (name == "ncclGroupStart")


def test_a_communicator_that_cannot_be_made(fake: Fake) -> None:
    fake.reset(failing="ncclCommInitRank")
    with pytest.raises(nccl.NcclError, match="ncclCommInitRank: invalid usage"):
        join(2, 1)


def test_it_ends_once(fake: Fake) -> None:
    for end in (nccl.Communicator.abort, nccl.Communicator.close):
        joined = join(2, 0)
        fake.reset()
        for _ in range(2):
            end(joined)
        joined.abort()
        joined.close()
        assert len(fake.lines) == 1


def test_the_library_of_this_process_is_found(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    row = "7f00-7f01 r-xp 00000000 08:01 42                         "
    maps.write_text(
        f"{row}/usr/lib/libc.so.6\n{row}/opt/my torch/lib/libnccl.so.2\n7f-8f rw-p 0 0 0\n"
    )
    assert nccl.find_library(maps) == "/opt/my torch/lib/libnccl.so.2"
    maps.write_text(f"{row}/opt/rocm/lib/librccl.so.1.0\n")
    assert nccl.find_library(maps) == "/opt/rocm/lib/librccl.so.1.0"


def test_no_library_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_SONAMES", ("libnothing-of-this-name.so.9",))
    with pytest.raises(ConfigError, match="libnccl"):
        nccl.find_library(tmp_path / "maps")


def seconds_per_call(issue: Callable[[], None], calls: int = 5000) -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            issue()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def test_a_call_costs_little(fake: Fake) -> None:
    if not fake.is_c:
        return
    buffer = torch.empty(10, dtype=torch.bfloat16)
    case = case_of(Collective.ALL_REDUCE, in_place=True)
    issue = join(3, 0).bind(case, 0, buffer, buffer, STREAM)
    fake.reset()
    fake.library.fake_quiet()
    assert seconds_per_call(issue) < 10e-6  # 0.35 us on an idle core
