"""Derive the times of kernels by data sheet from measurements of operators.

    python validation/kernel_times.py            how well they tell measurements left out
    python validation/kernel_times.py write      writes src/stepmark/data/kernel_times.toml and
                                                 product_times.csv

Sources are validation/data/efficiency (its README) and our own operators in results/. No time
of a training step is read.

Products: time = launch + FLOP / (share x peak) + a m k + b (n k + m n) by least squares of the
relative error, times the measured ratio near the shape. What the sources measured in bursts is
converted to a sustained rate, which a training step has.
"""

import argparse
import csv
import gzip
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT / "src") in sys.path else [str(ROOT / "src")]

from stepmark.cases.case import OpCase, Rate  # noqa: E402
from stepmark.efficiency.kernel_times import AttentionKernel, Style, kernel_times  # noqa: E402
from stepmark.efficiency.products import nearest  # noqa: E402
from stepmark.ground.dtypes import DType  # noqa: E402
from stepmark.model.device import find_device, load_devices  # noqa: E402
from stepmark.model.ops import (  # noqa: E402
    Activation,
    Attention,
    CrossEntropy,
    Gemm,
    Norm,
    Op,
    Phase,
    Rope,
)
from stepmark.step.kernel_choice import gated_kernels  # noqa: E402
from stepmark.step.workload import Kernel  # noqa: E402
from stepmark.store.reader import latest, list_runs, read_info, read_records  # noqa: E402
from stepmark.tables.launches import Launches, pooled  # noqa: E402

DATA = ROOT / "validation" / "data" / "efficiency"
OUTPUT = ROOT / "src" / "stepmark" / "data"
RUNS = ("h200-operators", "h200-windows")
NARROW = {
    "fp8-tensor-dyn": "tensorwise",
    "fp8-row-dyn": "rowwise",
    "fp8-block128-dyn": "blockwise",
    "nvfp4-dyn": "nvfp4",
}
# Devices whose power-sampled times tell how much longer a sustained call takes than a burst.
SUSTAINED_LIKE = {"b200": "b200", "gb200": "gb200", "b300": "gb200", "gb300": "gb200"}
OTHERS_LIKE = "h200-sxm"
# Where a source timed a training step's own products (forward, dgrad, wgrad into fp32), its
# level counts: the second's is that of the first.
TRAINED = {"b200": "b200", "gb200": "b200", "b300": "b200", "gb300": "b200"}
LARGE_FLOPS = 1e11
OWN_FLOPS = 5e9
# Sources of entries, with the date of their commit or measurement.
PUBLIC = "ai-dynamo/aiconfigurator 095f58a5, 2026-08-21"
TRAINING = "MooreThreads/SimuMax 4dcaae51, 2026-05-11"
OWN = "stepmark results/, 2026-11"
LAUNCH_US = 10.0
# Heads of 64 and 256 run at this device's ratio to heads of 128 where they were not measured.
WIDTHS_LIKE = "h100-sxm"
Array = npt.NDArray[np.float64]
Row = Mapping[str, str]


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of public measurements."""
    with gzip.open(DATA / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, slots=True)
class OwnTime:
    """An operator that we measured sustained."""

    device: str
    op: Op
    backend: str
    time_s: float


def own_times() -> Iterator[OwnTime]:
    """Yield our operators of results/ that were measured sustained, without a wrong result."""
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            with tarfile.open(ROOT / "results" / f"{name}.tar.gz") as archive:
                archive.extractall(folder, filter="data")
        for path in (*list_runs(ROOT / "results"), *list_runs(Path(folder))):
            names = {device.name for device in read_info(path).environment.devices}
            device = find_device(min(names)) if len(names) == 1 else None
            if device is None:
                continue
            records = (each for each in read_records(path) if isinstance(each.case, OpCase))
            for launches in pooled(latest(records), Launches):
                case = launches.case
                is_known = launches.measured and not launches.num_wrong
                if is_known and case.rate is Rate.SUSTAINED and case.device == "cuda":
                    yield OwnTime(device.key, case.op, case.backend, launches.time_s)


def peak_of(device: str, kind: str) -> float:
    """Return the dense peak of products of a kind in FLOP/s."""
    spec = load_devices()[device]
    dtype = {"bf16": DType.BF16, "nvfp4": DType.NVFP4}.get(kind, DType.FP8_E4M3)
    peak = spec.peak(dtype)
    assert peak
    return peak


def fitted(shapes: Array, times_us: Array, peak: float) -> Array:
    """Return the coefficients of `terms`, none below zero, of least relative squared error."""
    columns = terms(shapes, peak)
    active = list(range(columns.shape[1]))
    while True:
        weighted = columns[:, active] / times_us[:, None]
        values = np.linalg.lstsq(weighted, np.ones(len(times_us)), rcond=None)[0]
        if (values >= 0).all():
            break
        active = [each for each, value in zip(active, values, strict=True) if value >= 0]
    coefficients = np.zeros(columns.shape[1])
    coefficients[active] = values
    return coefficients


def terms(shapes: Array, peak: float) -> Array:
    """Return 1, microseconds at the peak, and millions of elements of x and of the others."""
    m, n, k = shapes.T
    return np.stack(
        [np.ones(len(m)), 2 * m * n * k / peak * 1e6, m * k / 1e6, (n * k + m * n) / 1e6], 1
    )


@dataclass(frozen=True, slots=True)
class Products:
    """Public products of a device and kind, in microseconds."""

    shapes: Array  # m, n, k
    burst_us: Array
    sustained_us: Array  # nan: not sampled
    spread: tuple[float, float]  # slowest over fastest collection: median, 90th percentile

    def ratio_at(self, shapes: Array) -> Array:
        """Return sustained over burst time near shapes."""
        known = ~np.isnan(self.sustained_us)
        ratios = self.sustained_us[known] / self.burst_us[known]
        logs = np.log2(self.shapes[known])
        return np.array([nearest(np.log2(each), logs, ratios) for each in shapes])


def public_products() -> dict[tuple[str, str], Products]:
    """Return x W^T in 16 bits, and narrow products with the cast of x, by device and kind."""
    rows = defaultdict(list)
    for row in read("gemm"):
        kind = NARROW.get(row["dtype"], row["dtype"])
        is_known = row["device"] in load_devices()
        if row["source"] == "aic" and row["layout"] == "nt" and is_known:
            rows[row["device"], kind].append(row)
    return {
        key: Products(
            shapes=np.array([[float(row[x]) for x in "mnk"] for row in own]),
            burst_us=np.array([float(row["time_us"]) for row in own]),
            sustained_us=np.array([float(row["sustained_us"] or "nan") for row in own]),
            spread=spread(own),
        )
        for key, own in rows.items()
    }


def spread(rows: Iterable[Row]) -> tuple[float, float]:
    """Return slowest over fastest collection of a shape: median and 90th percentile."""
    ratios = [
        float(row["max_us"]) / float(row["min_us"])
        for row in rows
        if int(row["n_collections"]) > 1
    ]
    return (float(np.median(ratios)), float(np.quantile(ratios, 0.9))) if ratios else (1.0, 1.0)


def is_sampled(products: Products) -> bool:
    """Return whether sustained times were measured themselves."""
    return bool(np.isnan(products.sustained_us).mean() < 0.1)


def sustained(key: tuple[str, str], public: Mapping[tuple[str, str], Products]) -> Array:
    """Return sustained times in microseconds, converted where they were measured in bursts."""
    own = public[key]
    if is_sampled(own):
        missing = np.isnan(own.sustained_us)
        return np.where(missing, own.burst_us, own.sustained_us)
    like = public[SUSTAINED_LIKE.get(key[0], OTHERS_LIKE), "bf16"]
    return own.burst_us * like.ratio_at(own.shapes)


def attention_rows(device: str, is_fp8: bool) -> list[Row]:
    """Return public causal forward passes of a device."""
    kind = "fp8" if is_fp8 else "bf16"
    return [
        row
        for row in read("attention")
        if (row["device"], row["dtype"], row["pass"]) == (device, kind, "fwd")
        and row["source"] == "aic"
        and row["causal"] == "1"
    ]


def attention_law(rows: Sequence[Row], peak: float) -> dict[str, float]:
    """Return launch, rate and time of a million elements of q and the result.

    The fit is of all elements, K and V included; only those of q and the result are kept, as
    kernels of inference write K and V to a cache as well. They also launch more: our own small
    ones (1,024 tokens of 25 heads of 64 on H100, 4,096 of 8 of 128 on H200) take `LAUNCH_US`.
    """
    columns = []
    times = []
    for row in rows:
        heads, kv_heads, width = int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"])
        tokens = int(row["batch"]) * int(row["seq"])
        flops = 2 * tokens * int(row["seq"]) * heads * width
        elements = 2 * tokens * width * (heads + kv_heads)
        columns.append((1.0, flops / peak * 1e6, elements / 1e6))
        times.append(float(row["time_us"]))
    weighted = np.array(columns) / np.array(times)[:, None]
    launch, inverse, element = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0]
    return {
        "launch_us": min(launch, LAUNCH_US),
        "tflops": peak / inverse / 1e12,
        "element_us": element,
    }


def with_other_widths(
    laws: Mapping[int, dict[str, float]], kind: str
) -> dict[int, dict[str, float]]:
    """Return the law of heads of 128 with those of other widths, by another device's ratio."""
    peak = peak_of(WIDTHS_LIKE, kind)
    rates = {}
    for width in (64, 128, 256):
        rows = attention_rows(WIDTHS_LIKE, kind == "fp8")
        own = [row for row in rows if row["head_dim"] == str(width)]
        rates[width] = attention_law(own, peak)["tflops"]
    return {
        width: {**laws[128], "tflops": laws[128]["tflops"] * rate / rates[128]}
        for width, rate in rates.items()
    }


def own_layouts(
    public: Mapping[tuple[str, str], Products], own: Iterable[OwnTime]
) -> dict[str, dict[str, float]]:
    """Return the time of our own products over that of the law, by device and layout."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    laws = {}
    for each in own:
        op = each.op
        is_plain = isinstance(op, Gemm) and op.dtype is DType.BF16 and each.backend == "torch"
        if not isinstance(op, Gemm) or not is_plain or op.flops < OWN_FLOPS:
            continue
        if any(size % 8 for size in (op.m, op.n, op.k)):
            continue
        if each.device not in laws:
            laws[each.device] = Law.of((each.device, "bf16"), public)
        law_us = float(laws[each.device].times_us(np.array([[op.m, op.n, op.k]], float))[0])
        ratios[each.device][str(op.layout)].append(each.time_s * 1e6 / law_us)
    return {
        device: {layout: median(values) for layout, values in by_layout.items()}
        for device, by_layout in ratios.items()
    }


def layouts(public: Mapping[tuple[str, str], Products]) -> dict[str, dict[str, float]]:
    """Return the time of training products over that of sustained x W^T, by layout."""
    own = defaultdict(list)
    for row in read("gemm"):
        flops = 2 * float(row["m"]) * float(row["n"]) * float(row["k"])
        if (
            row["source"].startswith("simumax")
            and row["dtype"] == "bf16"
            and flops >= LARGE_FLOPS
        ):
            own[row["device"], row["layout"][:2]].append(row)
    result = {}
    for device, trained in TRAINED.items():
        law = Law.of((trained, "bf16"), public)
        result[device] = {
            layout: median(float(row["time_us"]) / law.time_us(row) for row in rows)
            for (name, layout), rows in own.items()
            if name == trained
        }
    pcie = {layout: rows for (name, layout), rows in own.items() if name == "a100-80gb-pcie"}
    law = Law.of(("a100-80gb-sxm", "bf16"), public)
    level = {
        k: median(float(r["time_us"]) / law.time_us(r) for r in v) for k, v in pcie.items()
    }
    result["a100-80gb-sxm"] = {name: level[name] / level["nt"] for name in ("nn", "tn")}
    return result


@dataclass(frozen=True, slots=True)
class Law:
    """A law of products of a device, with the ratios of its shapes."""

    coefficients: Array
    shapes: Array
    ratios: Array
    peak: float

    @classmethod
    def of(cls, key: tuple[str, str], public: Mapping[tuple[str, str], Products]) -> "Law":
        """Return the law of sustained products."""
        return cls.fit(public[key].shapes, sustained(key, public), peak_of(*key))

    @classmethod
    def fit(cls, shapes: Array, times_us: Array, peak: float) -> "Law":
        coefficients = fitted(shapes, times_us, peak)
        return cls(coefficients, shapes, times_us / (terms(shapes, peak) @ coefficients), peak)

    def times_us(self, shapes: Array) -> Array:
        logs = np.log2(self.shapes)
        ratios = [nearest(np.log2(each), logs, self.ratios) for each in shapes]
        return np.asarray(terms(shapes, self.peak) @ self.coefficients * np.array(ratios))

    def time_us(self, row: Row) -> float:
        return float(self.times_us(np.array([[float(row[x]) for x in "mnk"]]))[0])


def grouped(public: Mapping[tuple[str, str], Products]) -> dict[str, float]:
    """Return the time of grouped products over that of single ones of the rows of a group."""
    ratios = defaultdict(list)
    for row in read("grouped"):
        if not row["op"].startswith("grouped-gemm") or row["device"] not in (
            "b200",
            "h200-sxm",
        ):
            continue
        count, rows = int(row["experts"]), int(row["tokens"]) / int(row["experts"])
        n, k = float(row["inter"]), float(row["hidden"])
        shape = {
            "fwd": (rows, n, k),
            "dgrad": (rows, k, n),
            "wgrad": (n, k, rows),
        }[row["op"].rpartition("-")[2]]
        law = Law.of((row["device"], "bf16"), public)
        single = float(law.times_us(np.array([shape]))[0]) - law.coefficients[0]
        ratios[row["device"]].append(
            float(row["time_us"]) / (law.coefficients[0] + count * single)
        )
    return {device: median(own) for device, own in ratios.items()}


def kernels(own: Sequence[OwnTime]) -> dict[str, dict[str, Any]]:
    """Return ratios of attention's passes and kernels on Hopper and others, by device."""
    times = {(each.device, each.op, each.backend): each.time_s for each in own}
    backward, flash, flash_backward = [], [], []
    for (device, op, backend), time_s in times.items():
        if not isinstance(op, Attention) or op.head_dim_qk != 128 or backend != "cudnn":
            continue
        other = times.get((device, op, "flash"))
        if op.phase is Phase.FWD:
            flash += [other / time_s] if other else []
            passes = Attention(**{**_fields(op), "phase": Phase.BWD})
            if (back := times.get((device, passes, "cudnn"))) is not None:
                backward.append(back / time_s)
        elif other:
            flash_backward.append(other / time_s)
    hopper = {
        "backward": median(backward),
        "flash": median(flash),
        "flash_backward": median(flash_backward),
        "flex": flex(own),
    }
    blackwell = {**hopper, "backward": _backward_of("b200")}
    ampere = {
        "backward": _backward_of("a100-80gb-pcie"),
        **{"flash": 1.0, "flash_backward": 1.0},
        "flex": {128: AMPERE_FLEX},
    }
    return {
        **dict.fromkeys(("h100-sxm", "h200-sxm"), hopper),
        **dict.fromkeys(TRAINED, blackwell),
        **dict.fromkeys(("a100-80gb-sxm", "l40s"), ampere),  # their fastest is FlashAttention-2
    }


# FlexAttention's time over FlashAttention-2's, forward and backward, on an A100
# (pytorch.org/blog/flexattention, 2024-08-07).
AMPERE_FLEX = (1 / 0.90, 1 / 0.85)
LONG = 4096


def flex(own: Sequence[OwnTime]) -> dict[int, tuple[float, float]]:
    """Return FlexAttention's time over that of the fastest kernel by head width.

    Both have a full mask; forward and backward. Windows differ from their pairs of it by 10 %
    in the mean.
    """
    rates = defaultdict(list)
    for each in own:
        op = each.op
        is_full = isinstance(op, Attention) and op.causal and not (op.window or op.varlen)
        if is_full and op.seq_q >= LONG:
            rates[op.head_dim_qk, op.phase, each.backend].append(op.flops / each.time_s)
    rate = {key: median(values) for key, values in rates.items()}
    widths = sorted({width for width, _, backend in rate if backend == "flex"})
    return {
        width: (
            rate[width, Phase.FWD, "cudnn"] / rate[width, Phase.FWD, "flex"],
            rate[width, Phase.BWD, "cudnn"] / rate[width, Phase.BWD, "flex"],
        )
        for width in widths
    }


def _fields(op: Attention) -> dict[str, Any]:
    return {name: getattr(op, name) for name in op.__dataclass_fields__}


def _backward_of(device: str) -> float:
    """Return the time of a public backward pass over that of its forward pass."""
    times = {}
    for row in read("attention"):
        if row["device"] == device and row["source"].startswith("simumax"):
            names = ("batch", "seq", "heads", "kv_heads", "head_dim", "source")
            times[tuple(row[name] for name in names), row["pass"]] = float(row["time_us"])
    pairs = [
        time / times[shape, "fwd"]
        for (shape, phase), time in times.items()
        if phase == "bwd" and (shape, "fwd") in times and int(shape[2]) >= 16
    ]
    return median(pairs)


LEAST_BYTES = 25e6  # smaller ones stay in the cache
# Our eager SwiGLU reads halves of one tensor. Where gate and up are two tensors, as in `train`
# and Hugging Face, its kernels read and write 5 of them for 3 (silu, product) and 9 for 5 (two
# products with the gradient, silu_backward), each as fast as any kernel. GELU's is like it;
# gpt-oss's compares, joins masks and selects in kernels of their own (gated_kernels).
PLAIN_SHARE = 0.85


def eager_share(op: Activation) -> float:
    """Return the share of the bandwidth of an eager activation of gate and up."""
    kernels = gated_kernels("", op)
    bytes_moved = sum(
        each.op.bytes_moved or 0
        for each in (kernels.fwd if op.phase is Phase.FWD else kernels.bwd)
        if isinstance(each.op, Kernel) and each.op.name != "concatenate"
    )
    return PLAIN_SHARE * op.bytes_moved / bytes_moved


MemoryKey = tuple[str, str, str]


def memory_shares(own: Iterable[OwnTime]) -> dict[MemoryKey, float]:
    """Return the share of the memory bandwidth by family with kind, pass and style."""
    shares = defaultdict(list)
    for each in own:
        op = each.op
        spec = load_devices()[each.device]
        if each.backend not in ("torch", "compile") or not op.bytes_moved:
            continue
        is_large = op.bytes_moved >= LEAST_BYTES
        if isinstance(op, Norm | Activation | Rope | CrossEntropy) and is_large:
            assert spec.hbm_bytes_per_s
            name = {Norm: "norm", Activation: "activation", Rope: "rope"}.get(
                type(op), "cross-entropy"
            )
            kind = getattr(op, "kind", "")
            style = Style.EAGER if each.backend == "torch" else Style.FUSED
            share = op.bytes_moved / each.time_s / spec.hbm_bytes_per_s
            if isinstance(op, Activation) and op.is_gated and style is Style.EAGER:
                share = eager_share(op)
            shares[f"{name} {kind}".strip(), str(op.phase), str(style)].append(share)
    return {key: median(values) for key, values in sorted(shares.items())}


HEAD = """\
# Times of kernels by device, kind of work and shape. Do not edit: derived by
# `python validation/kernel_times.py write` from validation/data/efficiency (its README has
# sources, licences, dates, and how far sources differ) and our sustained operators in results/.
# products: us = launch_us + FLOP / tflops + x_us m k / 1e6 + rest_us (n k + m n) / 1e6, times
# the ratio of product_times.csv near the shape; sustained. layouts: over that of x W^T.
# attention: us = launch_us + FLOP / tflops + element_us (elements of q and the result) / 1e6,
# by type and head width; causal FLOPs. kernels: attention's backward over its forward pass,
# FlashAttention-2's time over cuDNN's, and FlexAttention's (forward, backward) by head width.
# grouped: products of experts over single ones. memory: share of the memory bandwidth by
# operator, pass and style, on H100 and H200. elementwise: plain elementwise kernels of other
# devices over those of Hopper. spread: slowest over fastest public collection of a shape,
# median and 90th percentile. memory and grouped are our own, 2026-11; grouped of Blackwell is
# SimuMax's.
"""
# Plain kernels: our copies 0.886 to 0.897 of the bandwidth, AdamW 0.72 to 0.79 (median 0.73),
# casts to fp8 0.90; what goes through lists of tensors (norms, scale) as AdamW.
# xIELU was not measured: transformers' eager one reads and writes 29 tensors forward and 60
# backward where one kernel has 2 and 3.
PLAIN = f"""\
[memory."activation xielu"]
bwd = {{ eager = {PLAIN_SHARE * 3 / 60:.3f}, fused = {PLAIN_SHARE} }}
fwd = {{ eager = {PLAIN_SHARE * 2 / 29:.3f}, fused = {PLAIN_SHARE} }}

[memory.copy]
fwd = 0.89

[memory.optimizer]
optim = 0.73

[memory.kernel]
fwd = 0.85

[elementwise]  # public elementwise kernels: 0.81 (A100), 0.72 to 0.78 (B200) over 0.89
a100-80gb-sxm = 0.91
b200 = 0.84
gb200 = 0.84
b300 = 0.84
gb300 = 0.84
"""


def _origin(source: str, ratios: tuple[float, float], more: str = "") -> str:
    """Return the source and the spread of an entry."""
    shown = f"{source}{more}"
    return f'source = "{shown}"\nspread = [{ratios[0]:.2f}, {ratios[1]:.2f}]\n'


def _rate(key: tuple[str, str], public: Mapping[tuple[str, str], Products]) -> str:
    if is_sampled(public[key]):
        return ", power-sampled"
    return f", bursts as sustained on {SUSTAINED_LIKE.get(key[0], OTHERS_LIKE)}"


def document(public: Mapping[tuple[str, str], Products], own: Sequence[OwnTime]) -> str:
    """Return kernel_times.toml."""
    lines = [HEAD]
    for key in sorted(public):
        law = Law.of(key, public)
        launch, inverse, x_us, rest_us = law.coefficients
        lines.append(
            f"[products.{key[0]}.{key[1]}]\nlaunch_us = {launch:.3g}\n"
            f"tflops = {law.peak / inverse / 1e12:.5g}\nx_us = {x_us:.4g}\n"
            f"rest_us = {rest_us:.4g}\n"
            f"{_origin(PUBLIC, public[key].spread, _rate(key, public))}"
        )
    for device, of_layouts in {**layouts(public), **own_layouts(public, own)}.items():
        values = "".join(
            f"{name} = {value:.3f}\n" for name, value in sorted(of_layouts.items())
        )
        source = TRAINING if device in TRAINED or device.startswith("a100") else OWN
        lines.append(f'[layouts.{device}]\n{values}source = "{source}"\n')
    for device, kind in sorted({(d, "fp8" if k != "bf16" else k) for d, k in public}):
        by_width = defaultdict(list)
        for row in attention_rows(device, kind == "fp8"):
            if row["head_dim"] in ("64", "128", "256"):
                by_width[row["head_dim"]].append(row)
        laws = {
            int(width): attention_law(rows, peak_of(device, kind))
            for width, rows in by_width.items()
        }
        if len(laws) == 1:
            laws = with_other_widths(laws, kind)
        for width, values in sorted(laws.items()):
            shown = "".join(f"{name} = {value:.5g}\n" for name, value in values.items())
            own_rows = by_width.get(str(width))
            source = PUBLIC if own_rows else f"{PUBLIC}: 128 by the ratio of {WIDTHS_LIKE}"
            shown += _origin(source, spread(own_rows or by_width["128"]))
            lines.append(f"[attention.{device}.{kind}.{width}]\n{shown}")
    for device, ratios in kernels(own).items():
        values = "".join(
            f"{name} = {value:.3f}\n" for name, value in ratios.items() if name != "flex"
        )
        by_width = (f"{w} = [{a:.3f}, {b:.3f}]" for w, (a, b) in ratios["flex"].items())
        values += f"flex = {{ {', '.join(by_width)} }}\n"
        source = OWN if device.startswith("h") else f"{TRAINING}; flash: {OWN}"
        lines.append(f'[kernels.{device}]\n{values}source = "{source}"\n')
    level = grouped(public)
    shown = {"h100-sxm": level["h200-sxm"], "h200-sxm": level["h200-sxm"]}
    shown |= dict.fromkeys(TRAINED, level["b200"] / layouts(public)["b200"]["nt"])
    lines.append("[grouped]\n" + "".join(f"{k} = {v:.3f}\n" for k, v in shown.items()))
    by_name = defaultdict(dict)
    for (name, phase, style), share in memory_shares(own).items():
        by_name[name].setdefault(phase, {})[style] = share
    for name, passes in by_name.items():
        title = f'"{name}"' if " " in name else name
        values = "".join(
            f"{phase} = {{ {', '.join(f'{s} = {v:.3f}' for s, v in own.items())} }}\n"
            for phase, own in passes.items()
        )
        lines.append(f"[memory.{title}]\n{values}")
    return "\n".join([*lines, PLAIN])


def table(public: Mapping[tuple[str, str], Products]) -> list[list[str]]:
    """Return product_times.csv: ratios to the laws in thousandths, by shape and device."""
    keys = sorted(public)
    cells: dict[tuple[int, ...], dict[tuple[str, str], str]] = defaultdict(dict)
    for key in keys:
        law = Law.of(key, public)
        for shape, ratio in zip(law.shapes, law.ratios, strict=True):
            cells[tuple(int(x) for x in shape)][key] = str(round(1000 * ratio))
    head = ["m", "n", "k", *("/".join(key) for key in keys)]
    return [
        head,
        *([*map(str, s), *(own.get(k, "") for k in keys)] for s, own in sorted(cells.items())),
    ]


def write() -> None:
    public = public_products()
    own = list(own_times())
    OUTPUT.joinpath("kernel_times.toml").write_text(document(public, own), encoding="utf-8")
    with OUTPUT.joinpath("product_times.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table(public))


def held_out(public: Mapping[tuple[str, str], Products]) -> Iterator[str]:
    """Yield the error of products whose width and depth were left out, one in five."""
    for key in sorted(public):
        own = public[key]
        times_us = sustained(key, public)
        widths = own.shapes[:, 1:]
        order = np.random.default_rng(46).permutation(np.unique(widths, axis=0))
        errors: list[float] = []
        for fold in range(5):
            is_out = (widths[:, None] == order[fold::5]).all(-1).any(-1)
            law = Law.fit(own.shapes[~is_out], times_us[~is_out], peak_of(*key))
            errors += list(np.abs(law.times_us(own.shapes[is_out]) / times_us[is_out] - 1))
        yield f"{'/'.join(key):28} {len(errors):4} left out: {_sizes(errors)}"


def of_own(own: Iterable[OwnTime]) -> Iterator[str]:
    """Yield the error of our operators, whose products and forward passes were not fitted."""
    errors = defaultdict(list)
    for each in own:
        is_kernel = isinstance(each.op, Gemm | Attention) and each.backend in (
            "torch",
            "flash",
            "cudnn",
        )
        if not is_kernel or (each.op.flops or 0) < 1e9 or each.op.dtype is not DType.BF16:
            continue
        times = kernel_times(load_devices()[each.device])
        is_flash = each.backend == AttentionKernel.FLASH
        kernel = AttentionKernel.FLASH if is_flash else AttentionKernel.AUTO
        time = times.time_of(each.op, Style.FUSED, kernel)
        assert time
        name = (
            each.op.layout if isinstance(each.op, Gemm) else f"{each.op.phase} {each.backend}"
        )
        errors[f"{each.device} {name}"].append(time.time_s / each.time_s - 1)
    for name, values in sorted(errors.items()):
        mean = np.mean(values)
        yield f"{name:28} {len(values):4} our own: {_sizes(values)}, mean {mean:+.1%}"


def _sizes(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"median {np.median(sizes):.1%}, p90 {np.quantile(sizes, 0.9):.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("write",))
    if parser.parse_args(argv).what:
        write()
        return
    for line in (*held_out(public_products()), *of_own(own_times())):
        print(line)


if __name__ == "__main__":
    main()
