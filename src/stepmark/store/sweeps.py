"""Sweeps on disk: sweeps/<sweep_id>/{sweep.json, runs/, output/}. Tries are only ever added.

sweep.json is replaced by a rename after each try, so that a reader sees whole files, and a
kill loses at most the try that it ended.
"""

import dataclasses
import os
from pathlib import Path

import msgspec

from stepmark.cases.sweep import SCHEMA, Sweep, Try
from stepmark.ground import files, json_text
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_whole

FILE = "sweep.json"


class Journal(files.Lock):
    """Writer of a sweep by one process, which holds a lock until it is closed."""

    def __init__(self, path: Path, sweep: Sweep) -> None:
        """Use `create` or `reopen`."""
        self.path = path
        self.sweep = sweep
        fd = os.open(path, os.O_RDONLY)
        super().__init__(fd, "sweep", path, "a sweep that no other process makes")

    @classmethod
    def create(cls, root: Path, sweep: Sweep) -> "Journal":
        path = root / sweep.sweep_id
        try:
            (path / "runs").mkdir(parents=True)
            (path / "output").mkdir()
        except OSError as error:
            raise ConfigError(
                "out", path, f"a folder that can be made ({error.strerror})"
            ) from None
        journal = cls(path, sweep)
        journal._write()
        return journal

    @classmethod
    def reopen(cls, path: Path) -> "Journal":
        return cls(path, read(path))

    def add(self, attempt: Try) -> None:
        """Add a try; it is on disk when this returns."""
        self.sweep = dataclasses.replace(self.sweep, tries=(*self.sweep.tries, attempt))
        self._write()

    def change(self, **fields: object) -> None:
        """Change what may differ between two starts, such as repeats and timeout."""
        self.sweep = dataclasses.replace(self.sweep, **fields)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        text = msgspec.json.format(msgspec.json.encode(self.sweep), indent=1) + b"\n"
        with files.written(self.path / FILE, "out") as stream:
            stream.write(text)


def is_sweep(path: Path) -> bool:
    return os.path.isfile(path / FILE)  # False also for a name that is too long


def read(path: Path) -> Sweep:
    """Read a sweep. Raises ConfigError for other JSON, and for impossible values."""
    file = path / FILE
    try:
        sweep: Sweep = json_text.decode(read_whole(file, "sweep"), Sweep)
    except ValueError as error:
        raise ConfigError("sweep", file, f"a sweep ({error})") from None
    if wrong := _wrong(sweep):
        raise ConfigError("sweep", file, f"a sweep ({wrong})")
    return sweep


def _wrong(sweep: Sweep) -> str:
    """Return what is impossible although its type is right; "" if there is nothing."""
    names = [setting.name for setting in sweep.settings]
    runs = [attempt.run for attempt in sweep.tries if not _is_below(attempt.run)]
    selected = sweep.selection.settings if sweep.selection else ()
    unknown = [name for name in (*sweep.dropped, *selected) if name not in names]
    selection = (sweep.selection.rounds, sweep.selection.fresh) if sweep.selection else ()
    problems = {
        f"schema {sweep.schema}, known is 1 to {SCHEMA}": not 1 <= sweep.schema <= SCHEMA,
        "no command": not sweep.command,
        "no settings": not names,
        "two settings of one name": len(set(names)) < len(names),
        f"baseline {sweep.baseline!r} is no setting": sweep.baseline not in names,
        f"dropped {unknown[:1]} is no setting": bool(unknown),
        "a selection without rounds": bool(selection and min(selection) < 0),
        f"repeats {sweep.repeats}, at least 1": sweep.repeats < 1,
        f"timeout_s {sweep.timeout_s}, above 0": not sweep.timeout_s > 0,
        f"run {runs[:1]} is no folder below runs": bool(runs),
    }
    return next((text for text, is_wrong in problems.items() if is_wrong), "")


def _is_below(run: str) -> bool:
    """Whether this names TRY/RUN, or RUN as before, under runs/; "" where a try wrote none."""
    parts = run.split("/")
    names = all(part not in ("", ".", "..") for part in parts)
    return not run or (names and len(parts) <= 2 and run.isprintable())


def find(root: Path, name: str) -> Path:
    """Find a sweep by its path, its id, the unique beginning of one, or "latest"."""
    for path in (Path(name), root / name):
        if name and is_sweep(path):
            return path
    paths = sorted(file.parent for file in root.glob(f"*/{FILE}"))
    matches = paths[-1:] if name == "latest" else [p for p in paths if p.name.startswith(name)]
    if not name or len(matches) != 1:
        names = ", ".join(path.name for path in paths[-3:]) or "none"
        raise ConfigError("resume", name, f"one sweep; in the folder {root}: {names}")
    return matches[0]
