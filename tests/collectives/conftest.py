"""Four gloo ranks for all tests of this folder, started when the first test asks."""

from collections.abc import Callable, Iterator

import pytest
from tests.ranks_pool import Pool


@pytest.fixture(scope="session")
def current_pool() -> Iterator[Callable[[], Pool]]:
    made: list[Pool] = []

    def current() -> Pool:
        if not (made and made[-1].is_whole):
            while made:
                made.pop().close()
            made.append(Pool(4))
        return made[-1]

    yield current
    for pool in made:
        pool.close()


@pytest.fixture
def pool(current_pool: Callable[[], Pool]) -> Pool:
    """After a test that lost a rank, or waits for one in vain, the next gets a new pool."""
    return current_pool()
