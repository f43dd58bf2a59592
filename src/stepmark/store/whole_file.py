"""A file that appears whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def renamed_to(file: Path) -> Iterator[Path]:
    """A name beside `file` that becomes `file` when the block ends well, else is removed."""
    file = file.resolve()
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
