"""Profiles of real steps on the CPU: a trace that can be read, and marks in it."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from stepmark.model.model_tables import find_model
from stepmark.model.ops import Phase
from stepmark.step.trace_ops import MARK
from stepmark.step.workload import ComputeOp
from stepmark.traces.kineto.roles import role_of_call
from stepmark.training.profiling import Annotations, Profile, marked_modules
from stepmark.training.transformer import Transformer
from stepmark.workloads.job import Job
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch import rule


def train(times: int, profile: Profile) -> None:
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(times):
        model(torch.ones(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profile.next_step()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    profile = Profile(tmp_path_factory.mktemp("traces") / "new", "gpt2 / tiny", 3)
    profile.start()
    train(2, profile)
    profile.stop()
    return profile


def test_the_trace_is_kineto_s(done: Profile) -> None:
    assert [path.name for path in done.path.parent.iterdir()] == ["gpt2-tiny-rank3.json.gz"]
    with gzip.open(done.path) as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::addmm", "aten::mm"} <= names
    assert any(str(name).startswith("ProfilerStep#") for name in names)


def test_files_are_named(tmp_path: Path) -> None:
    profile = Profile(tmp_path, "one", 0)
    profile.start()
    train(1, profile)
    assert profile.stop() == ("one-rank0.json.gz",)
    assert (tmp_path / "one-rank0.json.gz").is_file()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_marks_are_those_of_modules_and_compile_nothing(
    tmp_path: Path, *, is_compiled: bool
) -> None:
    """Hooks inside a compiled graph would not run, and would change what is measured."""
    blocks = torch.nn.ModuleDict({"0": torch.nn.Sequential(torch.nn.Linear(8, 8))})
    model = torch.nn.ModuleDict({"blocks": blocks})
    if is_compiled:
        blocks["0"] = cast("Any", torch.compile(blocks["0"], backend="eager"))
    profile = Profile(tmp_path, "marks", 0)
    x = torch.ones(4, 8)
    blocks["0"](x)
    graphs = counters["stats"]["unique_graphs"]
    with Annotations([model]) as marks:
        profile.start()
        profile.next_step()
        marks.begin_phase("forward")
        blocks["0"](x)
        marks.begin_phase("backward")
        (file,) = profile.stop()
    assert counters["stats"]["unique_graphs"] == graphs
    blocks["0"](x)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not [module for module in model.modules() if module._forward_pre_hooks]
    with gzip.open(tmp_path / file) as stream:
        events = json.load(stream)["traceEvents"]
    names = [event["name"] for event in events if str(event.get("name")).startswith(MARK)]
    inside = [] if is_compiled else [f"{MARK}blocks.0.0"]
    phases = [f"{MARK}forward", f"{MARK}backward"]
    assert sorted(names) == sorted([f"{MARK}blocks.0", *inside, *phases])


def test_marks_end_where_recomputation_stops_early() -> None:
    """It ends with an exception inside the module, once all is there that backward needs."""
    block = checkpoint_wrapper(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    )
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleDict({"0": block})})
    with Annotations([model]) as marks, torch.profiler.profile() as profiler:
        block(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert marks._open == []
    counts = Counter(event.name for event in profiler.events() if event.name.startswith(MARK))
    assert counts == {f"{MARK}blocks.0": 2, f"{MARK}blocks.0.0": 2, f"{MARK}blocks.0.1": 2}


@pytest.mark.parametrize(
    "name", ["gpt2-125m", "llama-3.1-8b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"]
)
def test_roles_of_modules_are_those_of_the_tree(name: str) -> None:
    """One name for an operation in the workload and in the trace."""
    model = find_model(name).tiny()
    with torch.device("meta"):
        real = Transformer(model)
    is_gated = model.activation == "swiglu"
    found = {
        role_of_call(path, "", "aten::linear", is_gated=is_gated)
        for path, module in marked_modules(real)
        if not list(module.children()) and not path.endswith(".held")
        if not path.startswith(("tables", "mtp"))
    }
    job = Job(model=model, mbs=1, gbs=1)
    expected = {
        op.module
        for op in rule.workload(job, RULES["tp"].make()).tally()
        if isinstance(op, ComputeOp) and op.phase is Phase.FWD
    }
    between = ("rope", "core", "residual", "activation", "loss", "experts_gate_up")
    between += ("experts_up", "experts_down")
    assert found == {role for role in expected if not role.endswith(between)}


def test_without_cupti_operators_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[set[object]] = []
    real = torch.profiler.profile

    def refusing(*, activities: set[torch.profiler.ProfilerActivity], **more: Any) -> object:
        begun.append(set(activities))
        if torch.profiler.ProfilerActivity.CUDA in activities:
            raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
        return real(activities=activities, **more)

    both = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: both)
    monkeypatch.setattr(torch.profiler, "profile", refusing)
    profile = Profile(tmp_path, "one", 0)
    profile.start()
    train(1, profile)
    profile.stop()
    assert begun == [both, {torch.profiler.ProfilerActivity.CPU}]
    assert (tmp_path / "one-rank0.json.gz").is_file()
