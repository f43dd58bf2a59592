"""A hundred kills of all measuring verbs lose nothing, and repeat nothing."""

from pathlib import Path

import pytest
from tests.soak_kills import COUNT, SEED, Kill

# `make soak` runs these: they are kills of whole commands, and take half a minute each.
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize("number", range(COUNT))
def test_what_was_killed_is_continued(tmp_path: Path, number: int) -> None:
    kill = Kill(number=number, seed=SEED, folder=tmp_path)
    assert kill.check() == "", kill.events
