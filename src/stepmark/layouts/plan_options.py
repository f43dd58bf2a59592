"""The options of `stepmark plan`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.cases.train_case import NARROW
from stepmark.ground.errors import ConfigError
from stepmark.ground.option_groups import MBS, MICRO_BATCH, Files
from stepmark.ground.options import (
    REQUIRED,
    Reader,
    WholeNumbers,
    between,
    comma_list,
    flag,
    group,
    words_of,
)
from stepmark.model.network_options import NetworkOptions
from stepmark.model.packing import PackingOption
from stepmark.predictions.training_run import GpuHourPrices, Tokens

BOTH = "both"
MEGATRON = "megatron"
SCHEDULES = ("1f1b", "zb1p", "zbv", "dualpipev")
ALL_TO_ALL = "alltoall"
TWO_HOP = "two-hop"
DISPATCHES = (ALL_TO_ALL, TWO_HOP)
RECOMPUTED = ("none", "quarter", "half", "full")  # layers that are recomputed
EXCHANGES = ("p2p", "a2a", "all_gather")  # of cp; the first is the default


_MOST_GPUS = 2**20


def _read_counts(text: str, field: str) -> tuple[int, ...]:
    """Read 256, 256,384 or 256-4096, whose numbers double."""
    counts: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        is_number = first.isdecimal() and (last.isdecimal() if dash else True)
        if not is_number or not 1 <= int(first) <= int(last or first) <= _MOST_GPUS:
            allowed = "numbers of GPUs such as 256, 256,384 or 256-4096, which doubles them"
            raise ConfigError(field, text, allowed)
        count = int(first)
        while count <= int(last or first):
            counts.append(count)
            count *= 2
    return tuple(dict.fromkeys(counts))


GpuCounts = Annotated[
    tuple[int, ...],
    Reader(
        read=_read_counts,
        show=lambda numbers: ",".join(map(str, numbers)),
        metavar="256|256-4096",
        is_sequence=True,
    ),
]


@group
class Job:
    """Job."""

    models: tuple[str, ...] = flag(
        "model name, or a file such as config.json",
        default=(),
        argument=True,
        metavar="MODEL",
        names="model",
    )
    gpus: GpuCounts = flag(
        "GPUs in all; a list or doubling range: a line each",
        default=REQUIRED,
    )
    gbs: int = flag(
        "sequences per optimizer step",
        "--gbs",
        "--global-batch",
        "--global-batch-size",
        default=REQUIRED,
    )
    seq_len: int | None = flag("tokens per sequence [the model's]", "--seq-len", "--seq-length")
    packing: PackingOption | None = flag(
        "sequences are packed from pieces of this mean and greatest length, masked apart",
        rare=True,
    )
    precision: Annotated[str, words_of("bf16", *NARROW)] | None = flag(
        "of linear layers' products [bf16]"
    )
    framework: Annotated[str, words_of(BOTH, "megatron", "pytorch")] = flag(
        "whose layouts; pytorch: FSDP2", default=BOTH
    )


@group
class Machine:
    """Cluster."""

    device: str = flag(
        "GPU, by its data sheet, e.g. h100-sxm", default=REQUIRED, names="device"
    )
    host: str | None = flag("the host: slow, typical, fast [typical]", rare=True)


@group
class Measured:
    """Measured parts."""

    calibration: str | None = flag("run with measured parts of this device", names="run")
    curve: str | None = flag(
        "measured collectives: a run or nccl-tests files", metavar="RUN|FILE"
    )
    anchor: str | None = flag(
        "fit factors to measured steps: a run, or a table of yours", metavar="RUN|FILE"
    )
    verify: Annotated[int, between(1, 20)] | None = flag(
        "measure so many layouts on the GPUs of this machine, as anchors", metavar="K"
    )
    runs: Path = flag("folder of runs", default=Path("runs"), metavar="DIR", rare=True)


@group
class Ranges:
    """Layouts."""

    tp: WholeNumbers | None = flag("tensor parallelism [divisors up to a host's GPUs]")
    pp: WholeNumbers | None = flag("pipeline stages [divisors of the GPUs]")
    vpp: WholeNumbers | None = flag("model chunks per stage [those that divide the layers]")
    pp_schedule: Annotated[tuple[str, ...], comma_list(words_of(*SCHEDULES))] = flag(
        "of PyTorch's pipelines: 1f1b (with vpp interleaved), zb1p, zbv, dualpipev",
        default=SCHEDULES[:1],
        rare=True,
    )
    cp: WholeNumbers | None = flag("context parallelism [1; more from 16K tokens on]")
    cp_comm_type: Annotated[tuple[str, ...], comma_list(words_of(*EXCHANGES))] = flag(
        "Megatron-LM's exchange with cp: of keys and values (p2p, all_gather) or heads (a2a)",
        default=EXCHANGES[:1],
        rare=True,
    )
    ep: WholeNumbers | None = flag("expert parallelism [divisors of the experts up to 64]")
    dispatch: Annotated[tuple[str, ...], comma_list(words_of(*DISPATCHES))] = flag(
        "of tokens to experts: alltoall, or Megatron-LM's two-hop (DeepEP)",
        default=(ALL_TO_ALL,),
        rare=True,
    )
    imbalance: Annotated[float, between(1.0, 1024.0)] = flag(
        "rows of the fullest rank's experts / the mean of ep ranks",
        default=1.0,
        rare=True,
    )
    mbs: WholeNumbers | None = flag(f"{MBS} [1,2,4,8]", *MICRO_BATCH)
    recompute: Annotated[tuple[str, ...], comma_list(words_of(*RECOMPUTED))] = flag(
        "layers that are recomputed", default=RECOMPUTED
    )
    memory: Annotated[float, between(0.1, 1.0)] = flag(
        "share of a GPU's memory that a layout may need", default=0.92
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Job, Machine, NetworkOptions, Measured, Ranges, Files):
    """Output."""

    html: str | None = flag("time over memory, ledgers of the best, as a page", metavar="PATH")
    written = (*Files.written, "html")

    tokens: Tokens | None = flag("days of a training run over so many tokens")
    price: GpuHourPrices | None = flag("of a GPU hour, e.g. 2.5/h: the cost of --tokens")
    top: Annotated[int, between(1, 1000)] = flag(
        "layouts that are simulated and shown", default=20
    )
    files: Path | None = flag("folder for the framework's file of each layout", metavar="DIR")
    jobs: Annotated[int, between(1, 1024)] | None = flag(
        "processes that search [cores]", rare=True
    )
