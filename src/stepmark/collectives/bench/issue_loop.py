"""Issue the calls of a sample from a C loop, compiled on demand.

Between two calls that Python makes, the interpreter and ctypes take about as long as NCCL needs
to issue a small one, so that a sample of `queued` calls would measure them. Where there is no C
compiler, calls are issued from Python, which the method of the samples states.
"""

import contextlib
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from stepmark.collectives.bench.nccl import BoundCall, Step
from stepmark.ground.files import replaced, user_cache
from stepmark.measuring.host import c_compiler

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O2", "-shared", "-fPIC")
_TIMEOUT_S = 60.0
# Numbers of `enum signature`, by the types of the arguments before communicator and stream.
_SIGNATURES = {
    (): 0,
    (c_void_p, c_void_p, c_size_t, c_int): 1,
    (c_void_p, c_void_p, c_size_t, c_int, c_int): 2,
    (c_void_p, c_void_p, c_size_t, c_int, c_int, c_int): 3,
    (c_void_p, c_size_t, c_int, c_int): 4,
}


class _Step(ctypes.Structure):
    """`struct step` of the source."""

    _fields_ = (
        ("function", c_void_p),
        ("signature", c_int),
        ("integers", c_int * 3),
        ("buffers", c_void_p * 2),
        ("count", c_size_t),
        ("comm", c_void_p),
        ("stream", c_void_p),
    )


class CompiledRotation:
    """Makes the next of several calls, as timing.Rotation, in the compiled loop."""

    def __init__(self, calls: Sequence[BoundCall], loop: Any) -> None:
        """loop: what `load` returns. The calls have equally many steps."""
        (self._steps_per_call,) = {len(call.steps) for call in calls}
        steps = [_packed(step) for call in calls for step in call.steps]
        self._steps = (_Step * len(steps))(*steps)
        self._calls = calls  # they keep the tensors
        self._loop = loop
        self._next = 0

    def __call__(self) -> None:
        self.issue(1)

    def issue(self, count: int) -> None:
        """Make this many calls. Raises NcclError for the first that fails."""
        failed = c_size_t()
        result = self._loop(
            self._steps,
            self._steps_per_call,
            len(self._calls),
            self._next,
            count,
            ctypes.byref(failed),
        )
        if result:
            place, step = divmod(failed.value, self._steps_per_call)
            self._calls[place].fail(step, result)
        self._next = (self._next + count) % len(self._calls)


@functools.cache
def load() -> Any:
    """Return the compiled function, from the user's cache where it is there; None without one.

    A CDLL releases the interpreter's lock during calls, so that another thread can abort.
    """
    compiler = c_compiler()
    if compiler is None:
        return None
    try:
        loop: Any = _library(compiler).stepmark_issue
    except (OSError, subprocess.SubprocessError):  # also a library of another machine
        return None
    loop.argtypes = [POINTER(_Step), *[c_size_t] * 4, POINTER(c_size_t)]
    return loop


def _library(compiler: str) -> ctypes.CDLL:
    """Return the library of this source and compiler. Raises OSError, SubprocessError."""
    version = _run(compiler, "--version")
    parts = (_SOURCE.read_bytes(), compiler, version, platform.machine(), *_FLAGS)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        return ctypes.CDLL(str(user_cache() / "compiled" / f"{name}.so"))
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / f"{name}.so"
        _run(compiler, *_FLAGS, "-o", str(built), str(_SOURCE))
        with contextlib.suppress(OSError, RuntimeError):  # then the next run compiles it again
            _keep(built)
        return ctypes.CDLL(str(built))


def _keep(built: Path) -> None:
    """Copy the library to the cache, whole or not at all: other ranks may build it, too."""
    folder = user_cache() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    with built.open("rb") as source, replaced(folder / built.name) as target:
        shutil.copyfileobj(source, target)


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    )
    return done.stdout


def _packed(step: Step) -> _Step:
    """Return the step as C reads it."""
    *arguments, comm, stream = step.args or (c_void_p(), c_void_p())
    function: Any = step.func
    packed = _Step(
        function=ctypes.cast(function, c_void_p),
        signature=_SIGNATURES[tuple(type(each) for each in arguments)],
        comm=comm,
        stream=stream,
    )
    buffers = [each.value for each in arguments if isinstance(each, c_void_p)]
    integers = [each.value for each in arguments if isinstance(each, c_int)]
    packed.buffers[: len(buffers)] = buffers
    packed.integers[: len(integers)] = integers
    packed.count = next((each.value for each in arguments if isinstance(each, c_size_t)), 0)
    return packed
