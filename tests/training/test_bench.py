"""The runner with a trainer without work: which record comes of a case, and what follows."""

import gc
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.measuring import fakes
from tests.tables.records import run_info
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from stepmark.cases.case import SOAK_S
from stepmark.cases.plan import TrainHow
from stepmark.cases.record import Failed, Measured, Record, Skipped
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope, Schedule
from stepmark.measuring import run_cases
from stepmark.measuring.context import MeasureContext
from stepmark.measuring.ranks import Ranks
from stepmark.model.model_tables import find_model
from stepmark.training import bench, profiling, trainer
from stepmark.training import train_columns as report
from stepmark.training.bench import FailureBroadcast, Problem, TrainingBench
from stepmark.training.training_words import remarks

OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
Losses = Callable[[int], float]


class Held(nn.Module):
    """A model that only a collection of garbage frees."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = [self]


class FakeTrainer:
    """Losses by the number of the micro-step from 1."""

    def __init__(self, losses: Losses) -> None:
        self.models: list[nn.Module] = [Held()]
        self.roots: tuple[nn.Module, ...] = ()
        self._losses, self._count = losses, 0

    def micro_step(
        self, tokens: Tensor, labels: Tensor, *, is_last: bool, mark: Callable[[str], None]
    ) -> Tensor | None:
        self._count += 1
        mark("fwd")
        time.sleep(1e-4)
        mark("bwd")
        return torch.tensor(self._losses(self._count))

    def optimizer_step(self) -> None:
        """Nothing to update."""


def case(mbs: int = 1, **more: Any) -> TrainCase:
    model = find_model("gpt2-125m").tiny()
    return TrainCase(model=model, mbs=mbs, device="cpu", backend="gloo", **more)


Install = Callable[..., list[TrainCase]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Trainers of these losses, or that raise `breaks(case)`; the cases made come back."""

    def put(
        losses: Losses = lambda _number: 2.0,
        breaks: Callable[[TrainCase], Exception | None] = lambda _case: None,
        reason: Callable[[TrainCase], str | None] = lambda _case: None,
    ) -> list[TrainCase]:
        made: list[TrainCase] = []

        def make(of: TrainCase, _device: torch.device) -> FakeTrainer:
            made.append(of)
            found = FakeTrainer(losses)
            if problem := breaks(of):
                raise problem
            return found

        monkeypatch.setattr(trainer, "make", make)
        monkeypatch.setattr(bench, "refusal", lambda of, _rig: reason(of))
        return made

    return put


def run(
    cases: list[TrainCase],
    how: TrainHow | None = None,
    context: MeasureContext | None = None,
    *,
    launch: int = 1,
    records: list[Record] | None = None,
) -> tuple[list[Any], int | None]:
    """Records, and the position returned; the first case has position 3."""
    records = [] if records is None else records

    def blocked(record: Failed, position: int) -> None:
        raise AssertionError((record, position))

    place = replace(context or fakes.context(), on_blocked=blocked)
    how = how or TrainHow(steps=3)
    mean_s = None if how.budget_s is None else how.budget_s / len(cases)
    bench = TrainingBench(place, how, budget_s=mean_s)
    entries = fakes.entries(cases, launch=launch, first=3)
    position = run_cases.run(entries, place, {"train": bench}, fakes.NoGuard(), records.append)
    return records, position


# What a record says


def test_a_case_that_runs_is_measured(install: Install) -> None:
    install()
    (record,), position = run([case(mbs=2, grad_accum=3)], TrainHow(steps=4), launch=5)
    assert isinstance(record, Measured)
    assert position is None
    told = record.training
    assert told is not None
    (seconds,) = record.samples.seconds
    assert len(seconds) >= 4
    assert len(told.loss) == len(seconds) + len(told.warmup_s[0])
    assert told.tokens_per_sample == 3 * 2 * record.train.model.seq_len
    assert (record.launch, record.samples.method) == (5, "train-step-host/2")
    assert record.num_wrong == 0
    assert record.peak_memory_bytes is None
    assert told.allocated_bytes == (None,)
    (resident,) = told.resident_bytes
    now = psutil.Process().memory_info().rss
    assert resident is not None
    assert 0.5 * now < resident < 2 * now
    assert sum(seconds) < told.elapsed_s[0] + 1e-9 < record.samples.wall_s
    assert abs(told.uncounted_s[0]) < 1e-9
    assert record.samples.soak_s == 0, "a CPU needs none"
    assert 0 < told.build_s < told.build_s + told.first_s < record.samples.wall_s


@pytest.mark.parametrize("steps", [None, 8])
def test_micro_steps_come_in_whole_cycles(install: Install, steps: int | None) -> None:
    install()
    of = case(schedule=Schedule.MICRO, grad_accum=4)
    (record,), _ = run([of], TrainHow(steps=steps))
    (seconds,) = record.samples.seconds
    assert len(seconds) % 4 == 0
    assert len(seconds) >= (steps or 40)
    has_optim = [value > 0 for value in record.training.optim_s[0]]
    assert has_optim == [False, False, False, True] * (len(seconds) // 4)
    assert len(record.training.warmup_s[0]) % 4 == 0


@pytest.mark.parametrize(
    ("device", "left_s", "soak_s", "most_s"),
    [
        ("cuda", None, SOAK_S, 20.0),
        ("cuda", 4.0, 1.2, 1.2),
        ("cuda", 40.0, SOAK_S, 12.0),
        ("cuda", -1.0, 0.0, 0.0),
        ("cpu", None, 0.0, 0.0),
    ],
)
def test_a_gpu_soaks_as_for_operators_within_the_budget(
    device: str, left_s: float | None, soak_s: float, most_s: float
) -> None:
    end_s = None if left_s is None else time.monotonic() + left_s
    of = replace(case(), device=device)
    assert bench._soak_s(of, TrainHow(), end_s) == pytest.approx((soak_s, most_s), abs=0.1)


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_collected_while_steps_are_timed(install: Install, breaks: bool) -> None:
    enabled: list[bool] = []

    def loss(number: int) -> float:
        enabled.append(gc.isenabled())
        if breaks and number == 4:
            raise ValueError("no such thing")
        return 2.0

    install(losses=loss)
    (record,), _ = run([case()])
    assert isinstance(record, Failed if breaks else Measured)
    assert enabled[0]
    assert not any(enabled[2:])
    assert gc.isenabled()


def test_what_is_refused_is_skipped_and_the_next_runs(install: Install) -> None:
    made = install(reason=lambda of: "too odd" if of.mbs == 1 else None)
    (skipped, measured), position = run([case(1), case(2)])
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "too odd"
    assert isinstance(measured, Measured)
    assert position is None
    assert [of.mbs for of in made] == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_wrong(install: Install, bad: float) -> None:
    install(losses=lambda number: bad if number == 2 else 2.0)
    (record,), _ = run([case()])
    assert record.num_wrong == 1


@pytest.mark.parametrize(
    ("data", "factor", "is_wrong"),
    [("text", 1.0, True), ("text", 0.97, False), ("text", 1.03, True), ("random", 1.0, False)],
)
def test_on_text_the_loss_must_fall(
    install: Install, data: str, factor: float, is_wrong: bool
) -> None:
    install(losses=lambda number: 5.0 * factor**number)
    (record,), _ = run([case(data=data)], TrainHow(steps=12))
    assert bool(record.num_wrong) == is_wrong


def test_too_few_losses_prove_nothing(install: Install) -> None:
    install(losses=lambda _number: 5.0)
    (record,), _ = run([case(data="text")], TrainHow(steps=2))
    assert len(record.training.loss) < 10
    assert record.num_wrong == 0


def test_rank_0_alone_passes_records_on(install: Install) -> None:
    made = install()
    other = Ranks(rank=1, num_ranks=1, local_rank=1, device=torch.device("cpu"))
    records, position = run([case()], context=fakes.context(other))
    assert (records, position, len(made)) == ([], None, 1)


# What breaks


def test_after_an_error_new_ranks_go_on(install: Install) -> None:
    made = install(breaks=lambda of: ValueError("no such thing") if of.mbs == 2 else None)
    records, position = run([case(1), case(2), case(3)])
    assert [record.kind for record in records] == ["measured", "failed"]
    failed = records[1]
    assert (failed.cause, failed.message, failed.ranks) == ("error", "no such thing", (0,))
    assert "ValueError" in failed.traceback
    assert position == 5
    assert [of.mbs for of in made] == [1, 2]


def test_an_error_of_the_last_case_needs_no_new_ranks(install: Install) -> None:
    install(breaks=lambda _case: ValueError("no such thing"))
    (record,), position = run([case()])
    assert isinstance(record, Failed)
    assert position is None


def test_without_find_batch_larger_ones_are_tried(install: Install) -> None:
    install(breaks=lambda of: OOM if of.mbs == 2 else None)
    records, position = run([case(1), case(2), case(4)])
    assert records[-1].cause == "oom"
    assert "\n" not in records[-1].message
    assert position == 5


def test_find_batch_tries_nothing_larger_than_what_did_not_fit(install: Install) -> None:
    made = install(breaks=lambda of: OOM if of.mbs >= 4 else None)
    records, position = run(
        [case(mbs) for mbs in (1, 2, 4, 8, 16)], TrainHow(steps=3, find_batch=True)
    )
    kinds = [record.kind for record in records]
    assert kinds == ["measured", "measured", "failed", "skipped", "skipped"]
    assert records[2].cause == "oom"
    assert {one.reason for one in records[3:]} == {"mbs 4 ran out of memory already"}
    assert position is None
    assert [of.mbs for of in made] == [1, 2, 4]


def test_find_batch_does_not_take_an_error_for_a_lack_of_memory(install: Install) -> None:
    install(breaks=lambda of: ValueError("odd") if of.mbs == 2 else None)
    records, position = run([case(1), case(2), case(4)], TrainHow(steps=3, find_batch=True))
    assert [record.kind for record in records] == ["measured", "failed"]
    assert position == 5


def test_no_room_to_ask_for_a_kernel_costs_only_its_name(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()

    def full(*_sizes: Any, **_how: Any) -> Tensor:
        raise OOM

    monkeypatch.setattr(profiling, "torch", SimpleNamespace(**{**vars(torch), "empty": full}))
    (record,), _ = run([case()])
    assert isinstance(record, Measured)
    assert record.backend_run == ""


# Interrupts and budgets


def test_ctrl_c_stops_after_the_record(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    records: list[Record] = []

    def interrupted(work: Any, *_limits: object) -> None:
        work.sample()
        work.samples.interrupted = True

    monkeypatch.setattr("stepmark.training.loop.Loop.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run([case(1), case(2)], TrainHow(messages=True), records=records)
    (record,) = records
    assert isinstance(record, Measured)
    assert len(record.samples.seconds[0]) == 2
    assert record.training is not None
    assert record.training.messages == (), "no more work after Ctrl-C"


def test_a_budget_is_shared_and_ends_each_case(install: Install) -> None:
    install()
    begin = time.monotonic()
    records, _ = run([case(1), case(2)], TrainHow(steps=10**6, budget_s=1.0))
    assert time.monotonic() - begin < 20
    counts = [len(one.samples.seconds[0]) for one in records]
    assert all(0 < count < 10**6 for count in counts)


# What one case leaves to the next


def models_alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """To be filled: as each case begins, how many models of earlier ones are still there."""
    make = trainer.make
    models: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    def counting(of: TrainCase, device: torch.device) -> Any:
        alive.append(sum(one() is not None for one in models))
        found = make(of, device)
        models.append(weakref.ref(found.models[0]))
        return found

    monkeypatch.setattr(trainer, "make", counting)
    return alive


def test_a_case_begins_without_the_model_of_the_one_before(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    alive = models_alive(monkeypatch)
    run([case(1), case(2), case(3)])
    assert alive == [0, 0, 0]


def test_compiled_code_of_earlier_cases_is_forgotten(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch compiles eight variants of a function; a ninth would run as it is, silently."""
    install()
    seen: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: seen.append("reset"))
    run([case(1), case(2)])
    assert seen == ["reset", "reset"]


def compiled(mbs: int = 1) -> TrainCase:
    return case(mbs, compile=CompileScope.BLOCK)


def no_compile(of: TrainCase) -> Exception | None:
    return RuntimeError("no compiler") if of.compile is not CompileScope.NONE else None


def test_what_does_not_compile_fails(install: Install) -> None:
    install(breaks=no_compile)
    (record,), _ = run([compiled()])
    assert (record.kind, record.message) == ("failed", "no compiler")


def test_or_runs_eagerly_where_asked_and_says_so(install: Install) -> None:
    made = install(breaks=no_compile)
    (record,), position = run([compiled()], TrainHow(steps=3, compile_fallback=True))
    assert isinstance(record, Measured)
    assert position is None
    assert record.case == compiled(), "the record stays that of the planned case"
    assert record.training is not None
    assert record.training.compile_failed == "no compiler"
    assert record.train == replace(compiled(), compile=CompileScope.NONE)
    (row,) = report.rows([record], run_info(1))
    assert (row["compile"], row["compile_failed"]) == ("none", "no compiler")
    assert row["case_id"] == compiled().case_id
    assert "ran without torch.compile, which failed: no compiler" in remarks(row)
    assert [of.compile for of in made] == [CompileScope.BLOCK, CompileScope.NONE]


def test_memory_that_runs_out_is_no_reason_to_run_eagerly(install: Install) -> None:
    made = install(breaks=lambda _case: OOM)
    (record,), _ = run([compiled()], TrainHow(steps=3, compile_fallback=True))
    assert record.cause == "oom"
    assert len(made) == 1


def test_the_eager_run_begins_without_the_model_that_failed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(_number: int) -> float:
        if current[-1].compile is not CompileScope.NONE:
            raise RuntimeError("no compiler")
        return 2.0

    current = install(losses=losses)
    alive = models_alive(monkeypatch)
    (record,), _ = run([compiled()], TrainHow(steps=3, compile_fallback=True))
    assert isinstance(record, Measured)
    assert alive == [0, 0]


# Failures that are broadcast


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    store = HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(bench, "_POLL_S", 0.01)
    monkeypatch.setattr(bench, "_GRACE_S", 0.05)
    return Ranks(rank=0, num_ranks=2, local_rank=0, device=torch.device("cpu"))


def broken() -> None:
    raise ValueError("odd")


def test_a_failure_is_broadcast_to_a_rank_that_is_blocked(two_ranks: Ranks) -> None:
    told: list[Problem] = []
    with FailureBroadcast(two_ranks, 7, told.append) as broadcast:
        with pytest.raises(ValueError, match="odd"):
            broadcast.announcing(broken)()
        time.sleep(0.5)
    (problem,) = told
    assert (problem.rank, problem.position, problem.cause) == (0, 7, "error")
    assert problem.message == "odd"


def test_a_stale_failure_triggers_nothing_later(two_ranks: Ranks) -> None:
    told: list[Problem] = []
    with (
        pytest.raises(ValueError, match="odd"),
        FailureBroadcast(two_ranks, 7, told.append) as broadcast,
    ):
        broadcast.announcing(broken)()
    with FailureBroadcast(two_ranks, 7, told.append):
        time.sleep(0.5)
    assert told == []


# Traces


def test_traces_of_two_launches_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class FakeProfile:
        def __init__(self, folder: Path, name: str, rank: int, _warmups: int) -> None:
            self._file = folder / f"{name}-rank{rank}.json.gz"

        def start(self) -> None:
            """Nothing to record."""

        def stop(self) -> tuple[str, ...]:
            self._file.touch()
            return (self._file.name,)

    monkeypatch.setattr(profiling, "Profile", FakeProfile)
    alone = fakes.context().ranks
    work: Any = SimpleNamespace(untimed_cycles=lambda *_count, **_calls: None)
    names = [
        profiling.record_profile(
            work, alone, case(), tmp_path, (), is_profiled=True, launch=launch
        )
        for launch in (1, 2, 3)
    ]
    assert len(set(names)) == 3


@pytest.mark.parametrize(("device", "pauses"), [("cuda", True), ("cuda", False), ("cpu", True)])
@pytest.mark.parametrize("is_profiled", [True, False])
def test_a_paused_profile_idles_before_each_pass_outside_of_its_mark(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    *,
    pauses: bool,
    is_profiled: bool,
) -> None:
    events: list[str] = []

    class Marks:
        def __init__(self, _roots: object) -> None:
            self.begin_phase = lambda phase: events.append(f"begin {phase}")
            self.end_phase = lambda: events.append("end")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_error: object) -> None: ...

    counts: list[int] = []

    def cycles(count: int, *, on_phase: Callable[[str], None], on_end: Any) -> None:
        counts.append(count)
        for number in range(count):
            events.clear()  # but for the last cycle
            for phase in ("data", "forward", "backward", "optimizer"):
                on_phase(phase)
            on_end(number)

    names: list[str] = []

    def fake_profile(_folder: Path, name: str, _rank: int, num_warmups: int) -> Any:
        names.append(name)
        assert num_warmups == (4 if device == "cuda" else 1)
        return SimpleNamespace(start=lambda: None, stop=tuple, next_step=lambda: None)

    monkeypatch.setattr(profiling, "Profile", fake_profile)
    monkeypatch.setattr(profiling, "Annotations", Marks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: events.append("synchronize"))
    monkeypatch.setattr(profiling.time, "sleep", lambda s: events.append(f"idle {s} s"))
    ranks = replace(fakes.context().ranks, device=torch.device(device))
    samples = SimpleNamespace(seconds=[9.0, 0.25, 0.25])
    work: Any = SimpleNamespace(untimed_cycles=cycles, samples=samples)
    profiling.record_profile(
        work, ranks, case(), tmp_path, (), is_profiled=is_profiled, launch=1, pauses=pauses
    )
    idle = ["synchronize", "idle 0.3 s"] if pauses and device == "cuda" else []
    assert [name.endswith("-paused") for name in names] == [bool(idle)] * is_profiled
    assert counts == [(4 if device == "cuda" else 1) + 3 * (2 if idle else 1)]
    if not is_profiled:
        assert events == 3 * idle
        return
    assert events == [
        *("end", "begin data"),
        *("end", *idle, "begin forward"),
        *("end", *idle, "begin backward"),
        *("end", *idle, "begin optimizer"),
        "end",
    ]
