"""The search of a layout: what may fit is estimated, and the best are simulated."""

import dataclasses
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from stepmark.ground.errors import ConfigError
from stepmark.ground.options import argv
from stepmark.ground.units import format_bytes
from stepmark.ground.waiting import Waiting
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layout_space import LayoutSpace
from stepmark.layouts.plan_options import PlanOptions
from stepmark.layouts.stage_costs import Estimator, Seconds
from stepmark.model.device import DeviceSpec, find_device_by_alias, unknown_device
from stepmark.model.network import Network
from stepmark.model.systems import IN_HOST, network_of
from stepmark.predictions import framework_job
from stepmark.predictions.comm import CommCosts
from stepmark.predictions.framework_job import FrameworkJob
from stepmark.predictions.inputs import no_host
from stepmark.predictions.predict import costs_of, of_job
from stepmark.predictions.predict_inputs import inputs_of
from stepmark.predictions.prediction_grid import Row, row_of
from stepmark.predictions.simulation import simulate
from stepmark.step.workload import CommOp, ComputeOp, Group

_NETWORK = ("network", "gpus_per_host", "nics", "nic", "latency", "oversubscription")
# How much an estimate may be above its simulation, an assumption: means of groups are below it
# (validation/plan_estimates.py), single layouts with one or two micro-batches are not always.
ERROR = 0.1


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """Layouts for a number of GPUs that were simulated, the fastest first.

    jobs: their options of `stepmark predict`. neighbours: layouts that differ from the best in
    one axis each, of each axis the fastest. num_layouts: of all; num_too_large: of those,
    layouts that need more memory than allowed, as far as they were looked at.
    """

    num_gpus: int
    rows: Sequence[Row]
    jobs: Sequence[FrameworkJob]
    neighbours: Mapping[str, Row]
    num_layouts: int
    num_too_large: int
    took_s: float

    @property
    def command(self) -> str:
        """Return the command that predicts the best layout."""
        return f"stepmark predict {shlex.join(argv(self.jobs[0]))}"


@dataclass
class Cluster:
    """The device and its links."""

    options: PlanOptions
    num_gpus: int

    @cached_property
    def device(self) -> DeviceSpec:
        device = find_device_by_alias(self.options.device)
        if device is None:
            raise unknown_device(self.options.device)
        if device.hbm_bytes is None:
            raise ConfigError("device", device.key, "one whose memory is known")
        return device

    @cached_property
    def network(self) -> Network | None:
        return network_of(self.device, self.num_gpus, self.options)

    @cached_property
    def comm(self) -> CommCosts:
        return CommCosts((), self.network, self.num_gpus)

    @property
    def gpus_per_host(self) -> int:
        return self.network.gpus_per_host if self.network else IN_HOST

    def job(self, candidate: Candidate) -> FrameworkJob:
        """Return the options with which `stepmark predict` predicts a layout."""
        cls = framework_job.options_class(candidate.framework)
        names = {field.name for field in dataclasses.fields(cls)}
        of_cluster = {
            name: getattr(self.options, name)
            for name in (*_NETWORK, "reduction", "device", "host", "tokens", "price")
        }
        values = {**of_cluster, **candidate.options}
        values["nproc"] = values.pop("world_size")
        given = {name: value for name, value in values.items() if value is not None}
        return cls(models=self.options.models, **{n: v for n, v in given.items() if n in names})

    def seconds(self, candidate: Candidate) -> Seconds:
        """Return the time of a step of a few layers. Raises ConfigError."""
        workload = candidate.workload()
        job = self.job(candidate)
        if workload.world_size == 1:  # without links
            unused: dict[str, Any] = dict.fromkeys((*_NETWORK, "reduction"))
            job = replace(job, **unused)
        inputs = inputs_of(framework_job.basis_of(job), workload)
        costs, _ = costs_of(inputs)
        host_s = sum(
            count
            * (costs.compute(op).host_s if isinstance(op, ComputeOp) else costs.host_comm_s(op))
            for op, count in workload.issued().items()
        )
        ahead, _ = costs_of(replace(inputs, host_s=no_host))
        return Seconds(simulate(workload, ahead).step_s, host_s)

    def send_s(self, op: CommOp, group: Group) -> float:
        """Return the seconds of a message between stages."""
        return self.comm(op, group)

    def row(self, candidate: Candidate, estimate_s: float) -> Row:
        """Return the row of a layout, simulated as `stepmark predict` does."""
        prediction = of_job(self.job(candidate), make=lambda *_: candidate.workload())
        return {
            "gpus": self.num_gpus,
            **candidate.axes,
            "dp": candidate.parallel.data_ranks,
            **row_of(prediction.figures()),
            "estimated_s": estimate_s,
        }


def search(options: PlanOptions, num_gpus: int) -> LayoutSearch:
    """Return the best layouts for a number of GPUs. Raises ConfigError."""
    began_s = time.monotonic()
    cluster = Cluster(options, num_gpus)
    space = LayoutSpace(options=options, num_gpus=num_gpus, gpus_per_host=cluster.gpus_per_host)
    assert cluster.device.hbm_bytes is not None
    most_bytes = options.memory * cluster.device.hbm_bytes
    with Waiting(f"looking for layouts of {num_gpus} GPUs"):
        layouts = [*space.layouts()]
        smaller = [each for each in layouts if each.least_bytes <= most_bytes]
    if not layouts:
        raise _none(space)
    estimator = Estimator(cluster.seconds, cluster.send_s)
    errors: list[ConfigError] = []
    with Waiting(f"estimating {len(smaller)} layouts"):
        estimates = [*_estimates(estimator, smaller, errors)]
    simulated: list[tuple[Row, Candidate]] = []
    too_large: list[Candidate] = []
    with Waiting("simulating the best layouts"):
        for estimate_s, number in sorted(estimates):
            best_s = min((row["step_s"] for row, _ in simulated), default=math.inf)
            if len(simulated) >= options.top and estimate_s * (1 - ERROR) > best_s:
                break
            candidate = smaller[number]
            if candidate.needed_bytes > most_bytes:
                too_large.append(candidate)
                continue
            try:
                simulated.append((cluster.row(candidate, estimate_s), candidate))
            except ConfigError as error:  # as messages that do not divide
                errors.append(error)
    if not simulated:
        if errors and not too_large:
            raise errors[0]
        raise _too_large(options, most_bytes, layouts, too_large)
    simulated.sort(key=lambda pair: pair[0]["step_s"])
    best = simulated[0][1]
    fits = (
        (estimate_s, smaller[number])
        for estimate_s, number in sorted(estimates)
        if smaller[number].framework == best.framework
        and smaller[number].needed_bytes <= most_bytes
    )
    with Waiting("simulating layouts like the best"):
        neighbours = {
            axis: cluster.row(candidate, estimate_s)
            for axis, (estimate_s, candidate) in _neighbours(best, fits).items()
        }
    return LayoutSearch(
        num_gpus=num_gpus,
        rows=[row for row, _ in simulated],
        neighbours=neighbours,
        jobs=[cluster.job(candidate) for _, candidate in simulated],
        num_layouts=len(layouts),
        num_too_large=len(layouts) - len(smaller) + len(too_large),
        took_s=time.monotonic() - began_s,
    )


def _estimates(
    estimator: Estimator, layouts: Sequence[Candidate], errors: list[ConfigError]
) -> Iterator[tuple[float, int]]:
    """Yield the estimates of layouts with their numbers. errors: of those that are refused."""
    for number, layout in enumerate(layouts):
        try:
            yield estimator.step_s(layout), number
        except ConfigError as error:  # as messages that do not divide
            errors.append(error)


def _neighbours(
    best: Candidate, layouts: Iterable[tuple[float, Candidate]]
) -> dict[str, tuple[float, Candidate]]:
    """Return the first layout that differs from the best in one axis, by this axis."""
    neighbours: dict[str, tuple[float, Candidate]] = {}
    for estimate_s, candidate in layouts:
        own = candidate.axes
        changed = [axis for axis, value in best.axes.items() if own[axis] != value]
        if len(changed) == 1:
            neighbours.setdefault(changed[0], (estimate_s, candidate))
    return neighbours


def _none(space: LayoutSpace) -> ConfigError:
    """Return why there is no layout."""
    if space.refused:
        return space.refused[0]
    options = space.options
    allowed = (
        f"one that layouts of {space.num_gpus} GPUs divide: a multiple of the data ranks and "
        "micro-batches of one of them"
    )
    return ConfigError("gbs", options.gbs, allowed)


def _too_large(
    options: PlanOptions,
    most_bytes: float,
    layouts: Sequence[Candidate],
    derived: Sequence[Candidate],
) -> ConfigError:
    """Return that no layout fits. derived: those whose memory is known."""
    if derived:
        needs = f"layouts need {format_bytes(min(each.needed_bytes for each in derived))}"
    else:
        least = min(each.least_bytes for each in layouts)
        needs = f"weights and optimizer states alone need {format_bytes(round(least))}"
    allowed = (
        f"more GPUs, or ones with more memory: {needs} of a GPU at least, which may give "
        f"{format_bytes(round(most_bytes))}"
    )
    return ConfigError("gpus", options.gpus[0], allowed)
