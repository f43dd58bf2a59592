"""What a rank tells of its work, to whoever ends it when the work does not end."""

from pathlib import Path
from typing import Protocol


class Guard(Protocol):
    """Heartbeat under a parent of ours, Watchdog under an outer launcher.

    Limits are in seconds. A position is an index into the plan, a flat list of cases.
    """

    first: int  # the position at which this process begins
    run: Path | None  # the run directory to go on with, if earlier ranks wrote one

    def begin(self, position: int, limit_s: float) -> None:
        """Work on this case starts, and should be done in limit_s. Replaces what was before."""

    def idle(self, limit_s: float) -> None:
        """Set-up, or what lies between cases and after the last one."""

    def run_is_at(self, path: Path) -> None:
        """Rank 0 says where the run directory is; other ranks may call it to no effect."""

    def go_on_at(self, position: int) -> bool:
        """Ranks end well now and new ones are to start from this position.

        False where nobody would start them. Called by every rank, or by rank 0 alone.
        """

    def close(self) -> None:
        """Nothing is watched any more. Call `idle` before, when the last case is done."""
