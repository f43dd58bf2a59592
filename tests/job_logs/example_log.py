"""The log of examples/logs: steps of a published run, in the lines of Megatron-LM.

`python -m tests.job_logs.example_log` writes it anew.
"""

import datetime
from pathlib import Path

from stepmark.cases.record import Measured
from stepmark.store.reader import read_records

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "logs" / "megatron.log"
RUN = "h200-predictions-2"
CASE, LAUNCH = "llama-3.1-8b", 3
_START = datetime.datetime(2026, 11, 1, 12, 0, 0)


def record() -> Measured:
    """Return the launch whose steps are those of the log."""
    return next(
        own
        for own in read_records(ROOT / "results" / RUN)
        if isinstance(own, Measured)
        and own.training
        and own.train.model.name == CASE
        and own.launch == LAUNCH
    )


def text() -> str:
    """Return the log: figures that the run did not measure (learning rate) are left out."""
    own = record()
    assert own.training
    case = own.train
    steps_s = [*own.training.warmup_s[0], *own.samples.seconds[0]]
    sizes = ("context", "tensor-model", "pipeline-model")
    lines = [
        f"# Steps of {CASE} on {case.num_ranks} GPU (NVIDIA H200) that stepmark train measured",
        f"# (results/{RUN}, launch {LAUNCH}), in the lines of Megatron-LM",
        "# (megatron/training/training.py, d98e8a64). Megatron-LM did not run.",
        f"using world size: {case.num_ranks}, data-parallel size: {case.num_ranks}, "
        + ", ".join(f"{name}-parallel size: 1" for name in sizes),
        f"  seq_length {'.' * 38} {case.model.seq_len}",
    ]
    clock_s = 0.0
    for number, (step_s, loss) in enumerate(zip(steps_s, own.training.loss, strict=True), 1):
        clock_s += step_s
        when = _START + datetime.timedelta(seconds=clock_s)
        lines.append(
            f" [{when:%Y-%m-%d %H:%M:%S.%f}] iteration {number:8d}/{len(steps_s):8d} |"
            f" consumed samples: {number * case.mbs:12d} |"
            f" elapsed time per iteration (ms): {step_s * 1000.0:.1f} |"
            f" global batch size: {case.mbs:5d} | lm loss: {loss:.6E} | loss scale: {1.0:.1f} |"
            f" number of skipped iterations: {0:3d} | number of nan iterations: {0:3d} |"
        )
    lines.append(f"exiting program at iteration {len(steps_s)}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    EXAMPLE.write_text(text())
