"""Run the environments of tests/data/environments.toml, each as a user has it: a process.

`python -m tests.cli.environments [PATTERN ...]` prints how each ends.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stepmark.ground import processes

from .process import ROOT, command, environment

FILE = ROOT / "tests" / "data" / "environments.toml"
_MARK = "STEPMARK_ENVIRONMENT"
# Nothing of these is a sentence.
_WRONG = re.compile(
    r"Traceback \(most recent|terminate called|core dumped|Fatal Python error"
    r"|Segmentation fault|Exception ignored|^[\w.]*(?:Error|Exception): ",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A shell line, the command that follows, and how it must end; see the file."""

    name: str
    words: str
    setup: str = ""
    wrapper: str = ""
    namespaces: str = ""
    code: int | list[int] = 0
    says: str = ""
    num_records: int | None = None
    limit_s: float = 150.0
    is_quick: bool = False

    def shell(self) -> list[str]:
        """Return the command line."""
        line = f'{self.setup}\nexec {self.wrapper} "$@"'
        shell = ["bash", "-c", line, "bash", *command(*self.words.split())]
        return ["unshare", *self.namespaces.split(), *shell] if self.namespaces else shell

    def why_not(self) -> str:
        """Return why this host cannot make the environment; "" where it can."""
        programs = (*self.wrapper.split()[:1], *(["unshare"] if self.namespaces else []))
        if missing := [name for name in programs if not shutil.which(name)]:
            return f"no {missing[0]}"
        if os.geteuid() and (self.namespaces or "setpriv" in programs):
            return "needs root"
        words = ["unshare", *self.namespaces.split(), "true"]
        if (
            self.namespaces
            and subprocess.run(words, capture_output=True, check=False).returncode
        ):
            return "namespaces are not permitted"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended. problems: what is wrong with that."""

    code: int | None
    text: str
    seconds: float
    problems: list[str]

    @property
    def sentence(self) -> str:
        """The first line about what is wrong."""
        lines = [line for line in self.text.splitlines() if line.startswith("stepmark: ")]
        return lines[0] if lines else ""


@cache
def environments() -> list[Environment]:
    contents = tomllib.loads(FILE.read_text())
    return [
        Environment(**{key: _filled(value, contents["texts"]) for key, value in one.items()})
        for one in contents["environment"]
    ]


def _filled(value: Any, texts: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, text in (texts | {"root": str(ROOT)}).items():
            value = value.replace(f"{{{name}}}", text)
    return value


@contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user can write."""
    path = Path(tempfile.mkdtemp(prefix="environment-", dir="/tmp"))
    path.chmod(0o777)
    (path / "tmp").mkdir()
    (path / "tmp").chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def carry_out(one: Environment, cwd: Path) -> Outcome:
    """Run the command in its environment, and judge how it ended."""
    mark = (_MARK, cwd.name)
    own = {_MARK: cwd.name, "TMPDIR": str(cwd / "tmp"), "HOME": str(cwd)}
    begin_s = time.monotonic()
    with (cwd / "tmp.out").open("wb") as out, (cwd / "tmp.err").open("wb") as err:
        process = subprocess.Popen(
            one.shell(),
            cwd=cwd,
            env=environment() | own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None = None
        left: list[str] = []
        folders: list[Path] = []
        try:
            code = process.wait(one.limit_s)
            left = [each.name() for each in processes.marked(*mark)]
            folders = [*(cwd / "tmp").glob("stepmark-*")]
        except subprocess.TimeoutExpired:
            pass
        finally:
            seconds = time.monotonic() - begin_s
            processes.kill_all([process], *mark)
    text = "\n".join(
        (cwd / f"tmp.{name}").read_text(errors="replace") for name in ("out", "err")
    )
    problems = [*_problems(one, code, text, cwd)]
    problems += [f"left behind: {what}" for what in (*left, *folders)]
    return Outcome(code=code, text=text, seconds=seconds, problems=problems)


def _problems(one: Environment, code: int | None, text: str, cwd: Path) -> Iterator[str]:
    codes = one.code if isinstance(one.code, list) else [one.code]
    if code is None:
        yield f"not done in {one.limit_s:.0f} s"
    elif code not in codes:
        yield f"exit code {code}, not {one.code}"
    if match := _WRONG.search(text):
        yield f"it writes {match[0]!r}"
    if not re.search(one.says, text):
        yield f"it does not say {one.says!r}"
    records = [path.read_text() for path in cwd.rglob("records.jsonl")]
    lines = [line for each in records for line in each.splitlines(keepends=True)]
    if not all(line.endswith("\n") for line in lines):
        yield "half a record"
    num_measured = sum('"kind":"measured"' in line for line in lines)
    if one.num_records not in (None, num_measured):
        yield f"{num_measured} measured cases, not {one.num_records}"


def main() -> None:
    """Print a line per environment: how it ended, and what is wrong."""
    pattern = "|".join(sys.argv[1:])
    for one in environments():
        if not re.search(pattern, one.name):
            continue
        if reason := one.why_not():
            sys.stdout.write(f"| {one.name} | skipped: {reason} | | |\n")
            continue
        with open_folder() as cwd:
            end = carry_out(one, cwd)
        verdict = "; ".join(end.problems) or "ok"
        sentence = end.sentence.replace("|", "/")
        sys.stdout.write(
            f"| {one.name} | {verdict} | {end.code} | {end.seconds:.1f} | {sentence} |\n"
        )
        if end.problems:
            sys.stdout.write(f"{end.text[-3000:]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
