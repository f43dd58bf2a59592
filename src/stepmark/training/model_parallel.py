"""Device meshes; tensor, context and expert parallelism of a decoder.

Tensor: between blocks the tokens of a sequence are divided over the ranks; attention and MLP
gather them, divide heads and widths, and scatter the sum (Korthikanti et al., 2205.05198 on
arXiv).
Context: as Llama 3 does it (arXiv:2407.21783, section 3.3.2). Each of n ranks holds two of
2 * n chunks of a sequence, one from the head and one from the tail, so that all have as many
pairs of query and key. Every attention gathers the keys and values of all ranks, in one
message; in the backward pass their gradients are reduce-scattered, in their own dtype.
Expert: a rank holds num_experts / ep experts, and tokens are sent to them; FSDP shards these
over the ranks that hold the same ones (torchtitan's rule: ep borrows from dp_shard).

B batch, T tokens of this rank, S of all ranks, H query heads, K key and value heads, D head
width, E head width of values.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepmark.cases.train_case import TrainCase
from stepmark.model.model import ModelConfig
from stepmark.model.parallel import ParallelConfig, TpPlan
from stepmark.step.module import Param
from stepmark.training.attention import Attention, LatentAttention, causal_attention
from stepmark.training.layers import Compute, Experts
from stepmark.training.transformer import IGNORED, Embedding, RotaryTables, Transformer

# Outermost first: ranks that communicate most are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Coordinates of a rank in the mesh."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    data_rank: int  # index of its micro-batch


def coordinates_of(rank: int, parallel: ParallelConfig) -> RankCoordinates:
    """Return the coordinates of a rank; the last axis varies fastest."""
    coordinates: dict[str, int] = {}
    for axis in reversed(AXES):
        size = getattr(parallel, axis)
        coordinates[axis] = rank % size
        rank //= size
    data_rank = coordinates["dp_replicate"] * parallel.dp_shard + coordinates["dp_shard"]
    return RankCoordinates(**coordinates, data_rank=data_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard:
    """A rank's tokens of a sequence that context parallelism divides.

    They are one part from the head and one from the tail, so that all ranks attend to as many
    keys.
    """

    rank: int
    num_ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's chunks, of twice as many as there are ranks."""
        return self.rank, 2 * self.num_ranks - 1 - self.rank

    def of(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of x, whose dimension dim is a whole sequence."""
        if self.num_ranks == 1:
            return x
        parts = x.chunk(2 * self.num_ranks, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)


class Meshes:
    """Sub-meshes by axis; None for an axis of one rank."""

    def __init__(self, case: TrainCase) -> None:
        axes = self._parallel = case.parallel
        self._device = case.device
        self._experts: DeviceMesh | None = None
        self._context: DeviceMesh | None = None
        self._world: DeviceMesh | None = None
        # Ranks of one sequence also shard weights: gradients of its parts are summed anyway.
        self._shards = "dp_shard" if axes.cp == 1 else "dp_shard_cp"
        if not dist.is_initialized():
            return
        shards = {self._shards: axes.dp_shard * axes.cp}
        self._world = self._mesh(
            pp=axes.pp, dp_replicate=axes.dp_replicate, **shards, tp=axes.tp
        )
        if axes.cp > 1:
            outside = axes.pp * axes.data_ranks
            self._context = self._mesh(outside_cp=outside, cp=axes.cp, inside_cp=axes.tp)["cp"]

    def axis(self, name: str) -> DeviceMesh | None:
        if self._world is None or getattr(self._parallel, name) == 1:
            return None
        return self._context if name == "cp" else self._world[name]

    def data(self) -> DeviceMesh:
        """Return FSDP's mesh: the ranks that shard weights; before them HSDP's replicas."""
        assert self._world is not None, "FSDP needs a process group"
        if self._parallel.dp_replicate > 1:
            return self._world["dp_replicate", self._shards]
        return self._world[self._shards]

    def replicas(self) -> "dist.ProcessGroup":
        """Return DDP's process group: the ranks with the same weights."""
        assert self._world is not None, "DDP needs a process group"
        if self._parallel.cp > 1:
            both = self._world["dp_replicate", self._shards]
            return both._flatten("dp_replicate_cp").get_group()
        return self._world["dp_replicate"].get_group()

    def experts(self) -> DeviceMesh:
        """Return the ranks that FSDP shards over, split into ep and ranks of equal experts."""
        if self._experts is None:
            axes = self._parallel
            same = axes.dp_shard * axes.cp // axes.ep
            self._experts = self._mesh(
                pp=axes.pp, dp_replicate=axes.dp_replicate, dp_shard_same=same, ep=axes.ep
            )
        return self._experts

    def _mesh(self, **axes: int) -> DeviceMesh:
        """Return a mesh of all ranks; the last axis varies fastest."""
        return init_device_mesh(self._device, tuple(axes.values()), mesh_dim_names=tuple(axes))


class _Replicated(ParallelStyle):
    """Replicates parameters as DTensors, so that the optimizer sees one mesh.

    layout: placement of the input, and so of the output. Where it is sharded, a rank's gradient
    is a part of the sum.
    """

    def __init__(self, layout: Placement) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replica = distribute_tensor(
                parameter, device_mesh, [Replicate()], src_data_rank=None
            )
            module.register_parameter(name, nn.Parameter(replica))

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(tensor, device_mesh, [self._layout], run_check=False)
                for tensor in inputs
            )

        def after(_module: nn.Module, _inputs: tuple[Any, ...], output: DTensor) -> Any:
            return output.redistribute(device_mesh, [self._layout]).to_local()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def apply_tensor(model: Transformer, case: TrainCase, mesh: DeviceMesh) -> None:
    """Shard a Transformer's parameters over `mesh`, in place."""
    if case.async_tp:  # torch.compile then overlaps products in pieces with communication
        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    is_divided = case.tp_plan is TpPlan.TORCHTITAN
    if (embedding := model.embedding) is not None:
        if is_divided and not case.model.max_positions:
            rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            parallelize_module(embedding, mesh, {"tokens": rows})
        else:
            _gathered_embedding(embedding, mesh)
    for block in model.blocks.values():
        parallelize_module(block, mesh, _block_plan(case.model))
    if (output := model.output) is not None:
        logits = Shard(-1) if is_divided else Replicate()
        plan = {
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=logits),
        }
        parallelize_module(output, mesh, plan)
        if is_divided:
            output.mean_loss = partial(divided_mean_loss, group=mesh.get_group())


def _gathered_embedding(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Sum rows for all tokens, which learned positions are added to, and keep this rank's."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    }
    if getattr(embedding, "positions", None) is not None:
        plan["positions"] = _Replicated(Replicate())
    parallelize_module(embedding, mesh, plan)

    def scatter(_module: nn.Module, _inputs: Any, x: Tensor) -> Tensor:
        full = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        # A copy, not a view: FSDP warns of views that leave its modules.
        return full.redistribute(mesh, [Shard(1)]).to_local().clone()

    embedding.register_forward_hook(scatter)


class _DividedLogProbability(Function):
    """log softmax at the labels, of logits whose columns are divided over ranks.

    Maximum, sum of exponentials and the label's logit are reduced over the ranks, a number for
    each token; the backward pass has no message (Shoeybi et al., arXiv:1909.08053, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        width = logits_NV.shape[1]
        largest_N = _reduced(logits_NV.amax(1).float(), "max", group)
        sums_N = (logits_NV.float() - largest_N[:, None]).exp_().sum(1)
        log_sum_N = largest_N + _reduced(sums_N, "sum", group).log()
        own_N = labels_N - width * dist.get_rank(group)
        is_own_N = (own_N >= 0) & (own_N < width)
        own_N = own_N.clamp(0, width - 1)
        at_label_N = logits_NV.gather(1, own_N[:, None]).squeeze(1).float() * is_own_N
        # The logits in their own type, from which the softmax is computed again, are the least
        # to keep.
        ctx.save_for_backward(logits_NV, log_sum_N, own_N, is_own_N)
        return _reduced(at_label_N, "sum", group) - log_sum_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, log_sum_N, own_N, is_own_N = ctx.saved_tensors
        grad_NV = (logits_NV.float() - log_sum_N[:, None]).exp_().mul_(-grad_N[:, None])
        grad_NV.scatter_add_(1, own_N[:, None], (grad_N * is_own_N)[:, None])
        return grad_NV.to(logits_NV.dtype), None, None


def divided_mean_loss(
    logits_NV: Tensor, labels_N: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Return mean_loss of logits of which each rank of the group has some columns."""
    counts_N = labels_N != IGNORED
    log_probability_N = _log_probability(logits_NV, labels_N.where(counts_N, 0), group)
    return -(log_probability_N * counts_N).sum() / counts_N.sum()


_log_probability: Callable[..., Tensor] = _DividedLogProbability.apply


def _reduced(x_N: Tensor, kind: str, group: dist.ProcessGroup) -> Tensor:
    """Return the reduction over the group: an operation that torch.compile can trace."""
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(x_N, kind, group))
    return reduced


def _block_plan(model: ModelConfig) -> dict[str, ParallelStyle]:
    # Rotary tables are the second and third input of a block's attention, replicated.
    plan: dict[str, ParallelStyle] = {
        **_norm_plan(model),
        "attention": _gather_inputs(3),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "ffn": _gather_inputs(1),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if model.is_gated:
        plan["ffn.gate"] = ColwiseParallel()
    if model.qk_norm:
        heads = _Replicated(Shard(2))
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    return plan


def _norm_plan(model: ModelConfig) -> dict[str, ParallelStyle]:
    """Return styles of a block's norms: their results enter products, or are added."""
    names = ["attention_norm"]
    if model.norm_placement != "shared":
        names.append("ffn_norm")
    plan: dict[str, ParallelStyle] = {}
    for name in names:
        plan[name] = SequenceParallel(use_local_output=model.norm_placement == "post")
        if model.norm_placement == "both":
            plan[f"{name}_after"] = SequenceParallel(use_local_output=True)
    return plan


def _gather_inputs(num_inputs: int) -> PrepareModuleInput:
    rest = (None,) * (num_inputs - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
    )


# torch 2.13 has a new name for it, torch 2.11 only the old one.
_all_gather: Callable[[Tensor, int, Any], Tensor] = getattr(
    collectives, "all_gather_single_autograd", None
) or getattr(collectives, "all_gather_tensor_autograd")  # noqa: B009


def apply_context(model: Transformer, mesh: DeviceMesh) -> None:
    """Make a Transformer work on this rank's tokens, in place: positions and attention."""
    share = SequenceShard(rank=mesh.get_local_rank(), num_ranks=mesh.size())
    attend = GatheredAttention(mesh.get_group(), share)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.attend = attend
        if isinstance(module, RotaryTables | Embedding):
            module.own_rows = partial(share.of, dim=0)


class GatheredAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks."""

    def __init__(self, group: dist.ProcessGroup, share: SequenceShard) -> None:
        self._group = group
        self._num_ranks = share.num_ranks
        self._chunks = share.chunks

    def __call__(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        kernel: str,
        scale: float | None = None,
    ) -> Tensor:
        k_BSKD, v_BSKE = self._gather(k_BTKD, v_BTKE)
        length = q_BTHD.shape[1] // 2
        parts: list[Tensor] = []
        for chunk, q in zip(self._chunks, q_BTHD.chunk(2, dim=1), strict=True):
            end = (chunk + 1) * length
            keys, values = k_BSKD[:, :end], v_BSKE[:, :end]
            parts.append(causal_attention(q, keys, values, kernel, scale))
        return torch.cat(parts, dim=1)

    def _gather(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of all ranks, in the order of the sequence."""
        sent = torch.cat((k_BTKD, v_BTKE), dim=-1)
        by_rank = _all_gather(sent, 0, self._group).unflatten(0, (self._num_ranks, -1))
        heads, tails = by_rank.unflatten(2, (2, -1)).unbind(2)
        sequence = torch.cat((*heads.unbind(0), *reversed(tails.unbind(0))), dim=1)
        parts: tuple[Tensor, ...] = sequence.split((k_BTKD.shape[-1], v_BTKE.shape[-1]), dim=-1)
        return parts


def apply_experts(model: Transformer, meshes: Meshes) -> None:
    """Keep this rank's experts, in place."""
    mesh = meshes.experts()["ep"]
    for experts in _experts_of(model):
        for name, weight in list(experts.held.named_parameters()):
            shard = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            experts.held.register_parameter(name, nn.Parameter(shard))
        experts.dispatch = AllToAll(mesh.get_group())


def shard_experts(model: Transformer, case: TrainCase, meshes: Meshes, **options: Any) -> None:
    """Apply FSDP to experts over the ranks that hold the same; call before their blocks."""
    expert_mesh = meshes.experts()
    mesh: DeviceMesh = (
        expert_mesh["dp_replicate", "dp_shard_same"]
        if case.parallel.dp_replicate > 1
        else expert_mesh["dp_shard_same"]
    )
    for experts in _experts_of(model):
        divided = shard_placement([experts], case)
        sharded: Any = fully_shard(
            experts.held, mesh=mesh, shard_placement_fn=divided, **options
        )
        # Gradients here are sums over the tokens of ep ranks; all others are means over all.
        sharded.set_gradient_divide_factor(float(case.parallel.gradient_ranks))
        # gloo cannot scale while it sums. Over one rank there is no sum, and torch would divide
        # twice.
        if case.backend == "gloo" and expert_mesh["dp_shard_same"].size() > 1:
            sharded.set_force_sum_reduction_for_comms(True)


def shard_placement(
    modules: Iterable[nn.Module], case: TrainCase
) -> Callable[[nn.Parameter], Shard | None]:
    """Return fully_shard's function that names the dimension in which it divides weights."""
    axes = case.parallel
    ranks = axes.dp_shard * axes.cp // axes.ep
    names = {
        id(weight): name
        for module in modules
        for experts in _experts_of(module)
        for name, weight in experts.held.named_parameters()
    }

    def placement(weight: nn.Parameter) -> Shard | None:
        if id(weight) not in names:
            return None
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        param = Param(name=names[id(weight)], shape=tuple(own.shape), is_expert=True)
        return Shard(param.shard_dim(ranks))

    return placement


def _experts_of(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


class AllToAll:
    """A Dispatch: sends rows to the ranks of their experts and back.

    The host reads the number of rows for each rank, which NCCL needs: one wait per layer.
    Dynamo would recompile for these numbers in every layer, until it gives up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num_ranks = group, dist.get_world_size(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, rows_MC: Tensor, ends_E: Tensor, compute: Compute) -> Tensor:
        sent_RL = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).view(self._num_ranks, -1)
        got_RL = torch.empty_like(sent_RL)
        dist.all_to_all_single(got_RL, sent_RL, group=self._group)
        outgoing, incoming = torch.stack((sent_RL.sum(1), got_RL.sum(1))).tolist()
        arrived = all_to_all_single_autograd(rows_MC, incoming, outgoing, self._group)
        # They arrive by sender; the products need them by expert.
        experts = torch.arange(got_RL.shape[1], device=got_RL.device).repeat(self._num_ranks)
        order = experts.repeat_interleave(got_RL.flatten(), output_size=sum(incoming)).argsort(
            stable=True
        )
        ends_L = got_RL.sum(0).cumsum(0, dtype=torch.int32)
        sorted_out = compute(arrived[order], ends_L)
        out = torch.empty_like(sorted_out).index_copy(0, order, sorted_out)
        result: Tensor = all_to_all_single_autograd(out, outgoing, incoming, self._group)
        return result
