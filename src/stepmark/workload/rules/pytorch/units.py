"""The parts of a plain PyTorch decoder with the communication inside them: tp, cp and ep.

As `stepmark train` spreads it: bench/training/model_parallel.py (DTensor's ColwiseParallel,
RowwiseParallel and SequenceParallel, torch 2.13, torch/distributed/tensor/parallel/style.py;
torchtitan's plan for Llama, in which the two differ at the ends: TpPlan; keys and values
gathered, arXiv:2407.21783, section 3.3.2; experts). Backward each of these does its dual,
where its forward pass was.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from stepmark.core.collectives import Collective, RedOp
from stepmark.core.dtypes import DType
from stepmark.core.errors import ConfigError
from stepmark.core.module import Module
from stepmark.core.ops import Phase
from stepmark.core.workload import CommOp, Group, Operation
from stepmark.workload.architecture import AnyJob, Architecture, Ops, Unit, weights_first
from stepmark.workload.job import DUAL, Comms, Job, mesh_groups
from stepmark.workload.tree import TreeMaker


class TpPlan(StrEnum):
    """What differs between plans: the ends of the model."""

    # The embedding's rows scattered over the sequence; loss_parallel, which leaves logits
    # divided (torchtitan, models/llama3/parallelize.py: apply_non_moe_tp).
    TORCHTITAN = "torchtitan"
    WHOLE = "whole"  # rows reduced for all tokens; logits gathered: `stepmark train`


def groups_of(job: AnyJob) -> dict[str, Group]:
    """By axis, as bench/training/model_parallel.py divides the ranks."""
    axes = job.parallel
    shards = axes.dp_shard * axes.cp
    if axes.ep > 1 and shards % axes.ep:
        raise ConfigError("ep", axes.ep, f"a divisor of dp-shard x cp ({shards})")
    if isinstance(job, Job) and axes.tp > 1 and (job.model.moe or job.model.mla):
        what = "experts" if job.model.moe else "latent attention"
        raise ConfigError("tp", axes.tp, f"1, since {job.model.name} has {what}")
    if isinstance(job, Job) and job.model.seq_len // axes.cp % axes.tp:
        held = f"{axes.cp} x {axes.tp}" if axes.cp > 1 else str(axes.tp)
        raise ConfigError("seq-len", job.model.seq_len, f"a multiple of cp x tp ({held})")
    found = mesh_groups(
        axes,
        {
            "tp": ("tp",),
            "cp": ("cp",),
            "pp": ("pp",),
            "fsdp": ("cp", "dp_shard"),
            "replicate": ("dp_replicate",),
            "ddp": ("cp", "dp_shard", "dp_replicate"),
            "fsdp_tp": ("tp", "cp", "dp_shard"),
        },
    )
    found["ep"] = Group(digits=((axes.ep, axes.tp),))
    found["expert_fsdp"] = Group(digits=((shards // axes.ep, axes.tp * axes.ep),))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """A model as what comes before its layers, they themselves, and what comes after them."""

    embedding: Unit | None
    layers: tuple[Unit, ...]  # each as often as it runs
    output: Unit | None


def of_architecture(made: Architecture) -> Ends:
    """Units before the first and after the last layer are taken together.

    A unit between two layers counts as a layer. Without layers all units come before.
    """
    places = [at for at, one in enumerate(made.units) if one.is_layer]
    for at in places:
        if made.units[at].name in ("embedding", "output"):
            raise ConfigError("unit", made.units[at].name, "another name for a layer")
    first, last = (places[0], places[-1] + 1) if places else (len(made.units),) * 2
    layers = tuple(one for one in made.units[first:last] for _ in range(one.times))
    return Ends(
        embedding=_together("embedding", made.units[:first]),
        layers=layers,
        output=_together("output", made.units[last:]),
    )


def _together(name: str, units: tuple[Unit, ...]) -> Unit | None:
    if not units:
        return None
    return Unit(
        name=name,
        params=tuple(param for one in units for param in one.params),
        fwd=(tuple(_of_no_layer(op) for one in units for op in one.fwd[0]),),
        bwd=(tuple(_of_no_layer(op) for one in reversed(units) for op in one.bwd[0]),),
    )


def _of_no_layer(op: Operation) -> Operation:
    return replace(op, layer=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes units. lookup_dtype: of the embedding's rows, where tables are not cast before."""

    job: Job
    comms: Comms
    lookup_dtype: DType
    apart: bool = False  # experts as a module that is sharded on its own
    plan: TpPlan = TpPlan.TORCHTITAN

    @property
    def _tree(self) -> TreeMaker:
        return self.job.tree("train", whole_loss=self.plan is TpPlan.WHOLE)

    def embedding(self) -> Unit:
        """Rows of each rank's part of the table summed, for all tokens or this rank's."""
        table = self._tree.embedding()
        size = self.job.tokens * self.job.model.hidden_size
        is_whole = self.plan is TpPlan.WHOLE
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
            Collective.ALL_GATHER, size, "tp", Phase.BWD, "embedding", microbatch=0
        )
        return Unit(
            name="embedding",
            params=table.all_params,
            fwd=((*table.inside[0].fwd, *reduced),),
            bwd=((*gathered, *table.inside[0].bwd),),
        )

    def output(self, *, has_table: bool = False) -> Unit:
        """Tokens gathered for the head; the loss of gathered logits, or of divided ones."""
        job = self.job
        size = job.tokens * job.model.hidden_size
        after = {"head.norm": self._pair(Collective.ALL_GATHER, size, "tp", "head.norm", None)}
        if self.plan is TpPlan.WHOLE:
            logits = job.tokens * job.model.vocab_size
            after["head"] = self._of_loss(Collective.ALL_GATHER, logits, job.dtype), ()
        else:
            after["loss"] = (
                (
                    *self._of_loss(Collective.ALL_REDUCE, job.tokens, DType.FP32, RedOp.MAX),
                    *self._of_loss(Collective.ALL_REDUCE, job.tokens, DType.FP32),
                    *self._of_loss(Collective.ALL_REDUCE, job.tokens, DType.FP32),
                ),
                (),
            )
        leaves = _leaves(self._tree.output())
        fwd, bwd = _joined(leaves, after)
        params = [one for leaf in leaves for one in leaf.params]
        if job.model.tied_embeddings and has_table:
            # Under tp each of both is a DTensor of its own when FSDP takes them, which gathers
            # and reduces the table twice.
            head = replace(params.pop(), is_copy=True)
            params += [head] if job.parallel.tp > 1 else []
        return Unit(name="output", params=tuple(params), fwd=(fwd,), bwd=(bwd,))

    def _of_loss(
        self, collective: Collective, elements: int, dtype: DType, redop: RedOp | None = None
    ) -> Ops:
        """torch/distributed/tensor/parallel/loss.py: maximum, sum of exponentials, and the
        label's logit of each token; backward there is none.
        """
        return self.comms(
            collective,
            elements,
            "tp",
            Phase.FWD,
            "head" if collective is Collective.ALL_GATHER else "loss",
            dtype,
            microbatch=0,
            redop=redop,
        )

    def block(self, *, moe: bool) -> Unit:
        leaves = _leaves(self._tree.block(moe=moe))
        after = self._inside(moe=moe)
        pieces = [leaves]
        if moe and self.apart:
            roles = [leaf.role for leaf in leaves]
            first = roles.index("mlp.router") + 1
            last = roles.index("mlp.experts_down") + 1
            pieces = [leaves[:first], leaves[first:last], leaves[last:]]
        made = [_joined(piece, after) for piece in pieces]
        fwd, bwd = [one for one, _ in made], [one for _, one in reversed(made)]
        if len(pieces) > 1:
            # What follows the experts in the forward pass is sent outside of them.
            back, out = after["mlp.experts_down"], len(after["mlp.experts_down"][0])
            fwd[1], fwd[2] = fwd[1][: len(fwd[1]) - out], (*back[0], *fwd[2])
            bwd[0], bwd[1] = (*bwd[0], *back[1]), bwd[1][out:]
        return Unit(
            name="moe" if moe else "block",
            params=tuple(one for leaf in leaves for one in leaf.params),
            fwd=tuple(fwd),
            bwd=tuple(bwd),
        )

    def _inside(self, *, moe: bool) -> dict[str, tuple[Ops, Ops]]:
        """What follows a module's forward pass, and what precedes its backward pass."""
        job = self.job
        model, axes = job.model, job.parallel
        size = job.tokens * model.hidden_size
        gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
        found = {
            "attention.norm": self._pair(gather, size, "tp", "attention.norm"),
            "attention.out": self._pair(scatter, size, "tp", "attention.out"),
            "mlp.norm": self._pair(gather, size, "tp", "mlp.norm"),
            "mlp.down": self._pair(scatter, size, "tp", "mlp.down"),
        }
        if axes.cp > 1:
            heads = model.num_kv_heads // axes.tp
            keys = job.tokens * axes.cp * heads * (model.d_qk + model.d_v)
            found["attention.core:"] = self._pair(gather, keys, "cp", "attention.core")
        if moe and axes.ep > 1 and model.moe:
            rows = job.tokens * model.moe.top_k * model.hidden_size
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
            found["mlp.router"] = ((*counts, *sent[0]), sent[1])
            found["mlp.experts_down"] = self._pair(
                Collective.ALL_TO_ALL_V, rows, "ep", "mlp.experts_down"
            )
        return found

    def _pair(
        self,
        collective: Collective,
        elements: int,
        group: str,
        module: str,
        layer: int | None = 0,
    ) -> tuple[Ops, Ops]:
        """Forward, and its dual backward."""

        def made(one: Collective, phase: Phase) -> tuple[CommOp, ...]:
            return self.comms(one, elements, group, phase, module, layer=layer, microbatch=0)

        return made(collective, Phase.FWD), made(DUAL.get(collective, collective), Phase.BWD)


# Products of one input, whose gradients are complete together.
_TOGETHER = {
    f"mlp.{prefix}{name}": f"mlp.{prefix}gate_up"
    for prefix in ("", "experts_", "shared_")
    for name in ("gate", "up")
}


def _leaves(unit: Module) -> list[Module]:
    """What has work or parameters, in forward order; gate and up are called alike."""
    listed = [leaf for leaf in unit.walk() if leaf.work or leaf.params]
    is_gated = any(leaf.role in ("mlp.gate", "mlp.experts_gate") for leaf in listed)
    return [_called(leaf, _TOGETHER if is_gated else {}) for leaf in listed]


def _called(leaf: Module, names: Mapping[str, str]) -> Module:
    """DTensor sums a bias beside a divided weight by itself."""
    role = names.get(leaf.role, leaf.role)
    params = (
        replace(one, part=names.get(one.part, one.part), is_partial=False)
        if leaf.is_linear
        else replace(one, part=names.get(one.part, one.part))
        for one in leaf.params
    )
    work = tuple(replace(one, module=role) for one in leaf.work)
    return replace(leaf, role=role, work=work, params=tuple(params))


def _joined(leaves: Iterable[Module], after: dict[str, tuple[Ops, Ops]]) -> tuple[Ops, Ops]:
    """Forward and backward operations of modules. A key that ends in ":" means before it."""
    fwd: list[Operation] = []
    bwd: list[Operation] = []
    nothing: tuple[Ops, Ops] = ((), ())
    for leaf in leaves:
        before, behind = after.get(f"{leaf.role}:", nothing), after.get(leaf.role, nothing)
        fwd += [*before[0], *leaf.fwd, *behind[0]]
        bwd[:0] = [*behind[1], *weights_first(leaf.bwd), *before[1]]
    return tuple(fwd), tuple(bwd)
