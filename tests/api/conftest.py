"""Ranks that a test starts in its own process are forked."""

from tests.cli.conftest import _ranks_are_marked

__all__ = ["_ranks_are_marked"]
