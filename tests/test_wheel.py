"""The wheel has the package alone, and stays small."""

import subprocess
import tomllib
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_BYTES = 3_000_000
RECORD = 100  # bytes of a file's name, hash and place in the archive, compressed


def test_a_wheel_is_small() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build == {"targets": {"wheel": {"packages": ["src/stepmark"]}}}
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src/stepmark"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {
        file: len(zlib.compress(file.read_bytes())) + RECORD for file in files if file.exists()
    }
    assert len(sizes) > 500
    assert sum(sizes.values()) <= MAX_BYTES, sorted(sizes, key=sizes.__getitem__)[-5:]
