"""Files through which ranks and the parent that watches them report to each other."""

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "STEPMARK_HEARTBEATS"  # environment variable: the folder
FIRST = "STEPMARK_FIRST"  # environment variable: the position at which ranks begin

ABORT = "abort"  # from the parent: ranks are to give up
# From each rank, with its number: stacks; flight recorder; that it has given up; its state.
STACK, FLIGHT, GAVE_UP, BEAT = "stack", "flight", "gave_up", "beat"
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank does, and until when, by CLOCK_MONOTONIC, the same in all processes."""

    rank: int
    pid: int
    position: int | None  # None in set-up and between cases
    since_s: float
    deadline_s: float | None  # None: it may take as long as it takes
    restart_at: int | None = None  # new ranks should begin there once these have ended
    exit_code: int | None = None  # all work is done; the process may still take a while to end


class HeartbeatStore:
    """A folder of small files, written beside their place and renamed: never half there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def new(cls) -> "HeartbeatStore":
        """Make a folder, on tmpfs if there is one: a beat costs 20 us there, 120 us on ext4."""
        root = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        return cls(Path(tempfile.mkdtemp(prefix="stepmark-ranks-", dir=root)))

    @property
    def is_in_memory(self) -> bool:
        return self.folder.parent == _MEMORY

    def write(self, name: str, text: str) -> None:
        """Raises OSError, as for a full disk."""
        target = f"{self.folder}/{name}"
        beside = f"{target}.{os.getpid()}"
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = memoryview(text.encode())
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.rename(beside, target)

    def read(self, name: str) -> str | None:
        """None until it is there."""
        try:
            return (self.folder / name).read_text(errors="replace")
        except OSError:
            return None

    def has(self, name: str) -> bool:
        return os.path.exists(f"{self.folder}/{name}")

    def write_beat(self, beat: Beat) -> None:
        self.write(f"{BEAT}-{beat.rank}", json.dumps(asdict(beat)))

    def beats(self, num_ranks: int) -> dict[int, Beat]:
        """Return the last beat of each rank that came up."""
        texts = (self.read(f"{BEAT}-{rank}") for rank in range(num_ranks))
        beats = [Beat(**json.loads(text)) for text in texts if text]
        return {beat.rank: beat for beat in beats}

    def remove(self) -> None:
        # Without a parent's patience: a rank that is killed may still write here.
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
