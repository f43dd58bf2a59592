"""Settings of frameworks as flags: their own names, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest

from .workload_program import Program, program, refused

TINY = "--model llama-3.1-8b --scale tiny"
EXPERTS = "--model mixtral-8x7b --scale tiny --sp"


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


def test_optimizer_instances_go_by_either_name(run: Program) -> None:
    base = f"generate {TINY} --world-size 8 --dp-shard 2 --use-distributed-optimizer -o -"
    ours = run(f"{base} --dp-replicate 4")
    megatrons = run(f"{base} --num-distributed-optimizer-instances 4")
    assert ours.out == megatrons.out == run(base).out
    assert b'"num_distributed_optimizer_instances":4' in ours.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"{TINY} --dtype fp8", "dtype fp8_e4m3 is invalid: it must be fp32, bf16 or fp16"),
        (
            f"{TINY} --framework fsdp --dtype fp8",
            "dtype fp8_e4m3 is invalid: it must be fp32, bf16 or fp16",
        ),
        (
            f"{TINY} --framework fsdp --param-dtype int8",
            "--param-dtype int8 is invalid: it must be fp32, bf16",
        ),
        (
            f"{TINY} --framework ddp --param-dtype int64",
            "--param-dtype int64 is invalid: it must be fp32, bf16",
        ),
        (
            f"{EXPERTS} --moe-aux-loss-coeff -1",
            "--moe-aux-loss-coeff -1.0 is invalid: it must be 0 or more",
        ),
        (f"{TINY} --world-size 16 --dp-shard 2", "give that, or dp-shard 16"),
    ],
)
def test_what_is_not_modelled_is_one_line(run: Program, line: str, words: str) -> None:
    refused(run(f"generate {line} -o x.json"), words)
    assert list(Path().iterdir()) == []


def test_a_capacity_below_zero_is_dropless(run: Program) -> None:
    base = f"{EXPERTS} --world-size 2 --ep 2"
    dropless = run.made(base).out
    assert run.made(f"{base} --moe-expert-capacity-factor -1").out == dropless
    assert run.made(f"{base} --moe-expert-capacity-factor 1").out != dropless
