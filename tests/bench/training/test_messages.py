"""Messages of a step on two real ranks: counts and bytes as the laws of each technique say."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._prims.rng_prims import run_and_save_rng_state

from stepmark.bench.training import messages
from stepmark.bench.training.messages import MessageRecorder, merge
from stepmark.core.collectives import Collective, num_parts
from stepmark.core.message import MessageKind, Tally
from stepmark.trace import flight_messages

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
    script = Path(__file__).with_name("messages_on_ranks.py")
    root = Path(__file__).parents[3]
    environment = os.environ | {
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", str(script)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "both ranks are done" in done.stdout


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
    assert merge([one, two]) == (
        (KIND, Tally(calls=5, ranks=2)),
        (other, Tally(calls=1, ranks=1)),
    )
    assert merge([]) == ()


SIZED = [
    *(Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE, Collective.BARRIER),
    *(Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL),
    *(Collective.GATHER, Collective.SCATTER, "send", "recv"),
]


@given(st.sampled_from(SIZED), st.integers(0, 2**40), st.integers(1, 4096))
def test_sizes_are_those_of_the_flight_recorder(collective: str, part: int, ranks: int) -> None:
    """Both rooms name one call alike; parts times ranks is the message, as nccl-tests says."""
    whole = part * ranks
    sent, received = {
        Collective.ALL_GATHER: (part, whole),
        Collective.GATHER: (part, whole),
        Collective.REDUCE_SCATTER: (whole, part),
        Collective.SCATTER: (whole, part),
        Collective.ALL_TO_ALL: (whole, whole),
    }.get(collective, (part, part))  # type: ignore[call-overload]
    found = messages._sized(collective, sent, received, ranks)
    assert (collective, *found) == flight_messages._sized(collective, sent, received, ranks)
    parts = 1 if collective in ("send", "recv") else num_parts(Collective(collective), ranks)
    assert found == (part, part * parts)


@given(st.sampled_from([Collective.GATHER, Collective.SCATTER]), st.integers(1, 2**40))
def test_ranks_beside_the_root_know_the_whole(collective: str, part: int) -> None:
    sent, received = (part, 0) if collective == Collective.GATHER else (0, part)
    assert messages._sized(collective, sent, received, 8) == (part, 8 * part)
    assert messages._sized(collective, sent, received, None) == (part, None)


class FakeGroup:
    group_desc = "undefined"
    group_name = "7"

    def size(self) -> int:
        return 4


def kinds(
    monkeypatch: pytest.MonkeyPatch, name: str, values: tuple[object, ...], result: object
) -> list[tuple[str, str, int | None, int, int | None]]:
    monkeypatch.setattr(messages, "_group", lambda v: FakeGroup() if v == "7" else None)
    found = messages._kinds(name, values, result, "forward")
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
