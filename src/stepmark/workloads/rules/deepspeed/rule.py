"""DeepSpeed's ZeRO: stage 0, 1, 2 or 3 over all data ranks.

DeepSpeed 0.19.8, deepspeed/runtime: engine.py (_broadcast_model, allreduce_gradients,
_do_optimizer_sanity_check), zero/stage_1_and_2.py and zero/stage3.py (step, hooks of
gradients), bf16_optimizer.py. The order of modules is in modules and huggingface, the gathers
of stage 3 are in zero3. Every message of runs of that version
on two, three and four ranks (CPU, gloo) is compared: tests/data/deepspeed.

Parameters are one group of the optimizer, in the order of registration. A collective of a
module's hook comes after all computation of that module.

Asynchronous messages are on one stream, whatever CUDA streams DeepSpeed has: gathers of stage
3 and, with overlap_comm, reductions use one group, whose communicator runs one at a time
(zero/stage3.py: _get_param_partition_group). Stages 1 and 2 then delay computation until the
buckets before are done (zero/stage_1_and_2.py: average_tensor). The host waits for the last
bucket of a backward pass.

Buckets: zero/stage_1_and_2.py (reduce_independent_p_g_buckets_and_remove_grads, average_tensor,
allreduce_and_scatter, allreduce_no_retain), zero/stage3.py (the same, __avg_scatter_grads),
comm/coalesced_collectives.py (reduce_scatter_coalesced), engine.py (allreduce_no_retain).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.collectives import Collective, RedOp
from stepmark.model.ops import Optimizer, Phase
from stepmark.step.host_memory import host_copy
from stepmark.step.module import Module as Leaf
from stepmark.step.workload import (
    Block,
    CommOp,
    ComputeOp,
    Item,
    Operation,
    Run,
    Stage,
    Workload,
)
from stepmark.workloads.architecture import AnyJob, OwnJob
from stepmark.workloads.fold import Repeat, fold, unfold
from stepmark.workloads.job import (
    TRAINED,
    Comms,
    Job,
    check_single,
    mesh_groups,
    plain_settings,
    refuse_first,
)
from stepmark.workloads.rules.deepspeed import huggingface, modules
from stepmark.workloads.rules.deepspeed.modules import COMPUTE, GRADS, Module, Param
from stepmark.workloads.rules.deepspeed.offload import (
    NOTE,
    gradient_copies,
    host_update,
    weights_to_host,
)
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed
from stepmark.workloads.rules.deepspeed.zero3 import Fetch, Pass, persistent, steady_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of the data-parallel group. elements: of the whole buffer."""

    collective: Collective
    elements: int
    root: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The division of the flat parameters of stages 1 and 2 among ranks.

    starts: of each parameter by its index. The end is padded so that every rank's share has an
    even number of elements (nccl_start_alignment_factor).
    """

    starts: dict[int, int]
    share: int
    ranks: int

    @property
    def total(self) -> int:
        return self.share * self.ranks

    def slices(self, param: Param) -> Iterator[tuple[int, int]]:
        """Yield (rank, elements) of a parameter, which may be divided among ranks."""
        start = self.starts[param.index]
        end = start + param.numel
        while start < end:
            owner = start // self.share
            stop = min(end, (owner + 1) * self.share)
            yield owner, stop - start
            start = stop


def shares(params: Iterable[Param], ranks: int, *, round_robin: bool = False) -> Shares:
    """round_robin: parameters i are sorted by i modulo ranks (_round_robin_reorder)."""
    order = list(params)
    if round_robin:
        order = [param for first in range(ranks) for param in order[first::ranks]]
    starts = {}
    total = 0
    for param in order:
        starts[param.index] = total
        total += param.numel
    return Shares(starts=starts, share=-(-total // (2 * ranks)) * 2, ranks=ranks)


def all_reduce_buckets(params: Iterable[Param], at_least: int) -> Iterator[Message]:
    """Yield stage 0's buckets of more than this size (engine.py: allreduce_no_retain)."""
    numel = 0
    for param in params:
        numel += param.numel
        if numel > at_least:
            yield Message(collective=Collective.ALL_REDUCE, elements=numel)
            numel = 0
    if numel:
        yield Message(collective=Collective.ALL_REDUCE, elements=numel)


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Gradients to be reduced together. shares: of stages 1 and 2; None at stage 3.

    A parameter that does not fit sends the bucket before it is added; one larger than the
    bucket is sent alone when the next one is ready.
    """

    settings: DeepSpeed
    ranks: int
    shares: Shares | None
    params: list[Param] = field(default_factory=list)
    elements: int = 0

    def ready(self, param: Param) -> list[Message]:
        """Add a parameter's gradient, and return the messages that are sent before."""
        is_full = self.elements + param.numel > self.settings.reduce_bucket_size
        sent = self.flush() if is_full else []
        self.params.append(param)
        self.elements += param.numel
        return sent

    def flush(self) -> list[Message]:
        """Empty the bucket, and return its messages."""
        if not self.params:
            return []
        if self.shares is None:
            sent = [self._scattered()]
        elif not (self.settings.reduce_scatter and self.settings.contiguous_gradients):
            sent = [Message(collective=Collective.ALL_REDUCE, elements=self.elements)]
        elif self.settings.use_multi_rank_bucket_allreduce:
            sent = list(self._cut(numel for _, numel in self._owned(self.shares)))
        else:
            by_owner: dict[int, list[int]] = {}
            for owner, numel in self._owned(self.shares):
                by_owner.setdefault(owner, []).append(numel)
            sent = [
                message
                for owner, numels in by_owner.items()
                for message in self._cut(numels, owner)
            ]
        self.params.clear()
        self.elements = 0
        return sent

    def _scattered(self) -> Message:
        """Return stage 3's message; a reduce-scatter pads parameters to the ranks."""
        settings = self.settings
        fits = settings.contiguous_gradients and self.elements <= settings.reduce_bucket_size
        if fits and not settings.reduce_scatter:
            return Message(collective=Collective.ALL_REDUCE, elements=self.elements)
        padded = sum(param.padded(self.ranks) for param in self.params)
        return Message(collective=Collective.REDUCE_SCATTER, elements=padded)

    def _owned(self, shares: Shares) -> Iterator[tuple[int, int]]:
        """Yield (owner, elements) of the slices that belong to one rank each."""
        for param in self.params:
            yield from shares.slices(param)

    def _cut(self, numels: Iterable[int], root: int | None = None) -> Iterator[Message]:
        """Yield messages of slices; only a large parameter's slices exceed a bucket."""
        collective = Collective.ALL_REDUCE if root is None else Collective.REDUCE
        elements = 0
        for numel in numels:
            elements += numel
            if elements > self.settings.reduce_bucket_size:
                yield Message(collective=collective, elements=elements, root=root)
                elements = 0
        if elements:
            yield Message(collective=collective, elements=elements, root=root)


_DP = "dp"  # the group, and the stream of its communicator
# names on this stream
_GATHER = "gather"
_REDUCE = "reduce"
# Names on the computation's stream: computation, and reductions for which it waits.
_COMPUTED = "computed"
_REDUCED = "reduced"


def reduction(comms: Comms, message: Message, dtype: DType) -> tuple[CommOp, ...]:
    """Return a reduction of gradients for which computation waits."""
    ops = comms(message.collective, message.elements, _DP, Phase.BWD, "gradients", dtype)
    return tuple(replace(op, root=message.root) for op in ops)


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Recorder of one micro-batch. items: (layer, operation); an operation's own layer is 0.

    follows: there is a micro-batch before, for whose end gathers wait.
    """

    parts: dict[str, Leaf]
    comms: Comms
    overlaps: bool
    divided: bool  # stage 3
    fetches: bool = False  # shards of weights are on the host
    follows: bool = False
    items: list[tuple[int | None, Operation]] = field(default_factory=list)
    gathers: int = 0
    reductions: int = 0  # asynchronous ones
    needed: int | None = None  # the gather that the next computation waits for
    awaited: int | None = None  # it also waits for the reduction so many before the newest
    computed: int | None = None  # place of the newest on the stream of computation
    added: int | None = None  # the same when the newest gradient was added to its bucket
    newest: str = ""  # name of the newest asynchronous message

    def fetch(self, module: Module, phase: Phase, fetch: Fetch) -> None:
        """Record the gathers of a module's hook."""
        for elements in fetch.gathers:
            ops = self.comms(
                Collective.ALL_GATHER,
                elements,
                _DP,
                phase,
                "weights",
                stream=_DP,
                name=_GATHER,
                after=self._before_gather(),
            )
            if self.fetches and elements:
                shard = elements // self.comms.groups[_DP].size * self.comms.dtype.itemsize
                # On the stream of the gather, which follows it.
                copy = replace(
                    host_copy(shard, "h2d", phase, "weights", _DP),
                    after=ops[0].after if ops else (),
                )
                self._put(module.layer, (copy,))
            self._put(module.layer, ops)
            self.gathers += len(ops)
            self.newest = _GATHER if ops else ""
        if fetch.needs is not None and self.gathers:
            self.needed = self.gathers - fetch.needs

    def compute(self, module: Module, phase: Phase) -> None:
        """Record a module's computation, in the backward pass in reverse order."""
        leaves = [self.parts[name] for name in module.parts if name in self.parts]
        if phase is Phase.FWD:
            ops = [op for leaf in leaves for op in leaf.fwd]
        else:
            ops = [op for leaf in reversed(leaves) for op in leaf.bwd]
        if not ops:
            return
        after = []
        if self.needed is not None:
            after.append(_newest(_GATHER, self.gathers - self.needed))
        if self.awaited is not None:
            after.append(_newest(_REDUCE, self.awaited))
        self.needed = self.awaited = None
        ops[0] = replace(ops[0], after=tuple(after))
        self.items += [(module.layer, op) for op in ops]
        self.computed = len(self.items) - 1

    def reduce(self, module: Module, messages: Sequence[Message], dtype: DType) -> None:
        """Record the messages that a gradient's hook sends before it adds the gradient."""
        if not self.overlaps:
            self._waited_for(module.layer, messages, dtype)
            return
        after = self._before_reduction() if messages or self.divided else ()
        for message in messages:
            ops = tuple(
                replace(op, stream=_DP, name=_REDUCE, after=after)
                for op in reduction(self.comms, message, dtype)
            )
            self.reductions += len(ops)
            self._put(module.layer, ops)
            self.newest = _REDUCE if ops else ""
        if messages and not self.divided:
            # To an owner the host waits before each message (allreduce_and_copy).
            distance = len(messages) if messages[0].root is None else 1
            self.awaited = distance if self.reductions > distance else None

    def finish(self, messages: Iterable[Message], dtype: DType) -> None:
        """Record the last bucket of a backward pass."""
        self._waited_for(None, messages, dtype, _REDUCED if self.divided else "")

    def _waited_for(
        self, layer: int | None, messages: Iterable[Message], dtype: DType, name: str = ""
    ) -> None:
        """Record reductions on the computation's stream, after all asynchronous messages."""
        after = (self.newest,) if self.newest else ()
        for message in messages:
            ops = reduction(self.comms, message, dtype)
            if ops:
                self._put(layer, tuple(replace(op, name=name, after=after) for op in ops))
                self.computed = len(self.items) - 1

    def _put(self, layer: int | None, ops: Iterable[Operation]) -> None:
        inside = None if layer is None else 0
        self.items += [(layer, replace(op, layer=inside, microbatch=0)) for op in ops]

    def _before_gather(self) -> tuple[str, ...]:
        """Return the dependencies; with overlap_comm the end of the previous micro-batch."""
        is_first = not self.gathers if self.overlaps else self.computed is None
        if is_first:
            return (_REDUCED,) if self.follows else ()
        return () if self.overlaps else self._computed()

    def _before_reduction(self) -> tuple[str, ...]:
        """Return the newest computation; at stage 3 that of the bucket's newest gradient.

        There __add_grad_to_ipg_bucket waits, and a bucket is sent before the next gradient.
        """
        added = self.added
        self.added = self.computed
        newest = self._computed()
        if not self.divided or added == self.computed:
            return newest
        return () if added is None else (_newest(_COMPUTED, 1),)

    def _computed(self) -> tuple[str, ...]:
        """Name the newest operation on the computation's stream, and return its name."""
        if self.computed is None:
            return ()
        layer, op = self.items[self.computed]
        name = _REDUCED if isinstance(op, CommOp) else _COMPUTED
        self.items[self.computed] = layer, replace(op, name=name)
        return (name,)


def _newest(name: str, before: int) -> str:
    return f"{name}~{before}" if before else name


@dataclass(slots=True, kw_only=True)
class Program:
    """Blocks by name; equal blocks are one."""

    blocks: dict[str, Block] = field(default_factory=dict)
    names: dict[Block, str] = field(default_factory=dict)

    def microbatches(self, recorders: Iterable[tuple[Recorder, int]]) -> Iterator[Item]:
        """Yield a Run for each recorder; equal neighbours are one Run."""
        first = 0
        counts = (
            (self._block(self._folded(recorder), "microbatch"), times)
            for recorder, times in recorders
        )
        for name, group in groupby(counts, key=lambda pair: pair[0]):
            times = sum(count for _, count in group)
            yield Run(block=name, times=times, microbatch=first, microbatch_step=1)
            first += times

    def _block(self, block: Block, kind: str) -> str:
        if block not in self.names:
            count = sum(name.startswith(f"{kind} ") for name in self.blocks)
            self.names[block] = f"{kind} {count + 1}"
            self.blocks[self.names[block]] = block
        return self.names[block]

    def _folded(self, recorder: Recorder) -> Block:
        items: list[Item] = []
        layers: list[tuple[int, str]] = []  # layers one after the other
        for layer, group in groupby(recorder.items, key=lambda item: item[0]):
            block = tuple(op for _, op in group)
            if layer is None:
                items += [*self._layers(layers), *block]
                layers = []
            else:
                layers.append((layer, self._block(block, "layer")))
        return (*items, *self._layers(layers))

    def _layers(self, layers: list[tuple[int, str]]) -> tuple[Item, ...]:
        """Return the Runs of layers, which may go up and then down."""
        items: list[Item] = []
        while layers:
            step = layers[1][0] - layers[0][0] if len(layers) > 1 else 1
            count = 1
            while count < len(layers) and layers[count][0] - layers[count - 1][0] == step:
                count += 1
            names = [name for _, name in layers[:count]]
            items += self._runs(fold(names), layers[0][0], step)
            layers = layers[count:]
        return tuple(items)

    def _runs(
        self, folded: tuple[str | Repeat[str], ...], layer: int, step: int
    ) -> tuple[Item, ...]:
        items: list[Item] = []
        for item in folded:
            if isinstance(item, str):
                items.append(Run(block=item, layer=layer))
                layer += step
                continue
            length = step * len(unfold(item.body))
            name = item.body[0]
            if len(item.body) > 1 or not isinstance(name, str):
                name = self._block(self._runs(item.body, 0, step), "layers")
            items.append(Run(block=name, times=item.times, layer=layer, layer_step=length))
            layer += length * item.times
        return tuple(items)

    def repeats(self, operations: Iterable[Operation]) -> Block:
        """Return operations of no layer, repeats as Runs."""
        return self._repeats(fold(tuple(operations)))

    def _repeats(self, folded: tuple[Operation | Repeat[Operation], ...]) -> Block:
        return tuple(
            Run(block=self._block(self._repeats(item.body), "repeat"), times=item.times)
            if isinstance(item, Repeat)
            else item
            for item in folded
        )


SOURCE = "deepspeedai/DeepSpeed 0.19.8: deepspeed/runtime/engine.py, zero, bf16_optimizer.py"
_STAGE_0_BUCKET = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE, engine.py; no setting changes it


def workload(job: AnyJob, settings: DeepSpeed) -> Workload:
    """Return the third or a later step. Raises ConfigError for jobs that DeepSpeed refuses."""
    plan = _Plan(job, settings)
    program = Program()
    step_end = program.repeats([*plan.boundary(), *plan.optimizer_step()])
    program.blocks["step"] = (*plan.microbatches(program), *step_end)
    setup = program.repeats(plan.setup())
    if setup:
        program.blocks["setup"] = setup
    stage = Stage(
        step="step",
        setup="setup" if setup else "",
        layers=tuple(range(job.num_layers)),
        has_embedding=True,
        has_head=True,
    )
    step = Workload(
        name=f"{job.name} deepspeed zero-{settings.stage}",
        rules="deepspeed",
        source=SOURCE,
        world_size=job.parallel.world_size,
        num_microbatches=job.num_microbatches,
        model=job.config,
        settings=plain_settings(settings),
        groups=plan.comms.groups,
        blocks=program.blocks,
        stages=(stage,),
        notes=tuple(plan.notes()),
    )
    step.check()
    return step


class _Plan:
    """Modules, shards and messages of a job."""

    def __init__(self, job: AnyJob, settings: DeepSpeed) -> None:
        allowed = "1: DeepSpeed's ZeRO is data-parallel"
        check_single(job.parallel, ("tp", "pp", "cp", "ep"), allowed)
        self.dtype = DType.FP32 if job.dtype is DType.TF32 else job.dtype
        if self.dtype not in TRAINED:
            raise ConfigError("dtype", job.dtype, "fp32, tf32, bf16 or fp16")
        if job.config and (packing := job.config.packing):
            allowed = "left out: these rules' attention masks no pieces (megatron, pytorch)"
            raise ConfigError("packing", packing.text, allowed)
        self.job = job
        if settings.is_offloaded:  # stage_1_and_2.py: contiguous_gradients or cpu_offload
            settings = replace(settings, contiguous_gradients=True)
        self.settings = settings
        groups = mesh_groups(job.parallel, {"dp": ("dp_shard", "dp_replicate")})
        self.comms = Comms(groups=groups, dtype=self.dtype)
        self.ranks = job.parallel.data_ranks
        self.sent_dtype = DType(settings.communication_data_type or self.dtype)
        self.accumulated = DType(settings.grad_accum_dtype or self.dtype)
        refuse_first(
            (
                settings.stage == 0 and self.accumulated is not self.dtype,
                "grad_accum_dtype",
                self.accumulated,
                f"{self.dtype} at stage 0, or empty",
            ),
            (
                self.flat and settings.is_offloaded,
                "offload_optimizer",
                settings.offload_optimizer,
                "none at stage 1 with fp32 accumulation, whose optimizer is not offloaded",
            ),
            (
                self.flat and not settings.compute_grad_norm,
                "compute_grad_norm",
                False,
                "true at stage 1 with bf16 and fp32 accumulation",
            ),
        )
        architecture = (
            job.architecture if isinstance(job, OwnJob) else huggingface.architecture(job)
        )
        # GPT-2's layers are Conv1D, to which DeepSpeed's own linear function does not apply.
        linears = isinstance(job, OwnJob) or huggingface.is_llama(job.model)
        tree = modules.modules_of(architecture, divided=settings.stage == 3 and linears)
        self.root = tree.root
        self.params = tree.params
        self.parts = tree.parts
        self.recreated = tree.tied
        if settings.stage == 3 and isinstance(job, Job) and job.model.mla is None:
            self.root = modules.with_leaves(self.root)
        self.shares = shares(
            self.params, self.ranks, round_robin=settings.round_robin_gradients
        )

    @property
    def flat(self) -> bool:
        """Whether stage 1 is BF16_Optimizer: all gradients in one buffer, one all-reduce."""
        is_mixed = self.dtype is DType.BF16 and self.accumulated is DType.FP32
        return self.settings.stage == 1 and is_mixed

    def microbatches(self, program: Program) -> Iterator[Item]:
        """Yield forward and backward passes."""
        times = self.job.num_microbatches
        if self.settings.stage == 3:
            passes = steady_step(
                self.root,
                self.params,
                self.settings,
                ranks=self.ranks,
                num_microbatches=times,
            )
            recorders = [
                (self._record(events, reduces=True, follows=index > 0 or count > 1), count)
                for index, (events, count) in enumerate(passes)
            ]
        else:
            hooks = (*modules.forward(self.root), *modules.backward(self.root))
            events = tuple((event, Fetch()) for event in hooks)
            reduces = self.settings.stage == 2
            recorders = [(self._record(events, reduces=reduces), times)]
            if self.settings.stage == 1 and self.settings.overlaps and not self.flat:
                last = (self._record(events, reduces=True), 1)
                recorders = [(recorders[0][0], times - 1), last] if times > 1 else [last]
        return program.microbatches(recorders)

    def _record(self, events: Pass, *, reduces: bool, follows: bool = False) -> Recorder:
        """Record one micro-batch. reduces: hooks fill buckets. follows: it is not the first."""
        recorder = Recorder(
            parts=self.parts,
            comms=self.comms,
            overlaps=self.settings.overlaps,
            divided=self.settings.stage == 3,
            fetches=self.settings.has_host_weights,
            follows=follows and any(kind == GRADS for (kind, _, _), _ in events),
        )
        bucket = self._bucket()
        for (kind, module, phase), fetch in events:
            if fetch.gathers or fetch.needs is not None:
                recorder.fetch(module, phase, fetch)
            if kind == COMPUTE:
                recorder.compute(module, phase)
            elif kind == GRADS and reduces:
                for param in module.grads:
                    recorder.reduce(module, bucket.ready(param), self.sent_dtype)
        recorder.finish(bucket.flush(), self.sent_dtype)
        return recorder

    def _bucket(self) -> Bucket:
        shares = None if self.settings.stage == 3 else self.shares
        return Bucket(settings=self.settings, ranks=self.ranks, shares=shares)

    def boundary(self) -> Iterator[Operation]:
        """Yield the reductions of stages 0 and 1 after the last backward pass of a step."""
        settings = self.settings
        sent = list[Message]()
        if settings.stage == 0:
            sent += all_reduce_buckets(self.params, _STAGE_0_BUCKET)
        elif self.flat:
            sent.append(Message(collective=Collective.ALL_REDUCE, elements=self.shares.total))
        elif settings.stage == 1 and not settings.overlaps:
            bucket = self._bucket()
            for param in self.params:
                sent += bucket.ready(param)
            sent += bucket.flush()
        for message in sent:
            yield from reduction(self.comms, message, self.sent_dtype)

    def optimizer_step(self) -> Iterator[Operation]:
        """Yield the checks for overflow, the norm, the update, and the gather of weights."""
        stage = self.settings.stage
        if self.settings.is_offloaded:
            yield from gradient_copies(
                self.updated,
                num_microbatches=self.job.num_microbatches,
                stage=stage,
                dtype=self.dtype,
                accumulated=self.accumulated,
            )
        if stage == 0:
            if self.dtype is DType.FP32 and self.settings.gradient_clipping:
                yield from self._scalar("norm", DType.FP32, RedOp.SUM)
            yield from self._update(sum(param.numel for param in self.params))
        elif stage == 3:
            yield from self._stage_3_step()
        else:
            checks = self.settings.check_grad_overflow and self.dtype is DType.BF16
            if (checks or self.dtype is DType.FP16) and not self.flat:
                yield from self._scalar("overflow", DType.UINT8, RedOp.MAX)
            if self.settings.compute_grad_norm and not self.flat:
                yield from self._scalar("norm", DType.FP32, RedOp.SUM)
            yield from self._update(self.updated)
            yield from self._gathered(self.shares.total)

    @property
    def updated(self) -> int:
        """Parameters whose optimizer states this rank has."""
        if self.settings.stage == 3:
            return sum(param.padded(self.ranks) // self.ranks for param in self.params)
        return self.shares.share

    def _stage_3_step(self) -> Iterator[Operation]:
        if self.dtype is DType.FP16:
            yield from self._scalar("overflow", DType.UINT8, RedOp.MAX)
        parts = [param.padded(self.ranks) // self.ranks for param in self.params]
        elements = 0
        for index, part in enumerate(parts):
            elements += part
            if elements >= self.settings.sub_group_size or index == len(parts) - 1:
                # Of gradients on the host: complete_grad_norm_calculation_for_cpu_offload.
                norm = DType.FP32 if self.settings.is_offloaded else DType.FP64
                yield from self._scalar("norm", norm, RedOp.SUM)
                elements = 0
        yield from self._update(self.updated)
        for param in persistent(self.params, self.settings):
            yield from self._gathered(param.padded(self.ranks))

    def _scalar(self, module: str, dtype: DType, redop: RedOp) -> tuple[CommOp, ...]:
        return self.comms(
            Collective.ALL_REDUCE, 1, "dp", Phase.OPTIM, module, dtype, redop=redop
        )

    def _update(self, num_params: int) -> Iterator[ComputeOp]:
        if self.settings.is_offloaded:
            has_weights = not self.settings.has_host_weights
            yield from host_update(num_params, dtype=self.dtype, has_weights=has_weights)
            return
        op = Optimizer(num_params=num_params, dtype=DType.FP32)
        yield ComputeOp(op=op, phase=Phase.OPTIM, module="optimizer")
        if self.settings.has_host_weights:
            yield weights_to_host(num_params)

    def _gathered(
        self, elements: int, phase: Phase = Phase.OPTIM, module: str = "optimizer"
    ) -> tuple[CommOp, ...]:
        return self.comms(Collective.ALL_GATHER, elements, "dp", phase, module)

    def setup(self) -> Iterator[Operation]:
        """Yield deepspeed.initialize: a broadcast of rank 0's weights, divided at stage 3.

        Under zero.Init a tied head has its own weights until it is tied.
        """
        divided = self.settings.stage == 3
        early = self.settings.zero_init
        send = partial(
            self.comms, group="dp", phase=Phase.FWD, module="setup", dtype=DType.UINT8
        )
        broadcast = [
            *self.params,
            *(self.recreated if early else self.params if divided else ()),
        ]
        for param in broadcast:
            size = param.numel * self.dtype.itemsize
            for op in send(Collective.BROADCAST, size):
                yield replace(op, root=0)
        if divided:
            for _ in range(3):
                yield from send(Collective.BARRIER, 0)
            for param in self.params:
                yield from self._gathered(param.padded(self.ranks), Phase.FWD, "setup")

    def notes(self) -> Iterator[str]:
        if self.settings.is_offloaded:
            yield NOTE
        if isinstance(self.job, Job):
            family = "Llama" if huggingface.is_llama(self.job.model) else "GPT-2"
            yield f"modules and parameters in the order of Hugging Face's {family}"
        if self.settings.stage == 3:
            yield (
                "the first micro-batch of a job, not shown, gathers the weights of each module"
                " by themselves while the order of modules is traced"
            )
        if self.settings.stage == 0 and self.settings.reduce_bucket_size != _STAGE_0_BUCKET:
            yield f"reduce_bucket_size has no effect at stage 0: buckets of {_STAGE_0_BUCKET}"
