"""What a row of training says beyond its figures: can it be trusted, what does it wait for."""

from stepmark.core.columns import Row, number, text
from stepmark.core.units import format_time

# A rank this much slower than the median rank is worth a line.
SLOW_RANK = 1.03
# A share of a sample spent on waiting for its batch.
DATA_SHARE = 0.01
# Reserved memory this close to all of it: one more fragment and the allocator retries.
NEAR_LIMIT = 0.95


def remarks(row: Row) -> list[str]:
    """One finding per line, the gravest first; none of a row without samples."""
    if number(row, "time_s") is None:
        return []
    said = (
        *(
            _wrong(row),
            _interrupted(row),
            _above_limit(row),
            _drifts(row),
            _retries(row),
            _near_limit(row),
        ),
        *(_slow_rank(row), _slow_forward(row), _throttled(row), _data(row)),
        *(_compile_failed(row), _recompiled(row), _cycle(row), _nominal(row)),
    )
    return [line for line in said if line]


def _wrong(row: Row) -> str:
    if not number(row, "num_wrong"):
        return ""
    if row["loss_falls"] is False:
        return "wrong: the loss on text does not fall"
    return f"wrong: {row['num_wrong']} losses are not finite"


def _interrupted(row: Row) -> str:
    return f"interrupted: {row['n']} samples so far; --resume measures anew" * bool(
        row["interrupted"]
    )


def _above_limit(row: Row) -> str:
    return "impossible: more FLOPs than the device can do" if row["over_limit"] else ""


def _drifts(row: Row) -> str:
    change = number(row, "drift_pct")
    if change is None:
        return ""
    return f"not steady: the second half of the samples takes {change:+.1f} % against the first"


def _retries(row: Row) -> str:
    count = number(row, "alloc_retries")
    if not count:
        return ""
    return f"memory ran out and its cache was flushed {count:.0f} times: times suffer"


def _near_limit(row: Row) -> str:
    reserved, whole = number(row, "reserved_gib"), number(row, "memory_gib")
    if not reserved or not whole or reserved < NEAR_LIMIT * whole:
        return ""
    return f"reserved memory is {100 * reserved / whole:.0f} % of the device's"


def _slow_rank(row: Row) -> str:
    ratio = number(row, "vs_median_rank") or 0.0
    if ratio <= SLOW_RANK or not row["is_straggler"]:
        return ""
    return f"straggler: rank {row['slowest_rank']} takes {ratio:.3f} x the median rank's time"


def _slow_forward(row: Row) -> str:
    """Ranks that wait for each other end together: only what runs before the wait tells."""
    ratio = number(row, "fwd_vs_median_rank") or 0.0
    if ratio <= SLOW_RANK or (row["slow_fwd_rank"] == row["slowest_rank"] and _slow_rank(row)):
        return ""
    return f"straggler: rank {row['slow_fwd_rank']}'s forward takes {ratio:.3f} x the median's"


def _throttled(row: Row) -> str:
    return f"throttled: {row['throttle']}" if row["throttle"] else ""


def _data(row: Row) -> str:
    wait, time_s = number(row, "data_s") or 0.0, number(row, "time_s") or 0.0
    if wait <= DATA_SHARE * time_s:
        return ""
    share = 100 * wait / time_s
    return f"the host waits {format_time(wait)} for a batch, {share:.0f} % of a sample"


def _compile_failed(row: Row) -> str:
    why = row.get("compile_failed")
    return f"ran without torch.compile, which failed: {why}" if why else ""


def _recompiled(row: Row) -> str:
    words = []
    if count := number(row, "recompiles"):
        words.append(f"{count:.0f} recompiles after the first sample")
    if count := number(row, "graph_breaks"):
        words.append(f"{count:.0f} graph breaks")
    return ", ".join(words)


def _cycle(row: Row) -> str:
    cycle = number(row, "cycle") or 1
    if cycle == 1:
        return ""
    if not row["whole_cycles"]:
        return f"no rate: fewer samples than from one optimizer step to the next ({cycle:.0f})"
    return f"the optimizer is in 1 of {cycle:.0f} samples; rates are of whole cycles"


def _nominal(row: Row) -> str:
    """Conventions that count what is not executed may pass the peak."""
    above = [
        name
        for name, key in (
            ("torchtitan", "mfu_torchtitan_pct"),
            ("palm-all", "mfu_palm_all_pct"),
        )
        if (number(row, key) or 0.0) > 100
    ]
    return f"above the peak by convention (nominal): {', '.join(above)}" if above else ""


def title(row: Row) -> str:
    """The case in one line."""
    scale = f" (scaled {row['scale']})" if row["scale"] else ""
    return f"{text(row, 'model')}{scale} {text(row, 'shape')}"
