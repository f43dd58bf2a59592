"""Programs of ranks: operations in issue order, what each waits for, and with whom it talks."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.step.workload import CommOp, Group, Operation, Workload, parse_after
from stepmark.step.workload_stages import stages_of, transfer_of


@dataclass(frozen=True, slots=True)
class Step:
    """An operation of a rank. deps: earlier steps for which it waits, by index.

    members: world ranks of its group, in order; empty for computation.
    """

    op: Operation
    deps: tuple[int, ...]
    members: tuple[int, ...] = ()


def program(workload: Workload, rank: int, *, setup: bool = False) -> list[Step]:
    """Return the steps of a rank. Those of an earlier optimizer step are awaited by none."""
    stage = workload.stage_of(rank)
    members = {name: g.members(rank) for name, g in groups_of(workload, stage).items()}
    newest: dict[str, list[int]] = defaultdict(list)
    steps: list[Step] = []
    for index, op in enumerate(workload.expand(stage, setup=setup)):
        deps = set[int]()
        for text in op.after:
            name, back = (text, 0) if text in newest else parse_after(text)
            if back < len(newest.get(name, ())):
                deps.add(newest[name][-1 - back])
        if op.name:
            newest[op.name].append(index)
        own = members[op.group] if isinstance(op, CommOp) else ()
        steps.append(Step(op, tuple(sorted(deps)), own))
    return steps


def groups_of(workload: Workload, stage: int) -> dict[str, Group]:
    """Return the groups that the ranks of a stage communicate in, by name."""
    ops = (op for setup in (False, True) for op in workload.tally(stage, setup=setup))
    names = sorted({op.group for op in ops if isinstance(op, CommOp)})
    return {name: workload.groups[name] for name in names}


def communicators(workload: Workload) -> dict[str, list[tuple[int, ...]]]:
    """Return the ranks of each communicator of two or more, by group, the same on every rank.

    Raises ConfigError where a rank would be in two of one group.
    """
    parts_of: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    for rank in range(workload.world_size):
        for name, group in groups_of(workload, workload.stage_of(rank)).items():
            if group.size > 1:
                parts_of[name][group.members(rank)] = None
    for name, parts in parts_of.items():
        counts = Counter(rank for members in parts for rank in members)
        rank, most = counts.most_common(1)[0]
        if most > 1 or not all(0 <= r < workload.world_size for r in counts):
            allowed = f"dimensions in which every rank has one group (rank {rank} has {most})"
            raise ConfigError("group", name, allowed)
    return {name: list(parts_of[name]) for name in sorted(parts_of)}


def check_ends(workload: Workload) -> None:
    """Raise ConfigError where a message has no peer, or stages wait for one another for ever.

    A send ends by itself; a receive needs its send. Ranks of one stage run one program, so that
    only stages can wait for one another.
    """
    for setup in (True, False):
        for stage in range(len(workload.stages)):
            _check_rings(workload, stage, setup=setup)
        _check_stages(workload, setup=setup)


def _check_stages(workload: Workload, *, setup: bool) -> None:
    per_stage = workload.world_size // len(workload.stages)
    programs = [
        _Stage(workload, index, program(workload, index * per_stage, setup=setup))
        for index in range(len(workload.stages))
    ]
    sent: dict[object, list[CommOp]] = defaultdict(list)
    begun: dict[object, set[int]] = defaultdict(set)
    # Not any(): every stage goes on as far as it can.
    while sum([each.advance(sent, begun) for each in programs]):
        pass
    blocked = [text for each in programs for text in each.blocked()]
    if blocked:
        allowed = f"a workload that ends, but {'; '.join(blocked[:3])}"
        raise ConfigError("workload", workload.name, allowed)
    for ops in sent.values():
        if ops:
            op = ops[0]
            text = f"received, unlike {op.count} x {op.dtype} of {op.module} ({op.phase})"
            raise ConfigError("workload", workload.name, f"one in which every send is {text}")


def _check_rings(workload: Workload, stage: int, *, setup: bool) -> None:
    """Check sends and receives between ranks of one stage, which all run its program."""
    messages: dict[str, Counter[tuple[object, ...]]] = {SEND: Counter(), RECV: Counter()}
    for op, count in workload.tally(stage, setup=setup).items():
        if not isinstance(op, CommOp) or op.collective not in (SEND, RECV):
            continue
        size = workload.groups[op.group].size
        if size == 1 or transfer_of(workload, stage, op) is not None:
            continue
        distance = (op.peer or 0) * (1 if op.collective == SEND else -1) % size
        key = op.group, distance, str(op.dtype), op.count
        messages[op.collective][key] += count
    for kind, other in ((SEND, RECV), (RECV, SEND)):
        for group, size_text, dtype, elements in messages[kind] - messages[other]:
            what = f"{elements} x {dtype} over {size_text} ranks of group {group}"
            allowed = f"one in which stage {stage} has a {other} for each {kind} ({what})"
            raise ConfigError("workload", workload.name, allowed)


class _Stage:
    """What of a stage's program has ended, while `check_ends` executes it."""

    def __init__(self, workload: Workload, index: int, steps: list[Step]) -> None:
        self._workload = workload
        self._index = index
        self._steps = steps
        self._ended = [False] * len(self._steps)
        self._queues: dict[str, deque[int]] = defaultdict(deque)
        self._keys: dict[int, object] = {}  # of what several stages do
        calls = Counter[str]()
        for number, step in enumerate(self._steps):
            self._queues[step.op.stream].append(number)
            if isinstance(step.op, CommOp):
                is_pair = step.op.collective in (SEND, RECV)
                if transfer := transfer_of(workload, index, step.op):
                    self._keys[number] = transfer
                elif len(self._together(step.op)) > 1 and not is_pair:
                    self._keys[number] = step.op.group, calls[step.op.group]
                    calls[step.op.group] += 1

    def advance(self, sent: dict[object, list[CommOp]], begun: dict[object, set[int]]) -> int:
        """End what can end, in the order of each stream. Returns how many operations did."""
        num_ended = 0
        for queue in self._queues.values():
            while queue and self._ends(queue[0], sent, begun):
                self._ended[queue.popleft()] = True
                num_ended += 1
        return num_ended

    def blocked(self) -> Iterator[str]:
        """Yield the first operation of each stream that cannot end."""
        for stream, queue in self._queues.items():
            if queue:
                op = self._steps[queue[0]].op
                name = op.collective if isinstance(op, CommOp) else "computation"
                where = f"operation {queue[0]} of stage {self._index}"
                yield f"{where} waits on stream {stream} ({name}, {op.module}, {op.phase})"

    def _together(self, op: CommOp) -> tuple[int, ...]:
        return stages_of(self._workload, self._index, self._workload.groups[op.group])

    def _ends(
        self,
        number: int,
        sent: dict[object, list[CommOp]],
        begun: dict[object, set[int]],
    ) -> bool:
        step = self._steps[number]
        key = self._keys.get(number)
        if not all(self._ended[dep] for dep in step.deps):
            return False
        if key is None or not isinstance(step.op, CommOp):
            return True
        if step.op.collective == SEND:
            sent[key].append(step.op)
            return True
        if step.op.collective == RECV:
            if not sent[key]:
                return False
            first = sent[key].pop(0)
            if (first.dtype, first.count) != (step.op.dtype, step.op.count):
                where = f"operation {number} of stage {self._index}"
                allowed = f"{first.count} x {first.dtype}, as its sender says"
                raise ConfigError(where, f"{step.op.count} x {step.op.dtype}", allowed)
            return True
        begun[key].add(self._index)
        return begun[key] >= set(self._together(step.op))
