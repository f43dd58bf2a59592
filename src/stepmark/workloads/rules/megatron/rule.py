"""Megatron-LM: one training step of each pipeline stage.

Rules are those of megatron-core 0.16.1 and of megatron/training of NVIDIA/Megatron-LM,
core_v0.16.1 (55ac7082517c3878ae653c07c09c534b8aed49f6), with TransformerEngine's layers where
they differ from the local ones. Each module of rules/megatron names its source files, and the
parts of it that were compared with a run or only read.

Assumptions: routing is balanced; the step is not the first one, in which overlapped reductions
wait for the end of the backward pass; the embedding is trained, so the first layer has a data
gradient like any other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache

from stepmark.cases.message import RECV, SEND
from stepmark.model.ops import Phase
from stepmark.step.workload import COMPUTE, Block, CommOp, Item, Run, Stage, Workload
from stepmark.workloads.job import Job
from stepmark.workloads.pipeline import (
    COMPUTE_DONE,
    FORWARD_TRANSFERS,
    SENDS,
    TRANSFERS,
    WITH_NEXT_STAGE,
    Act,
    Action,
    Pass,
    Pipeline,
    Span,
    Tick,
    passes_of,
    program,
    schedule,
    wait,
    with_variants,
)
from stepmark.workloads.rules.megatron import activation_offload, cpu_offload, gradients, muon
from stepmark.workloads.rules.megatron.activation_offload import (
    PassCopies,
    Reloads,
    Sends,
    StageCopies,
)
from stepmark.workloads.rules.megatron.chunk import (
    Library,
    Segment,
    backward_segments,
    combined_runs,
    first_forward,
    forward_segments,
    kinds_of,
    last_backward,
)
from stepmark.workloads.rules.megatron.deepep import GPUS_PER_HOST
from stepmark.workloads.rules.megatron.gradients import StageParams
from stepmark.workloads.rules.megatron.plan import Plan, make_plan
from stepmark.workloads.rules.megatron.settings import DispatchDtype, Megatron
from stepmark.workloads.rules.megatron.stage_partition import Chunk, partition
from stepmark.workloads.rules.megatron.steps import with_deps

__all__ = ["Megatron", "workload"]

_LARGE_MASK_BYTES = 2**30


def notes_of(job: Job, plan: Plan) -> Iterator[str]:
    """Yield notes of settings that have no effect, were changed, or are easily overlooked.

    Source of gathers: optimizer/optimizer.py (ChainedOptimizer.step_with_ready_grads) and
    distrib_optimizer.py (step_with_ready_grads: start_param_sync of each model chunk, whose
    bucket groups are those of dense parameters and of experts).
    """
    settings = plan.settings
    if settings.optimizer_cpu_offload:
        yield cpu_offload.NOTE
    parallel = plan.job.parallel
    if plan.model.vocab_size != job.model.vocab_size:
        yield f"vocabulary padded from {job.model.vocab_size} to {plan.model.vocab_size}"
    has_middle = parallel.pp * settings.virtual_pipeline_model_parallel_size > 2
    if plan.model.packing is not None and has_middle:
        yield (
            "pretrain_gpt.py of this version gives chunks between the first and the last no"
            " boundaries of packed pieces, so that attention there would be over whole"
            " sequences; this step is of a loader that gives them to all chunks"
        )
    masks = settings.create_attention_mask_in_dataloader and plan.tp > 1
    size = job.mbs * job.model.seq_len**2  # a byte per pair of tokens
    if masks and size >= _LARGE_MASK_BYTES:
        yield (
            f"each micro-batch's attention mask, {size / 2**30:.4g} GiB, is broadcast over tp;"
            " --no-create-attention-mask-in-dataloader leaves it out"
        )
    yield from _notes_of_hops(plan)
    if (
        settings.use_distributed_optimizer
        and not settings.overlap_param_gather
        and plan.job.parallel.ep > 1
        and max(plan.size("intra_dp_cp"), plan.size("intra_expt_dp")) > 1
    ):
        yield (
            "parameters are gathered twice per step: the optimizer of the dense ones and that"
            " of the experts each gather all (ChainedOptimizer); with overlap_param_gather once"
        )


def _notes_of_hops(plan: Plan) -> Iterator[str]:
    """Yield what the flex dispatcher's messages assume."""
    hops = plan.hops
    if hops is None:
        return
    reached = f"{hops.num_hosts * hops.host_share:.4g} of {hops.num_hosts} hosts and "
    if hops.num_hosts == 1:
        reached = ""
    reached += f"{hops.num_ranks * hops.rank_share:.4g} of {hops.num_ranks} ranks"
    yield (
        f"a token goes to {reached} in the mean, where its router has no preference; DeepEP's"
        " own buffers are not counted as memory"
    )
    if plan.settings.moe_deepep_gpus_per_host != GPUS_PER_HOST:
        yield f"DeepEP is built for {GPUS_PER_HOST} GPUs of a host (NUM_MAX_NVL_PEERS)"
    if plan.settings.dispatch_dtype is DispatchDtype.FP8:
        yield (
            "dispatch in fp8 is DeepSeek-V3's (core_v0.16.1 dispatches bf16); received rows are"
            " cast back to bf16 by a kernel of their own"
        )


_COMPUTES = (Act.FORWARD, Act.BACKWARD, Act.COMBINED, Act.WAIT)


def with_async_deps(
    spans: Iterable[Span], in_flight: Callable[[Action], tuple[str, ...]], *, blocking: bool
) -> tuple[Span, ...]:
    """Make asynchronous actions start after the computation that was issued before them.

    in_flight: names of the collectives that an action leaves in flight. blocking: a call of
    transfers waits for all of them (torch.cuda.synchronize) and not only for its own.

    PyTorch lets an asynchronous collective or transfer wait for the current stream at the call
    (c10d, ProcessGroupNCCL.cpp, syncStream). Source of the rest, read only:
    pipeline_parallel/p2p_communication.py (_communicate, batch_p2p_sync).
    """
    begun = False  # the step has computed or waited: asynchronous actions have a dependency
    pending: dict[str, None] = {}

    def lowered(tick: Tick) -> Iterator[Action]:
        nonlocal begun
        for action, following in zip(tick, (*tick[1:], None), strict=True):
            moves = action.act in TRANSFERS
            computes = action.act in _COMPUTES or (moves and blocking)
            yield action if computes or not begun else replace(action, after=(COMPUTE_DONE,))
            begun = begun or computes
            if not blocking:
                continue
            if action.act is Act.FORWARD and action.edge:  # waits for its own parameters
                for name in in_flight(replace(action, act=Act.GATHER)):
                    pending.pop(name, None)
            pending.update(dict.fromkeys(in_flight(action)))
            if moves and pending and not (following and following.fused):
                yield Action(act=Act.WAIT, after=tuple(pending))
                pending.clear()

    return tuple(
        replace(span, ticks=tuple(tuple(lowered(tick)) for tick in span.ticks))
        for span in spans
    )


_SOURCE = (
    "NVIDIA/Megatron-LM core_v0.16.1 (55ac708): megatron/core/tensor_parallel/layers.py,"
    " megatron/core/pipeline_parallel/schedules.py,"
    " megatron/core/distributed/param_and_grad_buffer.py,"
    " megatron/core/transformer/moe/token_dispatcher.py, megatron/training/training.py"
)


def workload(job: Job, settings: Megatron) -> Workload:
    """Return one training step. Raises ConfigError for jobs that Megatron-LM refuses."""
    plan = make_plan(job, settings)
    settings = plan.settings
    parallel = plan.job.parallel
    chunks_by_stage, notes = partition(plan)
    pipeline = plan.pipeline
    blocks: dict[str, Block] = {}
    library = Library(plan, blocks)
    builders = [
        _StageBuilder(pipeline, library, index, chunks)
        for index, chunks in enumerate(chunks_by_stage)
    ]
    stages = [builder.build() for builder in builders]
    host_bytes = max(builder.host_bytes for builder in builders)
    offload = (activation_offload.note(host_bytes),) if settings.offload_words else ()
    return Workload(
        name=job.model.name,
        rules="megatron",
        source=_SOURCE,
        world_size=parallel.world_size,
        num_microbatches=plan.job.num_microbatches,
        model=plan.model,
        settings={
            "tensor_model_parallel_size": parallel.tp,
            "pipeline_model_parallel_size": parallel.pp,
            "context_parallel_size": parallel.cp,
            "expert_model_parallel_size": parallel.ep,
            "num_distributed_optimizer_instances": parallel.dp_replicate,
            "micro_batch_size": plan.job.mbs,
            "global_batch_size": plan.job.global_batch,
            "seq_length": plan.model.seq_len,
            **asdict(settings),
        },
        groups=plan.comms.groups,
        blocks=blocks,
        stages=tuple(stages),
        notes=(*notes, *notes_of(job, plan), *offload),
    )


class _StageBuilder:
    """The blocks of one stage, which are added to those of the library."""

    def __init__(
        self, pipeline: Pipeline, library: Library, index: int, chunks: tuple[Chunk, ...]
    ) -> None:
        self.pipeline = pipeline
        self.library = library
        self.index = index
        self.chunks = chunks
        self.plan = plan = library.plan
        self.blocks = library.blocks
        of_model = kinds_of(plan)
        kinds = [[of_model[unit] for unit in chunk.units] for chunk in chunks]
        params = tuple(
            gradients.chunk_params(plan, chunk, [kind.name for kind in own], library.of_layer)
            for chunk, own in zip(chunks, kinds, strict=True)
        )
        self.params = StageParams(
            params=params,
            buckets=tuple(
                gradients.buckets(
                    plan, own, split=index == 0 and number == 0, together=number > 0
                )
                for number, own in enumerate(params)
            ),
            is_first=index == 0,
            is_last=index == pipeline.num_stages - 1,
            moe_layers=sum(kind.layer.has_experts for own in kinds for kind in own),
        )
        self.kinds = kinds
        self.host_bytes = 0
        # By chunk, direction and copies of its layers the number of a pass's block.
        self.copies: dict[tuple[int, bool, PassCopies], int] = {}
        self.variants: list[tuple[str, int | None]] = [
            ("", None)
        ]  # suffix of block, PassCopies.back

    def build(self) -> Stage:
        plan = self.plan
        index = self.index
        step = f"stage{index}.step"
        spans = schedule(
            self.pipeline, index, gathers=self.aligned_gathers, reduces=self.aligned_reduces
        )
        if plan.settings.offload_words:
            spans = self.with_copies(spans)
        self.passes()
        pipeline = self.pipeline
        blocking = pipeline.num_chunks > 1 and not pipeline.overlap
        spans = with_async_deps(spans, self.in_flight, blocking=blocking)
        items = program(spans, self.lower, self.blocks, f"stage{index}.")
        if plan.settings.optimizer.is_muon:
            updated = muon.update(plan, self.params, self.blocks)
        else:
            updated = gradients.update(plan, self.params)
        end = gradients.end_of_step(plan, self.params, updated)
        self.blocks[f"stage{index}.finish"] = end
        self.blocks[step] = (*items, Run(block=f"stage{index}.finish"))
        return Stage(
            step=step,
            setup=self.setup(),
            layers=tuple(layer for chunk in self.chunks for layer in chunk.layers),
            has_embedding=any(chunk.has_embedding for chunk in self.chunks),
            has_head=any(chunk.has_head for chunk in self.chunks),
        )

    @property
    def aligned_gathers(self) -> bool:
        settings = self.plan.settings
        return (
            settings.overlap_param_gather
            and settings.align_param_gather
            and self.pipeline.num_chunks > 1
        )

    @property
    def aligned_reduces(self) -> bool:
        """grad_sync_func; the first stage of plain 1F1B reduces in its last backward pass."""
        settings = self.plan.settings
        return (
            settings.overlap_grad_reduce
            and settings.align_grad_reduce
            and (self.pipeline.num_chunks > 1 or self.index > 0)
        )

    def with_copies(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return spans whose passes have the numbers of their copies to and from the host."""
        groups = [[self.library.groups[kind] for kind in own] for own in self.kinds]
        copies = StageCopies(groups, passes_of(spans))
        self.host_bytes = copies.host_bytes

        def number_of(place: Pass) -> int:
            chunk, _, is_forward = place
            own = copies.passes[place]
            key = (chunk, is_forward, replace(own, back=None))
            variant = (f".{self.copies.setdefault(key, len(self.copies))}", own.back)
            if variant not in self.variants:
                self.variants.append(variant)
            return self.variants.index(variant)

        return tuple(with_variants(spans, cache(number_of)))

    def passes(self) -> None:
        """Add forward and backward blocks of the chunks, and those of the step's edges."""
        for number in range(len(self.chunks)):
            if not self.copies:
                self.forward_pass(number, (), "")
                self.backward_pass(number, (), "")
        for (number, is_forward, copies), block in self.copies.items():
            if is_forward:
                self.forward_pass(number, copies.sends, f".{block}")
            else:
                self.backward_pass(number, copies.reloads, f".{block}")

    def forward_pass(self, number: int, sends: Sequence[Sends], suffix: str) -> None:
        forward = forward_segments(self.library, self.chunks[number], sends)
        self.put(f"forward{number}{suffix}", forward)
        if self.plan.settings.overlap_param_gather and not self.aligned_gathers:
            begun = self.index > 0 or number > 0
            buckets = self.params.buckets[number]
            changed = first_forward(self.library, forward, buckets, begun=begun)
            self.put(f"forward{number}{suffix}.first", changed)

    def backward_pass(self, number: int, reloads: Sequence[Reloads], suffix: str) -> None:
        backward = backward_segments(self.library, self.chunks[number], reloads)
        self.put(f"backward{number}{suffix}", backward)
        if self.plan.settings.overlap_grad_reduce and not self.aligned_reduces:
            changed = last_backward(self.library, backward, self.params.buckets[number])
            self.put(f"backward{number}{suffix}.last", changed)

    def put(self, name: str, segments: list[Segment]) -> None:
        self.blocks[f"stage{self.index}.{name}"] = self.library.runs(segments)

    def lower(self, action: Action) -> tuple[Item, ...]:
        """Return the items of an action."""
        match action.act:
            case Act.FORWARD | Act.BACKWARD:
                return self.run(action)
            case Act.COMBINED:
                return combined_runs(
                    self.library,
                    self.chunks[action.chunk],
                    self.chunks[action.backward_chunk],
                    (action.microbatch, action.backward_microbatch),
                )
            case Act.WAIT:
                return (wait(action.after, Phase.FWD, "pipeline"),)
            case Act.REDUCE:
                return with_deps(self.reduces(action.chunk), action.after)
            case Act.GATHER:
                return with_deps(self.gathers(action.chunk), action.after)
            case _:
                return self.transfer(action)

    def run(self, action: Action) -> tuple[Item, ...]:
        suffix, back = self.variants[action.variant]
        name = f"stage{self.index}.{action.act}{action.chunk}{suffix}"
        edge = ".first" if action.act is Act.FORWARD else ".last"
        if action.edge and name + edge in self.blocks:
            name += edge
        run = Run(block=name, microbatch=action.microbatch)
        if back is not None:
            return (activation_offload.awaits_sent(back), run)
        if not (action.edge and action.act is Act.FORWARD and self.aligned_gathers):
            return (run,)
        names = self.in_flight(replace(action, act=Act.GATHER))
        return (wait(names, Phase.FWD, "parameters"), run) if names else (run,)

    def in_flight(self, action: Action) -> tuple[str, ...]:
        """Return the names of collectives that are in flight when an action ends."""
        is_last = action.act is Act.BACKWARD and action.edge
        if action.act is Act.REDUCE or (
            is_last and self.plan.settings.overlap_grad_reduce and not self.aligned_reduces
        ):
            return gradients.names_of(self.plan, self.params.buckets[action.chunk])
        if action.act is Act.GATHER:
            return tuple(dict.fromkeys(op.name for op in self.gathers(action.chunk)))
        return ()

    def reduces(self, chunk: int) -> tuple[CommOp, ...]:
        return tuple(
            op
            for bucket in self.params.buckets[chunk]
            for op in gradients.reduce(self.plan, bucket, overlapped=True)
        )

    def gathers(self, chunk: int) -> tuple[CommOp, ...]:
        """Return the gathers of a chunk's parameters in the forward pass, if any are there."""
        if not self.plan.settings.overlap_param_gather:
            return ()  # buffers of other optimizers are of any size and are not gathered
        return tuple(
            op
            for bucket in self.params.buckets[chunk]
            for op in gradients.gather(
                self.plan, bucket, name=f"{gradients.stream_of(bucket)}.parameters{chunk}"
            )
        )

    def transfer(self, action: Action) -> tuple[Item, ...]:
        """Return a transfer of this rank's hidden states of a micro-batch, or their gradients.

        Source: get_tensor_shapes of schedules.py: sequence / cp, and / tp with sequence
        parallelism.
        """
        sends = action.act in SENDS
        to_next = action.act in WITH_NEXT_STAGE
        group = "pp"
        peer = 1 if to_next else -1
        stream = self.stream(sends=sends, to_next=to_next)
        if stream in ("pp.send", "pp.recv") and sends is bool(self.index % 2):
            group = "world"
            peer *= self.plan.job.parallel.world_size // 2
        return self.plan.comms(
            SEND if sends else RECV,
            self.plan.own_tokens * self.plan.model.hidden_size,
            group,
            Phase.FWD if action.act in FORWARD_TRANSFERS else Phase.DGRAD,
            "pipeline",
            microbatch=action.microbatch,
            stream=stream,
            name=COMPUTE_DONE if stream == COMPUTE else str(action.act),
            after=() if stream == COMPUTE else action.after,
            peer=peer,
            fused=action.fused,
        )

    def stream(self, *, sends: bool, to_next: bool) -> str:
        """Return the stream of a pair's communicator; two stages use the world's one way."""
        if self.pipeline.num_chunks == 1 or not self.pipeline.overlap:
            return COMPUTE
        if self.pipeline.num_stages == 2:
            return "pp.send" if sends else "pp.recv"
        return "pp.next" if to_next else "pp.prev"

    def setup(self) -> str:
        """Add the sum that gives first and last stage equal tables (language_module.py)."""
        plan = self.plan
        ends = self.params.is_first or self.params.is_last
        if not (gradients.has_table_twice(plan) and ends):
            return ""
        table = plan.model.vocab_size // plan.tp * plan.model.hidden_size
        ops = plan.comms("all_reduce", table, "embd", Phase.OPTIM, "embedding")
        if ops:
            self.blocks["setup"] = ops
        return "setup" if ops else ""
