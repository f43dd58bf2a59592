"""`python -m tests.cli.prediction_rows STEP WORDS`: the script, with one step of two ranks.

Its ranks are forked.
"""

import runpy
import sys

from tests import fork_server

from stepmark.measuring import local_ranks

SCRIPT = fork_server.ROOT / "validation" / "prediction_rows.py"

if __name__ == "__main__":
    fork_server.server()  # while there are no threads
    local_ranks._start = fork_server.start_rank
    step = sys.argv.pop(1)
    script = runpy.run_path(str(SCRIPT))
    script["ROWS"][2] = (step,)
    sys.exit(script["main"]())
