"""`python -m stepmark` works without an install."""

from stepmark.cli.main import main

if __name__ == "__main__":
    main()
