"""The memory estimate: exact for state, the paper's for activations, never against reason."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.app.train_plan import estimated_memory as estimate
from stepmark.app.train_plan import largest_mbs
from stepmark.core.dtypes import DType
from stepmark.core.model import ModelConfig, find_model
from stepmark.core.parallel import ParallelConfig
from stepmark.core.train_case import TrainCase
from stepmark.core.training import CompileScope, DataParallel, GradSync, Precision, Recompute
from stepmark.predict.memory import TrainMemory

GPT = find_model("gpt2-1.5b")
LLAMA = find_model("llama-3.1-8b")
GIB = 2**30
MODELS = st.sampled_from(
    ["gpt2-1.5b", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"]
)


@st.composite
def cases(draw: st.DrawFn) -> TrainCase:
    """Any combination of what the estimate looks at."""
    data_parallel = draw(st.sampled_from(DataParallel))
    shards = draw(st.sampled_from([1, 2, 8])) if data_parallel is DataParallel.FSDP else 1
    return TrainCase(
        model=find_model(draw(MODELS)),
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


def parts(memory: TrainMemory) -> dict[str, int]:
    fields = dataclasses.asdict(memory)
    del fields["forward_gradients_bytes"]  # of gradients_bytes
    return fields


def case(**more: Any) -> TrainCase:
    plain = {"model": GPT, "mbs": 4, "precision": Precision.AMP}
    return TrainCase(**{**plain, **more})


@given(cases())
def test_parts_are_bytes_and_bound_the_whole(case: TrainCase) -> None:
    memory = estimate(case)
    assert min(parts(memory).values()) >= 0
    assert 0 <= memory.forward_gradients_bytes <= memory.gradients_bytes
    kept = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert kept < memory.total_bytes <= sum(parts(memory).values())


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
    added = estimate(more).gathered_bytes - estimate(plain).gathered_bytes
    assert added == pytest.approx(2 * LLAMA.num_params, rel=1e-3)
    half = ParallelConfig(dp_shard=4, pp=2)
    kept = estimate(dataclasses.replace(plain, parallel=half)).gathered_bytes
    assert kept > 2 * 2 * LLAMA.num_params / 2  # weights and gradients of half of the model


@given(cases())
def test_more_tokens_need_more(case: TrainCase) -> None:
    total = estimate(case).total_bytes
    assert estimate(dataclasses.replace(case, mbs=2 * case.mbs)).total_bytes >= total
    shorter = dataclasses.replace(case.model, seq_len=case.model.seq_len // 2)
    assert estimate(dataclasses.replace(case, model=shorter)).total_bytes <= total


@given(cases())
def test_more_layers_need_more(case: TrainCase) -> None:
    deeper = dataclasses.replace(case.model, num_layers=case.model.num_layers + 4)
    assert (
        estimate(dataclasses.replace(case, model=deeper)).total_bytes
        > estimate(case).total_bytes
    )


@given(cases())
def test_computing_again_keeps_less(case: TrainCase) -> None:
    kept = {
        how: estimate(dataclasses.replace(case, recompute=how)).activations_bytes
        for how in Recompute
    }
    assert kept[Recompute.FULL] < kept[Recompute.OPS] < kept[Recompute.NONE]
    assert kept[Recompute.FULL] <= kept[Recompute.BLOCKS] <= kept[Recompute.NONE]


@given(cases(), st.integers(1, 200))
def test_the_largest_batch_is_the_last_that_fits(case: TrainCase, gib: int) -> None:
    memory_bytes = gib * GIB
    found = largest_mbs(case, memory_bytes)
    if found:
        fits = estimate(dataclasses.replace(case, mbs=found))
        assert fits.total_bytes <= memory_bytes
    more = estimate(dataclasses.replace(case, mbs=found + 1))
    assert more.total_bytes > memory_bytes


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
    memory = estimate(case(model=model, precision=precision))
    assert memory.weights_bytes == memory.gradients_bytes == stored * model.num_params
    assert memory.optimizer_bytes == moments * model.num_params


@pytest.mark.parametrize("shards", [2, 8, 64])
def test_shards_divide_the_state(shards: int) -> None:
    one = estimate(case(model=LLAMA))
    axes = ParallelConfig(dp_shard=shards)
    many = estimate(case(model=LLAMA, data_parallel=DataParallel.FSDP, parallel=axes))
    assert many.weights_bytes == one.weights_bytes // shards
    assert many.gradients_bytes == one.gradients_bytes // shards
    assert many.optimizer_bytes == one.optimizer_bytes // shards
    assert many.activations_bytes == one.activations_bytes


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
    kept = one.activations_bytes // cp + 2 * of_others * LLAMA.num_layers
    assert many.activations_bytes == kept


def test_ddp_has_a_whole_copy_and_holds_gradients() -> None:
    axes = ParallelConfig(dp_replicate=8)
    ddp = estimate(case(data_parallel=DataParallel.DDP, parallel=axes))
    one = estimate(case())
    assert parts(ddp) == parts(one)
    assert ddp.total_bytes == one.total_bytes + one.gradients_bytes
    assert estimate(case(grad_accum=8)).total_bytes == ddp.total_bytes


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
    assert memory.total_bytes / 2**30 == pytest.approx(measured_gib, rel=0.01)


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
    memory = estimate(case(recompute=Recompute.FULL))
    tokens, layers = 4 * GPT.seq_len, GPT.num_layers
    assert memory.activations_bytes == tokens * 2 * GPT.hidden_size * (layers + 2)
    some = estimate(case(recompute=Recompute.BLOCKS, recompute_blocks=(1, 4)))
    none = estimate(case())
    quarter = (none.activations_bytes - memory.activations_bytes) // 4
    assert some.activations_bytes == none.activations_bytes - quarter


def test_logits() -> None:
    """Three fp32 copies eagerly, two of bf16 compiled; chunks divide them."""
    logits = 4 * GPT.seq_len * GPT.vocab_size
    assert estimate(case()).head_bytes == 12 * logits
    compiled = case(compile=CompileScope.BLOCK)
    assert estimate(compiled).head_bytes == 4 * logits
    chunked = estimate(dataclasses.replace(compiled, loss_chunks=8)).head_bytes
    sums = 8 * GPT.head_params + 2 * 4 * GPT.seq_len * GPT.hidden_size
    assert chunked == logits // 2 + sums


def test_weights_that_are_whole_at_a_time() -> None:
    axes = ParallelConfig(dp_shard=8)
    fsdp = case(model=LLAMA, data_parallel=DataParallel.FSDP, parallel=axes)
    layer, table = LLAMA.layer_params(), LLAMA.head_params
    gradients = max(layer, table) * (2 + 4)
    assert estimate(fsdp).gathered_bytes == 2 * (3 * layer + table) + gradients
    kept = estimate(dataclasses.replace(fsdp, reshard="no")).gathered_bytes
    assert kept == 2 * (33 * layer + table) + gradients
    low = estimate(dataclasses.replace(fsdp, reduce_dtype=DType.BF16)).gathered_bytes
    assert low == estimate(fsdp).gathered_bytes - 2 * max(layer, table)


def test_autocast_copies_weights_unless_compiled_or_computed_again() -> None:
    copies = 2 * (GPT.num_layers * GPT.layer_params() + GPT.head_params)
    assert estimate(case()).gathered_bytes == copies
    assert estimate(case(compile=CompileScope.BLOCK)).gathered_bytes == 0
    assert estimate(case(precision=Precision.BF16)).gathered_bytes == 0
    assert estimate(case(recompute=Recompute.FULL)).gathered_bytes == 2 * GPT.head_params


def test_tensor_parallelism_divides_state_and_heads() -> None:
    one, four = (estimate(case(parallel=ParallelConfig(tp=tp), model=LLAMA)) for tp in (1, 4))
    assert four.weights_bytes == one.weights_bytes // 4
    assert one.activations_bytes / 4 < four.activations_bytes < one.activations_bytes / 2
    assert four.head_bytes == one.head_bytes  # logits are gathered


def test_a_pipeline_counts_its_fullest_stage() -> None:
    two = estimate(case(model=LLAMA, parallel=ParallelConfig(pp=2), precision=Precision.BF16))
    half = 16 * LLAMA.layer_params() + LLAMA.head_params
    assert two.weights_bytes in (2 * half, 2 * (half + LLAMA.norm_params))


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
    assert 30 * GIB < estimate(sac).total_bytes < 80 * GIB
    assert largest_mbs(sac, 141 * 10**9) > largest_mbs(sac, 80 * 10**9) >= 2
