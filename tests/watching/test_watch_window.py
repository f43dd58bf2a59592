"""The window of a watched job: which steps count, and that the job stays as it is."""

import atexit
import gzip
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooks

import stepmark

SITE = Path(stepmark.__file__).parent / "watching" / "watch_site"
PLAN = {"warmup": 2, "unprofiled": 2, "steps": 3, "ranks": None, "shapes": True}
ALL = 2 + 2 + 1 + 3 + 1 + 2  # warm-up, unprofiled, dropped, profiled, disturbed, after
LAST = 8
Begin = Callable[..., Any]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Watch this process; nothing of it is left afterwards."""
    monkeypatch.syspath_prepend(SITE)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    profiler = torch.autograd.profiler
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        monkeypatch.setattr(profiler, name, getattr(profiler, name))
    for name in ("traces", "ranks"):
        (tmp_path / name).mkdir()
    before = dict(hooks._global_optimizer_post_hooks)
    windows = []

    def begun(**changes: Any) -> Any:
        window = importlib.import_module("stepmark_window")
        plan = {**PLAN, "folder": str(tmp_path), **changes}
        windows.append(window.begin(json.dumps(plan)))
        return windows[-1]

    yield begun
    for window in windows:
        window.at_exit()
        atexit.unregister(window.at_exit)
    for name in set(hooks._global_optimizer_post_hooks) - set(before):
        del hooks._global_optimizer_post_hooks[name]


def report(folder: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ranks" / f"rank{rank}.json").read_text())
    return found


def marks(folder: Path, rank: int = 0) -> list[str]:
    """Names of the steps' marks in a trace, in the order of time."""
    return [e["name"] for e in events(folder, rank) if "ProfilerStep" in e["name"]]


def events(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Events of a trace in the order of time."""
    with gzip.open(folder / "traces" / f"rank{rank}.json.gz", "rt") as file:
        spans = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    return sorted(spans, key=lambda e: float(e["ts"]))


def job(*, sgd: int = 1) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = nn.Linear(4, 4)
    return model, [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(sgd)]


def train(steps: int, model: nn.Module, optimizers: list[Any], micro_batches: int = 1) -> None:
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


STEPS = ["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"]


@pytest.mark.parametrize(("micro_batches", "sgd"), [(1, 1), (3, 1), (1, 2)])
def test_a_step_is_an_optimizer_step(
    begin: Begin, tmp_path: Path, micro_batches: int, sgd: int
) -> None:
    before = torch.autograd.profiler.record_function.__exit__
    window = begin()
    train(ALL + 3, *job(sgd=sgd), micro_batches=micro_batches)
    assert window.is_done
    assert torch.autograd.profiler.record_function.__exit__ is before
    seen = report(tmp_path)
    counts = [len(seen[f"{kind}_s"]) for kind in ("unprofiled", "profiled", "after")]
    assert counts == [2, 3, 2]
    assert seen["profiled_steps"] == [6, 8]
    assert seen["trace"] == "traces/rank0.json.gz"
    assert seen["reason"] is None
    assert marks(tmp_path) == STEPS


def test_steps_hold_their_optimizer_steps(begin: Begin, tmp_path: Path) -> None:
    begin()
    train(ALL, *job())
    spans = {"ProfilerStep": [], "Optimizer.step": []}  # type: dict[str, list[Any]]
    for event in events(tmp_path):
        assert event["args"].get("finished", True)
        for name, found in spans.items():
            if event["name"].startswith(name):
                found.append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans["ProfilerStep"]) == len(spans["Optimizer.step"]) == 3
    for outer, inner in zip(*spans.values(), strict=True):
        assert outer[0] < inner[0] < inner[1] < outer[1]


def test_marks_of_a_waiting_profiler_of_the_job_get_another_name(
    begin: Begin, tmp_path: Path
) -> None:
    begin()
    model, optimizers = job()
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=99, warmup=1, active=1)
    ) as p:
        for _ in range(ALL + 1):
            train(1, model, optimizers)
            p.step()
    assert marks(tmp_path) == STEPS
    others = [e for e in events(tmp_path) if "step of the job's profiler #" in e["name"]]
    assert len(others) == 3


def test_parts_of_one_optimizer_step_are_one_step(begin: Begin) -> None:
    window = begin()
    model, optimizers = job()
    train(4, model, optimizers * 3)
    assert window.count == 3  # the first only shows which optimizer steps again


def test_replayed_graphs_are_steps_without_a_forward_pass(begin: Begin) -> None:
    window = begin()
    _, (optimizer,) = job()
    for _ in range(70):
        optimizer.step()
    assert window.count == 5


def test_an_optimizer_that_takes_over_ends_steps(begin: Begin) -> None:
    window = begin()
    model, (first, second) = job(sgd=2)
    train(4, model, [first])
    train(4, model, [second])
    assert window.count == 6


def test_a_job_that_ends_early_has_no_trace(begin: Begin, tmp_path: Path) -> None:
    window = begin()
    train(LAST, *job())  # the end of its first step is not seen
    window.at_exit()
    seen = report(tmp_path)
    assert seen["trace"] is None
    assert seen["reason"] == "the job ended after 8 steps; the profile needs 9"
    assert list((tmp_path / "traces").iterdir()) == []
    assert not torch.autograd.profiler._is_profiler_enabled


@pytest.mark.parametrize(("steps", "words"), [(0, "no optimizer step"), (1, "only one")])
def test_a_job_without_steps_says_so(
    begin: Begin, tmp_path: Path, steps: int, words: str
) -> None:
    window = begin()
    train(steps, *job())
    window.at_exit()
    (path,) = (tmp_path / "ranks").iterdir()
    assert words in json.loads(path.read_text())["reason"]


def test_an_agent_without_steps_is_silent(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", torch)
    begin().at_exit()
    assert list((tmp_path / "ranks").iterdir()) == []


def test_only_chosen_ranks_are_profiled(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    begin(ranks=[0, 2])
    train(ALL + 3, *job())
    seen = report(tmp_path, 3)
    assert (seen["world_size"], seen["trace"], len(seen["profiled_s"])) == (4, None, 3)
    assert list((tmp_path / "traces").iterdir()) == []


def test_a_second_process_of_a_rank_leaves_the_first_alone(
    begin: Begin, tmp_path: Path
) -> None:
    (tmp_path / "ranks" / "rank0.json").write_text("the first one's")
    begin()
    train(ALL + 3, *job())
    assert (tmp_path / "ranks" / "rank0.json").read_text() == "the first one's"
    (path,) = (tmp_path / "ranks").glob("rank0.*.json")
    seen = json.loads(path.read_text())
    assert seen["trace"] is None
    assert seen["notes"]["second"]


def own_profile(steps: int, model: nn.Module, optimizers: list[Any]) -> int:
    """Profile steps as the job does itself, and return the number of marks in its own trace."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps - 1, repeat=1),
    )
    with profiler:
        for _ in range(steps):
            train(1, model, optimizers)
            profiler.step()
    return len([e for e in profiler.events() if "ProfilerStep" in e.name])


@pytest.mark.parametrize("before", [2, 4, 5, 7])
def test_the_jobs_own_profiler_comes_first(begin: Begin, tmp_path: Path, before: int) -> None:
    """It begins before, just at and within the window; then the window is later."""
    window = begin()
    model, optimizers = job()
    train(before, model, optimizers)
    assert own_profile(6, model, optimizers) == 5
    train(ALL, model, optimizers)
    seen = report(tmp_path)
    assert window.is_done
    assert seen["trace"]
    first, last = seen["profiled_steps"]
    assert marks(tmp_path) == [f"ProfilerStep#{number}" for number in (first, last - 1, last)]
    assert first > before + 5
    assert len(seen["profiled_s"]) == 3


def test_a_profiler_that_always_comes_in_between_ends_the_watching(
    begin: Begin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    window = begin()
    model, optimizers = job()
    for _ in range(8):
        train(3, model, optimizers)
        assert own_profile(2, model, optimizers) == 1
    assert window.is_done
    assert "every time" in report(tmp_path)["reason"]
    assert "every time" in capfd.readouterr().err


def test_an_error_ends_the_watching_with_one_line(
    begin: Begin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    window = begin()
    (tmp_path / "traces").rmdir()
    train(ALL, *job())
    assert window.is_done
    assert not torch.autograd.profiler._is_profiler_enabled
    errors = capfd.readouterr().err.splitlines()
    assert len([line for line in errors if "watching failed" in line]) == 1
    assert report(tmp_path)["trace"] is None


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_a_compiled_step_has_the_same_graphs_and_is_seen(begin: Begin) -> None:
    import torch._dynamo.utils as dynamo

    graphs = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        dynamo.counters.clear()
        window = begin() if is_watched else None
        model, (optimizer,) = job()

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        compiled = torch.compile(step, backend="eager")
        for _ in range(5):
            compiled()
        graphs.append(dict(dynamo.counters["stats"]))
    assert graphs[0] == graphs[1]
    assert window.count == 4


class Plain(torch.optim.Optimizer):
    """An optimizer whose step torch.compile takes as one graph."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_must_be_one_graph_still_is(begin: Begin) -> None:
    window = begin()
    model, _ = job()
    optimizer = Plain(model.parameters(), {})
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        step()
    assert window.count == 0


def test_steps_that_amp_skips_are_no_steps(begin: Begin) -> None:
    window = begin()
    model, (optimizer,) = job()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    skipped = []
    for _ in range(8):
        scale = scaler.get_scale()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 4)).float().sum() * 4.0
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < scale)
    assert 0 < sum(skipped) < 7
    assert window.count == 8 - sum(skipped) - 1


def test_a_forked_process_begins_anew(begin: Begin, tmp_path: Path) -> None:
    window = begin()
    model, optimizers = job()
    train(7, model, optimizers)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, f"{window.count} {window.profile}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"0 None"
    os.close(read)
    os.close(write)
    train(ALL, model, optimizers)
    assert marks(tmp_path) == STEPS


def test_an_exit_in_the_profile_waits_only_so_long_for_the_gpu(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends in a profile crashes, and one whose collective hangs must end."""
    window = begin()
    train(LAST - 1, *job())
    assert torch.autograd._profiler_enabled()
    stepmark_window = sys.modules["stepmark_window"]
    monkeypatch.setattr(stepmark_window, "_is_over", lambda end: False)
    monkeypatch.setattr(stepmark_window, "_EXIT_S", 0.05)
    synchronized = []
    monkeypatch.setattr(window.profile._profiler, "stop", lambda: synchronized.append(1))
    window.at_exit()
    assert not torch.autograd._profiler_enabled()
    assert synchronized == []
    assert report(tmp_path)["reason"] == "the job ended after 7 steps; the profile needs 9"


def test_a_gpu_that_fails_leaves_no_profile_behind(begin: Begin) -> None:
    window = begin()
    train(LAST - 1, *job())

    def fail() -> None:
        raise RuntimeError("device-side assert")

    window.profile._profiler.stop = fail
    window.at_exit()
    assert not torch.autograd._profiler_enabled()
