"""The logs of examples/logs: launches of a published run, in the lines of two trainers.

`python -m tests.job_logs.example_log` writes them anew.
"""

import datetime
from dataclasses import replace
from pathlib import Path

from stepmark.cases.flops import of_model
from stepmark.cases.record import Measured
from stepmark.store.reader import read

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "examples" / "logs"
RUN = "h200-predictions-2"
MODEL = "llama-3.1-8b"
# Launches of one case, which is compiled.
LAUNCHES = {"megatron.log": 3, "torchtitan.log": 2}
_START = datetime.datetime(2026, 11, 1, 12, 0, 0)
_PEAK = 989e12  # torchtitan/tools/utils.py, get_peak_flops of an H200


def record(name: str) -> Measured:
    """Return the launch whose steps are those of a log."""
    own = [
        record
        for record in read(ROOT / "results" / RUN).records
        if isinstance(record, Measured) and record.training and record.train.model.name == MODEL
    ]
    case_id = next(record.case.case_id for record in own if record.launch == 3)
    return next(
        record
        for record in own
        if record.case.case_id == case_id and record.launch == LAUNCHES[name]
    )


def steps_s(own: Measured) -> list[float]:
    assert own.training
    return [*own.training.warmup_s[0], *own.samples.seconds[0]]


def text(name: str) -> str:
    """Return a log: figures that the run did not measure (learning rate) are left out."""
    own = record(name)
    lines = _megatron(own) if name == "megatron.log" else _torchtitan(own)
    return "\n".join([*lines, ""])


def _head(own: Measured, trainer: str, source: str) -> list[str]:
    return [
        f"# Steps of {MODEL} on {own.train.num_ranks} GPU (NVIDIA H200) that stepmark train "
        "measured",
        f"# (results/{RUN}, launch {own.launch}), in the lines of {trainer}",
        f"# ({source}). {trainer} did not run.",
    ]


def _megatron(own: Measured) -> list[str]:
    assert own.training
    case = own.train
    sizes = ("context", "tensor-model", "pipeline-model")
    lines = [
        *_head(own, "Megatron-LM", "megatron/training/training.py, d98e8a64"),
        f"using world size: {case.num_ranks}, data-parallel size: {case.num_ranks}, "
        + ", ".join(f"{name}-parallel size: 1" for name in sizes),
        f"  seq_length {'.' * 38} {case.model.seq_len}",
    ]
    clock_s = 0.0
    times = steps_s(own)
    for number, (step_s, loss) in enumerate(zip(times, own.training.loss, strict=True), 1):
        clock_s += step_s
        when = _START + datetime.timedelta(seconds=clock_s)
        lines.append(
            f" [{when:%Y-%m-%d %H:%M:%S.%f}] iteration {number:8d}/{len(times):8d} |"
            f" consumed samples: {number * case.mbs:12d} |"
            f" elapsed time per iteration (ms): {step_s * 1000.0:.1f} |"
            f" global batch size: {case.mbs:5d} | lm loss: {loss:.6E} | loss scale: {1.0:.1f} |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
        )
    return [*lines, f"exiting program at iteration {len(times)}"]


def _torchtitan(own: Measured) -> list[str]:
    assert own.training
    case = own.train
    memory = own.training.reserved_bytes[0]
    total = read(ROOT / "results" / RUN).info.environment.devices[0].memory_bytes
    assert total
    tokens = case.mbs * case.model.seq_len
    flops = of_model(replace(case.model), again=0.0).by_convention()["torchtitan"]
    times = steps_s(own)
    lines = [
        *_head(own, "torchtitan", "torchtitan/components/metrics.py, b5bcd76c"),
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, "
        "ep=1",
        f"Trainer is initialized with local batch size {case.mbs}, global batch size "
        f"{case.mbs}, gradient accumulation steps 1, sequence length {case.model.seq_len}, "
        f"total steps {len(times)} (warmup 0)",
    ]
    clock_s = 0.0
    for number, (step_s, loss) in enumerate(zip(times, own.training.loss, strict=True), 1):
        clock_s += step_s
        tps = tokens / step_s
        lines.append(
            f"{_prefix(clock_s)}step: {number:2}  loss: {loss:8.5f}  "
            f"memory: {memory / 2**30:5.2f}GiB({100 * memory / total:.2f}%)  "
            f"tps: {round(tps):,}  tflops: {flops * tps / 1e12:,.2f}  "
            f"mfu: {100 * flops * tps / _PEAK:.2f}%"
        )
    return [*lines, f"{_prefix(clock_s)}Training completed"]


def _prefix(clock_s: float) -> str:
    when = _START + datetime.timedelta(seconds=clock_s)
    return f"[titan] {when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03d} - root - INFO - "


if __name__ == "__main__":
    for name in LAUNCHES:
        (LOGS / name).write_text(text(name))
