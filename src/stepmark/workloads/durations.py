"""Times of a workload's computation: fixed, from a data sheet, a profile or a run's records.

Communication is left as it is: its time depends on the network.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stepmark.ground.errors import ConfigError
from stepmark.ground.units import format_time
from stepmark.model.device import DeviceSpec, find_device_by_alias, unknown_device
from stepmark.model.ops import FAMILY_OF, Op, Phase
from stepmark.step.roofline import roofline_time
from stepmark.step.workload import ComputeOp, Kernel, Workload

FIELD = "compute-from"
_NOTE = "Compute times: "
_NAMED_MISSING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Every operation takes this long. AICB's own filler is 1 ns."""

    time_s: float

    @property
    def name(self) -> str:
        return f"{format_time(self.time_s)} each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The device's lower bound: the larger of flops / peak and bytes / memory bandwidth."""

    device: DeviceSpec

    @property
    def name(self) -> str:
        return f"roofline of {self.device.names[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of the forward pass by section, as AICB's AIOB profiler names sections."""

    sections: Mapping[str, float]
    name: str = "AIOB profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Median seconds by operation, from a run's records."""

    times: Mapping[Op, float]
    name: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The times that the workload has already."""

    name: str = "the file's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A run or a profile that the caller reads into a Measured or a Profile."""

    text: str


Source = Fixed | Roofline | Profile | Measured | Own

_EXPONENTS = {"ns": -9, "us": -6, "ms": -3, "s": 0}

# AIOB's sections by our modules; of several alternatives the first complete one is used.
# Source: aliyun/aicb, workload_generator/mocked_model/training/Aiob{Megatron,DeepSeek}.py.
_UP = ("mlp_linear_1",)
_ACTIVATION = ("mlp_gelu",)
_DOWN = ("mlp_linear_2",)
_SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "embedding": (("Emb",),),
    "attention.norm": (("layernorm",),),
    "attention.qkv": (("atten_qkv",),),
    "attention.q_down": (("attention_linear_q_lora",),),
    "attention.q_up": (("attention_q_column",),),
    "attention.kv_down": (("attention_linear_kv_lora",),),
    "attention.kv_up": (("attention_kv_column",),),
    "attention.core": (
        ("atten_flash",),
        ("atten_core_qk", "atten_core_softmax", "atten_core_contex"),
    ),
    "attention.out": (("atten_linear",), ("attention_o_row",)),
    "mlp.norm": (("layernorm2",),),
    "mlp.up": (_UP,),
    "mlp.gate_up": (_UP,),
    "mlp.activation": (_ACTIVATION,),
    "mlp.down": (_DOWN,),
    "mlp.experts_up": (_UP,),
    "mlp.experts_gate_up": (_UP,),
    "mlp.experts_activation": (_ACTIVATION,),
    "mlp.experts_down": (_DOWN,),
    "head.norm": (("layernorm_post",),),
    "head": (("logit_time",),),
}

# AICB gives the gradient of the input and that of the weights the time of the forward pass.
# Source: aliyun/aicb, utils/utils.py, extract_averages.
_PASSES = {Phase.FWD: 1, Phase.DGRAD: 1, Phase.WGRAD: 1, Phase.BWD: 2}


def parse_source(text: str) -> Fixed | Roofline | Named:
    """Read fixed:1ns, roofline:h100-sxm, or else the name of a run or of a profile.

    A device is named as in hardware.toml or as it reports itself. Raises ConfigError.
    """
    kind, colon, value = text.strip().partition(":")
    kind = kind.strip().lower()
    if kind == "fixed" and colon:
        return Fixed(time_s=_seconds(value, text))
    if kind == "roofline" and colon:
        name = value.strip()
        device = find_device_by_alias(name)
        if device is None:
            raise unknown_device(name, field=FIELD)
        return Roofline(device=device)
    if not text.strip():
        raise ConfigError(FIELD, text, "fixed:1ns, roofline:DEVICE, a run or an AIOB profile")
    return Named(text=text.strip())


def fill(workload: Workload, *sources: Source, partial: bool = False) -> Workload:
    """Return the workload with a time for every computation, from the first source with one.

    Raises ConfigError, naming the first few, where operations have no time; partial: they stay
    without one. The note names the sources that gave a time.
    """
    filled: dict[ComputeOp, ComputeOp] = {}
    used: set[str] = set()
    timed = _in_sections(workload)
    for item in dict.fromkeys(computations(workload)):
        filled[item] = replace(item, time_s=None)
        for source in sources:
            if (time_s := _time(source, item, timed)) is not None:
                filled[item] = replace(item, time_s=time_s)
                used.add(source.name)
                break
    blocks = {
        name: tuple(
            filled.get(item, item) if isinstance(item, ComputeOp) else item for item in block
        )
        for name, block in workload.blocks.items()
    }
    result = replace(workload, blocks=blocks)
    if not partial and (missing := untimed(result)):
        words = ", ".join(source.name for source in sources)
        allowed = f"a source that times every operation; without a time are {len(missing)}: "
        raise ConfigError(FIELD, words, allowed + first_few(missing))
    keeps = any(isinstance(source, Own) and source.name in used for source in sources)
    notes = [note for note in workload.notes if keeps or not note.startswith(_NOTE)]
    words = ", ".join(source.name for source in sources if source.name in used)
    return replace(result, notes=(*notes, f"{_NOTE}{words}.") if used else tuple(notes))


def computations(workload: Workload) -> list[ComputeOp]:
    """Return the operations that compute, in the order of the file."""
    return [
        item
        for block in workload.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and not item.is_wait
    ]


def untimed(workload: Workload) -> list[str]:
    """Return what has no time: distinct operations with their modules."""
    items = (item for item in computations(workload) if item.time_s is None)
    return list(dict.fromkeys(f"{describe(item.op)} ({item.module})" for item in items))


def first_few(names: Sequence[str]) -> str:
    """Return the first three, and how many more there are."""
    more = len(names) - _NAMED_MISSING
    return "; ".join(names[:_NAMED_MISSING]) + (f"; and {more} more" if more > 0 else "")


def describe(op: Op | Kernel) -> str:
    """Return an operation in a few words, e.g. "gemm m=4096 n=512 k=64 dtype=bf16"."""
    return f"{family(op)} {shape(op)}"


def family(op: Op | Kernel) -> str:
    """Return the name that `stepmark op` has for it, or "kernel"."""
    return "kernel" if isinstance(op, Kernel) else FAMILY_OF[type(op)]


def shape(op: Op | Kernel, *, dtype: bool = True) -> str:
    """Return the fields that are no defaults, e.g. "m=4096 n=512 k=64 dtype=bf16"."""
    return " ".join(
        f"{field.name}={value}"
        for field in dataclasses.fields(op)
        if (value := getattr(op, field.name)) != field.default or field.name == "dtype"
        if dtype or field.name != "dtype"
    )


def _seconds(value: str, text: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(ns|us|ms|s)\s*", value, re.ASCII)
    seconds = float(f"{match[1]}e{_EXPONENTS[match[2]]}") if match else 0.0
    if not 0 < seconds <= 86400:
        raise ConfigError(FIELD, text, "a time above 0 and at most a day, e.g. fixed:1ns")
    return seconds


def _in_sections(workload: Workload) -> set[tuple[str, Phase, Op | Kernel]]:
    """Return what a section's time is of, by module and pass: one that computes one shape.

    Kernels beside an operator of their module, such as the sum of its bias gradients, are left
    out.
    """
    shapes: dict[tuple[str, Phase], set[Op | Kernel]] = {}
    for item in computations(workload):
        shapes.setdefault((item.module, item.phase), set()).add(item.op)
    timed = set()
    for place, all_shapes in shapes.items():
        own = {op for op in all_shapes if not isinstance(op, Kernel)} or all_shapes
        if len(own) == 1:
            timed.add((*place, *own))
    return timed


def _time(
    source: Source, item: ComputeOp, timed: set[tuple[str, Phase, Op | Kernel]]
) -> float | None:
    match source:
        case Fixed():
            return source.time_s
        case Roofline():
            return roofline_time(item.op, source.device)
        case Measured():
            return None if isinstance(item.op, Kernel) else source.times.get(item.op)
        case Profile():
            if (item.module, item.phase, item.op) not in timed:
                return None
            return _section(source, item.module, item.phase)
        case Own():
            return item.time_s


def section_of(module: str) -> str:
    """Return AIOB's section for one of our modules; "": there is none."""
    names = _SECTIONS.get(module, ((),))[0]
    return names[0] if names else ""


def _section(profile: Profile, module: str, phase: Phase) -> float | None:
    if phase not in _PASSES:
        return None
    for names in _SECTIONS.get(module, ()):
        if all(name in profile.sections for name in names):
            return _PASSES[phase] * sum(profile.sections[name] for name in names) or None
    return None
