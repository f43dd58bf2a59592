"""The least memory that a layout can need, before all of it is derived."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stepmark.layouts.candidate import Candidate
from stepmark.layouts.layer_kinds import Kind, chunks_of
from stepmark.layouts.small_steps import one_stage
from stepmark.step_memory import megatron_memory, pytorch_memory

_STATE_BYTES = 12  # of a parameter in 32 bits: weight and two moments
_LOGIT_BYTES = 10  # of a logit, its value in 32 bits and its log-softmax


def least_bytes(candidate: Candidate) -> float:
    """Return the bytes that the fullest rank allocates at least. Raises ConfigError.

    Of Megatron-LM it is the first stage's; of PyTorch states, what blocks keep of micro-batches
    whose backward passes are yet to come, and logits. FSDP's weights and gradients come and go.
    """
    job, settings = candidate.job, candidate.settings
    if candidate.is_megatron:
        return megatron_memory.first_stage(job, settings).reserved_bytes
    model, axes = job.model, candidate.parallel
    shards = axes.gradient_ranks * axes.tp / axes.dp_replicate
    logits = _LOGIT_BYTES * job.tokens * model.vocab_size // axes.tp
    stages = chunks_of(candidate)
    kinds = {kind for chunks in stages for chunk in chunks for kind in chunk}
    saved = {kind: _saved_by_layer(candidate, kind) for kind in kinds}
    # More of a layer in its backward pass, which computes again what was not saved.
    again = {
        kind: _saved_by_layer(candidate, kind._replace(is_recomputed=False)) - saved[kind]
        for kind in kinds
    }
    numel = {kind: model.layer_params(kind.layer) for kind in kinds}
    whole = axes.tp * axes.ep  # ranks that divide gathered weights
    if axes.pp == 1:
        (chunk,) = stages[0]
        # Its weights and gradients, and the weights of the layer before.
        passing = 3 * job.dtype.itemsize / whole
        of_layer = min(passing * numel[kind] + again[kind] - saved[kind] for kind in chunk)
        states = _STATE_BYTES * model.num_params / shards
        return states + _total(chunk, saved) + max(logits, of_layer)
    # A stage gathers its only chunk for all of its passes.
    gathered = job.dtype.itemsize / whole if candidate.num_chunks == 1 else 0.0
    reduced = settings.reduce_dtype.itemsize / whole
    message = job.tokens // axes.tp * model.hidden_size * job.dtype.itemsize
    most = 0.0
    last = 0 if candidate.schedule.is_v else axes.pp - 1  # rank with the last stage
    for stage, chunks in enumerate(stages):
        if stage in (0, axes.pp - 1) or len(chunks) == 1:
            params = sum(_total(chunk, numel) for chunk in chunks)
            sizes = [_total(chunk, saved) for chunk in chunks]
            first, later = _saved_bytes(candidate, stage, sizes)
            is_last = stage == last
            needed = (_STATE_BYTES / shards + gathered) * params
            needed += min((again[kind] for chunk in chunks for kind in chunk), default=0)
            if later:
                first = max(first, later + reduced * params)
            needed += first
            # Received from neighbours, of all micro-batches.
            ends = (stage == 0) + is_last
            needed += (2 * len(chunks) - ends) * job.num_microbatches * message
            most = max(most, needed + (logits if is_last else 0))
    return most


def _total(chunk: "Counter[Kind]", by_kind: Mapping[Kind, int]) -> int:
    """Return the sum over the layers of a chunk."""
    return sum(count * by_kind[kind] for kind, count in chunk.items())


def _saved_bytes(candidate: Candidate, stage: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that blocks of a stage keep when its first backward pass begins.

    And those when all of its chunks have gradients that are not reduced yet, where as many
    passes are in flight; else 0. sizes: of a forward pass of each chunk.
    """
    pp = candidate.parallel.pp
    count = candidate.job.num_microbatches
    chunks = len(sizes)
    if candidate.schedule.is_v:  # its first chunk begins with as many
        return min(count, 2 * (pp - stage) - 1) * sizes[0], 0
    in_row = 1  # micro-batches that a chunk takes in a row
    warmup = pp - stage - 1
    if chunks > 1:
        in_row = count // max(1, count // pp)
        each = 1 if candidate.schedule.splits_backward else 2
        warmup = each * warmup + (chunks - 1) * in_row
    passes = min(warmup + 1, count * chunks)
    order = [sizes[number // in_row % chunks] for number in range(passes + chunks * in_row)]
    first = sum(order[:passes])
    if passes + chunks * in_row > count * chunks:
        return first, 0
    # Chunks run backward in reverse order, each as often.
    return first, sum(order) - in_row * sum(sizes)


def _saved_by_layer(candidate: Candidate, kind: Kind) -> int:
    unit = one_stage(candidate, {kind.layer: 1}, kind.is_recomputed, 1)
    axes = unit.parallel
    # Data ranks but those of experts change nothing that a block keeps.
    own = replace(axes, dp_shard=axes.ep, dp_replicate=1)
    gbs = unit.job.mbs * own.data_ranks
    return pytorch_memory.saved_by_layer(
        replace(unit.job, parallel=own, gbs=gbs), unit.settings
    )
