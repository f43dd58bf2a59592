"""What `stepmark plan` prints: the best layout, what was searched, rows, and why it is best."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from stepmark.ground.units import format_time
from stepmark.layouts.candidate import PLAIN, place
from stepmark.layouts.layout_search import LayoutSearch
from stepmark.layouts.layout_work import Simulated
from stepmark.layouts.plan_options import ALL_TO_ALL, EXCHANGES, PlanOptions
from stepmark.predictions.interval import Interval
from stepmark.predictions.prediction_grid import Row, gibibytes, step_text, whole
from stepmark.predictions.prediction_text import anchor_lines, fit_text, limit_text
from stepmark.tables.columns import COUNT, NUMBER, PERCENT, TEXT, Column, given
from stepmark.tables.table import Table

FRAMEWORKS = {"megatron": "Megatron", "pytorch": "PyTorch"}
_RARE = ("vpp", "cp", "ep")  # axes
_UNNAMED = {"cp_comm_type": EXCHANGES[0], "dispatch": ALL_TO_ALL}  # where a row has no word
_GATHERS = (
    "predict without --overlap-param-gather, too: with it, each stage gathers its parameters "
    "when its first micro-batch arrives, one stage after the other"
)
_MOST_REASONS = 4
_MOST_SMALLER = 3
_TIE = 0.4  # chance of being faster than the first, from which a layout is worth a measurement


def lines_of_count(options: PlanOptions, result: LayoutSearch) -> Iterator[str]:
    """Yield the answer for one number of GPUs."""
    best = result.rows[0]
    where = f"{best['name']} on {result.cluster.num_gpus} {options.device}"
    yield f"{where}: {place(best)}{_against_measured(result)}"
    yield f"  {_figures(result.best, result.cluster.device.hbm_bytes)}"
    yield f"  {_assumed(options, result)}"
    yield f"  {_searched(result)}"
    yield f"  {result.command}"
    yield ""
    shown = result.rows[: options.top]
    yield from Table(shown, columns(shown)).text()
    yield from _refused_splits(result.simulated[: options.top])
    yield from _why(result)
    if result.cluster.anchored:
        yield from anchor_lines(result.cluster.anchored.document())


def _against_measured(result: LayoutSearch) -> str:
    """Return whether the best was measured, where layouts were."""
    measured = result.best_measured
    if measured is None:
        return ""
    if measured is result.best:
        return f", measured: {format_time(measured.time_s)}; no other is predicted to be faster"
    return f", not measured yet; the fastest measured takes {format_time(measured.time_s)}"


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
        f"{packed}, {options.precision or 'bf16'}, {options.memory:.0%} of the memory"
        f"{_interval(result.best)}"
    )


def _interval(best: Simulated) -> str:
    around = best.figures["interval"]
    return f", {Interval(**around)}" if around else ""


def lines_of_counts(searches: Sequence[LayoutSearch]) -> Iterator[str]:
    """Yield the best layout for each number of GPUs, and how many are worth it."""
    rows = [each.rows[0] for each in searches]
    most = max(row["tokens_per_s_gpu"] for row in rows)
    yield f"{rows[0]['name']}: the fastest layout for each number of GPUs, with the same batch"
    yield ""
    yield from Table(rows, columns(rows)).text()
    yield from _refused_splits([each.best for each in searches])
    rates = [
        (row["tokens_per_s_gpu"], each.best) for row, each in zip(rows, searches, strict=True)
    ]
    last = [best for rate, best in rates if rate >= _WORTH * most][-1]
    num_gpus = last.row["gpus"]
    text = f"up to {num_gpus} GPUs each does at least {_WORTH:.0%} of the best tokens/s"
    later = [each.best for each in searches if each.best.row["gpus"] > num_gpus]
    if later:
        name, more_s = _largest(later[0], last, per_gpu=True)
        text += f"; with {later[0].row['gpus']} more of their time goes to {name}"
        text += f" ({more_s:+.1%} of the step)"
    for each in searches:
        bounds = f"{limit_text(each.best.figures)}{_interval(each.best)}"
        yield f"{each.cluster.num_gpus} GPUs: {bounds}{_against_measured(each)}"
        yield f"  {each.command}"
    yield text


_WORTH = 0.8


def _refused_splits(layouts: Sequence[Simulated]) -> Iterator[str]:
    """Yield the divisions of layers that Megatron-LM takes by an option alone."""
    notes = dict.fromkeys(note for each in layouts for note in each.notes)
    yield from (f"note: {note}" for note in notes if "Megatron-LM refuses" in note)


def _figures(best: Simulated, device_bytes: int | None) -> str:
    """Return the step, its rate, whether it fits, and what most of it is."""
    row = best.row
    figures = [f"step {format_time(row['step_s'])}"]
    figures += [f"{row['tokens_per_s_gpu']:,.0f} tokens/s/GPU"]
    if row["mfu_pct"] is not None:
        figures += [f"{row['mfu_pct']:.1f} % MFU (causal)"]
    figures += [
        fit_text(row["verdict"], row["reserved_bytes"], device_bytes),
        limit_text(best.figures),
    ]
    if row["days"] is not None:
        figures += [f"{row['days']:,.1f} days"]
    if row["cost"] is not None:
        figures += [f"cost {row['cost']:,.0f}"]
    return ", ".join(figures)


def _searched(result: LayoutSearch) -> str:
    error = max(abs(row["estimated_s"] / row["step_s"] - 1) for row in result.rows)
    most_cp = max(each.candidate.parallel.cp for each in result.estimates)
    cp = "" if result.cluster.options.cp else f" (cp at most {most_cp}, more by --cp)"
    text = (
        f"searched {result.num_layouts:,} layouts in {result.took_s:.0f} s{cp}: "
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
    if best["framework"] == "megatron" and best["pp"] > best["vpp"] == 1:
        yield _GATHERS
    smaller = [row for row in result.rows[1:] if row["is_pareto"]]
    for row in smaller[:_MOST_SMALLER]:
        yield f"{gibibytes(row)} GiB: {place(row)}, {_change(row, best)}"
    slower = sorted(result.neighbours.items(), key=lambda item: -item[1].row["step_s"])
    for axis, each in slower[:_MOST_REASONS]:
        row = each.row
        name, more = _largest(each, result.best)
        values = " instead of ".join(str(own[axis] or _UNNAMED[axis]) for own in (row, best))
        text = f"{axis} {values}"
        if axis == "framework":  # whose fastest layout differs in more
            text = place(row)
        change = f"{_change(row, best)}, of which {name} {more:+.1%}"
        yield f"{text}: {change}; {gibibytes(row)} GiB"


def _change(row: Row, best: Row) -> str:
    return f"{row['step_s'] / best['step_s'] - 1:+.1%} of the step"


def _largest(other: Simulated, best: Simulated, *, per_gpu: bool = False) -> tuple[str, float]:
    """Return the part that differs the most, and by what share of the best step."""
    best_s = best.row["step_s"]
    before = parts_s(best)
    scale = best_s / other.row["step_s"] if per_gpu else 1.0
    more = {name: scale * own - before.get(name, 0.0) for name, own in parts_s(other).items()}
    name = max(more, key=more.__getitem__)
    return name, more[name] / best_s


def parts_s(each: Simulated) -> Mapping[str, float]:
    """Return what the step waits for, with contention apart from the computation it slows."""
    figures = each.figures
    whole_s = figures["step_s"] / 100
    parts = {name: pct * whole_s for name, pct in figures["shares_pct"].items()}
    parts["computation"] -= figures["contention_s"]
    return {**parts, "contention": figures["contention_s"]}


def _optional(name: str, shown: Callable[[float], str]) -> Callable[[Row], str]:
    """Return what shows a value that some rows lack."""
    return lambda row: "" if row[name] is None else shown(row[name]).removesuffix("%")


def _data_ranks(row: Row) -> str:
    """Return the data ranks, as replicas x shards where there are such."""
    replicas = row["dp_replicate"]
    return f"{replicas}x{row['dp'] // replicas}" if replicas > 1 else str(row["dp"])


def columns(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns of these layouts, without axes that none of them has."""
    chosen = ["tp", "pp"] + [name for name in _RARE if any(row[name] > 1 for row in rows)]
    exchanges = any(row["cp_comm_type"] for row in rows)
    several = len({row["gpus"] for row in rows}) > 1
    has_schedules = any(row["pp_schedule"] != PLAIN for row in rows)
    has_hops = any(row["dispatch"] for row in rows)
    return [
        *([given("gpus", COUNT, "GPUs")] if several else []),
        given("framework", TEXT, "rules", lambda row: FRAMEWORKS[str(row["framework"])]),
        *(given(name, COUNT) for name in chosen),
        *([given("pp_schedule", TEXT, "schedule")] if has_schedules else []),
        *([given("cp_comm_type", TEXT, "cp by")] if exchanges else []),
        *([given("dispatch", TEXT)] if has_hops else []),
        given("dp", COUNT, words=_data_ranks),
        given("mbs", COUNT),
        given("recompute", TEXT, "ckpt"),
        given("step_s", NUMBER, "step", step_text),
        given("measured_s", NUMBER, "measured", _optional("measured_s", format_time)),
        given("tokens_per_s_gpu", NUMBER, "tok/s/GPU", whole("tokens_per_s_gpu")),
        given("mfu_pct", PERCENT, "MFU"),
        given("reserved_bytes", NUMBER, "GiB", gibibytes),
        given("chance_faster", NUMBER, "win %", _optional("chance_faster", "{:.0%}".format)),
        given("days", PERCENT),
        given("cost", NUMBER, words=whole("cost")),
    ]
