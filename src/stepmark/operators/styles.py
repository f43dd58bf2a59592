"""Records in the columns of other benchmarks, so that their users can diff them.

Every style returns its tables by name. A cell that is unknown is empty, where another tool
prints 0.
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stepmark.cases.case import Label, OpCase
from stepmark.cases.record import Record, RunInfo
from stepmark.ground.dtypes import DType
from stepmark.ground.units import GB, TFLOP
from stepmark.model.ops import Attention, EmbeddingBag, Gemm, Layout, Mlp, Op, Phase
from stepmark.tables.launches import OpLaunches, pooled

Style = Callable[[Iterable[Record], RunInfo], dict[str, str]]

# Spellings of PARAM's --dtype.
_PARAM_DTYPE = {
    DType.FP32: "float32",
    DType.TF32: "tf32",
    DType.BF16: "bfloat16",
    DType.FP16: "float16",
    DType.FP64: "float64",
}


def as_text(tables: dict[str, str]) -> str:
    """Join all tables of a style, with an empty line between them."""
    return "\n".join(tables.values())


def param(records: Iterable[Record], run: RunInfo) -> dict[str, str]:
    """Return train/compute/pt of facebookresearch/param: a block per kind and dtype."""
    groups: dict[str, list[OpLaunches]] = {}
    for launches in _measured(records):
        match launches.case.op:
            case Gemm():
                name = "gemm"
            case EmbeddingBag(phase=Phase.FWD):
                name = "emb"
            case Mlp():
                name = "linear"
            case _:
                continue
        groups.setdefault(f"{name}-{launches.case.dtype}", []).append(launches)
    return {key: _param_block(key.split("-")[0], group, run) for key, group in groups.items()}


_PARAM_HEADER = {
    "gemm": "         M         N          K          Time(s)      Rate(TF/s)",
    "emb": "  Features    embdim    nnz       batch      Time(s)/step   Data(MB)   BW(GB/s)",
    "linear": (
        " #Layer    Input    Hidden    Output   Batch   Time(s)/step  QPS      Rate(TF/s)"
    ),
}
_PARAM_RULE = {"gemm": 64, "emb": 81, "linear": 80}


def _param_block(name: str, cases: Sequence[OpLaunches], run: RunInfo) -> str:
    rule = "-" * _PARAM_RULE[name]
    case = cases[0].case
    place = "cpu" if case.device == "cpu" else "gpu"
    dataset = run.settings.get("dataset", "-")
    dtype = _PARAM_DTYPE.get(case.dtype, case.dtype.value)
    # The fewest of any case and launch.
    samples = [(record.samples, each.time_s) for each in cases for record in each.measured]
    steps = min(len(own.seconds[0]) * own.calls_per_sample for own, _ in samples)
    warmups = min(own.warmup_calls or round(own.soak_s / time_s) for own, time_s in samples)
    what = "matrix dataset" if name == "gemm" else "dataset"
    lines = [
        f"Measuring the performance of  {name}  on device =  {place}",
        f"Steps =  {steps}  warmups =  {warmups}",
        f"with {what}  {dataset} , Data type:  {dtype}",
        "",
        rule,
        _PARAM_HEADER[name],
        rule,
        *(_param_line(each.case.op, each.time_s) for each in cases),
    ]
    return "\n".join(lines) + "\n"


def _param_line(op: Op, time_s: float) -> str:
    match op:
        case Gemm(m=m, n=n, k=k):
            tflops = op.flops / time_s / TFLOP
            return f"{m:10}, {n:10}, {k:10},     {time_s:10.6f}     {tflops:.3f}"
        case EmbeddingBag():
            # PARAM counts the gathered rows alone, without indices and result.
            gathered = op.batch * op.pooling * op.dim * op.dtype.itemsize
            return (
                f"{op.rows:10}, {op.dim:6}, {op.pooling:6}, {op.batch:10},     "
                f"{time_s:10.6f}, {gathered / 1e6:10.3f}, {gathered / time_s / GB:10.3f}"
            )
        case Mlp():
            # PARAM: 2 x weights x batch forward, 4 x backward; all sizes count as layers.
            factor = {Phase.FWD: 2, Phase.BWD: 4}.get(op.phase, 6)
            tflops = factor * op.num_weights * op.batch / time_s / TFLOP
            return (
                f"{len(op.widths):6},  {op.input:6},  {op.hidden:6},  {op.output:6},  "
                f"{op.batch:6},  {time_s:10.6f},  {op.batch / time_s:8.1f}, {tflops:10.1f}"
            )
        case _:
            raise AssertionError(f"PARAM has no table for {op}")


PRIMUS_GEMM = [
    "model",
    "m",
    "n",
    "k",
    "transA",
    "transB",
    "dtype",
    "Time(s)",
    "TFLOPS",
    "Bandwidth(GB/s)",
]
PRIMUS_ATTENTION = [
    "model",
    "batch_size",
    "seqlen_q",
    "seqlen_kv",
    "num_head_q",
    "num_head_kv",
    "head_dim_qk",
    "head_dim_v",
    "causal",
    "fwd_tflops",
    "fwd_time",
    "bwd_tflops",
    "bwd_time",
    "backend",
]


def primus(records: Iterable[Record], run: RunInfo) -> dict[str, str]:
    """Return the CSV files of Primus' operator benchmark: gemm and attention."""
    measured = _measured(records)
    tables = {}
    if gemms := [line for launches in measured for line in _primus_gemms(launches)]:
        tables["gemm"] = _csv(PRIMUS_GEMM, gemms)
    if attentions := _primus_attentions(measured):
        tables["attention"] = _csv(PRIMUS_ATTENTION, attentions)
    return tables


def _primus_gemms(launches: OpLaunches) -> list[tuple[object, ...]]:
    op = launches.case.op
    time_s = launches.time_s
    if not isinstance(op, Gemm):
        return []
    trans_a = "T" if op.layout in (Layout.TN, Layout.TT) else "N"
    trans_b = "T" if op.layout in (Layout.NT, Layout.TT) else "N"
    shape = (op.m, op.n, op.k, trans_a, trans_b, op.dtype.value)
    rates = (time_s, op.flops / time_s / TFLOP, op.bytes_moved / time_s / GB)
    return [(label.model, *shape, *rates) for label in launches.case.labels or (Label(),)]


def _primus_attentions(cases: Sequence[OpLaunches]) -> list[tuple[object, ...]]:
    """Return one line per shape, model and backend, forward and backward side by side."""
    joined: dict[tuple[str, Attention, str], dict[Phase, tuple[float, float]]] = {}
    for launches in cases:
        op = launches.case.op
        time_s = launches.time_s
        if not isinstance(op, Attention):
            continue
        for model in dict.fromkeys(label.model for label in launches.case.labels or (Label(),)):
            key = (model, replace(op, phase=Phase.FWD), launches.case.backend)
            joined.setdefault(key, {})[op.phase] = (op.executed_flops / time_s / TFLOP, time_s)
    unknown = ("", "")
    return [
        (
            *(model, op.batch, op.seq_q, op.seq_kv, op.heads, op.kv_heads),
            *(op.head_dim_qk, op.head_dim_v, op.causal),
            *times.get(Phase.FWD, unknown),
            *times.get(Phase.BWD, unknown),
            backend,
        )
        for (model, op, backend), times in joined.items()
    ]


def _csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return buffer.getvalue()


def _measured(records: Iterable[Record]) -> list[OpLaunches]:
    """Return correct results only: the other tools have no column for wrong ones."""
    cases = pooled((r for r in records if isinstance(r.case, OpCase)), OpLaunches)
    return [case for case in cases if case.measured and not case.num_wrong]


STYLES: dict[str, Style] = {"primus": primus, "param": param}
