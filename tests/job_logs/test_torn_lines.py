"""Torn, interleaved, fused lines: quarantined and counted, never another process or pair."""

import gzip
import random
from pathlib import Path

import pytest

from stepmark.findings.finding import Severity
from stepmark.findings.log_facts import LogFacts
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

HEALTHY = Path(__file__).parents[1] / "data" / "faults" / "healthy" / "output.txt.gz"


def read(folder: Path, lines: list[str]) -> LogFacts:
    path = folder / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return read_log([path])


def healthy() -> list[str]:
    return gzip.decompress(HEALTHY.read_bytes()).decode().split("\n")


@pytest.mark.parametrize("seed", range(12))
def test_torn_lines_make_no_process_and_no_pair(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = healthy()
    truth = read(tmp_path, lines)
    places = [i for i, line in enumerate(lines) if " NCCL INFO " in line]
    for i in draw.sample(places, 12):
        line = lines[i]
        way = draw.choice(("front", "inside", "end"))
        if way == "front":  # the host loses its beginning: "vm:" becomes "m:"
            lines[i] = line[1:]
        elif way == "inside":  # the line begins inside another one
            lines[i] = draw.choice(("4", "0x7f", "Channel-")) + line
        else:
            lines[i] = line[: draw.randrange(30, len(line))]
    facts = read(tmp_path, lines)
    assert facts.processes == truth.processes
    assert facts.hosts == truth.hosts
    kinds = {way.kind for way in facts.transports}
    assert kinds == {way.kind for way in truth.transports}
    for kind in kinds:
        assert len([way for way in facts.transports if way.kind == kind]) <= 2 * (2 - 1)
    problems = [one for one in diagnose(facts) if one.severity is Severity.PROBLEM]
    assert not problems, problems[0].text


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    lines = healthy()
    calls = [i for i, line in enumerate(lines) if " opCount " in line and line[3:6] == "647"]
    for i in calls[4:7]:
        lines[i] = "77" + lines[i]
    facts = read(tmp_path, lines)
    assert facts.torn_lines == 3
    truth = read(tmp_path, healthy())
    totals = [sum(tally.calls for tally in each.messages.values()) for each in (truth, facts)]
    assert totals[0] - totals[1] == 3
    (finding,) = [one for one in diagnose(facts) if one.rule == "torn-lines"]
    assert finding.text.startswith("3 lines were left out")
    assert [line.line for line in finding.evidence] == [calls[4] + 1]


def test_both_messages_of_one_line_are_read(tmp_path: Path) -> None:
    """A line without its end runs on into the next, also where its call is known."""
    call = (
        "h:7:7 [0] NCCL INFO AllReduce: opCount {} sendbuff 0x1 recvbuff 0x2 count 8 "
        "datatype 7 op 0 root 0 comm 0xa [nranks=2] stream 0x5"
    )
    calls = [call.format(number) for number in range(4)]
    choice = "h:7:7 [0] NCCL INFO AllReduce: 32 Bytes -> Algo 1 proto 2 time 33.5"
    for lines in ([*calls, choice], [*calls[:3], f"{calls[3]} {choice}"]):
        facts = read(tmp_path, lines)
        assert [tally.calls for tally in facts.messages.values()] == [4]
        assert [one.calls for one in facts.choices] == [1]


def test_a_log_cut_at_its_start_keeps_its_processes(tmp_path: Path) -> None:
    lines = [line for line in healthy() if " opCount " in line]
    facts = read(tmp_path, lines)
    assert len(facts.processes) == 2
    assert not facts.torn_lines


def test_hosts_with_like_names_are_kept(tmp_path: Path) -> None:
    start = "NCCL INFO Using network IB"
    lines = [f"{host}:5:5 [0] {start}" for host in ("n1", "an1") for _ in range(9)]
    assert read(tmp_path, lines).hosts == ("n1", "an1")


def channel(rank: int, side: str, way: str) -> str:
    return (
        f"h:{rank + 1}:{rank + 1} [{rank}] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [{side}] "
        f"via {way}"
    )


def test_gpudirect_is_a_property_of_a_connection(tmp_path: Path) -> None:
    """One pair of ranks is one connection, whichever side stages its data."""
    init = [
        f"h{r}:{r + 1}:{r + 1} [{r}] NCCL INFO ncclCommInitRank comm 0xa{r} rank {r} nranks 2 "
        "cudaDev 0 busId 1 commId 0x77 - Init COMPLETE"
        for r in (0, 1)
    ]
    both = ["NET/IB/0/GDRDMA", "NET/IB/0/GDRDMA"]
    for ways, is_direct in ((both, True), (["NET/IB/0", both[0]], False)):
        lines = [
            *init,
            channel(0, "send", ways[0]).replace("h:", "h0:"),
            channel(1, "receive", ways[1]).replace("h:", "h1:"),
        ]
        (way,) = read(tmp_path, lines).transports
        assert (way.gdrdma, way.channels) == (is_direct, 1)
