"""Training in words: what is notable about a row."""

from collections.abc import Iterator

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
    return [*_doubts(row), *_slow_parts(row), *_unlike_others(row)]


def _doubts(row: Row) -> Iterator[str]:
    """Yield what speaks against the figures of a row."""
    if row["num_wrong"] and row["loss_falls"] is False:
        yield "wrong: the loss on text does not fall"
    elif row["num_wrong"]:
        yield f"wrong: {row['num_wrong']} losses are not finite"
    if row["interrupted"]:
        yield f"interrupted after {row['n']} samples; --resume measures the case again"
    if row["over_limit"]:
        yield "impossible: more FLOPs than the device can do"
    if row.get("validity"):
        yield f"doubtful: {row['validity']}"
    elapsed_s = number(row, "elapsed_s")
    uncounted_s = number(row, "uncounted_s") or 0.0
    if elapsed_s and abs(uncounted_s) > UNCOUNTED_SHARE * elapsed_s:
        direction = "less" if uncounted_s > 0 else "more"
        share = 100 * abs(uncounted_s) / elapsed_s
        passed = f"the {format_time(elapsed_s)} that passed by the host's clock"
        yield f"the samples add up to {share:.2g} % {direction} than {passed}"
    soak_s = number(row, "soak_s")
    if row["device"] != "cpu" and soak_s is not None and soak_s < SOAK_S:
        yield f"short soak {soak_s:.1f} s: the device may be cooler than in a long job"
    change = number(row, "drift_pct")
    if change is not None:
        against = "against the first half"
        yield f"not steady: samples of the second half take {change:+.1f} % {against}"


def _slow_parts(row: Row) -> Iterator[str]:
    """Yield what makes the step slower than it could be: memory, ranks, throttling, data."""
    if retries := number(row, "alloc_retries"):
        yield (
            f"memory ran out and its cache was flushed {retries:.0f} times: steps are slower"
        )
    reserved = number(row, "reserved_gib")
    total = number(row, "device_gib")
    if reserved and total and reserved >= NEAR_LIMIT * total:
        yield f"reserved memory is {100 * reserved / total:.0f} % of the device's"
    ratio = number(row, "vs_median_rank") or 0.0
    is_slow = ratio > SLOW_RANK and bool(row["is_straggler"])
    if is_slow:
        rank = row["slowest_rank"]
        yield f"straggler: rank {rank} takes {ratio:.3f} x the median rank's time"
    # Ranks that wait for each other end together: a slow forward names the rank.
    ratio = number(row, "fwd_vs_median_rank") or 0.0
    if ratio > SLOW_RANK and not (is_slow and row["slow_fwd_rank"] == row["slowest_rank"]):
        rank = row["slow_fwd_rank"]
        yield f"straggler: rank {rank}'s forward takes {ratio:.3f} x the median's"
    if row["throttle"]:
        yield f"throttled: {row['throttle']}"
    wait_s = number(row, "data_s") or 0.0
    time_s = number(row, "time_s") or 0.0
    if wait_s > DATA_SHARE * time_s:
        share = 100 * wait_s / time_s
        yield f"the host waits {format_time(wait_s)} for a batch, {share:.0f} % of a sample"


def _unlike_others(row: Row) -> Iterator[str]:
    """Yield what else to know of a row before it is compared: compilation, cycles, peaks."""
    if reason := row.get("compile_failed"):
        yield f"ran without torch.compile, which failed: {reason}"
    kinds = {"recompiles": "recompiles after the first sample", "graph_breaks": "graph breaks"}
    counts = ((number(row, key), what) for key, what in kinds.items())
    if compiled := ", ".join(f"{count:.0f} {what}" for count, what in counts if count):
        yield compiled
    cycle = number(row, "cycle") or 1
    if cycle != 1 and row["whole_cycles"]:
        yield f"1 of {cycle:.0f} samples has the optimizer; rates are of whole cycles"
    elif cycle != 1:
        yield f"no rate: fewer samples than from one optimizer step to the next ({cycle:.0f})"
    # Conventions may be above the peak where they count FLOPs that are not executed.
    shares = {"torchtitan": "mfu_torchtitan_pct", "palm-all": "mfu_palm_all_pct"}
    if above := [name for name, key in shares.items() if (number(row, key) or 0.0) > 100]:
        yield f"above the peak by convention (nominal): {', '.join(above)}"
