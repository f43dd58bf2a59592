"""Case of training: one model, its layout over ranks, and the techniques of a step."""

import hashlib
import json
from dataclasses import dataclass
from typing import ClassVar

from stepmark.cases.case import Label, fields_of
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.ground.dtypes import DType
from stepmark.model.model import NO_IDENTITY, ModelConfig
from stepmark.model.parallel import ParallelConfig

# Fields that are not part of the identity of a case.
_NO_IDENTITY = ("labels", "model_file", "num_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """One training step. All fields but those of _NO_IDENTITY are its identity.

    model.seq_len is the sequence length. mbs is the batch per data rank and micro-step.
    """

    kind: ClassVar[str] = "train"

    model: ModelConfig
    mbs: int = 1
    parallel: ParallelConfig = ParallelConfig()
    data_parallel: DataParallel = DataParallel.NONE
    device: str = "cuda"
    backend: str = "nccl"
    schedule: Schedule = Schedule.STEP
    grad_accum: int = 1  # micro-steps per optimizer step
    grad_sync: GradSync = GradSync.EVERY
    precision: Precision = Precision.AMP
    fp8: Fp8 = Fp8.NONE
    fp8_head: bool = False
    fp8_all_gather: bool = False
    compile: CompileScope = CompileScope.NONE
    compile_mode: str = "default"
    recompute: Recompute = Recompute.NONE
    recompute_blocks: tuple[int, int] = (1, 1)  # q of every p, with BLOCKS
    attention: str = "auto"  # backend of torch's scaled_dot_product_attention
    loss_chunks: int = 1  # head and loss run over this many parts of the tokens
    cuda_graph: bool = False
    lr: float = 3e-4
    clip: float = 1.0  # gradient norm; 0 = no clipping
    reshard: str = "yes"  # FSDP after forward: yes, no, or the number of ranks to reshard over
    prefetch: int = 1  # FSDP: groups gathered ahead
    blocks_per_group: int = 1  # FSDP
    reduce_dtype: DType = DType.FP32  # type in which gradients are reduced
    bucket_mb: int = 25  # DDP
    async_tp: bool = False
    pp_schedule: str = "1f1b"  # or interleaved
    pp_microbatches: int = 0  # 0: as many as stages
    data: str = "random"  # random, text, or the path of a text file
    workers: int = 0  # processes of the data loader
    seed: int = 0
    scale: str = ""  # e.g. 1/8 or tiny
    model_file: str = ""  # file of the model; for the command only
    num_layers: int | None = None  # that were asked for, as model has; for the command only
    labels: tuple[Label, ...] = ()

    @property
    def family(self) -> str:
        return "train"

    @property
    def num_ranks(self) -> int:
        return self.parallel.world_size

    @property
    def dtype(self) -> DType:
        """Return the type of the products, which determines the peak."""
        if self.fp8 is not Fp8.NONE:
            return DType.FP8_E4M3
        return DType.FP32 if self.precision is Precision.FP32 else DType.BF16

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one forward and backward pass over all ranks."""
        return self.mbs * self.model.seq_len * self.parallel.data_ranks

    @property
    def micro_steps(self) -> int:
        """Return the forward and backward passes in one sample."""
        return self.grad_accum if self.schedule is Schedule.STEP else 1

    @property
    def cycle(self) -> int:
        """Return the samples from one optimizer step to the next."""
        return 1 if self.schedule is Schedule.STEP else self.grad_accum

    @property
    def num_stages(self) -> int:
        """Return the pipeline stages, of which a rank has two where they are interleaved."""
        return self.parallel.pp * (2 if self.pp_schedule == "interleaved" else 1)

    @property
    def num_microbatches(self) -> int:
        """Return into how many parts a pipeline divides a micro-batch."""
        return 1 if self.parallel.pp == 1 else self.pp_microbatches or self.num_stages

    @property
    def strategy(self) -> str:
        """Return e.g. single, ddp, fsdp, hsdp, tp2, fsdp x tp2."""
        axes = self.parallel
        name = self.data_parallel.value
        if name == "fsdp" and axes.dp_replicate > 1:
            name = "hsdp"
        words = [] if self.data_parallel is DataParallel.NONE else [name]
        for axis in ("tp", "pp", "cp", "ep"):
            size = getattr(axes, axis)
            words += [f"{axis}{size}"] if size > 1 else []
        return " x ".join(words) or "single"

    @property
    def compiles_graphs(self) -> bool:
        """Return whether torch.compile captures CUDA graphs in this mode."""
        return self.compile_mode in ("reduce-overhead", "max-autotune")

    @property
    def is_checkpointed(self) -> tuple[bool, ...]:
        """Return for each block whether its activations are recomputed in the backward pass."""
        count = self.model.num_layers
        match self.recompute:
            case Recompute.NONE:
                return (False,) * count
            case Recompute.BLOCKS:
                some, every = self.recompute_blocks
                return tuple(index % every < some for index in range(count))
            case _:
                return (True,) * count

    @property
    def case_id(self) -> str:
        """Return the SHA-256 of the canonical JSON of the identity."""
        identity = fields_of(self, without=_NO_IDENTITY)
        identity |= {"family": self.family, "model": fields_of(self.model, without=NO_IDENTITY)}
        # With spaces, unlike identity_hash: identities of published runs stay.
        text = json.dumps(identity, sort_keys=True, default=fields_of)
        return hashlib.sha256(text.encode()).hexdigest()
