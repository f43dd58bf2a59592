"""Measured operations of traces as tables: time per step by role, operation or kernel."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from stepmark.ground.units import ranks_text
from stepmark.model.kernel_groups import group_of
from stepmark.model.ops import Phase
from stepmark.step.trace_ops import MeasuredOp, MeasuredSteps, OpKey, OpTable
from stepmark.tables.columns import (
    MS,
    NUMBER,
    PERCENT,
    US,
    Column,
    Row,
    given,
    known,
    text,
)
from stepmark.tables.table import Table

UNATTRIBUTED = "unattributed"
MOST_ROWS = 40
_WIDTH = 90
_MUCH = 25  # percent

DEFINITIONS = (
    "time: sum over kernels and copies that the steps launched, per step and rank; kernels of "
    "several streams overlap, so it can exceed the step. Without a GPU in the trace: time "
    "of operations on the host, without those inside.",
    "calls: operations of torch that launched it. kernels: what they launched.",
    "role, phase: as in a workload of the step; unattributed: the trace does not tell.",
)


@dataclass(slots=True)
class Sum:
    """Work with one label on one rank."""

    time_ns: int = 0
    calls: int = 0
    kernels: int = 0
    shortest_ns: int = 2**62
    longest_ns: int = 0
    by_step_ns: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Sum | MeasuredOp") -> None:
        self.time_ns += other.time_ns
        self.calls += other.calls
        self.kernels += other.kernels
        self.shortest_ns = min(self.shortest_ns, other.shortest_ns)
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.by_step_ns.update(other.by_step_ns)


Label = tuple[str, ...]  # of the columns in COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums(MeasuredSteps):
    """Sums of one rank's steps by label."""

    sums: Mapping[Label, Sum]

    @property
    def total_ns(self) -> int:
        return sum(each.time_ns for each in self.sums.values())


# Columns of a label, that distinguish rows.
COLUMNS: dict[str, tuple[str, ...]] = {
    "role": ("role", "phase", "kind"),
    "layer": ("layer", "kind"),
    "module": ("module", "phase", "kind"),
    "op": ("op",),
    "group": ("group",),
    "name": ("name",),
}


def label_of(key: OpKey, by: str, marks_optimizer: bool = False) -> Label:
    """Return the label of an operation; what is unknown is UNATTRIBUTED.

    marks_optimizer: whether its trace does, so that work outside the marks is not its.
    """
    in_optimizer = key.phase == Phase.OPTIM if marks_optimizer else None
    layer = "outside blocks" if key.role else UNATTRIBUTED
    values = {
        "role": key.role or UNATTRIBUTED,
        "phase": f"re-{key.phase}" if key.is_recomputed else key.phase,
        "kind": key.kind,
        "layer": layer if key.layer is None else str(key.layer),
        "module": key.module or UNATTRIBUTED,
        "op": key.op or UNATTRIBUTED,
        "group": group_of(key.name, in_optimizer),
        "name": key.name,
    }
    return tuple(values[column] for column in COLUMNS[by])


def summed(table: OpTable, by: str) -> RankSums:
    """Return the sums of a rank's operations."""
    sums: dict[Label, Sum] = defaultdict(Sum)
    marks_optimizer = any(op.key.phase == Phase.OPTIM for op in table.ops)
    for op in table.ops:
        sums[label_of(op.key, by, marks_optimizer)].add(op)
    about = {each.name: getattr(table, each.name) for each in fields(MeasuredSteps)}
    return RankSums(sums=dict(sums), **about)


Ranks = Sequence[tuple[int, RankSums]]


def num_steps(ranks: Ranks) -> int:
    """Return the steps of all ranks together."""
    return sum(len(sums.steps) for _, sums in ranks)


def rows(ranks: Ranks, by: str) -> list[Row]:
    """Return a row for each label, the longest first, in nanoseconds.

    total_ns is over all ranks and steps: the sum of a column is that of all work.
    """
    count = num_steps(ranks) or 1
    total_ns = sum(sums.total_ns for _, sums in ranks)
    table: list[Row] = []
    for label in dict.fromkeys(label for _, sums in ranks for label in sums.sums):
        own = [(rank, sums.sums.get(label, Sum()), len(sums.steps)) for rank, sums in ranks]
        whole = whole_of(each for _, each, _ in own)
        per_rank = {rank: each.time_ns / (steps or 1) for rank, each, steps in own}
        slowest = max(per_rank, key=per_rank.__getitem__)
        table.append(
            dict(zip(COLUMNS[by], label, strict=True))
            | {
                "time_per_step_ns": whole.time_ns / count,
                "share_pct": 100 * whole.time_ns / (total_ns or 1),
                "calls_per_step": whole.calls / count,
                "kernels_per_step": whole.kernels / count,
                "mean_ns": whole.time_ns / whole.kernels,
                "shortest_ns": whole.shortest_ns,
                "longest_ns": whole.longest_ns,
                "fastest_rank_ns": min(per_rank.values()),
                "slowest_rank_ns": per_rank[slowest],
                "slowest_rank": slowest,
                "total_ns": whole.time_ns,
            }
        )
    return sorted(table, key=lambda row: -known(row, "total_ns"))


def whole_of(sums: Iterable[Sum]) -> Sum:
    whole = Sum()
    for each in sums:
        whole.add(each)
    return whole


def hints(table: Sequence[Row], by: str) -> Iterator[str]:
    """Yield what would tell more where much of the time is not attributed."""
    shares = [known(row, "share_pct") for row in table if UNATTRIBUTED in row.values()]
    if sum(shares) > _MUCH:
        workload = "" if by == "module" else "--workload FILE tells roles of products, "
        yield (
            f"{sum(shares):.0f} % of the time is {UNATTRIBUTED}: a profile with "
            f"with_stack=True has the modules, {workload}--by op shows operations"
        )
    if any(row.get("role") in ("blocks", "root") for row in table):
        yield (
            "blocks and root are FSDP's gathers, reductions and their copies: of transformer "
            "blocks, and of all other parameters"
        )


def header(ranks: Ranks) -> list[str]:
    """Return what the table is of: how much work, of which steps, and what is left out."""
    count = num_steps(ranks)
    if not count:
        return ["no step of these has work" if ranks else "no times of any step"]
    total_ns = sum(sums.total_ns for _, sums in ranks)
    is_host = all(sums.is_host for _, sums in ranks)
    what = "operations on the host" if is_host else "kernels and copies"
    places = "threads" if is_host else "streams"
    steps = sorted({step for _, sums in ranks for step in sums.steps})
    marked = all(sums.is_marked for _, sums in ranks)
    which = ranks_text(steps).replace("rank", "step") if marked else "the whole trace"
    step_ns = sum(sum(sums.step_ns) for _, sums in ranks) / count
    lines = [
        f"{what}: {MS.show(total_ns / count)} ms per step, summed over {places}, "
        f"of {MS.show(step_ns)} ms; "
        f"mean of {ranks_text(rank for rank, _ in ranks)}, {which}"
    ]
    outside_ns = sum(sums.outside_ns for _, sums in ranks)
    if outside_ns:
        text = "of work, of all ranks, was launched outside the steps: it is not counted"
        lines.append(f"{MS.show(outside_ns)} ms {text}")
    return lines


_SHOWN = (
    given("time_per_step_ns", MS, "ms/step"),
    given("share_pct", PERCENT, "%"),
    given("calls_per_step", NUMBER, "calls"),
    given("kernels_per_step", NUMBER, "kernels"),
    given("mean_ns", US, "mean us"),
    given("shortest_ns", US, "min us"),
    given("longest_ns", US, "max us"),
)
_OF_RANKS = (
    given("fastest_rank_ns", MS, "fastest rank"),
    given("slowest_rank_ns", MS, "slowest"),
)


def label_columns(by: str) -> list[Column[Row]]:
    """Return the columns that tell rows apart; long words are cut."""
    return [given(name, words=partial(_cut, name)) for name in COLUMNS.get(by, (by,))]


def _cut(name: str, row: Row) -> str:
    words = text(row, name)
    return words if len(words) <= _WIDTH else f"{words[: _WIDTH - 3]}..."


def lines(ranks: Ranks, table: Sequence[Row], by: str, most: int = MOST_ROWS) -> list[str]:
    """Return the table as text; columns of ranks where there are several."""
    if not table:
        return []
    shown = [*_SHOWN, *(_OF_RANKS if len(ranks) > 1 else ())]
    if all(sums.is_host for _, sums in ranks):
        shown = [replace(c, heading="operations") if c.title == "kernels" else c for c in shown]
    lines = Table(table[:most], [*shown, *label_columns(by)]).text()
    if rest := table[most:]:
        rest_ns = sum(known(row, "total_ns") for row in rest) / num_steps(ranks)
        together = f"{MS.show(rest_ns)} ms together"
        lines.append(f"and {len(rest)} more rows of {together}: --csv has all")
    return lines
