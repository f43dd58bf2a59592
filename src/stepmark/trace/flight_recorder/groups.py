"""Dumps of several ranks side by side: groups, collectives by number, progress of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepmark.core.collectives import Collective
from stepmark.core.finding import Evidence
from stepmark.core.units import format_bytes
from stepmark.trace.flight_recorder.operations import (
    Dump,
    Group,
    Operation,
    collective_of,
    num_bytes,
)

Step = tuple[Operation, ...]  # one collective, or all parts of a coalesced group


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a rank in a group, as numbers of collectives; None where unknown."""

    rank: int | None
    file: str
    group: str
    num_operations: int
    num_lost: int  # of the rank's ring buffer, over all groups
    first: int | None  # in the buffer
    enqueued: int | None
    completed: int | None  # by the states of the entries
    watchdog_completed: int | None  # as the watchdog last knew, which is earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDumps:
    """A group and, by rank, its collectives by number."""

    group: Group
    steps: dict[int, dict[int, Step]]
    enqueued: dict[int, int | None]  # None where unknown
    dumps: dict[int, Dump]

    @property
    def label(self) -> str:
        return f"group {self.group.name} {self.group.description}".strip()


def progress(dumps: Sequence[Dump]) -> list[Progress]:
    """Return one line per rank and group that has entries."""
    lines = []
    for dump in dumps:
        for name in dict.fromkeys(one.group for one in dump.operations):
            own = [one for one in dump.operations if one.group == name and not one.is_p2p]
            steps, status = steps_of(own), dump.status.get(name)
            done = [number for number, step in steps.items() if is_done(step)]
            lines.append(
                Progress(
                    rank=dump.rank,
                    file=dump.file,
                    group=_label(dump, name),
                    num_operations=sum(one.group == name for one in dump.operations),
                    num_lost=dump.num_lost,
                    first=min(steps, default=None),
                    enqueued=max(steps, default=None),
                    completed=max(done, default=None),
                    watchdog_completed=status.completed if status else None,
                )
            )
    return lines


def ranks_text(ranks: Iterable[int]) -> str:
    """Return e.g. 'rank 3' or 'ranks 0-3, 5'."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in spans[:12]]
    many = len(spans) > 1 or any(low != high for low, high in spans)
    return f"rank{'s' if many else ''} {', '.join(shown)}{', ...' if len(spans) > 12 else ''}"


def _label(dump: Dump, name: str) -> str:
    one = next(one for one in dump.operations if one.group == name)
    return f"{name} {dump.group_of(one).description}".strip()


def groups_of(dumps: Sequence[Dump]) -> list[GroupDumps]:
    """Return groups by name and ranks: split_group gives disjoint groups one name."""
    shared_by_key: dict[tuple[str, tuple[int, ...] | None], GroupDumps] = {}
    for dump in dumps:
        assert dump.rank is not None
        names = {one.group: dump.group_of(one) for one in dump.operations}
        names |= {n: group for n, group in dump.groups.items() if n and n not in names}
        for name, group in names.items():
            if group.ranks is not None and dump.rank not in group.ranks:
                continue
            own = [one for one in dump.operations if one.group == name and not one.is_p2p]
            steps, status = steps_of(own), dump.status.get(name)
            ends = [*steps, *([status.enqueued] if status and status.enqueued else [])]
            unknown = None if dump.num_lost else 0
            new = GroupDumps(group=group, steps={}, enqueued={}, dumps={})
            shared = shared_by_key.setdefault((name, group.ranks), new)
            shared.steps[dump.rank] = steps
            shared.enqueued[dump.rank] = max(ends, default=unknown)
            shared.dumps[dump.rank] = dump
    return list(shared_by_key.values())


def steps_of(operations: Iterable[Operation]) -> dict[int, Step]:
    """Return collectives by number."""
    steps: dict[int, Step] = {}
    for one in operations:
        if one.sequence is not None:
            steps[one.sequence] = (*steps.get(one.sequence, ()), one)
    return steps


def is_done(step: Step) -> bool:
    return all(one.is_done for one in step)


def signature(step: Step) -> tuple[object, ...]:
    """Return what must agree on all ranks, without what may differ by rank."""
    return tuple(_agreed(one) for one in step if not one.is_marker)


def _agreed(one: Operation) -> tuple[object, ...]:
    name = collective_of(one.kind) or one.kind
    inputs, outputs = one.inputs or None, one.outputs or None
    if name in (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V):
        return name, {word for _, word in inputs or ()} == {word for _, word in outputs or ()}
    if name in (Collective.GATHER, Collective.REDUCE):
        return name, inputs
    if name in (Collective.SCATTER, Collective.BROADCAST):
        return name, outputs
    if one.kind.endswith("_v"):  # uneven parts: what a rank adds, or keeps, is its own
        return name, total(outputs if name == Collective.ALL_GATHER else inputs)
    if one.kind.endswith("_coalesced"):
        return name, inputs, outputs
    # NCCL sees elements, not shapes: [2, 3] and [3, 2] are the same message to it.
    return name, total(inputs), total(outputs)


def total(shapes: object) -> object:
    if not isinstance(shapes, tuple):
        return None
    words = {word for _, word in shapes}
    return sum(elements for elements, _ in shapes), tuple(sorted(words))


def described(step: Step) -> str:
    words = []
    for one in step[:3]:
        sizes = one.inputs or one.outputs or ()
        tensors = ", ".join(f"{elements} {word}" for elements, word in sizes[:3])
        total = num_bytes(one.inputs or one.outputs)
        size = f" ({format_bytes(total)})" if total else ""
        name = collective_of(one.kind) or one.kind
        words.append(f"{name} of {tensors or 'no tensor'}{size}")
    return " + ".join(words) + (f" + {len(step) - 3} more" if len(step) > 3 else "")


def evidence_of(dump: Dump, one: Operation) -> Evidence:
    where = f", {one.where}" if one.where else ""
    number = "" if one.sequence is None else f" {one.sequence}"
    text = f"rank {dump.rank}:{number} {described((one,))}, {one.state or 'no state'}{where}"
    return Evidence(file=dump.file, line=0, text=text)
