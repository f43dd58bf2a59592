"""Score predictions of published training steps by data sheet and the device's usual network.

    python validation/published_steps.py said      which layouts can be said; why others not
    python validation/published_steps.py steps     error of step times by source and device
    python validation/published_steps.py playbook  order of the playbook's layouts, their pairs
    python validation/published_steps.py memory    memory of the playbook and of llm-foundry
    python validation/published_steps.py anchors   the same errors with ten anchors of a group
    python validation/published_steps.py           all, fifteen minutes on a core

llm-foundry's losses are fused, which has the memory of a compiled head.

Files are those of validation/data, or those of --steps, --layouts and --playbook with the same
columns. -v prints every row that has a published time. Nothing is fitted to what is scored:
of `anchors` the rows are those that are left when ten are drawn.
"""

import argparse
import math
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import correlation, mean, median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "validation")]

from published_jobs import (  # noqa: E402
    PublishedJob,
    Row,
    in_bf16,
    job_of,
    playbook_row,
    read_rows,
)

from stepmark.ground.errors import ConfigError  # noqa: E402
from stepmark.model.device import find_device_by_alias  # noqa: E402
from stepmark.predictions import sheet_errors  # noqa: E402
from stepmark.predictions.anchored_steps import Anchor, fit_anchors  # noqa: E402
from stepmark.predictions.factors import Anchored  # noqa: E402
from stepmark.predictions.inputs import Inputs  # noqa: E402
from stepmark.predictions.predict import predict  # noqa: E402
from stepmark.predictions.predict_inputs import inputs_of  # noqa: E402
from stepmark.predictions.predict_options import PredictOptions  # noqa: E402
from stepmark.predictions.prediction import Prediction  # noqa: E402
from stepmark.step_memory import memory, pytorch_memory  # noqa: E402
from stepmark.step_memory.megatron_memory import OtherTensors, stage_memories  # noqa: E402
from stepmark.step_memory.workload_memory import OUTSIDE_BYTES  # noqa: E402
from stepmark.workloads.rules import RULES  # noqa: E402

# Beyond Megatron-LM (huggingface/nanotron 2411b022): parallel/tensor_parallel/functional.py
# subtracts the maximum of logits out of place; optim/gradient_accumulator.py adds gradients in
# 16 bits after a whole backward pass.
NANOTRON = OtherTensors(logit_bytes=4, grad_bytes=2)
NAMES = {
    "steps": "published-steps.csv",
    "layouts": "published-layouts.csv",
    "playbook": "playbook-layouts.csv",
}
IN_BF16 = "said in bf16 only: "
ROOMY_GIB = 72.0  # of the 79.6 GiB of an H100: 90 %
NUM_ANCHORS = 10
FAR = 2.0  # times as long as the same layout with or without ZeRO-1
FEWEST_SCORED = 5  # rows of a group that are left when its anchors are drawn


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the scores need of a prediction, which itself is large. flops: of all ranks."""

    step_s: float
    flops: float | None
    traits: sheet_errors.Traits


@cache
def outcome_of(job: PublishedJob, host: str | None = None) -> Outcome:
    """Predict a job once on a host of this name. Raises ConfigError."""
    prediction = predict(inputs_of_job(job, host))
    traits = sheet_errors.traits_of(prediction)
    return Outcome(step_s=prediction.step_s, flops=_flops(prediction), traits=traits)


def inputs_of_job(job: PublishedJob, host: str | None = None) -> Inputs:
    """Return the inputs of a job's prediction. Raises ConfigError."""
    workload = RULES[job.framework].workload(job.job, job.settings)
    return inputs_of(PredictOptions(device=job.device, host=host), workload)


@cache
def inputs_are_known(job: PublishedJob) -> bool:
    """Return True where a job has a workload and a network. Raises ConfigError."""
    inputs_of_job(job)
    return True


def _flops(prediction: Prediction) -> float | None:
    """Return the FLOPs of a step that are executed, those of recomputation included."""
    per_token = prediction.inputs.token_flops
    tokens = prediction.inputs.tokens
    return per_token.hfu * tokens if per_token and tokens else None


@dataclass(frozen=True, slots=True)
class Scored:
    """A published row: its prediction, or why there is none."""

    row: Row
    outcome: Outcome | None
    refusal: str = ""

    @property
    def published_s(self) -> float:
        """Return the published seconds of a step."""
        if self.row.get("iteration_s"):
            return float(self.row["iteration_s"])
        tokens = int(self.row["gbs"]) * int(self.row["seq"])
        return tokens / (float(self.row["tokens_per_s_gpu"]) * int(self.row["gpus"]))

    @property
    def error(self) -> float:
        assert self.outcome
        return self.outcome.step_s / self.published_s - 1

    @property
    def rate(self) -> float | None:
        """Return the published FLOP/s of a GPU."""
        if self.outcome is None or self.outcome.flops is None:
            return None
        return self.outcome.flops / (self.published_s * int(self.row["gpus"]))


def score(row: Row, host: str | None = None) -> Scored:
    """Return a row with its prediction, or with the reason of its refusal."""
    try:
        return Scored(row, outcome_of(job_of(row), host))
    except ConfigError:
        return Scored(row, None, refusal_of(row))


def refusal_of(row: Row) -> str:
    """Return why a row cannot be said; "": it can. A precision that is refused is named apart.

    Without the minutes that predicting all takes.
    """
    refusal = _refusal(row)
    if refusal and row["precision"] != "BF16" and not _refusal(in_bf16(row)):
        return f"{IN_BF16}precision {row['precision']}: {refusal}"
    return refusal


def _refusal(row: Row) -> str:
    try:
        inputs_are_known(job_of(row))
    except ConfigError as error:
        return _reason(error)
    return ""


def _reason(error: ConfigError) -> str:
    """Return the sentence of a refusal without its numbers, which would split the counts."""
    return re.sub(r"\d+(\.\d+)?", "N", str(error))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values from 0; equal ones share the mean of theirs."""
    order = sorted(values)
    first = {value: index for index, value in reversed(list(enumerate(order)))}
    counts = Counter(order)
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def spearman(pairs: Iterable[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation."""
    own, other = zip(*pairs, strict=True)
    return correlation(ranks(own), ranks(other))


def grouped(rows: Iterable[Scored], key: Callable[[Row], str]) -> dict[str, list[Scored]]:
    groups = defaultdict(list)
    for each in rows:
        groups[key(each.row)].append(each)
    return groups


def print_said(rows: Iterable[Row]) -> None:
    """Print how many rows can be predicted, and why the others cannot."""
    refusals = [refusal_of(row) for row in rows]
    said = refusals.count("")
    in_bf16 = sum(refusal.startswith(IN_BF16) for refusal in refusals)
    print(f"said: {said} of {len(refusals)}; with every precision as bf16: {said + in_bf16}")
    for refusal, count in Counter(refusals).most_common():
        if refusal:
            print(f"  {count:4} {refusal}")


def gpu_of(row: Row) -> str:
    """Return the GPU without its memory, on which its rate does not depend."""
    return row["gpu_type"].split("-")[0]


def constant_rates(rows: Iterable[Scored]) -> Iterator[tuple[Scored, float]]:
    """Yield rows with their step by the median rate of the other sources of this GPU."""
    by_gpu = grouped((each for each in rows if each.rate), gpu_of)
    for own in by_gpu.values():
        for each in own:
            others = [
                other.rate
                for other in own
                if other.rate and other.row["source"] != each.row["source"]
            ]
            if others and each.outcome and each.outcome.flops:
                rate = median(others)
                yield each, each.outcome.flops / (rate * int(each.row["gpus"]))


def print_steps(rows: Sequence[Scored]) -> None:
    """Print errors of step times by source and GPU, beside those of a constant rate."""
    said = [each for each in rows if each.outcome]
    constant = {
        id(each): step_s / each.published_s - 1 for each, step_s in constant_rates(said)
    }
    print(f"{'source':22} {'GPU':14} rows   mean median    p90    max   bias | constant rate")
    groups = grouped(said, lambda row: f"{row['source']:22} {row['gpu_type']:14}")
    for name, own in (*sorted(groups.items()), (f"{'all':37}", said)):
        errors = [each.error for each in own]
        others = [constant[id(each)] for each in own if id(each) in constant]
        print(
            f"{name} {_figures(errors)} | {_figures(others) if others else 'no other source'}"
        )


def _figures(errors: Sequence[float]) -> str:
    """Return number, mean, median, 90th percentile and maximum of |errors|, and their mean."""
    sizes = [abs(error) for error in errors]
    shown = (mean(sizes), median(sizes), quantile(sizes, 0.9), max(sizes))
    return f"{len(sizes):4} {' '.join(f'{each:6.1%}' for each in shown)} {mean(errors):+6.1%}"


def print_playbook(rows: Sequence[Scored]) -> None:
    """Print the rank correlation of step times of layouts of one model on as many GPUs.

    roomy: the correlation among those that leave memory free; torch's allocator frees its
    cache in every step of the others, which took 4 to 9 times as long. chosen: the published
    time of the layout that is predicted to be the fastest, over that of the fastest one.
    """
    ran = [each for each in rows if each.row["ran"] == "1"]
    said = [each for each in ran if each.outcome]
    print(f"playbook: {len(said)} of {len(ran)} layouts that ran are said")
    for refusal, count in Counter(each.refusal for each in ran).most_common():
        if refusal:
            print(f"  {count:4} {refusal}")
    groups = grouped(said, lambda row: f"{row['model']:3} {row['nodes']:>2} nodes")
    values = []
    roomy_values = []
    for name, own in sorted(groups.items()):
        pairs = [(each.outcome.step_s, each.published_s) for each in own if each.outcome]
        roomy = [
            pair
            for pair, each in zip(pairs, own, strict=True)
            if float(each.row["memory_gib"] or 0) < ROOMY_GIB
        ]
        values.append(spearman(pairs))
        roomy_values.append(spearman(roomy))
        fastest = min(published for _, published in pairs)
        chosen = min(pairs)[1] / fastest
        errors = _figures([each.error for each in own])
        ranked = f"Spearman {values[-1]:.3f}, roomy {roomy_values[-1]:.3f}"
        print(f"{name}: {ranked}, chosen {chosen:.2f}; step {errors}")
    print(f"median Spearman {median(values):.3f}, roomy {median(roomy_values):.3f}")
    print_pairs([each for each in said if int(each.row["nodes"]) > 1])


def print_pairs(rows: Sequence[Scored]) -> None:
    """Print how far layouts are apart that differ in the sharding of optimizer states alone.

    Their predictions are nearly equal, so that no prediction explains more of them.
    """
    shape = ("model", "nodes", "dp", "tp", "pp", "mbs", "grad_accum")
    layouts = grouped(rows, lambda row: " ".join(row[name] for name in shape))
    pairs = [own for own in layouts.values() if len(own) == 2]
    measured = [_ratio(own.published_s, other.published_s) for own, other in pairs]
    predicted = [
        _ratio(own.outcome.step_s, other.outcome.step_s)
        for own, other in pairs
        if own.outcome and other.outcome
    ]
    far = sorted(ratio for ratio in measured if ratio > FAR)
    print(
        f"{len(pairs)} pairs on several nodes with and without ZeRO-1: predicted up to "
        f"{max(predicted):.2f} x, measured {median(measured):.2f} x in the median; "
        f"{len(far)} over {FAR:g} x, up to {far[-1]:.1f} x"
    )


def _ratio(own: float, other: float) -> float:
    return max(own, other) / min(own, other)


@dataclass(frozen=True, slots=True)
class ScoredAnchored:
    """A row that is predicted by the factors of its group's anchors, and without any."""

    published_s: float
    step_s: float
    without_factors_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        return self.step_s / self.published_s - 1

    @property
    def error_before(self) -> float:
        return self.without_factors_s / self.published_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.published_s <= self.high_s

    @property
    def half_width(self) -> float:
        return (self.high_s - self.low_s) / (self.high_s + self.low_s)


def print_anchors(rows: Iterable[Scored], host: str | None) -> None:
    """Print errors of the rows of each group that are left when its anchors are drawn.

    The playbook's groups are a model on as many nodes, those of others a source and a GPU.
    """
    print(f"{'group':37} rows median -> median  half width  inside  factors")
    groups = grouped((each for each in rows if each.outcome), _anchor_group)
    medians = list[float]()
    correlations = list[float]()
    scored = list[ScoredAnchored]()
    for name, own in sorted(groups.items()):
        if len(own) < NUM_ANCHORS + FEWEST_SCORED:
            print(f"{name:37} {len(own):4} too few rows")
            continue
        anchored, others = with_anchors(name, own, host)
        before = median(abs(each.error_before) for each in others)
        medians.append(median(abs(each.error) for each in others))
        scored += others
        factors = " ".join(f"{factor:.2f}" for factor in anchored.factors.values())
        print(
            f"{name:37} {len(others):4} {before:6.1%} -> {medians[-1]:6.1%} {_inside(others)}  "
            f"{factors or 'none'}"
        )
        if own[0].row["source"] == "nanotron":
            correlations.append(spearman((each.step_s, each.published_s) for each in others))
    print(f"mean of medians {mean(medians):.1%}; all rows {_inside(scored)}")
    if correlations:
        print(f"Spearman in groups of the playbook: median {median(correlations):.3f}")


def _anchor_group(row: Row) -> str:
    if row["source"] == "nanotron":
        return f"nanotron {row['model']} on {row['nodes']:>2} nodes"
    return f"{row['source']} {row['gpu_type']}"


def _inside(others: Sequence[ScoredAnchored]) -> str:
    """Return the median half width of intervals, and the share of rows inside their own."""
    width = median(each.half_width for each in others)
    return f"{width:10.1%}  {mean(each.is_inside for each in others):6.1%}"


def with_anchors(
    name: str, rows: Sequence[Scored], host: str | None = None
) -> tuple[Anchored, list[ScoredAnchored]]:
    """Return the factors of anchors that are drawn from rows, and the others' predictions."""
    drawn = random.Random(name).sample(range(len(rows)), NUM_ANCHORS)
    anchored = fit_anchors(
        [
            Anchor(name, inputs_of_job(job_of(rows[index].row), host), rows[index].published_s)
            for index in drawn
        ],
        lambda inputs: predict(inputs).step,
    )
    others = []
    for index, each in enumerate(rows):
        if index not in drawn:
            inputs = replace(inputs_of_job(job_of(each.row), host), factors=anchored.factors)
            step_s = predict(inputs).step_s
            interval = anchored.interval(step_s)
            assert interval.low_s is not None
            assert interval.high_s is not None
            assert each.outcome
            others.append(
                ScoredAnchored(
                    published_s=each.published_s,
                    step_s=step_s,
                    without_factors_s=each.outcome.step_s,
                    low_s=interval.low_s,
                    high_s=interval.high_s,
                )
            )
    return anchored, others


def print_memory(rows: Sequence[Row]) -> None:
    """Print errors of memory, and which layouts are called out of memory."""
    for name in ("llm-foundry", "nanotron"):  # others do not say how losses are computed
        called = Counter[str]()
        counts = Counter[str]()
        errors = list[float]()
        for row in rows:
            if row["source"] != name or row.get("not_memory", "0") == "1":
                continue
            if (found := memory_of(row)) is None:
                continue
            what = "ran" if row.get("ran", "1") == "1" else "failed"
            needed, is_called = found
            counts[what] += 1
            called[what] += is_called
            if what == "ran" and row.get("memory_gib"):
                errors.append(needed / (float(row["memory_gib"]) * 2**30) - 1)
        for what, count in counts.items():
            print(f"{name}: {called[what]} of {count} that {what} are called out of memory")
        if errors:
            print(f"  reserved bytes of the first stage: {_figures(errors)}")


def memory_of(row: Row) -> tuple[int, bool] | None:
    """Return reserved bytes of the first stage, and whether the job does not fit.

    nanotron prints those of its first rank. None: the layout cannot be said.
    """
    try:
        job = job_of(in_bf16(row))
    except ConfigError:
        return None
    device = find_device_by_alias(job.device)
    assert device
    assert device.hbm_bytes
    if row["source"] == "nanotron":
        stages = nanotron_bytes(job)
        return stages[0], max(stages) + OUTSIDE_BYTES > device.hbm_bytes
    case = pytorch_memory.case_of(job.job, job.settings)
    found = memory.estimate(case)
    size = 40 * 2**30 if row["gpu_type"].endswith("40GB") else device.hbm_bytes
    verdict = memory.verdict(case, found.allocated_bytes, found.reserved_bytes, size)
    return found.reserved_bytes, verdict == memory.NO_FIT


def nanotron_bytes(job: PublishedJob) -> list[int]:
    """Return the reserved bytes of each stage of a job of nanotron. Raises ConfigError."""
    stages = stage_memories(job.job, job.settings, NANOTRON)
    return [stage.reserved_bytes for stage in stages]


def print_rows(rows: Iterable[Scored]) -> None:
    """Print every row that has a published time."""
    columns = ("source", "model", "gpus", "tp", "pp", "dp", "mbs", "gbs", "recompute")
    for each in rows:
        values = " ".join(f"{name} {each.row[name]}" for name in columns if each.row.get(name))
        if each.outcome:
            print(f"{each.error:+7.1%} {each.outcome.step_s:9.3f} s {values}")
        else:
            print(f"      - {values}: {each.refusal}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scores = ("said", "steps", "playbook", "memory", "anchors")
    parser.add_argument("score", nargs="?", choices=scores)
    for name, file in NAMES.items():
        parser.add_argument(f"--{name}", type=Path, default=file, metavar="CSV")
    parser.add_argument("--host", help="of stepmark predict: slow, typical or fast [typical]")
    parser.add_argument("-v", action="store_true", dest="is_verbose", help="print every row")
    options = parser.parse_args(argv)
    wanted = [options.score] if options.score else [*scores]
    steps: list[Scored] = []
    playbook: list[Scored] = []
    if "said" in wanted:
        print_said([*read_rows(options.layouts), *read_rows(options.steps)])
    if "steps" in wanted or "anchors" in wanted:
        steps = [score(row, options.host) for row in read_rows(options.steps)]
    if {"playbook", "steps", "anchors"} & {*wanted}:
        rows = map(playbook_row, read_rows(options.playbook))
        playbook = [score(row, options.host) for row in rows]
    if "steps" in wanted:
        print_steps([*steps, *(each for each in playbook if each.row["ran"] == "1")])
    if "playbook" in wanted:
        print_playbook(playbook)
    if "memory" in wanted:
        rows = [*read_rows(options.steps), *map(playbook_row, read_rows(options.playbook))]
        print_memory(rows)
    if "anchors" in wanted:
        ran = [each for each in playbook if each.row["ran"] == "1"]
        print_anchors([*steps, *ran], options.host)
    if options.is_verbose:
        print_rows([*steps, *(each for each in playbook if each.row["ran"] == "1")])


if __name__ == "__main__":
    main()
