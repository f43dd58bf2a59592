"""What a file lacks of a workload's messages: those of the workload minus those of the file.

A format's module has `kept(workload, stage)`: the messages of the file of one rank of a stage,
read back with the format's reader. Messages are compared by collective, group, ranks and bytes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stepmark.ground.units import format_bytes
from stepmark.model.collectives import Collective
from stepmark.step.workload import CommOp, ComputeOp, Group, Operation, Run, Workload

Sizes = Counter[tuple[int, int]]  # calls by number of ranks and message bytes


def same_group(op: CommOp) -> str:
    return op.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Representable:
    """Messages of a file. label: name of a message's group there, or ours if it has none."""

    label: Callable[[CommOp], str] = same_group
    has_setup: bool = False  # what runs once before the first step
    messages: dict[tuple[str, str, bool], Sizes] = field(
        default_factory=lambda: defaultdict(Counter)
    )

    def add(
        self,
        op: CommOp,
        group: Group,
        times: int,
        *,
        setup: bool = False,
        label: str = "",
        num_bytes: int | None = None,
    ) -> None:
        """Add messages of the file, by default with group and bytes of the operation."""
        num_bytes = op.message_bytes(group) if num_bytes is None else num_bytes
        key = _kind(op.collective), label or op.group, setup
        num_ranks = group.size if op.peer is None else 2
        self.messages[key][num_ranks, num_bytes] += times


def _kind(collective: str) -> str:
    """Formats without uneven parts write their average, as an all_to_all_v here has it."""
    return str(Collective.ALL_TO_ALL) if collective == Collective.ALL_TO_ALL_V else collective


def communication(workload: Workload, stage: int) -> Iterator[tuple[CommOp, int, bool]]:
    """Yield messages with their number, and whether they are sent before the first step."""
    for setup in (False, True):
        for op, times in workload.tally(stage, setup=setup).items():
            if isinstance(op, CommOp):
                yield op, times, setup


def tallied(workload: Workload, stages: Iterable[int] | None) -> Counter[Operation]:
    """Count the operations of a step of these stages; None: of all."""
    stages = range(len(workload.stages)) if stages is None else stages
    return sum(map(workload.tally, stages), Counter[Operation]())


def losses(
    workload: Workload, kept: Callable[[Workload, int], Representable], stages: Iterable[int]
) -> list[str]:
    """Return a line per kind of message that files of these stages do not hold as it is."""
    sent = Representable()
    written = Representable()
    lines = list[str]()
    names: dict[tuple[str, str, bool], dict[str, None]] = defaultdict(dict)
    early = 0
    for stage in stages:
        file = kept(workload, stage)
        if not file.has_setup:
            setup_ops = workload.tally(stage, setup=True)
            early += sum(setup_ops[op] for op in setup_ops if isinstance(op, ComputeOp))
        for key, sizes in file.messages.items():
            written.messages[key].update(sizes)
        for op, times, setup in communication(workload, stage):
            label = file.label(op)
            sent.add(op, workload.groups[op.group], times, setup=setup, label=label)
            names[_kind(op.collective), label, setup][op.group] = None
    if early:
        lines.append(f"{early} computations before the first step")
    return lines + [
        f"{key[0]} of {', '.join(names[key])}{' before the first step' if key[2] else ''}: "
        f"{_difference(sizes, written.messages.get(key, Counter()))}"
        for key, sizes in sorted(sent.messages.items())
        if sizes != written.messages.get(key)
    ]


def rounding(in_file: Representable, read: Representable) -> tuple[str, ...]:
    """Return a note per kind of message that is read as one of another size."""

    def amount(sizes: Sizes) -> str:
        return f"{sum(size * times for (_, size), times in sizes.items()):,} B"

    return tuple(
        f"{key[0]} of {key[1]}: {amount(sizes)} of the file are read as "
        f"{amount(read.messages[key])}, a multiple of the ranks"
        for key, sizes in sorted(in_file.messages.items())
        if sizes != read.messages[key]
    )


def _difference(sent: Sizes, written: Sizes) -> str:
    def amount(sizes: Sizes) -> str:
        calls = sizes.total()
        num_bytes = sum(size * times for (_, size), times in sizes.items())
        return f"{calls} message{'' if calls == 1 else 's'}, {format_bytes(num_bytes)}"

    if not written:
        return amount(sent)
    ranks = [sorted({ranks for ranks, _ in sizes}) for sizes in (sent, written)]
    over = ["", ""]
    if ranks[0] != ranks[1]:
        over = [f" over {' or '.join(map(str, part))} ranks" for part in ranks]
    return f"{amount(sent)}{over[0]}; in the file {amount(written)}{over[1]}"


def _any_op(has: Callable[[Operation], object]) -> Callable[[Workload], bool]:
    return lambda workload: any(
        has(item)
        for block in workload.blocks.values()
        for item in block
        if not isinstance(item, Run)
    )


_PRESENT: dict[str, Callable[[Workload], object]] = {
    "model": lambda workload: workload.model,
    "settings": lambda workload: workload.settings,
    "notes": lambda workload: workload.notes,
    "the number of micro-batches": lambda workload: workload.num_microbatches > 1,
    "which ranks form a group": lambda workload: workload.groups,
    "layers": _any_op(lambda op: op.layer is not None),
    "micro-batches": _any_op(lambda op: op.microbatch is not None),
    "what is recomputed": _any_op(lambda op: op.recompute),
    "times": _any_op(lambda op: op.time_s is not None),
    "start times": _any_op(lambda op: op.start_s is not None),
    "roots": _any_op(lambda op: isinstance(op, CommOp) and op.root is not None),
    "peers": _any_op(lambda op: isinstance(op, CommOp) and op.peer is not None),
    "reductions": _any_op(lambda op: isinstance(op, CommOp) and op.redop != "none"),
    "which messages are one call": _any_op(lambda op: isinstance(op, CommOp) and op.fused),
}


def present(workload: Workload, *names: str) -> list[str]:
    """Return those of these facts that a workload has, as one line; nothing if it has none."""
    words = ", ".join(name for name in names if _PRESENT[name](workload))
    return [words] if words else []
