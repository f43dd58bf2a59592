"""All layouts of a model on a number of GPUs that a framework accepts.

Degrees are divisors of the GPUs; tensor parallelism stays inside a host, and pipelines have
stages whose layers differ by one at most. The batch is the same for all.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from stepmark.ground.errors import ConfigError
from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layer_kinds import stages_of
from stepmark.layouts.plan_options import (
    ALL_TO_ALL,
    BOTH,
    EXCHANGES,
    SCHEDULES,
    TWO_HOP,
    PlanOptions,
)
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import PipelineSchedule
from stepmark.model.systems import IN_HOST
from stepmark.workloads import workload_flags
from stepmark.workloads.job import Job
from stepmark.workloads.models import read_models
from stepmark.workloads.workload import job_of

FRAMEWORKS = ("megatron", "pytorch")
_MOST_STAGES = 64
_MOST_CHUNKS = 8
_MOST_EXPERT_RANKS = 64
_MBS = (1, 2, 4, 8)
_TOKENS_OF_CP = 8192  # of a sequence on a rank, from which cp divides it
_LEAST_SHARDS = 8  # ranks that shard weights, if others have the same ones
_REPLICAS = (1, 4, 16, 64)
_SHARES = {"none": 0.0, "quarter": 0.25, "half": 0.5, "full": 1.0}
_CHECKPOINTS: Mapping[str, Mapping[str, Any]] = {
    "none": {"recompute": "none"},
    "quarter": {"recompute": "blocks", "recompute_some": 1, "recompute_every": 4},
    "half": {"recompute": "blocks", "recompute_some": 1, "recompute_every": 2},
    "full": {"recompute": "full"},
}


class Axes(NamedTuple):
    """Degrees of parallelism and sequences per micro-batch."""

    tp: int
    pp: int
    cp: int
    ep: int
    mbs: int


@dataclass(kw_only=True)
class LayoutSpace:
    """Layouts for a number of GPUs. refused: reasons of those that no framework accepts."""

    options: PlanOptions
    num_gpus: int
    gpus_per_host: int
    refused: list[ConfigError] = field(default_factory=list)

    @cached_property
    def model(self) -> ModelConfig:
        """The model. Raises ConfigError."""
        return model_of(self.options)

    def axes(self) -> Iterator[Axes]:
        """Yield degrees and micro-batches whose product divides the GPUs and the batch.

        Raises ConfigError for a wrong model.
        """
        options = self.options
        divisors = [n for n in range(1, self.num_gpus + 1) if not self.num_gpus % n]
        model = self.model
        experts = model.moe.num_experts if model.moe else 1
        degrees = (
            options.tp or [n for n in divisors if n <= self.gpus_per_host],
            options.pp or [n for n in divisors if n <= min(_MOST_STAGES, model.num_layers)],
            options.cp or _powers((options.seq_len or model.seq_len) // _TOKENS_OF_CP),
            options.ep or [n for n in _powers(_MOST_EXPERT_RANKS) if not experts % n],
        )
        self._check_exchange(max(degrees[2]))
        self._check_schedules(degrees[1])
        for tp, pp, cp, ep in itertools.product(*degrees):
            data_ranks, rest = divmod(self.num_gpus, tp * pp * cp)
            if rest or options.gbs % data_ranks or (ep > 1 and data_ranks * cp % ep):
                continue
            for mbs in options.mbs or _MBS:
                if not options.gbs // data_ranks % mbs:
                    yield Axes(tp=tp, pp=pp, cp=cp, ep=ep, mbs=mbs)

    def _check_schedules(self, degrees: Sequence[int]) -> None:
        """Raise ConfigError for a --pp-schedule that no layout has. degrees: of pp."""
        options = self.options
        if options.pp_schedule == SCHEDULES[:1]:
            return
        if options.framework == "megatron":
            allowed = "left out with --framework megatron, whose pipelines have 1F1B"
            raise ConfigError("pp-schedule", ",".join(options.pp_schedule), allowed)
        possible = {
            "1f1b" if schedule is PipelineSchedule.INTERLEAVED else schedule.value
            for pp in degrees
            if pp > 1
            for schedule, _ in _pipelines(options, self.model, pp)
        }
        for name in options.pp_schedule:
            if name not in possible:
                allowed = "one of layouts with --pp 2 or more (zbv, dualpipev: and --vpp 2)"
                raise ConfigError("pp-schedule", name, allowed)

    def _check_exchange(self, cp: int) -> None:
        """Raise ConfigError for --cp-comm-type where no layout exchanges so. cp: the most."""
        kinds = self.options.cp_comm_type
        if kinds != EXCHANGES[:1] and (cp == 1 or self.options.framework == "pytorch"):
            allowed = "left out without layouts of megatron with cp > 1 (--cp)"
            raise ConfigError("cp-comm-type", ",".join(kinds), allowed)

    def layouts(self, axes: Sequence[Axes]) -> Iterator[Candidate]:
        """Yield the layouts with these axes that the frameworks accept."""
        chosen = self.options.framework
        for framework in FRAMEWORKS if chosen == BOTH else (chosen,):
            cls = workload_flags.options_class(framework, has_ignored=False)
            of_framework = _of_megatron if framework == "megatron" else _of_pytorch
            for each in axes:
                data_ranks = self.num_gpus // (each.tp * each.pp * each.cp)
                for own, dispatch in itertools.product(
                    of_framework(self.options, self.model, each, data_ranks),
                    self._dispatches(framework, each),
                ):
                    values = {**each._asdict(), **own, **dispatch}
                    yield from self._accepted(framework, cls, values)

    def _dispatches(self, framework: str, axes: Axes) -> Iterator[dict[str, Any]]:
        """Yield options of the exchange of tokens. Without ep no rank has more than others."""
        options = self.options
        if axes.ep == 1:
            yield {}
            return
        imbalance = {} if options.imbalance == 1 else {"imbalance": options.imbalance}
        if ALL_TO_ALL in options.dispatch:
            yield imbalance
        if TWO_HOP in options.dispatch and framework == "megatron":
            flex = {"moe_token_dispatcher_type": "flex"}
            if self.gpus_per_host == IN_HOST:
                yield {**imbalance, **flex}
            else:
                yield {**imbalance, **flex, "moe_deepep_gpus_per_host": self.gpus_per_host}

    def _accepted(
        self, framework: str, cls: Any, values: Mapping[str, Any]
    ) -> Iterator[Candidate]:
        """Yield the layout of these options, if the framework accepts it."""
        options = self.options
        own = {
            "framework": framework,
            "world_size": self.num_gpus,
            "gbs": options.gbs,
            "seq_len": options.seq_len,
            "packing": options.packing,
            "precision": options.precision,
            **values,
        }
        try:
            job, settings, _ = job_of(cls(model=options.models[0], **own))
            assert isinstance(job, Job)
            candidate = Candidate(framework=framework, job=job, settings=settings, options=own)
            sizes = [stage.total() for stage in stages_of(candidate)]
        except ConfigError as error:
            self.refused.append(error)
            return
        is_even = max(sizes) <= -(-job.model.num_layers // len(sizes)) + 1
        if is_even or options.pp:
            yield candidate


def model_of(options: PlanOptions) -> ModelConfig:
    """Return the model. Raises ConfigError."""
    if options.framework == "pytorch" and options.dispatch != (ALL_TO_ALL,):
        allowed = "alltoall with PyTorch's layouts"
        raise ConfigError("dispatch", ",".join(options.dispatch), allowed)
    models = read_models(",".join(options.models))
    if len(models) != 1:
        raise ConfigError("model", ", ".join(options.models) or None, "one model")
    (model,) = models
    if model.num_mtp_layers:  # steps of few layers would have another layer inside
        allowed = "one without multi-token prediction (`stepmark predict` has it)"
        raise ConfigError("model", model.name, allowed)
    if model.moe is None and (options.imbalance > 1 or options.dispatch != (ALL_TO_ALL,)):
        name = "imbalance" if options.imbalance > 1 else "dispatch"
        value = options.imbalance if options.imbalance > 1 else ",".join(options.dispatch)
        raise ConfigError(name, value, "left out for a model without experts")
    if not all(layer.has_kv for layer in model.pattern):
        what = "keys and values of their own, since plan estimates kinds of layers one by one"
        raise ConfigError("model", model.name, f"one whose layers have {what}")
    return model


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number, at least 1."""
    return [1 << power for power in range(max(1, most).bit_length())]


def _chunks(options: PlanOptions, model: ModelConfig, pp: int) -> Sequence[int]:
    """Return the numbers of model chunks of a stage."""
    if pp == 1:
        return (1,) if not options.vpp or 1 in options.vpp else ()
    if options.vpp:
        return options.vpp
    layers = model.num_layers
    fits = (
        v
        for v in range(2, _MOST_CHUNKS + 1)
        if not layers % (pp * v) or not (layers + 2) % (pp * v)
    )
    return (1, *fits)


def megatron_settings(options: PlanOptions, model: ModelConfig) -> dict[str, Any]:
    """Return the settings of all layouts of Megatron-LM: all that costs nothing."""
    common: dict[str, Any] = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "sequence_parallel": True,  # without effect if tp is 1
    }
    if model.moe:
        common["expert_tensor_parallel_size"] = 1
    if options.packing:
        common["create_attention_mask_in_dataloader"] = False
    return common


def _of_megatron(
    options: PlanOptions, model: ModelConfig, axes: Axes, _data_ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield settings of Megatron-LM: what all layouts have, chunks, recomputed layers."""
    common = megatron_settings(options, model)
    kinds = options.cp_comm_type if axes.cp > 1 else EXCHANGES[:1]
    for chunks, kind in itertools.product(_chunks(options, model, axes.pp), kinds):
        own = dict(common)
        if kind != EXCHANGES[0]:
            own["cp_comm_type"] = kind
        if chunks > 1:
            own["virtual_pipeline_model_parallel_size"] = chunks
        layers = -(-model.num_layers // (axes.pp * chunks))
        counts = {math.ceil(_SHARES[word] * layers) for word in options.recompute}
        for count in sorted(counts):
            if not count:
                yield own
            elif count == layers:
                yield own | {"recompute_granularity": "full"}
            else:
                yield own | {
                    "recompute_granularity": "full",
                    "recompute_method": "block",
                    "recompute_num_layers": count,
                }


def _of_pytorch(
    options: PlanOptions, model: ModelConfig, axes: Axes, data_ranks: int
) -> Iterator[dict[str, Any]]:
    """Yield settings of PyTorch: replicas, schedules and chunks, checkpointed blocks."""
    for replicas, pipeline, word in itertools.product(
        _REPLICAS, list(_pipelines(options, model, axes.pp)), options.recompute
    ):
        shards, rest = divmod(data_ranks, replicas)
        if rest or (replicas > 1 and shards < _LEAST_SHARDS):
            continue
        schedule, chunks = pipeline
        if word != "none" and schedule.splits_backward:
            continue
        own: dict[str, Any] = {"dp_replicate": replicas, **_CHECKPOINTS[word]}
        if schedule is not PipelineSchedule.ONE_F_ONE_B:
            own["pp_schedule"] = schedule.value
        if schedule.has_stages:
            own["pp_stages"] = chunks
        yield own


def _pipelines(
    options: PlanOptions, model: ModelConfig, pp: int
) -> Iterator[tuple[PipelineSchedule, int]]:
    """Yield schedules of PyTorch with the stages of a rank."""
    plain = PipelineSchedule.ONE_F_ONE_B
    for chunks in _chunks(options, model, pp):
        for name in options.pp_schedule if pp > 1 else (plain,):
            schedule = PipelineSchedule(name)
            if schedule is plain and chunks > 1:
                schedule = PipelineSchedule.INTERLEAVED
            if schedule.num_chunks(chunks) == chunks:
                yield schedule, chunks
