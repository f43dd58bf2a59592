"""Training techniques by name, and the data that a training case records."""

from dataclasses import dataclass
from enum import StrEnum

from stepmark.cases.message import MessageKind, Tally


class DataParallel(StrEnum):
    """How data-parallel ranks hold the weights."""

    NONE = "none"  # one data rank
    DDP = "ddp"  # each rank has a full copy; gradients are all-reduced
    FSDP = "fsdp"  # FSDP2: weights, gradients and optimizer state are sharded


class Precision(StrEnum):
    """Precision of weights. amp: fp32 weights, bf16 compute (autocast, or FSDP's policy)."""

    AMP = "amp"
    # bf16 weights with fp32 copies that the optimizer updates; gradients accumulate in fp32.
    # The arithmetic is autocast's, with one cast per optimizer step instead of per micro-step.
    MASTER = "master"
    BF16 = "bf16"  # weights, gradients and optimizer state in bf16
    FP32 = "fp32"


class Fp8(StrEnum):
    """Recipe of the linear layers' products in FP8 and narrower types."""

    NONE = "none"
    TENSORWISE = "tensorwise"  # torchao, one dynamic scale per tensor
    ROWWISE = "rowwise"  # torchao, one dynamic scale per row
    TE = "te"  # TransformerEngine, delayed scaling
    MXFP8 = "mxfp8"  # torchao, one power of two per 32 elements
    NVFP4 = "nvfp4"  # TransformerEngine, one e4m3 factor per 16 elements


class CompileScope(StrEnum):
    """What torch.compile compiles, each as one graph."""

    NONE = "none"
    BLOCK = "block"  # each block, and the head with the loss
    LAYERS = "layers"  # each block: head and loss stay eager, as torchtitan's once did
    LOSS = "loss"  # the head with the loss: no logits in fp32, as fused losses have none
    MODEL = "model"

    @property
    def has_blocks(self) -> bool:
        return self not in (CompileScope.NONE, CompileScope.LOSS)

    @property
    def has_head(self) -> bool:
        return self not in (CompileScope.NONE, CompileScope.LAYERS)


class Recompute(StrEnum):
    """Activation checkpointing."""

    NONE = "none"
    FULL = "full"  # every block
    BLOCKS = "blocks"  # q of every p blocks
    OPS = "ops"  # every block except attention, collectives and every second product

    @classmethod
    def _missing_(cls, value: object) -> "Recompute | None":
        return cls.OPS if value == "selective" else None  # torchtitan's word


class OptimizerKind(StrEnum):
    """Optimizer of PyTorch."""

    ADAMW = "adamw"  # torch.optim.AdamW, fused
    ADAMW8BIT = "adamw8bit"  # torchao.optim.AdamW8bit: both moments in 8 bits
    MUON = "muon"  # torch.optim.Muon of the blocks' matrices, AdamW of the other parameters


class Schedule(StrEnum):
    """Content of one sample."""

    STEP = "step"  # an optimizer step with all its micro-steps
    MICRO = "micro"  # one forward and backward pass; every grad_accum-th also has the optimizer


class GradSync(StrEnum):
    """When gradients are reduced over data ranks."""

    EVERY = "every"  # each micro-step
    LAST = "last"  # only before the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Data of a measured training case in addition to its samples.

    Fields by rank and sample have the order of Samples.seconds. Phases are empty if they cannot
    be separated (a pipeline, or one CUDA graph for the whole step).
    """

    tokens_per_sample: int  # over all ranks
    cycle: int  # samples from one optimizer step to the next: 1, or grad_accum with MICRO
    num_params: int  # stored parameters over all ranks; a tied table counts once
    warmup_s: tuple[tuple[float, ...], ...]  # by rank: samples before the steady-state ones
    loss: tuple[float, ...]  # per sample including warm-up, mean over data ranks
    fwd_s: tuple[tuple[float, ...], ...] = ()
    bwd_s: tuple[tuple[float, ...], ...] = ()
    optim_s: tuple[tuple[float, ...], ...] = ()  # clipping included; 0 in most micro samples
    data_s: tuple[tuple[float, ...], ...] = ()  # host seconds until the batch was available
    # By rank: host seconds from the first sample after the soak to the end of the last one, and
    # how many of them are in no sample; () in records of older releases.
    elapsed_s: tuple[float, ...] = ()
    uncounted_s: tuple[float, ...] = ()
    build_s: float = 0.0  # host seconds to build model and optimizer, slowest rank
    first_s: float = 0.0  # host seconds of the first sample, which compiles; slowest rank
    allocated_bytes: tuple[int | None, ...] = ()  # peak, by rank, after the first sample
    reserved_bytes: tuple[int | None, ...] = ()
    resting_bytes: tuple[int | None, ...] = ()  # allocated between steps; () in older records
    # Used on the device beyond what torch reserves: context, kernels, NCCL's buffers, and what
    # other processes use.
    outside_bytes: tuple[int | None, ...] = ()
    resident_bytes: tuple[int | None, ...] = ()  # of the process on a CPU; None: unknown
    alloc_retries: tuple[int, ...] = ()  # cudaMalloc failed and the cache was flushed
    recompiles: int = 0  # after the first sample, any rank
    graph_breaks: int = 0
    attention_run: str = ""  # kernel seen, e.g. "cudnn"
    compile_failed: str = ""  # why torch.compile was given up; the step then ran without it
    interrupted: bool = False  # by Ctrl-C, with fewer samples than requested
    data: str = ""  # e.g. "random tokens, shifted labels" or the text and its hash
    messages: tuple[tuple[MessageKind, Tally], ...] = ()  # of one extra, untimed sample
    traces: tuple[str, ...] = ()  # files of --profile, relative to the run
    trace_sha256: tuple[str, ...] = ()  # of these files; () in records of older releases
