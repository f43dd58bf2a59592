"""What a prediction says: text, rows, JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from stepmark.ground.units import TFLOP, format_bytes
from stepmark.tables.columns import MS, NO_HEADING, PERCENT, Row, given
from stepmark.tables.table import Table
from stepmark.timeline.ledger import TRANSFER, WAITING, Group, Idle, Ledger
from stepmark.timeline.prediction import StepMemory, StepPrediction
from stepmark.timeline.step_cost import Source

_MOST_STAGES = 4  # that are all printed
_ORDER = {group: index for index, group in enumerate(Group)}
_HOST = "the host"
_LEAST_SHARE_PCT = 5.0  # of the step that the sentence on its limit names


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is predicted. tokens: of one optimizer step over all ranks; None: unknown."""

    name: str
    device: str
    num_ranks: int
    tokens: int | None = None
    flops_per_token: float | None = None  # the model's, with the causal half
    executed_per_token: float | None = None  # with recomputation
    peak_flops_per_s: float | None = None
    mbs: int | None = None
    seq_len: int | None = None
    techniques: str = ""
    host_is_known: bool = True
    pipeline_is_known: bool = True  # False: the file has one stage of several
    calibration: str = ""
    memory: StepMemory | None = None


def document(facts: Facts, prediction: StepPrediction, notes: list[str]) -> Row:
    """Return everything as plain data. Times are of one optimizer step."""
    timeline, step_s = prediction.timeline, prediction.step_s
    tokens_per_s = facts.tokens / step_s if facts.tokens else None
    energy_j = prediction.energy_j
    return {
        **asdict(facts),
        "step_s": step_s,
        "is_lower_bound": prediction.is_lower_bound,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_gpu": tokens_per_s / facts.num_ranks if tokens_per_s else None,
        "mfu_pct": _percent(facts, tokens_per_s, facts.flops_per_token),
        "hfu_pct": _percent(facts, tokens_per_s, facts.executed_per_token),
        "tflops": tokens_per_s * facts.flops_per_token / facts.num_ranks / TFLOP
        if tokens_per_s and facts.flops_per_token
        else None,
        "bound": "host" if timeline.is_host_bound else "device",
        "shares_pct": shares_pct(timeline.ledgers[timeline.slowest]),
        "bubble_s": timeline.bubble_s if facts.pipeline_is_known else None,
        "comm_s": timeline.comm_s,
        "exposed_comm_s": timeline.exposed_s,
        "contention_s": timeline.contention_s,
        "num_kernels": round(timeline.num_kernels),
        "clock_hz": prediction.clock_hz,
        "power_w": prediction.power_w,
        "energy_j": energy_j,
        "energy_per_token_j": energy_j * facts.num_ranks / facts.tokens
        if energy_j and facts.tokens
        else None,
        "sources_s": {str(source): time_s for source, time_s in prediction.sources.items()},
        "ledger": rows(prediction),
        "ledger_parts": part_rows(prediction),
        "notes": [*notes, *_memory_notes(facts.memory)],
    }


def _memory_notes(memory: StepMemory | None) -> Iterator[str]:
    """Yield what uncertain memory means for the time (docs/prediction.md, measured errors)."""
    if memory is not None and memory.verdict == "uncertain":
        yield (
            "memory may run out, and torch's allocator then frees its cache in every step: one "
            "such step took 2.4 times its predicted time"
        )


def _percent(facts: Facts, tokens_per_s: float | None, flops: float | None) -> float | None:
    if not tokens_per_s or not flops or not facts.peak_flops_per_s:
        return None
    return 100 * tokens_per_s * flops / facts.num_ranks / facts.peak_flops_per_s


def shares_pct(ledger: Ledger) -> dict[str, float]:
    """Return what the step waits for with its share, the largest first; they add up to 100."""
    waiting_ns = ledger.within.get(WAITING, 0)
    causes = {
        "computation": ledger.total(Group.COMPUTE) + ledger.total(Group.OVERLAPPED),
        "exposed communication": ledger.total(Group.COMM) - waiting_ns,
        "the pipeline bubble": waiting_ns + ledger.lines.get((Group.IDLE, Idle.RANK), 0),
        _HOST: ledger.lines.get((Group.IDLE, Idle.HOST), 0),
        "launch gaps": ledger.lines.get((Group.IDLE, Idle.LAUNCH_GAP), 0),
        "copies": ledger.total(Group.COPIES),
    }
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    return {name: 100 * time_ns / ledger.window_ns for name, time_ns in ordered if time_ns}


def rows(prediction: StepPrediction) -> list[Row]:
    """Return the lines of the ledgers, which add up to the step of each stage."""
    return [
        {
            "stage": stage,
            "group": str(group),
            "line": str(name),
            "time_ns": time_ns,
            "share_pct": 100 * time_ns / ledger.window_ns if ledger.window_ns else None,
        }
        for stage, ledger in enumerate(prediction.timeline.ledgers)
        for (group, name), time_ns in sorted(
            ledger.lines.items(), key=lambda line: (_ORDER[line[0][0]], -line[1])
        )
    ]


def part_rows(prediction: StepPrediction) -> list[Row]:
    """Return parts of lines by stage, such as the waiting in exposed communication."""
    return [
        {"stage": stage, "part": name, "time_ns": time_ns}
        for stage, ledger in enumerate(prediction.timeline.ledgers)
        for name, time_ns in ledger.within.items()
        if time_ns
    ]


def by_sheet(device: str) -> str:
    return f"the data sheet's of {device} over published efficiencies, often 15 to 35 % off"


def source_notes(
    sources: Mapping[Source, float], comm: Mapping[str, Source], device: str
) -> Iterator[str]:
    """Yield where costs are from, where it is not a measurement of these very operations."""
    total = sum(sources.values())
    texts = {
        Source.SCALED: "is scaled from other shapes",
        Source.OPERATOR: "is that of operators measured by themselves",
        Source.ROOFLINE: f"is {by_sheet(device)}",
        Source.FILE: "is the workload file's own",
    }
    for source, text in texts.items():
        if total and sources.get(source):
            yield f"{sources[source] / total:.0%} of the compute time {text}"
    by_source: dict[Source, list[str]] = {}
    for name, source in comm.items():
        by_source.setdefault(source, []).append(name)
    if names := by_source.get(Source.SCALED):
        yield f"times of {', '.join(names)} are scaled from other sizes or numbers of ranks"
    if names := by_source.get(Source.ROOFLINE):
        yield f"times of {', '.join(names)} are by the data sheet's links"


def lines(facts: Mapping[str, Any], prediction: StepPrediction) -> Iterator[str]:
    """Yield the prediction as text."""
    where = f"{facts['num_ranks']} x {facts['device']}"
    pairs = dict(headline(facts, prediction.step_s))
    yield f"{facts['name']} on {where}: predicted step {pairs.pop('predicted step')}"
    if step := step_text(facts):
        yield f"  step: {step}"
    memory = pairs.pop("memory", "")
    yield "  " + ", ".join(pairs.values())
    if memory:
        yield f"  memory: {memory}"
    yield ""
    yield from ledger_lines(prediction)
    yield from (f"note: {note}" for note in facts["notes"])


def step_text(facts: Mapping[str, Any]) -> str:
    """Return the tokens of the optimizer step, and how they are computed."""
    if not facts["tokens"]:
        return ""
    shape = f"mbs {facts['mbs']}, seq {facts['seq_len']}"
    return f"{facts['tokens']:,} tokens, {shape}, {facts['techniques']}"


_STAGE = given("stage")
LEDGER_COLUMNS = (
    given("time_ns", MS, "ms"),
    given("share_pct", PERCENT, "%"),
    _STAGE,
    given("group", heading="ledger"),
    given("line", heading=NO_HEADING),
)


def ledger_lines(prediction: StepPrediction) -> Iterator[str]:
    """Yield the ledger of each stage as a table; of many stages those that differ most."""
    ledgers = prediction.timeline.ledgers
    has_stages, shown = len(ledgers) > 1, _stages_shown(ledgers)
    table: list[dict[str, Any]] = rows(prediction)
    step_ns = prediction.step_s * 1e9
    parts: list[dict[str, Any]] = part_rows(prediction)
    for row in parts:  # after the lines of their stage
        if row["part"] == TRANSFER:  # the rest of exposed communication
            continue
        share_pct = 100 * row["time_ns"] / step_ns
        table.append({**row, "group": "of which", "line": row["part"], "share_pct": share_pct})
    stages = sorted((row for row in table if row["stage"] in shown), key=itemgetter("stage"))
    yield from Table(
        stages, [c for c in LEDGER_COLUMNS if has_stages or c is not _STAGE]
    ).text()
    if len(shown) < len(ledgers):
        yield (
            f"{len(shown)} of {len(ledgers)} stages: the first, the last, and that which waits "
            "least; --csv and --json have all"
        )


def _stages_shown(ledgers: Sequence[Ledger]) -> list[int]:
    last = len(ledgers) - 1
    if last < _MOST_STAGES:
        return list(range(len(ledgers)))
    busiest = min(range(len(ledgers)), key=lambda stage: ledgers[stage].within.get(WAITING, 0))
    return sorted({0, busiest, last})


def headline(facts: Mapping[str, Any], step_s: float) -> Iterator[tuple[str, str]]:
    """Yield the results with their titles, those that are known."""
    least, most = ("at least ", "at most ") if facts["is_lower_bound"] else ("", "")
    yield "predicted step", f"{least}{step_s * 1e3:.2f} ms"
    if facts["tokens_per_s"]:
        yield "throughput", f"{most}{facts['tokens_per_s']:,.0f} tokens/s"
    if facts["mfu_pct"] is not None:
        yield "MFU", f"{most}{facts['mfu_pct']:.1f} % MFU (causal)"
    if facts["hfu_pct"] is not None and facts["hfu_pct"] != facts["mfu_pct"]:
        yield "HFU", f"{most}{facts['hfu_pct']:.1f} % HFU"
    yield "limit", _limit(facts)
    if facts["comm_s"]:
        exposed, comm = facts["exposed_comm_s"], facts["comm_s"]
        text = f"{comm * 1e3:.1f} ms of communication, {exposed * 1e3:.1f} ms exposed"
        if facts["contention_s"]:
            text += f", {facts['contention_s'] * 1e3:.1f} ms of contention"
        yield "communication", text
    if facts["bubble_s"]:
        yield "pipeline", f"{facts['bubble_s'] * 1e3:.1f} ms of pipeline bubble"
    if facts["power_w"] is not None:
        yield "power", f"{facts['power_w']:.0f} W at {facts['clock_hz'] / 1e6:.0f} MHz"
    if facts["energy_per_token_j"]:
        yield "energy", f"{facts['energy_per_token_j'] * 1e3:.1f} mJ per token"
    if facts["memory"]:
        yield "memory", _memory(facts["memory"])


def _limit(facts: Mapping[str, Any]) -> str:
    """Return what the step waits for, with shares; the host comes first where it is late."""
    shares: dict[str, float] = {**facts["shares_pct"]}
    first, idle = next(iter(shares), "computation"), ""
    if facts["bound"] == "host":
        first, idle = _HOST, "device idle "
    words = [f"{first} ({idle}{shares.pop(first, 0.0):.1f} % of the step)"]
    words += (f"{n} ({pct:.1f} %)" for n, pct in shares.items() if pct >= _LEAST_SHARE_PCT)
    condition = "" if facts["host_is_known"] else " if the host keeps up"
    first_ones = f"{', '.join(words[:-1])} and " if words[1:] else ""
    return f"bound by {first_ones}{words[-1]}{condition}"


def _memory(memory: Mapping[str, Any]) -> str:
    """Return the predicted memory and whether it fits."""
    sizes = (format_bytes(memory[name]) for name in ("allocated_bytes", "reserved_bytes"))
    text = "{} allocated, {} reserved".format(*sizes)
    if memory["device_bytes"] is None:
        return f"{text}; that of the device is unknown"
    verdicts = {"fits": "fits into", "uncertain": "may run out of"}
    words = verdicts.get(memory["verdict"], "RUNS OUT OF")
    text += f", {words} {format_bytes(memory['device_bytes'])}"
    return f"{text}; it would fit with {memory['fitting']}" if memory["fitting"] else text
