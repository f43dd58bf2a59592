"""The plan of stepmark run: parts in the first launch, the step in the second one."""

import shlex
from dataclasses import replace

import pytest
from tests.parsing import parse

from stepmark.cases.case import OpCase
from stepmark.cases.plan import Plan, Profile
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope
from stepmark.ground.errors import ConfigError
from stepmark.measuring.machine import Machine
from stepmark.runs import run
from stepmark.runs.run_options import RunOptions

H200 = Machine(
    device="cuda", name="NVIDIA H200", num_accelerators=4, memory_bytes=150_109_880_320
)
CPU = Machine(device="cpu")


def joined(words: object) -> str:
    """Return the name of a case without blanks, which mutate.py can run alone."""
    return str(words).replace(" ", "_") if isinstance(words, str) else type(words).__name__


def planned(words: str, machine: Machine = H200) -> Plan:
    return run.plan(parse(RunOptions, shlex.split(words)), machine)


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ("", H200),
        ("gpt2-1.5b --strategy ddp --nproc 2", H200),
        ("llama-3.1-8b --strategy tp --clip 0", H200),
        ("", CPU),
        ("gpt2-125m --scale tiny --nproc 2", CPU),
        ("gpt2-125m --scale tiny --strategy single", CPU),
        ("gpt2-125m --scale tiny --strategy single --mbs 1", H200),
        ("gpt2-125m --scale tiny --tp 2 --strategy fsdp", CPU),
        ("llama-3.1-8b --scale tiny --strategy pp --nproc 2", CPU),
        ("llama-3.1-8b --strategy pp --nproc 3", H200),
    ],
    ids=joined,
)
def test_parts_come_in_the_first_launch_and_the_step_in_the_second(
    words: str, machine: Machine
) -> None:
    plan = planned(words, machine)
    launches = [entry.launch for entry in plan.entries]
    assert launches == [1] * (len(launches) - 1) + [2]
    assert [entry.position for entry in plan.entries] == list(range(len(launches)))
    *parts, step = plan.entries
    assert len({entry.case.case_id for entry in parts}) == len(parts)
    assert [entry.profile for entry in (parts[0], step)] == [Profile.PAUSED, Profile.PLAIN]
    assert isinstance(step.case, TrainCase)
    assert step.case.num_ranks == plan.world_size
    assert step.case.clip == (0 if "--clip 0" in words else 1)
    on_gpu = machine is H200
    assert step.case.compile is (CompileScope.BLOCK if on_gpu else CompileScope.NONE)
    # Operators of a layer are those of the model that is trained, or are left out.
    families = {entry.case.family for entry in parts}
    assert ("optimizer" in families) == ("--scale" not in words)
    assert any("left out" in note for note in plan.notes) == ("--scale" in words)


@pytest.mark.parametrize("compile", [True, False])
def test_operators_are_measured_as_the_step_may_run_them(compile: bool) -> None:
    machine = replace(H200, capability=(9, 0))
    plan = planned("llama-3.1-8b" if compile else "llama-3.1-8b --no-compile", machine)
    backends: dict[str, set[str]] = {}
    for entry in plan.entries:
        if isinstance(entry.case, OpCase):
            backends.setdefault(entry.case.family, set()).add(entry.case.backend)
    assert backends["attention"] == {"flash", "cudnn"}
    fused = {backends[family].pop() for family in ("norm", "activation", "rope")}
    assert fused == {"compile" if compile else "torch"}
    assert backends["gemm"] == backends["optimizer"] == {"torch"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("gpt2-1.5b --mbs 1,2", "^mbs 1,2 is invalid: it must be one value: 2 steps"),
        # Nothing helps that keeps the tokens of a step.
        ("llama-3.1-70b --nproc 1 --strategy single", r"fits into .*needs 1\.075 TiB\)\.$"),
        ("gpt2-1.5b --nproc 5", "from 1 to 4"),
        ("llama-3.1-405b --device cpu --strategy single", "would fit with --scale tiny"),
    ],
    ids=joined,
)
def test_what_is_no_single_step_that_fits_is_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        planned(words, CPU if "cpu" in words else H200)


@pytest.mark.parametrize("words", ["", "gpt2-125m --scale tiny --nproc 2"])
def test_a_budget_is_for_all_parts(words: str) -> None:
    plan = planned(f"{words} --budget 80s", CPU)
    kinds = (plan.how.op, plan.how.comm, plan.how.train, plan.how.replay)
    assert [how.budget_s for how in kinds] == [20.0] * 4
    assert plan.budget_s == 80.0
    assert planned(words, CPU).budget_s is None
