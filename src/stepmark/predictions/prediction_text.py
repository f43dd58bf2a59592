"""What a prediction says, as text: the answer first, then what it rests on."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from stepmark.ground.units import format_bytes, format_time, ranks_text, with_one_unit
from stepmark.model.model_tables import params_text
from stepmark.predictions import measured_step
from stepmark.predictions.interval import Interval
from stepmark.predictions.note import MOST_NOTES, note_lines, topic_of
from stepmark.predictions.prediction import HOST, Prediction
from stepmark.predictions.training_run import run_text
from stepmark.tables.columns import BYTES, MS, NO_HEADING, PERCENT, digits, given
from stepmark.tables.table import Table
from stepmark.timeline.ledger import TRANSFER, Ledger
from stepmark.timeline.ledger_rows import lines_of_one
from stepmark.timeline.ledger_text import differences

_LEAST_SHARE_PCT = 5.0  # of the step that the sentence on its limit names
_WIDTH = 160  # columns of a line of the answer
_MOST_ROWS = 12  # of anchors with their errors
_ALIKE = 0.01  # of the step, by which no line of stages that are alike differs


def lines(
    prediction: Prediction,
    document: Mapping[str, Any],
    *,
    all_stages: bool = False,
    all_notes: bool = False,
) -> Iterator[str]:
    """Yield the prediction as text, the answer first. document: of the prediction.

    all_stages: with the ledger and the memory of every stage, line by line.
    """
    pairs = dict(headline(document))
    yield from in_width(answer(prediction, document), "    ")
    yield from in_width(f"  {', '.join(_assumptions(prediction, document))}", "    ")
    others = ("communication", "pipeline", "power", "energy")
    figures = [pairs[name] for name in others if name in pairs]
    if "HFU" in pairs:
        figures.insert(0, f"{pairs['HFU']} HFU")
    if "throughput" in pairs and document["num_ranks"] > 1:
        figures.insert(0, f"{pairs['throughput']} in all")
    if figures:
        yield from in_width(f"  {', '.join(figures)}", "    ")
    if document["anchors"]:
        yield from anchor_lines(document["anchors"])
    if "training" in pairs:
        yield f"  training: {pairs['training']}"
    if document["measured"]:
        yield from measured_step.lines(document["measured"])
    yield ""
    yield from _slowest_stage(prediction.ledgers, prediction.step.slowest)
    if all_stages:
        yield from ("", *ledger_lines(document))
    if "memory" in pairs:
        yield ""
        memory = _memory(document["memory"], _purposes(document["memory"]))
        yield from in_width(f"memory: {memory}", "  ")
    if all_stages and (table := list(memory_lines(document))):
        yield from ("", *table)
    notes = [f"note: {note}" for note in sorted(document["notes"], key=topic_of)]
    if notes:
        yield ""
    yield from note_lines(notes, None if all_notes else MOST_NOTES, "--notes")


def answer(prediction: Prediction, document: Mapping[str, Any]) -> str:
    """Return the step, the rate of a rank, whether it fits, and what bounds it."""
    rank = "rank" if prediction.inputs.is_on_cpu else "GPU"
    least, most = ("at least ", "at most ") if document["is_lower_bound"] else ("", "")
    where = f"{document['num_ranks']} x {document['device']}"
    step = f"predicted step {least}{format_time(document['step_s'])}"
    words = [f"{document['name']} on {where}: {step}"]
    if document["measured"]:
        words += [measured_step.headline(document["measured"])]
    if document["tokens_per_s_gpu"]:
        words += [f"{most}{_rate(document['tokens_per_s_gpu'])} tokens/s/{rank}"]
    if document["mfu_pct"] is not None:
        words += [f"{most}{document['mfu_pct']:.1f} % MFU (causal)"]
    if memory := document["memory"]:
        num_bytes = memory["reserved_bytes"] or memory["allocated_bytes"]
        kind = "reserved" if memory["reserved_bytes"] else "allocated"
        if cache_bytes := _cache_bytes(memory):
            sizes = f"{format_bytes(memory['allocated_bytes'])} allocated"
            sizes += f" and {format_bytes(cache_bytes)} of cache"
            words += [f"may not fit ({sizes}; {format_bytes(memory['device_bytes'])} in all)"]
        else:
            words += [fit_text(memory["verdict"], num_bytes, memory["device_bytes"], kind)]
    return ", ".join([*words, limit_text(document)])


def _cache_bytes(memory: Mapping[str, Any]) -> int:
    """Return the bytes that are reserved and not allocated, where they exceed the device.

    0 where all that is reserved fits, or where not even what is allocated does.
    """
    reserved = memory["reserved_bytes"] or 0
    if memory["verdict"] != "close" or reserved <= memory["device_bytes"]:
        return 0
    return int(reserved - memory["allocated_bytes"])


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else digits(value)


def fit_text(
    verdict: str, num_bytes: int, device_bytes: int | None, kind: str = "reserved"
) -> str:
    """Return whether the fullest rank fits, with its bytes. kind: what these are."""
    if device_bytes is None:
        return f"{format_bytes(num_bytes)} {kind}"
    words = {"fits": "fits", "close": "may not fit", "does not fit": "DOES NOT FIT"}
    sizes = with_one_unit(format_bytes(num_bytes), "of", format_bytes(device_bytes))
    if verdict == "does not fit" and num_bytes <= device_bytes:
        kind += "; CUDA and NCCL need more"
    return f"{words[verdict]} ({sizes} {kind})"


def _assumptions(prediction: Prediction, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the times are by, then the step that they are of."""
    inputs = prediction.inputs
    if inputs.times_of_file:
        yield "by the file's own times"
    elif inputs.calibration:
        yield f"by calibration {inputs.calibration} of {inputs.calibrated_on}"
    elif inputs.device:
        yield f"by data sheet of {inputs.device.key}"
    if inputs.host:
        yield inputs.host
    elif not inputs.host_is_known:
        yield "host not known"
    if document["network"]:
        name, _, about = document["network"].partition(": ")
        yield f"network {name} ({about})" if about else f"network {name}"
    if prediction.interval and prediction.interval.is_known:
        yield str(prediction.interval)
    if model := inputs.workload.model:
        yield params_text(model)
        if moe := model.moe:
            imbalance = inputs.workload.settings.get("imbalance")
            load = f"imbalance {imbalance:g}" if imbalance else "even routing"
            yield f"top {moe.top_k} of {moe.num_experts} experts ({load})"
    if document["tokens"]:
        yield f"{document['tokens']:,} tokens a step"
        yield from _shape_words(document)


def in_width(line: str, indent: str) -> Iterator[str]:
    """Yield a line, broken at commas where it is too long."""
    while len(line) > _WIDTH and (place := line.rfind(", ", len(indent), _WIDTH)) > 0:
        yield line[: place + 1]
        line = indent + line[place + 2 :]
    yield line


def _slowest_stage(ledgers: Sequence[Ledger], place: int) -> Iterator[str]:
    """Yield the ledger of the stage that the figures are of, and which stages are alike."""
    slowest = ledgers[place]
    where = ""
    if len(ledgers) > 1:
        alike = [stage for stage, own in enumerate(ledgers) if _is_alike(own, slowest)]
        stages = ranks_text(alike).replace("rank", "stage")
        where = f" in {stages}, the slowest of {len(ledgers)}"
        if len(alike) == len(ledgers):
            where = " in each stage"
    yield from lines_of_one(slowest, where)


def _is_alike(one: Ledger, other: Ledger) -> bool:
    most_ns = _ALIKE * other.window_ns
    return all(abs(each.ns) <= most_ns for each in differences(one, other))


def step_text(document: Mapping[str, Any]) -> str:
    """Return the tokens of the optimizer step, and how they are computed."""
    if not document["tokens"]:
        return ""
    return ", ".join([f"{document['tokens']:,} tokens", *_shape_words(document)])


def _shape_words(document: Mapping[str, Any]) -> Iterator[str]:
    if document["mbs"]:
        yield f"mbs {document['mbs']}"
    yield f"seq {document['seq_len']}"
    if document["techniques"]:
        yield document["techniques"]


def anchor_lines(anchored: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was fitted to measured steps, and how far it is off for others."""
    factors: Mapping[str, float] = anchored["factors"]
    names = [f"{part} {factor:.3g}" for part, factor in factors.items()]
    if len(set(factors.values())) == 1:
        names = [f"{next(iter(factors.values())):.3g}"]
    yield f"  factors on costs: {', '.join(names) or 'none'} ({anchored['model']})"
    error = f"{anchored['error_pct']:.1f} %"
    left_out = f"{anchored['left_out_error_pct']:.1f} % by factors of the other steps"
    source = f"{len(anchored['rows'])} steps of {anchored['source']}"
    yield f"  anchors: {source}, median error {error}, {left_out}"
    yield from in_width(f"  {_anchor_errors(anchored['rows'])}", "    ")
    for note in anchored["notes"]:
        yield f"  note: {note}"


def _anchor_errors(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the errors of anchors by factors of the others, the largest first."""
    errors = [(row["name"], 100 * (row["left_out_s"] / row["measured_s"] - 1)) for row in rows]
    largest_first = sorted(errors, key=lambda item: -abs(item[1]))
    words = [f"{name} {error:+.1f} %" for name, error in largest_first]
    more = f", and {len(words) - _MOST_ROWS} smaller ones" if words[_MOST_ROWS:] else ""
    return f"errors: {', '.join(words[:_MOST_ROWS])}{more}"


_STAGE = given("stage")
LEDGER_COLUMNS = (
    given("time_ns", MS, "ms"),
    given("share_pct", PERCENT, "%"),
    _STAGE,
    given("group", heading="ledger"),
    given("line", heading=NO_HEADING),
)


def ledger_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ledger of each stage as a table, with parts of its lines."""
    table: list[dict[str, Any]] = [*document["ledger"]]
    step_ns = document["step_s"] * 1e9
    for row in document["ledger_parts"]:  # after the lines of their stage
        if row["part"] == TRANSFER:  # the rest of exposed communication
            continue
        share_pct = 100 * row["time_ns"] / step_ns
        table.append({**row, "group": "of which", "line": row["part"], "share_pct": share_pct})
    has_stages = any(row["stage"] for row in table)
    columns = [c for c in LEDGER_COLUMNS if has_stages or c is not _STAGE]
    yield from Table(sorted(table, key=itemgetter("stage")), columns).text()


def headline(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results with their titles, those that are known."""
    least, most = ("at least ", "at most ") if document["is_lower_bound"] else ("", "")
    interval = document["interval"]
    around = Interval(**interval) if interval else None
    step = f"{least}{format_time(document['step_s'])}"
    yield "predicted step", f"{step}, {around}" if around and around.is_known else step
    if document["tokens_per_s"]:
        yield "throughput", f"{most}{document['tokens_per_s']:,.0f} tokens/s"
    if document["mfu_pct"] is not None:
        yield "MFU", f"{most}{document['mfu_pct']:.1f} % (causal)"
    if document["hfu_pct"] is not None and document["hfu_pct"] != document["mfu_pct"]:
        yield "HFU", f"{most}{document['hfu_pct']:.1f} %"
    yield "limit", limit_text(document)
    if document["comm_s"]:
        exposed = document["exposed_comm_s"]
        comm = document["comm_s"]
        text = f"{comm * 1e3:.1f} ms of communication, {exposed * 1e3:.1f} ms exposed"
        if document["contention_s"]:
            text += f", {document['contention_s'] * 1e3:.1f} ms of contention"
        yield "communication", text
    if document["bubble_s"]:
        yield "pipeline", f"{document['bubble_s'] * 1e3:.1f} ms of pipeline bubble"
    if document["power_w"] is not None:
        yield "power", f"{document['power_w']:.0f} W at {document['clock_hz'] / 1e6:.0f} MHz"
    if document["energy_per_token_j"]:
        yield "energy", f"{document['energy_per_token_j'] * 1e3:.1f} mJ per token"
    if document["memory"]:
        yield "memory", _memory(document["memory"])
    if document["run_tokens"]:
        yield "training", run_text(document)


def limit(document: Mapping[str, Any]) -> str:
    """Return what the step waits for most; the host comes first where it is late."""
    if document["bound"] == "host":
        return HOST
    return next(iter(document["shares_pct"]), "computation")


def limit_text(document: Mapping[str, Any]) -> str:
    """Return what the step waits for, with shares; the host comes first where it is late."""
    shares: dict[str, float] = {**document["shares_pct"]}
    first = limit(document)
    idle = "device idle " if first == HOST else ""
    words = [f"{first} ({idle}{shares.pop(first, 0.0):.1f} % of the step)"]
    words += (f"{n} ({pct:.1f} %)" for n, pct in shares.items() if pct >= _LEAST_SHARE_PCT)
    condition = "" if document["host_is_known"] else " if the host keeps up"
    first_ones = f"{', '.join(words[:-1])} and " if words[1:] else ""
    return f"bound by {first_ones}{words[-1]}{condition}"


def _memory(memory: Mapping[str, Any], purposes: str = "") -> str:
    """Return the predicted memory and whether it fits. purposes: of what is allocated."""
    text = f"{format_bytes(memory['allocated_bytes'])} allocated{purposes}"
    if memory["reserved_bytes"]:
        text += f", {format_bytes(memory['reserved_bytes'])} reserved"
    if len(memory["stages"]) > 1:
        text += f" on stage {memory['stages'][0]['stage']}"
    if memory["device_bytes"] is None:
        return f"{text}; that of the device is unknown"
    device = format_bytes(memory["device_bytes"])
    verdicts = {"fits": "fits into", "close": "close to", "does not fit": "DOES NOT FIT into"}
    if _cache_bytes(memory):
        text += f": at risk, the allocator frees its cache to stay within {device}"
    else:
        text += f", {verdicts[memory['verdict']]} {device}"
    return f"{text}; it would fit with {memory['fitting']}" if memory["fitting"] else text


def _purposes(memory: Mapping[str, Any]) -> str:
    """Return what the memory of the fullest stage is for, the largest first."""
    stage: Mapping[str, int] = memory["stages"][0] if memory["stages"] else {}
    sizes = {name: count for name, count in stage.items() if name != "stage" and count}
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    words = (f"{name} {format_bytes(count)}" for name, count in largest_first)
    return f" ({', '.join(words)})" if sizes else ""


def memory_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the memory of each stage by purpose as a table, the fullest first."""
    memory = document["memory"]
    if not memory or not memory["stages"]:
        return
    rows = [
        {"stage": row["stage"], "total": sum(row.values()) - row["stage"], **row}
        for row in memory["stages"]
    ]
    kinds = [name for name in rows[0] if name != "stage" and any(row[name] for row in rows)]
    columns = [given(name, BYTES) for name in kinds]
    yield from Table(rows, [_STAGE, *columns] if len(rows) > 1 else columns).text()
