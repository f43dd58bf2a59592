"""Memory of DeepSpeed's ranks: ZeRO's shards, and what Hugging Face's modules keep.

Model states: Rajbhandari et al., arXiv:1910.02054, section 5: 2 + 2 + 12 bytes a parameter in
16 bits, of which stage 1 divides the 12, stage 2 gradients, stage 3 weights as well. Buckets:
DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (ipg_buckets: two with overlap_comm) and
stage3.py; gathered weights of stage 3: the layer that runs, those that are fetched ahead, and
persistent ones (partitioned_param_coordinator.py). Until a step's last micro-batch, stages 0
and 1 keep whole gradients.

transformers 5.23, models/llama/modeling_llama.py: a norm of Llama's family computes in fp32 and
keeps its input in fp32 and its result in 16 bits; SiLU and the product with it keep their
inputs. torch's cross-entropy keeps its log-softmax in fp32, beside two gradients of this size.
"""

import math
from collections.abc import Iterable

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Norm
from stepmark.step.module import Module
from stepmark.step_memory.rank_memory import RankMemory, with_fragments
from stepmark.workloads.job import Job
from stepmark.workloads.rules.deepspeed.huggingface import is_llama
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed

_FP32 = DType.FP32.itemsize
_LOGITS = 3 * _FP32  # log-softmax and two gradients


def stage_memories(job: Job, settings: DeepSpeed) -> list[RankMemory]:
    """Return the memory of a rank, which has all layers."""
    model = job.model
    tree = job.tree("huggingface" if is_llama(model) else "train", sequence_parallel=False)
    blocks = [(tree.block(layer), times) for layer, times in model.layer_counts.items()]
    ends = (tree.embedding(), tree.output())
    numel = _numel(ends[:1]) + (
        _numel(ends[1:]) if not model.tied_embeddings else model.hidden_size
    )
    numel += sum(times * _numel([block]) for block, times in blocks)
    layer = max(_numel([block]) for block, _ in blocks)
    saved = sum(times * _saved_bytes(job, block) for block, times in blocks)
    saved += sum(_saved_bytes(job, end) for end in ends)
    working = max(
        2 * job.tokens * job.dtype.itemsize * max(map(sum, _shapes(block)))
        for block, _ in blocks
    )
    state = _states(job, settings, numel)
    passing = {
        "gathered_bytes": _on_the_way(job, settings, numel, layer),
        "activations_bytes": saved,
        "working_bytes": working,
        "head_bytes": _LOGITS * job.tokens * model.vocab_size,
    }
    reserved = with_fragments(sum(state.values()), sum(passing.values()))
    return [RankMemory(**state, **passing, reserved_bytes=reserved)]


def _numel(modules: Iterable[Module]) -> int:
    return sum(
        param.numel for module in modules for leaf in module.walk() for param in leaf.params
    )


def _shapes(module: Module) -> list[tuple[int, ...]]:
    """Return widths of outputs and inputs of the products of a module."""
    params = (leaf.params[0] for leaf in module.walk() if leaf.params and not leaf.inside)
    return [param.shape[-2:] for param in params if len(param.shape) > 1]


def _states(job: Job, settings: DeepSpeed, numel: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer of a rank."""
    ranks = job.parallel.data_ranks
    own = math.ceil(numel / ranks)
    size = job.dtype.itemsize
    of_grad = DType(settings.grad_accum_dtype or job.dtype).itemsize
    states = 2 * _FP32 + (_FP32 if size < _FP32 else 0)
    return {
        "weights_bytes": size * (own if settings.stage == 3 else numel),
        "gradients_bytes": of_grad * (own if settings.stage >= 2 else numel),
        "optimizer_bytes": states * (own if settings.stage else numel),
    }


def _on_the_way(job: Job, settings: DeepSpeed, numel: int, layer: int) -> int:
    """Return the bytes of buckets of gradients and of gathered weights."""
    size = job.dtype.itemsize
    if job.parallel.data_ranks == 1 or settings.stage == 0:
        return 0
    buckets = 1 + settings.overlaps if settings.contiguous_gradients else 0
    total = buckets * size * min(numel, settings.reduce_bucket_size)
    if settings.stage == 3:
        live = layer + settings.stage3_prefetch_bucket_size
        total += size * min(numel, max(layer, min(live, settings.stage3_max_live_parameters)))
    return total


def _saved_bytes(job: Job, unit: Module) -> int:
    size = job.dtype.itemsize
    total = 0
    for leaf in unit.walk():
        if leaf.inside:
            continue
        keeps = leaf.keeps
        width = keeps.whole + keeps.divided + keeps.eager
        is_norm = any(isinstance(op.op, Norm) for op in leaf.work)
        if is_llama(job.model) and is_norm:
            total += job.tokens * (_FP32 + size) * keeps.divided
        elif not (is_llama(job.model) and leaf.role == "attention.rope"):
            # Llama's q, k and v are tensors of their own: rotated ones take their place.
            total += job.tokens * (size * width + _FP32 * keeps.statistics)
    return total
