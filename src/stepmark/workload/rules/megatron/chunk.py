"""A model chunk's forward and backward pass as Runs of its layers' operations.

The first forward and the last backward of a step may differ: parameters are gathered and
gradients reduced bucket by bucket beside the computation. Source: megatron-core 0.16.1,
distributed/distributed_data_parallel.py (_make_forward_pre_hook, _make_backward_post_hook),
param_and_grad_buffer.py (finish_param_sync, register_grad_ready); recompute:
transformer/transformer_block.py (_checkpointed_forward), attention.py, mlp.py, moe_layer.py,
tensor_parallel/random.py. Compared with a run of megatron-core (tests/data/megatron).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepmark.core.errors import ConfigError
from stepmark.core.ops import Phase
from stepmark.core.workload import COMPUTE, Block, CommOp, Operation, Run
from stepmark.workload.pipeline import PASSED, in_layer
from stepmark.workload.rules.megatron.experts import experts
from stepmark.workload.rules.megatron.gradients import (
    EMBEDDING,
    HEAD,
    Bucket,
    Param,
    gather,
    reduce,
    stream_of,
)
from stepmark.workload.rules.megatron.layer import (
    Step,
    attention,
    backward,
    embedding,
    forward,
    head,
    issued,
    mlp,
    passed,
)
from stepmark.workload.rules.megatron.layer import data as data_of
from stepmark.workload.rules.megatron.settings import Granularity, Plan
from stepmark.workload.rules.megatron.split import Chunk

_DENSE, _MOE = "dense", "moe"
_LATENT_UP = ("attention.q_up", "attention.q", "attention.kv_up", "attention.rope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A block at a layer. places: layers of the chunk that it holds, or EMBEDDING, HEAD."""

    block: str
    layer: int = 0
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """At an operation of a segment: what is put before it, after it, and what it waits for."""

    before: tuple[Operation, ...] = ()
    behind: tuple[Operation, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Library:
    """Operations of modules by block name; made once, and those of a step's variants."""

    plan: Plan
    blocks: dict[str, Block]
    operations: dict[str, tuple[Operation, ...]] = field(default_factory=dict)
    _changed: dict[tuple[str, tuple[tuple[int, Change], ...], tuple[str, ...]], str] = field(
        default_factory=dict
    )
    _places: dict[tuple[str, bool], dict[tuple[str, int | None], int]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        plan = self.plan
        kinds = {is_moe(plan, layer) for layer in (0, plan.model.num_layers - 1)}
        for moe in kinds:
            steps = _layer(plan, moe)
            kind = _MOE if moe else _DENSE
            self.add(f"{kind}.forward", forward(steps))
            self.add(f"{kind}.again", forward(steps, again=True))
            self.add(f"{kind}.backward", backward(steps, _selected(plan, steps)))
            self.add(f"{kind}.full", (*self.operations[f"{kind}.again"], *backward(steps)))
        self.add("embedding.forward", forward([embedding(plan)]))
        self.add("embedding.backward", backward([embedding(plan)]))
        last = head(plan)
        self.add("head.forward", forward(last))
        self.add("head.backward", backward(last))

    def add(self, name: str, operations: tuple[Operation, ...]) -> str:
        if name not in self.operations:
            self.operations[name] = passed(operations)
        return name

    def runs(self, segments: Iterable[Segment]) -> Block:
        """Equal ones in a row as one Run; their blocks are put into the workload."""
        found: list[Run] = []
        for segment in segments:
            operations = self.operations[segment.block]
            if not operations:
                continue
            self.blocks[segment.block] = operations
            last = found[-1] if found else None
            if last is not None and last.block == segment.block:
                step = segment.layer - last.layer - (last.times - 1) * last.layer_step
                if last.times == 1 or step == last.layer_step:
                    found[-1] = replace(last, times=last.times + 1, layer_step=step)
                    continue
            found.append(Run(block=segment.block, layer=segment.layer))
        return tuple(found)

    def position(self, block: str, param: Param, offset: int | None, *, last: bool) -> int:
        """Where a parameter is first used in a block, or its gradient complete."""
        known = self._places.get((block, last))
        if known is None:
            known = {}
            for index, op in enumerate(self.operations[block]):
                key = (op.module, op.layer)
                if last and not op.recompute and op.phase in (Phase.WGRAD, Phase.BWD):
                    known[key] = index
                elif not last:
                    known.setdefault(key, index)
            self._places[block, last] = known
        return known[param.module, offset]

    def pending(self, block: str, index: int) -> tuple[str, ...]:
        """Collectives that a module's backward waits for before its gradients count as done."""
        done = self.operations[block][index]
        return tuple(
            op.name
            for op in self.operations[block]
            if (op.module, op.layer, op.phase) == (done.module, done.layer, Phase.DGRAD)
            and op.stream != COMPUTE
        )

    def changed(
        self,
        segments: Sequence[Segment],
        changes: Mapping[tuple[int, int], Change],
        *,
        begun: bool,
    ) -> list[Segment]:
        """The same segments, with variants of blocks where something changes.

        begun: the step has computed or waited before them.
        """
        by_segment: dict[int, list[tuple[int, Change]]] = {}
        for (number, index), change in sorted(changes.items(), key=lambda item: item[0]):
            by_segment.setdefault(number, []).append((index, change))
        found = list(segments)
        for number, listed in by_segment.items():
            ahead = any(self.operations[one.block] for one in segments[:number])
            before = (PASSED,) if begun or ahead else ()
            key = (segments[number].block, tuple(listed), before)
            if key not in self._changed:
                name = f"{key[0]}.{len(self._changed)}"
                made = self._with(key[0], dict(listed))
                self._changed[key] = self.add(name, issued(made, before))
            found[number] = replace(segments[number], block=self._changed[key])
        return found

    def _with(self, block: str, changes: Mapping[int, Change]) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for index, op in enumerate(self.operations[block]):
            change = changes.get(index)
            if change is None:
                found.append(op)
                continue
            found += change.before
            found.append(replace(op, after=(*op.after, *change.after)))
            found += change.behind
        return tuple(found)


def is_moe(plan: Plan, layer: int) -> bool:
    return plan.model.moe is not None and layer >= plan.model.moe.first_dense_layers


def forward_segments(library: Library, chunk: Chunk) -> list[Segment]:
    """Data, embedding, layers, head, as far as the chunk has them."""
    plan = library.plan
    found: list[Segment] = []
    if chunk.has_embedding or chunk.has_head:
        first, last = chunk.has_embedding, chunk.has_head
        name = "data" + ".first" * first + ".last" * last
        data = data_of(plan, first=first, last=last)
        found.append(Segment(block=library.add(name, data)))
    if chunk.has_embedding:
        found.append(Segment(block="embedding.forward", places=(EMBEDDING,)))
    for place, layer in enumerate(chunk.layers):
        kind = _MOE if is_moe(plan, layer) else _DENSE
        found.append(Segment(block=f"{kind}.forward", layer=layer, places=(place,)))
    if chunk.has_head:
        found.append(Segment(block="head.forward", places=(HEAD,)))
    return found


def backward_segments(library: Library, chunk: Chunk) -> list[Segment]:
    """Head, layers last to first, embedding; layers again first where they are recomputed."""
    found: list[Segment] = []
    if chunk.has_head:
        found.append(Segment(block="head.backward", places=(HEAD,)))
    found += reversed(_checkpoints(library, chunk))
    if chunk.has_embedding:
        found.append(Segment(block="embedding.backward", places=(EMBEDDING,)))
    return found


def _checkpoints(library: Library, chunk: Chunk) -> list[Segment]:
    """Layers in forward order, those that are recomputed together as one."""
    settings = library.plan.settings
    kinds = [_MOE if is_moe(library.plan, layer) else _DENSE for layer in chunk.layers]
    full = settings.recompute_granularity is Granularity.FULL
    size = settings.recompute_num_layers
    if full and settings.recompute_method == "uniform" and len(kinds) % size:
        raise ConfigError(
            "recompute_num_layers", size, f"a divisor of a chunk's {len(kinds)} layers"
        )
    found: list[Segment] = []
    if not full or settings.recompute_method == "block":
        for place, kind in enumerate(kinds):
            name = "full" if full and place < size else "backward"
            layer = chunk.first_layer + place
            found.append(Segment(block=f"{kind}.{name}", layer=layer, places=(place,)))
        return found
    for first in range(0, len(kinds), size):
        group = kinds[first : first + size]
        places = tuple(range(first, first + len(group)))
        layer = chunk.first_layer + first
        found.append(Segment(block=_together(library, group), layer=layer, places=places))
    return found


def _together(library: Library, kinds: Sequence[str]) -> str:
    """One checkpoint of several layers: all forward again, then all backward."""
    if len(kinds) == 1:
        return f"{kinds[0]}.full"
    name = "full." + "-".join(kinds)
    if name in library.operations:
        return name
    found: list[Operation] = []
    for offset, kind in enumerate(kinds):
        found += (in_layer(op, offset) for op in library.operations[f"{kind}.again"])
    for offset in range(len(kinds) - 1, -1, -1):
        steps = _layer(library.plan, kinds[offset] == _MOE)
        found += (in_layer(op, offset) for op in backward(steps))
    return library.add(name, tuple(found))


def _layer(plan: Plan, moe: bool) -> tuple[Step, ...]:
    return (*attention(plan), *(experts(plan) if moe else mlp(plan)))


def _selected(plan: Plan, steps: Sequence[Step]) -> dict[str, str]:
    """Modules that selective recompute runs again, and with which others."""
    found: dict[str, str] = {}
    kept = ("mlp.norm", "mlp.residual")
    has_router = any(step.module == "mlp.router" for step in steps)
    for word in plan.settings.modules:
        for name in (step.module for step in steps):
            inside = {
                "core_attn": name == "attention.core",
                "layernorm": name in ("attention.norm", "mlp.norm"),
                "mla_up_proj": plan.model.mla is not None and name in _LATENT_UP,
                "mlp": name in ("mlp.up", "mlp.gate_up", "mlp.activation", "mlp.down"),
                "moe": name.startswith("mlp.") and name not in kept and has_router,
                "moe_act": name == "mlp.experts_activation",
                "shared_experts": name.startswith("mlp.shared_"),
            }[word]
            if inside:
                found[name] = f"{word}.{name}" if word == "layernorm" else word
    return found


def last_backward(
    library: Library, segments: Sequence[Segment], buckets: Iterable[Bucket]
) -> list[Segment]:
    """A bucket is reduced as soon as the last of its gradients is complete."""
    where = _where(segments)
    changes: dict[tuple[int, int], Change] = {}
    for bucket in buckets:
        sent = reduce(library.plan, bucket, overlapped=True)
        if sent:
            at = max(_at(library, segments, where, one, last=True) for one in bucket.params)
            held = changes.get(at, Change())
            pending = library.pending(segments[at[0]].block, at[1])
            sent = (replace(sent[0], after=(*sent[0].after, *pending)), *sent[1:])
            changes[at] = replace(held, behind=(*held.behind, *sent))
    return library.changed(segments, changes, begun=True)


def first_forward(
    library: Library, segments: Sequence[Segment], buckets: Iterable[Bucket], *, begun: bool
) -> list[Segment]:
    """A module waits for its bucket; then the next bucket's gather is issued.

    begun: the step has computed or waited before, if only for the chunk's input.
    """
    where, listed = _where(segments), list(buckets)
    changes: dict[tuple[int, int], Change] = {}
    for expert in (False, True):
        chain = [bucket for bucket in reversed(listed) if bucket.expert is expert]
        for index, bucket in enumerate(chain):
            name = f"{stream_of(bucket)}.parameters"
            wanted = chain[0:2] if index == 0 else chain[index + 1 : index + 2]
            sent: list[CommOp] = []
            for one in wanted:
                sent += gather(library.plan, one, name=name)
            if not gather(library.plan, bucket, name=name):
                continue
            at = min(_at(library, segments, where, one, last=False) for one in bucket.params)
            newest = index + 1 == len(chain)
            held = changes.get(at, Change())
            changes[at] = Change(
                before=(*held.before, *sent),
                after=(*held.after, name if newest else f"{name}~1"),
            )
    return library.changed(segments, changes, begun=begun)


def _where(segments: Sequence[Segment]) -> dict[int, int]:
    return {place: number for number, one in enumerate(segments) for place in one.places}


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
