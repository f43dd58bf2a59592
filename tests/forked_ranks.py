"""Ranks of a command that runs in this process, forked from a process that has imported torch.

`python -m stepmark.measuring.rank PLAN RUN` spends seconds on importing torch, a fork
milliseconds. All else is as measuring/local_ranks.py does it: a session, the environment, our
standard streams, and death with us. A rank becomes our child, so that its state and exit code
are read as ever.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

from tests.fork_server import server


def start(
    command: Sequence[str], environment: Mapping[str, str], listener: socket.socket | None
) -> "subprocess.Popen[bytes]":
    """In place of measuring/local_ranks.py's, where ranks meet through a file."""
    assert listener is None, "needs /dev/shm"
    words = command[2:]  # behind "python -m"
    return server().fork_command(words, environment, os.getcwd(), (1, 2))
