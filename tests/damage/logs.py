"""Logs of NCCL of healthy and sick jobs, and what is read from them."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.damage.mutators import (
    HARMLESS,
    Effect,
    Inputs,
    Lines,
    Mutator,
    Output,
    encoded,
    joined_lines,
    line_within_line,
    of_a_line,
    verdict,
)

from stepmark.findings.finding import Severity
from stepmark.ground.errors import ConfigError
from stepmark.job_logs.nccl_log import read_log
from stepmark.job_logs.nccl_log.diagnosis import diagnose

CALLS = {
    "AllReduce": ("all_reduce", 1),
    "AllGather": ("all_gather", 1),
    "ReduceScatter": ("reduce_scatter", 1),
    "Broadcast": ("broadcast", 1),
}
DTYPES = {7: ("fp32", 4), 9: ("bf16", 2), 6: ("fp16", 2)}
Fact = tuple[object, ...]
Call = tuple[str, int, int]  # name, count, type


@dataclass(slots=True)
class Rank:
    """One process of the job, and the lines that it writes."""

    number: int
    host: str
    pid: int
    device: int
    lines: list[str] = field(default_factory=list)

    def info(self, message: str) -> None:
        prefix = f"{self.host}:{self.pid}:{self.pid} [{self.device}]"
        self.lines.append(f"{prefix} NCCL INFO {message}")


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator: ranks of the job in order, and the sequence of its calls."""

    number: int
    key: str
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]


def job(random: Random) -> tuple[list[Rank], list[Group], int]:
    """Return ranks that have started, their groups and the GPUs of a node."""
    num_nodes, per_node = random.choice(((1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (3, 1)))
    host = random.choice(("node", "gpu-a3-", "ip-10-0-0-"))
    ranks = [
        Rank(n, f"{host}{n // per_node}", pid, n % per_node)
        for n, pid in enumerate(random.sample(range(1000, 99999), num_nodes * per_node))
    ]
    everyone = tuple(range(len(ranks)))
    members = [everyone]
    if random.random() < 0.5 and len(ranks) > 3:
        members += [everyone[first::2] for first in (0, 1)]
    groups = [
        Group(
            number,
            f"{random.getrandbits(63):#x}",
            ranks_of_group,
            tuple(
                (
                    random.choice(list(CALLS)),
                    random.choice((1, 3, 64)) << random.randrange(20),
                    random.choice(list(DTYPES)),
                )
                for _ in range(random.randint(2, 30))
            ),
        )
        for number, ranks_of_group in enumerate(members)
    ]
    for rank in ranks:
        rank.info("cudaDriverVersion 12080")
        rank.info("NCCL version 2.26.2+cuda12.8")
        rank.info("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>")
        rank.info("Using network IB")
    for group in groups:
        _start(ranks, group)
    return ranks, groups, per_node


def pointer(group: Group, rank: Rank) -> str:
    return f"{0x55000000 + rank.pid * 4096 + group.number:#x}"


def _start(ranks: list[Rank], group: Group) -> None:
    hosts = [ranks[number].host for number in group.ranks]
    for place, number in enumerate(group.ranks):
        rank = ranks[number]
        at = pointer(group, rank)
        size = len(group.ranks)
        start = (
            f"ncclCommInitRankConfig comm {at} rank {place} nranks {size} "
            f"cudaDev {rank.device} nvmlDev {rank.device} busId {rank.device + 1}8000 "
            f"commId {group.key} - Init"
        )
        rank.info(f"{start} START")
        rank.info(
            f"comm {at} rank {place} nRanks {size} nNodes {len(set(hosts))} localRanks "
            f"{hosts.count(rank.host)} localRank {hosts[:place].count(rank.host)} MNNVL 0"
        )
        target = (place + 1) % size
        to = ranks[group.ranks[target]]
        for channel in range(2):
            via = f"[send] via NET/IB/{rank.device}/GDRDMA"
            if to.host == rank.host:
                via = "via P2P/CUMEM"
            pair = f"{place}[{rank.device}] -> {target}[{to.device}]"
            rank.info(f"Channel {channel:02}/0 : {pair} {via}")
        rank.info(f"{start} COMPLETE")


def issue(
    rank: Rank, group: Group, place: int, call: tuple[str, int, int], counts: bool
) -> None:
    """Write the line of one call."""
    name, count, dtype = call
    rank.info(
        f"{name}: opCount {place if counts else 0:x} sendbuff 0x7f{rank.pid:08x} recvbuff "
        f"0x7e{rank.pid:08x} count {count} datatype {dtype} op 0 root 0 comm "
        f"{pointer(group, rank)} [nranks={len(group.ranks)}] stream 0x5{rank.pid:06x}"
    )


def woven(ranks: list[Rank], random: Random) -> list[str]:
    """Return the lines of all ranks as one shared output has them."""
    waiting = [iter(rank.lines) for rank in ranks]
    lines: list[str] = []
    while waiting:
        source: Iterator[str] = random.choice(waiting)
        burst = [line for _, line in zip(range(random.randint(1, 9)), source, strict=False)]
        lines += burst
        if not burst:
            waiting.remove(source)
    return lines


def output(random: Random) -> Output:
    """Return a healthy job."""
    ranks, groups, _ = job(random)
    counts = random.random() < 0.5
    values = Counter[Fact]()
    for rank in ranks:
        mine = [group for group in groups if rank.number in group.ranks]
        for place in range(max(len(group.calls) for group in mine)):
            for group in mine:
                if place < len(group.calls):
                    issue(rank, group, place, group.calls[place], counts=counts)
    for group in groups:
        size = len(group.ranks)
        hosts = [ranks[number].host for number in group.ranks]
        values["group", size, len(set(hosts)), group.key] += 1
        for place, host in enumerate(hosts):
            target = (place + 1) % size
            kind = "P2P/CUMEM" if host == hosts[target] else "NET/IB"
            values["transport", group.key, kind, place, target, kind == "NET/IB"] = 1
        for name, count, dtype in group.calls:
            collective, _ = CALLS[name]
            word, itemsize = DTYPES[dtype]
            values["call", collective, word, size, group.key, count * itemsize] += size
    values["processes"] = len(ranks)
    values["hosts"] = len({rank.host for rank in ranks})
    return Output(lines=woven(ranks, random), values=values)


def reading(path: Path) -> tuple[Counter[Fact], list[str]]:
    """Return (values, all that says that something is wrong) of a file."""
    try:
        facts = read_log([path])
    except ConfigError as error:
        return Counter(), [str(error)]
    values = Counter[Fact]()
    for group in facts.communicators:
        values["group", group.num_ranks, group.num_nodes, group.key] += 1
    for link in facts.transports:
        key = (link.communicator, link.kind, link.source, link.target, link.gdrdma)
        values["transport", *key] += 1  # channels cannot be told: no line states their number
    for kind, tally in facts.messages.items():
        key = (kind.collective, kind.dtype, kind.num_ranks, kind.group, kind.call_bytes)
        values["call", *key] += tally.calls
    values["processes"] = len(facts.processes)
    values["hosts"] = len(facts.hosts)
    findings = diagnose(facts)
    signs = [one.rule for one in findings if one.severity is not Severity.NOTE]
    signs += ["unread"] * (facts.unread_calls > 0)
    signs += ["ranks unknown"] * any(kind.num_ranks is None for kind in facts.messages)
    return values, signs


SICK = ("order", "size", "python", "killed")


def sick_output(random: Random) -> Output:
    """Return a job in which one rank is at fault; its values are (rule, rank)."""
    ranks, groups, _ = job(random)
    everyone = groups[0]
    while len(ranks) < 3:  # of two ranks that differ neither is the odd one
        ranks, groups, _ = job(random)
        everyone = groups[0]
    fault, wrong = random.choice(SICK), random.randrange(len(ranks))
    at = random.randrange(len(everyone.calls))
    for rank in ranks:
        last = at if rank.number == wrong and fault in ("python", "killed") else at + 1
        for place, call in enumerate(everyone.calls[:last]):
            is_odd = rank.number == wrong and place == at
            name, count, dtype = call
            if is_odd and fault == "order":
                name = "AllGather" if name != "AllGather" else "ReduceScatter"
            if is_odd and fault == "size":
                count *= 2
            issue(rank, everyone, place, (name, count, dtype), counts=True)
    lines = woven(ranks, random)
    if fault == "python":
        lines += [
            f"[rank{wrong}]: {text}"
            for text in (
                "Traceback (most recent call last):",
                '  File "/work/train.py", line 62, in <module>',
                "    main()",
                "ValueError: shape of the batch is wrong",
            )
        ]
    if fault == "killed":
        lines += [
            "E1102 10:15:00.000000 140 torch/distributed/elastic/multiprocessing/api.py:984] "
            f"failed (exitcode: -9) local_rank: {ranks[wrong].device} "
            f"(pid: {ranks[wrong].pid}) of binary: /usr/bin/python3",
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026-11-02_10:15:00",
            f"  host      : {ranks[wrong].host}",
            f"  rank      : {wrong} (local_rank: {ranks[wrong].device})",
            f"  exitcode  : -9 (pid: {ranks[wrong].pid})",
            f"  traceback : Signal 9 (SIGKILL) received by PID {ranks[wrong].pid}",
        ]
    rule = {"python": "failure-python", "killed": "failure-killed"}.get(fault, "call-mismatch")
    return Output(lines=lines, values=Counter({(rule, wrong): 1}))


def sick_reading(path: Path) -> tuple[Counter[Fact], list[str]]:
    """Return the problems, and all else that says that something is wrong."""
    try:
        findings = diagnose(read_log([path]))
    except ConfigError as error:
        return Counter(), [str(error)]
    values = Counter[Fact]()
    for one in findings:
        if one.severity is Severity.PROBLEM:
            # The odd one of a call that differs; both where two ranks are compared.
            named = map(int, re.findall(r"[Rr]ank (\d+)", one.text)[:1])
            values[(one.rule, *(one.ranks or named))] += 1
    return values, [one.rule for one in findings if one.severity is Severity.WARNING]


def _call(lines: Lines, random: Random) -> int:
    return random.choice([at for at, line in enumerate(lines) if ": opCount " in line])


def _cut_anywhere(lines: Lines, random: Random) -> bytes:
    data = encoded(lines)
    return data[: random.randrange(len(data) // 4, len(data))]


def _cut_at_start(lines: Lines, random: Random) -> bytes:
    data = encoded(lines)
    return data[random.randrange(len(data) // 2) :]


def _two_jobs(lines: Lines, random: Random) -> bytes:
    return encoded([*lines, *output(random).lines])


def _swapped(lines: Lines, random: Random) -> bytes:
    """Swap two calls of one rank: its lines went through a buffer that does not keep order."""
    at = _call(lines, random)
    writer = lines[at].split(" ", 1)[0]
    places = [
        n for n, line in enumerate(lines) if line.startswith(writer) and "opCount" in line
    ]
    other = random.choice([n for n in places if n != at] or [at])
    swapped = list(lines)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    return encoded(swapped)


def _other_digit(lines: Lines, random: Random) -> bytes:
    at = _call(lines, random)
    head, _, rest = lines[at].partition(" count ")
    digit = random.choice([d for d in "123456789" if d != rest[0]])
    return encoded([*lines[:at], f"{head} count {digit}{rest[1:]}", *lines[at + 1 :]])


_CALL = re.compile(
    rf"\b({'|'.join(CALLS)}): opCount \w+ sendbuff \w+ recvbuff \w+ count (\d+) "
    r"datatype (\d) op 0 root 0 comm \w+ \[nranks=(\d+)\] stream 0x5\w{6}",
)


def calls_in(lines: Lines) -> Counter[Fact]:
    """Return the calls of whole lines, without their groups."""
    calls = Counter[Fact]()
    for line in lines:
        for match in _CALL.finditer(line):
            word, itemsize = DTYPES[int(match[3])]
            num_bytes = int(match[2]) * itemsize
            calls["call", CALLS[match[1]][0], word, int(match[4]), num_bytes] += 1
    return calls


def _without_groups(values: Counter[Fact]) -> Counter[Fact]:
    calls = Counter[Fact]()
    for key, number in values.items():
        if key[0] == "call":
            calls[*key[:4], key[5]] += number
    return calls


_CUT = (
    Mutator("cut anywhere", Effect.DETECTABLE, _cut_anywhere),
    Mutator("cut at start", Effect.DETECTABLE, _cut_at_start),
)
_TWO_JOBS = Mutator("two jobs", Effect.DETECTABLE, _two_jobs)
_OF_A_CALL = of_a_line("call", _call)
# Of a sick job a call that stands twice is another fault.
_LOST = tuple(mutator for mutator in _OF_A_CALL if mutator.name != "call twice")


def _within_call(lines: Lines, random: Random) -> bytes:
    """Tear two lines of which the first is a call."""
    at = random.choice([n for n, line in enumerate(lines[:-1]) if ": opCount " in line])
    torn = line_within_line(lines[at : at + 2], random).decode().splitlines()
    return encoded([*lines[:at], *torn, *lines[at + 2 :]])


_TORN = (
    Mutator("lines joined", Effect.DETECTABLE, joined_lines),
    Mutator("line in call", Effect.DETECTABLE, _within_call),
    # A line of one link may lose its process: its text names no communicator.
    Mutator("line in line", Effect.UNDETECTABLE, line_within_line),
)
_ON_LINUX = tuple(mutator for mutator in HARMLESS if mutator.name != "utf-16")


class Logs(Inputs):
    """Logs of healthy jobs. Of cut logs and of two jobs the calls that are there are right."""

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        return (
            *_ON_LINUX,
            *_CUT,
            *_OF_A_CALL,
            *_TORN,
            _TWO_JOBS,
            Mutator("calls swapped", Effect.DETECTABLE, _swapped),
            Mutator("other digit", Effect.DETECTABLE, _other_digit),
        )

    def output(self, random: Random) -> Output:
        return output(random)

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        return reading(path)

    def verdict(self, output: Output, mutator: Mutator, path: Path) -> str:
        if mutator not in (*_CUT, _TWO_JOBS):
            return super().verdict(output, mutator, path)
        values, signs = reading(path)
        left = calls_in(path.read_text().splitlines())
        return verdict(_without_groups(values) == left, signs)


class SickLogs(Inputs):
    """Logs of jobs with a rank at fault. Damage may hide the fault; no other rank is named."""

    @property
    def mutators(self) -> tuple[Mutator, ...]:
        return (*_ON_LINUX, *_CUT, *_LOST, *_TORN)

    def output(self, random: Random) -> Output:
        return sick_output(random)

    def reading(self, path: Path) -> tuple[Counter[Fact], list[str]]:
        return sick_reading(path)

    def verdict(self, output: Output, mutator: Mutator, path: Path) -> str:
        problems, _ = sick_reading(path)
        ((rule, wrong),) = output.values
        if all(one[0] == rule and wrong in one[1:3] for one in problems):
            return "right" if problems else "missed"
        return "wrong"
