"""How a model is trained: the techniques of a step by name, and what a step told of itself."""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.core.message import MessageKind, Tally


class DataParallel(StrEnum):
    """How ranks with different micro-batches keep the weights."""

    NONE = "none"  # one data rank
    DDP = "ddp"  # a whole copy each; gradients are all-reduced
    FSDP = "fsdp"  # FSDP2: each a shard of weights, gradients and optimizer state


class Precision(StrEnum):
    """amp: fp32 weights, bf16 compute (autocast; under FSDP its mixed-precision policy)."""

    AMP = "amp"
    # bf16 weights beside fp32 ones that the optimizer updates; gradients added up in fp32:
    # autocast's arithmetic with one cast per optimizer step instead of per micro-step.
    MASTER = "master"
    BF16 = "bf16"  # weights, gradients and optimizer state too
    FP32 = "fp32"


class Fp8(StrEnum):
    """Recipe of the linear layers' products."""

    NONE = "none"
    TENSORWISE = "tensorwise"  # torchao, one dynamic scale per tensor
    ROWWISE = "rowwise"  # torchao, one dynamic scale per row
    TE = "te"  # TransformerEngine, delayed scaling


class CompileScope(StrEnum):
    """What torch.compile gets as one graph."""

    NONE = "none"
    BLOCK = "block"  # each block, and head with loss
    MODEL = "model"


class Recompute(StrEnum):
    """Activation checkpointing."""

    NONE = "none"
    FULL = "full"  # every block
    BLOCKS = "blocks"  # q of every p blocks
    OPS = "ops"  # in every block all but attention, collectives and every second product


class Schedule(StrEnum):
    """What one sample is."""

    STEP = "step"  # an optimizer step with all its micro-steps
    MICRO = "micro"  # one forward and backward; every grad_accum-th has the optimizer, too


class GradSync(StrEnum):
    """When gradients of data ranks are reduced."""

    EVERY = "every"  # each micro-step
    LAST = "last"  # only before the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a measured training case told beside its samples.

    A field by rank and sample has the order of Samples.seconds. Phases are empty where they
    cannot be told apart (a pipeline, one graph for all).
    """

    tokens_per_sample: int  # over all ranks
    cycle: int  # samples from one optimizer step to the next: 1, or grad_accum if micro
    num_params: int  # stored, over all ranks; a tied table once
    warmup_s: tuple[tuple[float, ...], ...]  # by rank: samples before the steady ones
    loss: tuple[float, ...]  # per sample from the very first one, mean over data ranks
    fwd_s: tuple[tuple[float, ...], ...] = ()
    bwd_s: tuple[tuple[float, ...], ...] = ()
    optim_s: tuple[tuple[float, ...], ...] = ()  # clipping included; 0 in most micro samples
    data_s: tuple[tuple[float, ...], ...] = ()  # host seconds until the batch was there
    build_s: float = 0.0  # host seconds to make the model and its optimizer, slowest rank
    first_s: float = 0.0  # host seconds of the first sample: it compiles, slowest rank
    allocated_bytes: tuple[int | None, ...] = ()  # peak, by rank, after the first sample
    reserved_bytes: tuple[int | None, ...] = ()
    alloc_retries: tuple[int, ...] = ()  # cudaMalloc failed and the cache was flushed
    recompiles: int = 0  # after the first sample, any rank
    graph_breaks: int = 0
    attention_run: str = ""  # kernel seen, e.g. "cudnn"
    interrupted: bool = False  # by Ctrl-C: fewer samples than were wanted
    data: str = ""  # e.g. "random tokens, shifted labels" or the text and its hash
    messages: tuple[tuple[MessageKind, Tally], ...] = ()  # of one extra, untimed sample
    traces: tuple[str, ...] = ()  # files of --profile, relative to the run
