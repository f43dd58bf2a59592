"""The parts of a training step that are measured: what they keep of it, and that none lacks."""

import shlex
from dataclasses import replace
from typing import Any

import pytest
from tests.parsing import parse

from stepmark.cases.case import OpCase, Rate
from stepmark.cases.comm_case import CommCase
from stepmark.cases.message import RECV, SEND
from stepmark.cases.plan import Plan, Profile
from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import GIB
from stepmark.measuring.machine import Machine
from stepmark.predictions import calibrate
from stepmark.step.workload import CommOp, Workload
from stepmark.store.commands import command_of
from stepmark.training import train_plan
from stepmark.training.train_options import CalibrateOptions, TrainOptions
from stepmark.workloads.rules.pytorch.case import of_case

H200 = Machine(device="cuda", name="NVIDIA H200", num_accelerators=8, capability=(9, 0))
CPU = Machine(device="cpu")
# By words of the step: layers of the part for its kernels.
STEPS = {
    "gpt2-1.5b --strategy single --mbs 8 --compile": 2,
    "gpt2-1.5b --strategy ddp --nproc 4 --mbs 4 --grad-accum 2 --text": 2,
    "llama-3.1-8b --strategy fsdp --nproc 8 --tp 2 --cp 4 --ac 3/8": 8,
    "llama-3.1-8b --strategy tp --nproc 8 --precision bf16": 2,
    "llama-3.1-8b --strategy fsdp --nproc 4 --fp8 --fp8-head --blocks-per-group 4": 4,
    "llama-3.1-8b --strategy fsdp --nproc 4 --fp8 --no-fp8-all-gather": 2,
    "llama-3.1-70b --strategy pp --nproc 8 --tp 2 --pp-schedule interleaved --mbs 16": 8,
    "llama-3.1-8b --scale 1/4 --num-layers 5 --seq-len 48 --strategy fsdp --nproc 2": 2,
    "deepseek-v3 --strategy fsdp --nproc 8 --ep 8": 2,
    "mixtral-8x7b --strategy fsdp --nproc 4 --mbs 2": 2,
    "qwen3-8b --scale tiny --num-layers 4 --nproc 1": 2,
}


def step_of(words: str) -> TrainCase:
    options = parse(TrainOptions, [*shlex.split(words), "--device", "cuda"])
    world_size = H200.num_ranks(train_plan.default_nproc(options, "cuda"))
    (case,) = train_plan.cases(options, "cuda", world_size)
    return case


def test_several_gpus_have_eight_layers_where_they_fit() -> None:
    """In two layers the head, which draws most power, is most of the products."""
    roomy, small = (replace(H200, memory_bytes=gib * GIB) for gib in (141, 32))

    def layers(words: str, machine: Machine) -> int:
        return planned(words, machine).entries[0].case.model.num_layers

    tp = "llama-3.1-8b --strategy tp --nproc 2 --mbs 2"
    assert [layers(tp, machine) for machine in (roomy, small, H200)] == [8, 2, 2]
    # At most half of the step, which else would be measured before it is predicted.
    assert [layers(f"{tp} --num-layers {n}", roomy) for n in (2, 5, 9, 15)] == [2, 2, 4, 6]
    assert layers("llama-3.1-8b --strategy fsdp --nproc 4 --ac 1/3", roomy) == 6
    assert layers("llama-3.1-8b --strategy pp --nproc 2 --mbs 4", roomy) == 2
    assert layers("gpt2-1.5b --strategy single", roomy) == 2


def planned(words: str, machine: Machine = H200) -> Plan:
    return calibrate.plan(parse(CalibrateOptions, shlex.split(words)), machine)


@pytest.mark.parametrize("words", STEPS)
def test_parts_differ_from_the_step_in_layers_or_widths_and_tokens_alone(words: str) -> None:
    step = step_of(words)
    kernels, host, *rest = planned(words).entries
    assert isinstance(kernels.case, TrainCase)
    assert isinstance(host.case, TrainCase)
    assert [kernels.profile, host.profile] == [Profile.PAUSED, Profile.NONE]
    assert {entry.profile for entry in rest} == {Profile.NONE}

    few = kernels.case.model
    own: dict[str, Any] = {"labels": (), "num_layers": step.num_layers}
    changed: dict[str, Any] = {"name": "any", "published_params": None, "aliases": ()}
    fewer = step.model.with_layers(STEPS[words])
    assert replace(few, **changed) == replace(fewer, **changed)
    assert bool(few.num_moe_layers) == bool(step.model.num_moe_layers)
    assert bool(few.num_dense_layers) == bool(step.model.num_dense_layers)
    assert replace(kernels.case, model=step.model, **own) == step

    small = host.case.model
    assert small.num_layers == step.model.num_layers
    assert small.num_moe_layers == step.model.num_moe_layers
    assert small.hidden_size <= (512 if step.parallel.tp > 2 else 256)
    assert host.case.mbs * small.seq_len <= 1024
    own |= {"mbs": step.mbs, "scale": step.scale}
    assert replace(host.case, model=step.model, **own) == step

    for entry in (kernels, host):
        again = step_of(command_of(entry.case).removeprefix("stepmark train "))
        assert again.case_id == entry.case.case_id


def messages_of(workload: Workload) -> set[tuple[str, int, int, str]]:
    """Collectives by name, ranks, bytes and type."""
    found = set()
    for stage in range(len(workload.stages)):
        for op in workload.tally(stage):
            if isinstance(op, CommOp) and op.collective != RECV:
                group = workload.groups[op.group]
                name, size = op.collective, group.size
                if name == SEND:
                    name, size = "p2p", 2
                found.add((name, size, op.message_bytes(group), str(op.dtype)))
    return {message for message in found if message[1] > 1}


@pytest.mark.parametrize("words", STEPS)
def test_every_message_of_the_step_is_measured_or_a_note_says_why_none(words: str) -> None:
    plan = planned(words)
    cases = [entry.case for entry in plan.entries if isinstance(entry.case, CommCase)]
    measured = {
        (str(case.collective), case.num_ranks, case.message_bytes, str(case.dtype))
        for case in cases
    }
    assert messages_of(of_case(step_of(words))) <= measured
    assert bool(measured) == (plan.world_size > 1)
    assert {case.world_size for case in cases} <= {plan.world_size}


def test_power_is_measured_on_gpus_alone_at_full_and_half_load() -> None:
    words = "gpt2-125m --scale tiny --strategy ddp --nproc 2"
    cases = [e.case for e in planned(words).entries if isinstance(e.case, OpCase)]
    assert [(case.family, case.rate) for case in cases] == [
        *(("gemm", Rate.SUSTAINED), ("attention", Rate.SUSTAINED), ("copy", Rate.SUSTAINED)),
        *(("gemm", Rate.HALF), ("attention", Rate.HALF), ("copy", Rate.HALF)),
    ]
    assert {case.num_ranks for case in cases} == {2}
    on_cpu = planned(f"{words} --device cpu", CPU)
    # Two tiny layers of 64 tokens are both parts of the step.
    assert [entry.case.kind for entry in on_cpu.entries] == ["train", "comm"]
    roles = [label.role for label in on_cpu.entries[0].case.labels]
    assert roles == [calibrate.KERNELS, calibrate.HOST]


def test_several_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="mbs 1,2 is invalid: it must be one value"):
        planned("gpt2-125m --strategy single --mbs 1,2")
