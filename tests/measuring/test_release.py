"""The memory that a finished case leaves to the next one."""

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepmark.measuring import context


def make_context(device: torch.device) -> Any:
    return SimpleNamespace(ranks=SimpleNamespace(device=device))


def test_workspaces_are_freed_before_the_segments_that_they_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    name = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, name, lambda: calls.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("segments"))
    context.release(make_context(torch.device("cuda", 0)))
    assert calls == ["workspaces", "segments"]
    context.release(make_context(torch.device("cpu")))
    assert len(calls) == 2


@pytest.mark.gpu
def test_a_product_leaves_no_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    # Other tests may hold memory, and have left garbage and workspaces that go now.
    gc.collect()
    context.release(make_context(device))
    before = torch.cuda.memory_allocated(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        a = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        assert float((a @ a).sum()) == 64**3
    del a
    assert torch.cuda.memory_allocated(device) > before, "cuBLAS has a workspace"
    context.release(make_context(device))
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_is_off_within_and_then_as_before(was_enabled: bool) -> None:
    class Cyclic:
        pass

    garbage = Cyclic()
    garbage.itself = garbage  # type: ignore[attr-defined]
    kept = weakref.ref(garbage)
    del garbage
    (gc.enable if was_enabled else gc.disable)()
    try:
        with contextlib.suppress(ZeroDivisionError), context.no_collection():
            assert not gc.isenabled()
            assert kept() is None, "garbage of before is gone"
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
