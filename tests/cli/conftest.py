"""Ranks of commands that run in this process are forked."""

from collections.abc import Iterator

import pytest
from tests import forked_ranks

from stepmark.launch import local_ranks


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks, "_start", forked_ranks.start)
        yield


@pytest.fixture(autouse=True)
def _ranks_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("ranks") is None:
        monkeypatch.setattr(local_ranks, "_start", _refuse)


def _refuse(*_: object) -> None:
    raise AssertionError("a test that measures on ranks needs the mark `ranks`")
