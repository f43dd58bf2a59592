"""Shorter ways through torch lead to the same results."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import NUM_RANKS, made_of
from tests.capture.user_code import CASES
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

from stepmark.capture import fake
from stepmark.capture.fake import shortcuts
from stepmark.capture.run import capture


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 24), st.integers(0, 1))
def test_parts_are_torchs(rows: int, columns: int, num_chunks: int, dim: int) -> None:
    tensor = torch.arange(rows * columns).reshape(rows, columns)
    expected = _fsdp_common._chunk_with_empty(tensor, num_chunks, dim)
    with shortcuts():
        found = vars(_fsdp_param)["_chunk_with_empty"](tensor, num_chunks, dim)
    assert len(found) == len(expected) == num_chunks
    for index, part in enumerate(expected):
        assert torch.equal(found[index], part)
        assert found[index].shape == part.shape


@pytest.mark.parametrize("case", ["fsdp_tp"])
def test_a_capture_is_the_same_without(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def none() -> Iterator[None]:
        yield

    monkeypatch.setattr(fake, "shortcuts", none)
    assert capture(CASES[case], NUM_RANKS, 0) == made_of(case)
