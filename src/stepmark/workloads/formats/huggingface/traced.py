"""Read a family that no reader of families.py knows through transformers, if it is installed.

transformers builds the family's class in a process of its own, on the meta device, and one
forward pass is traced there: see stepmark.capture.transformers_trace.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.packages import require
from stepmark.step.source_file import one_line, read_json
from stepmark.workloads.architecture import Architecture, Batch
from stepmark.workloads.formats.huggingface.trace import (
    Trace,
    TraceAnswer,
    TraceRequest,
    transformers_version,
)
from stepmark.workloads.formats.huggingface.traced_units import architecture_of

PROGRAM = "stepmark.capture.transformers_trace"
LIMIT_S = 180.0
_LARGEST = 2**24
_MOST_LAYERS = 1000
_MOST_VALUES = 100_000
_DEPTH = re.compile(r"layers?$|blocks?$|depth|nextn")  # keys that number modules in a row
_TORCH_TYPES = {
    DType.BF16: "bfloat16",
    DType.FP16: "float16",
    DType.FP32: "float32",
    DType.TF32: "float32",
    DType.FP64: "float64",
}


def read_architecture(path: Path, batch: Batch) -> tuple[Architecture, tuple[str, ...]]:
    """Return the architecture of a config for a batch, and notes. Raises ConfigError."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: config", one_line(raw), "an object")
    _check_sizes(raw, f"{path}: ")
    if batch.dtype not in _TORCH_TYPES:
        raise not_one_of("dtype", batch.dtype, _TORCH_TYPES)
    request = TraceRequest(
        config=raw, mbs=batch.mbs, seq_len=batch.seq_len, dtype=_TORCH_TYPES[batch.dtype]
    )
    trace = _traced(request, path)
    name = path.parent.name if path.name == "config.json" else path.stem
    architecture = architecture_of(trace, name or trace.name, batch, str(path))
    return architecture, tuple(_notes(trace))


def _check_sizes(raw: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for a size that no model has, before anything of it is built."""
    values = list(_values(raw, where))
    if len(values) > _MOST_VALUES:
        raise ConfigError(f"{where}config", len(values), f"at most {_MOST_VALUES} values")
    for name, value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        is_depth = _DEPTH.search(re.split(r"[.: ]", name)[-1])
        most = _MOST_LAYERS if is_depth else _LARGEST
        if abs(value) > most:
            raise ConfigError(name, value, f"a whole number up to {most}")


def _values(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            dot = "" if name.endswith(": ") else "."
            yield from _values(item, f"{name}{dot}{ascii(key[:80])[1:-1]}")
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, name)
    else:
        yield name, value


def _traced(request: TraceRequest, path: Path) -> Trace:
    """Return what the process traces. Raises ConfigError, also where it ends without answer."""
    require("torch")
    family = str(request.config.get("model_type", ""))[:80]
    root = str(Path(__file__).parents[4])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", PROGRAM],
            input=msgspec.json.encode(request),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, **offline, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        rule = f"a family whose forward pass is traced within {LIMIT_S:.0f} s"
        raise ConfigError(f"{path}: model_type", family, rule) from None
    try:
        answer = msgspec.json.decode(done.stdout, type=TraceAnswer)
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        words = f"it ended with code {done.returncode}: {lines[-1][:200]}"
        rule = f"a family that transformers {transformers_version()} can build; {words}"
        raise ConfigError(f"{path}: model_type", family, rule) from None
    if answer.trace is None:
        refusal = answer.refusal
        if refusal is None:
            raise TypeError("a trace or a refusal")
        field = refusal.field if refusal.field == "seq-len" else f"{path}: {refusal.field}"
        raise ConfigError(field, refusal.value, refusal.allowed)
    return answer.trace


def _notes(trace: Trace) -> Iterator[str]:
    yield (
        f"read through transformers {trace.version}: {trace.name}, the products of one traced "
        "forward pass, without dropout; no tensor parallelism, no experts over ranks"
    )
    yield (
        "other kernels of a layer are one kernel, elementwise, with the bytes that eager code "
        "moves, 1.5 times as many backward; compiled or fused code moves fewer"
    )
    if trace.loops:
        yield (
            f"{', '.join(trace.loops)}: its recurrence is counted as its Python loop over "
            "tokens runs, which moves many times the bytes of a fused kernel"
        )
    if trace.masked:
        yield (
            f"{', '.join(trace.masked)}: attention under a mask whose values depend on "
            "tensors, of which all query-key pairs are counted"
        )
    if trace.unread:
        more = f" and {len(trace.unread) - 8} more" if len(trace.unread) > 8 else ""
        keys = ", ".join(ascii(key[:80])[1:-1] for key in trace.unread[:8])
        yield f"keys that the config of {trace.name} does not declare: {keys}{more}"
