"""Ranks on this host, through torch.distributed.run, for verbs without a hang guard."""

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stepmark.launch import agent

# Rank 0 leaves its exit code here: torchrun itself returns 1 for every failure.
EXIT_FILE = "STEPMARK_EXIT_FILE"


def is_rank() -> bool:
    """True in a process that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(arguments: Sequence[str], num_ranks: int) -> int:
    """Start `python -m stepmark ARGUMENTS` on num_ranks local ranks; their exit code."""
    with tempfile.TemporaryDirectory(prefix="stepmark-") as folder:
        exit_file = Path(folder) / "exit"
        process = agent.start(
            agent.command(arguments, num_ranks, options=[f"--log-dir={folder}/torchrun"]),
            agent.environment(num_ranks, {EXIT_FILE: str(exit_file)}),
            death=signal.SIGTERM,  # the launcher passes it on to the ranks
        )

        def forward(number: int, _frame: FrameType | None) -> None:
            process.send_signal(number)

        previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        try:
            return int(exit_file.read_text())
        except (OSError, ValueError):
            # Rank 0 did not get to say: it was lost.
            return 3 if code else 0


def leave_exit_code(code: int) -> bool:
    """Rank 0 tells its parent its exit code; True where a rank may then end as if all is well.

    A rank that ends with another code makes torchrun kill its peers and print a traceback.
    """
    path = os.environ.get(EXIT_FILE)
    if path and is_first():
        Path(path).write_text(str(code))
    return bool(path)


def has_parent() -> bool:
    """True in a rank that `run` or a supervising parent started."""
    return EXIT_FILE in os.environ


def is_first() -> bool:
    """True on rank 0, and in a process that is no rank."""
    return not is_rank() or os.environ["RANK"] == "0"
