"""The options of `stepmark op`: fields of the operator, and those of all families."""

import dataclasses
import functools
import types
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from stepmark.cases.case import ClockName, OpCase, Rate
from stepmark.ground.dtypes import OPERATOR_DTYPES, DType
from stepmark.ground.option_groups import MBS, MICRO_BATCH, Device, MeasureOptions
from stepmark.ground.options import (
    REAL,
    REQUIRED,
    WHOLE,
    WholeNumbers,
    Words,
    between,
    dashed,
    exact,
    flag,
    group,
    text_of,
)
from stepmark.model.ops import CUSTOM, FAMILIES, FAMILY_OF, Custom, Op
from stepmark.model.ops.custom import CUSTOM_DTYPES

LAYER = "all"  # in place of a family: all operators of a model's layer
FAMILY_WORDS = (*FAMILIES, CUSTOM, LAYER)
_SKEW = "Zipf exponent of tokens per expert; 0 = balanced"
_ZIPF = {"skew": ("--zipf", "--skew"), "alpha": ("--zipf", "--alpha")}


@group
class ModelShapes:
    """Shapes of a model."""

    models: tuple[str, ...] = flag(
        "model name(s), config.json or model_configs.json",
        default=(),
        argument=True,
        metavar="MODEL...",
        names="model",
    )
    model: str | None = flag(
        "the same as MODEL: one name, or several with commas", rare=True, names="model"
    )
    run_as: str = flag(
        "whose operators --model stands for: train, which does not divide its loss by --tp, "
        "megatron, fsdp",
        "--as",
        default="train",
        rare=True,
        metavar="train|megatron|fsdp",
    )
    mbs: WholeNumbers = flag(MBS, *MICRO_BATCH, default=(1,))
    seq_len: Annotated[int, between(1, 2**30)] | None = flag(
        "sequence length instead of the model's"
    )
    tp: int = flag("tensor-parallel degree", default=1)
    sequence_parallel: bool = flag(
        "norms on 1/tp of each sequence; --no: Megatron-LM's default [yes]",
        "--sequence-parallel/--no-sequence-parallel",
        default=True,
        rare=True,
    )
    ep: int = flag("expert-parallel degree", default=1, rare=True)
    dp_shard: int = flag("FSDP shards", default=1, rare=True)
    etp: int | None = flag("tensor-parallel degree of experts [tp]", rare=True)


@group
class Selection:
    """Selection."""

    scale: str | None = flag("1/64: scaled-down shapes; tiny: a tiny model")
    backend: Words = flag("backends [all but math, loop; on a CPU compile]", default=())


@group
class Devices(Device):
    """Device."""

    nproc: str | None = flag("devices measured at once: a number or all [1]", metavar="N|all")


@group
class Timing:
    """Timing."""

    clock: ClockName = flag(f"timing method: {', '.join(ClockName)}", default=ClockName.AUTO)
    rate: Rate | None = flag("half: 10 ms of work, 10 ms idle [sustained]")
    launches: Annotated[int, between(1, 100)] = flag(
        "times a case is measured, in new processes", default=1
    )
    steps: Annotated[int, between(1, 10**6)] | None = flag(
        "samples, each the mean of calls for about 1 ms "
        "[until the median is within 1 %, at most 1.5 s]"
    )
    warmups: Annotated[int, between(1, 10**6)] | None = flag(
        "calls before the first sample [a soak of 2 s]", rare=True
    )


@group
class OpOptions(Devices, Timing, MeasureOptions):
    """Operators."""

    family: Annotated[str, text_of(*FAMILY_WORDS)] | None = flag(
        "one of those above", argument=True, metavar="FAMILY"
    )
    style: str | None = flag("primus or param: that tool's columns", rare=True)

    def field(self, name: str) -> Any:
        """Return the text of an operator's field; None if it is not given or no field."""
        return getattr(self, name, None)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ConfigOptions(Selection, OpOptions):
    """Operators of a file."""

    config: Path | None = flag("run PARAM's JSON operator config")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LayerOptions(ModelShapes, Selection, OpOptions):
    """A model's layer."""

    family: str = flag("", default="", argument=True, metavar="FAMILY")
    dtype: str | None = flag(f"element type(s): {', '.join(OPERATOR_DTYPES)}")
    skew: str | None = flag(_SKEW, *_ZIPF["skew"])


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CustomOptions(OpOptions):
    """Your own operator."""

    family: str = flag("", default="", argument=True, metavar="FAMILY")
    function: str = flag(
        "function of a file that returns a stepmark.CustomOp; several with commas",
        default=REQUIRED,
        argument=True,
        metavar="FILE.py:FUNCTION",
    )
    dtype: str | None = flag(f"element type(s): {', '.join(CUSTOM_DTYPES)} [bf16; CPU: fp32]")
    arguments: tuple[str, ...] = flag(
        "value(s) of an argument of the function; several times for several arguments",
        "--arg",
        default=(),
        metavar="NAME=VALUE,...",
    )


@group
class FamilyOptions(ModelShapes, Selection, OpOptions):
    """Other sources of shapes.

    Fields of the operator are text, so that 128,256 sweeps and a+b packs a list.
    """

    family: str = flag("", default="", argument=True, metavar="FAMILY")
    shapes: str | None = flag(
        "JSON list of shapes (or Primus' attention_shapes.json)",
        rare=True,
        metavar="FILE",
    )


@functools.cache
def options_class(family: str | None) -> type[OpOptions]:
    """Return the options of a family, of LAYER, or of no family."""
    if family not in FAMILIES:
        return {LAYER: LayerOptions, CUSTOM: CustomOptions}.get(family or "", ConfigOptions)
    fields: dict[str, tuple[str, Any, Any]] = {}
    for field in dataclasses.fields(FAMILIES[family]):
        text, kind = _described(field)
        name = dashed(field.name)
        spelling = f"--{name}"
        if isinstance(field.default, bool):
            spelling = f"--{name}/--no-{name}"
        elif field.name == "phase":
            spelling = "--pass"
        spellings = _ZIPF.get(field.name, (spelling,))
        fields[field.name] = (field.name, kind, flag(text, *spellings))
    if family in ("gemm", "bmm"):  # it permutes the dimensions, so it is no field
        fields["phase"] = (
            "phase",
            str | None,
            flag("pass of a linear layer", "--pass", metavar="fwd|dgrad|wgrad"),
        )
    if family in ("gemm", "mlp", "embedding-bag"):
        fields["dataset"] = (
            "dataset",
            str | None,
            flag("PARAM's built-in shapes", metavar="A|B|C"),
        )
    if family == "gemm":
        text = "sweep for the highest rate, burst and sustained"
        fields["find_max"] = ("find_max", bool, flag(text, default=False))
    cls: type[OpOptions] = dataclasses.make_dataclass(
        "FamilyOptions",
        fields.values(),
        bases=(FamilyOptions,),
        namespace={"__doc__": f"Operator {family}."},
        frozen=True,
        kw_only=True,
        repr=False,
        eq=False,
    )
    return cls


def _described(field: "dataclasses.Field[Any]") -> tuple[str, Any]:
    """Return the help of an operator's field, with its default, and the type of its option."""
    text = str(field.metadata["help"])
    kind = field.type.__args__[0] if isinstance(field.type, types.UnionType) else field.type
    choices = field.metadata.get("allowed") or ()
    if not choices and isinstance(kind, type) and issubclass(kind, StrEnum):
        choices = OPERATOR_DTYPES if kind is DType else tuple(kind)
    reader = text_of(*map(str, choices))
    default = field.default
    if "low" in field.metadata:
        number = REAL if isinstance(default, float) else WHOLE
        reader = dataclasses.replace(reader, metavar=f"{number},...")
    elif choices and not reader.metavar and not text.endswith("]"):
        text += f": {', '.join(choices)}"
    if isinstance(default, bool):
        return f"{text} [{'yes' if default else 'no'}]", bool | None
    if default not in (None, (), dataclasses.MISSING):
        shown = exact(default) if isinstance(default, float) else default
        # As op_plan.dtypes chooses: CPUs emulate bf16.
        text += f" [{shown}; CPU: fp32]" if default is DType.BF16 else f" [{shown}]"
    return text, Annotated[str, reader] | None


def shape_options(op: Op) -> OpOptions:
    """Return the options that give this operator alone, on any device."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(op):
        value = getattr(op, field.name)
        is_default = value == field.default and field.name not in ("dtype", "phase")
        if value is not None and not is_default:
            text = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
            values[field.name] = value if isinstance(value, bool) else text
    family = FAMILY_OF[type(op)]
    return options_class(family)(family=family, **values)


def _own_options(op: Op, backend: str) -> OpOptions:
    if not isinstance(op, Custom):
        backends: dict[str, Any] = {"backend": (backend,)}
        return dataclasses.replace(shape_options(op), **backends)
    return CustomOptions(
        family=CUSTOM,
        function=f"{op.file}:{backend}",
        dtype=op.dtype.value,
        arguments=tuple(op.arguments.split()),
    )


def options_of(case: OpCase | Op) -> OpOptions:
    """Return the options that measure this case alone, or this operator on any device."""
    if not isinstance(case, OpCase):
        return shape_options(case)
    own = _own_options(case.op, case.backend)
    return dataclasses.replace(
        own,
        device=case.device,
        nproc=None if case.num_ranks == 1 else str(case.num_ranks),
        clock=case.clock,
        rate=case.rate,
    )
