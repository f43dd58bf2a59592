"""Ranks of one host."""

import psutil
import pytest

from stepmark.ground.errors import ConfigError
from stepmark.measuring.local_ranks import LocalRanks, Ranks

pytestmark = pytest.mark.ranks


def test_more_ranks_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    ranks = Ranks(numbers=range(9), world_size=9)
    with pytest.raises(ConfigError, match="at most 8 ranks on this host"):
        LocalRanks(("false",), ranks, None, {})
