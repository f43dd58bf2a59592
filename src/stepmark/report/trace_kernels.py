"""Measured operations of traces as tables: time per step by role, operation or kernel."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepmark.core.columns import Row, aligned
from stepmark.core.kernel_groups import group_of
from stepmark.core.trace_ops import OpKey, OpTable
from stepmark.core.units import ranks_text

UNATTRIBUTED = "unattributed"
_MOST_ROWS = 40
_WIDTH = 90
_MUCH = 50  # percent
_US, _MS = 1e3, 1e6  # nanoseconds

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

    total_ns: int = 0
    calls: int = 0
    kernels: int = 0
    shortest_ns: int = 2**62
    longest_ns: int = 0
    by_step_ns: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Sum") -> None:
        self.total_ns += other.total_ns
        self.calls += other.calls
        self.kernels += other.kernels
        self.shortest_ns = min(self.shortest_ns, other.shortest_ns)
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.by_step_ns.update(other.by_step_ns)


Label = tuple[str, ...]  # of the columns in COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """Sums of one rank's steps by label."""

    sums: Mapping[Label, Sum]
    steps: tuple[int, ...]
    step_ns: tuple[int, ...]
    is_host: bool
    is_marked: bool
    outside_ns: int
    notes: tuple[str, ...] = ()

    @property
    def total_ns(self) -> int:
        return sum(each.total_ns for each in self.sums.values())


# Columns of a label, by what rows are told apart.
COLUMNS: dict[str, tuple[str, ...]] = {
    "role": ("role", "phase", "kind"),
    "layer": ("layer", "kind"),
    "module": ("module", "phase", "kind"),
    "op": ("op",),
    "group": ("group",),
    "name": ("name",),
}


def label_of(key: OpKey, by: str) -> Label:
    """Return the label of an operation; what is unknown is UNATTRIBUTED."""
    phase = f"re-{key.phase}" if key.is_recomputed else key.phase
    match by:
        case "role":
            return (key.role or UNATTRIBUTED, phase, key.kind)
        case "layer":
            layer = "outside blocks" if key.role else UNATTRIBUTED
            return (layer if key.layer is None else str(key.layer), key.kind)
        case "module":
            return (key.module or UNATTRIBUTED, phase, key.kind)
        case "op":
            return (key.op or UNATTRIBUTED,)
        case "group":
            return (group_of(key.name),)
    return (key.name,)


def summed(table: OpTable, by: str, rank: int = 0) -> RankSums:
    """Return the sums of a rank's operations."""
    sums: dict[Label, Sum] = defaultdict(Sum)
    labels = {key: label_of(key, by) for key in table.keys}
    for op in table.operations(rank):
        sums[labels[op.key]].add(
            Sum(
                total_ns=op.time_ns,
                calls=op.calls,
                kernels=op.kernels,
                shortest_ns=op.shortest_ns,
                longest_ns=op.longest_ns,
                by_step_ns=Counter({op.step: op.time_ns}),
            )
        )
    return RankSums(
        sums=dict(sums),
        steps=table.steps,
        step_ns=table.step_ns,
        is_host=table.is_host,
        is_marked=table.is_marked,
        outside_ns=table.outside_ns,
        notes=table.notes,
    )


Ranks = Sequence[tuple[int, RankSums]]


def num_steps(ranks: Ranks) -> int:
    """Return the steps of all ranks together."""
    return sum(len(sums.steps) for _, sums in ranks)


def rows(ranks: Ranks, by: str) -> list[Row]:
    """Return a row for each label, the longest first, in nanoseconds.

    total_ns is over all ranks and steps: the sum of a column is that of all work.
    """
    count, total_ns = num_steps(ranks) or 1, sum(sums.total_ns for _, sums in ranks)
    table: list[Row] = []
    for label in dict.fromkeys(label for _, sums in ranks for label in sums.sums):
        whole = Sum()
        per_rank: dict[int, float] = {}
        for rank, sums in ranks:
            own = sums.sums.get(label, Sum())
            whole.add(own)
            per_rank[rank] = own.total_ns / (len(sums.steps) or 1)
        slowest = max(per_rank, key=per_rank.__getitem__)
        table.append(
            dict(zip(COLUMNS[by], label, strict=True))
            | {
                "time_per_step_ns": whole.total_ns / count,
                "share_pct": 100 * whole.total_ns / (total_ns or 1),
                "calls_per_step": whole.calls / count,
                "kernels_per_step": whole.kernels / count,
                "mean_ns": whole.total_ns / whole.kernels,
                "shortest_ns": whole.shortest_ns,
                "longest_ns": whole.longest_ns,
                "fastest_rank_ns": min(per_rank.values()),
                "slowest_rank_ns": per_rank[slowest],
                "slowest_rank": slowest,
                "total_ns": whole.total_ns,
            }
        )
    return sorted(table, key=lambda row: -_number(row["total_ns"]))


def hints(table: Sequence[Row], by: str) -> Iterator[str]:
    """Yield what would tell more where much of the time is not attributed."""
    shares = [_number(row["share_pct"]) for row in table if UNATTRIBUTED in row.values()]
    if sum(shares) > _MUCH:
        other = "--by op" if by == "module" else "--workload FILE tells products, --by op"
        yield f"{sum(shares):.0f} % of the time is {UNATTRIBUTED}: {other} shows operations"


def as_text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def header(ranks: Ranks) -> list[str]:
    """Return what the table is of: how much work, of which steps, and what is left out."""
    count = num_steps(ranks)
    if not count:
        return ["no step of these has work"]
    total_ns = sum(sums.total_ns for _, sums in ranks)
    is_host = all(sums.is_host for _, sums in ranks)
    what = "operations on the host" if is_host else "kernels and copies"
    steps = sorted({step for _, sums in ranks for step in sums.steps})
    marked = all(sums.is_marked for _, sums in ranks)
    which = ranks_text(steps).replace("rank", "step") if marked else "the whole trace"
    step_ns = sum(sum(sums.step_ns) for _, sums in ranks) / count
    lines = [
        f"{what}: {total_ns / count / _MS:.3f} ms per step of {step_ns / _MS:.3f} ms; "
        f"mean of {ranks_text(rank for rank, _ in ranks)}, {which}"
    ]
    outside_ns = sum(sums.outside_ns for _, sums in ranks)
    if outside_ns:
        text = (
            f"{outside_ns / _MS:.3f} ms of work, of all ranks, was launched outside the steps"
        )
        lines.append(f"{text}: it is not counted")
    return lines


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("time_per_step_ns", "ms/step", lambda value: f"{value / _MS:.3f}"),
    ("share_pct", "%", lambda value: f"{value:.1f}"),
    ("calls_per_step", "calls", lambda value: f"{value:.4g}"),
    ("kernels_per_step", "kernels", lambda value: f"{value:.4g}"),
    ("mean_ns", "mean us", lambda value: f"{value / _US:.2f}"),
    ("shortest_ns", "min us", lambda value: f"{value / _US:.2f}"),
    ("longest_ns", "max us", lambda value: f"{value / _US:.2f}"),
)


def lines(ranks: Ranks, by: str, most: int = _MOST_ROWS) -> list[str]:
    """Return the table as text."""
    table = rows(ranks, by)
    shown = list(_SHOWN)
    if len(ranks) > 1:
        shown.append(("fastest_rank_ns", "fastest rank", lambda value: f"{value / _MS:.3f}"))
        shown.append(("slowest_rank_ns", "slowest", lambda value: f"{value / _MS:.3f}"))
    cells = [[*(title for _, title, _ in shown), *COLUMNS[by]]]
    for row in table[:most]:
        numbers = [show(_number(row[name])) for name, _, show in shown]
        cells.append([*numbers, *(as_text(row[name]) for name in COLUMNS[by])])
    text = aligned(cells, [True] * len(shown) + [False] * len(COLUMNS[by]))
    return [*text, *_rest(table[most:], num_steps(ranks))]


def _rest(table: Sequence[Row], count: int) -> list[str]:
    if not table:
        return []
    rest = sum(_number(row["total_ns"]) for row in table) / count / _MS
    return [f"and {len(table)} more rows of {rest:.3f} ms together: --csv has all"]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value
