"""Estimate of the device memory of a training step, to be compared with measured peaks.

Counts what torch's allocator hands out on the fullest rank: not the CUDA context, not NCCL's
buffers, not fragmentation. Weights, gradients and AdamW's two moments are exact; activations
follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4, with these changes:

- no dropout, so no masks: their 34 bytes per token and hidden element become 32 for GPT;
- attention keeps q, k, v, its output and one fp32 number per head, never the scores;
- grouped heads: q, k and v have widths of their own; SwiGLU has three products, not two;
- torch.compile keeps what its backward products read (outputs of norms and activation
  functions), as eager code does, but computes SwiGLU's silu again.

A block keeps the sum over the leaves of its module tree, which the caller makes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from stepmark.core.model import ModelConfig
from stepmark.core.module import Kept, Module
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope, DataParallel, GradSync, Precision, Recompute

_FP32 = 4
# Bytes per parameter of weights, of gradients, and of each of AdamW's two moments. With masters
# both weights and gradients exist in bf16 and in fp32.
_BYTES = {
    Precision.AMP: (4, 4, 4),
    Precision.MASTER: (2 + 4, 2 + 4, 4),
    Precision.BF16: (2, 2, 2),
    Precision.FP32: (4, 4, 4),
}
_TOO_MANY = 2**24  # sequences

# (case, pipeline stage) -> its modules, before tensor and expert parallelism divide them
Tree = Callable[[TrainCase, int], Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMemory:
    """Estimated bytes on the fullest rank, by purpose."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int  # FSDP's whole groups and gradients, or autocast's copies of weights
    activations_bytes: int  # kept from forward to backward
    working_bytes: int  # of the one block whose backward pass runs
    head_bytes: int  # logits, their log-softmax and gradient
    forward_gradients_bytes: int  # in the forward pass: added up, DDP's buckets, masters'

    @property
    def total_bytes(self) -> int:
        """Return the larger of two moments: as the backward pass begins, and as it ends."""
        constant = self.weights_bytes + self.optimizer_bytes + self.gathered_bytes
        begin = self.forward_gradients_bytes + self.activations_bytes
        begin += max(self.head_bytes, self.working_bytes)
        return constant + max(begin, self.gradients_bytes + self.working_bytes)


def estimate(case: TrainCase, tree: Tree) -> TrainMemory:
    """Return the memory of the fullest rank: one of the first or the last pipeline stage."""
    stages = sorted({0, case.parallel.pp - 1})
    estimates = [_of_stage(case, stage, tree(case, stage)) for stage in stages]
    return max(estimates, key=lambda memory: memory.total_bytes)


def largest_mbs(case: TrainCase, memory_bytes: int, tree: Tree) -> int:
    """Return the largest micro-batch whose estimate fits; 0 if not even one sequence does."""

    def fits(mbs: int) -> bool:
        return estimate(replace(case, mbs=mbs), tree).total_bytes <= memory_bytes

    low, high = 0, 1
    while high < _TOO_MANY and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One layer: its activations for the backward pass, and its numbers of parameters."""

    keeps: Kept
    others: int
    experts: int


def _keeps(unit: Module) -> Kept:
    return reduce(Kept.__add__, (leaf.keeps for leaf in unit.walk()), Kept())


def _blocks(root: Module) -> list[_Block]:
    blocks: list[_Block] = []
    for unit in root.inside:
        if unit.name.startswith("blocks"):
            sizes = {False: 0, True: 0}
            for param in unit.all_params:
                sizes[param.is_expert] += param.numel
            block = _Block(keeps=_keeps(unit), others=sizes[False], experts=sizes[True])
            blocks += [block] * unit.times
    return blocks


def _of_stage(case: TrainCase, stage: int, root: Module) -> TrainMemory:
    layers = dict(zip(_layers(case, stage), _blocks(root), strict=True))
    is_last = stage == case.parallel.pp - 1
    state = _stored_params(case, layers, root) // _state_shards(case)
    weight, gradient, moment = _BYTES[case.precision]
    tokens = -(-case.mbs // _microbatches(case)) * case.model.seq_len // case.parallel.cp
    # 1F1B: the first stage is as many microbatches ahead as there are stages.
    in_flight = min(case.parallel.pp - stage, _microbatches(case))
    per_token = sum(_kept_per_token(case, index, block) for index, block in layers.items())
    working = [_working_per_token(case, index, block) for index, block in layers.items()]
    outputs = (_keeps(unit).whole for unit in root.inside if unit.name == "output")
    per_token += _itemsize(case) * sum(outputs)  # last norm, head
    return TrainMemory(
        weights_bytes=state * weight,
        gradients_bytes=state * gradient,
        optimizer_bytes=state * 2 * moment,
        gathered_bytes=_gathered(case, layers, stage),
        activations_bytes=tokens * in_flight * per_token,
        working_bytes=tokens * max(working, default=0),
        head_bytes=_head(case, tokens) if is_last else 0,
        forward_gradients_bytes=state * _gradients_in_forward(case),
    )


def _gradients_in_forward(case: TrainCase) -> int:
    """Return the bytes of gradients per parameter that exist in the forward pass."""
    is_ddp = case.data_parallel is DataParallel.DDP
    num_bytes = _BYTES[case.precision][1]
    if case.precision is Precision.MASTER:  # in fp32 always, in bf16 only in DDP's buckets
        return num_bytes if is_ddp else _FP32
    is_graphed = case.cuda_graph or case.compiles_graphs  # graphs write to the same addresses
    return num_bytes if is_ddp or is_graphed or case.grad_accum > 1 else 0


def _microbatches(case: TrainCase) -> int:
    if case.parallel.pp == 1:
        return 1
    return case.pp_microbatches or case.parallel.pp


def _layers(case: TrainCase, stage: int) -> range:
    """Return the blocks of the first or last stage; the first stages take the remainder."""
    count, stages = case.model.num_layers, case.parallel.pp
    return range(-(-count // stages)) if stage == 0 else range(count - count // stages, count)


def _stored_params(case: TrainCase, layers: dict[int, _Block], root: Module) -> int:
    """Count a stage's parameters before tensor and data parallelism; a tied table once."""
    # FSDP divides experts by as many ranks in all as the rest: ep lies inside dp_shard.
    ep = 1 if case.data_parallel is DataParallel.FSDP else case.parallel.ep
    total = sum(block.others + block.experts // ep for block in layers.values())
    outer = [unit for unit in root.inside if not unit.name.startswith("blocks")]
    total += sum(param.numel for unit in outer for param in unit.all_params)
    has_both = case.model.tied_embeddings and len(outer) == 2
    return total - (case.model.head_params if has_both else 0)


def _state_shards(case: TrainCase) -> int:
    sharded = case.data_parallel is DataParallel.FSDP
    return case.parallel.tp * (case.parallel.dp_shard * case.parallel.cp if sharded else 1)


def _itemsize(case: TrainCase) -> int:
    """Return the bytes of an element of an activation."""
    return _FP32 if case.precision is Precision.FP32 else 2


def _gathered(case: TrainCase, layers: dict[int, _Block], stage: int) -> int:
    """Return the bytes of copies of weights in addition to the stored ones.

    FSDP: the groups that are gathered at a time, one of them twice while it is copied out of
    its buffer, and the gradients of one group in both dtypes. Gradients that are not reduced
    at once are kept whole in the reduced dtype (torch 2.13, _fsdp_param.py,
    to_accumulated_grad_if_needed; pipelining/stage.py, backward_maybe_with_nosync). Autocast
    keeps a bf16 copy of each weight until its backward pass, unless that casts again.
    """
    tp, ep, size = case.parallel.tp, case.parallel.ep, _itemsize(case)
    per_layer = [(block.others + block.experts // ep) // tp for block in layers.values()]
    table = case.model.head_params // tp
    if case.data_parallel is DataParallel.FSDP:
        total = sum(per_layer)
        group = min(max(per_layer, default=0) * case.blocks_per_group, total)
        gathered = total
        if case.reshard != "no":
            gathered = min(group * (1 + max(1, case.prefetch)), total)
        # One table: the input's group is freed before the output's is gathered, unless tied.
        gathered += table
        gradients = max(group, table) * (size + case.reduce_dtype.itemsize)
        if case.parallel.pp > 1:  # weights stay from one backward pass to the next
            gathered = total + table
        if case.parallel.pp > 1 or (case.grad_sync is GradSync.LAST and case.grad_accum > 1):
            ends = 1 if case.parallel.pp > 1 or case.model.tied_embeddings else 2
            gradients += (total + ends * table) * case.reduce_dtype.itemsize
        return size * (gathered + group) + gradients
    if case.precision is not Precision.AMP or _is_compiled(case):
        return 0
    pairs = zip(layers, per_layer, strict=True)
    cast = sum(params for index, params in pairs if not case.is_checkpointed[index])
    return size * (cast + (table if stage == case.parallel.pp - 1 else 0))


def _kept_per_token(case: TrainCase, index: int, block: _Block) -> int:
    """Return the bytes that one block keeps for its backward pass."""
    model, size, tp = case.model, _itemsize(case), case.parallel.tp
    block_input = model.hidden_size * size // tp
    if not case.is_checkpointed[index]:
        return _block_per_token(case, block.keeps)
    if case.recompute is not Recompute.OPS:
        return block_input
    # Attention with its statistics, and the outputs of every second product.
    products = _qkv(model) + 2 * model.hidden_size + _ffn_products(model, index)
    attention = model.num_heads * (model.d_v * size + _FP32) + size * _kv_of_others(case)
    return block_input + (attention + size * products // 2) // tp


def _working_per_token(case: TrainCase, index: int, block: _Block) -> int:
    """Return the bytes of a block's backward pass: recomputed activations and gradients."""
    model, size = case.model, _itemsize(case)
    widths = 2 * model.hidden_size + _qkv(model) + model.num_heads * model.d_v
    widths += 2 * _ffn_products(model, index)
    gradients = size * widths // case.parallel.tp
    if not case.is_checkpointed[index]:
        return gradients
    return gradients + _block_per_token(case, block.keeps)


def _is_compiled(case: TrainCase) -> bool:
    return case.compile is not CompileScope.NONE


def _block_per_token(case: TrainCase, keeps: Kept) -> int:
    """Return a whole block's activations per token; sequence parallelism divides them by tp."""
    size, tp = _itemsize(case), case.parallel.tp
    divided = keeps.divided + (0 if _is_compiled(case) else keeps.eager)
    return size * (keeps.whole + divided // tp) + _FP32 * keeps.statistics // tp


def _qkv(model: ModelConfig) -> int:
    """Return the elements of q, k and v per token, and of latents with latent attention."""
    widths = model.num_heads * model.d_qk + model.num_kv_heads * (model.d_qk + model.d_v)
    if model.mla:
        # Each latent before and after its norm.
        widths += 2 * (model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0))
    return widths


def _kv_of_others(case: TrainCase) -> int:
    """Return the elements of k and v per own token that context parallelism gathers."""
    model = case.model
    return (case.parallel.cp - 1) * model.num_kv_heads * (model.d_qk + model.d_v)


def _ffn_products(model: ModelConfig, index: int) -> int:
    """Return the outputs per token of a feed-forward layer's products but the last."""
    matrices = 2 if model.activation == "swiglu" else 1
    width, moe = model.ffn_hidden_size, model.moe
    if moe and index >= moe.first_dense_layers:
        width = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return matrices * width


def _head(case: TrainCase, tokens: int) -> int:
    """Return the bytes of logits and loss as the backward pass begins.

    Eager code has three fp32 tensors at once: log-softmax, its gradient and that of the
    logits. Compiled code has the logits and their gradient. With chunks these are of one
    chunk, and the head's summed gradient and that of a chunk are added.
    """
    size = _itemsize(case)
    per_logit = 2 * size if _is_compiled(case) else 3 * _FP32
    logits = -(-tokens // case.loss_chunks) * case.model.vocab_size * per_logit
    if case.loss_chunks == 1:
        return logits
    itemsize = 2 if case.precision in (Precision.BF16, Precision.MASTER) else _FP32
    sums = 2 * itemsize * case.model.head_params // case.parallel.tp
    return logits + sums + tokens * case.model.hidden_size * size
