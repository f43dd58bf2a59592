"""From options to the cases of `stepmark op`: shapes, element types, backends."""

import dataclasses
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from stepmark.cases.case import ClockName, Label, OpCase, Rate
from stepmark.ground.dtypes import DType, parse_dtype
from stepmark.ground.errors import ConfigError, not_one_of
from stepmark.ground.options import dashed, plain
from stepmark.measuring.machine import Machine
from stepmark.model.ops import (
    FAMILIES,
    Attention,
    Cast,
    Copy,
    Custom,
    Gemm,
    Op,
    Phase,
    Scaling,
)
from stepmark.model.ops.backends import BACKENDS, MODULES, Capabilities, usual
from stepmark.model.ops.custom import digest_of
from stepmark.model.ops.fields import number_or_text
from stepmark.model.parallel import ParallelConfig
from stepmark.model.product_precision import of_operators
from stepmark.operators.op_options import (
    CustomOptions,
    FamilyOptions,
    LayerOptions,
    ModelShapes,
    OpOptions,
    Selection,
)
from stepmark.step.layout import Inputs, layout_of, model_as
from stepmark.workloads import user_function
from stepmark.workloads.datasets import dataset
from stepmark.workloads.formats import benchmark_models, shapes
from stepmark.workloads.models import factor, read_models
from stepmark.workloads.operators import BY_FAMILY, ModelShape

Placed = tuple[Label, Op]

_SAME_AS = {  # a field that is not given takes another's value
    "seq_kv": "seq_q",
    "kv_heads": "heads",
    "head_dim_v": "head_dim_qk",
    "hidden": "input",
    "output": "input",
}
_DEFAULTS = {"batch": 1}
_LAYOUT_OF = {"fwd": "nt", "dgrad": "nn", "wgrad": "tn"}
_SCALED = ("batch", "seq_q", "seq_kv", "seq", "tokens", "m")  # fields that --scale multiplies
# The options that change the cases of each source of shapes; shape_source adds the operator's
# own fields. Options of OpOptions that are not named here change the cases of all sources.
_ANY = ("dtype", "scale", "rate")
_OF_MODEL = tuple(field.name for field in dataclasses.fields(ModelShapes))
_USED = {
    "model": (*_OF_MODEL, *_ANY, "phase", "skew", "scaling", "cast"),
    "shapes": ("shapes", *_ANY),
    "attention_shapes": ("shapes", *_ANY, "mbs", "phase"),
    "dataset": ("dataset", *_ANY, "phase", "optimizer", "alpha"),
    "find_max": ("find_max", "dtype"),
}
_EXPERTS = ("etp", "skew")  # options of layers with experts


def family_cases(options: FamilyOptions, machine: Machine) -> list[OpCase]:
    """Plan the cases of one family. Raises ConfigError."""
    placed = placed_ops(options, machine.device)
    if not placed and (phases := options.field("phase")):
        raise ConfigError("pass", phases, f"a pass that {options.family} has with these shapes")
    if not placed:
        raise ConfigError("model", options.model, f"a model with {options.family} operators")
    return cases(options.family, placed, options, machine)


def layer_cases(options: LayerOptions, machine: Machine) -> list[OpCase]:
    """Plan `op all`: a copy, one layer of each kind, the head, loss and optimizer."""
    if not options.model:
        raise ConfigError("model", "missing", "a model name or config.json for op all")
    layers = model_shapes(options, machine.device)
    copy = Copy(num_bytes=2**30 if machine.device == "cuda" else 2**27)
    # First, so that a short budget does not leave the ceiling of all others to the end.
    unscaled = dataclasses.replace(options, scale=None)
    planned = cases("copy", [(Label(role="copy"), copy)], unscaled, machine)
    for family, operators in BY_FAMILY.items():
        planned += cases(
            family, itertools.chain.from_iterable(map(operators, layers)), options, machine
        )
    return planned


def cases(
    family: str,
    placed: Iterable[Placed],
    options: OpOptions,
    machine: Machine,
) -> list[OpCase]:
    """Return a case per operator and backend; an operator in two places is measured once."""
    backends = BACKENDS[family]
    for name in options.field("backend"):
        if name not in backends:
            raise not_one_of("backend", name, backends, f" for {family}")
    limits = capabilities(machine)
    chosen = tuple(dict.fromkeys(options.field("backend")))

    def names(op: Op) -> Iterable[str]:
        # An operator that no backend runs stays once, so that the reason is recorded.
        return chosen or usual(family, op, limits) or backends[:1]

    return _op_cases(placed, names, options, machine)


def custom_cases(options: CustomOptions, machine: Machine) -> list[OpCase]:
    """Plan a case per function, type and combination of arguments. Raises ConfigError."""
    if options.style:
        rule = "left out: other benchmarks have no columns for your own operators"
        raise ConfigError("style", options.style, rule)
    file, colon, words = options.function.rpartition(":")
    functions = _words(words) if colon else []
    if not functions:
        raise ConfigError("FILE.py:FUNCTION", options.function, "a file and a function of it")
    for function in functions:
        path, _ = user_function.parse(f"{file}:{function}")
    placed = [
        (
            Label(role=path.name),
            Custom(
                file=file,
                digest=digest_of(path),
                arguments=" ".join(arguments),
                dtype=dtype,
            ),
        )
        for dtype in dtypes(options, machine.device)
        for arguments in itertools.product(*_argument_words(options.arguments))
    ]
    return _op_cases(placed, lambda op: functions, options, machine)


def _argument_words(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield NAME=VALUE of each value of each argument. Raises ConfigError."""
    names = {"device", "dtype"}
    for text in texts:
        name, _, values = text.partition("=")
        if name in names:
            allowed = "given once" if name not in ("device", "dtype") else f"given as --{name}"
            raise ConfigError("arg", text, allowed)
        if not name.isidentifier() or not _words(values) or " " in values.strip():
            raise ConfigError("arg", text, "NAME=VALUE, or NAME=VALUE,VALUE without spaces")
        names.add(name)
        yield [f"{name}={value}" for value in _words(values)]


def _op_cases(
    placed: Iterable[Placed],
    backends_of: Callable[[Op], Iterable[str]],
    options: OpOptions,
    machine: Machine,
) -> list[OpCase]:
    if machine.device == "cpu" and options.clock not in (ClockName.AUTO, ClockName.HOST):
        raise ConfigError("clock", options.clock, "auto or host on a CPU")
    num_ranks = machine.num_ranks(options.nproc)
    labels: dict[Op, dict[Label, None]] = {}
    for label, op in placed:
        labels.setdefault(op, {})[label] = None
    return [
        OpCase(
            op=op,
            backend=backend,
            device=machine.device,
            num_ranks=num_ranks,
            clock=options.clock,
            rate=options.rate or Rate.SUSTAINED,
            labels=tuple(places),
            scale=options.field("scale") or "",
        )
        for op, places in labels.items()
        for backend in backends_of(op)
    ]


def capabilities(machine: Machine) -> Capabilities:
    """Return what decides which backends run; another machine's packages are taken as here."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return Capabilities(
        device_type=machine.device,
        capability=machine.capability,
        is_rocm=machine.is_rocm,
        has_compiler=not machine.is_here or any(name and shutil.which(name) for name in names),
        modules=frozenset(name for name in MODULES if importlib.util.find_spec(name)),
    )


def dtypes(options: OpOptions, device: str) -> list[DType]:
    """Return --dtype, else bf16 on accelerators and fp32 on CPUs, which emulate bf16."""
    default = DType.BF16 if device == "cuda" else DType.FP32
    return [parse_dtype(text) for text in _words(options.field("dtype"))] or [default]


def placed_ops(options: FamilyOptions, device: str) -> list[Placed]:
    """Return the operators that the options name, labelled with their place in a model."""
    source = shape_source(options)
    find = {
        "model": _from_model,
        "shapes": _from_file,
        "attention_shapes": _from_primus,
        "dataset": _from_dataset,
        "fields": _from_fields,
    }
    return list(find[source](options, device))


def shape_source(options: FamilyOptions) -> str:
    """Return the source of shapes, as in _USED. Raises ConfigError for what it ignores."""
    fields = dataclasses.fields(FAMILIES[options.family])
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    *most, last = (f"--{dashed(name)}" for name in required)
    by_hand = f"{', '.join(most)} and {last}" if most else last
    declared = {field.name for field in dataclasses.fields(options)}
    flags = {name: f"--{dashed(name)}" for name in _USED if name in declared}
    named = [name for name in flags if options.field(name)]
    if not named and all(options.field(name) is None for name in required):
        raise ConfigError("shape", "missing", f"{by_hand}, or {' or '.join(flags.values())}")
    source = named[0] if named else "fields"
    if source == "shapes" and options.family == "attention":
        first = shapes.read_objects(Path(options.shapes or ""))[:1]
        # Primus' attention_shapes.json
        source = "attention_shapes" if any("seqlen_q" in item for item in first) else source
    used = _USED | {"fields": (*(field.name for field in fields), *_ANY, "phase")}
    of_all = (*dataclasses.fields(OpOptions), *dataclasses.fields(Selection))
    shared = {field.name for field in of_all} - set(_ANY)
    title = (flags | {"attention_shapes": "--shapes", "fields": by_hand})[source]
    for name, value in plain(options).items():
        if name in shared or name in used[source]:
            continue
        if name in (*flags, *required):
            rule = f"it cannot be combined with {title}: give one source of shapes"
        else:
            users = [flag for each, flag in flags.items() if name in used[each]]
            users += [by_hand] * (name in used["fields"])
            rule = f"it has no effect with {title}"
            rule += f", only with {' or '.join(users)}" if len(users) < 3 else ""
        raise ConfigError(dashed(name), value, rule)
    return source


def _from_model(options: FamilyOptions, device: str) -> Iterator[Placed]:
    phases = _phases(options)
    for shape in model_shapes(options, device):
        if options.family not in BY_FAMILY:
            allowed = f"it gives shapes of {', '.join(BY_FAMILY)} only"
            raise ConfigError("model", shape.model.name, allowed)
        for label, op in BY_FAMILY[options.family](shape):
            if not phases or label.phase in phases:
                yield label, op


def model_shapes(options: FamilyOptions | LayerOptions, device: str) -> list[ModelShape]:
    """Return one per model, micro-batch and dtype, as the framework of --as runs them."""
    axes = ParallelConfig(tp=options.tp, ep=options.ep, dp_shard=options.dp_shard)
    sequence = options.sequence_parallel
    layout = layout_of(options.run_as, axes, etp=options.etp, sequence_parallel=sequence)
    models = [
        model_as(options.run_as, model, axes.tp)
        for model in read_models(options.model, options.scale, axes.tp)
    ]
    for model in models:
        layout.check(model)
    types = dtypes(options, device)
    unused = [] if any(model.moe for model in models) else [*_EXPERTS]
    rules = dict.fromkeys(unused, "only for a model with experts")
    if not any(dtype.is_fp8 for dtype in types):
        rules["scaling"] = "only with an fp8 --dtype"
    if not any(dtype.is_narrow for dtype in types):
        rules["cast"] = "only with an fp8 or narrower --dtype"
    for name, rule in rules.items():
        if (value := options.field(name)) not in (None, "none"):
            raise ConfigError(name, value, rule)
    # The tiny model has a short sequence of its own.
    share = factor(options.scale if options.scale not in (None, "tiny") else "1")
    return [
        ModelShape(
            model=model,
            layout=layout,
            inputs=Inputs(
                mbs=_times(mbs, share),
                # A rank has a part of the sequence where tensor parallelism divides it.
                seq_len=_times(options.seq_len or model.seq_len, share, grain=axes.tp),
                dtype=DType.BF16 if dtype.is_narrow else dtype,
                products=of_operators(
                    dtype,
                    _member(Scaling, options.field("scaling"), "scaling"),
                    _member(Cast, options.field("cast"), "cast"),
                ),
                skew=_number(options.field("skew"), "skew"),
            ),
        )
        for model in models
        for mbs in options.mbs
        for dtype in types
    ]


def _from_file(options: FamilyOptions, device: str) -> Iterator[Placed]:
    path = Path(options.shapes or "")
    for dtype in dtypes(options, device):
        for label, op in shapes.read_shapes(path, options.family, {"dtype": dtype}):
            yield label, _scaled(op, options)


def _from_primus(options: FamilyOptions, device: str) -> Iterator[Placed]:
    both = [Phase.FWD, Phase.BWD]
    phases = [phase for phase in _phases(options) or both if phase in both]
    rows = benchmark_models.read_attention_shapes(Path(options.shapes or ""))
    types = dtypes(options, device)
    for dtype, shape, mbs, phase in itertools.product(types, rows, options.mbs, phases):
        op = Attention(
            batch=mbs,
            seq_q=shape.seqlen_q,
            seq_kv=shape.seqlen_kv,
            heads=shape.num_head_q,
            kv_heads=shape.num_head_kv,
            head_dim_qk=shape.head_dim_qk,
            head_dim_v=shape.head_dim_v,
            causal=shape.causal,
            dtype=dtype,
            phase=phase,
        )
        label = Label(model=shape.model, role="attention", phase=phase, mbs=mbs)
        yield label, _scaled(op, options)


def _from_dataset(options: FamilyOptions, device: str) -> Iterator[Placed]:
    name = options.field("dataset")
    phases = _phases(options)
    changes: dict[str, Any] = {}
    if optimizer := options.field("optimizer"):
        changes["optimizer"] = optimizer
    if alpha := options.field("alpha"):
        changes["alpha"] = _number(alpha, "alpha")
    # PARAM's own default, whatever the device.
    for dtype in dtypes(options, "cpu"):
        for op in dataset(options.family, name, dtype):
            phase = getattr(op, "phase", Phase.FWD)
            if not phases or phase in phases:
                label = Label(role=f"dataset {name.upper()}", phase=phase)
                yield label, _scaled(dataclasses.replace(op, **changes), options)


def _from_fields(options: FamilyOptions, device: str) -> Iterator[Placed]:
    """Yield the product of all comma-separated lists."""
    kind = FAMILIES[options.family]
    names = {field.name for field in dataclasses.fields(kind)}
    values = _field_values(options, device)
    for combination in itertools.product(*values.values()):
        item = dict(zip(values, combination, strict=True))
        for name, twin in _SAME_AS.items():
            if name in names and name not in item and twin in item:
                item[name] = item[twin]
        for phase, changed in _passes(item, options):
            yield Label(phase=phase), _scaled(kind(**changed), options)


def _field_values(options: FamilyOptions, device: str) -> dict[str, list[Any]]:
    """Return the values of every field that is given. Raises ConfigError for a missing one."""
    values: dict[str, list[Any]] = {}
    for field in dataclasses.fields(FAMILIES[options.family]):
        text = options.field(field.name)
        if field.name == "phase":
            continue
        if field.name == "dtype":
            if _words(text) or field.default is not DType.FP32:
                values["dtype"] = list(dtypes(options, device))
        elif text is not None:
            words = [text] if isinstance(text, bool) else _words(text)
            if not words:
                raise ConfigError(f"--{dashed(field.name)}", text, "at least one value")
            values[field.name] = [_read(field.name, word) for word in words]
        elif field.default is dataclasses.MISSING and _SAME_AS.get(field.name) not in values:
            if field.name not in _DEFAULTS:
                flag = f"--{dashed(field.name)}"
                raise ConfigError(flag, "missing", field.metadata["help"])
            values[field.name] = [_DEFAULTS[field.name]]
    return values


def _passes(item: dict[str, Any], options: FamilyOptions) -> Iterator[tuple[Phase, Any]]:
    """Yield an item per pass: a GEMM with its dimensions permuted, others with a field."""
    family = options.family
    phases = _phases(options)
    if family not in ("gemm", "bmm"):
        fields = {field.name: field for field in dataclasses.fields(FAMILIES[family])}
        allowed = fields["phase"].metadata["allowed"]
        matched = [phase for phase in phases if phase in allowed]
        if phases and not matched:
            raise not_one_of("pass", options.field("phase"), allowed, f" for {family}")
        for name in matched or allowed:
            yield Phase(name), item | {"phase": name}
        return
    if phases and "layout" in item:
        allowed = "it cannot be combined with --pass, which implies it"
        raise ConfigError("layout", item["layout"], allowed)
    if not phases:
        yield Phase.FWD, item
    m = item["m"]
    n = item["n"]
    k = item["k"]
    dims = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    for phase in phases:
        if phase in dims:
            rows, columns, inner = dims[phase]
            is_narrow = family == "gemm" and item["dtype"].is_narrow
            layout = "nt" if is_narrow else _LAYOUT_OF[phase]
            yield phase, item | {"m": rows, "n": columns, "k": inner, "layout": layout}


def _phases(options: OpOptions) -> list[Phase]:
    """Return --pass, in which bwd stands for dgrad and wgrad, too."""
    phases: list[Phase] = []
    for word in _words(options.field("phase")):
        phase = _member(Phase, word.lower(), "pass")
        phases += [phase] if phase is not Phase.BWD else [Phase.BWD, Phase.DGRAD, Phase.WGRAD]
    return phases


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _number(text: str | None, field: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise ConfigError(field, text, "a number") from None


def _member(kind: Any, text: str | None, field: str) -> Any:
    try:
        return kind(text or "none")
    except ValueError:
        raise not_one_of(field, text, kind) from None


def _read(field: str, text: Any) -> Any:
    """Return a number for a number, a list for a+b, and other text as it is."""
    if isinstance(text, bool):
        return text
    if field == "varlen":
        return [_read("", part) for part in text.split("+")]
    return number_or_text(text)


def _scaled(op: Op, options: OpOptions) -> Op:
    """Multiply an operator's sequence length and batch by --scale."""
    scale = options.field("scale")
    if not scale:
        return op
    share = factor("1/64" if scale == "tiny" else scale)
    names = ("m",) if isinstance(op, Gemm) else _SCALED
    fields = {field.name for field in dataclasses.fields(op)}
    changes: dict[str, Any] = {
        name: _times(getattr(op, name), share) for name in names if name in fields
    }
    return dataclasses.replace(op, **changes)


def _times(value: int, share: Fraction, grain: int = 1) -> int:
    """Return a length or a batch times --scale: a multiple of `grain`, and at least that."""
    return value if share == 1 else max(1, round(value * share / grain)) * grain
