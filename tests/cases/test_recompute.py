"""Products that a checkpointed block runs again: laws between the kinds, and by hand."""

from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.recompute import rerun_products
from stepmark.cases.training import Recompute

COUNTS = st.integers(1, 12)


def again(count: int, recompute: Recompute, *, saves_last: bool = False) -> list[int]:
    return list(rerun_products(count, recompute, saves_last=saves_last))


@given(count=COUNTS, saves_last=st.booleans())
def test_full_runs_all_again_but_a_last_product_that_nothing_needs(
    count: int, saves_last: bool
) -> None:
    places = list(range(count))
    full = again(count, Recompute.FULL, saves_last=saves_last)
    assert full == (places if saves_last else places[:-1])
    assert again(count, Recompute.BLOCKS, saves_last=saves_last) == full
    assert again(count, Recompute.NONE, saves_last=saves_last) == []


@given(count=COUNTS, saves_last=st.booleans())
def test_selective_runs_every_second_product_of_those_again(
    count: int, saves_last: bool
) -> None:
    full = again(count, Recompute.FULL, saves_last=saves_last)
    assert again(count, Recompute.OPS, saves_last=saves_last) == full[1::2]


def test_blocks_of_llama_gpt2_and_mixtral() -> None:
    """qkv, out, gate, up, down; qkv, out, up, down; qkv, out, router, gate, up, down."""
    assert again(5, Recompute.OPS) == [1, 3]
    assert again(4, Recompute.OPS) == [1]
    assert again(6, Recompute.OPS, saves_last=True) == [1, 3, 5]
