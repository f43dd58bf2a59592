"""Put each fault of mutations.toml into a copy of the tree and run the tests that it names.

    python tests/mutate.py [-j N] [WORD ...]      only faults whose file or text has a WORD

N copies of the tree are used at a time. Exits with 1 where a fault is not found: by a test
that fails with it and passes without.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "examples", "docs", "results", "recipes", "validation")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
FILES += ("AGENTS.md", "llms.txt", "action.yml")
LIMIT_S = 900


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A line that is wrong, and the test files of which one must fail."""

    what: str
    file: str  # below src/stepmark
    old: str
    new: str
    tests: tuple[str, ...]  # below tests

    def problem(self, root: Path = ROOT) -> str:
        """Return why the fault cannot be tried; nothing where it can."""
        path = root / "src" / "stepmark" / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"{self.file} has {self.old!r} {count} times"
        missing = [name for name in self.tests if not (root / "tests" / name).is_file()]
        return f"tests/{missing[0]} does not exist" if missing else ""


def faults() -> list[Fault]:
    plain = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text())["fault"]
    return [Fault(**{**fault, "tests": tuple(fault["tests"])}) for fault in plain]


def copied(folder: Path) -> Path:
    """Return a copy of the tree in a folder."""
    ignore = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore, symlinks=True)
    for name in FILES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
    return folder


def failed_test(tree: Path, tests: Iterable[str]) -> str | None:
    """Return the first test that fails; None where all pass.

    Raises RuntimeError where tests do not run: a fault must be found by an assertion.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"),
            *("-m", "not slow and not cluster"),  # `make test` must find it
            *(f"tests/{name}" for name in tests),
        ],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode == 0:
        return None
    failed = re.search(
        r"^(?:FAILED|ERROR) tests/(\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE
    )
    if done.returncode != 1 or not failed:
        raise RuntimeError(f"the tests do not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def found_by(tree: Path, fault: Fault) -> str | None:
    """Return the test that fails with the fault and passes without; None where none does.

    Raises RuntimeError where the test fails without the fault, too.
    """
    path = tree / "src" / "stepmark" / fault.file
    right = path.read_text()
    path.write_text(right.replace(fault.old, fault.new))
    try:
        test = failed_test(tree, fault.tests)
    finally:
        path.write_text(right)
    if test and failed_test(tree, [test]):
        raise RuntimeError(f"{test} fails without the fault, too")
    return test


def wanted(words: list[str]) -> Iterator[Fault]:
    for fault in faults():
        if not words or any(word in f"{fault.file} {fault.what}" for word in words):
            yield fault


def main(words: list[str], jobs: int) -> int:
    """Print a row per fault: whether it is found, where it is, and by which test."""
    chosen = list(wanted(words))
    for fault in chosen:
        if problem := fault.problem():
            print(f"{fault.what}: {problem}")
            return 2
    status = 0
    trees: SimpleQueue[Path] = SimpleQueue()

    def tried(fault: Fault) -> tuple[str | None, str]:
        tree = trees.get()
        try:
            return found_by(tree, fault), ""
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return None, f"{error}\n"
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            trees.put(copied(Path(folder) / str(job)))
        for fault, (test, error) in zip(chosen, pool.map(tried, chosen), strict=True):
            status |= test is None
            print(f"{error}{'found    ' if test else 'NOT FOUND'} {fault.file}: {fault.what}")
            print(f"          {test or ', '.join(fault.tests)}", flush=True)
    print(f"{len(chosen)} faults")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Faults that tests must find.")
    parser.add_argument("words", nargs="*", help="only faults whose file or text has one")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="so many copies at a time")
    arguments = parser.parse_args()
    sys.exit(main(arguments.words, arguments.jobs))
