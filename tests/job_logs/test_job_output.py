"""Output without any line of NCCL: lines by which launchers, Python, CUDA and kernels fail."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.job_logs.training_lines import VERSIONS, Version, known_steps

from stepmark.findings.finding import Finding, Severity
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.job_output import OutputReader, is_job_output
from stepmark.job_logs.job_output.lines import split_tag
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import read_report
from stepmark.job_logs.nccl_log import lines, read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

FATAL = (
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "failure-host-memory", ""),
    (
        "[12.5] Out of memory: Killed process 77 (python) total-vm:1kB",
        "failure-host-memory",
        "",
    ),
    ("srun: error: node-3: task 17: Killed", "failure-killed", "Task 17 was killed"),
    (
        "srun: error: node-3: tasks 2-3: Exited with exit code 1",
        "failure-exit",
        "Task 2, task 3 ended with exit code 1",
    ),
    (
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***",
        "failure-time-limit",
        "",
    ),
    (
        "mpirun: process rank 3 with PID 77 on node n2 exited on signal 9 (Killed).",
        "failure-killed",
        "Rank 3 (pid 77) was killed",
    ),
    ("NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus.", "failure-gpu-lost", ""),
    ("NVRM: Xid (PCI:0000:4f:00): 94, pid=77, Contained", "failure-gpu-hardware", ""),
    (
        "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered",
        "failure-illegal-access",
        "(rank 3)",
    ),
    (
        "/bin/bash: line 1: 77 Segmentation fault (core dumped) python a.py",
        "failure-segfault",
        "",
    ),
    (
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "failure-host-memory",
        "",
    ),
    ("OSError: [Errno 122] Disk quota exceeded: '/ckpt/step_9'", "failure-disk-full", ""),
    ("cp: write: No space left on device", "failure-disk-full", ""),
    ("fork: Cannot allocate memory", "failure-process-limit", ""),
    ("bind: Address already in use", "failure-rendezvous", ""),
    ("No CUDA GPUs are available", "failure-no-gpu", ""),
    ("no CUDA-capable device is detected", "failure-no-gpu", ""),
    ("CUDA driver version is insufficient for CUDA runtime", "failure-driver", ""),
    ("the GPU had a misaligned address", "failure-illegal-access", ""),
    ("python: FATAL: the widget is on fire", "failure-unknown", "no rule knows it"),
    ("RuntimeError: the widget is on fire", "failure-python", "the widget is on fire"),
)
HARMLESS = (
    "iteration 10/ 100 | error rate: 0.01 | loss 2.5 | skipped iterations: 0 | nan: 0",
    "[rank0]:[W1] Warning: destroy_process_group() was not called before program exit",
    "saved 0 failed samples; timeout is 600 s; exit code: 0",
    "        except KeyboardInterrupt:",
)


FRAMES = (
    "/lib/x86_64-linux-gnu/libc.so.6(abort+0xd3) [0x7f1234567890]",
    "/usr/lib/libnccl.so.2(ncclCommAbort+0x12) [0x7f1234567890]",
    "0x00007f1234567890",
    "abort",
    "core::panicking::panic_fmt",
    "<alloc::boxed::Box<F,A> as core::ops::function::FnOnce<Args>>::call_once",
    "c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f in libc10.so)",
    'File "/home/u/train.py", line 3, in step',
)
LABELLED = (
    "/opt/run.sh: line 3: 77 Killed  python train.py",
    "Killed",
    '  File "/home/u/train.py", line 3, in step',
    "c10::DistBackendError: NCCL error in: a.cpp:7",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    " iteration        1/    9000 | elapsed time per iteration (ms): 9.0 |",
)


@pytest.mark.parametrize("number", ["0: ", " 0: ", "15: ", "   7: "])
def test_the_number_of_a_frame_is_no_rank(number: str) -> None:
    for frame in FRAMES:
        assert split_tag(number + frame) == (None, "", number + frame)
    for line in LABELLED:
        assert split_tag(number + line) == (int(number[:-2]), number[:-2], line)


def diagnosed(path: Path) -> list[Finding]:
    return diagnose(read_log([path]))


@pytest.mark.parametrize(("line", "rule", "words"), FATAL)
def test_a_fatal_line_is_a_problem(tmp_path: Path, line: str, rule: str, words: str) -> None:
    path = tmp_path / "job.out"
    path.write_text(f"iteration 1 loss 2.5\n{line}\niteration 2\n")
    assert is_job_output(path)
    [problem] = [one for one in diagnosed(path) if one.severity is Severity.PROBLEM]
    assert problem.rule == rule
    assert words in problem.text
    assert (problem.evidence[0].line, problem.evidence[0].text) == (2, line)


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "job.out"
    path.write_text(f"{line}\n")
    assert not is_job_output(path)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda own: own.name)
def test_steps_of_trainers_are_not_searched_for_failures(
    version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules take a millisecond a line, and a log may have 100,000 steps."""
    path = tmp_path / "job.out"
    steps = known_steps(seed=1, count=9)
    path.write_text("\n".join([line for step in steps for line in version.lines(step)]))
    monkeypatch.delattr("stepmark.job_logs.job_output.classify")
    assert is_job_output(path)


def test_binary_content_has_no_failures(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.write_bytes(b"\0\1RuntimeError: x\n")
    assert not is_job_output(path)


def test_output_without_failures_and_without_nccl_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.write_text("iteration 1 loss 2.5\n")
    with pytest.raises(ConfigError):
        read_log([path])


def test_the_earlier_traceback_is_the_cause_and_what_follows_is_below(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.write_text(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/u/train.py", line 9, in step\n'
        "[rank1]:     loss = f(x)\n"
        '[rank1]:   File "/venv/lib/python3.12/site-packages/torch/nn.py", line 3, in f\n'
        "[rank1]: ValueError: bad shape\n"
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 ***\n"
        "srun: error: n1: task 1: Exited with exit code 1\n"
    )
    [cause] = diagnosed(path)
    assert cause.text == "Rank 1 raised ValueError: bad shape, at /home/u/train.py:9 in step."
    assert [one.rule for one in cause.consequences] == ["failure-exit", "failure-terminated"]


CASES = tomllib.loads((Path(__file__).parents[1] / "data/public-faults.toml").read_text())[
    "case"
]


@pytest.mark.parametrize("case", CASES, ids=[case["source"] for case in CASES])
def test_a_failure_reported_in_public_has_its_cause(
    tmp_path: Path, case: dict[str, str]
) -> None:
    path = tmp_path / "job.out"
    path.write_text(case["lines"].lstrip("\n"))
    report = read_report(collect([str(path)]), LogsOptions(files=(str(path),)))
    assert report.exit_code == 1
    problems = [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert [one.rule for one in problems] == [case["rule"]]
    assert problems[0].evidence


def test_lines_that_differ_in_digits_alone_are_told_apart(tmp_path: Path) -> None:
    """Lines without a word of a failure are known by what is left without their digits."""
    path = tmp_path / "out.txt"
    path.write_text("ki0lled: 7\nstep 1\nbash: line 3: 17 Killed python\nstep 2\n")
    assert [one.rule for one in diagnose(read_log([path]))] == ["failure-killed"]
    path.write_text("Ki1lled\n" * 3 + "Killed\n")
    assert [one.rule for one in diagnose(read_log([path]))] == ["failure-killed"]


def test_the_only_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    path.write_text("step\n" * 9 + "RuntimeError: the widget is on fire\n")
    read: list[Path] = []

    def split_once(stream: IO[bytes]) -> Iterator[tuple[int, list[bytes]]]:
        read.append(path)
        return split(stream)

    split = lines._split
    monkeypatch.setattr(lines, "_split", split_once)
    monkeypatch.delattr("stepmark.job_logs.log_sources.is_job_output")
    (source,) = read_report(collect([str(path)]), LogsOptions(files=(str(path),))).sources
    assert [one.rule for one in source.findings] == ["failure-python"]
    assert len(read) == 1


@pytest.mark.parametrize("others", [0, 1])
def test_nccl_lines_after_much_other_output_are_a_log(tmp_path: Path, others: int) -> None:
    words = [tmp_path / "train.out", *[tmp_path / "other.out"] * others]
    line = "node0:7:7 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
    for path in words:
        path.write_text("iteration 1 loss 2.5\n" * 9999 + line)
    (source,) = read_report(collect(list(map(str, words))), LogsOptions(files=())).sources
    assert source.kind == "NCCL log"


def test_an_end_before_the_first_time_of_its_file_has_no_time() -> None:
    reader = OutputReader()
    for index, stamp in enumerate(("2026-01-01 10:00:00 ", "")):
        reader.enter_file(f"{index}.txt", index)
        reader.read(f"{stamp}srun: error: node-3: task {index}: Killed".encode(), 1)
        reader.leave_file()
    first, second = reader._exits.failures(lambda _process: None)
    assert (first.time_s is not None, second.time_s) == (True, None)
