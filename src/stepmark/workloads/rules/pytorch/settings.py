"""Settings of a PyTorch step, by PyTorch's own names where it has them.

Each is declared once. `only` says with which data parallelism it has an effect; the rules'
older names (fsdp, ddp, tp, pp) fix data_parallel and have the settings that are left.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    GradSync,
    OptimizerKind,
    Recompute,
)
from stepmark.efficiency.kernel_times import AttentionKernel
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.units import MIB
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit, TpPlan
from stepmark.step.kernel_choice import KernelChoice
from stepmark.step.lora import ADAPTABLE, Lora
from stepmark.workloads.job import check_at_least, check_trained, setting

# Values of data_parallel for `only`.
_SHARDED = {"data_parallel": (DataParallel.FSDP,)}
_BUCKETS = {"data_parallel": (DataParallel.DDP,)}
_WHOLE = {"data_parallel": (DataParallel.DDP, DataParallel.NONE)}  # weights of a rank
_REDUCED = {"data_parallel": (DataParallel.FSDP, DataParallel.DDP)}
_SEVERAL = tuple(each for each in PipelineSchedule if each.has_stages)
_DIVIDED = {"data_parallel": (DataParallel.FSDP, DataParallel.NONE)}  # by tp or pp


DEFAULT_BUCKETS = (MIB, 25 * MIB)  # bytes of DDP's first bucket, and of the others


class Trainer(StrEnum):
    """Trainer whose kernels run."""

    STEPMARK = "stepmark"  # stepmark train: a fused optimizer
    # v0.3.0 and 5e85bd6, models/layers/attention.py and models/mpt/modeling_mpt.py; Composer
    # 0.16.3 and 0.17.2, trainer/trainer.py (_eval_train_metrics), metrics/nlp.py
    # (LanguageCrossEntropy, LanguagePerplexity) and optim/decoupled_weight_decay.py.
    LLM_FOUNDRY = "llm-foundry"
    LLM_FOUNDRY_BF16 = "llm-foundry-bf16"  # Composer's precision bf16: without autocast


# Linear layers of MPT, whose biases' gradients are sums over rows (no_bias is false).
_MPT_BIASES = frozenset(("attention.qkv", "attention.out", "mlp.up", "mlp.down"))


class StageEnds(StrEnum):
    """The module that wraps the embedding, the final norm and the head."""

    # The embedding, and norm and head (torchtitan, distributed/fsdp.py).
    APART = "apart"
    ROOT = "root"  # the model itself, gathered once a pass: torch's tutorial


@dataclass(frozen=True, slots=True, kw_only=True)
class PyTorch:
    """fully_shard's and DistributedDataParallel's parameters, and how a step runs.

    None: the default of the job's data parallelism.
    """

    data_parallel: DataParallel | None = setting(
        None,
        "fsdp, ddp or none [fsdp over dp-shard x cp; ddp if only dp-replicate is more than 1]",
        common=True,
    )
    param_dtype: DType | None = setting(
        None, "dtype of weights: gathered ones with fsdp [bf16], else the model's [fp32]"
    )
    reduce_dtype: DType = setting(DType.FP32, "dtype of reduced gradients", only=_SHARDED)
    shard_dtype: DType = setting(
        DType.FP32, "dtype of the shards that the optimizer updates", only=_SHARDED
    )
    reshard_after_forward: str = setting(
        "",
        "yes, no, or a number of ranks to reshard over [yes; no with --pp]",
        only=_SHARDED,
    )
    prefetch: int = setting(
        1, "groups gathered ahead; 1: as torch does by itself", only=_SHARDED
    )
    blocks_per_group: int = setting(1, "transformer blocks per FSDP group", only=_SHARDED)
    ends: StageEnds = setting(
        StageEnds.APART, "who wraps embedding and output: apart or root", only=_SHARDED
    )
    fp8_all_gather: bool = setting(
        False,
        "weights of fp8 products are gathered in fp8, with scales of a step (torchao)",
        only=_SHARDED,
    )
    embedding_in_backward: bool = setting(
        True, "with --ends apart: set_unshard_in_backward of the embedding", only=_SHARDED
    )
    autocast: bool = setting(
        True, "products in --dtype, whatever the weights' type", only=_BUCKETS
    )
    masters: bool = setting(False, "keep fp32 master weights for the optimizer", only=_WHOLE)
    compress_bf16: bool = setting(
        False, "send gradients in bf16 (bf16_compress_hook)", only=_BUCKETS
    )
    bucket_cap_mb: int = setting(
        0, "MiB per gradient bucket; 0: 25, the first one 1", only=_BUCKETS
    )
    find_unused_parameters: bool = setting(
        False, "reduce which parameters were used as well", only=_BUCKETS
    )
    gradient_as_bucket_view: bool = setting(
        False, "gradients are views of buckets", only=_BUCKETS
    )
    init_sync: bool = setting(True, "broadcast rank 0's weights at the start", only=_BUCKETS)
    tp_plan: TpPlan = setting(
        TpPlan.TORCHTITAN, "embedding and loss: torchtitan or whole", only=_DIVIDED
    )
    async_tp: bool = setting(
        False, "blocks are compiled, with products of tp in pieces that are sent", only=_DIVIDED
    )
    attention_backend: AttentionKernel = setting(
        AttentionKernel.AUTO,
        "auto, flash (FlashAttention-2, also on Hopper), flash1 or flex (FlexAttention)",
    )
    trainer: Trainer = setting(
        Trainer.STEPMARK,
        "stepmark; llm-foundry or llm-foundry-bf16: kernels of its optimizer and metrics",
    )
    compile: CompileScope = setting(
        CompileScope.NONE, "torch.compile of: none, block, layers, loss or model"
    )
    fuse_qkv: bool = setting(True, "q, k and v are one product, as in `stepmark train`")
    grad_sync: GradSync = setting(
        GradSync.EVERY, "reduce every micro-batch or the last one", only=_REDUCED
    )
    loss_chunks: int = setting(
        1, "chunks of tokens in which head and loss run, with their gradients"
    )
    lora_rank: int | None = setting(
        None, "weights are frozen, with adapters of this rank beside linear layers"
    )
    lora_targets: str = setting(
        ",".join(ADAPTABLE[:-1]), f"layers with adapters: some of {','.join(ADAPTABLE)}"
    )
    clip: bool = setting(True, "clip gradients by their norm")
    optimizer: OptimizerKind = setting(
        OptimizerKind.ADAMW,
        "adamw; adamw8bit: torchao's; muon: torch.optim.Muon of the blocks' matrices",
    )
    recompute: Recompute = setting(Recompute.NONE, "checkpointing: none, full, blocks or ops")
    recompute_some: int = setting(1, "with blocks: checkpointed blocks in each cycle")
    recompute_every: int = setting(1, "with blocks: blocks per cycle")
    pp_schedule: PipelineSchedule = setting(
        PipelineSchedule.ONE_F_ONE_B,
        "1f1b, interleaved, gpipe, zb1p, zbv or dualpipev",
        only=_DIVIDED,
    )
    pp_microbatches: int = setting(
        0, "micro-batches per pass through the pipeline; 0: all", only=_DIVIDED
    )
    pp_stages: int = setting(
        2,
        "with --pp-schedule interleaved or zb1p: stages per rank",
        only={**_DIVIDED, "pp_schedule": _SEVERAL},
    )
    pp_split: StageSplit = setting(
        StageSplit.TORCHTITAN, "layers by stage: torchtitan or even", only=_DIVIDED
    )

    def __post_init__(self) -> None:
        if self.async_tp and not self.compile.has_blocks:
            object.__setattr__(self, "compile", CompileScope.BLOCK)
        if self.data_parallel is not None and self.param_dtype is None:
            is_sharded = self.data_parallel is DataParallel.FSDP
            object.__setattr__(self, "param_dtype", DType.BF16 if is_sharded else DType.FP32)
        for name in ("param_dtype", "reduce_dtype", "shard_dtype"):
            if (dtype := getattr(self, name)) is not None:
                check_trained(name, dtype)
        check_at_least(self, 1, "prefetch", "blocks_per_group", "pp_stages", "loss_chunks")
        check_at_least(self, 1, "recompute_some", "recompute_every")
        check_at_least(self, 0, "bucket_cap_mb", "pp_microbatches")
        if self.recompute_some > self.recompute_every:
            raise ConfigError(
                "recompute_some",
                self.recompute_some,
                f"at most recompute_every ({self.recompute_every})",
            )

    def resolved(self, parallel: ParallelConfig) -> "PyTorch":
        """Return the settings with the data parallelism of a layout, if none was chosen.

        torchtitan b5bcd76, models/llama3/infra/parallelize.py: FSDP where dp_shard or cp has
        more than one rank, else DDP where dp_replicate has.
        """
        if self.data_parallel is not None:
            return self
        if parallel.dp_shard * parallel.cp > 1:
            return replace(self, data_parallel=DataParallel.FSDP)
        is_replicated = parallel.dp_replicate > 1
        return replace(
            self, data_parallel=DataParallel.DDP if is_replicated else DataParallel.NONE
        )

    @property
    def lora(self) -> Lora | None:
        """Adapters, if anything is frozen. Raises ConfigError."""
        if self.lora_rank is None:
            return None
        names = (name.strip() for name in self.lora_targets.split(","))
        return Lora(rank=self.lora_rank, targets=frozenset(filter(None, names)))

    @property
    def kernels(self) -> KernelChoice:
        """Kernels of the trainer. llm-foundry unpads rows for flash-attn, not for Triton."""
        if self.trainer is Trainer.STEPMARK:
            return KernelChoice()
        return KernelChoice(
            summed_biases=_MPT_BIASES,
            joins_qkv=self.fuse_qkv,
            unpads=self.attention_backend is AttentionKernel.FLASH,
            loss_metrics=2,
            wide_metrics=self.trainer is Trainer.LLM_FOUNDRY,
        )

    @property
    def data_axis(self) -> str:
        """The mesh axis of ranks that no axis names; "": there are none."""
        axes = {DataParallel.DDP: "dp_replicate", DataParallel.NONE: ""}
        return axes.get(self.data_parallel or DataParallel.FSDP, "dp_shard")

    @property
    def weights(self) -> DType:
        """Type of the parameters that the optimizer updates."""
        return DType.FP32 if self.masters else self.model_weights

    @property
    def model_weights(self) -> DType:
        """Type of the parameters of the model: with FSDP of its shards."""
        if self.data_parallel is DataParallel.FSDP:
            return self.shard_dtype
        return self.param_dtype or DType.FP32

    def resharding(self, pp: int) -> str:
        """Return reshard_after_forward, which a pipeline leaves out by default."""
        return self.reshard_after_forward or ("yes" if pp == 1 else "no")

    @property
    def bucket_limits(self) -> tuple[int, int]:
        """Bytes of DDP's first bucket and of the others."""
        if self.bucket_cap_mb:
            return self.bucket_cap_mb * MIB, self.bucket_cap_mb * MIB
        return DEFAULT_BUCKETS
