"""The memory estimate: exact for state, the paper's for activations, never against reason."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.cases.train_case import TrainCase
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    Precision,
    Recompute,
)
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import Collective
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.ops import Attention, Phase
from stepmark.model.parallel import ParallelConfig, PipelineSchedule, StageSplit, TpPlan
from stepmark.step.workload import CommOp, ComputeOp
from stepmark.step_memory.allocator import Allocator, Block
from stepmark.step_memory.memory import estimate, largest_mbs, stage_estimates, verdict
from stepmark.workloads.rules.pytorch.case import of_case

GPT = find_model("gpt2-1.5b")
LLAMA = find_model("llama-3.1-8b")
GIB = 2**30
# Eight layers: enough for four stages and both kinds of DeepSeek's, and soon replayed.
MODELS = st.sampled_from(
    [
        dataclasses.replace(find_model(name), num_layers=8)
        for name in ("gpt2-1.5b", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b")
    ]
)
few = settings(max_examples=40)


@st.composite
def cases(draw: st.DrawFn) -> TrainCase:
    """Any combination of what the estimate looks at."""
    data_parallel = draw(st.sampled_from(DataParallel))
    shards = draw(st.sampled_from([1, 2, 8])) if data_parallel is DataParallel.FSDP else 1
    return TrainCase(
        model=draw(MODELS),
        mbs=draw(st.integers(1, 16)),
        parallel=ParallelConfig(
            tp=draw(st.sampled_from([1, 2, 4])),
            pp=draw(st.sampled_from([1, 2, 4])),
            dp_shard=shards,
        ),
        data_parallel=data_parallel,
        grad_accum=draw(st.sampled_from([1, 8])),
        precision=draw(st.sampled_from(Precision)),
        compile=draw(st.sampled_from(CompileScope)),
        recompute=draw(st.sampled_from(Recompute)),
        recompute_blocks=draw(st.sampled_from([(1, 2), (1, 4), (3, 4)])),
        loss_chunks=draw(st.sampled_from([1, 8])),
        reshard=draw(st.sampled_from(["yes", "no"])),
        prefetch=draw(st.integers(1, 3)),
        blocks_per_group=draw(st.sampled_from([1, 2])),
    )


def case(**more: Any) -> TrainCase:
    plain = {"model": GPT, "mbs": 4, "precision": Precision.AMP}
    return TrainCase(**{**plain, **more})


@few
@given(cases())
def test_parts_add_up(case: TrainCase) -> None:
    memory = estimate(case)
    parts = memory.kinds
    assert min(parts.values()) >= 0
    assert memory.resting_bytes < memory.allocated_bytes <= memory.reserved_bytes
    assert sum(parts.values()) == memory.allocated_bytes
    assert memory.rounding_bytes < 0.1 * memory.allocated_bytes
    assert memory.weights_bytes + memory.optimizer_bytes < memory.allocated_bytes


@few
@given(cases())
def test_gradients_are_there_where_they_must_be(case: TrainCase) -> None:
    """Masters', and DDP's buckets, always; others by the end of a backward pass."""
    memory = estimate(case)
    if case.precision is Precision.MASTER:
        assert memory.gradients_bytes >= memory.optimizer_bytes // 2
    elif case.data_parallel is DataParallel.DDP:
        assert memory.gradients_bytes >= memory.weights_bytes
    state = memory.weights_bytes + memory.optimizer_bytes
    assert memory.allocated_bytes > state + memory.optimizer_bytes // 2


def test_whole_gradients_that_wait_for_their_reduction_are_counted() -> None:
    """FSDP keeps them in the reduced dtype until the last micro-step, or the end of a pass."""
    plain = case(
        model=LLAMA,
        parallel=ParallelConfig(dp_shard=8),
        data_parallel=DataParallel.FSDP,
        grad_accum=4,
        reduce_dtype=DType.BF16,
    )
    more = dataclasses.replace(plain, grad_sync=GradSync.LAST)
    added = estimate(more).allocated_bytes - estimate(plain).allocated_bytes
    # Instead of shards in fp32 that are reduced in each micro-step.
    assert added == pytest.approx((2 - 4 / 8) * LLAMA.num_params, rel=0.01)
    half = ParallelConfig(dp_shard=4, pp=2)
    short = dataclasses.replace(LLAMA, seq_len=64)  # so that the peak is not of activations
    kept = estimate(dataclasses.replace(plain, model=short, parallel=half)).gathered_bytes
    assert (
        kept > 2 * 2 * 16 * LLAMA.layer_params()
    )  # weights and gradients of half of the model


@few
@given(cases())
def test_more_tokens_need_more(case: TrainCase) -> None:
    """But for blocks that are larger than their tensors."""
    total = estimate(case).allocated_bytes
    more = estimate(dataclasses.replace(case, mbs=2 * case.mbs)).allocated_bytes
    assert more >= 0.99 * total
    shorter = dataclasses.replace(case.model, seq_len=case.model.seq_len // 2)
    less = estimate(dataclasses.replace(case, model=shorter)).allocated_bytes
    assert less <= 1.01 * total


@few
@given(cases())
def test_more_layers_need_more(case: TrainCase) -> None:
    deeper = dataclasses.replace(case.model, num_layers=case.model.num_layers + 4)
    assert (
        estimate(dataclasses.replace(case, model=deeper)).allocated_bytes
        > estimate(case).allocated_bytes
    )


@few
@given(cases())
def test_computing_again_needs_less(case: TrainCase) -> None:
    none, blocks, full = (
        estimate(dataclasses.replace(case, recompute=how)).allocated_bytes
        for how in (Recompute.NONE, Recompute.BLOCKS, Recompute.FULL)
    )
    assert full <= 1.01 * blocks
    assert blocks <= 1.01 * none


@settings(max_examples=15)
@given(cases(), st.integers(1, 200))
def test_the_largest_batch_is_the_last_that_fits(case: TrainCase, gib: int) -> None:
    def fits(mbs: int) -> bool:
        other = dataclasses.replace(case, mbs=mbs)
        memory = estimate(other)
        sizes = memory.allocated_bytes, memory.reserved_bytes
        return verdict(other, *sizes, gib * GIB) == "fits"

    most = largest_mbs(case, gib * GIB)
    assert not most or fits(most)
    assert not fits(most + 1)


def test_nothing_fits_into_nothing() -> None:
    assert largest_mbs(case(), 0) == 0
    assert largest_mbs(case(), 20 * GIB) == 0  # its state alone is 25 GB


@pytest.mark.parametrize(
    ("precision", "stored", "moments"),
    [(Precision.AMP, 4, 8), (Precision.BF16, 2, 4), (Precision.FP32, 4, 8)],
)
@pytest.mark.parametrize("model", [GPT, LLAMA, find_model("mixtral-8x7b")])
def test_state_of_one_device(
    model: ModelConfig, precision: Precision, stored: int, moments: int
) -> None:
    memory = estimate(case(model=model, precision=precision, grad_accum=2))
    assert memory.weights_bytes == stored * model.num_params
    assert memory.gradients_bytes >= stored * model.num_params
    assert memory.optimizer_bytes == moments * model.num_params


@pytest.mark.parametrize("shards", [2, 8, 64])
def test_shards_divide_the_state(shards: int) -> None:
    one = estimate(case(model=LLAMA))
    axes = ParallelConfig(dp_shard=shards)
    many = estimate(case(model=LLAMA, data_parallel=DataParallel.FSDP, parallel=axes))
    assert many.weights_bytes == one.weights_bytes // shards
    assert many.optimizer_bytes == one.optimizer_bytes // shards
    assert many.activations_bytes == one.activations_bytes


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("shards", [8, 48, 96, 128, 256])
def test_experts_are_divided_as_their_messages_say(shards: int, ep: int) -> None:
    """In whole rows, padded; by their second dimension where shards are more than experts."""
    model = dataclasses.replace(find_model("qwen3-30b-a3b"), num_layers=2)
    case = TrainCase(
        model=model,
        mbs=1,
        parallel=ParallelConfig(dp_shard=shards, ep=ep),
        data_parallel=DataParallel.FSDP,
        precision=Precision.AMP,
    )
    workload = of_case(case)
    gathered = [
        op.message_bytes(workload.groups[op.group])
        for op in workload.expand()
        if isinstance(op, CommOp) and op.collective == Collective.ALL_GATHER
    ]
    memory = estimate(case)
    assert memory.gathered_bytes >= max(gathered)
    rows = 128 // ep
    ranks = shards // ep
    expert = 3 * 768 * 2048
    own = rows * expert // ranks if ranks > rows else -(-rows // ranks) * expert
    others = model.num_params - 2 * 128 * expert
    least = 4 * (2 * own + others / shards)
    assert least <= memory.weights_bytes <= 1.02 * least


@pytest.mark.parametrize("cp", [2, 8])
def test_ranks_of_a_sequence_divide_all_but_keys_and_values(cp: int) -> None:
    """State as other FSDP ranks do; of activations k and v are gathered."""
    one = estimate(case(model=LLAMA))
    axes = ParallelConfig(cp=cp)
    many = estimate(case(model=LLAMA, data_parallel=DataParallel.FSDP, parallel=axes))
    assert many.weights_bytes == one.weights_bytes // cp
    assert many.optimizer_bytes == one.optimizer_bytes // cp
    assert many.head_bytes == one.head_bytes // cp
    of_others = 4 * LLAMA.seq_len * (cp - 1) // cp * LLAMA.num_kv_heads * 2 * LLAMA.head_dim
    # Outputs of attention are kept by chunk and joined, and own keys with the others alone.
    more = 4 * LLAMA.seq_len // cp * (LLAMA.num_heads - LLAMA.num_kv_heads) * LLAMA.head_dim
    kept = one.activations_bytes // cp + 2 * (of_others + more) * LLAMA.num_layers
    assert many.activations_bytes == kept


def test_ddp_has_a_whole_copy_and_holds_gradients() -> None:
    axes = ParallelConfig(dp_replicate=8)
    ddp = estimate(case(data_parallel=DataParallel.DDP, parallel=axes))
    one = estimate(case())
    assert ddp.weights_bytes == ddp.gradients_bytes == one.weights_bytes
    assert not one.gradients_bytes  # as the backward pass begins
    for held in (ddp, estimate(case(grad_accum=8))):
        more = held.allocated_bytes - one.allocated_bytes
        assert more == pytest.approx(one.weights_bytes, rel=0.03)


@pytest.mark.parametrize("bucket_mb", [1, 25, 100])
def test_ddp_buckets_are_as_large_as_their_messages(
    bucket_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of the workload, which was held against real ranks, says where a bucket ends."""
    ddp = case(
        data_parallel=DataParallel.DDP,
        parallel=ParallelConfig(dp_replicate=2),
        precision=Precision.FP32,
        bucket_mb=bucket_mb,
        small_first_bucket=bucket_mb == 25,
        bucket_view=True,
    )
    buckets: list[int] = []
    allocate = Allocator.allocate

    def noted(heap: Allocator, num_bytes: int, purpose: str) -> Block:
        if purpose == "gradients":
            buckets.append(num_bytes)
        return allocate(heap, num_bytes, purpose)

    monkeypatch.setattr(Allocator, "allocate", noted)
    estimate(ddp)
    workload = of_case(ddp)
    messages = [
        op.message_bytes(workload.groups[op.group])
        for op in workload.expand()
        if isinstance(op, CommOp) and op.collective == Collective.ALL_REDUCE
    ]
    messages = [size for size in messages if size > 2**18]  # not the gradient's norm, the loss
    assert len(messages) >= 4
    assert buckets[: len(messages)] == messages


# Allocated at most on H200s: results/h200-train-gpt2-1.5b-master and -x4-...-ddp-master.
@pytest.mark.parametrize(("num_ranks", "measured_gib"), [(1, 46.5), (4, 49.4)])
def test_masters_hold_their_gradients_always(num_ranks: int, measured_gib: float) -> None:
    kind = DataParallel.DDP if num_ranks > 1 else DataParallel.NONE
    memory = estimate(
        case(
            mbs=8,
            model=find_model("gpt2-1.5b"),
            precision=Precision.MASTER,
            compile=CompileScope.BLOCK,
            data_parallel=kind,
            parallel=ParallelConfig(dp_replicate=num_ranks),
            grad_accum=8,
        )
    )
    assert memory.allocated_bytes / 2**30 == pytest.approx(measured_gib, rel=0.01)


def test_activations_of_gpt_are_the_papers() -> None:
    """34 bytes per token and hidden element, less two of dropout masks; 5 a s / h never.

    Beside them only one fp32 number per head and four of the norms.
    """
    memory = estimate(case(precision=Precision.BF16))
    tokens = 4 * GPT.seq_len
    block = 32 * GPT.hidden_size + 4 * (GPT.num_heads + 4)
    last_norm = 2 * 2 * GPT.hidden_size
    assert memory.activations_bytes == tokens * (GPT.num_layers * block + last_norm)


def test_checkpointed_blocks_keep_their_input_alone() -> None:
    """The paper's 2 s b h."""
    memory = estimate(case(mbs=32, recompute=Recompute.FULL))
    tokens, layers = 32 * GPT.seq_len, GPT.num_layers
    assert memory.activations_bytes == tokens * 2 * GPT.hidden_size * (layers + 2)
    some = estimate(case(mbs=32, recompute=Recompute.BLOCKS, recompute_blocks=(1, 4)))
    none = estimate(case(mbs=32))
    quarter = (none.activations_bytes - memory.activations_bytes) // 4
    assert some.activations_bytes == none.activations_bytes - quarter


def test_logits() -> None:
    """Three fp32 copies eagerly, one of bf16 compiled; chunks divide them."""
    logits = 4 * GPT.seq_len * GPT.vocab_size
    assert estimate(case()).head_bytes == 12 * logits
    compiled = case(compile=CompileScope.BLOCK)
    assert estimate(compiled).head_bytes == 2 * logits
    many = dataclasses.replace(compiled, mbs=64)
    chunked = estimate(dataclasses.replace(many, loss_chunks=8))
    saved = estimate(many).allocated_bytes - chunked.allocated_bytes
    assert saved > 0.7 * estimate(many).head_bytes


def test_weights_that_are_whole_at_a_time() -> None:
    """As the backward pass begins: the head, and the buffer of the last block."""
    axes = ParallelConfig(dp_shard=8)
    fsdp = case(model=LLAMA, data_parallel=DataParallel.FSDP, parallel=axes)
    layer, head = LLAMA.layer_params(), LLAMA.head_params + LLAMA.norm_params
    assert estimate(fsdp).gathered_bytes == 2 * (head + layer)
    kept = estimate(dataclasses.replace(fsdp, reshard="no")).gathered_bytes
    assert kept == 2 * (32 * layer + head + LLAMA.head_params)
    # parallelize.py sets how many are gathered ahead for blocks; the head has torch's own one.
    assert estimate(dataclasses.replace(fsdp, prefetch=2)).gathered_bytes == 2 * (head + layer)
    part = estimate(dataclasses.replace(fsdp, reshard="4")).gathered_bytes
    assert part == 2 * (head + layer) + (32 * layer + LLAMA.head_params) // 2


def test_autocast_copies_weights_unless_computed_again() -> None:
    head = 2 * (GPT.head_params + GPT.norm_params)
    copies = head + 2 * GPT.num_layers * GPT.layer_params()
    for scope in (CompileScope.NONE, CompileScope.BLOCK):
        assert estimate(case(compile=scope)).gathered_bytes == copies
    assert estimate(case(precision=Precision.BF16)).gathered_bytes == 0
    assert estimate(case(mbs=32, recompute=Recompute.FULL)).gathered_bytes == head


def test_products_in_fp8_keep_operands_of_one_byte() -> None:
    """Norms' and GELU's outputs have one byte instead of two; attention's is there in both."""
    compiled = case(compile=CompileScope.BLOCK, precision=Precision.BF16)
    low = dataclasses.replace(compiled, fp8=Fp8.TENSORWISE)
    saved = estimate(compiled).activations_bytes - estimate(low).activations_bytes
    per_layer = (1 + 1 + 4 - 1) * GPT.hidden_size
    assert saved == 4 * GPT.seq_len * GPT.num_layers * per_layer
    assert estimate(low).gathered_bytes == pytest.approx(
        GPT.num_layers * GPT.layer_params(), rel=1e-3
    )


def test_tensor_parallelism_divides_state_and_heads() -> None:
    one, four = (estimate(case(parallel=ParallelConfig(tp=tp), model=LLAMA)) for tp in (1, 4))
    assert four.weights_bytes == pytest.approx(one.weights_bytes / 4, rel=1e-3)  # norms are not
    assert one.activations_bytes / 4 < four.activations_bytes < one.activations_bytes / 2
    # fp32 and bf16 logits once less than four times: the divided loss keeps them in bf16.
    assert one.head_bytes / 5 < four.head_bytes < one.head_bytes / 4
    whole = case(parallel=ParallelConfig(tp=4), model=LLAMA, tp_plan=TpPlan.WHOLE)
    assert estimate(whole).head_bytes == one.head_bytes


def test_a_pipeline_counts_its_fullest_stage() -> None:
    two = estimate(case(model=LLAMA, parallel=ParallelConfig(pp=2), precision=Precision.BF16))
    half = 16 * LLAMA.layer_params() + LLAMA.head_params
    assert two.weights_bytes in (2 * half, 2 * (half + LLAMA.norm_params))


def kept_passes(case: TrainCase) -> float:
    """Return the most activations that the first rank's schedule keeps, in passes of it."""
    kept, most = set[tuple[int | None, int | None]](), 0
    for op in of_case(case).expand(0):
        if isinstance(op, ComputeOp) and isinstance(op.op, Attention):
            (kept.add if op.phase is Phase.FWD else kept.remove)((op.layer, op.microbatch))
            most = max(most, len(kept))
    return most / (case.model.num_layers // case.parallel.pp)


@pytest.mark.parametrize(("pp", "stages"), [(2, 2), (4, 2), (2, 4)])
def test_interleaved_stages_keep_the_passes_of_their_schedule(pp: int, stages: int) -> None:
    parts = stages * pp
    model = dataclasses.replace(LLAMA, num_layers=8, vocab_size=512)
    plain = case(model=model, mbs=parts, parallel=ParallelConfig(pp=pp), pp_microbatches=parts)
    plain = dataclasses.replace(plain, pp_split=StageSplit.EVEN)
    interleaved = dataclasses.replace(
        plain, pp_schedule=PipelineSchedule.INTERLEAVED, pp_stages=stages
    )
    assert kept_passes(plain) == pp
    passes = kept_passes(interleaved)
    assert passes == ((stages + 1) * pp - 1) / stages
    one, two = (estimate(each).activations_bytes for each in (plain, interleaved))
    assert two / one == passes / pp
    assert estimate(dataclasses.replace(interleaved, pp_microbatches=0)) == estimate(
        interleaved
    )


def test_a_large_model_over_eight_devices() -> None:
    """Llama 8b, a quarter of its blocks computed again: by estimate 80 GB are enough."""
    model = dataclasses.replace(LLAMA, seq_len=4096)
    sac = TrainCase(
        model=model,
        mbs=2,
        data_parallel=DataParallel.FSDP,
        parallel=ParallelConfig(dp_shard=8),
        compile=CompileScope.BLOCK,
        recompute=Recompute.BLOCKS,
        recompute_blocks=(1, 4),
    )
    assert 30 * GIB < estimate(sac).allocated_bytes < 80 * GIB
    assert largest_mbs(sac, 141 * 10**9) > largest_mbs(sac, 80 * 10**9) >= 2


def test_capped_logits_keep_the_tangent() -> None:
    """A number of 16 bits for each logit, from the forward to the backward pass."""
    model = dataclasses.replace(find_model("gemma-3-1b").tiny(), vocab_size=8192)
    plain, capped = (
        stage_estimates(
            TrainCase(model=dataclasses.replace(model, logit_softcap=cap), device="cuda")
        )[0]
        for cap in (0.0, 30.0)
    )
    more = capped.activations_bytes - plain.activations_bytes
    assert more == 2 * model.seq_len * model.vocab_size
