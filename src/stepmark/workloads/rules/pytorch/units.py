"""Units of a plain PyTorch decoder with the communication inside them: tp, cp and ep.

They follow `stepmark train`: training/model_parallel.py (DTensor's ColwiseParallel,
RowwiseParallel and SequenceParallel, torch 2.13, torch/distributed/tensor/parallel/style.py;
how its plans differ at the ends says TpPlan; keys and values gathered,
arXiv:2407.21783, section 3.3.2; experts). In the backward pass each collective's dual has the
same place.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase, Scaling
from stepmark.model.parallel import TpPlan
from stepmark.step.layout import FUSED
from stepmark.step.module import TOGETHER, Module
from stepmark.step.tree import TreeBuilder
from stepmark.step.workload import Group, Operation
from stepmark.workloads.architecture import AnyJob, Architecture, Ops, Unit, weights_first
from stepmark.workloads.job import DUAL, Comms, Job, mesh_groups
from stepmark.workloads.rules.pytorch.loss_chunks import in_chunks
from stepmark.workloads.rules.pytorch.settings import PyTorch

# Products whose output is summed over the ranks of tensor parallelism.
SUMMED = ("attention.out", "mlp.down")


def groups_of(job: AnyJob) -> dict[str, Group]:
    """Return groups by axis, as in training/model_parallel.py."""
    axes = job.parallel
    shards = axes.dp_shard * axes.cp
    if axes.ep > 1 and shards % axes.ep:
        raise ConfigError("ep", axes.ep, f"a divisor of dp-shard x cp ({shards})")
    if isinstance(job, Job) and axes.tp > 1 and (job.model.moe or job.model.mla):
        what = "experts" if job.model.moe else "latent attention"
        raise ConfigError("tp", axes.tp, f"1, since {job.model.name} has {what}")
    if isinstance(job, Job):
        _check_pattern(job.model, axes.tp)
        if job.model.tied_embeddings and axes.pp > 1:
            raise ConfigError(
                "pp", axes.pp, f"1, since {job.model.name} ties embedding and head"
            )
    if isinstance(job, Job) and job.model.num_kv_heads % axes.tp:
        # ColwiseParallel divides rows evenly, so a rank would have a part of a head, which the
        # view over heads refuses (torchtitan b5bcd76, models/llama3/model/model.py).
        allowed = f"a divisor of {job.model.name}'s kv_heads ({job.model.num_kv_heads})"
        raise ConfigError("tp", axes.tp, allowed)
    if isinstance(job, Job) and job.model.seq_len // axes.cp % axes.tp:
        product = f"{axes.cp} x {axes.tp}" if axes.cp > 1 else str(axes.tp)
        raise ConfigError("seq-len", job.model.seq_len, f"a multiple of cp x tp ({product})")
    groups = mesh_groups(
        axes,
        {
            "tp": ("tp",),
            "cp": ("cp",),
            "pp": ("pp",),
            "fsdp": ("cp", "dp_shard"),
            "replicate": ("dp_replicate",),
            "ddp": ("cp", "dp_shard", "dp_replicate"),
        },
    )
    groups["ep"] = Group(digits=((axes.ep, axes.tp),))
    groups["expert_fsdp"] = Group(digits=((shards // axes.ep, axes.tp * axes.ep),))
    return groups


def _check_pattern(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError for layers that these rules do not have."""
    if model.num_mtp_layers:
        allowed = "a model without multi-token prediction for pytorch (not modelled yet)"
        raise ConfigError("model", model.name, allowed)
    what = "layers that carry a state" if any(layer.scan for layer in model.pattern) else ""
    what = "attention and FFN of one input" if model.is_parallel else what
    if what and tp > 1:
        raise ConfigError("tp", tp, f"1, since {model.name} has {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnds:
    """A model as the units before its layers, the layers, and the units after them."""

    embedding: Unit | None
    layers: tuple[Unit, ...]  # one for each layer
    output: Unit | None


def stage_ends(architecture: Architecture) -> StageEnds:
    """Merge the units before the first layer, and those after the last one.

    A unit between two layers counts as a layer. Without layers all units come before.
    """
    places = [index for index, unit in enumerate(architecture.units) if unit.is_layer]
    for index in places:
        if architecture.units[index].name in ("embedding", "output"):
            raise ConfigError(
                "unit", architecture.units[index].name, "another name for a layer"
            )
    first, last = (places[0], places[-1] + 1) if places else (len(architecture.units),) * 2
    layers = tuple(unit for unit in architecture.units[first:last] for _ in range(unit.times))
    return StageEnds(
        embedding=_merged("embedding", architecture.units[:first]),
        layers=layers,
        output=_merged("output", architecture.units[last:]),
    )


def _merged(name: str, units: tuple[Unit, ...]) -> Unit | None:
    if not units:
        return None
    return Unit(
        name=name,
        params=tuple(param for unit in units for param in unit.params),
        fwd=(tuple(replace(op, layer=None) for unit in units for op in unit.fwd[0]),),
        bwd=(tuple(replace(op, layer=None) for unit in reversed(units) for op in unit.bwd[0]),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBuilder:
    """Factory of units. lookup_dtype: of the embedding's rows, if tables are not cast."""

    job: Job
    comms: Comms
    lookup_dtype: DType
    settings: PyTorch
    apart: bool  # experts are a module that is sharded by itself

    @property
    def _tree(self) -> TreeBuilder:
        settings = self.settings
        tree = self.job.tree(
            "train",
            whole_loss=settings.tp_plan is TpPlan.WHOLE,
            fused=FUSED["train"] if settings.fuse_qkv else frozenset(),
            lora=settings.lora,
        )
        return replace(tree, kernels=settings.kernels)

    def embedding(self) -> Unit:
        """Return the lookup, whose rows are summed over tp for all tokens or this rank's."""
        table = self._tree.embedding()
        size = self.job.tokens * self.job.model.hidden_size
        # Learned positions are added to whole sequences.
        is_whole = self.settings.tp_plan is TpPlan.WHOLE or self.job.model.max_positions > 0
        reduced = self.comms(
            Collective.ALL_REDUCE if is_whole else Collective.REDUCE_SCATTER,
            size,
            "tp",
            Phase.FWD,
            "embedding",
            self.lookup_dtype,
            microbatch=0,
        )
        gathered = self.comms(
            Collective.ALL_GATHER,
            size,
            "tp",
            Phase.BWD,
            "embedding",
            self.lookup_dtype,
            microbatch=0,
        )
        rest = [leaf for leaf in table.inside[1:] if leaf.work]
        after = [op for leaf in rest for op in leaf.fwd]
        before = [op for leaf in reversed(rest) for op in leaf.bwd]
        # A frozen table needs no gradient.
        backward: Ops = () if self.settings.lora else (*before, *gathered, *table.inside[0].bwd)
        return Unit(
            name="embedding",
            params=table.all_params,
            fwd=((*table.inside[0].fwd, *reduced, *after),),
            bwd=(backward,),
        )

    def output(self, *, has_table: bool = False) -> Unit:
        """Return the head on gathered tokens, and the loss of gathered or of divided logits.

        With divided logits each token's maximum, sum of exponentials and logit of the label are
        reduced (torch/distributed/tensor/parallel/loss.py); backward there is no message.
        """
        job = self.job
        size = job.tokens * job.model.hidden_size
        after = {"head.norm": self._pair(Collective.ALL_GATHER, size, "tp", "head.norm", None)}
        module = "loss"
        elements = job.tokens
        dtype = DType.FP32
        kinds = [(Collective.ALL_REDUCE, redop) for redop in (RedOp.MAX, RedOp.SUM, RedOp.SUM)]
        if self.settings.tp_plan is TpPlan.WHOLE:
            module = "head"
            elements = job.tokens * job.model.vocab_size
            dtype = job.dtype
            kinds = [(Collective.ALL_GATHER, RedOp.NONE)]
        sent = tuple(
            op
            for kind, redop in kinds
            for op in self.comms(
                kind, elements, "tp", Phase.FWD, module, dtype, microbatch=0, redop=redop
            )
        )
        after[module] = sent, ()
        leaves = _leaves(self._tree.output())
        fwd, bwd = self._joined(leaves, after)
        if self.settings.loss_chunks > 1:
            size_of = job.dtype.itemsize
            fwd, bwd = in_chunks(fwd, bwd, chunks=self.settings.loss_chunks, itemsize=size_of)
        params = [param for leaf in leaves for param in leaf.params]
        if job.model.tied_embeddings and has_table:
            # Under tp table and head are two DTensors when FSDP wraps them, so the table is
            # gathered and reduced twice.
            (head,) = (param for param in params if param.name == "output.head.weight")
            params.remove(head)
            params += [replace(head, is_copy=True)] if job.parallel.tp > 1 else []
        return Unit(name="output", params=tuple(params), fwd=(fwd,), bwd=(bwd,))

    def blocks(self) -> dict[Layer, Unit]:
        """Return the units of the model's layers; those of one kind share a name."""
        units: dict[Layer, Unit] = {}
        for layer in self.job.model.layer_counts:
            stem = "moe" if layer.has_experts else "block"
            number = sum(name.has_experts == layer.has_experts for name in units)
            units[layer] = self._block(layer, f"{stem}.{number}" if number else stem)
        return units

    def _block(self, layer: Layer, name: str) -> Unit:
        moe = layer.has_experts
        leaves = _leaves(self._tree.block(layer))
        after = self._inside(moe=moe)
        pieces = [leaves]
        if moe and self.apart:
            roles = [leaf.role for leaf in leaves]
            before = "mlp.to_latent" if "mlp.to_latent" in roles else "mlp.router"
            first = roles.index(before) + 1
            last = roles.index("mlp.experts_down") + 1
            pieces = [leaves[:first], leaves[first:last], leaves[last:]]
        joined = [self._joined(piece, after) for piece in pieces]
        fwd = [ops for ops, _ in joined]
        bwd = [ops for _, ops in reversed(joined)]
        if len(pieces) > 1:
            # Messages after the experts in the forward pass are outside of their module.
            messages = after["mlp.experts_down"]
            num_sent = len(after["mlp.experts_down"][0])
            fwd[1], fwd[2] = fwd[1][: len(fwd[1]) - num_sent], (*messages[0], *fwd[2])
            bwd[0], bwd[1] = (*bwd[0], *messages[1]), bwd[1][num_sent:]
        return Unit(
            name=name,
            params=tuple(param for leaf in leaves for param in leaf.params),
            fwd=tuple(fwd),
            bwd=tuple(bwd),
        )

    def first_block(self, block: Unit) -> Unit:
        """Return the block behind a frozen embedding, whose rows have no gradient."""
        is_adapted = any(p.is_trained and p.part.startswith("attention.") for p in block.params)

        def is_needed(op: Operation) -> bool:
            base = op.module.removesuffix(".lora_a")
            if not is_adapted:
                return not base.startswith("attention.")
            is_input = base in _OF_INPUT and op.phase in (Phase.DGRAD, Phase.BWD)
            return not (is_input or base == "attention.norm")

        bwd = tuple(tuple(filter(is_needed, piece)) for piece in block.bwd)
        return replace(block, name=f"{block.name}.first", bwd=bwd)

    def _inside(self, *, moe: bool) -> dict[str, tuple[Ops, Ops]]:
        """Return by module the messages after its forward and before its backward pass."""
        job = self.job
        model = job.model
        axes = job.parallel
        size = job.tokens * model.hidden_size
        gather = Collective.ALL_GATHER
        scatter = Collective.REDUCE_SCATTER
        pairs = {
            "attention.norm": self._pair(gather, size, "tp", "attention.norm"),
            "mlp.norm": self._pair(gather, size, "tp", "mlp.norm"),
            **{role: self._pair(scatter, size, "tp", role) for role in SUMMED},
        }
        if axes.cp > 1:
            heads = model.num_kv_heads // axes.tp
            keys = job.tokens * axes.cp * heads * (model.d_qk + model.d_v)
            pairs["attention.core:"] = self._pair(gather, keys, "cp", "attention.core")
        if moe and axes.ep > 1 and model.moe:
            width = model.moe.latent_size or model.hidden_size
            rows = job.tokens * model.moe.top_k * width
            if job.imbalance > 1:  # what the fullest rank gets, from each rank as much
                rows = math.ceil(rows * job.imbalance / axes.ep) * axes.ep
            sent = self._pair(Collective.ALL_TO_ALL_V, rows, "ep", "mlp.router")
            counts = self.comms(
                Collective.ALL_TO_ALL,
                model.moe.num_experts,
                "ep",
                Phase.FWD,
                "mlp.router",
                DType.INT32,
                layer=0,
                microbatch=0,
            )
            last = "mlp.to_latent" if model.moe.latent_size else "mlp.router"
            pairs[last] = ((*counts, *sent[0]), sent[1])
            pairs["mlp.experts_down"] = self._pair(
                Collective.ALL_TO_ALL_V, rows, "ep", "mlp.experts_down"
            )
        return pairs

    def _joined(
        self, leaves: Iterable[Module], after: dict[str, tuple[Ops, Ops]]
    ) -> tuple[Ops, Ops]:
        """Return forward and backward operations. A key "module:" means before the module."""
        fwd: list[Operation] = []
        bwd: list[Operation] = []
        nothing: tuple[Ops, Ops] = ((), ())
        for leaf in leaves:
            before = after.get(f"{leaf.role}:", nothing)
            behind = after.get(leaf.role, nothing)
            scales = self._scales(leaf)
            fwd += [*before[0], *scales[0], *leaf.fwd, *behind[0]]
            bwd[:0] = [*behind[1], *scales[1], *weights_first(leaf.bwd), *before[1]]
        return tuple(fwd), tuple(bwd)

    def _scales(self, leaf: Module) -> tuple[Ops, Ops]:
        """Return the largest magnitudes that tp ranks share where they cast a divided tensor.

        torchao 0.18, float8/float8_linear.py (matmul_with_hp_or_float8_args) over DTensors,
        eager: the weight is cast in both passes, unless it was gathered in fp8; in the backward
        pass the input again, and the output's gradient for each of its products.
        """
        products = self.job.products
        is_narrow = leaf.is_linear and leaf.params[0].is_narrow
        if products is None or not is_narrow or products.scaling is not Scaling.TENSORWISE:
            return (), ()
        weights = int(products.casts_weights)
        counts = {
            Phase.FWD: weights + leaf.is_row,
            Phase.BWD: weights + (1 if leaf.is_row else 2),
        }
        fwd, bwd = (
            count
            * self.comms(
                Collective.ALL_REDUCE,
                1,
                "tp",
                phase,
                leaf.role,
                DType.FP64,
                layer=0,
                microbatch=0,
                redop=RedOp.MAX,
            )
            for phase, count in counts.items()
        )
        return fwd, bwd

    def _pair(
        self,
        collective: Collective,
        elements: int,
        group: str,
        module: str,
        layer: int | None = 0,
    ) -> tuple[Ops, Ops]:
        """Return a collective and, for the backward pass, its dual."""
        kinds = ((collective, Phase.FWD), (DUAL.get(collective, collective), Phase.BWD))
        fwd, bwd = (
            self.comms(kind, elements, group, phase, module, layer=layer, microbatch=0)
            for kind, phase in kinds
        )
        return fwd, bwd


# Layers that multiply a block's normalized input.
_OF_INPUT = tuple(f"attention.{name}" for name in ("qkv", "q", "k", "v", "q_down", "kv_down"))


def _leaves(unit: Module) -> list[Module]:
    """Return modules with work or parameters, in forward order; gate and up share a name."""
    leaves = [leaf for leaf in unit.walk() if leaf.work or leaf.params]
    is_gated = any(leaf.role in ("mlp.gate", "mlp.experts_gate") for leaf in leaves)
    return [_renamed(leaf, TOGETHER if is_gated else {}) for leaf in leaves]


def _renamed(leaf: Module, names: Mapping[str, str]) -> Module:
    """Rename a leaf. DTensor sums the bias of a divided weight by itself."""
    role = names.get(leaf.role, leaf.role)
    params = (
        replace(
            param,
            part=names.get(param.part, param.part),
            is_partial=param.is_partial and not leaf.is_linear,
        )
        for param in leaf.params
    )
    work = tuple(replace(op, module=role) for op in leaf.work)
    return replace(leaf, role=role, work=work, params=tuple(params))
