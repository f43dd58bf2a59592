"""Lines of calls that a log lost: said, and never taken for ranks that disagree."""

import gzip
import random
import re
from pathlib import Path

import pytest

from stepmark.findings.finding import Finding, Severity
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

FAULTS = Path(__file__).parents[1] / "data" / "faults"


def log_lines(fault: str) -> list[str]:
    return gzip.decompress((FAULTS / fault / "output.txt.gz").read_bytes()).decode().split("\n")


def counted(lines: list[str]) -> list[str]:
    """Return the lines with an opCount that counts, as most versions of NCCL have it."""
    counts = [0, 0]

    def one(line: str) -> str:
        rank = 0 if "[0] NCCL INFO" in line else 1
        counts[rank] += " opCount " in line
        return re.sub(r"opCount [0-9a-f]+", f"opCount {counts[rank] - 1:x}", line)

    return [one(line) for line in lines]


def findings(folder: Path, lines: list[str]) -> dict[str, Finding]:
    path = folder / "log.txt"
    path.write_text("\n".join(lines))
    return {finding.rule: finding for finding in diagnose(read_log([path]))}


@pytest.mark.parametrize("seed", range(20))
def test_lost_calls_are_no_disagreement(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = log_lines("healthy")
    calls = [i for i, line in enumerate(lines) if " opCount " in line]
    # Losses of both ranks at one place, or of the last calls, look like ranks that disagree.
    ranks = [[i for i in calls if f"[{rank}] NCCL" in lines[i]] for rank in (0, 1)]
    places = range(0, len(ranks[0]) - 8, 8)
    lost = {draw.choice(ranks)[start + draw.randrange(3)] for start in places}
    assert len(lost) > 4
    kept = [line for i, line in enumerate(lines) if i not in lost]
    by_rule = findings(tmp_path, kept)
    assert not [one for one in by_rule.values() if one.severity is Severity.PROBLEM]
    assert {"lost-lines", "behind"} & set(by_rule), "a loss inside or at the end is told"


def test_one_lost_call_is_counted(tmp_path: Path) -> None:
    lines = log_lines("healthy")
    calls = [i for i, line in enumerate(lines) if "[0] NCCL INFO AllGather: opCount" in line]
    del lines[calls[5]]
    finding = findings(tmp_path, lines)["lost-lines"]
    assert "rank 0 lacks at least 1 call" in finding.text


@pytest.mark.parametrize("extra", [1, 3])
def test_a_rank_that_issues_more_calls_disagrees(tmp_path: Path, extra: int) -> None:
    """Later calls agree again; opCount, then different by rank, tells that none was lost."""
    lines = counted(log_lines("healthy"))
    calls = [i for i, line in enumerate(lines) if "[1] NCCL INFO AllGather: opCount" in line]
    at = calls[5]

    def later(line: str) -> str:
        if "[1] NCCL INFO" not in line:
            return line
        return re.sub(
            r"opCount ([0-9a-f]+)", lambda m: f"opCount {int(m[1], 16) + extra:x}", line
        )

    lines[at:] = [*[lines[at]] * extra, *map(later, lines[at:])]
    assert findings(tmp_path, lines)["call-mismatch"].severity is Severity.PROBLEM


def test_a_real_disagreement_stays_one(tmp_path: Path) -> None:
    for fault in ("order", "size", "dtype", "root"):
        assert (
            findings(tmp_path, log_lines(fault))["call-mismatch"].severity is Severity.PROBLEM
        )


SHAPES = ("AAAABBBBCCCC", "AAAAAAAAAAAA", "ABABABABCCAB")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lost", [{0: 3}, {0: 1, 1: 6}, {1: 2}, {0: 9, 1: 4}])
def test_calls_lost_among_equal_ones_are_lost_by_opcount(
    tmp_path: Path, shape: str, lost: dict[int, int]
) -> None:
    lines = []
    for rank in (0, 1):
        start = f"h:{rank + 1}:{rank + 1} [{rank}] NCCL INFO"
        lines.append(
            f"{start} ncclCommInitRank comm 0xa{rank} rank {rank} nranks 2 cudaDev {rank} "
            "busId 1000 commId 0xabc - Init COMPLETE"
        )
        lines += [
            f"{start} AllReduce: opCount {place:x} sendbuff 0x1 recvbuff 0x2 "
            f"count {ord(kind)} datatype 7 op 0 root 0 comm 0xa{rank} [nranks=2] stream 0x1"
            for place, kind in enumerate(shape)
            if place != lost.get(rank)
        ]
    by_rule = findings(tmp_path, lines)
    assert not {"call-mismatch", "behind"} & set(by_rule)
    if len(lost) == 1:
        assert f"rank {next(iter(lost))} lacks at least 1 call" in by_rule["lost-lines"].text
