"""Inputs that users of `logs` have: each has its answer, its exit code, and no line is lost."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import read_report

CASES = tomllib.loads((Path(__file__).parents[1] / "data" / "log-cases.toml").read_text())[
    "case"
]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_input_has_its_answer(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / case["file"]
    path.write_text(case["text"].removeprefix("\n"))
    only_tables = case.get("tables", False)
    options = LogsOptions(files=(str(path),), tables=only_tables)
    report = read_report(collect([str(path)], only_tables=only_tables), options)
    text = "\n".join(report.text())
    assert report.exit_code == case["exit"]
    for word in case["words"]:
        assert word in text


OUT_OF_MEMORY = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0.",
    "srun: error: n3: task 2: Out Of Memory",
)


def job_text(silent: tuple[int, ...], *more: str) -> str:
    """Return the log of 8 ranks on 4 hosts, all but the silent ones of which time out."""
    lines = []
    for rank in range(8):
        who = f"n{rank // 2 + 1}:{5000 + rank}:{6000 + rank} [{rank % 2}] NCCL INFO "
        start = f"ncclCommInitRankConfig comm 0x{rank + 10} rank {rank} nranks 8 cudaDev "
        start += f"{rank % 2} nvmlDev {rank % 2} busId 19000 commId 0xabc - Init "
        version = "2.26.2" if rank // 2 == 1 else "2.27.3"
        lines += [
            f"{who}NCCL version {version}+cuda12.9",
            f"{who}NET/IB : Using [0]mlx5_0:1/IB ",
        ]
        lines[-1] += "[1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
        lines += [f"{who}Using network IB", f"{who}{start}START", f"{who}{start}COMPLETE"]
        if rank % 2:
            lines += [
                f"{who}Channel 00/0 : {rank}[1] -> {(rank + 1) % 8}[0] [send] via NET/IB/1"
            ]
    for rank in (rank for rank in range(8) if rank not in silent):
        lines += [
            f"[rank{rank}]:[E1130 14:22:11.1 ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog "
            "caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, "
            "NumelIn=262, NumelOut=262, Timeout(ms)=600000) ran for 600100 milliseconds before "
            "timing out."
        ]
    return "\n".join([*lines, *more])


@pytest.mark.parametrize(
    ("silent", "more", "words"),
    [
        ((5,), (), ("Rank 5 is on n3", "dmesg of the hosts of rank", "    7 in all")),
        ((4, 5), (), ("Ranks 4-5 are all ranks of n3", "dmesg of the hosts of rank")),
        ((5,), OUT_OF_MEMORY, ('killed a process: "srun: error: n3: task 2: Out Of Memory"',)),
        (
            (5,),
            ("NVRM: Xid (PCI:0000:4c:00): 92, pid=1",),
            ("seen: A GPU reports an Xid: NVRM",),
        ),
        (
            (5,),
            ("NVRM: Xid (PCI:0000:4c:00): 45, pid=1",),
            ("or when it was killed: NVRM: Xid",),
        ),
        (
            (5,),
            ("NVRM: Xid (PCI:0000:4c:00): 43, pid=1",),
            ("answer     A GPU reports an Xid",),
        ),
        ((5,), (), ("On n1, n2, n3, n4, 1 of 2 network adapters (0) carry nothing",)),
        ((5,), (), ("2.26.2 (2 processes on n2)",)),
    ],
)
def test_a_log_of_several_hosts(
    tmp_path: Path, silent: tuple[int, ...], more: tuple[str, ...], words: tuple[str, ...]
) -> None:
    path = tmp_path / "job.log"
    path.write_text(job_text(silent, *more))
    options = LogsOptions(files=(str(path),))
    report = read_report(collect([str(path)], only_tables=False), options)
    text = "\n".join(report.text())
    for word in words:
        assert word in text
    assert "NCCL_DEBUG=INFO" not in text


def test_a_kernel_log_with_an_xid_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dmesg.txt"
    for number, code in ((31, 1), (92, 3)):
        path.write_text(f"[ 1.0] NVRM: Xid (PCI:0000:4c:00): {number}, pid=1234, name=python")
        options = LogsOptions(files=(str(path),))
        report = read_report(collect([str(path)], only_tables=False), options)
        assert report.exit_code == code
        assert any(f"): {number}," in one.evidence[0].text for one in report.findings)
