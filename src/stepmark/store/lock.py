"""One writer at a time: a lock on an open file or folder, as long as it is open."""

import fcntl
import os
from pathlib import Path

from stepmark.core.errors import ConfigError


def hold(fd: int, field: str, path: Path, allowed: str) -> None:
    """Raises ConfigError, and closes fd, where another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(field, path, allowed) from None
    except OSError:  # a file system without locks
        pass
