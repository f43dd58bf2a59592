"""Calls to NCCL against a library that only writes down what it is asked, one line a call."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench import nccl
from stepmark.ground.dtypes import MESSAGE_DTYPES, DType
from stepmark.ground.errors import ConfigError
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.collectives import FACTS, Collective, RedOp

STREAM = 0x5EED
COMM = 0xC0
# C types by letter: p pointer, z size_t, i int.
HOT = {
    "ncclAllReduce": "ppziipp",
    "ncclReduceScatter": "ppziipp",
    "ncclReduce": "ppziiipp",
    "ncclAllGather": "ppzipp",
    "ncclBroadcast": "ppziipp",
    "ncclSend": "pziipp",
    "ncclRecv": "pziipp",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclRedOpDestroy": "ip",
    "ncclCommDestroy": "p",
    "ncclCommAbort": "p",
}
# Exported by NCCL 2.28 and later; the C library here is an older one.
NEWER = {"ncclAlltoAll": "ppzipp", "ncclGather": "ppziipp", "ncclScatter": "ppziipp"}
C_HEAD = """
#include <stdio.h>
#include <string.h>
#include <stddef.h>
typedef struct { char internal[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, least, most;
                 const char *net; int share, traffic; } Config;
static char text[1 << 20]; static size_t used; static char failing[64]; static int quiet;
const char *fake_log(void) { return text; }
void fake_reset(const char *name) { used = 0; text[0] = 0; strcpy(failing, name); quiet = 0; }
void fake_quiet(void) { quiet = 1; }
static int say(const char *name) { return strcmp(failing, name) ? 0 : 5; }
#define LOG(...) used += sprintf(text + used, __VA_ARGS__)
int ncclGetVersion(int *v) { *v = 22809; return 0; }
const char *ncclGetErrorString(int r) { return r == 5 ? "invalid usage" : "?"; }
const char *ncclGetLastError(void *c) { return "message truncated\\n"; }
int ncclGetUniqueId(Id *id) { memset(id, 7, 128); return say("ncclGetUniqueId"); }
int ncclCommInitRank(void **c, int n, Id id, int r) {
  *c = (void *)0xC0; LOG("ncclCommInitRank %d %d %d\\n", n, id.internal[127], r);
  return say("ncclCommInitRank"); }
int ncclCommInitRankConfig(void **c, int n, Id id, int r, Config *k) {
  *c = (void *)0xC0; LOG("ncclCommInitRankConfig %d %d %d size=%zu magic=%x version=%u most=%d"
  " undefined=%d net=%p\\n", n, id.internal[127], r, k->size, k->magic, k->version, k->most,
  k->blocking == k->least && k->share == k->traffic && k->share == k->cga, (void *)k->net);
  return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *s, int t, int where, void *c) {
  *op = 1000 + t; LOG("ncclRedOpCreatePreMulSum %02x %d %d %zu\\n", *(unsigned char *)s, t,
  where, (size_t)c); return 0; }
"""


def c_source() -> str:
    """The fixed part, and one function per line of HOT that prints its arguments."""
    kinds = {
        "p": ("void *", "%zu", "(size_t)"),
        "z": ("size_t ", "%zu", ""),
        "i": ("int ", "%d", ""),
    }
    lines = [C_HEAD]
    for name, letters in HOT.items():
        parameters = ", ".join(f"{kinds[k][0]}a{i}" for i, k in enumerate(letters)) or "void"
        formats = "".join(" " + kinds[k][1] for k in letters)
        values = "".join(f", {kinds[k][2]}a{i}" for i, k in enumerate(letters))
        log = f'if (!quiet) LOG("{name}{formats}\\n"{values});'
        lines.append(f'int {name}({parameters}) {{ {log} return say("{name}"); }}')
    return "\n".join(lines)


class PythonLibrary:
    """The same without a compiler: what ctypes would pass, written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failing = ""
        self.newer = False

    def __getattr__(self, name: str) -> Any:
        if name in NEWER and not self.newer:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self._answer(name, arguments)
            if name in HOT or name in NEWER:
                values = [getattr(a, "value", a) or 0 for a in arguments]
                self.lines.append(" ".join([name, *map(str, values)]))
            return 5 if name == self.failing else 0

        call.__name__ = name
        setattr(self, name, call)
        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name.startswith("ncclCommInitRank"):
            arguments[0]._obj.value = COMM
            words = [arguments[1], arguments[2].internal[-1], arguments[3]]
            self.lines.append(" ".join([name, *map(str, words)]))
        elif name == "ncclGetVersion":
            arguments[0]._obj.value = 22809
        elif name == "ncclGetUniqueId":
            ctypes.memset(arguments[0], 7, 128)
        elif name == "ncclRedOpCreatePreMulSum":
            arguments[0]._obj.value = 1000 + arguments[2]
            byte = ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_ubyte))[0]
            words = [f"{byte:02x}", arguments[2], arguments[3], arguments[4].value]
            self.lines.append(" ".join([name, *map(str, words)]))

    def ncclGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return b"invalid usage"

    def ncclGetLastError(self, comm: Any) -> bytes:  # noqa: N802
        return b"message truncated\n"


class Fake:
    """One library, whatever it is made of."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.is_c = not isinstance(library, PythonLibrary)
        if self.is_c:
            library.fake_log.restype = ctypes.c_char_p

    def reset(self, failing: str = "") -> None:
        if self.is_c:
            self.library.fake_reset(failing.encode())
        else:
            self.library.lines, self.library.failing = [], failing

    @property
    def lines(self) -> list[str]:
        if not self.is_c:
            return list(self.library.lines)
        return self.library.fake_log().decode().splitlines()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["c", "python"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if request.param == "python" or compiler is None:
        return Fake(PythonLibrary())
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "fake.c").write_text(c_source())
    out = folder / "libnccl.so.2"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", out, folder / "fake.c"], check=True
    )
    return Fake(nccl.load(str(out)))


@pytest.fixture
def fake(built: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(nccl, "load", lambda path: built.library)
    built.reset()
    return built


def join(n: int, index: int, max_ctas: int | None = None) -> nccl.Communicator:
    return nccl.Communicator(
        num_ranks=n,
        index=index,
        share=lambda mine: mine or bytes([9] * 128),
        max_ctas=max_ctas,
        path="fake",
    )


def case_of(collective: Collective, n: int = 3, **fields: Any) -> CommCase:
    facts = FACTS[collective]
    fields = {
        "count": 10,
        "dtype": DType.BF16,
        "redop": RedOp.SUM if facts.reduces else RedOp.NONE,
        "root": 1 if facts.rooted else -1,
        "pair": (0, 1) if facts.pair else None,
        **fields,
    }
    n = 2 if facts.pair else n
    return CommCase(collective=collective, num_ranks=n, world_size=n, **fields)


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
