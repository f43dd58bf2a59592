"""Laws of the record format: what is written is what is read."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.case import ClockName, Label, OpCase, Rate
from stepmark.cases.record import (
    SCHEMA,
    Check,
    Failed,
    HostLoad,
    Measured,
    Record,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.model.ops import (
    FAMILIES,
    Activation,
    Attention,
    Bmm,
    Copy,
    CrossEntropy,
    EmbeddingBag,
    Gemm,
    GroupedGemm,
    HostCopy,
    Mlp,
    Norm,
    Op,
    Optimizer,
    Phase,
    Rope,
)
from stepmark.store import codec
from stepmark.store.commands import command_of

GOLDEN = Path(__file__).parents[1] / "data" / "records-schema1.jsonl"

OPS: list[Op] = [
    Gemm(m=4096, n=1024, k=512, out_dtype=DType.FP32),
    GroupedGemm(num_groups=8, tokens=4096, n=64, k=32, skew=0.7, phase=Phase.WGRAD),
    Bmm(batch=2, m=3, n=4, k=5, dtype=DType.FP16),
    Attention(
        batch=1,
        seq_q=1536,
        seq_kv=1536,
        heads=8,
        kv_heads=2,
        head_dim_qk=128,
        head_dim_v=64,
        varlen=(1024, 512),
        phase=Phase.BWD,
    ),
    Mlp(layers=3, input=8, hidden=16, output=4, batch=32, phase=Phase.STEP),
    EmbeddingBag(rows=1000, dim=64, pooling=4, batch=16, alpha=1.05),
    Norm(tokens=128, hidden=64, kind="layernorm"),
    Activation(tokens=128, width=64, kind="gelu", phase=Phase.BWD),
    Rope(batch=1, seq=16, heads=4, kv_heads=2, head_dim=8),
    CrossEntropy(tokens=128, vocab=1000, chunks=4),
    Optimizer(num_params=10**9),
    Copy(num_bytes=2**30),
]


def case_of(op: Op) -> OpCase:
    label = Label(model="llama-3.1-8b", role="attention.qkv", phase=Phase.FWD, count=32, mbs=1)
    return OpCase(op=op, backend="torch", num_ranks=2, labels=(label, Label()), scale="1/64")


def records_of(case: OpCase) -> list[Record]:
    measured = Measured(
        run_id="20261120-221300-ab12",
        case=case,
        samples=Samples(seconds=((1e-3, 2.5e-4), (3e-3, 1e-300)), method="graph-rotate/1"),
        checks=(
            Check(
                max_rel_err=math.inf,
                tolerance=0.01,
                num_wrong=3,
                num_compared=64,
                reference="fp64, 64 rows",
            ),
        ),
        telemetry=(
            Telemetry(sm_clock_hz=1.98e9, throttle=("power",), num_readings=4),
            Telemetry(),
        ),
        backend_run="nvjet_hsh",
        peak_memory_bytes=None,
        started_at=1795212780.125,
    )
    skipped = Skipped(run_id="r", case=case, reason="needs 2 GiB", needed_bytes=2**31)
    failed = Failed(
        run_id="r", case=case, cause="oom", message='inf "é"\n', ranks=(0, 1), traceback="a\n b"
    )
    return [measured, skipped, failed]


ALL = [record for op in OPS for record in records_of(case_of(op))]


def test_the_examples_cover_every_family() -> None:
    assert {type(op) for op in OPS} | {HostCopy} == set(FAMILIES.values())


def test_a_family_newer_than_the_golden_survives() -> None:
    for record in records_of(case_of(HostCopy(num_bytes=2**28, direction="d2h"))):
        assert codec.decode(codec.encode(record)) == record


@pytest.mark.parametrize("record", ALL, ids=lambda r: f"{r.case.family}-{r.kind}")
def test_what_is_written_is_read(record: Record) -> None:
    line = codec.encode(record)
    back = codec.decode(line)
    assert back == record
    assert back.case.case_id == record.case.case_id
    assert codec.encode(back) == line


@given(
    seconds=st.lists(
        st.lists(st.floats(min_value=0, allow_nan=False), min_size=2, max_size=2), max_size=3
    ),
    text=st.text(st.characters(exclude_categories=["Cs"])),
    clock=st.sampled_from(ClockName),
    rate=st.sampled_from(Rate),
    m=st.integers(1, 2**40),
)
def test_any_content_survives(
    seconds: list[list[float]], text: str, clock: ClockName, rate: Rate, m: int
) -> None:
    case = OpCase(op=Gemm(m=m, n=16, k=16), backend=text, clock=clock, rate=rate)
    measured = records_of(case)[0]
    assert isinstance(measured, Measured)
    samples = Samples(seconds=tuple(map(tuple, seconds)), method=text)
    record = dataclasses.replace(measured, samples=samples, backend_run=text)
    line = codec.encode(record)
    assert line.count(b"\n") == 1
    assert codec.decode(line) == record


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_json_lacks_survive_in_valid_json(value: float) -> None:
    measured = records_of(case_of(OPS[0]))[0]
    assert isinstance(measured, Measured)
    check = dataclasses.replace(measured.checks[0], max_rel_err=value)
    line = codec.encode(dataclasses.replace(measured, checks=(check,)))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(line, parse_constant=refuse)
    back = codec.decode(line)
    assert isinstance(back, Measured)
    assert repr(back.checks[0].max_rel_err) == repr(value)


def test_a_line_stands_alone() -> None:
    record = ALL[0]
    plain = json.loads(codec.encode(record))
    assert plain["case_id"] == record.case.case_id
    assert plain["command"] == command_of(record.case)
    assert plain["case"]["op"]["family"] == "gemm"


def test_the_load_of_a_host_survives() -> None:
    load = HostLoad(num_cores=2, own_threads=1, runnable_before=3, runnable=3.5, steal=0.1)
    record = next(each for each in ALL if isinstance(each, Measured))
    record = dataclasses.replace(record, telemetry=(Telemetry(host=load), Telemetry()))
    assert codec.decode(codec.encode(record)) == record


def test_golden_of_schema_1() -> None:
    lines = GOLDEN.read_bytes().splitlines()
    assert [codec.decode(line) for line in lines] == [
        dataclasses.replace(record, schema=1) for record in ALL
    ]
    # A case keeps its identity, or old runs could not be resumed or compared.
    assert [json.loads(line)["case_id"] for line in lines] == [r.case.case_id for r in ALL]


def test_unknown_keys_are_ignored_and_absent_ones_take_their_default() -> None:
    plain = json.loads(codec.encode(ALL[0]))
    plain["new"] = plain["case"]["new"] = plain["case"]["op"]["new"] = 1
    del plain["case"]["scale"]
    back = codec.decode(json.dumps(plain).encode())
    assert back == dataclasses.replace(ALL[0], case=dataclasses.replace(ALL[0].case, scale=""))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": SCHEMA + 1}, "schema"),
        ({"schema": None}, "schema"),
        ({"schema": "1"}, "schema"),
        ({"kind": "guessed"}, "kind"),
        ({"case": 3}, "case"),
        ({"case": {"op": {"family": "fft"}}}, "family"),
        ({"case": {"op": {"family": "gemm", "m": "x"}}}, "m"),
        ({"case": {"op": {"family": "gemm", "m": 1}}}, "Gemm"),
        ({"samples": {"seconds": [[None]], "method": "x"}}, "samples"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, object], field: str) -> None:
    plain = json.loads(codec.encode(ALL[0]))
    with pytest.raises(ConfigError, match=field) as caught:
        codec.decode(json.dumps({**plain, **change}).encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"null", b'{"schema": NaN}'])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        codec.decode(text)
