"""Consistency of a workload: names exist, ranks exist, programs end.

Programs are not expanded, so the time does not depend on the number of repeats.
"""

from dataclasses import dataclass, field

from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.step.workload import CommOp, Group, Operation, Run, Workload, parse_after

# Operations of an expanded program. 2,048 micro-batches of 1,024 layers with 1,000 operations
# are 2**31; at a million operations per second 2**40 would take twelve days.
MOST_OPERATIONS = 2**40
MOST_BYTES = 2**63 - 1  # of a message's buffer: a signed 64-bit size


@dataclass(frozen=True, slots=True)
class _Inside:
    """Content of a block and the blocks it runs. length: operations; an empty block is 1."""

    length: int
    names: frozenset[str]
    awaited: frozenset[str]
    groups: frozenset[str]


def check(workload: Workload) -> None:
    """Raise ConfigError if parts contradict each other."""
    stages = workload.stages
    world = workload.world_size
    if not stages:
        raise ConfigError("stages", 0, "one or more")
    if world % len(stages):
        raise ConfigError("stages", len(stages), f"a divisor of world_size ({world})")
    for group in workload.groups.values():
        if group.size > world:
            raise ConfigError("group", group.digits, f"at most {world} ranks")
    blocks = _Blocks(workload)
    programs = [
        (number, blocks.find(block))
        for number, stage in enumerate(stages)
        for block in (stage.step, stage.setup)
        if block
    ]
    for block in workload.blocks:
        blocks.find(block)
    for _, program in programs:
        for text in program.awaited:
            if text not in program.names and parse_after(text)[0] not in program.names:
                raise ConfigError("after", text, "the name of an operation of its program")
    if workload.rules == "capture":  # its groups belong to the one rank that ran
        return
    # All members of a group are ranks, for every rank of the stages that use it.
    per_stage = world // len(stages)
    for name, group in workload.groups.items():
        users = {number for number, program in programs if name in program.groups}
        ranks = [range(at * per_stage, (at + 1) * per_stage) for at in sorted(users)]
        if not _fits(group, world, ranks):
            raise ConfigError("group", group.digits, f"dimensions that fit {world} ranks")


@dataclass(slots=True)
class _Blocks:
    """Contents of blocks; each block is read once."""

    workload: Workload
    _contents: dict[str, _Inside] = field(default_factory=dict)
    _parents: set[str] = field(default_factory=set)
    _checked: set[int] = field(default_factory=set)

    def find(self, name: str) -> _Inside:
        """Return the content of a block. Raise ConfigError."""
        if name in self._contents:
            return self._contents[name]
        if name not in self.workload.blocks:
            raise ConfigError("block", name, f"one of {len(self.workload.blocks)} blocks")
        if name in self._parents:
            raise ConfigError("block", name, "one that does not run itself")
        self._parents.add(name)
        self._contents[name] = self._read(name)
        self._parents.discard(name)
        return self._contents[name]

    def _read(self, name: str) -> _Inside:
        length = 0
        names = set[str]()
        awaited = set[str]()
        groups = set[str]()
        for item in self.workload.blocks[name]:
            if isinstance(item, Run):
                inside = self.find(item.block)
                length += item.times * max(1, inside.length)
                names |= inside.names
                awaited |= inside.awaited
                groups |= inside.groups
                continue
            length += 1
            names.add(item.name)
            awaited.update(item.after)
            if isinstance(item, CommOp):
                groups.add(item.group)
            self._check(item)
        if length > MOST_OPERATIONS:
            raise ConfigError("block", name, "one that ends: at most 2**40 operations")
        return _Inside(length, frozenset(names - {""}), frozenset(awaited), frozenset(groups))

    def _check(self, op: Operation) -> None:
        if not isinstance(op, CommOp) or id(op) in self._checked:
            return
        self._checked.add(id(op))
        groups = self.workload.groups
        if op.group not in groups:
            raise not_one_of("group", op.group, groups)
        group = groups[op.group]
        if op.root is not None and not 0 <= op.root < group.size:
            allowed = f"a rank of the group, from 0 to {group.size - 1}"
            raise ConfigError("root", op.root, allowed)
        if op.message_bytes(group) > MOST_BYTES:
            raise ConfigError("count", op.count, "a message of less than 2**63 bytes")


def _fits(group: Group, world: int, users: list[range]) -> bool:
    """Return whether the dimensions do not overlap and divide the world.

    The slowest-varying dimension need not divide it if all members of its users are ranks, such
    as the first and last of three stages. A group without users must then be the only one.
    """
    size = stride = span = 1
    for next_stride, next_size in sorted((stride, size) for size, stride in group.digits):
        if next_size == 1:
            continue
        span = size * stride
        if next_stride % span:
            return False
        size = next_size
        stride = next_stride
    if world % (size * stride) == 0:
        return True
    if not users:
        return size * stride > world
    return all(_last_member(size, stride, span, ranks) < world for ranks in users)


def _last_member(size: int, stride: int, span: int, ranks: range) -> int:
    """Return the largest rank of any group of these ranks.

    size, stride: slowest-varying dimension; span: ranks that the faster dimensions cover.
    """
    last = ranks[-1] // stride
    places = [(last, ranks[-1] % stride)]
    if ranks[0] < last * stride:
        places.append((last - 1, stride - 1))
    return max(
        (at - at % size + size - 1) * stride + place // span * span + span - 1
        for at, place in places
    )
