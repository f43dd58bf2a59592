"""AIOB's profile: times of the parts of a model's forward pass, in microseconds.

    train_iter:10
    atten_qkv:
        time_gpu_max: 1255
        time_gpu_min: 862
        time_gpu_avg: 889

Source: aliyun/aicb, utils/utils.py (process_all_keys writes it, extract_averages reads it).
Samples above three times the least are not in max and avg. The file names no model, device,
type or shape, and has no backward pass.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.ground.errors import ConfigError
from stepmark.model.ops import Op, Phase
from stepmark.step.source_file import in_file, read_lines
from stepmark.step.workload import ComputeOp, Kernel, Workload
from stepmark.workloads.durations import computations, section_of

_FIRST = re.compile(r"(train_iter):(\d{1,9})|(inference_term):(\w{1,40})")
_SECTION = re.compile(r"(\w{1,80}):[ \t]*")
_TIME = re.compile(
    r"[ \t]+time_gpu_(max|min|avg):[ \t]*(\d{1,15}(?:\.\d{1,20})?(?:e-?\d{1,2})?)"
)
_TIMES = ("max", "min", "avg")
_OUTLIER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Seconds of one part of the model, over iterations."""

    max_s: float
    min_s: float
    avg_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A file's parts in its order; iterations of a training, or the phase of an inference."""

    parts: Mapping[str, Part]
    iterations: int | None = None
    inference_phase: str = ""


def read(path: Path) -> Profile:
    """Read a file. Raise ConfigError, with the line's number, if it has another format."""
    lines = read_lines(path, "AIOB profile")
    with in_file(path):
        first = _FIRST.fullmatch(lines[0].strip())
        if not first:
            raise ConfigError("line 1", lines[0], "train_iter:N or inference_term:PHASE")
        parts: dict[str, dict[str, float]] = {}
        section = ""
        for place, text in enumerate(lines[1:], start=2):
            line = text.rstrip("\r")
            if not line.strip():
                continue
            if heading := _SECTION.fullmatch(line):
                section = heading[1]
                if section in parts:
                    raise ConfigError(f"line {place}", line, "a part that has not come before")
                parts[section] = {}
            elif (time := _TIME.fullmatch(line)) and section and time[1] not in parts[section]:
                parts[section][time[1]] = float(time[2]) / 1e6
            else:
                raise ConfigError(f"line {place}", line, _ALLOWED)
        if not parts:
            raise ConfigError(f"line {len(lines)}", "no part", _ALLOWED)
        return Profile(
            parts={name: _part(name, times) for name, times in parts.items()},
            iterations=int(first[2]) if first[1] else None,
            inference_phase=first[4] or "",
        )


_ALLOWED = (
    "a part's name and :, or once each below it time_gpu_max, _min and _avg: MICROSECONDS"
)


def profile_text(profile: Profile) -> Iterator[str]:
    """Yield the text, a line at a time; equal times are written equally."""
    if profile.iterations is None:
        yield f"inference_term:{profile.inference_phase}\n"
    else:
        yield f"train_iter:{profile.iterations}\n"
    for name, part in profile.parts.items():
        yield f"{name}:\n"
        for key in _TIMES:
            seconds: float = getattr(part, f"{key}_s")
            yield f"    time_gpu_{key}: {seconds * 1e6:.15g}\n"


def _part(name: str, times: Mapping[str, float]) -> Part:
    missing = [key for key in _TIMES if key not in times]
    if missing:
        raise ConfigError(name, f"no time_gpu_{missing[0]}", "a part with max, min and avg")
    if not times["min"] <= times["avg"] <= times["max"]:
        text = " ".join(f"{times[key] * 1e6:g}" for key in ("min", "avg", "max"))
        raise ConfigError(name, text, "min <= avg <= max")
    return Part(max_s=times["max"], min_s=times["min"], avg_s=times["avg"])


def check(workload: Workload) -> None:
    """Raise ConfigError where AIOB has a part for nothing in the forward pass."""
    items = computations(workload)
    if not any(item.phase is Phase.FWD and section_of(item.module) for item in items):
        allowed = "it has no part for any operation of this workload's forward pass"
        raise ConfigError("format", "aiob", allowed)


Samples = Mapping[Op, Sequence[float]]  # seconds by operator


def write(workload: Workload, samples: Samples | None = None) -> Iterator[str]:
    """Yield the text. Raise ConfigError if no operator of AIOB's parts has a time.

    samples: of the operators that were measured. Of others max, min and avg are the time.
    """
    calls = list(_forward(workload, samples or {}))
    if not calls:
        allowed = "times of computation, which the profile is of"
        raise ConfigError("compute-from", "missing", allowed)
    sections: dict[str, list[_Call]] = {}
    for call in calls:
        sections.setdefault(call.section, []).append(call)
    parts = {name: _joined(section) for name, section in sections.items()}
    iterations = min((call.num_samples for call in calls if call.num_samples), default=1)
    yield from profile_text(Profile(parts=parts, iterations=iterations))


def omissions(workload: Workload, stages: Iterable[int] | None = None) -> list[str]:
    """Return what has no part in the profile."""
    left_out = dict.fromkeys(
        item.module
        for stage in range(len(workload.stages))
        for item in workload.tally(stage)
        if isinstance(item, ComputeOp) and not item.is_wait and not section_of(item.module)
    )
    return [
        "all but the time of the forward pass: shapes, types, communication, order",
        *(f"{module}: AIOB has no part for it" for module in left_out),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One operator of the forward pass. num_samples: 0 where only a time is known."""

    section: str
    times: int
    part: Part
    num_samples: int = 0


def _forward(workload: Workload, samples: Samples) -> Iterator[_Call]:
    """Yield what the forward pass calls, in the order of first use."""
    for stage in range(len(workload.stages)):
        for item, times in workload.tally(stage).items():
            if not isinstance(item, ComputeOp) or item.phase is not Phase.FWD:
                continue
            section = section_of(item.module)
            if not section or item.time_s is None or item.recompute:
                continue
            measured = () if isinstance(item.op, Kernel) else samples.get(item.op, ())
            # Leave out what AICB leaves out: samples above three times the least.
            seconds = measured or (item.time_s,)
            kept = [time_s for time_s in seconds if time_s <= _OUTLIER * min(seconds)]
            part = Part(max_s=max(kept), min_s=min(kept), avg_s=math.fsum(kept) / len(kept))
            yield _Call(section=section, times=times, part=part, num_samples=len(measured))


def _joined(calls: Sequence[_Call]) -> Part:
    """Return the extremes over calls, and their mean."""
    least = min(call.part.min_s for call in calls)
    most = max(call.part.max_s for call in calls)
    total = math.fsum(call.times * call.part.avg_s for call in calls)
    mean = total / sum(call.times for call in calls)
    # Rounding can put the mean of equal times beside them.
    return Part(max_s=most, min_s=least, avg_s=min(max(mean, least), most))
