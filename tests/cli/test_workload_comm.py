"""stepmark comm --from-workload: a workload's messages as cases and as others' commands."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.comm_workload import command
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective

from .workload_program import Program, program, refused

TINY = "--model llama-3.1-8b --scale tiny"


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return program(capsysbinary, tmp_path, monkeypatch)


def printed(run: Program, made: str, more: str = "", tool: str = "nccl-tests") -> list[str]:
    Path("w.json").write_bytes(run.made(made).out)
    done = run(f"{more} --from-workload w.json --print {tool}", verb="comm")
    assert done.code == 0, done.err
    return done.text.splitlines()


def test_fsdp_of_llama_70b_on_8_ranks(run: Program) -> None:
    """A layer has 106,956,800 elements per rank: -b is the gathered size, 8 times that."""
    attention = 8192 * (64 + 2 * 8) * 128 + 64 * 128 * 8192
    layer = attention + 3 * 8192 * 28672 + 2 * 8192
    root = 2 * 128256 * 8192 + 8192
    assert layer == 8 * 106_956_800
    found = printed(run, "--model llama-3-70b --framework fsdp --world-size 8 --ends root")
    assert [line.partition("  # ")[0] for line in found[1:]] == [
        f"all_gather_perf -b {2 * layer} -e {2 * layer} -d bfloat16 -g 8",
        f"all_gather_perf -b {2 * root} -e {2 * root} -d bfloat16 -g 8",
        f"reduce_scatter_perf -b {4 * layer} -e {4 * layer} -d float -o sum -g 8",
        f"reduce_scatter_perf -b {4 * root} -e {4 * root} -d float -o sum -g 8",
    ]
    assert found[1].endswith("  # llama-3.1-70b blocks x 160")
    assert found[0].startswith("all_reduce_perf -b ")


def test_only_those_named_with_their_flags(run: Program) -> None:
    made = "--model llama-3-70b --framework fsdp --world-size 8 --ends root"
    found = printed(run, made, "all_gather -n 50 -w 5 -c 0 -m 2 -G 1 -z 1 -T 90s", "rccl-tests")
    assert len(found) == 2
    for line in found:
        assert line.startswith("all_gather_perf -b ")
        assert " -d bfloat16 -g 8 -n 50 -w 5 -c 0 -m 2 -G 1 -z 1 -T 90  # " in line


def test_pairs_groups_and_types_of_a_pipeline(run: Program) -> None:
    """b s h of a micro-batch in bf16 between two ranks; 128 x 2 ranks need mpirun."""
    made = (
        "--model llama-3.1-8b --framework megatron --world-size 1024 --tp 2 --pp 4 --gbs 128 "
        "--use-distributed-optimizer --grad-reduce-in-bf16"
    )
    found = printed(run, made)
    sent = 8192 * 4096 * 2
    pairs = [line for line in found if line.startswith("sendrecv_perf")]
    assert [line.partition("  # ")[0] for line in pairs] == [
        f"sendrecv_perf -b {sent} -e {sent} -d bfloat16 -g 2"
    ]
    assert len(printed(run, made, "sendrecv")) == 1
    many = [line for line in found if "reduce_scatter_perf" in line]
    assert many
    for line in many:
        assert re.match(
            r"mpirun -np 128 reduce_scatter_perf -b \d+ .*-d bfloat16 .* -g 1", line
        )
    assert any(" -d int64 -r 0 -g 2" in line for line in found)


def test_tokens_to_experts(run: Program) -> None:
    """4096 tokens, each to 2 of 8 experts; dropless they are as many where routing is even."""
    made = "--model mixtral-8x7b --framework megatron --world-size 8 --ep 8 --seq-len 4096"
    filled = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    size = 4096 * 2 * 4096 * 2
    for more, tool, program_ in (
        (filled, "nccl-tests", "alltoall_perf"),
        ("", "nccl-tests", "NCCL_TESTS_ALLTOALLV_SPREAD=0 alltoallv_perf"),
        ("", "rccl-tests", "alltoall_perf"),
    ):
        lines = printed(run, f"{made} {more}", tool=tool)
        wanted = f"{program_} -b {size} -e {size} -d bfloat16 -g 8"
        assert wanted in [line.partition("  # ")[0] for line in lines]


@pytest.mark.parametrize(
    ("collective", "num_ranks", "tool", "expected"),
    [
        ("all_to_all", 8, "nccl-tests", "alltoall_perf -b 1024 -e 1024 -d half -g 8"),
        (
            "all_to_all",
            16,
            "nccl-tests",
            "mpirun -np 16 alltoall_perf -b 2048 -e 2048 -d half -g 1",
        ),
        ("all_reduce", 4, "nccl-tests", "all_reduce_perf -b 128 -e 128 -d half -o sum -g 4"),
        ("all_gather", 4, "rccl-tests", "all_gather_perf -b 512 -e 512 -d half -g 4"),
        ("broadcast", 2, "rccl-tests", "broadcast_perf -b 128 -e 128 -d half -r 1 -g 2"),
    ],
)
def test_a_case_as_a_command(collective: str, num_ranks: int, tool: str, expected: str) -> None:
    from stepmark.model.collectives import FACTS, RedOp

    one = Collective(collective)
    case = CommCase(
        collective=one,
        count=64,
        dtype=DType.FP16,
        num_ranks=num_ranks,
        world_size=num_ranks,
        redop=RedOp.SUM if FACTS[one].reduces else RedOp.NONE,
        root=1 if FACTS[one].rooted else -1,
    )
    assert command(case, tool) == expected


def test_what_no_program_of_theirs_measures_is_left_out(run: Program) -> None:
    done = run("barrier all_reduce -b 8 -e 8 --print nccl-tests", verb="comm")
    assert done.code == 0
    assert "left out: barrier" in done.err
    assert done.text.startswith("all_reduce_perf -b 8 -e 8 -d float -o sum -g 8")


def test_cases_on_the_ranks_there_are(run: Program) -> None:
    Path("w.json").write_bytes(
        run.made(f"{TINY} --framework megatron --world-size 8 --tp 2 --pp 2 --sp --gbs 8").out
    )
    done = run("--from-workload w.json --device cpu --nproc 2 --dry-run", verb="comm")
    assert done.code == 0, done.err
    lines = done.text.splitlines()
    assert f"{len(lines)} cases; none was run" in done.err
    assert any("comm all_gather -b 8K -e 8K --dtype bf16 " in line for line in lines)
    assert any("comm p2p -b 4K -e 4K --dtype bf16 " in line for line in lines)


def test_settings_of_all_cases(run: Program) -> None:
    Path("w.json").write_bytes(run.made(f"{TINY} --framework ddp --world-size 2").out)
    fixed = "--from-workload w.json --nproc 2 --dry-run"
    plain = run(f"{fixed} --device cpu", verb="comm").text.splitlines()
    beside = run(f"{fixed} --device cpu --overlap-with gemm:64", verb="comm").text.splitlines()
    assert len(beside) == 2 * len(plain)
    assert sum("--overlap-with gemm:64" in line for line in beside) == len(plain)
    limited = run(f"{fixed} --device h200 --max-ctas 1,4", verb="comm").text.splitlines()
    for ctas in ("1", "4"):
        assert sum(f"--max-ctas {ctas} " in line for line in limited) == len(plain)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--from-workload w.json --print nccl", "one of nccl-tests, rccl-tests"),
        ("--from-workload w.json -b 8 --print nccl-tests", "-b"),
        ("--from-workload w.json --model llama-3.1-8b --print nccl-tests", "model"),
        ("--from-workload w.json -d bf16 --print nccl-tests", "-d"),
        ("--from-workload w.json -n 0 --print nccl-tests", "-n"),
        ("--from-workload w.json --placement in --device cpu --nproc 2 --dry-run", "placement"),
        ("all_to_all --from-workload w.json --print nccl-tests", "all_to_all"),
        ("nonsense --from-workload w.json --print nccl-tests", "nonsense"),
        ("all_reduce --print nccl-tests --nproc 1", "nproc"),
        ("--from-workload w.json --device cpu --nproc 1 --dry-run", "at least 2"),
        ("--print nccl-tests", "--list"),
    ],
)
def test_bad_input(run: Program, line: str, word: str) -> None:
    Path("w.json").write_bytes(run.made(f"{TINY} --framework ddp --world-size 4").out)
    refused(run(line, verb="comm"), word)


def test_a_workload_of_one_rank_has_nothing_to_measure(run: Program) -> None:
    Path("w.json").write_bytes(run.made(TINY).out)
    refused(run("--from-workload w.json --print nccl-tests", verb="comm"), "communication")
