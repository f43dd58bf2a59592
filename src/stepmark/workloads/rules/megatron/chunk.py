"""A model chunk's forward and backward pass as Runs of its layers' operations.

The first forward and the last backward of a step may differ: gathers of parameters and
reductions of gradients overlap with the computation, bucket by bucket. Source: megatron-core
0.16.1, distributed/distributed_data_parallel.py (_make_forward_pre_hook,
_make_backward_post_hook), param_and_grad_buffer.py (finish_param_sync, register_grad_ready);
recompute: transformer/transformer_block.py (_checkpointed_forward), attention.py, mlp.py,
moe_layer.py, tensor_parallel/random.py. Compared with a run of megatron-core
(tests/data/megatron).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from stepmark.ground.errors import ConfigError
from stepmark.model.layers import Layer
from stepmark.model.model import ModelConfig
from stepmark.model.ops import Phase
from stepmark.step.kernel_choice import CORE
from stepmark.step.workload import COMPUTE, Block, Operation, Run
from stepmark.workloads.pipeline import COMPUTE_DONE, in_layer
from stepmark.workloads.rules.megatron import gradients, narrow
from stepmark.workloads.rules.megatron.activation_offload import (
    Group,
    Reloads,
    Sends,
    groups_of,
    with_reloads,
    with_sends,
)
from stepmark.workloads.rules.megatron.combined import order, pieces
from stepmark.workloads.rules.megatron.gradients import (
    EMBEDDING,
    HEAD,
    NORM,
    Bucket,
    Param,
)
from stepmark.workloads.rules.megatron.layer import (
    around_mtp,
    attention,
    embedding,
    experts,
    head,
    mlp,
    mtp_heads,
)
from stepmark.workloads.rules.megatron.layer import data as data_of
from stepmark.workloads.rules.megatron.lora import adapted
from stepmark.workloads.rules.megatron.narrow import Fp4Format, Fp8Recipe
from stepmark.workloads.rules.megatron.plan import Plan
from stepmark.workloads.rules.megatron.settings import Granularity
from stepmark.workloads.rules.megatron.stage_partition import Chunk
from stepmark.workloads.rules.megatron.steps import (
    Step,
    backward,
    forward,
    with_compute_done,
    with_deps,
)

_LATENT_UP = ("attention.q_up", "attention.q", "attention.kv_up", "attention.rope")


class Kind(NamedTuple):
    """Layers with the same operations. is_bf16: it stays so among narrow ones.

    is_mtp: a module of multi-token prediction, with such a layer inside.
    """

    name: str
    layer: Layer
    is_bf16: bool
    is_mtp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A block at a layer. places: its layers of the chunk, or EMBEDDING, HEAD."""

    block: str
    layer: int = 0
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Operations to insert before and behind an operation of a segment, and its new waits."""

    before: tuple[Operation, ...] = ()
    behind: tuple[Operation, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Library:
    """Operations by block name: those of modules, and variants at the edges of a step."""

    plan: Plan
    blocks: dict[str, Block]
    operations: dict[str, tuple[Operation, ...]] = field(default_factory=dict)
    steps: dict[Kind, tuple[Step, ...]] = field(default_factory=dict)
    groups: dict[Kind, tuple[Group, ...]] = field(default_factory=dict)  # that are offloaded
    of_layer: dict[str, tuple[Param, ...]] = field(default_factory=dict)  # by kind
    num_scaled: dict[str, int] = field(default_factory=dict)  # narrow.num_scaled, by kind
    _changed: dict[tuple[str, tuple[tuple[int, Change], ...], tuple[str, ...]], str] = field(
        default_factory=dict
    )
    _places: dict[tuple[str, bool], dict[tuple[str, int | None], int]] = field(
        default_factory=dict
    )
    _offloaded: dict[tuple[str, Sends | Reloads], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        for kind in dict.fromkeys(kinds_of(plan)):
            steps = _layer(plan, kind)
            own = plan_of(plan, kind)
            name = kind.name
            self.of_layer[name] = params_of(plan, kind)
            block = own.tree.block(kind.layer)
            self.num_scaled[name] = narrow.num_scaled(own, block.walk())
            # The next token's embedding is looked up outside of the checkpoint.
            before = embedding(plan) if kind.is_mtp else ()
            self.steps[kind] = (*before, *steps)
            self.groups[kind] = groups_in(plan, kind)
            self.add(f"{name}.forward", forward((*before, *steps)))
            self.add(f"{name}.again", forward(steps, again=True))
            groups = selected(plan, [step.module for step in steps])
            self.add(f"{name}.backward", backward((*before, *steps), groups))
            if plan.settings.overlap_moe_expert_parallel_comm:
                self._add_pieces(kind)
            again = self.operations[f"{name}.again"]
            self.add(f"{name}.full", (*again, *backward((*before, *steps))))
        self.add("embedding.forward", forward(embedding(plan)))
        self.add("embedding.backward", backward(embedding(plan)))
        ends = {"head": head(plan)}
        if plan.model.num_mtp_layers:  # the norm comes before it, all logits behind it
            norm, *logits = head(plan)
            ends = {"norm": (norm,), "head": (*mtp_heads(plan, logits), *logits)}
        for name, last in ends.items():
            self.add(f"{name}.forward", forward(last))
            self.add(f"{name}.backward", backward(last))

    def _add_pieces(self, kind: Kind) -> None:
        """Add the pieces of a layer that runs in turns with another one."""
        plan = self.plan
        name = kind.name
        attention_steps, mlp_steps = _parts(plan, kind, apart=True)
        parts = pieces(
            attention_steps,
            mlp_steps,
            selected(plan, [step.module for step in (*attention_steps, *mlp_steps)]),
            is_moe=kind.layer.has_experts,
            delays=plan.settings.delay_wgrad_compute,
        )
        for number, piece in enumerate(parts.forward):
            self.add(f"{name}.combined.forward{number}", piece)
        for number, piece in enumerate(parts.backward):
            self.add(f"{name}.combined.backward{number}", piece)
        # Transfers do not wait for delayed gradients: they complete no pass.
        self.operations[f"{name}.combined.mlp_weights"] = parts.mlp_weights
        self.operations[f"{name}.combined.attention_weights"] = parts.attention_weights

    def add(self, name: str, operations: tuple[Operation, ...]) -> str:
        if name not in self.operations:
            self.operations[name] = with_compute_done(operations)
        return name

    def forward_of(self, kind: Kind, sends: Sends) -> str:
        """Return the block of a layer forward, with these copies to the host."""
        name = f"{kind.name}.forward"
        if not any(group.copied for group in sends):
            return name
        return self._offload(name, sends, lambda: forward(with_sends(self.steps[kind], sends)))

    def backward_of(self, kind: Kind, reloads: Reloads) -> str:
        """Return the block of a layer backward, with these copies to the device."""
        name = f"{kind.name}.backward"
        if all(reload.is_idle for reload in reloads):
            return name
        steps = self.steps[kind]

        def operations() -> tuple[Operation, ...]:
            copied = (*with_reloads(steps, self.groups[kind], reloads),)
            return backward(copied, selected(self.plan, [step.module for step in steps]))

        return self._offload(name, reloads, operations)

    def _offload(
        self,
        name: str,
        copies: Sends | Reloads,
        operations: Callable[[], tuple[Operation, ...]],
    ) -> str:
        """Return the block of these operations, which are made once."""
        key = (name, copies)
        if key not in self._offloaded:
            self._offloaded[key] = self.add(
                f"{name}.offload{len(self._offloaded)}", operations()
            )
        return self._offloaded[key]

    def runs(self, segments: Iterable[Segment]) -> Block:
        """Return Runs, equal segments in a row as one; add their blocks to the workload."""
        runs: list[Run] = []
        for segment in segments:
            operations = self.operations[segment.block]
            if not operations:
                continue
            self.blocks[segment.block] = operations
            last = runs[-1] if runs else None
            if last is not None and last.block == segment.block:
                step = segment.layer - last.layer - (last.times - 1) * last.layer_step
                if last.times == 1 or step == last.layer_step:
                    runs[-1] = replace(last, times=last.times + 1, layer_step=step)
                    continue
            runs.append(Run(block=segment.block, layer=segment.layer))
        return tuple(runs)

    def position(self, block: str, param: Param, offset: int | None, *, last: bool) -> int:
        """Return where a block first uses a parameter, or completes its gradient."""
        places = self._places.get((block, last))
        if places is None:
            places = {}
            for index, op in enumerate(self.operations[block]):
                key = (op.module, op.layer)
                if last and not op.recompute and op.phase in (Phase.WGRAD, Phase.BWD):
                    places[key] = index
                elif not last and op.stream == COMPUTE:
                    places.setdefault(key, index)
            self._places[block, last] = places
        return places[param.module, offset]

    def pending(self, block: str, index: int) -> tuple[str, ...]:
        """Return the collectives that end a module's backward before its gradients are done."""
        operations = self.operations[block]
        module = operations[index].module
        layer = operations[index].layer
        names = (
            op.name
            for op in operations
            if (op.module, op.layer, op.phase) == (module, layer, Phase.DGRAD)
            and op.stream != COMPUTE
            and op.name
        )
        return tuple(dict.fromkeys(names))

    def changed(
        self,
        segments: Sequence[Segment],
        changes: Mapping[tuple[int, int], Change],
        *,
        begun: bool,
    ) -> list[Segment]:
        """Return the same segments, with variants of the blocks that change.

        begun: the step has computed or waited before them.
        """
        by_segment: dict[int, list[tuple[int, Change]]] = {}
        for (number, index), change in sorted(changes.items(), key=lambda item: item[0]):
            by_segment.setdefault(number, []).append((index, change))
        variants = list(segments)
        for number, segment_changes in by_segment.items():
            ahead = any(self.operations[segment.block] for segment in segments[:number])
            before = (COMPUTE_DONE,) if begun or ahead else ()
            key = (segments[number].block, tuple(segment_changes), before)
            if key not in self._changed:
                name = f"{key[0]}.{len(self._changed)}"
                ops = self._with(key[0], dict(segment_changes))
                self._changed[key] = self.add(name, with_deps(ops, before))
            variants[number] = replace(segments[number], block=self._changed[key])
        return variants

    def _with(self, block: str, changes: Mapping[int, Change]) -> tuple[Operation, ...]:
        ops: list[Operation] = []
        for index, op in enumerate(self.operations[block]):
            change = changes.get(index, Change())
            changed = replace(op, after=(*op.after, *change.after))
            ops += (*change.before, changed, *change.behind)
        return tuple(ops)


def kinds_of(plan: Plan) -> tuple[Kind, ...]:
    """Return the kind of each layer of the model, then of each multi-token prediction."""
    model = plan.model
    named = _named_layers(model)
    count = len(named)
    stays = (narrow.is_bf16_layer(plan.settings, layer, count) for layer in range(count))
    layers = (
        Kind(f"{name}.bf16" if is_bf16 else name, layer, is_bf16)
        for (name, layer), is_bf16 in zip(named, stays, strict=True)
    )
    # It has FP8, and no FP4 (multi_token_prediction.py, _proj_and_transformer_layer).
    is_bf16 = plan.settings.fp4_format is not Fp4Format.NONE
    predicts = (Kind("mtp", model.mtp_layer, is_bf16, is_mtp=True),) * model.num_mtp_layers
    return (*layers, *predicts)


@lru_cache(maxsize=64)
def _named_layers(model: ModelConfig) -> tuple[tuple[str, Layer], ...]:
    """Return each layer and its name: dense or moe, with a number where there are several."""
    names: dict[Layer, str] = {}
    for layer in model.layer_counts:
        stem = "moe" if layer.has_experts else "dense"
        number = sum(name.partition(".")[0] == stem for name in names.values())
        names[layer] = f"{stem}.{number}" if number else stem
    return tuple((names[layer], layer) for layer in model.layers)


def plan_of(plan: Plan, kind: Kind) -> Plan:
    """Return the plan of a layer of this kind."""
    return plan.in_bf16 if kind.is_bf16 else plan


def groups_in(plan: Plan, kind: Kind) -> tuple[Group, ...]:
    """Return the groups of saved tensors of a layer of this kind that are offloaded."""
    own = plan_of(plan, kind)
    return groups_of(own, own.tree.mtp() if kind.is_mtp else own.tree.block(kind.layer))


def params_of(plan: Plan, kind: Kind) -> tuple[Param, ...]:
    """Return the parameters of a layer of this kind."""
    own = plan_of(plan, kind)
    layer = gradients.layer_params(own, kind.layer)
    return gradients.mtp_params(own, layer) if kind.is_mtp else layer


def forward_segments(
    library: Library, chunk: Chunk, sends: Sequence[Sends] = ()
) -> list[Segment]:
    """Return those of data, embedding, layers and head that the chunk has.

    sends: copies to the host of each layer; none: none of any.
    """
    plan = library.plan
    segments: list[Segment] = []
    if chunk.has_embedding or chunk.has_head:
        first = chunk.has_embedding or chunk.num_mtp > 0
        last = chunk.has_head
        name = f"data{'.first' if first else ''}{'.last' if last else ''}"
        data = data_of(plan, first=first, last=last)
        segments.append(Segment(block=library.add(name, data)))
    if chunk.has_embedding:
        segments.append(Segment(block="embedding.forward", places=(EMBEDDING,)))
    kinds = kinds_of(plan)
    layers = [
        Segment(
            block=library.forward_of(kinds[unit], sends[place] if sends else ()),
            layer=unit,
            places=places_of(chunk, place),
        )
        for place, unit in enumerate(chunk.units)
    ]
    segments += _with_amax(library, chunk, layers[: chunk.num_layers], Phase.FWD)
    if _has_norm_apart(plan, chunk):
        segments.append(Segment(block="norm.forward", places=(NORM,)))
    segments += layers[chunk.num_layers :]
    if chunk.has_head:
        segments.append(Segment(block="head.forward", places=(HEAD,)))
    return segments


def _has_norm_apart(plan: Plan, chunk: Chunk) -> bool:
    """Return whether a chunk has the last norm, and that not in one block with the head."""
    return chunk.has_norm and plan.model.num_mtp_layers > 0


def places_of(chunk: Chunk, place: int) -> tuple[int, ...]:
    """Return the places of a layer, or of multi-token prediction, which has a table, too."""
    return (place, EMBEDDING) if place >= chunk.num_layers else (place,)


def backward_segments(
    library: Library, chunk: Chunk, reloads: Sequence[Reloads] = ()
) -> list[Segment]:
    """Return head, layers last to first, embedding; recomputed layers run forward first.

    reloads: copies to the device of each layer in forward order; none: none of any.
    """
    segments: list[Segment] = []
    if chunk.has_head:
        segments.append(Segment(block="head.backward", places=(HEAD,)))
    checkpoints = [*reversed(_checkpoints(library, chunk, reloads))]
    segments += _with_amax(library, chunk, checkpoints, Phase.BWD)
    if chunk.has_embedding:
        segments.append(Segment(block="embedding.backward", places=(EMBEDDING,)))
    return segments


def _with_amax(
    library: Library, chunk: Chunk, layers: Sequence[Segment], phase: Phase
) -> Iterator[Segment]:
    """Yield a pass's layers and the reductions of largest magnitudes behind them.

    There is one for the chunk, or with tensorwise scaling one behind each layer that has its
    region of FP8. The rank's chunks count as equally long.
    """
    plan = library.plan
    kinds = kinds_of(plan)
    of_layer = {layer: library.num_scaled[kinds[layer].name] for layer in chunk.layers}
    count = sum(of_layer.values()) * plan.settings.virtual_pipeline_model_parallel_size
    reduced = narrow.amax(plan, count, phase)
    if not reduced:
        yield from layers
        return
    block = library.add(f"amax.{phase}.{count}", reduced)
    is_by_layer = plan.settings.fp8_recipe is not Fp8Recipe.DELAYED
    for segment in layers:
        yield segment
        if is_by_layer and of_layer.get(segment.layer):
            yield Segment(block=block)
    if not is_by_layer:
        yield Segment(block=block)


def _checkpoints(library: Library, chunk: Chunk, reloads: Sequence[Reloads]) -> list[Segment]:
    """Return layers in forward order; layers with a common checkpoint are one segment."""
    settings = library.plan.settings
    of_model = kinds_of(library.plan)
    kinds = [of_model[layer] for layer in chunk.layers]
    full = settings.recompute_granularity is Granularity.FULL
    uniform = full and settings.recompute_method == "uniform"
    size = settings.recompute_num_layers
    if uniform and len(kinds) % size:
        raise ConfigError(
            "recompute_num_layers", size, f"a divisor of a chunk's {len(kinds)} layers"
        )
    segments: list[Segment] = []
    step = size if uniform else 1
    for first in range(0, len(kinds), step):
        group = kinds[first : first + step]
        recomputed = uniform or (full and first < size)
        own = reloads[first] if reloads else ()
        block = _together(library, group) if recomputed else library.backward_of(group[0], own)
        places = tuple(range(first, first + step))
        segments.append(Segment(block=block, layer=chunk.first_layer + first, places=places))
    if _has_norm_apart(library.plan, chunk):
        segments.append(Segment(block="norm.backward", places=(NORM,)))
    # Each is a checkpoint of its own; "block" skips them (_checkpointed_forward).
    for place in range(chunk.num_layers, len(chunk.units)):
        unit = chunk.units[place]
        own = reloads[place] if reloads else ()
        block = "mtp.full" if uniform else library.backward_of(of_model[unit], own)
        segments.append(Segment(block=block, layer=unit, places=places_of(chunk, place)))
    return segments


def _together(library: Library, kinds: Sequence[Kind]) -> str:
    """Return one checkpoint of several layers: all forward again, then all backward."""
    if len(kinds) == 1:
        return f"{kinds[0].name}.full"
    name = "full." + "-".join(kind.name for kind in kinds)
    if name in library.operations:
        return name
    ops: list[Operation] = []
    for offset, kind in enumerate(kinds):
        ops += (in_layer(op, offset) for op in library.operations[f"{kind.name}.again"])
    for offset in range(len(kinds) - 1, -1, -1):
        steps = _layer(library.plan, kinds[offset])
        ops += (in_layer(op, offset) for op in backward(steps))
    return library.add(name, tuple(ops))


def combined_runs(
    library: Library, forward: Chunk, backward: Chunk, microbatches: tuple[int, int]
) -> Block:
    """Return the Runs of a chunk forward and one backward in turns, the layers in pairs.

    microbatches: of the forward pass and of the backward pass. What comes before the layers of
    a pass, or after them, runs before or after all pairs.
    """
    plan = library.plan
    before, after = _around_layers(forward_segments(library, forward))
    first, last = _around_layers(backward_segments(library, backward))
    items = [
        *_at_microbatch(library.runs(before), microbatches[0]),
        *_at_microbatch(library.runs(first), microbatches[1]),
    ]
    kinds = kinds_of(plan)
    layers = {True: [*forward.layers], False: [*reversed(backward.layers)]}
    for name, is_forward, place in order(forward.num_layers, backward.num_layers):
        if place < len(layers[is_forward]):
            layer = layers[is_forward][place]
            block = f"{kinds[layer].name}.combined.{name}"
            runs = library.runs([Segment(block=block, layer=layer)])
            items += _at_microbatch(runs, microbatches[0 if is_forward else 1])
    items += _at_microbatch(library.runs(after), microbatches[0])
    items += _at_microbatch(library.runs(last), microbatches[1])
    return tuple(items)


def _around_layers(segments: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Return a pass's segments before its layers and after them.

    A chunk without layers has none after them but the head or the embedding backward.
    """
    layers = [
        index
        for index, segment in enumerate(segments)
        if any(place >= 0 for place in segment.places)
    ]
    if not layers:
        return [*segments], []
    return [*segments[: layers[0]]], [*segments[layers[-1] + 1 :]]


def _at_microbatch(block: Block, microbatch: int) -> Iterator[Run]:
    for item in block:
        assert isinstance(item, Run)
        yield replace(item, microbatch=microbatch)


def _layer(plan: Plan, kind: Kind) -> tuple[Step, ...]:
    layer = tuple(itertools.chain(*_parts(plan, kind)))
    return tuple(around_mtp(plan_of(plan, kind), layer)) if kind.is_mtp else layer


def _parts(
    plan: Plan, kind: Kind, *, apart: bool = False
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return a layer's attention and its MLP. apart: exchanges over ep have their stream."""
    own = plan_of(plan, kind)
    layer = kind.layer
    ffn = experts(own, layer, apart=apart) if layer.has_experts else mlp(own, layer)
    return attention(own, layer), ffn


def selected(plan: Plan, modules: Sequence[str]) -> dict[str, str]:
    """Return those of a layer's modules that selective recompute names, with their group."""
    groups: dict[str, str] = {}
    outside = ("mlp.norm", "mlp.residual")
    has_router = "mlp.router" in modules
    for word in plan.settings.modules:
        for module in modules:
            name = adapted(module)
            inside = {
                "core_attn": name in CORE,
                "layernorm": name in ("attention.norm", "mlp.norm"),
                "mla_up_proj": plan.model.mla is not None and name in _LATENT_UP,
                "mlp": name in ("mlp.up", "mlp.gate_up", "mlp.activation", "mlp.down"),
                "moe": name.startswith("mlp.") and name not in outside and has_router,
                "moe_act": name == "mlp.experts_activation",
                "shared_experts": name.startswith("mlp.shared_"),
            }[word]
            if inside:
                groups[module] = f"{word}.{name}" if word == "layernorm" else word
    return groups


def last_backward(
    library: Library, segments: Sequence[Segment], buckets: Iterable[Bucket]
) -> list[Segment]:
    """Reduce each bucket as soon as the last of its gradients is complete."""
    where = _where(segments)
    changes: dict[tuple[int, int], Change] = {}
    for bucket in buckets:
        sent = gradients.reduce(library.plan, bucket, overlapped=True)
        if sent:
            place = max(
                _at(library, segments, where, param, last=True) for param in bucket.params
            )
            change = changes.get(place, Change())
            pending = library.pending(segments[place[0]].block, place[1])
            sent = (replace(sent[0], after=(*sent[0].after, *pending)), *sent[1:])
            changes[place] = replace(change, behind=(*change.behind, *sent))
    return library.changed(segments, changes, begun=True)


def first_forward(
    library: Library, segments: Sequence[Segment], buckets: Sequence[Bucket], *, begun: bool
) -> list[Segment]:
    """Make modules wait for their bucket, before which the next bucket's gather is issued.

    A module's bucket and the next one of the chain are gathered if they are not yet
    (finish_param_sync). begun: the step has computed or waited before, if only for the chunk's
    input.
    """
    where = _where(segments, first=True)
    changes: dict[tuple[int, int], Change] = {}
    for expert in (False, True):
        chain = [bucket for bucket in reversed(buckets) if bucket.expert is expert]
        places = [
            min(_at(library, segments, where, param, last=False) for param in bucket.params)
            for bucket in chain
        ]
        issued: list[int] = []
        for place, index in sorted(zip(places, range(len(chain)), strict=True)):
            name = f"{gradients.stream_of(chain[index])}.parameters"
            new = [each for each in (index, index + 1) if each < len(chain)]
            sent = [
                op
                for each in new
                if each not in issued
                for op in gradients.gather(library.plan, chain[each], name=name)
            ]
            issued += [each for each in new if each not in issued]
            if not gradients.gather(library.plan, chain[index], name=name):
                continue
            later = len(issued) - 1 - issued.index(index)
            change = changes.get(place, Change())
            changes[place] = Change(
                before=(*change.before, *sent),
                after=(*change.after, f"{name}~{later}" if later else name),
            )
    return library.changed(segments, changes, begun=begun)


def _where(segments: Sequence[Segment], *, first: bool = False) -> dict[int, int]:
    """Return the segment that uses a place's parameters last, or first."""
    pairs = [(place, number) for number, each in enumerate(segments) for place in each.places]
    return dict(reversed(pairs) if first else pairs)


def _at(
    library: Library,
    segments: Sequence[Segment],
    where: Mapping[int, int],
    param: Param,
    *,
    last: bool,
) -> tuple[int, int]:
    number = where[param.place]
    segment = segments[number]
    offset = None if param.place < 0 else param.place - segment.places[0]
    return number, library.position(segment.block, param, offset, last=last)
