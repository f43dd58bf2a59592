"""DeepSpeed's memory against the ZeRO paper's formulas (arXiv:1910.02054, figure 1)."""

import pytest

from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig
from stepmark.step_memory.deepspeed_memory import stage_memories
from stepmark.step_memory.rank_memory import RankMemory
from stepmark.workloads.job import Job
from stepmark.workloads.rules.deepspeed.settings import DeepSpeed

LLAMA = find_model("llama-3.1-8b")
RANKS = 64


def memory(stage: int, mbs: int = 1, **settings: int) -> RankMemory:
    job = Job(model=LLAMA, parallel=ParallelConfig(dp_shard=RANKS), mbs=mbs)
    (only,) = stage_memories(job, DeepSpeed(stage=stage, **settings))
    return only


@pytest.mark.parametrize(
    ("stage", "bytes_per_param"),
    [
        (0, 2 + 2 + 12),
        (1, 2 + 2 + 12 / RANKS),
        (2, 2 + (2 + 12) / RANKS),
        (3, (2 + 2 + 12) / RANKS),
    ],
)
def test_stages_divide_optimizer_gradients_weights(stage: int, bytes_per_param: float) -> None:
    found = memory(stage)
    held = found.weights_bytes + found.gradients_bytes + found.optimizer_bytes
    assert held == pytest.approx(bytes_per_param * LLAMA.num_params, rel=1e-4)


def test_buckets_and_gathered_weights_are_on_the_way() -> None:
    assert memory(0).gathered_bytes == 0
    assert memory(2).gathered_bytes == 2 * 500_000_000
    layer = LLAMA.layer_params() + 50_000_000
    assert memory(3).gathered_bytes == 2 * 2 * 500_000_000 + 2 * layer  # overlap_comm
    assert memory(3, reduce_bucket_size=1_000_000).gathered_bytes < memory(3).gathered_bytes


def test_what_passes_keep_is_proportional_to_tokens() -> None:
    one, two = memory(3), memory(3, mbs=2)
    for name in ("activations_bytes", "working_bytes", "head_bytes"):
        assert getattr(two, name) == 2 * getattr(one, name), name
    assert one.head_bytes == 12 * LLAMA.seq_len * LLAMA.vocab_size
    # A layer keeps at least the inputs of its products, of attention and of the activation.
    least = 2 * LLAMA.seq_len * LLAMA.num_layers * (4 * LLAMA.hidden_size + 3 * 14336)
    assert least < one.activations_bytes < 2 * least
