"""The plan of a job under Megatron-LM's parameters: its model, its groups, what it lacks."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.model import ModelConfig
from stepmark.step.kernel_choice import KernelChoice, Loss, Softmax
from stepmark.step.layout import model_as
from stepmark.step.lora import Lora
from stepmark.step.tree import TreeBuilder
from stepmark.step.workload import CommOp, Group
from stepmark.workloads.job import (
    AXES,
    Comms,
    Job,
    check_trained,
    mesh_groups,
    refuse_first,
)
from stepmark.workloads.pipeline import Pipeline
from stepmark.workloads.rules.megatron import adam_states, cpu_offload, narrow
from stepmark.workloads.rules.megatron.deepep import Hops, groups_of, hops_of
from stepmark.workloads.rules.megatron.pipeline_layout import num_chunks
from stepmark.workloads.rules.megatron.refusals import refusals
from stepmark.workloads.rules.megatron.settings import (
    LORA_TARGETS,
    STORED_SCORES,
    AttentionBackend,
    CpComm,
    Megatron,
    RouterDtype,
    StateDtype,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job, its settings, and the groups in which its ranks communicate."""

    job: Job
    settings: Megatron
    comms: Comms

    @property
    def model(self) -> ModelConfig:
        return self.job.model

    @property
    def tp(self) -> int:
        return self.job.parallel.tp

    @property
    def etp(self) -> int:
        """Tensor parallelism of experts."""
        return self.settings.expert_tensor_parallel_size or self.tp

    @property
    def sequence_parallel(self) -> bool:
        return self.settings.sequence_parallel and self.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before sequence parallelism divides them."""
        return self.job.tokens

    @property
    def own_tokens(self) -> int:
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def sent_rows(self) -> int:
        """Rows that this rank's own tokens send to experts."""
        return self._rows(1.0)

    @property
    def expert_rows(self) -> int:
        """Rows that the experts of the fullest rank get from as many tokens of each rank."""
        return self._rows(self.job.imbalance)

    def _rows(self, imbalance: float) -> int:
        if (moe := self.model.moe) is None:
            return 0
        rows = math.ceil(self.own_tokens * moe.top_k * imbalance)
        factor = self.settings.moe_expert_capacity_factor
        if factor is None:
            return rows
        # get_capacity of moe_utils.py
        sent = self.own_tokens * moe.top_k
        capacity = math.ceil(sent / moe.num_experts * factor) * moe.num_experts
        return (
            capacity if self.settings.moe_pad_expert_input_to_capacity else min(rows, capacity)
        )

    @property
    def routed_width(self) -> int:
        """Width of the rows that are sent to experts."""
        latent = self.model.moe.latent_size if self.model.moe else 0
        return latent or self.model.hidden_size

    @property
    def hops(self) -> Hops | None:
        """Hops of the flex dispatcher; None: another one exchanges tokens."""
        if self.model.moe is None:
            return None
        ep = self.job.parallel.ep
        imbalance = self.job.imbalance
        return hops_of(self.model.moe, self.settings, ep=ep, etp=self.etp, imbalance=imbalance)

    @property
    def tree(self) -> TreeBuilder:
        """Factory of this rank's modules."""
        sequence = self.sequence_parallel
        etp = self.etp
        tree = self.job.tree("megatron", sequence_parallel=sequence, etp=etp, lora=self.lora)
        inputs = replace(tree.inputs, expert_rows=self.expert_rows * etp, imbalance=1.0)
        return replace(tree, inputs=inputs, kernels=self.kernels)

    @property
    def kernels(self) -> KernelChoice:
        """Kernels of a layer.

        Biases of all linear layers but the first are added in other modules, which sum their
        gradients; that of q, k and v is a part of TransformerEngine's products.
        """
        settings = self.settings
        backend = settings.attention_backend
        is_local = backend is AttentionBackend.LOCAL
        qkv = frozenset({"attention.qkv"}) if is_local else frozenset()
        loss = Loss.VOCAB_PARALLEL
        if settings.cross_entropy_loss_fusion:
            loss = Loss.VOCAB_PARALLEL_FUSED
        return KernelChoice(
            stores_scores=backend in STORED_SCORES,
            # Packed sequences have no batch: [tokens, heads, width] is one layout for both.
            batch_first=backend is AttentionBackend.FLASH and self.model.packing is None,
            softmax=self._softmax,
            dropout_of_attention=settings.attention_dropout > 0,
            dropout_of_rows=settings.hidden_dropout > 0,
            added_biases=qkv,
            summed_biases=qkv | {"attention.out", "mlp.up", "mlp.gate_up", "mlp.down"},
            fused_swiglu=settings.bias_swiglu_fusion,
            adds_gradients=not settings.gradient_accumulation_fusion,
            adds_table_gradient=self.lora is None,
            sum_bytes=self.gradient_dtype.itemsize,
            loss=loss,
        )

    @property
    def _softmax(self) -> Softmax:
        """Softmax of stored scores.

        fused_softmax.py and TransformerEngine's softmax.py (is_kernel_available); the latter's
        causal kernel is disabled.
        """
        seq = self.model.seq_len
        num_rows = self.job.mbs * self.model.num_heads // self.tp
        fits = self.job.dtype is not DType.FP32 and not num_rows % 4
        if self.settings.attention_backend is AttentionBackend.UNFUSED:
            fits = fits and 16 < seq < 16384 and not seq % 8
            return Softmax.MASKED if fits else Softmax.UNFUSED
        fits = fits and 16 < seq <= 4096 and not seq % 4
        is_fused = fits and self.settings.masked_softmax_fusion
        return Softmax.CAUSAL if is_fused else Softmax.UNFUSED

    @property
    def lora(self) -> Lora | None:
        """Adapters, which are trained in place of the model; None: the model is."""
        settings = self.settings
        if settings.lora_rank is None:
            return None
        names = (LORA_TARGETS[word] for word in settings.adapted_layers)
        return Lora(rank=settings.lora_rank, targets=frozenset(itertools.chain(*names)))

    @property
    def pipeline(self) -> Pipeline:
        """Stages, micro-batches, and how the schedule runs them."""
        settings = self.settings
        return Pipeline(
            num_stages=self.job.parallel.pp,
            num_microbatches=self.job.num_microbatches,
            num_chunks=settings.virtual_pipeline_model_parallel_size,
            overlap=settings.overlap_p2p_comm,
            group_size=settings.microbatch_group_size_per_vp_stage,
            combines=settings.overlap_moe_expert_parallel_comm,
        )

    @property
    def inside(self) -> "partial[tuple[CommOp, ...]]":
        """Communication inside a layer."""
        return partial(self.comms, layer=0, microbatch=0)

    @property
    def in_bf16(self) -> "Plan":
        """The plan of layers that stay in bf16 among narrow ones."""
        return replace(self, job=replace(self.job, products=None))

    def size(self, group: str) -> int:
        return self.comms.groups[group].size

    @property
    def has_shared_experts(self) -> bool:
        return self.model.moe is not None and self.model.moe.num_shared_experts > 0

    @property
    def gradient_dtype(self) -> DType:
        in_fp32 = self.settings.accumulate_allreduce_grads_in_fp32
        in_fp32 = in_fp32 and self.settings.main_grads_dtype is StateDtype.FP32
        if self.settings.grad_reduce_in_bf16 or not in_fp32:
            return self.job.dtype
        return DType.FP32

    @property
    def probs_dtype(self) -> DType:
        kind = self.settings.moe_router_dtype
        return self.job.dtype if kind is RouterDtype.MODEL else DType(kind.value)


def make_plan(job: Job, settings: Megatron) -> Plan:
    """Return the plan. Raises ConfigError for a type or job that Megatron-LM refuses."""
    check_trained("dtype", job.dtype)
    settings = _with_chunks(settings, job.parallel.pp)
    multiple = settings.make_vocab_size_divisible_by
    model = model_as("megatron", job.model, job.parallel.tp, multiple)
    adam_states.check(settings, job.dtype)
    cpu_offload.check(settings)
    narrow.check_layers(settings, model.num_layers, job.parallel.pp)
    job = replace(job, model=model, products=narrow.products_of(settings))
    plan = Plan(
        job=job, settings=settings, comms=Comms(groups=groups(job, settings), dtype=job.dtype)
    )
    refuse_first(*refusals(plan))
    if (hops := plan.hops) is None:
        return plan
    by_name = {**plan.comms.groups, **groups_of(hops)}
    return replace(plan, comms=replace(plan.comms, groups=by_name))


def _with_chunks(settings: Megatron, pp: int) -> Megatron:
    """Return the settings with the vpp of the layout, as arguments.py derives it."""
    layout = settings.pipeline_model_parallel_layout
    if not layout:
        return settings
    name = "virtual_pipeline_model_parallel_size"
    chunks = num_chunks(layout, pp)
    given = settings.virtual_pipeline_model_parallel_size
    if given not in (1, chunks):
        raise ConfigError(name, given, f"left out, or the layout's ({chunks})")
    return replace(settings, virtual_pipeline_model_parallel_size=chunks)


def hierarchy(settings: Megatron, cp: int) -> tuple[int, int]:
    """Return the ranks that exchange heads, and those of a ring. Raises ConfigError."""
    text = settings.hierarchical_context_parallel_sizes
    words = text.replace(",", " ").split()
    sizes = [int(word) for word in words if word.isdecimal() and len(word) < 8]
    is_valid = len(words) == len(sizes) == 2 and min(sizes) > 1 and math.prod(sizes) == cp
    if not is_valid:
        allowed = f"two numbers from 2 whose product is cp ({cp}), with cp_comm_type a2a+p2p"
        raise ConfigError("hierarchical_context_parallel_sizes", text or None, allowed)
    return sizes[0], sizes[1]


def groups(job: Job, settings: Megatron) -> dict[str, Group]:
    """Return groups by Megatron's names (megatron/core/parallel_state.py, tp-cp-ep-dp-pp).

    dp_replicate: num_distributed_optimizer_instances. Experts have their own mesh: their tp, ep
    and dp divide the ranks of a stage.
    """
    parallel = job.parallel
    by_name = mesh_groups(
        parallel,
        {
            "tp": ("tp",),
            "cp": ("cp",),
            "tp_cp": ("tp", "cp"),
            "pp": ("pp",),
            "mp": ("tp", "pp"),
            "dp_cp": ("cp", "dp_shard", "dp_replicate"),
            "intra_dp_cp": ("cp", "dp_shard"),
            "instances": ("dp_replicate",),
            "tp_dp_cp": ("tp", "cp", "dp_shard", "dp_replicate"),
            "intra_dist_opt": ("tp", "cp", "dp_shard", "pp"),
            "world": AXES,
        },
    )
    per_stage = parallel.world_size // parallel.pp
    last = max(1, parallel.pp - 1) * per_stage
    if settings.cp_comm_type is CpComm.A2A_P2P:
        # create_hierarchical_groups: the first group is of neighbours.
        by_heads, in_ring = hierarchy(settings, parallel.cp)
        by_name["cp_a2a"] = Group(digits=((by_heads, parallel.tp),))
        by_name["cp_p2p"] = Group(digits=((in_ring, parallel.tp * by_heads),))
    by_name["embd"] = Group(digits=((min(2, parallel.pp), last),))
    if job.model.moe is None:
        return by_name
    etp = settings.expert_tensor_parallel_size or parallel.tp
    ep = parallel.ep
    instance = per_stage // parallel.dp_replicate
    if instance % (etp * ep):
        raise ConfigError(
            "ep",
            ep,
            f"a number whose product with expert tp ({etp}) divides tp x cp x dp ({instance})",
        )
    by_name["etp"] = Group(digits=((etp, 1),))
    by_name["ep"] = Group(digits=((ep, etp),))
    by_name["tp_ep"] = Group(digits=((etp * ep, 1),))
    by_name["intra_expt_dp"] = Group(digits=((instance // (etp * ep), etp * ep),))
    by_name["expt_dp"] = Group(digits=((per_stage // (etp * ep), etp * ep),))
    by_name["expt_tp_pp"] = Group(digits=((etp, 1), (ep, etp), (parallel.pp, per_stage)))
    return by_name
