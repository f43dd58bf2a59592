"""`python -m tests.cli.forking WORDS`: stepmark, whose ranks are forked."""

from tests import fork_server, forked_ranks

from stepmark.cli.main import main
from stepmark.measuring import local_ranks

if __name__ == "__main__":
    fork_server.server()  # while there are no threads
    local_ranks._start = forked_ranks.start
    main()
