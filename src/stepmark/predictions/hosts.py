"""The host's time for operations of a step that was not calibrated: data/host_times.toml."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from stepmark.cases.message import RECV, SEND
from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import CompileScope
from stepmark.model.ops import Phase
from stepmark.step.workload import FSDP, FSDP_REDUCE, CommOp, ComputeOp, Operation, Workload

DEFAULT = "typical"
HOST = "host"  # role of the steps that a calibration measures for the host's time
_EXPERTS = ("mlp.router", "mlp.experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A measured host, with its time for an eager operation of a pass.

    origin: the machine and the date of the measurement.
    """

    name: str
    forward_s: float
    backward_s: float
    origin: str


@cache
def _tables() -> dict[str, Any]:
    text = files("stepmark").joinpath("data", "host_times.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def load_hosts() -> Mapping[str, Host]:
    """Return the hosts of host_times.toml by name."""
    return {
        name: Host(
            name=name,
            forward_s=table["forward_us"] * 1e-6,
            backward_s=table["backward_us"] * 1e-6,
            origin=f"{table['date']} on {table['machine']}",
        )
        for name, table in _tables()["hosts"].items()
    }


def ratio(kind: str) -> float:
    """Return the time of an operation of a kind over that of an eager one."""
    value: float = _tables()["ratios"][kind]["ratio"]
    return value


class Launch(StrEnum):
    """How the host launches the computation of layers."""

    EAGER = "eager"
    COMPILED = "compiled"
    GRAPH = "graph"  # the step is one CUDA graph


def launch_of(workload: Workload, case: TrainCase | None) -> Launch:
    """Return how the host launches a step. case: of stepmark train; None: another job."""
    if case is not None and case.cuda_graph:
        return Launch.GRAPH
    scope = CompileScope(str(workload.settings.get("compile", CompileScope.NONE)))
    return Launch.COMPILED if scope.has_blocks else Launch.EAGER


class HostTimes:
    """The host's time for each operation of a workload, in seconds."""

    def __init__(self, host: Host, workload: Workload, launch: Launch = Launch.EAGER) -> None:
        self.host = host
        self.launch = launch
        has_tp = "tp" in workload.groups and workload.groups["tp"].size > 1
        # PyTorch's rules have names by the way of sharding, too: tp, fsdp, ...
        self._has_dtensors = "tp_plan" in workload.settings and has_tp
        self._layers_per_update = _layers_per_update(workload)

    def __call__(self, op: Operation) -> float:
        if self.launch is Launch.GRAPH:  # one launch
            return 0.0
        is_forward = op.phase is Phase.FWD
        eager_s = self.host.forward_s if is_forward else self.host.backward_s
        return eager_s * self.amount(op) * math.prod(map(ratio, self.kinds(op)))

    def note(self) -> str:
        """Return which host it is, its time for an operation, and where this is from."""
        if self.launch is Launch.GRAPH:
            return "host time: the step is one CUDA graph, which the host launches at once"
        host = self.host
        is_compiled = self.launch is Launch.COMPILED
        forward_s = host.forward_s * (ratio("compiled") if is_compiled else 1.0)
        text = f"{forward_s * 1e6:.0f} us per {self.launch} forward operation"
        return f"host time: {host.name}, {text} (measured {host.origin})"

    def amount(self, op: Operation) -> float:
        """Return the layers that an operation of the optimizer goes through; 1 for others."""
        is_update = isinstance(op, ComputeOp) and op.phase is Phase.OPTIM
        return self._layers_per_update if is_update else 1.0

    def kinds(self, op: Operation) -> tuple[str, ...]:
        """Return the kinds of an operation, whose ratios multiply; (): it is eager."""
        if isinstance(op, CommOp):
            return (self._collective(op),)
        if op.phase is Phase.OPTIM:
            return ("optimizer",)
        if self.launch is Launch.COMPILED:  # experts as well, whose kernels are fused then
            return ("compiled",)
        kinds = ("experts",) if op.module.startswith(_EXPERTS) else ()
        return (*kinds, "dtensor") if self._has_dtensors else kinds

    def _collective(self, op: CommOp) -> str:
        if op.collective in (SEND, RECV):
            return "transfer"
        if op.stream in (FSDP, FSDP_REDUCE):
            return "fsdp_collective"
        if self._has_dtensors and op.group == "tp":
            is_norm = op.phase is Phase.OPTIM  # of a gradient, for clipping
            return "dtensor_norm" if is_norm else "dtensor_collective"
        return "collective"


def _layers_per_update(workload: Workload) -> float:
    """Return the layers by operations of the optimizer; 1 where layers are not known."""
    num_layers = workload.model.num_layers if workload.model else 0
    operations = sum(
        count
        for op, count in workload.issued().items()
        if isinstance(op, ComputeOp) and op.phase is Phase.OPTIM
    )
    return num_layers / operations if num_layers and operations else 1.0
