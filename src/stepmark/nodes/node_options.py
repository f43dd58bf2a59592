"""Options of `stepmark doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from stepmark.ground.errors import ConfigError
from stepmark.ground.host_names import parse_hosts
from stepmark.ground.option_groups import OUT, Files
from stepmark.ground.options import Duration, Reader, Share, between, flag, group, words_of

# Hosts of a job up to which it measures all pairs of them: their number grows as the square.
MOST_FOR_ALL_PAIRS = 20
LIST_S = 120.0  # for a driver to list its devices
TIMEOUT_S = 600.0  # for a device, and again for all collectives of a host
Hosts = Annotated[
    tuple[str, ...],
    Reader(read=parse_hosts, show=",".join, metavar="HOSTS", is_sequence=True),
]


@group
class NodeChecks:
    """Node check."""

    nodes: bool = flag("check this host's devices before a big job", default=False)
    out: Path | None = flag("folder that all hosts share [node-check]", *OUT, metavar="DIR")
    read_from: Path | None = flag(
        "measure nothing: the verdict on all hosts that wrote into DIR", "--from", metavar="DIR"
    )
    pairs: Path | None = flag(
        "with --from: a run of `comm p2p-matrix` on these hosts, for the network", metavar="RUN"
    )
    expect: Hosts | None = flag(
        "hosts that must have written into --from: a,b or n[1-4]", rare=True
    )
    gpus_per_node: Annotated[int, between(0, 1024)] | None = flag(
        "a host with others fails", rare=True
    )
    floor: Share = flag("slowdown that is accepted, against the others' median", default=0.05)
    device: Annotated[str, words_of("cuda", "cpu")] | None = flag(
        "cuda or cpu [cuda where there is one]"
    )
    nproc: str | None = flag("devices to check [all; 1 on a CPU]", metavar="N|all")
    budget: Duration | None = flag("time in all [rates have 60s; 5s on a CPU]")
    launches: Annotated[int, between(1, 100)] | None = flag(
        "times each rate is measured [5; 2 on a CPU]", rare=True
    )
    timeout: Duration | None = flag("a device that takes longer is stuck [600s]", rare=True)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(NodeChecks, Files):
    """stepmark doctor."""


def check_budget(
    budget_s: float | None, timeout_s: float | None, *, typed: str = "", num_parts: int = 1
) -> None:
    """Refuse a budget in which a device that works would count as stuck.

    num_parts: steps that share the budget. typed: the budget as the user wrote it.
    """
    limit_s = num_parts * (timeout_s or TIMEOUT_S)
    if budget_s and budget_s > limit_s:
        parts = f"{num_parts} x " if num_parts > 1 else ""
        allowed = (
            f"at most {parts}--timeout ({limit_s:g}s), after which a device counts as stuck"
        )
        raise ConfigError("budget", typed or f"{budget_s:g}s", allowed)
