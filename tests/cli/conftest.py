"""Ranks of commands that run in this process are forked."""

import pytest
from tests import forked_ranks

from stepmark.launch import workers


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_start", forked_ranks.start)
