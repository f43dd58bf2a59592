"""Jobs of simulated ranks with a known fault, and the dumps that they leave.

All ranks make the calls of one list, each those of its groups. A rank issues its calls in
order, and its device runs them in order, or the calls of each group in order. A collective is
completed once all members run their n-th call of the group; a transfer once both ends run it.
Then one rank is changed, and all run until nothing moves.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from .flight_samples import Entry

KINDS = ("all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "all_to_all")
FAULTS = (
    *("stall", "skip", "extra", "size", "dtype", "kind", "swap", "group"),
    *("no dump", "none"),
)


@dataclass(frozen=True)
class Call:
    """A collective of a group, or a transfer from `pair[0]` to `pair[1]`, both ranks."""

    group: int
    kind: str
    elements: int = 1024
    dtype: str = "Float"
    root: int | None = None
    pair: tuple[int, int] | None = None
    batch: int | None = None  # transfers that are issued as one


@dataclass
class Issued:
    """A call that a rank has issued: its number in the group or channel, and its state."""

    call: Call
    number: int
    state: str = "scheduled"


@dataclass
class Job:
    """Ranks, groups and programs; `wrong` is the rank with the fault."""

    size: int
    groups: list[tuple[int, ...]]
    programs: list[list[Call]]
    fault: str
    wrong: int | None
    depth: int  # calls that a rank may have issued and not completed
    is_serial: bool  # whether a device runs the calls of all groups one after the other
    is_silent: bool  # whether calls that differ are completed
    is_eager: bool  # whether a broadcast needs its root only
    issued: list[list[Issued]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # ranks without a dump
    _sent: set[object] = field(default_factory=set)  # broadcasts that their root has issued

    def run(self) -> None:
        """Issue and complete calls until nothing moves."""
        self.issued = [[] for _ in range(self.size)]
        counts: list[Counter[object]] = [Counter() for _ in range(self.size)]
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                calls = self.issued[rank]
                while len(calls) < len(program):
                    call = program[len(calls)]
                    is_batched = calls and calls[-1].call.batch == call.batch is not None
                    if not is_batched and len(self.open(rank)) >= self.depth:
                        break
                    counts[rank][channel(call)] += 1
                    calls.append(Issued(call, counts[rank][channel(call)]))
                    moved = True
            moved |= self._complete()

    def open(self, rank: int) -> list[Issued]:
        return [one for one in self.issued[rank] if one.state != "completed"]

    def _heads(self, rank: int) -> list[Issued]:
        """Return what the device of a rank runs."""
        heads: list[Issued] = []
        queues = set()
        for one in self.open(rank):
            if self.is_serial:
                if heads and (one.call.batch is None or one.call.batch != heads[0].call.batch):
                    break
            elif channel(one.call) in queues:
                continue
            queues.add(channel(one.call))
            heads.append(one)
        return heads

    def _complete(self) -> bool:
        ends: dict[object, dict[int, Issued]] = defaultdict(dict)
        for rank in range(self.size):
            for one in self._heads(rank):
                one.state = "started"
                ends[channel(one.call), one.number][rank] = one
        completed = [one for by_rank in ends.values() for one in self._completed(by_rank)]
        for one in completed:
            one.state = "completed"
        return bool(completed)

    def _completed(self, by_rank: dict[int, Issued]) -> list[Issued]:
        """Return what is completed of a call, by the ranks that run it."""
        calls = {replace(one.call, batch=None) for one in by_rank.values()}
        if len(calls) > 1 and not self.is_silent:
            return []
        first = next(iter(by_rank.values()))
        root = first.call.root
        if self.is_eager and first.call.kind == "broadcast" and len(calls) == 1:
            sent = (channel(first.call), first.number)
            if root in by_rank:
                self._sent.add(sent)
            return list(by_rank.values()) if sent in self._sent else []
        members = first.call.pair or self.groups[first.call.group]
        return list(by_rank.values()) if set(by_rank) == set(members) else []

    def dumps(self, generator: random.Random, **options: Any) -> dict[int, dict[str, Any]]:
        """Return the dumps of all ranks but the lost ones."""
        return {
            rank: self._dump(rank, **options)
            for rank in range(self.size)
            if rank not in self.lost
        }

    def _dump(
        self, rank: int, buffer: int = 10_000, has_starts: bool = True, is_gloo: bool = False
    ) -> dict[str, Any]:
        entries: list[Entry] = []
        counts: Counter[tuple[int, str]] = Counter()
        for one in self.issued[rank]:
            ranks = self.groups[one.call.group]
            counts[one.call.group, "op"] += 1
            if one.call.pair and is_gloo:
                continue
            kind = "p2p" if one.call.pair else "collective"
            counts[one.call.group, kind] += 1
            entries.append(_entry(one, rank, ranks, counts))
            entry = entries[-1]
            entry["record_id"] = len(entries) - 1
            if not has_starts and one.state == "started":
                entry["state"] = "scheduled"
            if is_gloo:
                entry["profiling_name"] = entry["profiling_name"].replace("nccl", "gloo")
                entry["retired"] = one.state == "completed"
                entry["state"] = "scheduled"
        used = {one.call.group for one in self.issued[rank]}
        config = {
            str(group): {"name": str(group), "desc": _title(group), "ranks": str(list(ranks))}
            for group, ranks in enumerate(self.groups)
            if group in used
        }
        if is_gloo:
            config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        return {
            "version": "2.10",
            "pg_config": config,
            "pg_status": {},
            "entries": entries[-buffer:],
        }


def channel(call: Call) -> object:
    """Return what numbers a call: its group, or the pair within it."""
    return call.group, call.pair


def _title(group: int) -> str:
    return "default_pg" if group == 0 else "undefined"


def _entry(
    one: Issued, rank: int, ranks: tuple[int, ...], counts: Counter[tuple[int, str]]
) -> Entry:
    call = one.call
    name, sent, received = call.kind, call.elements, call.elements
    if call.pair:
        source, target = (ranks.index(end) for end in call.pair)
        is_send = rank == call.pair[0]
        name = f"send {source}->{target}" if is_send else f"recv {target}<-{source}"
        sent, received = (call.elements, 0) if is_send else (0, call.elements)
    elif call.kind == "_all_gather_base":
        received *= len(ranks)
    elif call.kind == "_reduce_scatter_base":
        sent *= len(ranks)
    return {
        "process_group": (str(call.group), _title(call.group)),
        "pg_id": call.group,
        "collective_seq_id": counts[call.group, "collective"],
        "p2p_seq_id": counts[call.group, "p2p"],
        "op_id": counts[call.group, "op"],
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[sent]] if sent else [],
        "input_dtypes": [call.dtype] if sent else [],
        "output_sizes": [[received]] if received else [],
        "output_dtypes": [call.dtype] if received else [],
        "state": one.state,
        "is_p2p": call.pair is not None,
        "time_created_ns": 10**18 + len(counts),
    }


def random_job(generator: random.Random, fault: str) -> Job:
    """Return a job that has not run: 4 to 8 ranks, up to five groups, one fault."""
    size = generator.randint(4, 8)
    groups = [tuple(range(size))]
    for _ in range(generator.randint(1, 4)):
        count = generator.choice((2, 2, generator.randint(2, size)))
        groups.append(tuple(sorted(generator.sample(range(size), count))))
    calls = list(_random_calls(generator, size, groups))
    programs = [
        [call for call in calls if takes_part(call, rank, groups)] for rank in range(size)
    ]
    job = Job(
        size=size,
        groups=groups,
        programs=programs,
        fault=fault,
        wrong=None,
        depth=generator.choice((1, 1, 3, 8)),
        is_serial=generator.random() < 0.7,
        is_silent=generator.random() < 0.5,
        is_eager=generator.random() < 0.5,
    )
    if fault != "none":
        job.wrong = generator.randrange(size)
        _inject(generator, job, job.wrong)
    return job


def takes_part(call: Call, rank: int, groups: list[tuple[int, ...]]) -> bool:
    return rank in (call.pair or groups[call.group])


def _random_calls(
    generator: random.Random, size: int, groups: list[tuple[int, ...]]
) -> list[Call]:
    """Return what one iteration does, several times: most jobs repeat their calls."""
    period: list[Call] = []
    for place in range(generator.randint(3, 9)):
        elements = generator.choice((256, 1024, 4096))
        if generator.random() < 0.25:
            source, target = generator.sample(range(size), 2)
            batch = place if generator.random() < 0.5 else None
            period.append(Call(0, "transfer", elements, pair=(source, target), batch=batch))
            if batch is not None:
                period.append(Call(0, "transfer", elements, pair=(target, source), batch=batch))
        else:
            group = generator.randrange(len(groups))
            kind = generator.choice(KINDS)
            root = generator.choice(groups[group]) if kind == "broadcast" else None
            period.append(Call(group, kind, elements, root=root))
    return period * generator.randint(1, 3)


def _inject(generator: random.Random, job: Job, rank: int) -> None:
    """Change the program of one rank; a fault that the program cannot have becomes a stall."""
    program = job.programs[rank]
    if not program:
        job.fault = "none"
        return
    place = generator.randrange(len(program))
    call = program[place]
    others = [
        group for group, ranks in enumerate(job.groups) if rank in ranks and group != call.group
    ]
    if job.fault == "size":
        program[place] = replace(call, elements=call.elements * 2)
    elif job.fault == "dtype":
        program[place] = replace(call, dtype="BFloat16")
    elif job.fault == "skip":
        del program[place]
    elif job.fault == "extra":
        program.insert(place, call)
    elif job.fault == "kind" and not call.pair:
        program[place] = replace(
            call,
            kind=generator.choice([kind for kind in KINDS if kind != call.kind]),
            root=None,
        )
    elif job.fault == "swap" and place + 1 < len(program):
        program[place : place + 2] = program[place + 1], call
    elif job.fault == "group" and others and not call.pair:
        program[place] = replace(call, group=generator.choice(others))
    else:
        job.fault = "no dump" if job.fault == "no dump" else "stall"
        del program[place:]
    if job.fault == "no dump":
        job.lost.add(rank)
