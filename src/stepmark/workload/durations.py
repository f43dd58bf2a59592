"""How long each computation of a workload takes: from a rule, a device's data sheet, a profile
or a run's records. Communication is left as it is: its time depends on the network.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stepmark.core.device import DeviceSpec, find_device, load_devices
from stepmark.core.errors import ConfigError
from stepmark.core.ops import FAMILY_OF, Op, Phase
from stepmark.core.units import format_time
from stepmark.core.workload import ComputeOp, Kernel, Workload

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
    """No operation can be faster: the larger of flops / peak and bytes / memory bandwidth."""

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
    """Median seconds by operation, of a run's records."""

    times: Mapping[Op, float]
    name: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A run or a profile that the caller opens, to make a Measured or a Profile of it."""

    text: str


Source = Fixed | Roofline | Profile | Measured

_EXPONENTS = {"ns": -9, "us": -6, "ms": -3, "s": 0}

# AIOB's sections by our modules; of several alternatives the first that the profile has whole.
# Source: aliyun/aicb, workload_generator/mocked_model/training/Aiob{Megatron,DeepSeek}.py.
_UP, _ACTIVATION, _DOWN = ("mlp_linear_1",), ("mlp_gelu",), ("mlp_linear_2",)
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
        return Roofline(device=_device(value.strip(), text))
    if not text.strip():
        raise ConfigError(FIELD, text, "fixed:1ns, roofline:DEVICE, a run or an AIOB profile")
    return Named(text=text.strip())


def fill(workload: Workload, *sources: Source) -> Workload:
    """The same workload with a time for every computation, of the first source that has one.

    Raises ConfigError, naming the first few, where operations are left without a time.
    """
    times: dict[tuple[Op | Kernel, str, Phase], float] = {}
    missing: dict[str, None] = {}
    shared = _several_shapes(workload)
    for key in _computations(workload):
        if key in times:
            continue
        found = next(
            (time for one in sources if (time := _time(one, *key, shared)) is not None), None
        )
        if found is None:
            missing[f"{describe(key[0])} ({key[1]})"] = None
        else:
            times[key] = found
    words = ", ".join(one.name for one in sources)
    if missing:
        shown = "; ".join(list(missing)[:_NAMED_MISSING])
        more = len(missing) - _NAMED_MISSING
        rest = f"; and {more} more" if more > 0 else ""
        allowed = f"a source that times every operation; without a time are {len(missing)}: "
        raise ConfigError(FIELD, words, allowed + shown + rest)
    notes = tuple(note for note in workload.notes if not note.startswith(_NOTE))
    return replace(
        workload,
        blocks={
            name: tuple(
                replace(item, time_s=times[item.op, item.module, item.phase])
                if isinstance(item, ComputeOp) and not is_wait(item)
                else item
                for item in block
            )
            for name, block in workload.blocks.items()
        },
        notes=(*notes, f"{_NOTE}{words}."),
    )


def describe(op: Op | Kernel) -> str:
    """An operation in a few words, e.g. "gemm m=4096 n=512 k=64 dtype=bf16"."""
    return f"{family(op)} {shape(op)}"


def family(op: Op | Kernel) -> str:
    """As `stepmark op` names it, or "kernel"."""
    return "kernel" if isinstance(op, Kernel) else FAMILY_OF[type(op)]


def shape(op: Op | Kernel, *, dtype: bool = True) -> str:
    """Its fields that are no defaults, e.g. "m=4096 n=512 k=64 dtype=bf16"."""
    return " ".join(
        f"{field.name}={value}"
        for field in dataclasses.fields(op)
        if (value := getattr(op, field.name)) != field.default or field.name == "dtype"
        if dtype or field.name != "dtype"
    )


def roofline_time(op: Op | Kernel, device: DeviceSpec) -> float | None:
    """Seconds that the device needs at least. None where its cost or a peak is not known.

    A Kernel has no type: its FLOPs are held against the highest peak of the device. What
    costs nothing at all has no time either.
    """
    if op.flops is None or op.bytes_moved is None or device.hbm_bytes_per_s is None:
        return None
    bound_s = op.bytes_moved / device.hbm_bytes_per_s
    if not op.flops:
        return bound_s or None
    if isinstance(op, Kernel):
        peak = max(device.peak_flops_per_s.values(), default=None)
    else:
        peak = device.peak(op.dtype)
    return None if peak is None else max(bound_s, op.flops / peak)


def _seconds(value: str, text: str) -> float:
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(ns|us|ms|s)\s*", value, re.ASCII)
    seconds = float(f"{found[1]}e{_EXPONENTS[found[2]]}") if found else 0.0
    if not 0 < seconds <= 86400:
        raise ConfigError(FIELD, text, "a time above 0 and at most a day, e.g. fixed:1ns")
    return seconds


def _device(name: str, text: str) -> DeviceSpec:
    devices = load_devices()
    found = devices.get(name.lower()) or find_device(name)
    if found is None:
        some = ", ".join(list(devices)[:6])
        raise ConfigError(FIELD, text, f"one of {len(devices)} known devices: {some}, ...")
    return found


def _computations(workload: Workload) -> list[tuple[Op | Kernel, str, Phase]]:
    return [
        (item.op, item.module, item.phase)
        for block in workload.blocks.values()
        for item in block
        if isinstance(item, ComputeOp) and not is_wait(item)
    ]


def is_wait(item: ComputeOp) -> bool:
    """Whether it only waits, which takes as long as what is waited for."""
    return isinstance(item.op, Kernel) and item.op.is_wait


def _several_shapes(workload: Workload) -> set[tuple[str, Phase]]:
    """Modules that compute more than one shape: one section's time cannot be shared out."""
    first: dict[tuple[str, Phase], Op | Kernel] = {}
    found = set()
    for op, module, phase in _computations(workload):
        if first.setdefault((module, phase), op) != op:
            found.add((module, phase))
    return found


def _time(
    source: Source, op: Op | Kernel, module: str, phase: Phase, shared: set[tuple[str, Phase]]
) -> float | None:
    match source:
        case Fixed():
            return source.time_s
        case Roofline():
            return roofline_time(op, source.device)
        case Measured():
            return None if isinstance(op, Kernel) else source.times.get(op)
        case Profile():
            return None if (module, phase) in shared else _section(source, module, phase)


def section_of(module: str) -> str:
    """AIOB's section of one of our modules. "" where it has none of its own."""
    names = _SECTIONS.get(module, ((),))[0]
    return names[0] if names else ""


def _section(profile: Profile, module: str, phase: Phase) -> float | None:
    if phase not in _PASSES:
        return None
    for names in _SECTIONS.get(module, ()):
        if all(name in profile.sections for name in names):
            return _PASSES[phase] * sum(profile.sections[name] for name in names) or None
    return None
