"""Output of real jobs with known faults: what is named as the cause, and what is not."""

import gzip
import shutil
from pathlib import Path

import pytest

from stepmark.findings.finding import Finding, Severity
from stepmark.job_logs.log_options import LogsOptions
from stepmark.job_logs.log_sources import collect
from stepmark.job_logs.logs import LogReport, read_report
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

DATA = Path(__file__).parents[1] / "data" / "faults"
# Fault: (the rule of the only problem, words of its text).
CAUSES = {
    "all_to_all": ("p2p-mismatch", "rank 1 sent 262144 fp32 to rank 0, which expected 524288"),
    "assert": ("failure-assert", "(rank 1), at /work/job.py:62"),
    "dtype": ("call-mismatch", "2097152 bf16"),
    "duplicate_gpu": ("failure-duplicate-gpu", "(ranks 0-1)"),
    "env_algo": ("failure-no-algorithm", "NCCL_ALGO"),
    "env_ifname": ("failure-no-interface", "NCCL_SOCKET_IFNAME"),
    "group_order": ("failure-deadlock", "Ranks 0-1 wait for each other, a deadlock"),
    "host_only": ("failure-missing-rank", "Rank 1 did not join"),
    "init_missing": ("init-incomplete", "of rank 1 no line shows a start"),
    "killed": ("failure-killed", "Rank 1 (pid 785) was killed (SIGKILL)"),
    "missing": ("failure-missing-rank", "Rank 1 did not join"),
    "missing_quiet": ("failure-missing-rank", "Rank 1 did not join"),
    "missing_warn": ("failure-missing-rank", "in which rank 0 waits 15.07 s (timed out)"),
    "oom": ("failure-gpu-memory", "(rank 1), at /work/job.py:57"),
    "order": ("call-mismatch", "rank 1: broadcast of 1048576 fp32, root 0"),
    "python_error": (
        "failure-python",
        "Rank 1 raised ValueError: shape of the batch is wrong, at /work/job.py:47",
    ),
    "recv": ("init-incomplete", "of rank 1 no line shows a start"),
    "root": ("call-mismatch", "root 1"),
    "segfault": ("failure-segfault", "Rank 1 (pid 929) crashed (SIGSEGV)"),
    "size": ("call-mismatch", "524288 fp32"),
}
# Setting: rules of its warnings. These jobs ended well.
SETTINGS = {
    "env_ib_off": {"forced-setting", "nvls-off"},
    "env_plugin": {"plugin-not-loaded", "nvls-off"},
    "env_socket": {"net-socket", "nvls-off"},
    "healthy": {"nvls-off"},
    "p2p_off": {"shm-instead-of-p2p", "nvls-off"},
}


def diagnosed(fault: str) -> list[Finding]:
    return diagnose(read_log([DATA / fault / "output.txt.gz"]))


def first_problem(report: LogReport) -> Finding:
    return next(one for one in report.findings if one.severity is Severity.PROBLEM)


def test_every_fault_has_a_row() -> None:
    faults = {path.name for path in DATA.iterdir() if path.is_dir()}
    assert faults == CAUSES.keys() | SETTINGS.keys()


@pytest.mark.parametrize("fault", CAUSES)
def test_the_cause_is_the_only_problem(fault: str) -> None:
    rule, words = CAUSES[fault]
    problems = [one for one in diagnosed(fault) if one.severity is Severity.PROBLEM]
    assert [one.rule for one in problems] == [rule]
    assert words in problems[0].text
    assert problems[0].evidence
    assert problems[0].action


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_job_that_ended_well_has_no_problem(setting: str) -> None:
    found = diagnosed(setting)
    assert not [one for one in found if one.severity is Severity.PROBLEM]
    assert {one.rule for one in found if one.severity is Severity.WARNING} == SETTINGS[setting]


@pytest.mark.parametrize("fault", [*CAUSES, *SETTINGS])
def test_the_folder_with_its_dumps_has_the_cause_first_and_an_exit_code(fault: str) -> None:
    folder = str(DATA / fault)
    report = read_report(collect([folder]), LogsOptions(files=(folder,)))
    has_dumps = (DATA / fault / "dump_rank0.pickle.gz").exists()
    assert [source.kind for source in report.sources] == [
        "NCCL log",
        *["flight recorder"] * has_dumps,
    ]
    problems = [one.rule for one in report.findings if one.severity is Severity.PROBLEM]
    assert problems == ([CAUSES[fault][0]] if fault in CAUSES else [])
    # Dumps prove the cause with the log, and are no second problem.
    if has_dumps and problems:
        files = {line.file.rpartition("/")[2] for line in first_problem(report).evidence}
        assert files == {"output.txt.gz", "dump_rank0.pickle.gz", "dump_rank1.pickle.gz"}
    assert report.exit_code == (fault in CAUSES)


def test_a_rank_behind_in_a_job_that_died_is_not_called_a_hang() -> None:
    behind = [one for one in diagnosed("killed")[0].consequences if one.rule == "behind"]
    assert behind
    assert "hangs" not in behind[0].text


CONSEQUENCES = (
    ("python_error", {"behind", "failure-stopped", "failure-teardown"}),
    ("missing", {"late-call", "failure-terminated", "failure-teardown"}),
    ("order", {"failure-wait", "failure-terminated", "failure-teardown"}),
    ("recv", {"behind", "failure-terminated", "failure-teardown"}),
    ("group_order", {"behind", "failure-terminated", "failure-teardown"}),
    ("env_ifname", {"failure-nccl", "failure-stopped", "failure-teardown"}),
)


@pytest.mark.parametrize(("fault", "rules"), CONSEQUENCES)
def test_what_follows_is_listed_under_the_cause(fault: str, rules: set[str]) -> None:
    cause = diagnosed(fault)[0]
    assert {one.rule for one in cause.consequences} == rules
    assert all(one.evidence for one in cause.consequences)


STATUS = (
    "[PG ID 1 PG GUID 7(tp) Rank {0}] Timeout at NCCL work: {1}, last enqueued NCCL work: {1}, "
    "last completed NCCL work: {2}."
)
TIMEOUT = (
    "[rank{0}]:[E1 09:00:1{0}.0 ProcessGroupNCCL.cpp:689] [Rank {0}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut={3}, "
    "Timeout(ms)=15000) ran for 15001 milliseconds before timing out."
)


def test_output_without_a_line_of_nccl_is_not_called_its_log(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("step 1\nRuntimeError: the widget is on fire\n")
    (source,) = read_report(collect([str(path)]), LogsOptions(files=(str(path),))).sources
    assert source.kind == "job output"
    assert source.lines[0].endswith("2 lines of 1 file, none of NCCL or RCCL")


@pytest.mark.parametrize(
    ("second", "rule", "words", "ranks"),
    [
        (
            (6, "ALLREDUCE", 8),
            "failure-not-completed",
            "Rank 0 is behind: it waits 15 s in collective 5",
            (0,),
        ),
        (
            (4, "ALLREDUCE", 8),
            "failure-not-completed",
            "Rank 1 is behind: it waits 15 s in collective 4",
            (1,),
        ),
        ((5, "BROADCAST", 8), "call-mismatch", "rank 1: broadcast of 8 elements", (0, 1)),
        ((5, "ALLREDUCE", 9), "call-mismatch", "rank 1: all_reduce of 9 elements", (0, 1)),
        ((5, "ALLREDUCE", 8), "failure-wait", "The cause is unknown", ()),
    ],
)
def test_time_outs_in_different_calls_name_the_rank_behind(
    tmp_path: Path, second: tuple[int, str, int], rule: str, words: str, ranks: tuple[int, ...]
) -> None:
    lines = []
    for rank, (number, kind, numel) in enumerate([(5, "ALLREDUCE", 8), second]):
        lines.append(TIMEOUT.format(rank, number, kind, numel))
        lines.append(f"[rank{rank}]:[E1 x] " + STATUS.format(rank, number, number - 1))
    path = tmp_path / "out.txt"
    path.write_text("\n".join(lines) + "\n")
    (problem,) = diagnose(read_log([path]))
    assert (problem.rule, problem.ranks) == (rule, ranks)
    assert words in problem.text


def joined_rules(log: str, dumps: str, tmp_path: Path) -> list[Finding]:
    """Return the problems of one job's log with another job's dumps."""
    shutil.copy(DATA / log / "output.txt.gz", tmp_path)
    for dump in (DATA / dumps).glob("dump_rank*"):
        shutil.copy(dump, tmp_path)
    report = read_report(collect([str(tmp_path)]), LogsOptions(files=(str(tmp_path),)))
    return [one for one in report.findings if one.severity is Severity.PROBLEM]


def test_dumps_that_contradict_the_log_say_so(tmp_path: Path) -> None:
    (cause,) = joined_rules("group_order", "missing", tmp_path)
    assert cause.rule == "failure-deadlock"
    assert "Time-outs and dumps contradict each other on rank 1" in cause.text


def test_dumps_name_the_cause_that_a_log_leaves_open(tmp_path: Path) -> None:
    (cause,) = joined_rules("missing_quiet", "order", tmp_path)
    assert cause.rule == "call-mismatch"
    assert "rank 0 waits" in cause.consequences[0].text.lower()
    assert {one.severity for one in cause.consequences} == {Severity.NOTE}


@pytest.mark.parametrize(
    ("fault", "link"),
    [
        ("env_ifname", "NCCL_SOCKET_IFNAME is set to eth77."),
        ("env_algo", "NCCL_ALGO is set to NVLSTree."),
        ("env_algo", "NCCL_NVLS_ENABLE is set to 0."),
        ("env_socket", "NCCL_SHM_DISABLE is set to 1."),
        ("p2p_off", "NCCL_P2P_DISABLE is set to 1."),
        ("oom", "The exception was raised at /work/job.py:57 in <module>."),
        (
            "oom",
            "By torchrun's report this process failed first: Rank 1 (pid 926) ended with exit "
            "code 1.",
        ),
    ],
)
def test_a_chain_leads_to_the_cause(fault: str, link: str) -> None:
    cause = diagnosed(fault)[0]
    links = {one.text: one.evidence for one in cause.chain}
    assert links.get(link)


def test_two_launches_in_one_input_are_said_to_be_two(tmp_path: Path) -> None:
    folders = ("segfault", "size")
    path = tmp_path / "both.txt"
    texts = [gzip.decompress((DATA / name / "output.txt.gz").read_bytes()) for name in folders]
    path.write_bytes(b"".join(texts))
    (several,) = (one for one in diagnose(read_log([path])) if one.rule == "several-jobs")
    assert "may be of different jobs" in several.text
    assert len(several.evidence) == 2


@pytest.mark.parametrize("fault", [*CAUSES, *SETTINGS])
def test_one_launch_is_no_several(fault: str) -> None:
    assert "several-jobs" not in {one.rule for one in diagnosed(fault)}
