"""Sizes of messages: a rank's buffers tell the call's count and the largest buffer of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.message import RECV, SEND, sized
from stepmark.model.collectives import Collective, num_parts

MIB = 1 << 20
WHOLE = [Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE, Collective.BARRIER]
GATHERS = [Collective.ALL_GATHER, Collective.GATHER]
SCATTERS = [Collective.REDUCE_SCATTER, Collective.SCATTER]
ALL_TO_ALL = [Collective.ALL_TO_ALL, Collective.ALL_TO_ALL_V]
PARTS, RANKS = st.integers(0, 2**40), st.integers(1, 4096)


def buffers(collective: Collective, part: int, ranks: int) -> tuple[int, int]:
    """(sent, received) of the rank that has both, the root's where there is one."""
    if collective in WHOLE:
        return part, part
    whole = part * ranks
    if collective in GATHERS:
        return part, whole
    return (whole, part) if collective in SCATTERS else (whole, whole)


@given(st.sampled_from([*WHOLE, *GATHERS, *SCATTERS, *ALL_TO_ALL]), PARTS, RANKS)
def test_the_message_is_the_count_times_the_parts(
    collective: Collective, part: int, ranks: int
) -> None:
    """As nccl-tests has it, of which num_parts is the other half."""
    found = sized(collective, *buffers(collective, part, ranks), ranks)
    assert found == (part, part * num_parts(collective, ranks))


@given(st.sampled_from([*GATHERS, *SCATTERS]), PARTS, RANKS)
def test_beside_the_root_the_part_tells_the_whole(
    collective: Collective, part: int, ranks: int
) -> None:
    sent, received = (part, 0) if collective in GATHERS else (0, part)
    assert sized(collective, sent, received, ranks) == (part, part * ranks)
    assert sized(collective, sent, received, None) == (part, None)


@given(st.sampled_from(WHOLE), PARTS)
def test_a_rank_that_lacks_one_side_knows_the_buffer(collective: Collective, part: int) -> None:
    """Of a reduction to another rank, of a broadcast from one."""
    assert sized(collective, part, 0, 8) == sized(collective, 0, part, None) == (part, part)


@pytest.mark.parametrize(
    ("collective", "sent", "received", "num_ranks", "expected"),
    [
        (Collective.ALL_REDUCE, MIB, MIB, 8, (MIB, MIB)),
        (Collective.ALL_GATHER, MIB, 8 * MIB, 8, (MIB, 8 * MIB)),
        (Collective.REDUCE_SCATTER, 8 * MIB, MIB, 8, (MIB, 8 * MIB)),
        (Collective.ALL_TO_ALL, 8 * MIB, 8 * MIB, 8, (MIB, 8 * MIB)),
        (Collective.ALL_TO_ALL_V, 5 * MIB, 8 * MIB, 8, (MIB, 8 * MIB)),
        (Collective.ALL_TO_ALL, 8 * MIB, 8 * MIB, None, (8 * MIB, 8 * MIB)),
        (SEND, MIB, 0, 8, (MIB, MIB)),
        (RECV, 0, MIB, None, (MIB, MIB)),
        ("of_another_release", MIB, 3 * MIB, 8, (3 * MIB, None)),
    ],
)
def test_examples(
    collective: str,
    sent: int,
    received: int,
    num_ranks: int | None,
    expected: tuple[int, int | None],
) -> None:
    assert sized(collective, sent, received, num_ranks) == expected
