"""Gathers and releases of ZeRO stage 3: DeepSpeed's parameter coordinator, step by step.

DeepSpeed 0.19.8, deepspeed/runtime/zero: partitioned_param_coordinator.py (fetch_sub_module,
release_sub_module, __params_to_release, reset_step), parameter_offload.py (hooks,
mark_persistent_parameters), stage3.py (step: all is partitioned, then persistent parameters are
gathered one by one).

The order of modules is traced in the first two micro-batches and kept; the parameters that a
module may release are determined in the next micro-batch and kept as well (__params_to_release
is cached). So training is simulated from its beginning until steps are equal.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepmark.workloads.rules.deepspeed.modules import (
    ENTER,
    LEAVE,
    Event,
    Module,
    Param,
    all_params,
    backward,
    forward,
)
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A module's hook: its gathers in order, and the gather for which it waits.

    needs: the number of gathers issued since the one that this module waits for, including its
    own prefetch: 0 is the newest. None: it waits for none.
    """

    gathers: tuple[int, ...] = ()  # elements, each parameter padded to the ranks
    needs: int | None = None


Pass = tuple[tuple[Event, Fetch], ...]  # of one micro-batch; only ENTER fetches


def persistent(params: Iterable[Param], settings: DeepSpeed) -> tuple[Param, ...]:
    """Return the parameters that stay whole between steps."""
    whole_params: list[Param] = []
    total = 0
    for param in params:
        if param.numel + total > settings.stage3_model_persistence_threshold:
            continue
        if param.numel <= settings.stage3_param_persistence_threshold:
            whole_params.append(param)
            total += param.numel
    return tuple(whole_params)


def steady_step(
    root: Module,
    params: tuple[Param, ...],
    settings: DeepSpeed,
    *,
    ranks: int,
    num_microbatches: int,
) -> tuple[tuple[Pass, int], ...]:
    """Return the micro-batches of the third and later steps: (pass, times)."""
    coordinator = Coordinator(root=root, params=params, settings=settings, ranks=ranks)
    passes: tuple[tuple[Pass, int], ...] = ()
    for _ in range(3):
        passes = _step(coordinator, num_microbatches)
        coordinator.available = set(coordinator.kept)
    return passes


def _step(coordinator: "Coordinator", num_microbatches: int) -> tuple[tuple[Pass, int], ...]:
    """Return a step. Micro-batches that begin in the state of the previous one equal it."""
    passes: list[tuple[Pass, int]] = []
    begun: frozenset[int] | None = None
    for index in range(num_microbatches):
        begins = frozenset(coordinator.available)
        traced = coordinator.is_traced
        if traced and begins == begun:
            done, times = passes[-1]
            passes[-1] = (done, times + num_microbatches - index)
            break
        passes.append((coordinator.micro_batch(), 1))
        begun = begins if traced else None
    return tuple(passes)


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """State of one rank. available: whole parameters, by index, between micro-batches."""

    root: Module
    params: tuple[Param, ...]
    settings: DeepSpeed
    ranks: int
    available: set[int] = field(default_factory=set)
    kept: frozenset[int] = frozenset()
    is_traced: bool = False
    events: tuple[Event, ...] = ()
    order: tuple[Module, ...] = ()
    trace: tuple[tuple[Param, int], ...] = ()  # (parameter, step of its use)
    releases: dict[int, frozenset[int]] = field(default_factory=dict)  # by place in events
    inside: dict[int, tuple[Param, ...]] = field(default_factory=dict)  # by a module's id
    inflight: dict[int, int] = field(default_factory=dict)  # parameter: number of its gather
    active: dict[int, int] = field(default_factory=dict)  # parameter: modules that use it
    last_use: dict[int, int] = field(default_factory=dict)  # of parameters removed from queue
    queue: deque[tuple[Param, int]] = field(default_factory=deque)
    step: int = 0  # modules entered
    live: int = 0  # elements fetched and not released
    issued: int = 0  # gathers

    def __post_init__(self) -> None:
        self.kept = frozenset(param.index for param in persistent(self.params, self.settings))
        self.events = (*forward(self.root), *backward(self.root))
        self.order = tuple(module for kind, module, _ in self.events if kind == ENTER)
        self.trace = tuple(
            (param, step)
            for step, module in enumerate(self.order)
            for param in sorted(module.params, key=lambda param: param.index)
        )

    def micro_batch(self) -> Pass:
        """Return one forward and backward pass; the very first one is not traced yet."""
        self.available -= self.inflight.keys()
        self.inflight.clear()
        self.active.clear()
        self.last_use.clear()
        self.queue = deque(self.trace)
        self.step = self.live = self.issued = 0
        fetches: list[tuple[Event, Fetch]] = []
        for place, event in enumerate(self.events):
            kind, module, _ = event
            fetch = Fetch()
            if kind == ENTER:
                fetch = self._enter(module)
            elif kind == LEAVE:
                self._leave(module, place)
            fetches.append((event, fetch))
        # Release modules whose input has no gradient: no hook runs after their backward.
        for kind, module, _ in self.events:
            if kind == ENTER and not module.input_grad:
                for param in module.params:
                    self.active[param.index] = 0
                self._release(param for param in module.params if param.index not in self.kept)
        self.is_traced = True
        return tuple(fetches)

    def _enter(self, module: Module) -> Fetch:
        gathers = self._gather(module.params)
        waited: int | None = None
        for param in module.params:
            self.active[param.index] = self.active.get(param.index, 0) + 1
            if param.index in self.inflight:
                waited = max(waited or 0, self.inflight.pop(param.index))
                self.available.add(param.index)
        if self.is_traced:
            gathers += self._prefetch(module)
        self.step += 1
        needs = None if waited is None else self.issued - waited
        return Fetch(gathers=tuple(gathers), needs=needs)

    def _gather(self, params: Iterable[Param]) -> list[int]:
        """Gather parameters that are neither available nor in flight, in one message."""
        missing = [
            param
            for param in params
            if param.index not in self.available and param.index not in self.inflight
        ]
        if not missing:
            return []
        self.issued += 1
        for param in missing:
            self.inflight[param.index] = self.issued
            self.live += param.numel
        return [sum(param.padded(self.ranks) for param in missing)]

    def _prefetch(self, module: Module) -> list[int]:
        """Remove this module's parameters from the queue, and gather a bucket of the next."""
        due = {param.index for param in module.params if self._last(param.index) < self.step}
        dequeued: set[int] = set()
        while self.queue and len(dequeued) < len(due):
            param, step = self.queue.popleft()
            self.last_use[param.index] = step
            dequeued.add(param.index)
        if not self.settings.stage3_prefetch_bucket_size:
            return []
        room = min(
            self.settings.stage3_max_live_parameters - self.live,
            self.settings.stage3_prefetch_bucket_size,
        )
        prefetched: dict[int, Param] = {}
        numel = 0
        while self.queue and numel < room:
            param, step = self.queue.popleft()
            self.last_use[param.index] = max(self._last(param.index), step)
            is_away = param.index not in self.available and param.index not in self.inflight
            if is_away and param.index not in prefetched:
                prefetched[param.index] = param
                numel += param.numel
        return self._gather(prefetched.values())

    def _last(self, index: int) -> int:
        return self.last_use.get(index, -1)

    def _leave(self, module: Module, place: int) -> None:
        for param in module.params:
            self.active[param.index] -= 1
        if not self.is_traced:
            self._release(module.params)
            return
        if place not in self.releases:
            self.releases[place] = self._releasable(module)
        releasable = self.releases[place]
        self._release(param for param in module.params if param.index in releasable)

    def _releasable(self, module: Module) -> frozenset[int]:
        """Return parameters that do not persist, have no later use, and do not recur soon.

        Modules ahead count with all parameters inside them if this one is a leaf, else with
        only their own, and leaves with none (iter_params in __params_to_release).
        """
        releasable = {
            param.index
            for param in module.params
            if param.index not in self.kept and self._last(param.index) <= self.step
        }
        distance = 0
        for later in self.order[self.step :]:
            if distance >= self.settings.stage3_max_reuse_distance or not releasable:
                break
            for param in self._ahead(later, deep=module.is_leaf):
                releasable.discard(param.index)
                distance += param.numel
        return frozenset(releasable)

    def _ahead(self, later: Module, *, deep: bool) -> tuple[Param, ...]:
        if not deep:
            return () if later.is_leaf else later.params
        if id(later) not in self.inside:
            self.inside[id(later)] = all_params(later)
        return self.inside[id(later)]

    def _release(self, params: Iterable[Param]) -> None:
        for param in params:
            if param.index in self.available and not self.active.get(param.index):
                self.available.discard(param.index)
                self.live -= param.numel
