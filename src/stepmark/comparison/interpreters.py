"""Interpreters of a sweep: which program runs a setting, and that it is the same stepmark."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepmark import __version__
from stepmark.cases.sweep import Setting, split_values
from stepmark.ground.errors import ConfigError

_LIMIT_S = 120.0  # of an import on a slow file system
_VERSION = "import stepmark; print(stepmark.__version__)"


def parse_interpreters(text: str) -> list[tuple[str, str]]:
    """Return each interpreter as it was typed, with its absolute path; none: this one.

    A virtual environment stands for its bin/python. Links are kept: an environment is found
    by them. Raises ConfigError.
    """
    words = split_values(text)
    interpreters = [(word, _executable(word) if word else "") for word in words]
    paths = [path for _, path in interpreters]
    if len(set(paths)) < len(paths):
        raise ConfigError("python", text, "different interpreters")
    return interpreters


def _executable(word: str) -> str:
    path = Path(word).expanduser()
    try:
        path = path / "bin" / "python" if path.is_dir() else path
        if not word.isprintable() or not path.is_file():
            raise OSError
    except (OSError, ValueError):
        allowed = (
            "the path of a Python interpreter, or of a virtual environment with bin/python"
        )
        raise ConfigError("python", word, allowed) from None
    return str(path.absolute())


def check_interpreters(settings: Sequence[Setting], base: Mapping[str, str]) -> None:
    """Refuse interpreters that do not import this version of stepmark. Raises ConfigError."""
    words = {setting.executable: setting.python for setting in settings if setting.executable}
    for executable, word in words.items():
        version = _version(executable, word, base)
        if version != __version__:
            allowed = f"an interpreter with stepmark {__version__}, not {version}"
            raise ConfigError("python", word, allowed)


def output_of(
    command: Sequence[str], base: Mapping[str, str], limit_s: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command without input in an environment, and return what it printed."""
    return subprocess.run(
        command,
        env=dict(base),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=limit_s,
    )


def _version(executable: str, word: str, base: Mapping[str, str]) -> str:
    try:
        done = output_of([executable, "-c", _VERSION], base, _LIMIT_S)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {_LIMIT_S:.0f} s"
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return (done.stdout.split() or ["none"])[-1]
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    allowed = f"an interpreter that imports stepmark {__version__} ({reason})"
    raise ConfigError("python", word, allowed)
