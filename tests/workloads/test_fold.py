"""Folding loses nothing, finds loops as they were written, and takes linear time."""

import time

from hypothesis import given
from hypothesis import strategies as st

from stepmark.workloads.fold import Repeat, fold, unfold


def size(folded: "tuple[str | Repeat[str], ...]") -> int:
    return sum(size(one.body) if isinstance(one, Repeat) else 1 for one in folded)


@given(st.lists(st.sampled_from("abc"), max_size=80))
def test_folding_loses_nothing(items: list[str]) -> None:
    folded = fold(items)
    assert unfold(folded) == items
    assert size(folded) <= len(items)


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=5, unique=True),
    st.integers(2, 9),
    st.integers(2, 9),
)
def test_nested_loops_are_found(body: list[str], inner: int, outer: int) -> None:
    loop = ["E", *body * inner, "F"] * outer
    folded = fold(["before", *loop, "after"])
    assert folded == (
        "before",
        Repeat(body=("E", Repeat(body=tuple(body), times=inner), "F"), times=outer),
        "after",
    )


def test_a_loop_whose_items_come_more_than_once_is_found() -> None:
    assert fold(list("abacabac")) == (Repeat(body=tuple("abac"), times=2),)
    assert fold(list("aaab" * 3)) == (
        Repeat(body=(Repeat(body=("a",), times=3), "b"), times=3),
    )
    assert fold([]) == ()


def test_time_is_linear() -> None:
    """50,000 items: random, all different, and a deep loop."""
    state, random = 1, []
    for _ in range(50_000):
        state = state * 6364136223846793005 % 2**64
        random.append(state >> 61)
    for items in (random, list(range(50_000)), ([1] + [2, 3] * 96) * 1000):
        began = time.process_time()
        fold(items)
        assert time.process_time() - began < 1.5
