"""Estimates of step times from simulated steps of one stage with few layers.

A step of one pipeline stage takes once + layers x once_layer + micro-batches x (ends + layers x
layer), where layers of each kind (dense, with experts; recomputed or not) have seconds of their
own. Steps of up to three layers and two micro-batches tell these; they have the stage's own
ranks, so that their messages, host, contention and the overlap of both are the simulation's.

Stages of a pipeline then take (m - 1) x slowest + the sum of all / chunks (Narayanan et al.,
arXiv:2104.04473, section 2.2), and what the slowest does once.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepmark.cases.message import SEND
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layer_kinds import Kind, stages_of
from stepmark.layouts.small_steps import one_stage, without_data_ranks
from stepmark.model.layers import Layer
from stepmark.model.ops import Phase
from stepmark.step.workload import CommOp, Group
from stepmark.workloads.job import mesh_groups


class Seconds(NamedTuple):
    """Time of a step of one stage whose host is ahead, and the host's own."""

    device: float
    host: float


StepTime = Callable[[Candidate], Seconds]
SendTime = Callable[[CommOp, Group], float]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds of a stage, once a step and for each micro-batch; of a layer by its kind."""

    once_s: float
    ends_s: float
    once_of_layer_s: Mapping[Layer, float]
    layer_s: Mapping[Kind, float]

    def of_passes(self, stage: "Counter[Kind]", *, is_last: bool) -> float:
        """Return the seconds of a micro-batch; the last stage has the ends of the model."""
        layers_s = sum(count * self.layer_s[kind] for kind, count in stage.items())
        return layers_s + (self.ends_s if is_last else 0.0)

    def once_of(self, stage: "Counter[Kind]") -> float:
        """Return the seconds of a stage once a step."""
        return self.once_s + sum(
            count * self.once_of_layer_s[kind.layer] for kind, count in stage.items()
        )

    def of_stage(self, stage: "Counter[Kind]", count: int, *, is_last: bool) -> float:
        """Return the seconds of a stage with so many micro-batches."""
        return self.once_of(stage) + count * self.of_passes(stage, is_last=is_last)


class Estimator:
    """Estimates steps. time_of: simulates a step; send_s: of a message between stages."""

    def __init__(self, time_of: StepTime, send_s: SendTime) -> None:
        self._time_of = time_of
        self._send_s = send_s
        self._units: dict[object, Seconds] = {}

    def step_s(self, candidate: Candidate) -> float:
        """Return the estimated seconds of a step. Raises ConfigError."""
        stages = stages_of(candidate)
        alone = without_data_ranks(candidate)

        # Device and host ask for the same steps, whose jobs take longer to make than to find.
        @functools.cache
        def small(
            layers: tuple[Layer, ...], again: bool, count: int, *, is_alone: bool
        ) -> Seconds:
            own = alone if is_alone else candidate
            return self._unit(own, Counter(layers), again, count)

        device, host = (
            _costs(candidate, stages, small, part) for part in range(len(Seconds._fields))
        )
        # A host issues while its device waits for other stages.
        busy_s = max(
            host.of_stage(stage, candidate.job.num_microbatches, is_last=number == len(stages))
            for number, stage in enumerate(stages, 1)
        )
        return max(busy_s, self._composed(candidate, stages, device))

    def _composed(
        self, candidate: Candidate, stages: Sequence["Counter[Kind]"], costs: StageCosts
    ) -> float:
        last = len(stages)
        times = [
            costs.of_passes(stage, is_last=number == last)
            for number, stage in enumerate(stages, 1)
        ]
        slowest = max(range(len(times)), key=times.__getitem__)
        once_s = costs.once_of(stages[slowest])
        count = candidate.job.num_microbatches
        if len(stages) == 1:
            return once_s + count * times[0]
        # Fewer micro-batches than stages wait for each other in every chunk.
        chunks = candidate.num_chunks if count >= len(stages) else 1
        fill_s = (sum(times) - times[slowest]) * candidate.schedule.bubble(chunks)
        send_s = self._send(candidate)
        num_sends = 2 * (len(stages) - 1)
        if not candidate.is_megatron:  # waits for those of each pass
            num_sends += 2 * (count - 1) * candidate.num_chunks
        elif chunks == 1:
            num_sends += 2 * (count - 1)
        return once_s + count * times[slowest] + fill_s + num_sends * send_s

    def _send(self, candidate: Candidate) -> float:
        """Return the seconds of activations from a stage to the next."""
        job = candidate.job
        rows = job.tokens
        if candidate.parallel.tp > 1 and getattr(candidate.settings, "sequence_parallel", True):
            rows //= candidate.parallel.tp
        group = mesh_groups(job.parallel, {"pp": ("pp",)})["pp"]
        op = CommOp(
            collective=SEND,
            dtype=job.dtype,
            count=rows * job.model.hidden_size,
            group="pp",
            phase=Phase.FWD,
            module="pipeline",
            peer=1,
        )
        return self._send_s(op, group)

    def _unit(
        self, candidate: Candidate, counts: Mapping[Layer, int], again: bool, count: int
    ) -> Seconds:
        """Return the seconds of a step of one stage with so many layers of each kind."""
        unit = one_stage(candidate, counts, again, count)
        key = unit.framework, unit.job, unit.settings, unit.is_gathered
        if key not in self._units:
            self._units[key] = self._time_of(unit)
        return self._units[key]


def _costs(
    candidate: Candidate,
    stages: Sequence["Counter[Kind]"],
    small: Callable[..., Seconds],
    part: int,
) -> StageCosts:
    """Return the costs of the device or of its host. small: a step with these layers."""
    kinds = {kind for stage in stages for kind in stage}
    # One with experts, if there are any, stands for the others of its stage.
    layers_of_stages = {kind.layer for kind in kinds}
    own = [layer for layer in candidate.job.model.layer_counts if layer in layers_of_stages]
    main = max(own, key=lambda layer: layer.has_experts)
    layers = (main,) * _few_layers(candidate)
    layer_s: dict[Kind, float] = {}
    ends_s = 0.0

    def slope(layers: tuple[Layer, ...], again: bool) -> float:
        """Return the seconds of one more micro-batch of one stage."""
        one, two = (small(layers, again, count, is_alone=True)[part] for count in (1, 2))
        return two - one

    for again in sorted({kind.is_recomputed for kind in kinds}, reverse=True):
        few_s = slope(layers, again)
        for kind in own:
            layer_s[Kind(kind, again)] = slope((*layers, kind), again) - few_s
        ends_s = few_s - len(layers) * layer_s[Kind(main, again)]

    # Once a step is what overlaps with layers that are not recomputed, if there are any.
    def once_s(layers: tuple[Layer, ...]) -> float:
        of_passes = ends_s + sum(layer_s[Kind(kind, again)] for kind in layers)
        return small(layers, again, 1, is_alone=False)[part] - of_passes

    first = once_s(layers)
    once_of_layer_s = {kind: once_s((*layers, kind)) - first for kind in own}
    return StageCosts(
        once_s=first - len(layers) * once_of_layer_s[main],
        ends_s=ends_s,
        once_of_layer_s=once_of_layer_s,
        layer_s=layer_s,
    )


def _few_layers(candidate: Candidate) -> int:
    """Return the layers of a small step, to which one more is added.

    FSDP without a pipeline gathers a layer while the one before computes, each time.
    """
    return 2 if not candidate.is_megatron and candidate.parallel.pp == 1 else 1
