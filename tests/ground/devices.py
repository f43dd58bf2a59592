"""Device nodes that a test may lose: as root, the machine's own could be replaced."""

import os
import stat
from pathlib import Path

_MINOR = {"null": 3, "full": 7}


def device(folder: Path, name: str) -> Path:
    """A node of its own where that can be made (by root), else the machine's."""
    path = folder / name
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, _MINOR[name]))
        path.open("rb").close()
    except PermissionError:
        path.unlink(missing_ok=True)
        assert os.geteuid() or not os.access("/dev", os.W_OK), "the test could replace it"
        return Path("/dev") / name
    return path
