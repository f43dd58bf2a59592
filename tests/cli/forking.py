"""`python -m tests.cli.forking WORDS`: stepmark, whose ranks are forked."""

from tests import forked_ranks

from stepmark.cli.main import main
from stepmark.launch import local_ranks

if __name__ == "__main__":
    local_ranks._start = forked_ranks.start
    main()
