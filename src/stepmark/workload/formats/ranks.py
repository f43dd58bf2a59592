"""Between a workload, which has a program per stage, and formats that have a file per rank."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from stepmark.core.errors import ConfigError
from stepmark.core.fold_items import fold
from stepmark.core.workload import Block, CommOp, Group, Operation, Run, Stage, Workload
from stepmark.workload.formats.walk import setup_remark

WORLD = "world"  # group of all ranks


class Instances:
    """The communicators of a workload, numbered from `first`; a group of one has none."""

    def __init__(self, workload: Workload, first: int = 0) -> None:
        self._groups = {name: one for name, one in workload.groups.items() if one.size > 1}
        world = workload.world_size
        found = itertools.chain.from_iterable(
            (
                (name, rank)
                for rank in range(world - max(group.members(0)))
                if group.first(rank) == rank
            )
            for name, group in self._groups.items()
        )
        self._numbers = {key: number for number, key in enumerate(found, first)}

    def number(self, group: str, rank: int) -> int:
        """Of the communicator of this group that rank is in. Raises ConfigError for none."""
        key = group, self._groups[group].first(rank)
        if key not in self._numbers:
            raise ConfigError(f"group {group}", f"rank {rank}", "ranks that all are members")
        return self._numbers[key]

    def members(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Number, group and ranks of each."""
        for (name, rank), number in self._numbers.items():
            yield number, name, self._groups[name].members(rank)


class Issued:
    """Which operations `after` means: the newest of a name, or so many before."""

    def __init__(self, workload: Workload) -> None:
        depths: dict[str, int] = {}
        for block in workload.blocks.values():
            for item in block:
                for text in () if isinstance(item, Run) else item.after:
                    name, back = _parsed(text)
                    depths[name] = max(depths.get(name, 0), back + 1)
        self._newest: dict[str, deque[int]] = {
            name: deque(maxlen=depth) for name, depth in depths.items()
        }

    def note(self, name: str, number: int) -> bool:
        """An operation of this name was issued. Whether any waits for it."""
        if name not in self._newest:
            return False
        self._newest[name].append(number)
        return True

    def find(self, after: Iterable[str]) -> list[int]:
        """Numbers of these; one that was not issued yet is waited for by nobody."""
        found = []
        for text in after:
            name, back = _parsed(text)
            if len(self._newest[name]) > back:
                found.append(self._newest[name][-1 - back])
        return found


def of_a_rank(workload: Workload, comms: Iterable[CommOp]) -> Iterator[tuple[object, str]]:
    """What no file of one rank's step holds."""
    alone = any(workload.groups[one.group].size == 1 for one in comms)
    yield alone, "communication of a rank with itself"
    yield setup_remark(workload)


def check_rank(workload: Workload, rank: int) -> None:
    """Raises ConfigError for a rank that the workload has not."""
    if not 0 <= rank < workload.world_size:
        raise ConfigError("rank", rank, f"from 0 to {workload.world_size - 1}")


def group_of(ranks: Sequence[int], where: str) -> Group:
    """The group with these members. Raises ConfigError where they form no regular grid."""
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
        shown = ",".join(map(str, ranks[:12]))
        raise ConfigError(where, shown, "different ranks that form a regular grid")
    return group


def name_of(group: Group, world_size: int) -> str:
    """E.g. "4 ranks, stride 2"."""
    if group.size == world_size:
        return WORLD
    strides = "x".join(str(stride) for _, stride in group.digits)
    sizes = "x".join(str(size) for size, _ in group.digits)
    return f"{sizes} ranks, stride {strides}"


def stages_of(
    programs: Sequence[Sequence[Operation]],
) -> tuple[tuple[Stage, ...], dict[str, Block]]:
    """Stages and their blocks; neighbouring ranks with equal programs are one stage.

    Only if all stages then have as many ranks; else each rank is a stage of its own.
    """
    sizes, distinct = [0], [programs[0]]
    for program in programs:
        if program != distinct[-1]:
            distinct.append(program)
            sizes.append(0)
        sizes[-1] += 1
    chosen = distinct if len(set(sizes)) == 1 else programs
    stages: list[Stage] = []
    blocks: dict[str, Block] = {}
    for index, program in enumerate(chosen):
        name = f"step {index}"
        blocks |= fold(program, name)
        layers = tuple(sorted({one.layer for one in program if one.layer is not None}))
        stages.append(Stage(step=name, layers=layers))
    return tuple(stages), blocks


def _parsed(after: str) -> tuple[str, int]:
    name, mark, back = after.rpartition("~")
    return (name, int(back)) if mark and back.isdecimal() else (after, 0)
