"""How groups of tests are given to worker processes."""

from xdist.scheduler import LoadGroupScheduling


class Scheduling(LoadGroupScheduling):
    """Give the next group to a worker that is about to run out of tests.

    That of xdist looks, after each test, at all groups that the worker has had.
    """

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """Return how many tests are pending; of many, more than two.

        Groups end in the order in which they begin.
        """
        pending = 0
        for group in reversed(workload.values()):
            left = list(group.values()).count(False)
            pending += left
            if left == 0 or pending > 2:
                break
        return pending
