"""Memory of Megatron-LM's ranks: parameters with their states, and what passes keep.

Sources, of megatron-core 0.16.1: optimizer/optimizer.py (Float16OptimizerWithFloat16Params),
distrib_optimizer.py and distributed/param_and_grad_buffer.py: 16-bit weights, fp32 gradients
and, on their owner, fp32 weights and two moments, thus 18 bytes a parameter, or 6 + 12 / ranks
(megatron/training/theoretical_memory_usage.py has the same). tensor_parallel/layers.py: the
input of a column-parallel layer is saved divided and gathered again, into one buffer
(utils.py, GlobalMemoryBuffer). tensor_parallel/cross_entropy.py: logits, and a copy in fp32
that becomes their softmax and then their gradient. fusions/fused_bias_swiglu.py keeps the input
of the activation. TransformerEngine 2.11, pytorch/module/base.py (get_weight_workspace): narrow
weights stay in both layouts from a step's first micro-batch on; pytorch/module/linear.py keeps
narrow inputs. tensor_parallel/random.py: a checkpoint keeps its input; one without output
(CheckpointWithoutOutput) keeps it, too, and frees its output. Fused attention saves no scores;
unfused attention saves probabilities, and dropout their mask and what it leaves of them.

What a module keeps is in the tree (step/module.py, SavedTensors). Without experts, and with
sequence parallelism, its sum is that of Korthikanti et al. (arXiv:2205.05198, equation 4):
(34 s b h + 5 a s^2 b) / t with stored scores and dropout, 32 s b h / t with neither.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stepmark.ground.dtypes import DType
from stepmark.step.module import Module
from stepmark.step_memory.rank_memory import (
    ChunkMemory,
    RankMemory,
    fullest,
    with_fragments,
)
from stepmark.workloads.job import Job
from stepmark.workloads.pipeline import Pipeline, passes
from stepmark.workloads.rules.megatron import (
    adam_states,
    cpu_offload,
    gradients,
    muon,
)
from stepmark.workloads.rules.megatron.activation_offload import StageCopies
from stepmark.workloads.rules.megatron.chunk import (
    Kind,
    groups_in,
    kinds_of,
    params_of,
    plan_of,
    selected,
)
from stepmark.workloads.rules.megatron.plan import Plan, make_plan
from stepmark.workloads.rules.megatron.saved_tensors import saved_bytes
from stepmark.workloads.rules.megatron.settings import Granularity, Megatron
from stepmark.workloads.rules.megatron.stage_partition import Chunk, partition

_FP32 = DType.FP32.itemsize
_MOMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTensors:
    """Tensors of a framework that divides a model as Megatron-LM does, beyond Megatron-LM's.

    logit_bytes: of a logit while the loss is computed. grad_bytes: of a parameter, its gradient
    before it is added to the sum.
    """

    logit_bytes: int = 0
    grad_bytes: int = 0


def stage_memories(
    job: Job, settings: Megatron, others: OtherTensors | None = None
) -> list[RankMemory]:
    """Return the memory of a rank of each pipeline stage. Raises ConfigError."""
    return [*_stages(job, settings, others)]


def first_stage(job: Job, settings: Megatron) -> RankMemory:
    """Return the memory of a rank of the first stage. Raises ConfigError."""
    return next(_stages(job, settings))


def _stages(
    job: Job, settings: Megatron, others: OtherTensors | None = None
) -> Iterator[RankMemory]:
    plan = make_plan(job, settings)
    chunks_by_stage, _ = partition(plan)
    layers = _Layers(plan, others or OtherTensors())
    for stage, chunks in enumerate(chunks_by_stage):
        yield _stage(layers, plan.pipeline, stage, chunks)


def _stage(
    layers: "_Layers", pipeline: Pipeline, stage: int, chunks: Sequence[Chunk]
) -> RankMemory:
    plan = layers.plan
    state = _state_bytes(plan, layers, chunks)
    gathered = layers.gathered + (0 if plan.job.parallel.pp == 1 else 2 * layers.rows)
    state["gradients_bytes"] += (
        layers.others.grad_bytes * state["weights_bytes"] // plan.job.dtype.itemsize
    )
    memories = [layers.chunk(chunk) for chunk in chunks]
    order = passes(pipeline, stage)
    if plan.settings.offload_words:
        peak = fullest(*_offloaded(layers, order, chunks, memories))
    else:
        peak = fullest(order, memories)
    updated = adam_states.temporary_bytes(plan) * (
        state["optimizer_bytes"] // adam_states.state_bytes(plan)
    )
    if updated > sum(peak.values()):  # more than passes have, which are over then
        peak = {"activations": 0, "working": updated, "head": 0}
    return RankMemory(
        stage=stage,
        **state,
        gathered_bytes=gathered,
        **{f"{name}_bytes": size for name, size in peak.items()},
        reserved_bytes=with_fragments(sum(state.values()), gathered + sum(peak.values())),
    )


def _offloaded(
    layers: "_Layers",
    order: Iterable[tuple[int, bool]],
    chunks: Sequence[Chunk],
    memories: Sequence[ChunkMemory],
) -> tuple[list[tuple[int, bool]], list[ChunkMemory]]:
    """Return passes and their memory with what they leave on the device.

    On its way is at most what a layer copies, which it has in its own backward pass, and one
    group that the layer before needs next. The stage keeps what it received for the backward
    pass, which a fused norm's copy does not release.
    """
    plan = layers.plan
    groups = [[groups_in(plan, layers.kinds[unit]) for unit in chunk.units] for chunk in chunks]
    counts = Counter[tuple[int, bool]]()
    places: list[tuple[int, int, bool]] = []
    for chunk, is_forward in order:
        places.append((chunk, counts[chunk, is_forward], is_forward))
        counts[chunk, is_forward] += 1
    copies = StageCopies(groups, places)
    by_pass: list[ChunkMemory] = []
    for number, microbatch, _ in places:
        units = copies.passes[number, microbatch, True].sends
        sizes = [[group.copied for group in unit] for unit in units]
        saved = memories[number].saved - sum(group.freed for unit in units for group in unit)
        is_received = plan.job.parallel.pp > 1 and not chunks[number].has_embedding
        if is_received and plan.model.mla is None:
            first = itertools.chain(*units[:1])
            norms = (group for group in first if group.name == "qkv_linear" and group.freed)
            saved += sum(layers.rows for _ in norms)
        copied = max(map(sum, sizes), default=0) + max(itertools.chain(*sizes), default=0)
        by_pass.append(replace(memories[number], saved=saved, copied=copied))
    return [(index, place[2]) for index, place in enumerate(places)], by_pass


def _state_bytes(plan: Plan, layers: "_Layers", chunks: Sequence[Chunk]) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer, which stay from step to step."""
    of_weight = plan.job.dtype.itemsize
    of_state = adam_states.state_bytes(plan)
    weights = states = grads = 0
    for chunk in chunks:
        params = layers.params_of(chunk)
        numel = sum(param.count for param in params) + layers.num_frozen(chunk)
        weights += of_weight * numel + _narrow_copies(plan, params)
        for bucket in gradients.buckets(plan, params, split=False):
            grads += plan.gradient_dtype.itemsize * bucket.padded
            own = gradients.own_count(plan, bucket)
            states += of_state * cpu_offload.device_count(plan, own)
    if plan.settings.optimizer.is_muon:
        all_params = [param for chunk in chunks for param in layers.params_of(chunk)]
        states = _muon_states(plan, all_params, of_state - _MOMENTS * _FP32)
    return {"weights_bytes": weights, "gradients_bytes": grads, "optimizer_bytes": states}


def _muon_states(plan: Plan, params: Sequence[gradients.Param], of_weight: int) -> int:
    """Return the bytes of the rank with most: a matrix has one moment, all else two.

    of_weight: bytes of a parameter besides moments.
    """

    def size(share: tuple[gradients.Param, ...]) -> int:
        moments = sum(param.count * (1 if param.matrix else _MOMENTS) for param in share)
        return moments * _FP32 + of_weight * sum(param.count for param in share)

    by_rank = muon.shares(plan, params)
    return max(map(size, by_rank.dense)) + max(map(size, by_rank.experts))


def _narrow_copies(plan: Plan, params: Iterable[gradients.Param]) -> int:
    """Return the bytes of narrow weights in both layouts, beside or in place of 16 bits."""
    products = plan.job.products
    count = sum(param.count for param in params if param.is_narrow)
    if products is None or not count:
        return 0
    copies = 2 * products.weight_bytes(count)
    return copies - (plan.job.dtype.itemsize * count if plan.settings.fp8_param_gather else 0)


@dataclass(frozen=True)
class _Layers:
    """Bytes that layers and ends of the model keep."""

    plan: Plan
    others: OtherTensors

    @cached_property
    def params(self) -> dict[str, tuple[gradients.Param, ...]]:
        """Trained parameters of a layer by kind."""
        plan = self.plan
        return {kind.name: params_of(plan, kind) for kind in dict.fromkeys(self.kinds)}

    @cached_property
    def layers(self) -> dict[str, "_Layer"]:
        """What a layer keeps by kind."""
        return {
            kind.name: _layer(plan_of(self.plan, kind), kind)
            for kind in dict.fromkeys(self.kinds)
        }

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer of the model, then of each multi-token prediction."""
        return kinds_of(self.plan)

    def params_of(self, chunk: Chunk) -> tuple[gradients.Param, ...]:
        kinds = [self.kinds[unit].name for unit in chunk.units]
        return gradients.chunk_params(self.plan, chunk, kinds, self.params)

    def num_frozen(self, chunk: Chunk) -> int:
        """Return the elements of weights beside adapters, which are not trained."""
        if self.plan.lora is None:
            return 0
        tree = self.plan.tree
        units = [tree.block(self.kinds[layer].layer) for layer in chunk.layers]
        units += [tree.embedding()] if chunk.has_embedding else []
        ends = tree.output().inside if chunk.has_head else ()
        is_shared = self.plan.model.tied_embeddings and chunk.has_embedding
        units += ends[:1] if is_shared else ends
        return sum(
            param.numel for unit in units for param in unit.all_params if not param.is_trained
        )

    @property
    def rows(self) -> int:
        """Bytes of this rank's rows of the residual stream."""
        return self.plan.own_tokens * self.plan.model.hidden_size * self.plan.job.dtype.itemsize

    @property
    def gathered(self) -> int:
        """Bytes of the buffer for gathered inputs, one for all layers."""
        return self.rows * self.plan.tp if self.plan.sequence_parallel else 0

    def chunk(self, chunk: Chunk) -> ChunkMemory:
        plan = self.plan
        settings = plan.settings
        size = plan.job.dtype.itemsize
        kinds = [self.layers[self.kinds[layer].name] for layer in chunk.layers]
        saved = 0
        is_uniform = settings.recompute_method == "uniform"
        again = max((kind.recomputed for kind in kinds), default=0)
        if settings.recompute_granularity is Granularity.FULL:
            count = settings.recompute_num_layers
            if is_uniform:
                saved = self.rows * -(-len(kinds) // count)
                groups = (kinds[first : first + count] for first in range(0, len(kinds), count))
                again = max((sum(kind.saved for kind in group) for group in groups), default=0)
            else:
                saved = self.rows * min(count, len(kinds))
                saved += sum(kind.saved for kind in kinds[count:])
                again = max((kind.saved for kind in kinds[:count]), default=0)
        else:
            saved = sum(kind.saved for kind in kinds)
        for unit in chunk.units[chunk.num_layers :]:
            kind = self.layers[self.kinds[unit].name]
            if settings.recompute_granularity is Granularity.FULL and is_uniform:
                saved += 2 * self.rows  # the hidden state and the next token's embedding
                again = max(again, kind.saved)
            else:
                saved += kind.saved
            kinds.append(kind)
        head = 0
        if chunk.has_embedding and plan.kernels.dropout_of_rows:
            saved += self.rows // size  # the mask, a byte an element
        if chunk.has_norm:
            saved += self.rows
        if chunk.has_head:
            saved += self.rows  # input of the head
            logits = plan.tokens * plan.model.vocab_size // plan.tp
            of_logit = size + (_FP32 if size < _FP32 else 0) + self.others.logit_bytes
            of_logit += size if plan.model.logit_softcap else 0  # the tangent's result
            # A prediction's softmax stays, in fp32, while the model's own logits are computed.
            head = logits * (of_logit + _FP32 * chunk.num_mtp)
            saved += self.rows * chunk.num_mtp  # input of its logits
        working = max((kind.working for kind in kinds), default=2 * self.rows)
        return ChunkMemory(saved=saved, working=working + again, head=head)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of a layer: saved, recomputed in its backward pass, and more in that pass."""

    saved: int
    recomputed: int
    working: int


def _layer(plan: Plan, kind: Kind) -> _Layer:
    unit = plan.tree.mtp() if kind.is_mtp else plan.tree.block(kind.layer)
    leaves = [leaf for leaf in unit.walk() if leaf.work and not leaf.role.startswith("head")]
    groups = selected(plan, [leaf.role for leaf in leaves])
    saved = dropped = 0
    before = ""  # group of the module before
    for leaf in leaves:
        size = saved_bytes(plan, leaf)
        group = groups.get(leaf.role, "")
        # A checkpoint keeps the input of its first module; without output, the next module's
        # input is what is dropped.
        drops = group and group == before
        drops = drops or (group != before and before.startswith(_WITHOUT_OUTPUT))
        if drops:
            dropped += size
        else:
            saved += size
        before = group
    working = max(_working(plan, leaf) for leaf in leaves)
    return _Layer(saved=saved, recomputed=dropped, working=working)


def _working(plan: Plan, leaf: Module) -> int:
    """Return the bytes of a product's gradients, and of its input where it is gathered."""
    param = next(iter(leaf.params), None)
    if param is None or len(param.shape) < 2:
        return 0
    out, width = param.shape[-2:]
    rows = plan.expert_rows * plan.etp if param.is_expert else plan.tokens
    return rows * plan.job.dtype.itemsize * (out + 2 * width)


# Checkpoints that free their output: that is the input which the next module keeps.
_WITHOUT_OUTPUT = ("layernorm", "moe_act", "mla_up_proj")
