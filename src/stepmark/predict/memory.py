"""How much device memory a training step needs: an estimate, to be held against measured peaks.

Counts what torch's allocator hands out on the fullest rank: not the CUDA context, not NCCL's
buffers, not fragmentation. Weights, gradients and AdamW's two moments are exact; activations
follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4, with these changes:

- no dropout, so no masks: their 34 bytes per token and hidden element become 32 for GPT;
- attention keeps q, k, v, its output and one fp32 number per head, never the scores;
- grouped heads: q, k and v have widths of their own; SwiGLU has three products, not two;
- torch.compile keeps what its backward products read (outputs of norms and activation
  functions), as eager code does, but computes SwiGLU's silu again.

What a block keeps is the sum over the leaves of its module tree, which the caller makes.
Over 250 lines because each part is a few lines with the reason for them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from stepmark.core.model import ModelConfig
from stepmark.core.module import Kept, Module
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope, DataParallel, Precision, Recompute

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
    """Estimated bytes on the fullest rank, by what holds them."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int  # FSDP's whole groups, or autocast's bf16 copies of weights
    activations_bytes: int  # kept from forward to backward
    working_bytes: int  # of the one block whose backward pass runs
    head_bytes: int  # logits, their log-softmax and gradient
    held_bytes: int  # of gradients in the forward pass: added up, DDP's buckets, masters'

    @property
    def total_bytes(self) -> int:
        """The larger of two moments: as the backward pass begins, and as it ends."""
        kept = self.weights_bytes + self.optimizer_bytes + self.gathered_bytes
        begin = (
            self.held_bytes + self.activations_bytes + max(self.head_bytes, self.working_bytes)
        )
        return kept + max(begin, self.gradients_bytes + self.working_bytes)


def estimate(case: TrainCase, tree: Tree) -> TrainMemory:
    """Of the fullest rank; with a pipeline of the first or the last stage's."""
    stages = {0, case.parallel.pp - 1}
    found = [_of_stage(case, stage, tree(case, stage)) for stage in sorted(stages)]
    return max(found, key=lambda one: one.total_bytes)


def largest_mbs(case: TrainCase, memory_bytes: int, tree: Tree) -> int:
    """The largest micro-batch whose estimate fits; 0 if not even one sequence does."""

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
    """One layer: what it keeps, and its parameters."""

    keeps: Kept
    others: int
    experts: int


def _keeps(unit: Module) -> Kept:
    return reduce(Kept.__add__, (leaf.keeps for leaf in unit.walk()), Kept())


def _blocks(root: Module) -> list[_Block]:
    found: list[_Block] = []
    for unit in root.inside:
        if unit.name.startswith("blocks"):
            sizes = {False: 0, True: 0}
            for one in unit.all_params:
                sizes[one.is_expert] += one.numel
            made = _Block(keeps=_keeps(unit), others=sizes[False], experts=sizes[True])
            found += [made] * unit.times
    return found


def _of_stage(case: TrainCase, stage: int, root: Module) -> TrainMemory:
    layers = dict(zip(_layers(case, stage), _blocks(root), strict=True))
    is_last = stage == case.parallel.pp - 1
    state = _stored_params(case, layers, root) // _state_shards(case)
    stored, added_up, moment = _BYTES[case.precision]
    tokens = -(-case.mbs // _microbatches(case)) * case.model.seq_len // case.parallel.cp
    # 1F1B: the first stage is as many microbatches ahead as there are stages.
    in_flight = min(case.parallel.pp - stage, _microbatches(case))
    kept = sum(_kept_per_token(case, index, one) for index, one in layers.items())
    working = [_working_per_token(case, index, one) for index, one in layers.items()]
    ends = (_keeps(unit).whole for unit in root.inside if unit.name == "output")
    kept += _itemsize(case) * sum(ends)  # last norm, head
    return TrainMemory(
        weights_bytes=state * stored,
        gradients_bytes=state * added_up,
        optimizer_bytes=state * 2 * moment,
        gathered_bytes=_gathered(case, layers, stage),
        activations_bytes=tokens * in_flight * kept,
        working_bytes=tokens * max(working, default=0),
        head_bytes=_head(case, tokens) if is_last else 0,
        held_bytes=state * _held(case),
    )


def _held(case: TrainCase) -> int:
    """Bytes of gradients per parameter that exist in the forward pass."""
    is_ddp = case.data_parallel is DataParallel.DDP
    found = _BYTES[case.precision][1]
    if case.precision is Precision.MASTER:  # in fp32 always, in bf16 only in DDP's buckets
        return found if is_ddp else _FP32
    is_graphed = case.cuda_graph or case.compiles_graphs  # which write where they wrote before
    return found if is_ddp or is_graphed or case.grad_accum > 1 else 0


def _microbatches(case: TrainCase) -> int:
    if case.parallel.pp == 1:
        return 1
    return case.pp_microbatches or case.parallel.pp


def _layers(case: TrainCase, stage: int) -> range:
    """Blocks of the first or the last stage; the first stages have those left over."""
    count, stages = case.model.num_layers, case.parallel.pp
    some = -(-count // stages) if stage == 0 else count // stages
    return range(some) if stage == 0 else range(count - some, count)


def _is_moe(model: ModelConfig, index: int) -> bool:
    return model.moe is not None and index >= model.moe.first_dense_layers


def _stored_params(case: TrainCase, layers: dict[int, _Block], root: Module) -> int:
    """Of a stage, before tensor and data parallelism divide them; a tied table once."""
    # FSDP divides experts by as many ranks in all as the rest: ep lies inside dp_shard.
    over = 1 if case.data_parallel is DataParallel.FSDP else case.parallel.ep
    total = sum(one.others + one.experts // over for one in layers.values())
    ends = [unit for unit in root.inside if not unit.name.startswith("blocks")]
    total += sum(one.numel for unit in ends for one in unit.all_params)
    is_twice = case.model.tied_embeddings and len(ends) == 2
    return total - (case.model.head_params if is_twice else 0)


def _state_shards(case: TrainCase) -> int:
    sharded = case.data_parallel is DataParallel.FSDP
    return case.parallel.tp * (case.parallel.dp_shard * case.parallel.cp if sharded else 1)


def _itemsize(case: TrainCase) -> int:
    """Bytes of an activation."""
    return _FP32 if case.precision is Precision.FP32 else 2


def _gathered(case: TrainCase, layers: dict[int, _Block], stage: int) -> int:
    """Copies of weights beside the stored ones.

    FSDP: of the groups that are whole at a time, each twice while it is copied out of the
    buffer it was gathered into, and the gradients of one group in both dtypes. Autocast
    keeps a bf16 copy of each weight until its backward pass, unless that casts again.
    """
    model, tp, size = case.model, case.parallel.tp, _itemsize(case)
    ep = case.parallel.ep
    per_layer = [(one.others + one.experts // ep) // tp for one in layers.values()]
    table = model.head_params // tp
    ends = (stage == 0) + (stage == case.parallel.pp - 1)
    if case.data_parallel is DataParallel.FSDP:
        group = max(per_layer, default=0) * case.blocks_per_group
        group = min(group, sum(per_layer))
        whole = min(group * (1 + max(1, case.prefetch)), sum(per_layer))
        if case.reshard == "no":
            whole = sum(per_layer)
        # Of the output's group, that of the input is given back, unless they are one.
        whole += table * (1 if ends else 0)
        largest = max(group, table if ends else 0)
        return size * (whole + group) + largest * (size + case.reduce_dtype.itemsize)
    if case.precision is not Precision.AMP or case.compile is not CompileScope.NONE:
        return 0
    pairs = zip(layers, per_layer, strict=True)
    cast = sum(params for index, params in pairs if not case.is_checkpointed[index])
    return size * (cast + (table if stage == case.parallel.pp - 1 else 0))


def _kept_per_token(case: TrainCase, index: int, block: _Block) -> int:
    """Bytes of one block that wait for its backward pass."""
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
    """While a block's backward pass runs: what it computed again, and gradients inside it."""
    model, size = case.model, _itemsize(case)
    widths = 2 * model.hidden_size + _qkv(model) + model.num_heads * model.d_v
    widths += 2 * _ffn_products(model, index)
    gradients = size * widths // case.parallel.tp
    if not case.is_checkpointed[index]:
        return gradients
    return gradients + _block_per_token(case, block.keeps)


def _is_compiled(case: TrainCase) -> bool:
    return case.compile is not CompileScope.NONE


def _block_per_token(case: TrainCase, kept: Kept) -> int:
    """Activations of a whole block, per token, with sequence parallelism divided by tp."""
    size, tp = _itemsize(case), case.parallel.tp
    divided = kept.divided + (0 if _is_compiled(case) else kept.eager)
    return size * (kept.whole + divided // tp) + _FP32 * kept.statistics // tp


def _qkv(model: ModelConfig) -> int:
    """Elements of q, k and v per token; with latent attention also what they come from."""
    widths = model.num_heads * model.d_qk + model.num_kv_heads * (model.d_qk + model.d_v)
    if model.mla:
        # Before and after its norm.
        widths += 2 * (model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0))
    return widths


def _kv_of_others(case: TrainCase) -> int:
    """Elements of k and v per own token that context parallelism gathers from other ranks."""
    model = case.model
    return (case.parallel.cp - 1) * model.num_kv_heads * (model.d_qk + model.d_v)


def _ffn_products(model: ModelConfig, index: int) -> int:
    """Elements that the products of a feed-forward layer return, without the last one's."""
    matrices = 2 if model.activation == "swiglu" else 1
    return matrices * _ffn_width(model, index)


def _ffn_width(model: ModelConfig, index: int) -> int:
    """Inner width that one token meets."""
    if model.moe is None or not _is_moe(model, index):
        return model.ffn_hidden_size
    return model.moe.top_k * model.moe.ffn_hidden_size + model.moe.shared_ffn_hidden_size


def _head(case: TrainCase, tokens: int) -> int:
    """Logits and loss as the backward pass begins.

    Eagerly three fp32 tensors stand beside one another: log-softmax, its gradient and that of
    the logits. Compiled: the logits and their gradient. In chunks: those of one, and the
    summed gradient of the head beside that of a chunk.
    """
    size = _itemsize(case)
    per_logit = 2 * size if _is_compiled(case) else 3 * _FP32
    logits = -(-tokens // case.loss_chunks) * case.model.vocab_size * per_logit
    if case.loss_chunks == 1:
        return logits
    low = case.precision in (Precision.BF16, Precision.MASTER)
    stored = 2 if low else _FP32
    sums = 2 * stored * case.model.head_params // case.parallel.tp
    return logits + sums + tokens * case.model.hidden_size * size
