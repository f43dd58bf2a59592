"""Messages of a step on two real ranks: counts and bytes as the laws of each technique say."""

import dataclasses
from operator import add

import pytest
import torch
from tests.ranks_pool import Pool
from tests.training.messages_on_ranks import check_all
from torch._prims.rng_prims import run_and_save_rng_state

from stepmark.cases.message import MessageKind, Tally, summed
from stepmark.training import messages
from stepmark.training.messages import MessageRecorder

KIND = MessageKind(
    collective="all_reduce",
    dtype="fp32",
    group="",
    num_ranks=2,
    phase="forward",
    call_bytes=4,
    message_bytes=4,
)


def test_on_two_ranks() -> None:
    with Pool(2) as pool:
        pool.run(check_all, timeout_s=120)


def test_without_messages_there_is_no_histogram() -> None:
    with MessageRecorder() as recorder:
        assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))
    assert recorder.histogram() == []


def test_operators_of_operators_run_as_ever() -> None:
    """As compiled code calls them where it computes activations again."""
    ones = torch.ones(3)
    with MessageRecorder() as recorder:
        _, result = run_and_save_rng_state(torch.ops.aten.bernoulli.default, ones)
    assert torch.equal(result, ones)
    assert recorder.histogram() == []


def test_merging_adds_calls_and_ranks() -> None:
    other = dataclasses.replace(KIND, phase="backward")
    one = [(KIND, Tally(calls=2, ranks=1)), (other, Tally(calls=1, ranks=1))]
    two = [(KIND, Tally(calls=3, ranks=1))]
    assert list(summed([*one, *two], ranks=add).items()) == [
        (KIND, Tally(calls=5, ranks=2)),
        (other, Tally(calls=1, ranks=1)),
    ]
    assert summed([*one, *two])[KIND].ranks == 1
    assert summed([]) == {}


class FakeGroup:
    group_desc = "undefined"
    group_name = "7"

    def size(self) -> int:
        return 4


def kinds(
    monkeypatch: pytest.MonkeyPatch, name: str, values: tuple[object, ...], result: object
) -> list[tuple[str, str, int | None, int, int | None]]:
    monkeypatch.setattr(messages, "group_of", lambda v: FakeGroup() if v == "7" else None)
    found = messages.kinds(name, values, result, "forward")
    return [(k.collective, k.group, k.num_ranks, k.call_bytes, k.message_bytes) for k in found]


def test_operators_of_other_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async tensor parallelism, batches of pairs, and what no table names yet."""
    x, y = torch.ones(4), torch.ones(6, dtype=torch.bfloat16)
    fused = kinds(monkeypatch, "fused_all_gather_matmul", (x, [y], 0, "7"), (None, [y]))
    assert fused == [("all_gather", "7", 4, 16, 64)]
    fused = kinds(monkeypatch, "fused_matmul_reduce_scatter", (x, x, "sum", 0, "7"), y)
    assert fused == [("reduce_scatter", "7", 4, 12, 48)]
    batch = (["isend", "irecv"], [1, 2], [0, 0], [x, y], "7")
    assert kinds(monkeypatch, "batch_p2p_ops", batch, [x, y]) == [
        ("send", "7", 4, 16, 16),
        ("recv", "7", 4, 12, 12),
    ]
    new = kinds(monkeypatch, "all_swap", (x, "sum", "7"), y)
    assert new == [("all_swap", "7", 4, 16, None)]
    assert kinds(monkeypatch, "wait_tensor", (x, "7"), x) == []
    assert kinds(monkeypatch, "memset32_", (x, 0, 0, 1), x) == []


def test_uneven_parts_are_a_collective_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(8)
    for splits, name in (([2] * 4, "all_to_all"), ([5, 1, 1, 1], "all_to_all_v")):
        values = (x, splits, [2] * 4, "7")
        (row,) = kinds(monkeypatch, "all_to_all_single", values, torch.ones(8))
        assert row == (name, "7", 4, 8, 32)


def test_types_keep_our_names() -> None:
    assert messages._dtype(torch.float8_e4m3fn) == "fp8_e4m3"
    assert messages._dtype(torch.uint8) == "uint8"
    assert messages._dtype(torch.bool) == "bool"
