"""Kernels of a model where frameworks differ: fused ones, or several that pass tensors on.

A kernel's bytes are what it reads and writes. Sources, of megatron-core 0.16.1:
transformer/dot_product_attention.py, fusions/fused_softmax.py (FusedScaleMaskSoftmax),
fusions/fused_bias_dropout.py, transformer/mlp.py, tensor_parallel/cross_entropy.py,
fusions/fused_cross_entropy.py. The kernel of the causal softmax: Megatron-LM v2.6,
megatron/fused_kernels/scaled_upper_triang_masked_softmax.h. TransformerEngine 2.11,
pytorch/attention/dot_product_attention/backends.py (FlashAttention,
UnfusedDotProductAttention) and softmax.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from stepmark.ground.dtypes import DType
from stepmark.model.ops import Activation, Attention, Bmm, CrossEntropy, Layout, Op, Phase
from stepmark.step.module import Module, SavedTensors, between, both, work_of
from stepmark.step.workload import ComputeOp, Kernel

_FP32 = DType.FP32.itemsize
_MASK = 1  # bytes of an element of a dropout mask
# Modules of attention, whichever kernels it has.
CORE = (
    "attention.core",
    "attention.scores",
    "attention.softmax",
    "attention.dropout",
    "attention.context",
)

_Work = tuple[Phase, Op | Kernel]


class Loss(StrEnum):
    """Kernels of the loss: one per pass, or those of a vocabulary that tp divides."""

    ONE_KERNEL = "one kernel"
    VOCAB_PARALLEL = "vocab parallel"
    VOCAB_PARALLEL_FUSED = "vocab parallel, fused"


class Softmax(StrEnum):
    """Kernels of the softmax of stored scores.

    causal: one, which reads only what the causal mask leaves; masked: one, which reads all
    scores and a mask; unfused: casts to and from fp32, mask and softmax.
    """

    CAUSAL = "causal"
    MASKED = "masked"
    UNFUSED = "unfused"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """Kernels that a framework launches. The defaults are the fused ones.

    stores_scores: attention writes the scores of all pairs, those of the future included, and
    is two batched products with a softmax between them. batch_first: fused attention takes
    sequences one after the other, so its tensors are transposed. dropout_of_attention,
    dropout_of_rows: of probabilities, and before residuals. added_biases: linear layers that
    add their bias in a kernel; summed_biases: whose bias gradient is one. fused_swiglu: one
    kernel per pass. adds_gradients: a kernel adds each weight gradient to its sum, which has
    sum_bytes an element; adds_table_gradient: that of the embedding. joins_qkv: the gradients
    of queries, keys and values are joined for the product that made them. unpads: rows are
    copied to and from fused attention as if there were padding. loss_metrics: losses without
    gradients that a trainer's metrics compute from the logits, in fp32 with wide_metrics.
    """

    stores_scores: bool = False
    batch_first: bool = False
    softmax: Softmax = Softmax.CAUSAL
    dropout_of_attention: bool = False
    dropout_of_rows: bool = False
    added_biases: frozenset[str] = frozenset()
    summed_biases: frozenset[str] = frozenset()
    fused_swiglu: bool = True
    adds_gradients: bool = False
    adds_table_gradient: bool = False
    sum_bytes: int = _FP32
    loss: Loss = Loss.ONE_KERNEL
    joins_qkv: bool = False
    unpads: bool = False
    loss_metrics: int = 0
    wide_metrics: bool = True


def memory_kernel(name: str, num_bytes: int) -> Kernel:
    """Return a kernel that memory bounds."""
    return Kernel(name=name, flops=0, bytes_moved=num_bytes)


def stored_scores(
    core: Attention, choice: KernelChoice, num_heads: int, num_kv_heads: int
) -> Iterator[Module]:
    """Yield the modules of attention that stores its scores, on one rank.

    core: the fused kernel's operator. num_heads, num_kv_heads: of the whole model.
    """
    size = core.dtype.itemsize
    pairs = core.batch * core.heads * core.seq_q * core.seq_kv
    scores = num_heads * core.seq_kv  # per token, of all ranks of tp
    width_qk, width_v = core.head_dim_qk, core.head_dim_v
    product = partial(Bmm, batch=core.batch * core.heads, dtype=core.dtype)
    of_scores = partial(product, n=width_qk)
    repeated_keys = _repeated_heads(core, width_qk)
    repeated_values = _repeated_heads(core, width_v)
    inputs = num_heads * width_qk + num_kv_heads * (width_qk + width_v)
    scores_module = between(
        "attention.scores",
        *((Phase.FWD, kernel) for kernel in repeated_keys),
        (Phase.FWD, product(m=core.seq_q, n=core.seq_kv, k=width_qk)),
        (Phase.BWD, of_scores(m=core.seq_q, k=core.seq_kv, layout=Layout.NN)),
        (Phase.BWD, of_scores(m=core.seq_kv, k=core.seq_q, layout=Layout.TN)),
        *((Phase.BWD, kernel) for kernel in repeated_keys),
    )
    yield replace(scores_module, keeps=SavedTensors(divided=inputs))
    softmax = between("attention.softmax", *_softmax(pairs, size, choice.softmax))
    stored = SavedTensors(divided=scores)
    if choice.softmax is Softmax.UNFUSED:
        stored = SavedTensors(statistics=scores)
    yield replace(softmax, keeps=stored)
    if choice.dropout_of_attention:
        dropout = memory_kernel("dropout", pairs * (2 * size + _MASK))
        masked = between("attention.dropout", (Phase.FWD, dropout), (Phase.BWD, dropout))
        yield replace(masked, keeps=SavedTensors(divided_masks=scores))
    # The product with the values keeps what it multiplies, unless the softmax does.
    is_other = choice.dropout_of_attention or choice.softmax is Softmax.UNFUSED
    copies = (num_heads - num_kv_heads) * (width_qk + width_v)
    rows = core.batch * core.seq_q * core.heads * width_v
    context = between(
        "attention.context",
        *((Phase.FWD, kernel) for kernel in repeated_values),
        (Phase.FWD, product(m=core.seq_q, n=width_v, k=core.seq_kv, layout=Layout.NN)),
        (Phase.FWD, memory_kernel("transpose", 2 * rows * size)),
        (Phase.BWD, product(m=core.seq_q, n=core.seq_kv, k=width_v)),
        (Phase.BWD, product(m=core.seq_kv, n=width_v, k=core.seq_q, layout=Layout.TN)),
        *((Phase.BWD, kernel) for kernel in repeated_values),
    )
    yield replace(context, keeps=SavedTensors(divided=scores * is_other + copies))


def with_copies(core: Module, op: Attention, choice: KernelChoice, cp: int) -> Module:
    """Return fused attention with the copies of its tensors that a framework makes.

    Context parallelism exchanges keys and values in the layout that they have.
    """
    if choice.batch_first and cp == 1:
        core = with_transposes(core, op)
    if choice.unpads:
        core = without_padding(core, op)
    return with_joined_gradients(core, op) if choice.joins_qkv else core


def with_transposes(core: Module, op: Attention) -> Module:
    """Return fused attention that copies its inputs and its output to another layout."""
    inputs, output = _attention_bytes(op)
    name = "transpose"
    before, after = memory_kernel(name, 2 * inputs), memory_kernel(name, 2 * output)
    return _with_copies(core, forward=(before, after), backward=(after, before))


def without_padding(core: Module, op: Attention) -> Module:
    """Return fused attention on rows that are selected before it and scattered after it.

    What is scattered is zeroed first: flash-attn 2.4.2, bert_padding.py (IndexFirstAxis,
    IndexPutFirstAxis).
    """
    inputs, output = _attention_bytes(op)
    forward = memory_kernel("select", 2 * inputs), memory_kernel("scatter", 3 * output)
    backward = memory_kernel("select", 2 * output), memory_kernel("scatter", 3 * inputs)
    return _with_copies(core, forward=forward, backward=backward)


def with_joined_gradients(core: Module, op: Attention) -> Module:
    """Return attention after whose backward pass the gradients of its inputs are joined."""
    inputs, _ = _attention_bytes(op)
    joined = replace(core.bwd[-1], op=memory_kernel("concatenate", 2 * inputs))
    return replace(core, work=(*core.work, joined))


def attention_numels(op: Attention) -> tuple[int, int]:
    """Return the elements of attention's inputs and of its output; keys as many as queries."""
    rows = op.batch * op.seq_q
    inputs = rows * (op.heads * op.head_dim_qk + op.kv_heads * (op.head_dim_qk + op.head_dim_v))
    return inputs, rows * op.heads * op.head_dim_v


def _attention_bytes(op: Attention) -> tuple[int, int]:
    """Return the bytes of attention's inputs and of its output."""
    inputs, output = attention_numels(op)
    return inputs * op.dtype.itemsize, output * op.dtype.itemsize


def _with_copies(
    core: Module, *, forward: tuple[Kernel, Kernel], backward: tuple[Kernel, Kernel]
) -> Module:
    """Return a module with a kernel before and one after the work of each pass."""

    def copy(kernel: Kernel, phase: Phase) -> ComputeOp:
        return replace(core.work[0], op=kernel, phase=phase)

    work = (
        copy(forward[0], Phase.FWD),
        *core.fwd,
        copy(forward[1], Phase.FWD),
        copy(backward[0], Phase.BWD),
        *core.bwd,
        copy(backward[1], Phase.BWD),
    )
    return replace(core, work=work)


def _repeated_heads(core: Attention, width: int) -> tuple[Kernel, ...]:
    """Return the copy of a key or value head for each query head; backward their sum."""
    if core.heads == core.kv_heads:
        return ()
    heads = core.heads + core.kv_heads
    num_bytes = core.batch * core.seq_kv * heads * width * core.dtype.itemsize
    return (memory_kernel("repeat_heads", num_bytes),)


def _softmax(pairs: int, size: int, softmax: Softmax) -> Iterator[_Work]:
    """Yield scale, causal mask and softmax of both passes. All of them write all scores."""
    if softmax is not Softmax.UNFUSED:
        is_causal = softmax is Softmax.CAUSAL
        scores = pairs * size
        read = scores // 2 if is_causal else scores + pairs  # a byte of mask each
        yield Phase.FWD, memory_kernel("scaled_masked_softmax", read + scores)
        read = scores if is_causal else 2 * scores  # probabilities and their gradients
        yield Phase.BWD, memory_kernel("scaled_masked_softmax_backward", read + scores)
        return
    cast = [memory_kernel("cast", pairs * (size + _FP32))] if size < _FP32 else []
    mask = memory_kernel("mask", 2 * pairs * _FP32)
    forward_kernels = [*cast, mask, memory_kernel("softmax", 2 * pairs * _FP32), *cast]
    softmax_backward = memory_kernel("softmax_backward", 3 * pairs * _FP32)
    for kernel in forward_kernels:
        yield Phase.FWD, kernel
    for kernel in [*cast, softmax_backward, mask, *cast]:
        yield Phase.BWD, kernel


def with_dropout(residual: Module, numel: int, width: int, size: int) -> Module:
    """Return a residual sum that drops elements before it, in one kernel forward."""
    (added,) = residual.fwd
    assert isinstance(added.op, Kernel)
    assert added.op.bytes_moved is not None
    fused = memory_kernel("dropout_add", added.op.bytes_moved + numel * _MASK)
    backward = memory_kernel("dropout_backward", numel * (2 * size + _MASK))
    last = replace(residual.bwd[0], op=backward)
    return replace(
        residual,
        work=(replace(added, op=fused), *residual.bwd, last),
        keeps=residual.keeps + SavedTensors(masks=width),
    )


# Kernels of PyTorch, and the tensors of [tokens, width] that each reads and writes; backward
# the gradients of gate and up are joined. {}: the function of gate.
_OF_GATE = (
    (("{}", 2), ("multiply", 3)),
    (("multiply_backward", 6), ("{}_backward", 3), ("concatenate", 4)),
)
_CLAMPED = (
    (("clamp", 4), ("add", 2), ("multiply", 5), ("sigmoid", 2), ("multiply", 3)),
    (
        *(("multiply_backward", 6), ("sigmoid_backward", 3), ("multiply_backward", 8)),
        *(("add", 3), ("clamp_backward", 11), ("concatenate", 4)),
    ),
)
_FUNCTION_OF = {"swiglu": "silu", "geglu": "gelu"}


def gated_kernels(role: str, op: Activation) -> Module:
    """Return an activation of gate and up as PyTorch's kernels."""
    plane = op.tokens * op.width * op.dtype.itemsize
    function = _FUNCTION_OF.get(op.kind, "")
    passes = zip((Phase.FWD, Phase.BWD), _OF_GATE if function else _CLAMPED, strict=True)
    return between(
        role,
        *(
            (phase, memory_kernel(name.format(function), count * plane))
            for phase, kernels in passes
            for name, count in kernels
        ),
    )


def gradient_sum(numel: int, size: int, choice: KernelChoice) -> Kernel:
    """Return the kernel that adds a weight gradient to its sum. size: bytes of an element."""
    return memory_kernel("gradient_add", numel * (size + 2 * choice.sum_bytes))


def loss_module(op: CrossEntropy, choice: KernelChoice) -> Module:
    """Return the loss by its kernels; those of a divided vocabulary have copies in fp32."""
    loss = choice.loss
    if loss is Loss.ONE_KERNEL:
        return between("loss", *both(op), *_metrics(op, choice))
    is_fused = loss is Loss.VOCAB_PARALLEL_FUSED
    logits = op.tokens * op.vocab
    size = op.dtype.itemsize
    wide = logits * _FP32
    cast = memory_kernel("cast", logits * size + wide)
    kernels = [
        (Phase.FWD, cast),
        *([] if is_fused else [(Phase.FWD, memory_kernel("max", wide))]),
        *([] if is_fused else [(Phase.FWD, memory_kernel("subtract", 2 * wide))]),
        (Phase.FWD, memory_kernel("exp", 2 * wide)),
        *([] if is_fused else [(Phase.FWD, memory_kernel("sum", wide))]),
        (Phase.FWD, memory_kernel("divide", 2 * wide)),
    ]
    backward = [memory_kernel("multiply", 2 * wide), cast]
    if is_fused:
        backward = [memory_kernel("multiply", logits * size + wide)]
    return Module(
        name="loss",
        role="loss",
        work=work_of("loss", *kernels, *((Phase.BWD, kernel) for kernel in backward)),
        is_module=False,
    )


def _metrics(op: CrossEntropy, choice: KernelChoice) -> Iterator[_Work]:
    """Yield torch's cross_entropy for each metric, which autocast runs in fp32."""
    logits = op.tokens * op.vocab
    size = _FP32 if choice.wide_metrics else op.dtype.itemsize
    for _ in range(choice.loss_metrics):
        if size != op.dtype.itemsize:
            yield Phase.FWD, memory_kernel("cast", logits * (op.dtype.itemsize + size))
        yield Phase.FWD, memory_kernel("log_softmax", 2 * logits * size)
