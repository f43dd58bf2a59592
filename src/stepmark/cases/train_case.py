"""Case of training: one model, its layout over ranks, and the techniques of a step."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, ClassVar

from stepmark.cases.case import Label
from stepmark.cases.fields import Need, Role, Shown, field_of, identity
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    OptimizerKind,
    Precision,
    Recompute,
    Schedule,
)
from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.options import Reader, between, words_of
from stepmark.model.model import ModelConfig, identity_of
from stepmark.model.parallel import (
    ParallelConfig,
    PipelineSchedule,
    StageSplit,
    TpPlan,
    stage_layers,
)

Count = Annotated[int, between(1, 65536)]
Groups = Annotated[int, between(1, 1024)]
# Types of linear layers' products over AMP, as --precision names them, and their recipes.
NARROW = {"fp8": Fp8.TENSORWISE, "mxfp8": Fp8.MXFP8, "nvfp4": Fp8.NVFP4}
PrecisionName = Annotated[str, words_of(*Precision, *NARROW)]
CompileMode = Annotated[
    str, words_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
]
AttentionBackend = Annotated[str, words_of("auto", "cudnn", "flash", "efficient", "math")]
_REDUCE = (DType.FP32, DType.BF16)
ReduceDType = Annotated[
    DType,
    Reader(read=lambda text, field: parse_dtype(text, field, _REDUCE), metavar="fp32|bf16"),
]

_FSDP = Need(
    words="--strategy fsdp", is_met=lambda case: case.data_parallel is DataParallel.FSDP
)
_OWN_TABLE = Need(
    words="--strategy fsdp --reshard yes, of a model whose embedding is not its head",
    is_met=lambda case: (
        _FSDP.is_met(case) and case.reshard != "no" and not case.model.tied_embeddings
    ),
)
_DDP = Need(words="--strategy ddp", is_met=lambda case: case.data_parallel is DataParallel.DDP)
_TENSOR = Need(words="tensor parallelism (--tp)", is_met=lambda case: case.parallel.tp > 1)
_PIPELINE = Need(words="pipeline stages (--pp)", is_met=lambda case: case.parallel.pp > 1)
_SEVERAL_STAGES = Need(
    words="--pp-schedule interleaved or zb1p",
    is_met=lambda case: case.parallel.pp > 1 and case.pp_schedule.has_stages,
)


def _splits_differ(case: "TrainCase") -> bool:
    if case.parallel.pp == 1 or case.num_stages > case.model.num_layers:
        return False
    even, torchtitan = (
        stage_layers(case.model.num_layers, case.num_stages, split)
        for split in (StageSplit.EVEN, StageSplit.TORCHTITAN)
    )
    return even != torchtitan


_UNEVEN = Need(
    words="pipeline stages (--pp) that embedding and head change", is_met=_splits_differ
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """One training step.

    model.seq_len is the sequence length. mbs is the batch per data rank and micro-step.
    """

    kind: ClassVar[str] = "train"

    model: ModelConfig = field_of(Role.ELSEWHERE, shown=None)
    mbs: int = field_of(Role.STRICT, 1, shown=None)
    parallel: ParallelConfig = field_of(Role.ELSEWHERE, ParallelConfig(), shown=None)
    data_parallel: DataParallel = field_of(Role.ELSEWHERE, DataParallel.NONE, shown=None)
    device: str = field_of(Role.ELSEWHERE, "cuda")
    backend: str = field_of(Role.SETTING, "nccl")
    schedule: Schedule = field_of(Role.STRICT, Schedule.STEP, shown=None)
    # Micro-steps per optimizer step.
    grad_accum: int = field_of(
        Role.STRICT,
        1,
        "micro-steps per step [1; 8 with --schedule micro]",
        *("--grad-accum", "--grad-acc-steps", "--grad_acc_steps"),
        reads=Count,
        group="Optimizer step",
        rare=False,
        varies=True,
    )
    grad_sync: GradSync = field_of(
        Role.SETTING,
        GradSync.EVERY,
        "micro-steps that reduce gradients [every]",
        reads=GradSync,
        group="Optimizer step",
    )
    precision: Precision = field_of(
        Role.SETTING,
        Precision.AMP,
        "amp: fp32 weights, autocast to bf16; master: bf16 weights, whose fp32 copies the "
        "optimizer updates; fp8, mxfp8, nvfp4: amp with linear layers in it [amp; CPU: fp32]",
        reads=PrecisionName,
        group="Precision",
        rare=False,
        varies=True,
    )
    fp8: Fp8 = field_of(Role.SETTING, Fp8.NONE, shown=None)
    fp8_head: bool = field_of(Role.SETTING, False)
    fp8_all_gather: bool = field_of(Role.SETTING, False)
    compile: CompileScope = field_of(Role.SETTING, CompileScope.NONE, shown=None)
    compile_mode: str = field_of(
        Role.SETTING,
        "default",
        "default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs [default]",
        *("--compile-mode", "--compile_mode"),
        reads=CompileMode,
        group="Techniques",
    )
    recompute: Recompute = field_of(Role.SETTING, Recompute.NONE, shown=None)
    # With BLOCKS: q of every p.
    recompute_blocks: tuple[int, int] = field_of(
        Role.SETTING, (1, 1), cell="{0[0]}/{0[1]}".format, shown=None
    )
    # Head and loss run over this many parts of the tokens.
    loss_chunks: int = field_of(
        Role.SETTING,
        1,
        "head and loss in this many parts of the tokens [1]",
        reads=Count,
        group="Techniques",
        words="loss in {} chunks",
    )
    cuda_graph: bool = field_of(
        Role.SETTING,
        False,
        "single: the whole step as one CUDA graph",
        reads=bool,
        group="Techniques",
        words="cuda graph",
    )
    # Of torch's scaled_dot_product_attention.
    attention: str = field_of(
        Role.SETTING,
        "auto",
        "backend of attention [auto]",
        reads=AttentionBackend,
        group="Techniques",
        words="attention {}",
    )
    optimizer: OptimizerKind = field_of(
        Role.SETTING,
        OptimizerKind.ADAMW,
        "adamw; adamw8bit: torchao's; muon: torch.optim.Muon of the blocks' matrices, adamw of "
        "the rest [adamw]",
        reads=OptimizerKind,
        group="Optimizer step",
        words="{}",
        formerly=OptimizerKind.ADAMW,
    )
    lr: float = field_of(
        Role.SETTING,
        3e-4,
        "learning rate of the optimizer [0.0003]",
        reads=Annotated[float, between(1e-12, 1e12)],
        group="Optimizer step",
    )
    # Gradient norm; 0 = no clipping.
    clip: float = field_of(
        Role.SETTING,
        1.0,
        "gradient norm to clip to; 0 = no clipping [1]",
        reads=Annotated[float, between(0.0, 1e6)],
        group="Optimizer step",
    )
    # Type in which gradients are reduced.
    reduce_dtype: DType = field_of(
        Role.SETTING,
        DType.FP32,
        "type in which data ranks reduce gradients [bf16 for bf16 weights, else fp32]",
        reads=ReduceDType,
        group="Precision",
        varies=True,
        words="reduce {}",
    )
    # FSDP after forward: yes, no, or the number of ranks to reshard over.
    reshard: str = field_of(
        Role.SETTING,
        "yes",
        "fsdp, after forward: yes, no, or a number of ranks [yes; no with --pp]",
        reads=str,
        group="Settings of one strategy",
        needs=_FSDP,
        varies=True,
        words="reshard {}",
    )
    embedding_in_backward: bool = field_of(
        Role.SETTING,
        True,
        "fsdp gathers the embedding for its backward pass, too, which needs no weights [yes]",
        "--embedding-in-backward/--no-embedding-in-backward",
        reads=bool,
        group="Settings of one strategy",
        needs=_OWN_TABLE,
        words="embedding gathered once",
        formerly=False,
    )
    # Groups gathered ahead.
    prefetch: int = field_of(
        Role.SETTING,
        1,
        "fsdp: groups gathered ahead [1]",
        reads=Groups,
        group="Settings of one strategy",
        needs=_FSDP,
        words="prefetch {}",
    )
    blocks_per_group: int = field_of(
        Role.SETTING,
        1,
        "fsdp: blocks gathered together [1]",
        reads=Groups,
        group="Settings of one strategy",
        needs=_FSDP,
        words="{} blocks per group",
    )
    bucket_mb: int = field_of(
        Role.SETTING,
        25,
        "ddp: MB of gradients per bucket [25, the first one 1]",
        reads=Annotated[int, between(1, 2**20)],
        group="Settings of one strategy",
        needs=_DDP,
        varies=lambda case: not case.small_first_bucket,
        words="buckets {} MB",
    )
    # torch's own limits, which it has where no size is given: the first bucket 1 MiB.
    small_first_bucket: bool = field_of(Role.SETTING, True, needs=_DDP, formerly=False)
    bucket_view: bool = field_of(
        Role.SETTING,
        False,
        "ddp: gradients are views of the buckets, which saves a copy of them",
        *("--bucket-view", "--gradient-as-bucket-view"),
        reads=bool,
        group="Settings of one strategy",
        needs=_DDP,
        words="bucket views",
        formerly=True,
    )
    tp_plan: TpPlan = field_of(
        Role.SETTING,
        TpPlan.TORCHTITAN,
        "embedding and loss under tp: torchtitan divides them, whole gathers them [torchtitan]",
        reads=TpPlan,
        group="Settings of one strategy",
        needs=_TENSOR,
        words="{} logits",
        formerly=TpPlan.WHOLE,
    )
    async_tp: bool = field_of(
        Role.SETTING,
        False,
        "tp with --compile: overlap parts of a product with their communication",
        reads=bool,
        group="Settings of one strategy",
        needs=_TENSOR,
        words="async tp",
    )
    pp_schedule: PipelineSchedule = field_of(
        Role.SETTING,
        PipelineSchedule.ONE_F_ONE_B,
        "schedule of the pipeline [1f1b]",
        reads=PipelineSchedule,
        group="Settings of one strategy",
        needs=_PIPELINE,
    )
    pp_stages: int = field_of(
        Role.SETTING,
        2,
        "stages of a rank, interleaved or zb1p [2]",
        reads=Annotated[int, between(1, 64)],
        group="Settings of one strategy",
        needs=_SEVERAL_STAGES,
        words="{} stages a rank",
        formerly=2,
    )
    # 0: as many as stages.
    pp_microbatches: int = field_of(
        Role.SETTING,
        0,
        "micro-batches into which a pipeline divides --mbs [the number of stages]",
        reads=Annotated[int, between(0, 65536)],
        group="Settings of one strategy",
        needs=_PIPELINE,
    )
    pp_split: StageSplit = field_of(
        Role.SETTING,
        StageSplit.TORCHTITAN,
        "layers of stages: torchtitan counts embedding and head as one each, or even "
        "[torchtitan]",
        reads=StageSplit,
        group="Settings of one strategy",
        needs=_UNEVEN,
        words="{} stages",
        formerly=StageSplit.EVEN,
    )
    data: str = field_of(Role.SETTING, "random")  # random, text, or the path of a text file
    # Processes of the data loader.
    workers: int = field_of(
        Role.SETTING,
        0,
        "processes of the data loader [2 on accelerators, 0 on a CPU]",
        *("--workers", "--n-workers", "--n_workers"),
        reads=Annotated[int, between(0, 256)],
        group="Data",
        varies=True,
    )
    seed: int = field_of(
        Role.SETTING,
        0,
        "seed of weights and data [0]",
        reads=Annotated[int, between(0, 2**31 - 1)],
        group="Data",
    )
    scale: str = field_of(Role.SETTING, "", shown=Shown.TABLES, leaves=4)  # 1/8 or tiny
    # The file of the model, and the layers that were asked for: for the command only.
    model_file: str = field_of(None, "", shown=None)
    num_layers: int | None = field_of(None, None, shown=None)
    labels: tuple[Label, ...] = field_of(None, (), shown=None)
    # Rows of the fullest rank's experts / the mean: of a predicted job, `train` has none.
    imbalance: float = field_of(None, 1.0, shown=None)

    @property
    def family(self) -> str:
        return "train"

    @property
    def num_ranks(self) -> int:
        return self.parallel.world_size

    @property
    def dtype(self) -> DType:
        """Return the type of the products, which determines the peak."""
        if self.fp8 in (Fp8.MXFP8, Fp8.NVFP4):
            return DType(self.fp8.value)
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
        """Return the pipeline stages, of which a rank may have several."""
        return self.parallel.pp * self.pp_schedule.num_chunks(self.pp_stages)

    def stages_of(self, rank: int) -> list[int]:
        """Return the pipeline stages of a rank of the pipeline, the first one first."""
        pp = self.parallel.pp
        return self.pp_schedule.stages(rank, pp, self.num_stages // pp)

    @property
    def num_microbatches(self) -> int:
        """Return into how many parts a pipeline divides a micro-batch."""
        return 1 if self.parallel.pp == 1 else self.pp_microbatches or self.num_stages

    @property
    def stage_layers(self) -> list[range]:
        """Return the layers of each pipeline stage."""
        return stage_layers(self.model.num_layers, self.num_stages, self.pp_split)

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
        model = identity_of(self.model)
        values = {**identity(self), "family": self.family, "model": model}
        # With spaces, unlike identity_hash: identities of published runs stay.
        text = json.dumps(values, sort_keys=True, default=identity_of)
        return hashlib.sha256(text.encode()).hexdigest()
