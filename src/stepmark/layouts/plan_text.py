"""What `stepmark plan` prints: the best layout, what was searched, rows, and why it is best."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from stepmark.ground.units import GIB, format_time
from stepmark.layouts.layout_search import LayoutSearch
from stepmark.layouts.plan_options import ALL_TO_ALL, EXCHANGES, PlanOptions
from stepmark.predictions.prediction import HOST, shares_pct
from stepmark.predictions.prediction_grid import Row
from stepmark.predictions.prediction_text import anchor_lines, fit_text
from stepmark.tables.columns import COUNT, NUMBER, PERCENT, TEXT, Column, given
from stepmark.tables.table import Table
from stepmark.timeline.ledger import Ledger

FRAMEWORKS = {"megatron": "Megatron", "pytorch": "PyTorch"}
_RARE = ("vpp", "cp", "ep")  # axes
_PLAIN = "1f1b"
_UNNAMED = {"cp_comm_type": EXCHANGES[0], "dispatch": ALL_TO_ALL}  # where a row has no word
_MOST_REASONS = 4
_MOST_SMALLER = 3
_TIE = 0.4  # chance of being faster than the first, from which a layout is worth a measurement
_AXES = ("framework", "tp", "pp", "vpp", "cp", "ep", "dp", "mbs", "recompute")
PARTS: dict[str, Callable[[Row], float]] = {
    "computing": lambda row: row["step_s"] - row["exposed_comm_s"] - row["bubble_s"],
    "exposed communication": lambda row: row["exposed_comm_s"],
    "pipeline bubble": lambda row: row["bubble_s"],
}


def lines_of_count(options: PlanOptions, result: LayoutSearch) -> Iterator[str]:
    """Yield the answer for one number of GPUs."""
    best = result.rows[0]
    yield f"{best['name']} on {result.num_gpus} {options.device}: {place(best)}"
    yield f"  {_figures(best, result.best.ledger, result.cluster.device.hbm_bytes)}"
    yield f"  {_assumed(options, result)}"
    yield f"  {_searched(result)}"
    yield f"  {result.command}"
    yield ""
    shown = result.rows[: options.top]
    yield from Table(shown, columns(shown)).text()
    yield from _why(result)
    if result.cluster.anchored:
        yield from anchor_lines(result.cluster.anchored.document())


def _assumed(options: PlanOptions, result: LayoutSearch) -> str:
    """Return what the times are of."""
    cluster = result.cluster
    if options.calibration:
        costs = f"by the parts of {options.calibration}"
    else:
        costs = f"by data sheet, {options.host or 'typical'} host"
    network = cluster.network.name if cluster.network else "one host"
    length = result.best.candidate.job.model.seq_len
    packed = f", packed from pieces ({options.packing.text})" if options.packing else ""
    return (
        f"{costs}, network {network}; {options.gbs:,} sequences of {length:,} tokens a step"
        f"{packed}, "
        f"{options.precision or 'bf16'}, {options.memory:.0%} of the memory"
    )


def lines_of_counts(searches: Sequence[LayoutSearch]) -> Iterator[str]:
    """Yield the best layout for each number of GPUs, and how many are worth it."""
    rows = [each.rows[0] for each in searches]
    most = max(row["tokens_per_s_gpu"] for row in rows)
    yield f"{rows[0]['name']}: the fastest layout for each number of GPUs, with the same batch"
    yield ""
    yield from Table(rows, columns(rows)).text()
    worth = [row for row in rows if row["tokens_per_s_gpu"] >= _WORTH * most]
    last = worth[-1]
    text = f"up to {last['gpus']} GPUs each does at least {_WORTH:.0%} of the best tokens/s"
    later = [row for row in rows if row["gpus"] > last["gpus"]]
    if later:
        name, more_s = _largest(later[0], last, per_gpu=True)
        text += f"; with {later[0]['gpus']} more of their time goes to {name}"
        text += f" ({more_s:+.1%} of the step)"
    yield text


_WORTH = 0.8


def place(row: Row) -> str:
    """Return a layout as words."""
    degrees = [f"{name} {row[name]}" for name in _AXES[1:-1] if row[name] > 1 or name == "mbs"]
    again = "no recomputation"
    if row["recompute"] != "none":
        again = f"recomputed layers {row['recompute']}"
    schedule = [] if row["pp_schedule"] == _PLAIN else [row["pp_schedule"]]
    degrees += [f"cp by {row['cp_comm_type']}"] if row["cp_comm_type"] else []
    replicas = row["dp_replicate"]
    replicated = [f"{replicas} replicas of the shards"] if replicas > 1 else []
    hops = [row["dispatch"]] if row["dispatch"] else []
    return ", ".join((row["framework"], *degrees, *schedule, *hops, *replicated, again))


def _figures(row: Row, ledger: Ledger, device_bytes: int | None) -> str:
    """Return the step, its rate, whether it fits, and what most of it is."""
    figures = [f"step {format_time(row['step_s'])}"]
    figures += [f"{row['tokens_per_s_gpu']:,.0f} tokens/s/GPU"]
    if row["mfu_pct"] is not None:
        figures += [f"{row['mfu_pct']:.1f} % MFU (causal)"]
    figures += [fit_text(row["verdict"], row["reserved_bytes"], device_bytes)]
    shares = shares_pct(ledger)
    part = HOST if row["bound"] == "host" else next(iter(shares))
    figures += [f"bound by {part} ({shares.get(part, 0.0):.1f} % of the step)"]
    if row["days"] is not None:
        figures += [f"{row['days']:,.1f} days"]
    if row["cost"] is not None:
        figures += [f"cost {row['cost']:,.0f}"]
    return ", ".join(figures)


def _searched(result: LayoutSearch) -> str:
    error = max(abs(row["estimated_s"] / row["step_s"] - 1) for row in result.rows)
    text = (
        f"searched {result.num_layouts:,} layouts in {result.took_s:.0f} s: "
        f"{result.num_too_large:,} need more memory, {len(result.rows)} simulated (estimates "
        f"of these within {error:.1%}), others estimated"
    )
    if result.errors:
        text += f"; {len(result.errors):,} have no time ({result.errors[0]})"
    return text


def _why(result: LayoutSearch) -> Iterator[str]:
    """Yield what makes the best layout faster than those that differ in one axis."""
    best = result.rows[0]
    ties = [row for row in result.rows if (row["chance_faster"] or 0.0) >= _TIE]
    if ties:
        yield (
            f"{len(ties)} more may be faster (a chance of {_TIE:.0%} or more by the errors "
            "of published steps): measure them"
        )
    smaller = [row for row in result.rows[1:] if row["is_pareto"]]
    for row in smaller[:_MOST_SMALLER]:
        yield f"{_gibibytes(row)} GiB: {place(row)}, {_change(row, best)}"
    rows = {axis: each.row for axis, each in result.neighbours.items()}
    slower = sorted(rows.items(), key=lambda item: -item[1]["step_s"])
    for axis, row in slower[:_MOST_REASONS]:
        name, more = _largest(row, best)
        values = (own[axis] or _UNNAMED[axis] for own in (row, best))
        text = f"{axis} {' instead of '.join(map(str, values))}: {_change(row, best)}"
        yield f"{text}, of which {name} {more:+.1%}; {_gibibytes(row)} GiB"


def _change(row: Row, best: Row) -> str:
    return f"{row['step_s'] / best['step_s'] - 1:+.1%} of the step"


def _largest(row: Row, best: Row, *, per_gpu: bool = False) -> tuple[str, float]:
    """Return the part that differs the most, and by what share of the best step."""

    def shares(own: Row) -> Mapping[str, float]:
        whole = own["step_s"] if per_gpu else best["step_s"]
        return {name: part(own) / whole for name, part in PARTS.items()}

    before, after = shares(best), shares(row)
    name = max(before, key=lambda part: after[part] - before[part])
    return name, after[name] - before[name]


def _step(row: Row) -> str:
    return format_time(row["step_s"])


def _rate(row: Row) -> str:
    return f"{row['tokens_per_s_gpu']:,.0f}"


def _chance(row: Row) -> str:
    """Return the chance that a layout is faster than the first."""
    return "" if row["chance_faster"] is None else f"{100 * row['chance_faster']:.0f}"


def _gibibytes(row: Row) -> str:
    return f"{row['reserved_bytes'] / GIB:.1f}"


def _data_ranks(row: Row) -> str:
    """Return the data ranks, as replicas x shards where there are such."""
    replicas = row["dp_replicate"]
    return f"{replicas}x{row['dp'] // replicas}" if replicas > 1 else str(row["dp"])


def _framework(row: Row) -> str:
    return FRAMEWORKS[row["framework"]]


def _cost(row: Row) -> str:
    return "" if row["cost"] is None else f"{row['cost']:,.0f}"


def columns(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns of these layouts, without axes that none of them has."""
    chosen = ["tp", "pp"] + [name for name in _RARE if any(row[name] > 1 for row in rows)]
    exchanges = any(row["cp_comm_type"] for row in rows)
    several = len({row["gpus"] for row in rows}) > 1
    has_schedules = any(row["pp_schedule"] != _PLAIN for row in rows)
    has_hops = any(row["dispatch"] for row in rows)
    return [
        *([given("gpus", COUNT, "GPUs")] if several else []),
        given("framework", TEXT, "rules", _framework),
        *(given(name, COUNT) for name in chosen),
        *([given("pp_schedule", TEXT, "schedule")] if has_schedules else []),
        *([given("cp_comm_type", TEXT, "cp by")] if exchanges else []),
        *([given("dispatch", TEXT)] if has_hops else []),
        given("dp", COUNT, words=_data_ranks),
        given("mbs", COUNT),
        given("recompute", TEXT, "ckpt"),
        given("step_s", NUMBER, "step", _step),
        given("tokens_per_s_gpu", NUMBER, "tok/s/GPU", _rate),
        given("mfu_pct", PERCENT, "MFU"),
        given("reserved_bytes", NUMBER, "GiB", _gibibytes),
        given("chance_faster", NUMBER, "win %", _chance),
        given("days", PERCENT),
        given("cost", NUMBER, words=_cost),
    ]
