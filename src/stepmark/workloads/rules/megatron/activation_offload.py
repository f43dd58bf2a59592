"""Saved tensors in the host's memory: --fine-grained-activation-offloading.

A group is what autograd saves inside one of --offload-modules. Its copy to the host begins when
the module around it has computed, and it is copied back before its backward pass: each group
that ends its backward pass begins the copy of the newest group that is still on the host, of
this pass or, if there is none, of the next one. Copies have a stream per direction. A pass that
is backward right behind its forward pass leaves the last group of each name on the device.

Source: megatron-core 0.16.1, pipeline_parallel/fine_grained_activation_offload.py
(PipelineOffloadManager, ChunkOffloadHandler); the modules that call it:
transformer/transformer_layer.py, attention.py, multi_latent_attention.py, moe/experts.py;
transformer/transformer_config.py and megatron/training/arguments.py (assertions). Only read.
The first step of a job, which offloads all groups, is not the one shown here. That a copy back
waits for the copy there is one wait for all copies of its forward pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from stepmark.ground.dtypes import DType
from stepmark.ground.units import format_bytes
from stepmark.model.ops import Phase
from stepmark.step.host_memory import host_copy
from stepmark.step.module import Module
from stepmark.step.workload import COMPUTE, ComputeOp
from stepmark.workloads.pipeline import Pass, wait
from stepmark.workloads.rules.megatron.narrow import has_fp8_attention
from stepmark.workloads.rules.megatron.saved_tensors import saved_bytes
from stepmark.workloads.rules.megatron.settings import AttentionBackend, Granularity
from stepmark.workloads.rules.megatron.steps import Step, awaiting

if TYPE_CHECKING:
    from stepmark.workloads.rules.megatron.plan import Plan

TO_HOST = "d2h"
TO_DEVICE = "h2d"
_FP32 = DType.FP32.itemsize
_NAME = "fine_grained_activation_offloading"
_LATENT = tuple(
    f"attention.{name}"
    for name in ("q_down", "q_norm", "q_up", "q", "kv_down", "kv_norm", "kv_up", "rope")
)
_PRODUCTS = ("qkv_linear", "attn_proj", "expert_fc1")
_Refusal = tuple[object, str, object, str]  # of job.refuse_first


class Group(NamedTuple):
    """Tensors that are copied together: those saved between the first and last of its modules.

    copied: bytes of a copy. freed: bytes that leave the device; less where another module keeps
    the tensor, too, more where a tensor that is copied was a view of a larger one.
    """

    name: str
    modules: tuple[str, ...]
    copied: int
    freed: int


class _Saved(NamedTuple):
    numel: int
    num_bytes: int


def groups_of(plan: "Plan", module: Module) -> tuple[Group, ...]:
    """Return the groups of a layer, or of multi-token prediction, in the order they begin."""
    words = plan.settings.offload_words
    if not words:
        return ()
    unit = _Unit(plan, module)
    groups = {
        "attn_norm": unit.norm("attn_norm", "attention"),
        "qkv_linear": unit.qkv(),
        "core_attn": unit.core(),
        "attn_proj": unit.of_module("attn_proj", "attention.out"),
        "mlp_norm": unit.norm("mlp_norm", "mlp"),
        "expert_fc1": unit.of_module("expert_fc1", unit.first_product),
        "moe_act": unit.of_module(
            "moe_act", "mlp.experts_activation", until="mlp.experts_down"
        ),
    }
    return tuple(group for name, group in groups.items() if name in words and group is not None)


class _Unit:
    """A layer with what its modules save."""

    def __init__(self, plan: "Plan", unit: Module) -> None:
        self._plan = plan
        self._leaves = {leaf.role: leaf for leaf in unit.walk() if leaf.work}
        self._is_latent = plan.model.mla is not None
        self._itemsize = plan.job.dtype.itemsize

    @property
    def first_product(self) -> str:
        """Role of the experts' first product; "": there are none."""
        return next((role for role in self._leaves if role.startswith("mlp.experts")), "")

    def _copied(self, tensors: Iterable[_Saved]) -> int:
        """Return the bytes of tensors large enough (tensor_need_offloading_checker)."""
        least = self._plan.settings.min_offloaded_tensor_size
        return sum(tensor.num_bytes for tensor in tensors if tensor.numel >= least)

    def _tensor(self, role: str) -> _Saved:
        """Return the tensor of a module that saves one."""
        num_bytes = saved_bytes(self._plan, self._leaves[role])
        return _Saved(num_bytes // self._itemsize, num_bytes)

    def _norm_tensors(self, role: str) -> list[_Saved]:
        """Return the input of a norm, and its statistics in fp32."""
        leaf = self._leaves[role]
        rows = self._plan.own_tokens
        rest = [_Saved(rows, _FP32 * rows)] * leaf.keeps.statistics
        num_bytes = saved_bytes(self._plan, leaf) - sum(each.num_bytes for each in rest)
        return [_Saved(num_bytes // self._itemsize, num_bytes), *rest]

    def of_module(self, name: str, role: str, *, until: str = "") -> Group | None:
        """Return the group of a module's one tensor."""
        if role not in self._leaves:
            return None
        copied = self._copied([self._tensor(role)])
        return Group(name, tuple(filter(None, (role, until))), copied, copied)

    def norm(self, name: str, part: str) -> Group | None:
        """Return the group of a norm that is a module of its own, up to the residual sum.

        TransformerEngine's layers fuse a norm and the product behind it; those of latent
        attention and of experts do not (models/gpt/gpt_layer_specs.py).
        """
        is_apart = self._is_latent if part == "attention" else bool(self.first_product)
        if not is_apart or f"{part}.norm" not in self._leaves:
            return None
        copied = self._copied(self._norm_tensors(f"{part}.norm"))
        return Group(name, (f"{part}.norm", f"{part}.residual"), copied, copied)

    def qkv(self) -> Group | None:
        """Return the group of the products of a mixer's input.

        The fused one has the norm inside. Latent attention's two products of one input each
        save it, and each has its own copy.
        """
        if not self._is_latent:
            modules = ("attention.norm", "attention.qkv")
            if modules[1] not in self._leaves:
                return None
            tensors = [*self._norm_tensors(modules[0]), self._tensor(modules[1])]
            copied = self._copied(tensors)
            return Group("qkv_linear", modules, copied, copied)
        roles = [role for role in _LATENT if role in self._leaves]
        tensors = [self._tensor(role) for role in roles if role != "attention.rope"]
        freed = self._copied(tensors)
        twice = self._copied([max(tensors)])  # the hidden state is wider than latent vectors
        return Group("qkv_linear", tuple(roles), freed + twice, freed)

    def core(self) -> Group | None:
        """Return the group of queries, keys, values, attention's output and its statistics.

        The output leaves the device with the group of the product behind it, which keeps it,
        too; a narrow product keeps a cast in its place. Values are a view of the fused
        product's result, which is released as a whole, with what rotary positions count of it.
        """
        plan, model = self._plan, self._plan.model
        leaf = self._leaves.get("attention.core")
        if leaf is None:
            return None
        rows = plan.tokens * leaf.keeps.statistics // plan.tp
        statistics = _Saved(rows, _FP32 * rows)
        numel = (saved_bytes(plan, leaf) - statistics.num_bytes) // self._itemsize
        queries = plan.tokens * model.num_heads * model.d_qk // plan.tp
        values = (numel - queries) * model.d_v // (model.d_qk + model.d_v)
        outputs = plan.tokens * model.num_heads * model.d_v // plan.tp
        sizes = (queries, numel - queries - values, values, outputs)
        tensors = [_Saved(each, each * self._itemsize) for each in sizes]
        copied = self._copied([*tensors, statistics])
        freed = copied
        if plan.job.products is None:
            freed -= self._copied(tensors[-1:])
        if not self._is_latent and "attention.rope" in self._leaves:
            is_released = self._copied([tensors[2]]) > 0
            freed += saved_bytes(plan, self._leaves["attention.rope"]) if is_released else 0
        return Group("core_attn", ("attention.core",), copied, freed)


class Reload(NamedTuple):
    """Copies around a group's backward pass. All names are of groups; "": there is none.

    awaits: of its copy to the device, with how many to go back. late_bytes: of a copy that no
    earlier group has begun. loads, load_bytes: of the copy that begins after it.
    """

    name: str
    awaits: str = ""
    late_bytes: int = 0
    loads: str = ""
    load_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        return not (self.awaits or self.late_bytes or self.load_bytes)


Sends = tuple[Group, ...]  # of a layer, forward
Reloads = tuple[Reload, ...]  # of a layer, backward


@dataclass(frozen=True, slots=True)
class PassCopies:
    """Copies of a chunk's pass over a micro-batch, by its layers in forward order.

    back: with how many copies to the host to go back to the last one of the same micro-batch;
    None: there is none.
    """

    sends: tuple[Sends, ...] = ()
    reloads: tuple[Reloads, ...] = ()
    back: int | None = None

    @property
    def copied(self) -> int:
        """Bytes that a forward pass copies to the host."""
        return sum(group.copied for groups in self.sends for group in groups)


class _Event(NamedTuple):
    """The start or the end of a group in the forward pass of a chunk's layer."""

    unit: int
    group: Group
    is_start: bool


def _events(number: int, groups: Sequence[Group]) -> Iterator[_Event]:
    """Yield starts and ends of a layer's groups in the order of its modules.

    A group is inside of the one that began before it and has not ended.
    """
    open_groups: list[Group] = []
    for group in groups:
        while open_groups and not _is_inside(group, open_groups[-1]):
            yield _Event(number, open_groups.pop(), is_start=False)
        yield _Event(number, group, is_start=True)
        open_groups.append(group)
    while open_groups:
        yield _Event(number, open_groups.pop(), is_start=False)


def _is_inside(group: Group, outer: Group) -> bool:
    """Return whether a group ends before one that began earlier."""
    part = "attention" if outer.name == "attn_norm" else "mlp"
    return outer.name in ("attn_norm", "mlp_norm") and group.modules[0].startswith(part)


@dataclass(slots=True)
class _OnHost:
    """Groups of a pass on the host, the newest last. loaded: those on their way back."""

    chunk: int
    resident: tuple[str, ...]  # names of which the last group stays
    stack: list[tuple[int, Group]]
    num_sent: int
    loaded: list[tuple[int, Group]] = field(default_factory=list)

    @property
    def has_copies(self) -> bool:
        return any(group.copied for _, group in (*self.stack, *self.loaded))


Place = tuple[int, int]  # chunk, micro-batch


class StageCopies:
    """Copies of a stage's passes in the order in which they run.

    groups: of each chunk's layers. order: all passes, or enough of them.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Sequence[Group]]],
        order: Iterable[Pass],
    ) -> None:
        self._groups = groups
        self._events = [
            [event for number, own in enumerate(units) for event in _events(number, own)]
            for units in groups
        ]
        self._names = [
            tuple(dict.fromkeys(event.group.name for event in events if event.is_start))
            for events in self._events
        ]
        passes = [*order]
        self._backward = [
            (chunk, microbatch)
            for chunk, microbatch, is_forward in passes
            if not is_forward and self._names[chunk]
        ]
        self._begun = 0  # backward passes
        self._num_sent = 0
        self._on_host: dict[Place, _OnHost] = {}
        self._sends: dict[tuple[int, tuple[str, ...]], tuple[Sends, ...]] = {}
        self._reloads: dict[tuple[object, ...], tuple[tuple[Reloads, ...], int]] = {}
        self._excluded = self._find_excluded()
        self.host_bytes = 0  # at most at one time
        self.passes: dict[Pass, PassCopies] = {}
        on_host = 0
        for chunk, microbatch, is_forward in passes:
            copies_of = self._forward if is_forward else self._back
            self.passes[chunk, microbatch, is_forward] = copies_of((chunk, microbatch))
            copied = self.passes[chunk, microbatch, True].copied
            on_host += copied if is_forward else -copied
            self.host_bytes = max(self.host_bytes, on_host)

    def _find_excluded(self) -> dict[Place, set[str]]:
        """Return the groups that never leave the device (post_warmup_callback).

        They are the last ones by name of the first chunk that is backward, as many names as a
        chunk has.
        """
        first: dict[str, Place] = {}
        for place in reversed(self._backward):
            first |= dict.fromkeys(self._names[place[0]], place)
        excluded: dict[Place, set[str]] = {}
        for name in [*first][: max(map(len, self._names), default=0)]:
            excluded.setdefault(first[name], set()).add(name)
        return excluded

    def _next(self, name: str = "") -> Place | None:
        """Return the next pass that is backward, with a group of this name."""
        later = range(self._begun, len(self._backward))
        places = (self._backward[index] for index in later)
        return next((each for each in places if not name or name in self._names[each[0]]), None)

    def _forward(self, place: Place) -> PassCopies:
        chunk, _ = place
        excluded = self._excluded.get(place, ())
        resident = tuple(
            name for name in self._names[chunk] if name in excluded or self._next(name) == place
        )
        if (chunk, resident) not in self._sends:
            self._sends[chunk, resident] = self._sent(chunk, resident)
        sends = self._sends[chunk, resident]
        stack = [(number, group) for number, own in enumerate(sends) for group in own]
        self._num_sent += sum(group.copied > 0 for _, group in stack)
        self._on_host[place] = _OnHost(chunk, resident, stack, self._num_sent)
        return PassCopies(sends=sends)

    def _sent(self, chunk: int, resident: Sequence[str]) -> tuple[Sends, ...]:
        """Return the groups of each layer that are sent, in the order in which they end.

        resident: names of which the last group stays on the device.
        """
        last = {event.group.name: event.unit for event in self._events[chunk]}
        sends: list[list[Group]] = [[] for _ in self._groups[chunk]]
        for event in self._events[chunk]:
            name = event.group.name
            if not event.is_start and not (name in resident and last[name] == event.unit):
                sends[event.unit].append(event.group)
        return tuple(map(tuple, sends))

    def _back(self, place: Place) -> PassCopies:
        own = self._on_host.pop(place)
        if self._names[place[0]]:
            self._begun = self._backward.index(place, self._begun) + 1
        following = self._next()
        behind = self._on_host.get(following) if following is not None else None
        state = (behind.chunk, behind.resident, len(behind.loaded)) if behind else None
        key = (own.chunk, own.resident, len(own.loaded), state)
        if key not in self._reloads:
            self._reloads[key] = self._reloaded(own, behind)
        reloads, num_loaded = self._reloads[key]
        if behind is not None:
            behind.loaded += (behind.stack.pop() for _ in range(num_loaded))
        back = self._num_sent - own.num_sent if own.has_copies else None
        return PassCopies(reloads=reloads, back=back)

    def _reloaded(
        self, own: _OnHost, behind: _OnHost | None
    ) -> tuple[tuple[Reloads, ...], int]:
        """Return a backward pass's copies, and how many of them are of the pass behind it."""
        stack = [*own.stack]
        later = [*behind.stack] if behind else []
        loaded = [(True, *each) for each in own.loaded]
        events = self._events[own.chunk]
        reloads = {(unit, group.name): Reload(group.name) for unit, group, _ in events}
        for unit, group, is_start in reversed(events):
            key = (unit, group.name)
            if is_start and (stack or later):
                is_own = bool(stack)
                number, new = (stack or later).pop()
                loaded.append((is_own, number, new))
                if new.copied:
                    begun = reloads[key]._replace(loads=new.name, load_bytes=new.copied)
                    reloads[key] = begun
            elif not is_start and (True, unit, group) in loaded:
                reloads[key] = reloads[key]._replace(awaits=_awaited(loaded, unit, group))
            elif not is_start and (unit, group) in stack:
                # Its tensors are copied as they are needed, and not again when it is its turn.
                reloads[key] = reloads[key]._replace(late_bytes=group.copied)
                stack[stack.index((unit, group))] = (unit, group._replace(copied=0))
        by_layer = tuple(
            tuple(reloads[number, group.name] for group in units)
            for number, units in enumerate(self._groups[own.chunk])
        )
        return by_layer, sum(not is_own for is_own, _, _ in loaded)


def _awaited(loaded: Sequence[tuple[bool, int, Group]], unit: int, group: Group) -> str:
    """Return the name of a group's copy to the device, with how many to go back."""
    if not group.copied:
        return ""
    index = loaded.index((True, unit, group))
    back = sum(
        each.name == group.name and each.copied > 0 for _, _, each in loaded[index + 1 :]
    )
    name = f"{TO_DEVICE}.{group.name}"
    return f"{name}~{back}" if back else name


def with_sends(steps: Sequence[Step], sends: Sends) -> Iterator[Step]:
    """Yield the steps of a layer forward, with copies to the host."""
    ends: dict[int, list[Step]] = {}
    for group in sends:
        if group.copied:
            module = f"offload.{group.name}"
            op = host_copy(group.copied, TO_HOST, Phase.FWD, module, stream=TO_HOST)
            sent = replace(op, name=TO_HOST, layer=0, microbatch=0)
            step = Step(module=module, fwd=(sent,), bwd=())
            ends.setdefault(_bounds(steps, group)[1], []).append(step)
    for index, each in enumerate(steps):
        yield each
        yield from ends.get(index, ())


def with_reloads(
    steps: Sequence[Step], groups: Sequence[Group], reloads: Reloads
) -> Iterator[Step]:
    """Yield the steps of a layer, with waits and copies to the device in the backward pass."""
    starts: dict[int, list[Step]] = {}
    ends: dict[int, list[Step]] = {}
    for group, reload in zip(groups, reloads, strict=True):
        first, last = _bounds(steps, group)
        module = f"offload.{group.name}"
        if reload.awaits:
            awaited = awaiting(Phase.DGRAD, module, reload.awaits)
            ends.setdefault(last, []).append(Step(module=module, fwd=(), bwd=(awaited,)))
        if reload.late_bytes:
            copy = _to_device(reload.late_bytes, module, COMPUTE)
            ends.setdefault(last, []).append(Step(module=module, fwd=(), bwd=(copy,)))
        if reload.load_bytes:
            # Behind a wait for what the module's backward pass left in flight.
            begun = awaiting(Phase.DGRAD, module)
            copy = _to_device(reload.load_bytes, f"offload.{reload.loads}", TO_DEVICE)
            copy = replace(copy, name=f"{TO_DEVICE}.{reload.loads}")
            step = Step(module=module, fwd=(), bwd=(begun, copy))
            starts.setdefault(first, []).append(step)
    for index, each in enumerate(steps):
        yield from starts.get(index, ())
        yield each
        yield from ends.get(index, ())


def _to_device(num_bytes: int, module: str, stream: str) -> ComputeOp:
    op = host_copy(num_bytes, TO_DEVICE, Phase.DGRAD, module, stream=stream)
    return replace(op, layer=0, microbatch=0)


def _bounds(steps: Sequence[Step], group: Group) -> tuple[int, int]:
    """Return the places of the first and of the last step of a group."""
    places = [index for index, step in enumerate(steps) if step.module in group.modules]
    return places[0], places[-1]


def awaits_sent(back: int) -> ComputeOp:
    """Return the wait of copies to the device for the last of their copies to the host."""
    name = f"{TO_HOST}~{back}" if back else TO_HOST
    return replace(wait((name,), Phase.DGRAD, "offload"), stream=TO_DEVICE, name="")


def note(host_bytes: int) -> str:
    """Return what a step with offloaded activations assumes. host_bytes: of a rank."""
    return (
        f"offload_modules: a rank's copies take up to {format_bytes(host_bytes)} of pinned host"
        " memory; device memory counts copies that keep up with computation"
    )


def refusals(plan: "Plan") -> Iterator[_Refusal]:
    """Yield what Megatron-LM refuses, what has no effect there, and what is not modelled."""
    settings = plan.settings
    words = settings.offload_words
    if not words:
        return
    backend = settings.attention_backend
    is_local = backend is AttentionBackend.LOCAL
    yield is_local, "attention_backend", backend, f"one of TransformerEngine's with {_NAME}"
    model = plan.model
    heads = {(own.num_heads, own.d_qk, own.d_v) for own in map(model.of_layer, model.layers)}
    others: tuple[tuple[object, str], ...] = (
        (settings.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm"),
        (plan.lora is not None, "lora_rank"),
        (settings.recompute_granularity is Granularity.FULL, "full recompute"),
        (any(layer.mixer != "attention" for layer in model.pattern), "scans"),
        (model.mla is not None and model.mla.indexer is not None, "sparse attention"),
        (len(heads) > 1, "layers with other heads"),
    )
    for is_there, what in others:
        yield is_there, _NAME, True, f"false with {what}, with which it is not modelled"
    for name in words:
        for is_there, allowed in _lacks(plan, name):
            yield is_there, "offload_modules", name, allowed
    blocks = [plan.tree.block(layer) for layer in model.layer_counts]
    groups = [group for block in blocks for group in groups_of(plan, block)]
    lacking = next((name for name in words if name not in {each.name for each in groups}), "")
    yield lacking, "offload_modules", lacking, "modules of this model"
    least = settings.min_offloaded_tensor_size
    is_idle = not any(group.copied for group in groups)
    allowed = "at most the elements of the largest tensor that offload_modules save"
    yield is_idle, "min_offloaded_tensor_size", least, allowed


def _lacks(plan: "Plan", name: str) -> Iterator[tuple[object, str]]:
    """Yield why a module is not offloaded: a condition, and what is allowed."""
    settings, model = plan.settings, plan.model
    recomputed = settings.modules
    is_latent = model.mla is not None
    again = "left out with recompute_modules {}: it would be offloaded and computed again"
    match name:
        case "attn_norm":
            fused = "left out without latent attention: its norm is inside of qkv_linear"
            yield not is_latent, fused
        case "core_attn":
            for word in ("core_attn", "mla_up_proj"):
                yield word in recomputed, again.format(word)
            unfused = settings.attention_backend is AttentionBackend.UNFUSED
            yield unfused, "left out with attention_backend unfused (not modelled)"
            yield has_fp8_attention(settings), "left out with attention in FP8 (not modelled)"
        case "qkv_linear":
            for word in ("layernorm", "mla_up_proj"):
                yield word in recomputed, again.format(word)
            has_norms = model.qk_norm and not is_latent
            yield has_norms, "left out with norms of queries and keys (not modelled)"
        case "mlp_norm":
            fused = "left out without experts: the norm is inside of a product"
            yield model.moe is None, fused
        case "expert_fc1" | "moe_act":
            yield model.moe is None, "left out for a model without experts"
            yield "moe" in recomputed, again.format("moe")
    if name in ("core_attn", "attn_proj"):
        yield model.gate, "left out with gates of attention (not modelled)"
    if name in _PRODUCTS:
        narrow = "left out with narrow products, which save casts of weights (not modelled)"
        yield plan.job.products is not None, narrow
