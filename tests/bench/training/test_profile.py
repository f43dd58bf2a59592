"""Profiles of real steps on the CPU: a trace that can be read, shares that add up."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from stepmark.bench.training.profiling import Profile, groups


def train(times: int, profile: Profile) -> None:
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(times):
        model(torch.ones(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        profile.step()


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


def test_calls_are_those_of_the_steps(done: Profile) -> None:
    calls = {one.name: one.calls for one in done.self_times()}
    assert calls["aten::addmm"] == 2
    assert calls["aten::_fused_adamw_"] == 2
    assert not any(name.startswith("ProfilerStep") for name in calls)


def test_the_longest_come_first_and_groups_add_up(done: Profile) -> None:
    entries = done.self_times()
    times = [entry.seconds for entry in entries]
    assert times == sorted(times, reverse=True)
    assert min(times) >= 0
    assert sum(group.seconds for group in groups(entries)) == pytest.approx(sum(times))
    assert sum(group.calls for group in groups(entries)) == sum(one.calls for one in entries)


def test_the_table(done: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = done.table().splitlines()
    assert lines[0].startswith("rank 3: ")
    assert lines[0].endswith(" ms of operators on the host per step, 2 steps")
    first, second = (index for index, line in enumerate(lines) if not line)
    shares = [float(line.split("%")[0]) for line in lines[first + 2 : second]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert len(lines[second + 2 :]) == min(25, len(done.self_times()))
    assert max(map(len, lines)) < 125
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "kernels were not recorded" in done.table()


def test_kernels_hide_what_launched_them() -> None:
    """As on a GPU: an operator's device time is that of its kernels and must not add to it."""

    def event(key: str, device: DeviceType, micros: float, note: bool = False) -> object:
        return SimpleNamespace(
            key=key,
            device_type=device,
            is_user_annotation=note,
            self_device_time_total=micros,
            self_cpu_time_total=7.0,
            count=4,
        )

    profile = Profile(Path(), "x", 0)
    profile._averages = [
        event("aten::mm", DeviceType.CPU, 100.0),
        event("nvjet_sm90_tst", DeviceType.CUDA, 100.0),
        event("ncclDevKernel_AllGather_RING_LL", DeviceType.CUDA, 300.0),
        event("FSDP::all_gather", DeviceType.CUDA, 300.0, note=True),
    ]
    nccl, product = profile.self_times()
    assert (nccl.name, nccl.calls) == ("ncclDevKernel_AllGather_RING_LL", 4)
    assert (product.name, product.calls) == ("nvjet_sm90_tst", 4)
    assert (nccl.seconds, product.seconds) == pytest.approx((3e-4, 1e-4))
    assert " 75.0%       0.300          4  communication" in profile.table()


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
