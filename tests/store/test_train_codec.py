"""Records of training: what is written is read; what SQL and compare see of them."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.parsing import run
from tests.store.test_query import sql
from tests.store.test_runs import INFO
from tests.store.writers import new_run

from stepmark.cases.fields import former_values
from stepmark.cases.message import MessageKind, Tally
from stepmark.cases.record import (
    SCHEMA,
    Check,
    Failed,
    Measured,
    Record,
    Samples,
    Skipped,
    Telemetry,
)
from stepmark.cases.train_case import TrainCase
from stepmark.cases.train_words import compile_text, fp8_text, recompute_text
from stepmark.cases.training import (
    CompileScope,
    DataParallel,
    Fp8,
    GradSync,
    OptimizerKind,
    Precision,
    Recompute,
    Schedule,
    Training,
)
from stepmark.comparison.compare import Options, compare, rows_by_line
from stepmark.comparison.comparison import Comparison, Side
from stepmark.comparison.comparison_text import headline, split_fields
from stepmark.comparison.series import STRICT, mean_of_cycles, series_of_records
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import ConfigError
from stepmark.ground.ratio import Ratio
from stepmark.model.model import ModelConfig
from stepmark.model.model_tables import find_model
from stepmark.model.parallel import ParallelConfig, PipelineSchedule
from stepmark.runs import runs
from stepmark.store import codec
from stepmark.store.run_export import _scalars
from stepmark.training import train_columns

GOLDEN = Path(__file__).parents[1] / "data" / "records-schema3.jsonl"

# Written out, so that a preset that changes does not change the golden.
PLAIN_MODEL = ModelConfig(
    name="plain",
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden_size=256,
    vocab_size=512,
    seq_len=64,
    activation="gelu",
    norm="layernorm",
    tied_embeddings=True,
    linear_bias=True,
    max_positions=64,
    source="made up",
    published_params=1,
    aliases=("p",),
)
PLAIN = TrainCase(model=PLAIN_MODEL, device="cpu", backend="gloo")
SAMPLES: dict[str, TrainCase] = {
    "plain": PLAIN,
    "everything": TrainCase(
        model=PLAIN_MODEL,
        mbs=4,
        parallel=ParallelConfig(dp_shard=2, dp_replicate=2, tp=2, pp=2, cp=2),
        data_parallel=DataParallel.FSDP,
        schedule=Schedule.MICRO,
        grad_accum=8,
        grad_sync=GradSync.LAST,
        precision=Precision.BF16,
        fp8=Fp8.ROWWISE,
        fp8_head=True,
        fp8_all_gather=True,
        compile=CompileScope.MODEL,
        compile_mode="reduce-overhead",
        recompute=Recompute.BLOCKS,
        recompute_blocks=(1, 4),
        attention="cudnn",
        loss_chunks=8,
        cuda_graph=True,
        lr=1e-4,
        clip=0.0,
        optimizer=OptimizerKind.MUON,
        reshard="2",
        prefetch=2,
        blocks_per_group=2,
        reduce_dtype=DType.BF16,
        bucket_mb=100,
        async_tp=True,
        pp_schedule=PipelineSchedule.INTERLEAVED,
        pp_microbatches=4,
        data="a b/text.txt",
        workers=8,
        seed=1,
        scale="1/8",
        model_file="models/plain.json",
    ),
    "ddp": dataclasses.replace(
        PLAIN, parallel=ParallelConfig(dp_replicate=2), data_parallel=DataParallel.DDP
    ),
}
MODELS = ("gpt2-125m", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "deepseek-v2-lite")

KIND = MessageKind(
    collective="all_reduce",
    dtype="fp32",
    group="dp",
    num_ranks=None,
    phase="backward",
    call_bytes=4096,
    message_bytes=None,
)


def training_of(case: TrainCase, num_samples: int = 10) -> Training:
    n = case.num_ranks
    each = tuple((1e-3,) * num_samples for _ in range(n))
    return Training(
        tokens_per_sample=case.tokens_per_step * case.micro_steps,
        cycle=case.cycle,
        num_params=123,
        warmup_s=tuple((0.5, 0.25) for _ in range(n)),
        loss=(6.25, 6.0, *(5.5,) * num_samples),
        fwd_s=each,
        bwd_s=each,
        optim_s=each,
        data_s=each,
        build_s=1.5,
        first_s=20.0,
        allocated_bytes=(2**30, *(None,) * (n - 1)),
        reserved_bytes=(2**31,) * n,
        alloc_retries=(0,) * n,
        recompiles=1,
        graph_breaks=2,
        attention_run="cudnn",
        data="text, sha256 abc",
        messages=((KIND, Tally(calls=8, ranks=n)),),
        traces=("traces/rank0.json.gz",),
    )


def measured_of(case: TrainCase, scale: float = 1.0, launch: int = 1) -> Measured:
    """Ten samples a rank, some of them 1 % apart; the second rank is the slowest."""
    n = case.num_ranks
    check = Check(
        max_rel_err=0.0, tolerance=0.0, num_wrong=0, num_compared=12, reference="finite losses"
    )
    seconds = tuple(
        tuple(scale * (0.5 + 0.01 * (rank == 1) + 0.005 * (i % 2)) for i in range(10))
        for rank in range(n)
    )
    return Measured(
        run_id="20261121-050000-ef56",
        case=case,
        samples=Samples(seconds=seconds, method=f"train-{case.schedule}/1", wall_s=6.5),
        checks=(check,) * n,
        telemetry=(Telemetry(power_w=312.5),) * n,
        backend_run="torch",
        peak_memory_bytes=2**31,
        started_at=1795212780.125,
        launch=launch,
        training=training_of(case),
    )


def records_of(case: TrainCase) -> list[Record]:
    skipped = Skipped(run_id="r", case=case, reason="torchao is missing", needed_bytes=1)
    failed = Failed(run_id="r", case=case, cause="oom", message="mbs 2 fits", ranks=(1,))
    return [measured_of(case), skipped, failed]


ALL = [record for case in SAMPLES.values() for record in records_of(case)]


@pytest.mark.parametrize("record", ALL, ids=lambda r: f"{r.train.strategy}-{r.kind}")
def test_what_is_written_is_read(record: Record) -> None:
    line = codec.encode(record)
    back = codec.decode(line)
    assert back == record
    assert back.train.case_id == record.train.case_id
    assert codec.encode(back) == line


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scale", [Fraction(1), Fraction(1, 8)])
def test_models_survive_with_experts_and_latent_attention(name: str, scale: Fraction) -> None:
    model = find_model(name).scaled(scale)
    for one in (model, find_model(name).tiny()):
        record = Skipped(run_id="r", case=TrainCase(model=one), reason="x")
        back = codec.decode(codec.encode(record))
        assert back == record
        assert back.case.case_id == record.case.case_id


FLOATS = st.lists(st.floats(allow_nan=False), max_size=3).map(tuple)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
KINDS = st.builds(
    MessageKind,
    collective=TEXT,
    dtype=TEXT,
    group=TEXT,
    num_ranks=st.none() | st.integers(1, 2**20),
    phase=TEXT,
    call_bytes=st.integers(0, 2**60),
    message_bytes=st.none() | st.integers(0, 2**60),
)
TALLIES = st.builds(
    Tally, calls=st.integers(0, 2**40), ranks=st.integers(0, 9), seconds=st.floats(0, 1e9)
)


@given(
    warmup_s=st.lists(FLOATS, max_size=3).map(tuple),
    loss=FLOATS,
    allocated=st.lists(st.none() | st.integers(0, 2**50), max_size=3).map(tuple),
    messages=st.lists(st.tuples(KINDS, TALLIES), max_size=3).map(tuple),
    axes=st.builds(
        ParallelConfig, **{name: st.integers(1, 8) for name in ("tp", "pp", "dp_shard")}
    ),
    fp8=st.sampled_from(Fp8),
    recompute=st.sampled_from(Recompute),
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    lr=st.floats(0, 10),
    words=TEXT,
)
def test_any_content_survives(
    warmup_s: tuple[tuple[float, ...], ...],
    loss: tuple[float, ...],
    allocated: tuple[int | None, ...],
    messages: tuple[tuple[MessageKind, Tally], ...],
    axes: ParallelConfig,
    fp8: Fp8,
    recompute: Recompute,
    blocks: tuple[int, int],
    lr: float,
    words: str,
) -> None:
    case = dataclasses.replace(
        PLAIN,
        parallel=axes,
        fp8=fp8,
        recompute=recompute,
        recompute_blocks=blocks,
        lr=lr,
        data=words,
        reshard=words,
    )
    measured = measured_of(PLAIN)
    training = dataclasses.replace(
        training_of(PLAIN),
        warmup_s=warmup_s,
        loss=loss,
        allocated_bytes=allocated,
        messages=messages,
        data=words,
    )
    record = dataclasses.replace(measured, case=case, training=training)
    line = codec.encode(record)
    back = codec.decode(line)
    assert line.count(b"\n") == 1
    assert back == record
    assert back.case.case_id == case.case_id


def test_a_loss_that_is_no_number_is_valid_json_and_stays_one() -> None:
    measured = measured_of(PLAIN)
    training = dataclasses.replace(training_of(PLAIN), loss=(math.nan, math.inf))
    line = codec.encode(dataclasses.replace(measured, training=training))
    assert json.loads(line)["training"]["loss"] == ["nan", "inf"]
    back = codec.decode(line)
    assert isinstance(back, Measured)
    assert back.training
    assert repr(back.training.loss) == "(nan, inf)"


def test_a_line_stands_alone() -> None:
    plain = json.loads(codec.encode(measured_of(SAMPLES["everything"])))
    assert plain["schema"] == SCHEMA
    assert plain["strategy"] == "hsdp x tp2 x pp2 x cp2"
    assert plain["num_ranks"] == 32
    assert plain["command"].startswith("stepmark train models/plain.json")


def test_golden_of_schema_3() -> None:
    lines = GOLDEN.read_bytes().splitlines()
    cases = [dataclasses.replace(record.case, **former_values(TrainCase)) for record in ALL]
    assert [codec.decode(line) for line in lines] == [
        dataclasses.replace(record, schema=3, case=case)
        for record, case in zip(ALL, cases, strict=True)
    ]
    # A case keeps its identity, or old runs could not be resumed or compared.
    assert [json.loads(line)["case_id"] for line in lines] == [case.case_id for case in cases]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": {"name": "x"}}, "model"),
        ({"model": 3}, "model"),
        ({"mbs": "many"}, "mbs"),
        ({"parallel": {"tp": 0}}, "tp"),
        ({"fp8": "guessed"}, "fp8"),
        ({"recompute_blocks": [1]}, "recompute_blocks"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, object], field: str) -> None:
    plain = json.loads(codec.encode(ALL[1]))
    plain["case"] |= change
    with pytest.raises(ConfigError, match=field) as caught:
        codec.decode(json.dumps(plain).encode())
    assert "\n" not in str(caught.value)


def test_columns_of_training(tmp_path: Path) -> None:
    """Tokens of whole cycles over the slowest ranks' time; 8 of 10 samples where cycle is 8."""
    with new_run(tmp_path, dataclasses.replace(INFO, run_id="a")) as writer:
        for record in ALL:
            writer.append(dataclasses.replace(record, run_id="a"))
    _, found = sql(
        tmp_path,
        "SELECT family, model, strategy, num_ranks, mbs, seq_len, schedule, grad_accum, fp8,"
        " compile, recompute, precision, n, tokens_per_s, loss_first, loss_last FROM records"
        " WHERE kind = 'measured'",
    )
    expected = []
    for case in SAMPLES.values():
        slow = 0.01 * (case.num_ranks > 1)
        whole = 10 // case.cycle * case.cycle
        total_s = sum(0.5 + slow + 0.005 * (i % 2) for i in range(whole))
        rate = case.tokens_per_step * case.micro_steps * whole
        expected.append(
            (
                *("train", "plain", case.strategy, case.num_ranks, case.mbs, 64),
                *(case.schedule, case.grad_accum, fp8_text(case), compile_text(case)),
                recompute_text(case),
                *(case.precision, 10, pytest.approx(rate / total_s), 6.25, 5.5),
            )
        )
    assert sorted(found, key=lambda row: row[2]) == sorted(expected, key=lambda row: row[2])
    _, failed = sql(tmp_path, "SELECT family, tokens_per_s FROM records WHERE kind='failed'")
    assert failed == [("train", None)] * len(SAMPLES)


def side(name: str, *records: Record) -> Side:
    series, notes = series_of_records(dataclasses.replace(r, run_id=name) for r in records)
    return Side(name=name, series=tuple(series), notes=notes)


def against(one: TrainCase, other: TrainCase, *allowed: str) -> Comparison:
    launches = [(launch, 1 + 0.001 * launch) for launch in (1, 2, 3)]
    base = side("a", *(measured_of(one, scale, launch) for launch, scale in launches))
    faster = side("b", *(measured_of(other, 0.8 * scale, launch) for launch, scale in launches))
    return compare([base, faster], Options(allowed=allowed))


def test_the_same_case_in_two_runs_is_one_line() -> None:
    (line,) = against(PLAIN, PLAIN).lines
    ratio = line.cells["b"].ratio
    assert ratio
    assert ratio.speed == pytest.approx(1.25)
    assert ratio.verdict.value == "faster"


def test_techniques_may_differ_and_are_named() -> None:
    """FP8 against bf16 is what a comparison is about, though the products' type differs."""
    fp8 = dataclasses.replace(PLAIN, fp8=Fp8.TENSORWISE, compile=CompileScope.BLOCK)
    found = against(PLAIN, fp8)
    assert len(found.lines) == 1
    assert "fp8 differs: a none, b tensorwise" in found.notes
    assert "compile differs: a none, b block" in found.notes
    constant, _ = split_fields(found.lines)
    assert headline(found, constant).startswith("train, plain, single, mbs 1 seq 64")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mbs", {"mbs": 2}),
        ("num_ranks", {"parallel": ParallelConfig(dp_shard=2)}),
        ("seq_len", {"model": dataclasses.replace(PLAIN_MODEL, seq_len=32)}),
        ("grad_accum", {"grad_accum": 2}),
    ],
)
def test_times_of_other_numbers_of_tokens_are_refused(
    name: str, change: dict[str, object]
) -> None:
    other = dataclasses.replace(PLAIN, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=name):
        against(PLAIN, other)
    assert len(against(PLAIN, other, name).lines) == 1


WIDE = dataclasses.replace(PLAIN_MODEL, hidden_size=128, num_heads=8, num_kv_heads=8)


def test_a_model_is_told_by_what_it_computes_not_by_its_name() -> None:
    wide = dataclasses.replace(PLAIN, model=WIDE)
    reason = r"\(model differs: plain \(hidden 64\) and plain \(hidden 128\)\)"
    with pytest.raises(ConfigError, match=reason):
        against(PLAIN, wide, *STRICT)
    elsewhere = dataclasses.replace(PLAIN_MODEL, source="elsewhere", published_params=None)
    (line,) = against(PLAIN, dataclasses.replace(PLAIN, model=elsewhere)).lines
    assert line.fields["model"] == "plain"


def test_two_models_of_one_name_are_two_lines_each_with_its_partner() -> None:
    wide = dataclasses.replace(PLAIN, model=WIDE)
    base = side("a", measured_of(PLAIN, 1.0), measured_of(wide, 10.0))
    other = side("b", measured_of(wide, 5.0), measured_of(PLAIN, 1.0))
    found = compare([base, other], Options())
    speeds = {
        line.fields["model"]: ratio.speed
        for line in found.lines
        if (ratio := line.cells["b"].ratio)
    }
    assert speeds == pytest.approx({"plain (hidden 64)": 1.0, "plain (hidden 128)": 2.0})
    places = {place: row.base.logs for place, row in rows_by_line(base, other).items()}
    assert len(places) == 2


def test_a_run_of_another_model_of_that_name_is_no_history() -> None:
    """Launches of one process show nothing of how others vary; runs of the past do."""
    wide = dataclasses.replace(PLAIN, model=WIDE)
    sides = [side("a", measured_of(PLAIN, 1.0)), side("b", measured_of(PLAIN, 0.8))]

    def interval(case: TrainCase) -> Ratio:
        past = tuple(side(f"p{i}", measured_of(case, 1 + 0.001 * i)) for i in range(8))
        options = Options(history={"a": past, "b": past})
        (line,) = compare(sides, options).lines
        ratio = line.cells["b"].ratio
        assert ratio
        return ratio

    assert interval(PLAIN).low is not None
    assert interval(wide).low is None


def test_another_strategy_is_one_difference_and_replicas_another() -> None:
    two = ParallelConfig(dp_shard=2)
    fsdp = dataclasses.replace(PLAIN, parallel=two, data_parallel=DataParallel.FSDP)
    notes = [note for note in against(SAMPLES["ddp"], fsdp).notes if "differs" in note]
    assert notes == ["strategy differs: a ddp, b fsdp"]
    four = [
        dataclasses.replace(fsdp, parallel=ParallelConfig(dp_shard=4 // n, dp_replicate=n))
        for n in (1, 2)
    ]
    notes = [note for note in against(*four).notes if "differs" in note]
    assert notes == [
        "strategy differs: a fsdp, b hsdp",
        "dp_replicate differs: a 1, b 2",
    ]


def test_other_models_are_never_paired() -> None:
    other = dataclasses.replace(PLAIN, model=dataclasses.replace(PLAIN_MODEL, name="other"))
    with pytest.raises(ConfigError, match="something in common"):
        against(PLAIN, other)


@given(
    cycles=st.lists(st.lists(st.floats(0.1, 9.0), min_size=4, max_size=4), min_size=1),
    rest=st.lists(st.floats(0.1, 9.0), max_size=3),
)
def test_a_compared_value_is_the_mean_of_a_whole_cycle(
    cycles: list[list[float]], rest: list[float]
) -> None:
    slow = [value for cycle in cycles for value in cycle] + rest
    quick = [value / 2 for value in slow]
    found = mean_of_cycles([quick, slow], 4)
    assert found == pytest.approx([sum(cycle) / 4 for cycle in cycles])
    assert mean_of_cycles([quick[:3], slow[:3]], 4) == tuple(slow[:3])
    turns = [[1.0, 3.0], [3.0, 1.0]]  # who is last of each sample is nobody's time
    assert mean_of_cycles(turns, 2) == (2.0,)


def test_runs_show_export_and_report_have_training(tmp_path: Path) -> None:
    run_id = "20261121-050000-ef56"
    with new_run(tmp_path, dataclasses.replace(INFO, run_id=run_id)) as writer:
        for record in ALL[:3]:
            writer.append(dataclasses.replace(record, run_id=run_id))
        writer.append(dataclasses.replace(measured_of(SAMPLES["ddp"]), run_id=run_id))

    def call(*words: str) -> str:
        code, shown = run("runs", *words, "--runs", str(tmp_path))
        assert code == 0
        return shown

    shown = call("show", "latest")
    assert "plain ddp x2 mbs 1 seq 64: amp" in shown
    assert "512.5 ms per optimizer step" in shown
    rows = json.loads(call("show", "latest", "--json", "-"))["rows"]
    assert [row["strategy"] for row in rows] == ["single", "ddp"]
    assert [row["status"] for row in rows] == ["failed", "measured"]
    call("export", "latest", str(tmp_path / "rows.csv"), "--to", "csv")
    head, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert "tokens_per_s_gpu" in head
    assert len(lines) == 2
    page = runs.write_page(tmp_path / run_id)
    assert "<h2>Training</h2>" in page.read_text(encoding="utf-8")


def test_a_long_list_of_techniques_leaves_the_column_in_a_tracker_s_name() -> None:
    """Every number of a row keeps a name of its own, with its column at the end."""
    (row,) = train_columns.rows([measured_of(SAMPLES["everything"])], INFO)
    row["shape"] = str(row["shape"]) * 3
    names = list(_scalars([row]))
    assert any(name.endswith("/tokens_per_s_gpu") for name in names)
    assert not [name for name in names if name.endswith("_" * 2)]
