"""Between workloads, which have a program per stage, and formats with a file per rank."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import format_bytes
from stepmark.step.fold_items import fold
from stepmark.step.workload import (
    Block,
    CommOp,
    Group,
    Operation,
    Run,
    Stage,
    Workload,
    parse_after,
)

WORLD = "world"  # group of all ranks


class Instances:
    """The communicators of a workload, numbered from `first`; a group of one has none.

    Two ranks that send each other messages in a larger group have one of their own, after those
    of the groups.
    """

    def __init__(self, workload: Workload, first: int = 0) -> None:
        self._groups = {
            name: group for name, group in workload.groups.items() if group.size > 1
        }
        world = workload.world_size
        keys = (
            (name, rank)
            for name, group in self._groups.items()
            for rank in range(world - max(group.members(0)))
            if group.first(rank) == rank
        )
        self._numbers = {key: number for number, key in enumerate(keys, first)}
        pairs = sorted(set(self._find_pairs(workload)))
        self._pairs = {
            pair: number for number, pair in enumerate(pairs, first + len(self._numbers))
        }

    def of_pair(self, group: str, source: int, target: int) -> int:
        """Return the number of the communicator of two ranks of a group, one of which sends."""
        if source == target:
            raise ConfigError("peer", f"rank {source} of itself", "another rank")
        if self._groups[group].size == 2:
            return self.number(group, source)
        return self._pairs[group, min(source, target), max(source, target)]

    def number(self, group: str, rank: int) -> int:
        """Return the number of the rank's communicator. Raise ConfigError if it has none."""
        key = group, self._groups[group].first(rank)
        if key not in self._numbers:
            raise ConfigError(f"group {group}", f"rank {rank}", "ranks that all are members")
        return self._numbers[key]

    def members(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Yield number, group and ranks of each communicator."""
        for (name, rank), number in self._numbers.items():
            yield number, name, self._groups[name].members(rank)
        for (name, *pair), number in self._pairs.items():
            yield number, name, tuple(pair)

    def _find_pairs(self, workload: Workload) -> Iterator[tuple[str, int, int]]:
        """Yield group and ranks of each message in a group of more than two."""
        per_stage = workload.world_size // max(1, len(workload.stages))
        for stage in range(len(workload.stages)):
            ops = (op for op in workload.tally(stage) if isinstance(op, CommOp))
            distances = {(op.group, op.peer) for op in ops if op.peer is not None}
            for name, peer in distances:
                if workload.groups[name].size < 3:
                    continue
                for rank in range(stage * per_stage, (stage + 1) * per_stage):
                    ranks = workload.groups[name].members(rank)
                    other = ranks[(ranks.index(rank) + peer) % len(ranks)]
                    if other != rank:
                        yield name, min(rank, other), max(rank, other)


def names_of(
    groups: Mapping[str, Group], ranks: Mapping[str, Sequence[int]], world_size: int, first: int
) -> dict[str, str]:
    """Return the group of each communicator, by its number in files of ours.

    Return nothing if `ranks`, by number, are not those of the groups.
    """
    workload = Workload(name="", rules="", world_size=world_size, groups=groups)
    names: dict[str, str] = {}
    for number, name, members in Instances(workload, first).members():
        if tuple(ranks.get(str(number), ())) != members:
            return {}
        names[str(number)] = name
    return names


class Issued:
    """Operations that were issued, by which entries of `after` are resolved."""

    def __init__(self, workload: Workload) -> None:
        depths: dict[str, int] = {}
        for block in workload.blocks.values():
            for item in block:
                for text in () if isinstance(item, Run) else item.after:
                    name, back = parse_after(text)
                    depths[name] = max(depths.get(name, 0), back + 1)
        self._newest: dict[str, deque[int]] = {
            name: deque(maxlen=depth) for name, depth in depths.items()
        }

    def note(self, name: str, number: int) -> None:
        """Record an issued operation."""
        if name in self._newest:
            self._newest[name].append(number)

    def find(self, after: Iterable[str]) -> list[int]:
        """Return the numbers of these operations, without those that were not issued yet."""
        numbers = []
        for text in after:
            name, back = parse_after(text)
            if len(self._newest[name]) > back:
                numbers.append(self._newest[name][-1 - back])
        return numbers


def first_rank(workload: Workload, stage: int) -> int:
    """Return the first rank of a stage."""
    return stage * workload.world_size // len(workload.stages)


def check_rank(workload: Workload, rank: int, collectives: Collection[str]) -> None:
    """Raise ConfigError for an unknown rank, or a collective that is not one of these."""
    if not 0 <= rank < workload.world_size:
        raise ConfigError("rank", rank, f"from 0 to {workload.world_size - 1}")
    for block in workload.blocks.values():
        for item in block:
            if isinstance(item, CommOp) and item.collective not in collectives:
                allowed = f"one of {', '.join(collectives)}"
                raise ConfigError("collective", item.collective, allowed)


def transfer(op: CommOp, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Return source and destination of a rank's send or receive in a group of these ranks."""
    assert op.peer is not None
    peer = ranks[(ranks.index(rank) + op.peer) % len(ranks)]
    return (rank, peer) if op.collective == SEND else (peer, rank)


def group_of(ranks: Sequence[int], where: str) -> Group:
    """Return the group with these members. Raise ConfigError if they form no regular grid."""
    ordered = sorted(set(ranks))
    digits: list[tuple[int, int]] = []
    size = 1
    while size < len(ordered):
        stride = ordered[size] - ordered[0]
        times = 1
        while times * size < len(ordered) and (
            ordered[times * size] == ordered[0] + times * stride
        ):
            times += 1
        digits.append((times, stride))
        size *= times
    group = Group(digits=tuple(digits) or ((1, 1),))
    if group.members(ordered[0]) != tuple(ordered) or len(ordered) != len(ranks):
        text = ",".join(map(str, ranks[:12]))
        raise ConfigError(where, text, "different ranks that form a regular grid")
    return group


def name_of(group: Group, world_size: int) -> str:
    """Return a group's name, e.g. "4 ranks, stride 2"."""
    if group.size == world_size:
        return WORLD
    strides = "x".join(str(stride) for _, stride in group.digits)
    sizes = "x".join(str(size) for size, _ in group.digits)
    return f"{sizes} ranks, stride {strides}"


def stages_of(
    programs: Sequence[Sequence[Operation]],
    starts: Sequence[Sequence[float | None]] | None = None,
) -> tuple[tuple[Stage, ...], dict[str, Block]]:
    """Return stages of equal size and their blocks; ranks of a stage have equal programs.

    starts: of each operation of each rank, seconds; a stage has those of its first rank.
    """
    world = len(programs)
    changes = [rank for rank in range(1, world) if programs[rank] != programs[rank - 1]]
    size = math.gcd(world, *changes)
    stages: list[Stage] = []
    blocks: dict[str, Block] = {}
    for index, rank in enumerate(range(0, world, size)):
        name = f"step {index}"
        program = programs[rank]
        if starts is not None:
            pairs = zip(program, starts[rank], strict=True)
            program = [replace(op, start_s=start_s) for op, start_s in pairs]
        blocks |= fold(program, name)
        layers = tuple(sorted({op.layer for op in program if op.layer is not None}))
        stages.append(Stage(step=name, layers=layers))
    return tuple(stages), blocks


def checked(workload: Workload) -> Workload:
    """Return a workload that was read, with a note where ranks disagree. Raise ConfigError."""
    workload.check()
    return replace(workload, notes=workload.notes + disagreements(workload))


_Call = tuple[str, int | None, int]  # collective, distance of the peer, bytes


def disagreements(workload: Workload) -> tuple[str, ...]:
    """Return a note on the first message that members of a group do not issue alike.

    Collectives must be those of the other members, and what is sent must be received. Looked at
    are the groups of each stage's first rank, in the step: a layout is regular.
    """
    num_stages = len(workload.stages)
    world = workload.world_size
    per_stage = world // num_stages
    calls = [_calls(workload, number) for number in range(num_stages)]
    for number, by_group in enumerate(calls):
        for name, by_call in by_group.items():
            group = workload.groups[name]
            rank = number * per_stage
            members = range(world) if group.size == world else group.members(rank)
            stages = {member // per_stage for member in members}
            for (collective, peer, num_bytes), times in by_call.items():
                answer = collective
                back = peer
                others = stages
                if peer is not None:
                    answer = RECV if collective == SEND else SEND
                    back = -peer % group.size
                    others = {members[(members.index(rank) + peer) % group.size] // per_stage}
                for other in others:
                    answers = calls[other].get(name, Counter())[answer, back, num_bytes]
                    if answers != times:
                        return (
                            f"Ranks disagree: {times} times {collective} of "
                            f"{format_bytes(num_bytes)} on rank {rank} of group {name}, but "
                            f"{answers} times {answer} on rank {other * per_stage}.",
                        )
    return ()


def _calls(workload: Workload, stage: int) -> dict[str, Counter[_Call]]:
    """Return the messages of a rank's step by group."""
    calls: dict[str, Counter[_Call]] = defaultdict(Counter)
    for op, times in workload.tally(stage).items():
        if isinstance(op, CommOp):
            group = workload.groups[op.group]
            peer = None if op.peer is None else op.peer % group.size
            calls[op.group][op.collective, peer, op.message_bytes(group)] += times
    return calls
