"""Registered buffers: what NCCL is asked, and where the buffers of each rank lie."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.collectives.nccl_library import Fake, c_library, case_of, join
from tests.measuring.fakes import context

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow, Entry
from stepmark.cases.record import CommMemory, Failed
from stepmark.collectives.bench import bench as bench_module
from stepmark.collectives.bench import case_on_rank, nccl
from stepmark.collectives.bench.bench import CollectiveBench
from stepmark.collectives.bench.case_on_rank import CaseOnRank, arena_strides
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Api, Collective, Registration

LOCAL, SYMMETRIC = Registration.LOCAL, Registration.SYMMETRIC


def bytes_here(pointer: int, num_bytes: int) -> torch.Tensor:
    """As nccl.device_bytes, of the host's memory."""
    return torch.frombuffer(
        (ctypes.c_ubyte * num_bytes).from_address(pointer), dtype=torch.uint8
    )


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = c_library(tmp_path)
    if made is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(nccl, "load", lambda path: made.library)
    monkeypatch.setattr(nccl, "find_library", lambda: "fake")
    monkeypatch.setattr(nccl, "device_bytes", bytes_here)
    made.reset()
    return made


def part_of(case: CommCase, communicator: nccl.Communicator | None = None) -> CaseOnRank:
    return CaseOnRank(case, context(), communicator or join(case.num_ranks, 0), CommHow())


@pytest.mark.parametrize(
    ("registration", "names", "flags"),
    [
        (LOCAL, ("ncclCommRegister", "ncclCommDeregister"), ""),
        (SYMMETRIC, ("ncclCommWindowRegister", "ncclCommWindowDeregister"), " 1"),
    ],
)
def test_memory_is_registered_whole_and_freed(
    fake: Fake, registration: Registration, names: tuple[str, str], flags: str
) -> None:
    case = case_of(Collective.ALL_GATHER, count=1000, registration=registration, unalign=3)
    communicator = join(3, 0)
    part = part_of(case, communicator)
    fake.reset()
    part.reserve(5)
    part.register()
    # 1003 elements of bf16 and 3003, in pages of 4096 bytes: one and two.
    sizes = (5 * 4096, 5 * 8192)
    assert fake.lines == [
        *(f"ncclMemAlloc {size}" for size in sizes),
        *(f"{names[0]} {0xC0} {1 - i} {size}{flags}" for i, size in enumerate(sizes)),
    ]
    part.allocate(5)
    fake.reset()
    part.release()
    handle = 0xA1 if registration is LOCAL else 0xA2
    assert fake.lines == [
        *[f"{names[1]} {0xC0} {handle}"] * 2,
        "ncclMemFree 1",
        "ncclMemFree 0",
    ]
    fake.reset()
    communicator.close()
    assert fake.lines == [f"ncclCommDestroy {0xC0}"]


@pytest.mark.parametrize("collective", [c for c in Collective if c is not Collective.BARRIER])
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_have_the_same_offsets_on_all_ranks(
    fake: Fake, collective: Collective, in_place: bool
) -> None:
    case = case_of(
        collective,
        count=1000,
        in_place=in_place,
        registration=SYMMETRIC,
        unalign=3,
        spread=0.5 if collective is Collective.ALL_TO_ALL_V else None,
        api=Api.NCCL,
    )
    strides = arena_strides(case)
    assert set(strides) == ({True} if in_place else {True, False})
    for index in range(case.num_ranks):
        offsets: dict[bool, list[int]] = {True: [], False: []}
        memory = torch.zeros(3 * max(strides.values()), dtype=torch.uint8)
        arenas = {
            side: case_on_rank.Arena(memory=memory, stride=stride)
            for side, stride in strides.items()
        }

        def allocate(count: int, receives: bool) -> torch.Tensor:
            buffer = arenas[receives].allocate(count * 2)  # noqa: B023  called at once
            offsets[receives].append(buffer.storage_offset())  # noqa: B023
            assert buffer.numel() == count * 2, "it fits"
            return buffer.view(torch.bfloat16)

        for _ in range(3):
            send, recv = case_on_rank.allocate_buffers(case, index, allocate)
            counts = send.numel(), recv.numel()
            if not in_place:
                assert counts == (case.send_count(index), case.recv_count(index))
        for side, stride in strides.items():
            assert offsets[side] == [0, stride, 2 * stride]


def test_each_buffer_starts_at_the_element_that_is_asked_for() -> None:
    case = case_of(Collective.ALL_GATHER, count=16, dtype=DType.FP32, n=2, unalign=1)
    buffers: list[torch.Tensor] = []

    def allocate(count: int, receives: bool) -> torch.Tensor:
        buffers.append(torch.zeros(count))
        return buffers[-1]

    send, recv = case_on_rank.allocate_buffers(case, 0, allocate)
    assert [buffer.numel() for buffer in buffers] == [17, 33]
    assert [send.data_ptr() - buffers[0].data_ptr(), send.numel()] == [4, 16]
    assert [recv.data_ptr() - buffers[1].data_ptr(), recv.numel()] == [4, 32]


def test_a_library_that_registers_nothing_is_an_error(fake: Fake) -> None:
    part = part_of(case_of(Collective.ALL_REDUCE, registration=LOCAL))
    part.reserve(1)
    fake.library.fake_no_handle(1)
    with pytest.raises(nccl.NcclError, match=r"ncclCommRegister: no handle"):
        part.register()


@pytest.mark.parametrize(
    ("lacking", "registration", "reason"),
    [
        ("", SYMMETRIC, None),
        ("ncclCommWindowRegister", Registration.NONE, None),
        ("ncclCommWindowRegister", LOCAL, None),
        ("ncclCommWindowRegister", SYMMETRIC, "ncclCommWindowRegister, which NCCL 2.28 lacks"),
        ("ncclMemAlloc", LOCAL, "ncclMemAlloc, which NCCL 2.28 lacks"),
    ],
)
def test_a_library_without_the_function_skips_the_case(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
    registration: Registration,
    reason: str | None,
) -> None:
    class Older:
        def __getattr__(self, name: str) -> object:
            if name == lacking:
                raise AttributeError(name)
            return getattr(fake.library, name)

    monkeypatch.setattr(nccl, "load", lambda path: Older())
    case = case_of(Collective.ALL_REDUCE, n=1, api=Api.NCCL, registration=registration)
    why = CollectiveBench(context(), CommHow()).why_not(Entry(position=0, launch=1, case=case))
    wanted = reason and (f"--register {registration} needs {reason}", None)
    assert why == wanted


@pytest.mark.parametrize(
    ("cause", "registration", "forgets"),
    [("oom", Registration.NONE, 0), ("oom", LOCAL, 1), ("error", Registration.NONE, 1)],
)
def test_registered_memory_of_a_failed_case_goes_with_its_communicator(
    monkeypatch: pytest.MonkeyPatch, cause: str, registration: Registration, forgets: int
) -> None:
    case = case_of(Collective.ALL_REDUCE, n=1, registration=registration)
    bench = CollectiveBench(context(), CommHow())
    forgotten: list[CommCase] = []
    monkeypatch.setattr(bench._communicators, "forget", forgotten.append)
    record = Failed(run_id="r", case=case, cause=cause, message="", ranks=(0,))
    bench.failed(Entry(position=0, launch=1, case=case), record)
    assert len(forgotten) == forgets


@pytest.mark.parametrize(
    ("version", "policy", "reason"),
    [
        (22605, 0, None),
        (22605, 1, "-x 1 needs NCCL 2.27, not 2.26"),
        (22706, 1, None),
        (22706, 2, "-x 2 needs NCCL 2.28, not 2.27"),
        (22803, 2, None),
    ],
)
def test_an_older_library_without_the_policy_skips_the_case(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, version: int, policy: int, reason: str | None
) -> None:
    class Older:
        def ncclGetVersion(self, number: Any) -> int:  # noqa: N802
            number._obj.value = version
            return 0

    monkeypatch.setattr(nccl, "load", lambda path: Older())
    case = case_of(Collective.ALL_REDUCE, n=1, api=Api.NCCL, cta_policy=policy)
    assert nccl.unsupported_here(case) == reason


def test_memory_of_nccl_is_apart_from_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory and torch's share in GiB: at first, after the buffers, after the calls."""
    free = iter((100, 94, 94, 90))
    reserved = iter((5, 8))  # torch allocated 5 of the 6, and 3 more for the check
    on_gpu = replace(context().ranks, device=torch.device("cuda", 0))
    here = replace(context(on_gpu), free_bytes=lambda: next(free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved))
    memory = bench_module.MemoryUse(here, 7)
    memory.allocated()
    assert memory.total() == CommMemory(init_bytes=7, buffer_bytes=6, call_bytes=1)
    assert bench_module.MemoryUse(context(), 0).total() is None


def test_an_aborted_communicator_still_frees_its_memory(fake: Fake) -> None:
    communicator = join(2, 0)
    communicator.register(communicator.allocate(4096), LOCAL)
    communicator.abort()
    fake.reset()
    communicator.close()
    assert fake.lines == ["ncclMemFree 1"]
