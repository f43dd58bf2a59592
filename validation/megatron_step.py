"""Run a training step of megatron-core on this rank, from a job and the rules' settings.

megatron_messages.py starts it. Layers are megatron-core's local ones, with substitutes for
parts that only TransformerEngine has.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import random
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron_recorder import Recorder
from megatron_stand_ins import Grouped, LocalAttention, Norm, UnshardedLinear

from stepmark.ground.dtypes import DType
from stepmark.workloads.job import Job
from stepmark.workloads.rules.megatron.rule import Megatron
from stepmark.workloads.rules.megatron.settings import Balancing, Granularity, RouterDtype

TORCH = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}


def _config(job: Job, settings: Megatron) -> Any:
    """Return the configuration; fusions that need CUDA or other packages are off."""
    common = {
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "deallocate_pipeline_outputs": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": settings.cross_entropy_loss_fusion,
        "calculate_per_token_loss": settings.calculate_per_token_loss,
        **_shape(job),
        **_mesh(job, settings),
        **_recompute(settings),
        **_experts(job, settings),
    }
    if (mla := job.model.mla) is None:
        return TransformerConfig(**common)
    return MLATransformerConfig(
        **common,
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_nope_head_dim,
        qk_pos_emb_head_dim=mla.qk_rope_head_dim,
        v_head_dim=mla.v_head_dim,
        rope_type="rope",
    )


def _shape(job: Job) -> dict[str, Any]:
    model, gated = job.model, job.model.activation == "swiglu"
    return {
        "num_layers": model.num_layers,
        "mtp_num_layers": model.num_mtp_layers or None,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size or model.moe.ffn_hidden_size,
        "gated_linear_unit": gated,
        "activation_func": getattr(torch.nn.functional, "silu" if gated else "gelu"),
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm or model.mla is not None,
        "bf16": job.dtype is DType.BF16,
        "fp16": job.dtype is DType.FP16,
        "params_dtype": TORCH[job.dtype],
        "pipeline_dtype": TORCH[job.dtype],
    }


def _mesh(job: Job, settings: Megatron) -> dict[str, Any]:
    parallel, vpp = job.parallel, settings.virtual_pipeline_model_parallel_size
    overlap = settings.overlap_p2p_comm and vpp > 1
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": settings.expert_tensor_parallel_size or parallel.tp,
        "sequence_parallel": settings.sequence_parallel and parallel.tp > 1,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        "batch_p2p_sync": False,
        "num_layers_in_first_pipeline_stage": settings.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": settings.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": (
            settings.account_for_embedding_in_pipeline_split
        ),
        "account_for_loss_in_pipeline_split": settings.account_for_loss_in_pipeline_split,
        "microbatch_group_size_per_vp_stage": settings.microbatch_group_size_per_vp_stage,
        "pipeline_model_parallel_layout": settings.pipeline_model_parallel_layout or None,
    }


def _recompute(settings: Megatron) -> dict[str, Any]:
    kind = settings.recompute_granularity
    full = kind is Granularity.FULL
    return {
        "recompute_granularity": None if kind is Granularity.NONE else str(kind),
        "recompute_method": settings.recompute_method if full else None,
        "recompute_num_layers": settings.recompute_num_layers if full else None,
        "recompute_modules": list(settings.modules) or None,
    }


def _experts(job: Job, settings: Megatron) -> dict[str, Any]:
    if (moe := job.model.moe) is None:
        return {}
    balancing, kind = settings.moe_router_load_balancing_type, settings.moe_router_dtype
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_overlap": settings.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm": settings.overlap_moe_expert_parallel_comm,
        "moe_token_dispatcher_type": str(settings.moe_token_dispatcher_type),
        "moe_expert_capacity_factor": settings.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": settings.moe_pad_expert_input_to_capacity,
        "moe_router_dtype": None if kind is RouterDtype.MODEL else str(kind),
        "moe_router_load_balancing_type": str(balancing),
        "moe_aux_loss_coeff": (
            0.0 if balancing is Balancing.NONE else settings.moe_aux_loss_coeff
        ),
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_score_function": "sigmoid" if moe.router_bias else "softmax",
        "moe_grouped_gemm": False,
    }


def _block(job: Job, config: Any, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layers of a model chunk."""
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return _layers(job, config, range(first, first + count))


def _layers(job: Job, config: Any, layers: Iterable[int]) -> TransformerBlockSubmodules:
    moe = job.model.moe
    specs = []
    for layer in layers:
        has_experts = moe is not None and layer >= moe.first_dense_layers
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=moe.num_experts if moe and has_experts else None,
            moe_grouped_gemm=False,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=job.model.mla is not None,
            normalization=config.normalization,
        )
        inner = spec.submodules
        inner.input_layernorm = inner.pre_mlp_layernorm = Norm
        attention = inner.self_attention.submodules
        names = ("q_layernorm", "k_layernorm", "kv_layernorm") if config.qk_layernorm else ()
        for name in names:
            if hasattr(attention, name):
                setattr(attention, name, Norm)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                setattr(attention, name, UnshardedLinear)
        if has_experts:
            inner.mlp.submodules.experts.module = Grouped
        if job.parallel.cp > 1 or job.model.mla is not None:
            attention.core_attention = LocalAttention
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _predictors(job: Job, config: Any, chunk: int | None) -> Any:
    """Return the modules of multi-token prediction of a model chunk; None: it has none."""
    spec = gpt_layer_specs.get_gpt_mtp_block_spec(
        config,
        _layers(job, config, [job.model.num_layers - 1]),
        use_transformer_engine=False,
        vp_stage=chunk,
    )
    for layer in spec.layer_specs if spec else ():
        inner = layer.submodules
        inner.enorm = inner.hnorm = inner.layer_norm = Norm
    return spec


@dataclass(frozen=True, slots=True)
class Trainee:
    """Model chunks, optimizer and configuration. Its step sets the recorder's phases."""

    job: Job
    settings: Megatron
    config: Any
    chunks: list[Any]
    optimizer: Any

    def step(self, recorder: Recorder) -> None:
        """Run megatron-core's part of a step on generated data."""
        with recorder:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            recorder.phase = "schedule"
            with phased(recorder):
                schedules.get_forward_backward_func()(
                    forward_step_func=self._forward,
                    data_iterator=[None] * len(self.chunks),
                    model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                    num_microbatches=self.job.num_microbatches,
                    seq_length=self.job.model.seq_len,
                    micro_batch_size=self.job.mbs,
                    forward_only=False,
                )
            recorder.phase = "optimizer"
            self.optimizer.step()

    def _forward(self, _: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        model, length = self.job.model, self.job.model.seq_len // self.job.parallel.cp
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        place = dist.get_rank() // self.job.parallel.tp
        tokens = torch.arange(self.job.mbs * length, device=device).view(-1, length)
        tokens = (tokens * 7919 + 13 * place) % model.vocab_size
        positions = torch.arange(length, device=device).expand(self.job.mbs, length)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)

        def total(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            count = torch.tensor(output.numel(), dtype=torch.int, device=device)
            return output.float().sum(), count, {}

        return chunk(tokens, positions, mask, labels=tokens), total


@contextlib.contextmanager
def phased(recorder: Recorder) -> Iterator[None]:
    """Set the recorder's phase during forward and backward passes."""
    places: list[tuple[Any, str, str]] = [
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        # Passes that run in turns are made of nodes.
        (ScheduleNode, "forward", "forward"),
        (ScheduleNode, "backward", "backward"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, phase), function in zip(places, originals, strict=True):
        setattr(owner, name, within(recorder, phase, function))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, originals, strict=True):
            setattr(owner, name, function)


def within(recorder: Recorder, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        before, recorder.phase = recorder.phase, phase
        try:
            return function(*args, **kwargs)
        finally:
            recorder.phase = before

    return called


def join(job: Job, settings: Megatron) -> None:
    """Create megatron-core's groups; torch.distributed is already initialized."""
    parallel, vpp = job.parallel, settings.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=settings.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=parallel.dp_replicate,
    )


def leave() -> None:
    """Destroy the groups, so that another case can create its own."""
    parallel_state.destroy_model_parallel()


def version() -> str:
    return str(megatron.core.__version__)


def build(job: Job, settings: Megatron, recorder: Recorder) -> Trainee:
    """Build model chunks in DDP, optimizer and overlap as megatron/training does."""
    torch.manual_seed(0)
    if dist.get_backend() == "nccl":
        random.model_parallel_cuda_manual_seed(0)
    config = _config(job, settings)
    vpp = settings.virtual_pipeline_model_parallel_size
    with recorder:
        chunks = [
            _wrapped(job, settings, config, number if vpp > 1 else None)
            for number in range(vpp)
        ]
    optimizer = _optimizer(job, settings, chunks)

    def of_all(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if vpp > 1 else functions[0]

    if settings.overlap_grad_reduce:
        config.no_sync_func = of_all("no_sync")
        config.grad_sync_func = (
            of_all("start_grad_sync") if settings.align_grad_reduce else None
        )
    if settings.overlap_param_gather and settings.align_param_gather and vpp > 1:
        config.param_sync_func = of_all("start_param_sync")
    config.finalize_model_grads_func = within(recorder, "gradients", finalize_model_grads)
    config.grad_scale_func = optimizer.scale_loss
    return Trainee(job, settings, config, chunks, optimizer)


def _optimizer(job: Job, settings: Megatron, chunks: list[Any]) -> Any:
    config = OptimizerConfig(
        optimizer=str(settings.optimizer),
        lr=1e-3,
        bf16=job.dtype is DType.BF16,
        fp16=job.dtype is DType.FP16,
        loss_scale=1.0 if job.dtype is DType.FP16 else None,
        params_dtype=TORCH[job.dtype],
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
        muon_num_ns_steps=settings.muon_num_ns_steps,
        muon_split_qkv=settings.muon_split_qkv,
        muon_tp_mode=str(settings.muon_tp_mode),
        muon_use_nesterov=settings.muon_use_nesterov,
    )
    if not settings.optimizer.is_muon:
        return get_megatron_optimizer(config, chunks)
    # Its kernels need triton, and run only with --muon-use-syrk of later versions.
    sys.modules["emerging_optimizers.triton_kernels"] = MagicMock()
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer  # noqa: PLC0415

    return get_megatron_muon_optimizer(
        config, chunks, layer_wise_distributed_optimizer=settings.optimizer.is_divided
    )


def _wrapped(job: Job, settings: Megatron, config: Any, chunk: int | None) -> Any:
    """Return a model chunk wrapped in DDP."""
    ends: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
    predictors = _predictors(job, config, chunk) if job.model.num_mtp_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block(job, config, chunk),
        mtp_block_spec=predictors,
        vocab_size=job.model.vocab_size,
        max_sequence_length=job.model.max_positions or job.model.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=chunk,
        share_embeddings_and_output_weights=job.model.tied_embeddings,
        position_embedding_type="learned_absolute" if job.model.max_positions else "rope",
    )
    gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not settings.grad_reduce_in_bf16,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        align_param_gather=settings.align_param_gather
        and settings.virtual_pipeline_model_parallel_size > 1,
        bucket_size=settings.ddp_bucket_size,
        pad_buckets_for_high_nccl_busbw=settings.ddp_pad_buckets_for_high_nccl_busbw,
        average_in_collective=settings.ddp_average_in_collective,
        num_distributed_optimizer_instances=job.parallel.dp_replicate,
    )
    if dist.get_backend() == "nccl":
        model = model.cuda()
    if job.dtype is not DType.FP32:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, gradients, model, disable_bucketing=bool(chunk))
