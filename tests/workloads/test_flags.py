"""Every flag that is accepted changes something, or a line says that it does not.

The flags come from the option classes, so a new one cannot be forgotten.
"""

from collections.abc import Iterator
from dataclasses import Field
from enum import StrEnum
from functools import cache
from typing import Any

import pytest

from stepmark.cases.flops import per_token
from stepmark.cases.plan import Plan
from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.options import build, dashed, options
from stepmark.measuring.machine import Machine
from stepmark.step.workload import Workload
from stepmark.step_memory.memory import estimate
from stepmark.training import train
from stepmark.training.train_options import TrainOptions
from stepmark.workloads.rules import RULES
from stepmark.workloads.rules.pytorch.case import of_case
from stepmark.workloads.workload import generate, without_effect
from stepmark.workloads.workload_flags import NO_EFFECT, kind_of, options_class
from stepmark.workloads.workload_options import GenerateOptions

from .flag_layouts import (
    JOBS,
    OF_PLAN,
    OF_STEP,
    OF_TIMES,
    OPTIONS,
    OUTPUT,
    TRAIN_OUTPUT,
    TRAINED,
    UNDERIVED,
    VALUES,
    WITHOUT_EFFECT,
)

SHARED = {option.name for option in options(GenerateOptions)}
SETTINGS = [
    (framework, name)
    for framework, rule in RULES.items()
    for name in rule.fields()
    if name not in SHARED
]


def made(framework: str, flags: dict[str, Any]) -> Workload:
    return generate(options_class(framework)(framework=framework, **flags))


@cache
def job(framework: str, index: int, without: str) -> Workload | None:
    """Return the workload of a job without a setting; None if it is refused."""
    flags = {key: value for key, value in JOBS[framework][index].items() if key != without}
    try:
        return made(framework, flags)
    except ConfigError:
        return None


def is_same(one: Workload, two: Workload) -> bool:
    return (one.groups, one.blocks, one.stages) == (two.groups, two.blocks, two.stages)


def values_of(field: "Field[Any]") -> tuple[Any, ...]:
    if field.name in VALUES:
        return VALUES[field.name]
    kind = kind_of(field)
    if kind is bool:
        return (not field.default,)
    if issubclass(kind, StrEnum):
        return tuple(kind)
    return {int: (2, 4, 20_000), float: (2.0,)}[kind]


def attempts(framework: str, name: str) -> Iterator[Workload | None]:
    """Yield the workload of each job and value, or None if the step does not change."""
    field = RULES[framework].fields()[name]
    jobs = list(enumerate(JOBS[framework]))
    for index, flags in reversed(jobs) if "moe" in name or "expert" in name else jobs:
        for value in values_of(field):
            if value == field.default:
                continue
            try:
                workload = made(framework, flags | {name: value})
            except ConfigError:
                continue
            before = job(framework, index, name if name in flags else "")
            if before is not None and workload.settings == before.settings:
                continue  # the default of this job
            changed = before is None or not is_same(workload, before)
            if not changed and RULES[framework].has_job:
                notes = [note for note in workload.notes if note.startswith("no effect on ")]
                assert f"--{dashed(name)}" in notes[0].replace(",", "").split()
            yield workload if changed else None


@pytest.mark.parametrize(("framework", "name"), SETTINGS)
def test_a_setting_changes_a_step_or_is_noted(framework: str, name: str) -> None:
    changed = next(filter(None, attempts(framework, name)), None)
    is_of_times = name in OF_TIMES and RULES[framework].module.startswith("pytorch")
    assert (changed is None) is (name in WITHOUT_EFFECT or is_of_times)


def test_every_option_of_generate_is_tried_or_about_output() -> None:
    names = {option.name for cls in map(options_class, RULES) for option in options(cls)}
    settings = {name for _, name in SETTINGS}
    assert names - settings - set(NO_EFFECT) == set(OPTIONS) | set(OUTPUT)
    assert not (set(OPTIONS) | settings) & set(OUTPUT)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_a_step(name: str) -> None:
    flags, value = OPTIONS[name]
    without = {key: flags[key] for key in flags if key not in (name, "framework")}
    if name in ("model", "scale", "model_size"):
        without = {key: without[key] for key in without if key in ("world_size", "gbs")}
        before = made("megatron", without | {"model": "llama-3.1-8b"})
        more = {} if name != "scale" else {"model": "llama-3.1-8b"}
        after = made("megatron", without | more | {name: value})
    elif name == "framework":
        before, after = made("megatron", without), made(value, without)
    else:
        framework = flags["framework"]
        before = made(framework, {key: flags[key] for key in flags if key != "framework"})
        after = made(framework, without | {name: value})
    assert not is_same(before, after)


@pytest.mark.parametrize("framework", RULES)
def test_what_aicb_alone_has_is_said_to_have_no_effect(framework: str) -> None:
    own = RULES[framework].fields()
    cls = options_class(framework)
    for option in options(cls):
        if option.name in NO_EFFECT and option.name not in own:
            value = True if option.is_switch else "1"
            given = cls(framework=framework, **{option.name: value})
            recompute = option.name in ("recompute", "recompute_activations")
            if not (recompute and "recompute_granularity" in own):
                assert list(without_effect(given)) == [f"--{dashed(option.name)}"]


MACHINE = Machine(device="cuda", name="NVIDIA H200", num_accelerators=8)


def planned(flags: dict[str, Any]) -> Plan:
    device = flags.get("device", "cuda")
    machine = MACHINE if device == "cuda" else Machine(device="cpu")
    given = {"models": ["llama-3.1-8b"], "scale": "1/8"} | flags
    return train.plan(build(TrainOptions, given), machine)


def step_of(plan: Plan) -> tuple[object, ...]:
    """Return what a step does: its program, or why it is unknown, and its FLOPs."""
    (entry,) = plan.entries
    assert isinstance(entry.case, TrainCase)
    try:
        workload = of_case(entry.case)
        program: object = (workload.groups, workload.blocks, workload.stages)
    except ConfigError as error:
        program = str(error)
    return program, per_token(entry.case).hfu


def memory_of(plan: Plan) -> object:
    """Return the memory of a step, which takes longer than all else of it."""
    (entry,) = plan.entries
    assert isinstance(entry.case, TrainCase)
    return estimate(entry.case)


def test_every_option_of_train_is_tried_or_about_output() -> None:
    names = {option.name for option in options(TrainOptions)}
    assert names == set(OF_STEP) | set(OF_PLAN) | set(TRAIN_OUTPUT)


@cache
def trained(layout: str) -> tuple[Plan, tuple[object, ...]]:
    """Return the plan of a layout of TRAINED, and its step."""
    plan = planned(TRAINED[layout])
    return plan, step_of(plan)


@pytest.mark.parametrize("name", OF_STEP)
def test_a_flag_of_train_changes_every_step_in_which_it_is_accepted(name: str) -> None:
    changes = 0
    for layout, flags in TRAINED.items():
        before, step_before = trained(layout)
        for value in OF_STEP[name]:
            try:
                after = planned(flags | {name: value})
            except ConfigError:
                continue
            if [entry.case for entry in after.entries] != [e.case for e in before.entries]:
                step_after = step_of(after)
                is_changed = step_after != step_before or memory_of(after) != memory_of(before)
                assert is_changed, flags
                assert isinstance(step_after[0], str) is (name in UNDERIVED)
                changes += 1
    assert changes


@pytest.mark.parametrize("name", OF_PLAN)
def test_a_flag_of_train_changes_the_plan(name: str) -> None:
    flags, value = OF_PLAN[name]
    before, after = planned(flags), planned(flags | {name: value})
    assert (before.entries, before.how) != (after.entries, after.how)
