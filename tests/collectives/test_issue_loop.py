"""The compiled loop that issues calls of NCCL, against a library that writes them down."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.collectives.nccl_library import STREAM, Fake, c_library, case_of, join
from tests.measuring.fakes import context

from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import CommHow
from stepmark.collectives.bench import bench, issue_loop, nccl, timing
from stepmark.collectives.bench.case_on_rank import CaseOnRank
from stepmark.ground.dtypes import DType
from stepmark.measuring.verify import TORCH_DTYPE
from stepmark.model.collectives import Api, Collective, Mode, RedOp


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    made = c_library(tmp_path_factory.mktemp("nccl"))
    if made is None:
        pytest.skip("needs a C compiler")
    return made


@pytest.fixture
def fake(library: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(nccl, "load", lambda path: library.library)
    library.reset()
    return library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user, and a loop that is not loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(issue_loop, "load", issue_loop.load.__wrapped__)
    return tmp_path / "cache" / "stepmark" / "compiled"


def bound(case: CommCase, index: int, num_sets: int) -> list[nccl.BoundCall]:
    dtype = TORCH_DTYPE[case.dtype]
    communicator = join(case.num_ranks, index)
    calls = []
    for _ in range(num_sets):
        send = torch.empty(case.send_count(index), dtype=dtype)
        recv = send if case.in_place else torch.empty(case.recv_count(index), dtype=dtype)
        calls.append(communicator.bind(case, index, send, recv, STREAM))
    return calls


CASES = [
    (case_of(collective, **more), index)
    for collective in Collective
    for index in range(2)
    for more in ({}, {"calls_per_group": 3})
    if not (collective is Collective.PING_PONG and more)
]
CASES += [
    (case_of(Collective.ALL_REDUCE, in_place=True, redop=RedOp.MULSUM), 0),
    (case_of(Collective.ALL_TO_ALL_V, matrix=((1, 0, 2), (3, 4, 0), (5, 6, 7))), 2),
    (case_of(Collective.REDUCE_SCATTER, dtype=DType.FP8_E5M2, redop=RedOp.MIN), 1),
]


@pytest.mark.parametrize(("case", "index"), CASES)
def test_the_loop_makes_the_calls_that_python_makes(
    fake: Fake, case: CommCase, index: int
) -> None:
    calls = bound(case, index, num_sets=3)
    rotation = issue_loop.CompiledRotation(calls, issue_loop.load())
    fake.reset()
    for number in (0, 1, 2, 0, 1, 2, 0):
        calls[number]()
    by_python = fake.lines
    assert by_python or case.send_count(index) + case.recv_count(index) == 0
    fake.reset()
    rotation.issue(2)  # the third set is next
    rotation()
    rotation.issue(4)
    assert fake.lines == by_python


@pytest.mark.parametrize("name", ["ncclSend", "ncclGroupEnd", "ncclGroupStart"])
def test_the_first_error_ends_the_loop_and_the_group(fake: Fake, name: str) -> None:
    calls = bound(case_of(Collective.SENDRECV), 0, num_sets=2)
    rotation = issue_loop.CompiledRotation(calls, issue_loop.load())
    fake.reset(failing=name)
    with pytest.raises(nccl.NcclError) as caught:
        rotation.issue(5)
    assert str(caught.value) == f"{name}: invalid usage (5): message truncated"
    names = [line.split()[0] for line in fake.lines]
    assert names.count(name) == 1
    assert names.count("ncclGroupEnd") == 1 - (name == "ncclGroupStart")


def test_it_is_compiled_once_for_a_source_and_a_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    run = issue_loop._run
    monkeypatch.setattr(issue_loop, "_run", lambda *c: commands.append(c) or run(*c))
    assert issue_loop.load() is not None
    (file,) = cache.iterdir()
    assert [word for _, word, *_ in commands] == ["--version", "-O2"]
    file.write_bytes(b"no library")
    assert issue_loop.load() is not None  # compiled again
    assert len(commands) == 4
    assert issue_loop.load() is not None  # only asked for its version
    assert len(commands) == 5
    source = cache.parent / "other.c"
    source.write_text(issue_loop._SOURCE.read_text() + "/* changed */\n")
    monkeypatch.setattr(issue_loop, "_SOURCE", source)
    assert issue_loop.load() is not None
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert issue_loop.load() is not None


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/nothing/cc"])
def test_without_a_compiler_that_works_there_is_no_loop(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    monkeypatch.setattr(issue_loop, "c_compiler", lambda: compiler)
    assert issue_loop.load() is None


class Event:
    """An event whose time is the number of calls that the library had when it was recorded."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.at = 0

    def record(self) -> None:
        self.at = len(self.fake.lines)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_sample_of_the_queued_timer_is_k_calls_of_the_loop(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(timing, "_events", lambda n: [Event(fake) for _ in range(n)])
    case = dataclasses.replace(
        case_of(Collective.ALL_REDUCE, n=1), api=Api.NCCL, mode=Mode.QUEUED
    )
    part = CaseOnRank(case, context(), None, CommHow(iterations=20))
    calls = bound(case, 0, num_sets=2)
    part._calls = list(calls)
    made: list[int] = []
    issue = issue_loop.CompiledRotation.issue
    monkeypatch.setattr(
        issue_loop.CompiledRotation, "issue", lambda s, n: made.append(n) or issue(s, n)
    )
    timer = part.timer(1e-3, is_compiled=is_compiled)
    name = "queued-compiled" if is_compiled else "queued"
    assert timer.method == f"{name}/{timing.VERSION}"
    k = timer.calls_per_sample
    assert k > 1
    fake.reset()
    batch = timer.sample(3)
    assert batch.seconds == [1.0] * 3  # one call per call
    assert len(fake.lines) == 1 + 3 * k
    assert made == ([1, k, k, k] if is_compiled else [])


@pytest.mark.parametrize("mode", [Mode.QUEUED, Mode.AHEAD, Mode.BLOCKING])
def test_a_sample_may_be_one_call(mode: Mode) -> None:
    case = case_of(Collective.ALL_REDUCE, n=1, mode=mode)
    how = CommHow(iterations=50, per_call=True)
    part = CaseOnRank(case, context(), None, how)
    assert part._calls_per_sample(1e-5) == 1
    assert part.samples(1)[0] == 50


def test_only_queued_calls_of_libnccl_come_from_the_loop() -> None:
    compiled = {
        (api, mode)
        for api in Api
        for mode in Mode
        if bench._is_compiled(case_of(Collective.ALL_REDUCE, api=api, mode=mode))
    }
    assert compiled == {(Api.NCCL, Mode.QUEUED)}


def test_a_rank_outside_the_communicator_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(issue_loop, "load", lambda: None)
    inside, outside = (
        CaseOnRank(case, context(), None, CommHow())
        for case in (
            case_of(Collective.ALL_REDUCE, n=1),
            dataclasses.replace(case_of(Collective.P2P), world_size=4, pair=(1, 2)),
        )
    )
    assert (inside.compiles_loop(), outside.compiles_loop()) == (False, True)
