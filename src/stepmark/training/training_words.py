"""Training in words: what is notable about a row."""

from collections.abc import Callable

from stepmark.cases.case import SOAK_S
from stepmark.ground.units import format_time
from stepmark.tables.columns import Row, number, text


def title(row: Row) -> str:
    """Return the case of a row in one line."""
    scale = f" (scaled {row['scale']})" if row["scale"] else ""
    part = f" (calibration: {row['calibrates']})" if row.get("calibrates") else ""
    return f"{text(row, 'model')}{scale} {text(row, 'shape')}{part}"


# A rank this much slower than the median rank gets a remark.
SLOW_RANK = 1.03
# Waiting for the batch for more than this share of a sample gets a remark, too.
DATA_SHARE = 0.01
# So does a share of the time that is in no sample.
UNCOUNTED_SHARE = 1e-3
# Reserved memory this close to all of it: one more fragment and the allocator retries.
NEAR_LIMIT = 0.95


def remarks(row: Row) -> list[str]:
    """Return one finding per line, the gravest first; none for a row without samples."""
    if number(row, "time_s") is None:
        return []
    return [line for remark in _REMARKS if (line := remark(row))]


def _wrong(row: Row) -> str:
    if row["loss_falls"] is False and row["num_wrong"]:
        return "wrong: the loss on text does not fall"
    return f"wrong: {row['num_wrong']} losses are not finite" if row["num_wrong"] else ""


def _interrupted(row: Row) -> str:
    text = f"interrupted after {row['n']} samples; --resume measures the case again"
    return text if row["interrupted"] else ""


def _over_limit(row: Row) -> str:
    return "impossible: more FLOPs than the device can do" if row["over_limit"] else ""


def _validity(row: Row) -> str:
    return f"doubtful: {row['validity']}" if row.get("validity") else ""


def _uncounted(row: Row) -> str:
    elapsed_s, uncounted_s = number(row, "elapsed_s"), number(row, "uncounted_s") or 0.0
    if not elapsed_s or abs(uncounted_s) <= UNCOUNTED_SHARE * elapsed_s:
        return ""
    less = "less" if uncounted_s > 0 else "more"
    share = 100 * abs(uncounted_s) / elapsed_s
    passed = f"the {format_time(elapsed_s)} that passed by the host's clock"
    return f"the samples add up to {share:.2g} % {less} than {passed}"


def _short_soak(row: Row) -> str:
    soak_s = number(row, "soak_s")
    if row["device"] == "cpu" or soak_s is None or soak_s >= SOAK_S:
        return ""
    return f"short soak {soak_s:.1f} s: the device may be cooler than in a long job"


def _drift(row: Row) -> str:
    change = number(row, "drift_pct")
    text = "not steady: samples of the second half take {:+.1f} % against the first half"
    return "" if change is None else text.format(change)


def _retries(row: Row) -> str:
    count = number(row, "alloc_retries")
    text = f"memory ran out and its cache was flushed {count or 0:.0f} times: steps are slower"
    return text if count else ""


def _near_limit(row: Row) -> str:
    reserved, total = number(row, "reserved_gib"), number(row, "memory_gib")
    if not reserved or not total or reserved < NEAR_LIMIT * total:
        return ""
    return f"reserved memory is {100 * reserved / total:.0f} % of the device's"


def _slow_rank(row: Row) -> str:
    ratio = number(row, "vs_median_rank") or 0.0
    if ratio <= SLOW_RANK or not row["is_straggler"]:
        return ""
    return f"straggler: rank {row['slowest_rank']} takes {ratio:.3f} x the median rank's time"


def _slow_forward(row: Row) -> str:
    """Name the rank with a slow forward: ranks that wait for each other end together."""
    ratio = number(row, "fwd_vs_median_rank") or 0.0
    if ratio <= SLOW_RANK or (row["slow_fwd_rank"] == row["slowest_rank"] and _slow_rank(row)):
        return ""
    return f"straggler: rank {row['slow_fwd_rank']}'s forward takes {ratio:.3f} x the median's"


def _throttled(row: Row) -> str:
    return f"throttled: {row['throttle']}" if row["throttle"] else ""


def _data(row: Row) -> str:
    wait_s, time_s = number(row, "data_s") or 0.0, number(row, "time_s") or 0.0
    if wait_s <= DATA_SHARE * time_s:
        return ""
    share = 100 * wait_s / time_s
    return f"the host waits {format_time(wait_s)} for a batch, {share:.0f} % of a sample"


def _compile_failed(row: Row) -> str:
    reason = row.get("compile_failed")
    return f"ran without torch.compile, which failed: {reason}" if reason else ""


def _recompiled(row: Row) -> str:
    kinds = {"recompiles": "recompiles after the first sample", "graph_breaks": "graph breaks"}
    counts = ((number(row, key), what) for key, what in kinds.items())
    return ", ".join(f"{count:.0f} {what}" for count, what in counts if count)


def _cycle(row: Row) -> str:
    cycle = number(row, "cycle") or 1
    if cycle == 1:
        return ""
    if not row["whole_cycles"]:
        return f"no rate: fewer samples than from one optimizer step to the next ({cycle:.0f})"
    return f"1 of {cycle:.0f} samples has the optimizer; rates are of whole cycles"


def _nominal(row: Row) -> str:
    """Name conventions above the peak, as those that count unexecuted FLOPs may be."""
    shares = {"torchtitan": "mfu_torchtitan_pct", "palm-all": "mfu_palm_all_pct"}
    above = [name for name, key in shares.items() if (number(row, key) or 0.0) > 100]
    return f"above the peak by convention (nominal): {', '.join(above)}" if above else ""


_REMARKS: tuple[Callable[[Row], str], ...] = (
    *(_wrong, _interrupted, _over_limit, _validity, _uncounted, _short_soak, _drift),
    *(_retries, _near_limit),
    *(_slow_rank, _slow_forward, _throttled, _data, _compile_failed, _recompiled),
    *(_cycle, _nominal),
)
