"""stepmark as a user starts it: a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Without a launcher's variables; one thread, so that two cores do not fight."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stepmark", *arguments]


def stepmark(
    *arguments: str, cwd: Path, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def only_run(folder: Path) -> Path:
    (path,) = (file.parent for file in folder.glob("*/run.json"))
    return path


def lines(run: Path) -> list[dict[str, Any]]:
    """Finished records as plain JSON."""
    text = (run / "records.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]
