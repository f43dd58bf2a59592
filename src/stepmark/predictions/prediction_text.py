"""What a prediction says, as text, from its document."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from stepmark.ground.units import format_bytes
from stepmark.predictions import measured_step
from stepmark.predictions.interval import Interval
from stepmark.predictions.prediction import HOST
from stepmark.predictions.training_run import run_text
from stepmark.tables.columns import BYTES, MS, NO_HEADING, PERCENT, given
from stepmark.tables.table import Table
from stepmark.timeline.ledger import TRANSFER, WAITING

_MOST_STAGES = 4  # that are all printed
_LEAST_SHARE_PCT = 5.0  # of the step that the sentence on its limit names


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the prediction as text. document: of Prediction."""
    where = f"{document['num_ranks']} x {document['device']}"
    pairs = dict(headline(document))
    answer = pairs.pop("predicted step") + _host_bound(document)
    first = f"{document['name']} on {where}: predicted step {answer}"
    measured = document["measured"]
    yield f"{first}{measured_step.headline(measured)}" if measured else first
    if step := step_text(document):
        yield f"  step: {step}"
    memory = pairs.pop("memory", "")
    training = pairs.pop("training", "")
    yield "  " + ", ".join(pairs.values())
    if document["network"]:
        yield f"  network: {document['network']}"
    if memory:
        yield f"  memory: {memory}"
    if document["anchors"]:
        yield from anchor_lines(document["anchors"])
    if training:
        yield f"  training: {training}"
    if measured:
        yield from measured_step.lines(measured)
    yield ""
    yield from ledger_lines(document)
    if table := list(memory_lines(document)):
        yield from ("", *table, "")
    yield from (f"note: {note}" for note in document["notes"])


def _host_bound(document: Mapping[str, Any]) -> str:
    """Return that the host bounds the step, where it does, and for what the device waits."""
    if document["bound"] != "host":
        return ""
    waits_pct = document["shares_pct"].get(HOST, 0.0)
    return f", bound by the host: the device waits for launches in {waits_pct:.0f} % of it"


def step_text(document: Mapping[str, Any]) -> str:
    """Return the tokens of the optimizer step, and how they are computed."""
    if not document["tokens"]:
        return ""
    words = [f"{document['tokens']:,} tokens"]
    words += [f"mbs {document['mbs']}"] if document["mbs"] else []
    words += [f"seq {document['seq_len']}", document["techniques"]]
    return ", ".join(filter(None, words))


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


_STAGE = given("stage")
LEDGER_COLUMNS = (
    given("time_ns", MS, "ms"),
    given("share_pct", PERCENT, "%"),
    _STAGE,
    given("group", heading="ledger"),
    given("line", heading=NO_HEADING),
)


def ledger_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ledger of each stage as a table; of many stages those that differ most."""
    table: list[dict[str, Any]] = [*document["ledger"]]
    waiting_ns = dict.fromkeys((row["stage"] for row in table), 0)
    shown = set(waiting_ns)
    num_stages = len(waiting_ns)
    if num_stages > _MOST_STAGES:
        waits = [row for row in document["ledger_parts"] if row["part"] == WAITING]
        waiting_ns |= {row["stage"]: row["time_ns"] for row in waits}
        least = min(waiting_ns, key=waiting_ns.__getitem__)
        shown = {min(shown), least, max(shown)}
    step_ns = document["step_s"] * 1e9
    for row in document["ledger_parts"]:  # after the lines of their stage
        if row["part"] == TRANSFER:  # the rest of exposed communication
            continue
        share_pct = 100 * row["time_ns"] / step_ns
        table.append({**row, "group": "of which", "line": row["part"], "share_pct": share_pct})
    stages = sorted((row for row in table if row["stage"] in shown), key=itemgetter("stage"))
    yield from Table(
        stages, [c for c in LEDGER_COLUMNS if num_stages > 1 or c is not _STAGE]
    ).text()
    if len(shown) < num_stages:
        yield (
            f"{len(shown)} of {num_stages} stages: the first, the last, and that which waits "
            "least; --csv and --json have all"
        )


def headline(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results with their titles, those that are known."""
    least, most = ("at least ", "at most ") if document["is_lower_bound"] else ("", "")
    interval = document["interval"]
    around = Interval(**interval) if interval else None
    step = f"{least}{document['step_s'] * 1e3:.2f} ms"
    yield "predicted step", f"{step}, {around}" if around and around.is_known else step
    if document["tokens_per_s"]:
        yield "throughput", f"{most}{document['tokens_per_s']:,.0f} tokens/s"
    if document["mfu_pct"] is not None:
        yield "MFU", f"{most}{document['mfu_pct']:.1f} % MFU (causal)"
    if document["hfu_pct"] is not None and document["hfu_pct"] != document["mfu_pct"]:
        yield "HFU", f"{most}{document['hfu_pct']:.1f} % HFU"
    yield "limit", _limit(document)
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


def _limit(document: Mapping[str, Any]) -> str:
    """Return what the step waits for, with shares; the host comes first where it is late."""
    shares: dict[str, float] = {**document["shares_pct"]}
    first = limit(document)
    idle = "device idle " if first == HOST else ""
    words = [f"{first} ({idle}{shares.pop(first, 0.0):.1f} % of the step)"]
    words += (f"{n} ({pct:.1f} %)" for n, pct in shares.items() if pct >= _LEAST_SHARE_PCT)
    condition = "" if document["host_is_known"] else " if the host keeps up"
    first_ones = f"{', '.join(words[:-1])} and " if words[1:] else ""
    return f"bound by {first_ones}{words[-1]}{condition}"


def _memory(memory: Mapping[str, Any]) -> str:
    """Return the predicted memory and whether it fits."""
    text = f"{format_bytes(memory['allocated_bytes'])} allocated"
    if memory["reserved_bytes"]:
        text += f", {format_bytes(memory['reserved_bytes'])} reserved"
    if len(memory["stages"]) > 1:
        text += f" on stage {memory['stages'][0]['stage']}"
    if memory["device_bytes"] is None:
        return f"{text}; that of the device is unknown"
    verdicts = {"fits": "fits into", "close": "close to", "does not fit": "DOES NOT FIT into"}
    text += f", {verdicts[memory['verdict']]} {format_bytes(memory['device_bytes'])}"
    return f"{text}; it would fit with {memory['fitting']}" if memory["fitting"] else text


def memory_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the memory of stages by purpose as a table, the fullest first, and the last's."""
    memory = document["memory"]
    if not memory or not memory["stages"]:
        return
    shown = memory["stages"][:_MOST_STAGES]
    last = max(memory["stages"], key=lambda row: row["stage"])
    shown = [*shown, *([] if last in shown else [last])]  # with the head, whatever its place
    rows = [
        {"stage": row["stage"], "total": sum(row.values()) - row["stage"], **row}
        for row in shown
    ]
    kinds = [name for name in rows[0] if name != "stage" and any(row[name] for row in rows)]
    columns = [given(name, BYTES) for name in kinds]
    yield from Table(rows, [_STAGE, *columns] if len(rows) > 1 else columns).text()
    if len(memory["stages"]) > len(rows):
        yield f"memory of {len(rows)} of {len(memory['stages'])} stages; --json has all"
