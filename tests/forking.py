"""`python -m tests.forking MODULE WORDS`: a module as a program, whose ranks are forked."""

import runpy
import sys

from tests import fork_server

from stepmark.measuring import local_ranks

if __name__ == "__main__":
    fork_server.server()  # while there are no threads
    local_ranks._start = fork_server.start_rank
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
