"""The options of `stepmark predict`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.option_groups import Files
from stepmark.ground.options import Reader, flag, group
from stepmark.model.network_options import NetworkOptions
from stepmark.predictions.measured_step import MeasuredFigure
from stepmark.predictions.training_run import GpuHourPrices, Tokens
from stepmark.training.train_options import CaseOptions

# Options that take lists, with commas: each combination is predicted. Others are a framework's.
LISTED = (
    *("device", "host", "network", "nproc", "world_size", "strategy", "tp", "pp", "cp", "ep"),
    *("dp_shard", "dp_replicate", "mbs", "gbs", "grad_accum", "seq_len", "precision", "ac"),
    *("recompute", "recompute_granularity", "recompute_num_layers", "stage", "pp_schedule"),
    *("pp_microbatches", "virtual_pipeline_model_parallel_size"),
)
# What --what-if changes: bandwidth of the links between GPUs, of memory, the rate of products
# and attention, each by a factor; and the power limit in watts.
FACTORS = ("link", "hbm", "flops")
WATTS = "power"


def _read_what_if(text: str, field: str) -> tuple[tuple[str, float], ...]:
    changes: dict[str, float] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        name, _, value = word.partition("=")
        unit = "W" if name == WATTS else "x"
        number = value.removesuffix(unit)
        is_number = number.replace(".", "", 1).isdecimal() and len(number) <= 12
        is_valid = name in (*FACTORS, WATTS) and value.endswith(unit) and is_number
        if not is_valid or not 0 < float(number) < math.inf or name in changes:
            allowed = (
                "changes such as link=2x,hbm=1.5x,flops=2x,power=1000W, above 0, each once"
            )
            if name in changes:
                allowed += f"; for several values of {name}, predict the step once for each"
            raise ConfigError(field, word, allowed)
        changes[name] = float(number)
    if not changes:
        raise ConfigError(field, text, "at least one change, such as link=2x")
    return tuple(changes.items())


def show_what_if(changes: tuple[tuple[str, float], ...]) -> str:
    return ",".join(
        f"{name}={value:g}{'W' if name == WATTS else 'x'}" for name, value in changes
    )


Changes = Annotated[
    tuple[tuple[str, float], ...],
    Reader(read=_read_what_if, show=show_what_if, metavar="link=2x,..."),
]


@group
class Basis:
    """Prediction."""

    from_run: str | None = flag("predict the step of this run; options change it", names="run")
    calibration: str | None = flag("run with measured parts [the device's latest]", names="run")
    device: str | None = flag("predict by its data sheet, e.g. h200", names="device")
    host: str | None = flag(
        "by data sheet, the host: slow, typical, fast, or a run with its part [typical]",
        metavar="NAME|RUN",
        rare=True,
    )
    curve: str | None = flag(
        "measured times of collectives: a run or nccl-tests files",
        metavar="RUN|FILE",
        rare=True,
    )
    anchor: str | None = flag(
        "fit factors to measured steps: a run, a log, or a CSV of options and step times",
        metavar="RUN|LOG|CSV",
        rare=True,
    )
    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR", rare=True)
    gbs: int | None = flag(
        "sequences per step [mbs x data ranks x grad-accum]",
        "--gbs",
        "--global-batch",
    )
    what_if: Changes | None = flag("factors: link, hbm (memory), flops; power=1000W")
    tokens: Tokens | None = flag("days of a training run over so many tokens")
    price: GpuHourPrices | None = flag(
        "of a GPU hour, for the cost of --tokens; by device: h100-sxm=2.5/h,b200=5/h",
        rare=True,
    )
    measured: MeasuredFigure | None = flag("compare: step time, 9800tokens/s/GPU or a log")
    force: bool = flag(
        "use a calibration of another device or version", default=False, rare=True
    )


@group
class Screen:
    """Screen."""

    stages: bool = flag(
        "also the ledger and the memory of every pipeline stage, line by line",
        default=False,
        rare=True,
    )
    notes: bool = flag("all notes, not the first three alone", default=False, rare=True)


@group
class PredictionFiles(Screen, Files):
    """Files."""

    timeline: str | None = flag("the timeline for Perfetto, as JSON", metavar="PATH", rare=True)
    html: str | None = flag("ledger and timeline as one page", metavar="PATH")
    written = (*Files.written, "timeline", "html")

    def check_stdout(self) -> None:
        """Raise ConfigError for two outputs on stdout, and for a screen that is not printed."""
        super().check_stdout()
        for name in ("stages", "notes"):
            if self.to_stdout and getattr(self, name):
                raise ConfigError(name, "given", "left out: a file takes the place of the text")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Basis, NetworkOptions, CaseOptions, PredictionFiles):
    """stepmark predict."""

    models: tuple[str, ...] = flag(
        "model, its config, a workload of any format, or a framework's file",
        default=(),
        argument=True,
        metavar="MODEL|WORKLOAD",
        names="model",
    )
