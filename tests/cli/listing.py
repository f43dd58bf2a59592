"""Ranks write their process id into the file `ranks`. Ranks import this first."""

import os
from pathlib import Path

with Path("ranks").open("a") as file:
    file.write(f"{os.getpid()}\n")
