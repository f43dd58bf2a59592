"""`python -m tests.cli.forking_torchrun WORDS`: torchrun, whose ranks are forked."""

import os
import runpy
import subprocess
from collections.abc import Mapping, Sequence

from tests import fork_server
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def forked(
    handler: SubprocessHandler, command: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """In place of `python -u -m MODULE WORDS`, on our standard streams."""
    words = command[command.index("-m") + 1 :]
    return fork_server.server().fork_command(words, environment, os.getcwd(), (1, 2))


if __name__ == "__main__":
    fork_server.server()  # while there are no threads
    SubprocessHandler._popen = forked  # type: ignore[assignment, method-assign]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
