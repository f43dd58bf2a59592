"""Other tools' tables, against their own output."""

import csv
import io
from dataclasses import replace

import pytest
from tests.tables.records import attention, full_run, gemm, measured, run_info

from stepmark.cases.case import Label, OpCase
from stepmark.ground.dtypes import DType
from stepmark.model.ops import EmbeddingBag, Gemm, Layout, Mlp, Phase
from stepmark.operators.styles import STYLES, as_text

# Lines of a run of PARAM's driver on an A100, as the AWS guide prints them without "0: ".
# https://github.com/aws-samples/awsome-distributed-training, param benchmark, README
PARAM_SAMPLE = """\
Measuring the performance of  gemm  on device =  gpu
Steps =  100  warmups =  10
with matrix dataset  A , Data type:  float32

----------------------------------------------------------------
         M         N          K          Time(s)      Rate(TF/s)
----------------------------------------------------------------
       128,       4096,       4096,       0.000326     13.158
      4096,       4096,        128,       0.000238     18.022
      1024,       1024,        512,       0.000071     15.208
"""


def test_param_gemm_equals_the_sample() -> None:
    rates = {(128, 4096, 4096): 13.158, (4096, 4096, 128): 18.022, (1024, 1024, 512): 15.208}
    records = []
    for (m, n, k), rate in rates.items():
        op = Gemm(m=m, n=n, k=k, dtype=DType.FP32, layout=Layout.NN)
        record = measured(gemm(op), op.flops / (rate * 1e12))
        samples = replace(record.samples, warmup_calls=10)
        records.append(replace(record, samples=samples))
    run = run_info(dataset="A")  # 5 samples of 20 calls are its 100 steps
    assert as_text(STYLES["param"](records, run)) == PARAM_SAMPLE


def test_param_embedding_counts_gathered_rows_alone() -> None:
    op = EmbeddingBag(rows=14_000_000, dim=128, pooling=30, batch=512)
    table = STYLES["param"]([measured(OpCase(op=op, backend="torch"), 1e-3)], run_info())
    lines = table["emb-fp32"].splitlines()
    assert lines[5].split() == [
        "Features",
        "embdim",
        "nnz",
        "batch",
        "Time(s)/step",
        "Data(MB)",
        "BW(GB/s)",
    ]
    values = [float(word) for word in lines[7].split(",")]
    assert values == [14e6, 128, 30, 512, 0.001, 7.864, 7.864]


@pytest.mark.parametrize(("phase", "factor"), [(Phase.FWD, 2), (Phase.STEP, 6)])
def test_param_linear_counts_as_param_does(phase: Phase, factor: int) -> None:
    op = Mlp(layers=18, input=1024, hidden=1024, output=1024, batch=4096, phase=phase)
    table = STYLES["param"]([measured(OpCase(op=op, backend="torch"), 1e-3)], run_info())
    values = [float(word) for word in table["linear-fp32"].splitlines()[7].split(",")]
    assert values[:7] == [20, 1024, 1024, 1024, 4096, 0.001, 4_096_000]
    assert values[7] == pytest.approx(factor * 19 * 1024**2 * 4096 / 1e-3 / 1e12, abs=0.05)


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize(("layout", "trans"), [("nt", "NT"), ("nn", "NN"), ("tn", "TN")])
def test_primus_gemm_columns(layout: str, trans: str) -> None:
    op = Gemm(m=64, n=128, k=256, layout=Layout(layout))
    labels = (Label(model="Llama2_7B"), Label(model="Llama2_70B"))
    table = STYLES["primus"]([measured(gemm(op, *labels), 2e-6)], run_info())["gemm"]
    header = "model,m,n,k,transA,transB,dtype,Time(s),TFLOPS,Bandwidth(GB/s)"
    assert table.splitlines()[0] == header
    first, second = read(table)
    assert (first["model"], second["model"]) == ("Llama2_7B", "Llama2_70B")
    assert first["transA"] + first["transB"] == trans
    assert float(first["TFLOPS"]) == pytest.approx(2 * 64 * 128 * 256 / 2e-6 / 1e12)


def test_primus_attention_joins_forward_and_backward() -> None:
    model = (Label(model="Llama2_70B"),)
    records = [
        measured(OpCase(op=attention(phase), backend="cudnn", labels=model), time_s)
        for phase, time_s in ((Phase.BWD, 5e-4), (Phase.FWD, 2e-4))
    ]
    (line,) = read(STYLES["primus"](records, run_info())["attention"])
    assert (line["fwd_time"], line["bwd_time"]) == ("0.0002", "0.0005")
    # Five products backward for two forward, in 2.5 times the time: the same rate.
    assert float(line["fwd_tflops"]) == pytest.approx(float(line["bwd_tflops"]))
    assert (line["num_head_q"], line["num_head_kv"], line["causal"]) == ("64", "8", "True")


def test_primus_leaves_the_unmeasured_pass_empty() -> None:
    case = OpCase(op=attention(Phase.FWD), backend="cudnn")
    (line,) = read(STYLES["primus"]([measured(case, 1e-3)], run_info())["attention"])
    assert (line["bwd_time"], line["bwd_tflops"]) == ("", "")


@pytest.mark.parametrize("style", STYLES)
def test_wrong_results_are_not_printed_as_right(style: str) -> None:
    assert STYLES[style]([measured(gemm(), 1e-3, num_wrong=1)], run_info()) == {}
    assert STYLES[style](full_run(), run_info())
