"""The device of a plan and its links: what a step of a layout costs there."""

import dataclasses
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.stage_costs import Seconds
from stepmark.model.device import DeviceSpec, find_device_by_alias, unknown_device
from stepmark.model.network import Network
from stepmark.model.systems import IN_HOST, network_of
from stepmark.predictions import framework_job
from stepmark.predictions.factors import Anchored
from stepmark.predictions.framework_job import FrameworkJob
from stepmark.predictions.inputs import Inputs, no_host
from stepmark.predictions.predict import costs_of, of_job
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.prediction import Prediction
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import CommOp, ComputeOp, Group, Kernel
from stepmark.timeline.step_cost import Costs, OpCost

_LINKS = ("network", "gpus_per_host", "nics", "nic", "latency", "oversubscription", "reduction")
_MEASURED = ("calibration", "curve", "anchor", "runs")
_OTHERS = ("device", "host", "tokens", "price")
_SHARDED = ("fsdp", "replicate", "expert_fsdp", "expert_replicate")  # groups
_FREE = OpCost(time_s={}, num_kernels=0.0)


def _gathered(costs: Costs) -> Costs:
    """Return costs without those of FSDP's messages and of their copies."""

    def compute(op: ComputeOp) -> OpCost:
        is_copy = isinstance(op.op, Kernel) and op.op.name.startswith("fsdp_")
        return _FREE if is_copy else costs.compute(op)

    def comm(op: CommOp, group: Group) -> float:
        return 0.0 if op.group in _SHARDED else costs.comm(op, group)

    return replace(costs, compute=compute, comm=comm)


def inputs_of_cluster(options: PlanOptions) -> dict[str, Any]:
    """Return the options of a prediction that say what its costs are, by name."""
    return {name: getattr(options, name) for name in (*_LINKS, *_MEASURED, *_OTHERS)}


@dataclass
class Cluster:
    """A number of GPUs and what connects them. anchored: factors by measured steps."""

    options: PlanOptions
    num_gpus: int
    anchored: Anchored | None = None
    _inputs: Inputs | None = None  # of the newest step

    @cached_property
    def device(self) -> DeviceSpec:
        device = find_device_by_alias(self.options.device)
        if device is None and "," in self.options.device:
            allowed = "one device: `stepmark plan` searches the layouts of one"
            raise ConfigError("device", self.options.device, allowed)
        if device is None:
            raise unknown_device(self.options.device)
        if device.hbm_bytes is None:
            raise ConfigError("device", device.key, "one whose memory is known")
        return device

    @property
    def most_bytes(self) -> float:
        """Bytes of a GPU that a layout may need."""
        assert self.device.hbm_bytes is not None
        return self.options.memory * self.device.hbm_bytes

    @cached_property
    def network(self) -> Network | None:
        return network_of(self.device, self.num_gpus, self.options)

    @property
    def gpus_per_host(self) -> int:
        return self.network.gpus_per_host if self.network else IN_HOST

    def measured_s(self, candidate: Candidate) -> float | None:
        """Return the seconds of a layout among the anchors."""
        return self.anchored.measured_s.get(candidate.step) if self.anchored else None

    @property
    def space(self) -> LayoutSpace:
        """All layouts of these GPUs."""
        return LayoutSpace(
            options=self.options, num_gpus=self.num_gpus, gpus_per_host=self.gpus_per_host
        )

    def job(self, candidate: Candidate) -> FrameworkJob:
        """Return the options with which `stepmark predict` predicts a layout."""
        cls = framework_job.options_class(candidate.framework)
        names = {field.name for field in dataclasses.fields(cls)}
        values = {**inputs_of_cluster(self.options), **candidate.options}
        values["nproc"] = values.pop("world_size")
        given = {name: value for name, value in values.items() if value is not None}
        return cls(models=self.options.models, **{n: v for n, v in given.items() if n in names})

    def seconds(self, candidate: Candidate) -> Seconds:
        """Return the time of a step of a few layers. Raises ConfigError."""
        workload = candidate.workload()
        job = self.job(candidate)
        if workload.world_size == 1:  # without links
            unused: dict[str, Any] = dict.fromkeys(_LINKS)
            job = replace(job, **unused)
        inputs = inputs_of(framework_job.basis_of(job), workload)
        if self.anchored:
            inputs = replace(inputs, factors=self.anchored.factors)
        costs, _ = costs_of(inputs)
        host_s = sum(
            count
            * (costs.compute(op).host_s if isinstance(op, ComputeOp) else costs.host_comm_s(op))
            for op, count in workload.issued().items()
        )
        ahead, _ = costs_of(replace(inputs, host_s=no_host))
        if candidate.is_gathered:
            ahead = _gathered(ahead)
        self._inputs = inputs
        return Seconds(simulate(workload, ahead).step_s, host_s)

    def send_s(self, op: CommOp, group: Group) -> float:
        """Return the seconds of a message between stages, once a step was simulated."""
        return self._costs.comm(op, group)

    @cached_property
    def _costs(self) -> Costs:
        assert self._inputs, "the parts are those of any step"
        return costs_of(replace(self._inputs, network=self.network))[0]

    def predicted(self, candidate: Candidate) -> Prediction:
        """Return the prediction of a layout, that of `stepmark predict`. Raises ConfigError."""
        return of_job(
            self.job(candidate),
            make=lambda *_: candidate.workload(),
            anchored=self.anchored,
        )
