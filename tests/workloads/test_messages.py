"""Message sizes against a real trace, Primus' tables and plain arithmetic."""

import pytest

from stepmark.model.collectives import Collective, trimmed_count
from stepmark.model.model_tables import find_model
from stepmark.workloads.messages import messages


def sizes(name: str, collective: Collective, *, mbs: int = 1, seq_len: int = 4096, n: int = 8):  # type: ignore[no-untyped-def]
    return messages(
        find_model(name), collective, mbs=mbs, seq_len=seq_len, itemsize=2, num_ranks=n
    )


def test_a_layer_of_llama_3_70b_is_what_its_trace_shows() -> None:
    """NCCL_DEBUG lines of a Llama-3-70B FSDP run on 8 GPUs: count 106956800 per rank, bf16."""
    found = sizes("llama-3-70b", Collective.ALL_GATHER)["layer"]
    assert trimmed_count(Collective.ALL_GATHER, found, 2, 8) == 106_956_800


def test_all_to_all_is_what_primus_sends() -> None:
    """benchmark_all2all.py: deepseek-v3 has hidden 7168, seq 4096, top-k 8."""
    assert sizes("deepseek-v3", Collective.ALL_TO_ALL, mbs=2) == {
        "dispatch": 2 * 4096 * 8 * 7168 * 2
    }


def test_dispatch_is_padded_to_the_ranks() -> None:
    (found,) = sizes("mixtral-8x7b", Collective.ALL_TO_ALL, seq_len=5, n=8).values()
    assert found == 16 * 4096 * 2


@pytest.mark.parametrize("collective", Collective)
def test_messages_grow_with_the_batch_but_parameters_do_not(collective: Collective) -> None:
    one = sizes("deepseek-v2-lite", collective)
    two = sizes("deepseek-v2-lite", collective, mbs=2)
    assert one.keys() == two.keys()
    for role, size in one.items():
        assert two[role] == (size if "layer" in role else 2 * size)
