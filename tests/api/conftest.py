"""Ranks that a test starts in its own process are forked."""

from tests.cli.conftest import _forked_ranks, _ranks_are_marked

__all__ = ["_forked_ranks", "_ranks_are_marked"]
