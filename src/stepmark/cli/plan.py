"""From flags to cases: which shapes, in which types, through which backends."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stepmark.app.models import factor, read_models
from stepmark.cli.options import Values, whole_numbers, words
from stepmark.core.case import ClockName, Label, OpCase, Rate
from stepmark.core.dtypes import DType, parse_dtype
from stepmark.core.errors import ConfigError
from stepmark.core.ops import FAMILIES, Attention, Cast, Gemm, Op, Phase, Scaling
from stepmark.core.parallel import ParallelConfig

Placed = tuple[Label, Op]

# A field that is not given takes another's value.
_SAME_AS = {
    "seq_kv": "seq_q",
    "kv_heads": "heads",
    "head_dim_v": "head_dim_qk",
    "hidden": "input",
    "output": "input",
}
_START = {"batch": 1}
_LAYOUT_OF = {"fwd": "nt", "dgrad": "nn", "wgrad": "tn"}


def default_dtypes(values: Values, device: str) -> list[DType]:
    """bf16 on accelerators; fp32 on CPUs, most of which emulate bf16."""
    given = words(values.get("dtype"))
    return [parse_dtype(text) for text in given] or [
        DType.BF16 if device == "cuda" else DType.FP32
    ]


def placed_ops(family: str, values: Values, device: str) -> list[Placed]:
    """The operators that the flags name, with what is known of their place in a model."""
    sources = [name for name in ("model", "shapes", "dataset") if values.get(name)]
    fields = {field.name: field for field in dataclasses.fields(FAMILIES[family])}
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    explicit = [name for name in required if values.get(name) is not None]
    if explicit:
        sources.append("--" + explicit[0].replace("_", "-"))
    if len(sources) > 1:
        raise ConfigError("shape", " and ".join(sources), "one source of shapes at a time")
    if not sources:
        flags = " ".join("--" + name.replace("_", "-") for name in required)
        raise ConfigError("shape", "missing", f"{flags}, or --model, --shapes or --dataset")
    if values.get("model"):
        return [
            item
            for shape in layer_shapes(values, device)
            for item in _of_model(family, shape, values)
        ]
    if values.get("shapes"):
        return list(_of_file(family, values, device))
    if values.get("dataset"):
        return list(_of_dataset(family, values))
    return list(_explicit(family, values, device))


def _of_model(family: str, shape: Any, values: Values) -> Iterator[Placed]:
    from stepmark.workload.operators import BY_FAMILY  # noqa: PLC0415

    if family not in BY_FAMILY:
        raise ConfigError(
            "model", shape.model.name, f"it gives shapes of {', '.join(BY_FAMILY)} only"
        )
    wanted = phases(values)
    for label, op in BY_FAMILY[family](shape):
        if not wanted or label.phase in wanted:
            yield label, op


def phases(values: Values) -> list[Phase]:
    """--pass; bwd stands for dgrad and wgrad too."""
    chosen: list[Phase] = []
    for word in words(values.get("phase")):
        try:
            phase = Phase(word.lower())
        except ValueError:
            raise ConfigError("pass", word, f"one of {', '.join(Phase)}") from None
        chosen += [phase] if phase is not Phase.BWD else [Phase.BWD, Phase.DGRAD, Phase.WGRAD]
    return chosen


def layer_shapes(values: Values, device: str) -> list[Any]:
    """One per model, micro-batch and dtype, as the framework of --as runs them."""
    from stepmark.workload.layout import Inputs, layout_of  # noqa: PLC0415
    from stepmark.workload.operators import ModelShape  # noqa: PLC0415

    axes = {name: values.get(name) for name in ("tp", "ep", "dp_shard")}
    parallel = ParallelConfig(**{name: n for name, n in axes.items() if n is not None})
    layout = layout_of(values.get("run_as") or "train", parallel, etp=values.get("etp"))
    shapes = []
    for model in read_models(values.get("model"), values.get("scale"), parallel.tp):
        layout.check(model)
        seq_len = values.get("seq_len")
        seq_len = model.seq_len if seq_len is None else seq_len
        if not 1 <= seq_len <= 2**30:
            raise ConfigError("seq-len", seq_len, "from 1 to 1073741824")
        for mbs in whole_numbers(values["mbs"], "mbs"):
            for dtype in default_dtypes(values, device):
                inputs = Inputs(
                    mbs=mbs,
                    seq_len=seq_len,
                    dtype=dtype,
                    skew=_number(values.get("skew"), "skew"),
                    scaling=_member(Scaling, values.get("scaling"), "scaling", Scaling.NONE),
                    cast=_member(Cast, values.get("cast"), "cast", Cast.NONE),
                )
                shapes.append(ModelShape(model=model, layout=layout, inputs=inputs))
    return shapes


def _number(text: str | None, field: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise ConfigError(field, text, "a number") from None


def _member(kind: Any, text: str | None, field: str, default: Any) -> Any:
    try:
        return kind(text) if text else default
    except ValueError:
        raise ConfigError(field, text, f"one of {', '.join(kind)}") from None


def _of_file(family: str, values: Values, device: str) -> Iterator[Placed]:
    from stepmark.workload.formats.shapes import read_objects, read_shapes  # noqa: PLC0415

    path = Path(values["shapes"])
    for dtype in default_dtypes(values, device):
        if family == "attention" and any("seqlen_q" in item for item in read_objects(path)[:1]):
            yield from _primus_attention(path, values, dtype)
            continue
        for label, op in read_shapes(path, family, {"dtype": dtype}):
            yield label, _scaled(op, values)


def _primus_attention(path: Path, values: Values, dtype: DType) -> Iterator[Placed]:
    from stepmark.workload.formats.benchmark_models import read_attention_shapes  # noqa: PLC0415

    for shape in read_attention_shapes(path):
        for mbs in whole_numbers(values["mbs"], "mbs"):
            for phase in phases(values) or [Phase.FWD, Phase.BWD]:
                if phase not in (Phase.FWD, Phase.BWD):
                    continue
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
                yield label, _scaled(op, values)


def _of_dataset(family: str, values: Values) -> Iterator[Placed]:
    from stepmark.workload.datasets import dataset  # noqa: PLC0415

    # PARAM's own default, whatever the device.
    dtypes = [parse_dtype(text) for text in words(values.get("dtype"))] or [DType.FP32]
    wanted = phases(values)
    for dtype in dtypes:
        for op in dataset(family, values["dataset"], dtype):
            phase = getattr(op, "phase", Phase.FWD)
            changes = {}
            if family == "mlp" and values.get("optimizer"):
                changes["optimizer"] = values["optimizer"]
            if family == "embedding-bag" and values.get("alpha"):
                changes["alpha"] = _number(values["alpha"], "alpha")
            if not wanted or phase in wanted:
                made = dataclasses.replace(op, **changes) if changes else op
                yield (
                    Label(role=f"dataset {values['dataset'].upper()}", phase=phase),
                    _scaled(made, values),
                )


def _explicit(family: str, values: Values, device: str) -> Iterator[Placed]:
    """The product of every comma-separated list."""
    from stepmark.workload.formats.shapes import build  # noqa: PLC0415

    kind = FAMILIES[family]
    names = {field.name for field in dataclasses.fields(kind)}
    chosen = _chosen(family, values, device)
    for combination in itertools.product(*chosen.values()):
        item = dict(zip(chosen, combination, strict=True))
        for name, twin in _SAME_AS.items():
            if name in names and name not in item and twin in item:
                item[name] = item[twin]
        for phase, changed in _passes(family, item, values):
            op = build(kind, changed, "")
            yield Label(phase=phase), _scaled(op, values)


def _chosen(family: str, values: Values, device: str) -> dict[str, list[Any]]:
    """Every field that the flags give, and its values. Raises ConfigError for a missing one."""
    fields = dataclasses.fields(FAMILIES[family])
    chosen: dict[str, list[Any]] = {}
    for field in fields:
        value = values.get(field.name)
        if field.name == "dtype":
            given = words(value)
            if given or family not in ("optimizer", "mlp", "embedding-bag"):
                chosen["dtype"] = list(default_dtypes(values, device))
        elif field.name == "phase":
            continue
        elif value is not None:
            chosen[field.name] = [_read(field.name, part) for part in _parts(value)]
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in chosen:
            twin = _SAME_AS.get(field.name)
            if twin in chosen:
                continue
            if field.name not in _START:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(flag, "missing", field.metadata["help"])
            chosen[field.name] = [_START[field.name]]
    return chosen


def _passes(family: str, item: dict[str, Any], values: Values) -> Iterator[tuple[Phase, Any]]:
    """One item per pass. A GEMM's pass permutes its dimensions; others carry it as a field."""
    wanted = phases(values)
    if family in ("gemm", "bmm"):
        if wanted and "layout" in item:
            raise ConfigError(
                "layout", item["layout"], "it cannot be combined with --pass, which implies it"
            )
        if not wanted:
            yield Phase.FWD, item
            return
        m, n, k = item["m"], item["n"], item["k"]
        dims = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
        for phase in wanted:
            if phase in dims:
                rows, columns, inner = dims[phase]
                fp8 = family == "gemm" and item["dtype"].is_fp8
                layout = "nt" if fp8 else _LAYOUT_OF[phase]
                yield phase, item | {"m": rows, "n": columns, "k": inner, "layout": layout}
        return
    allowed = next(
        f.metadata["allowed"] for f in dataclasses.fields(FAMILIES[family]) if f.name == "phase"
    )
    matched = [phase for phase in wanted if phase in allowed]
    if wanted and not matched:
        raise ConfigError("pass", values["phase"], f"one of {', '.join(allowed)} for {family}")
    for name in matched or allowed:
        yield Phase(name), item | {"phase": name}


def _parts(value: Any) -> list[Any]:
    return [value] if isinstance(value, bool) else words(value)


def _read(field: str, text: Any) -> Any:
    """Numbers as numbers, a+b as a list, the rest as it is."""
    if isinstance(text, bool):
        return text
    if field == "varlen":
        return [_read("", part) for part in text.split("+")]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _scaled(op: Op, values: Values) -> Op:
    """--scale multiplies sequence length and batch of an operator."""
    text = values.get("scale")
    if not text:
        return op
    share = factor("1/64" if text == "tiny" else text)
    names: tuple[str, ...] = ("batch", "seq_q", "seq_kv", "seq", "tokens", "m")
    if isinstance(op, Gemm):
        names = ("m",)
    fields = {field.name for field in dataclasses.fields(op)}
    changes = {
        name: max(1, round(getattr(op, name) * share)) for name in names if name in fields
    }
    return dataclasses.replace(op, **changes)


def cases(
    family: str,
    placed: Iterable[Placed],
    values: Values,
    *,
    device: str,
    num_ranks: int,
    backends: Iterable[str],
) -> list[OpCase]:
    """One case per operator and backend; the same operator in two places is measured once."""
    clock = _member(ClockName, values.get("clock"), "clock", ClockName.AUTO)
    rate = _member(Rate, values.get("rate"), "rate", Rate.SUSTAINED)
    if device == "cpu" and clock not in (ClockName.AUTO, ClockName.HOST):
        raise ConfigError("clock", clock, "auto or host on a CPU")
    known = list(backends)
    asked = words(values.get("backend"))
    for name in asked:
        if name not in known:
            raise ConfigError("backend", name, f"one of {', '.join(known)} for {family}")
    labels: dict[tuple[Op, str], list[Label]] = {}
    for label, op in placed:
        for backend in asked or known:
            labels.setdefault((op, backend), []).append(label)
    return [
        OpCase(
            op=op,
            backend=backend,
            device=device,
            num_ranks=num_ranks,
            clock=clock,
            rate=rate,
            labels=tuple(dict.fromkeys(found)),
            scale=values.get("scale") or "",
        )
        for (op, backend), found in labels.items()
    ]
