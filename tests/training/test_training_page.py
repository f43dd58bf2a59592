"""Text, figures and page of training say what the rows say."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from tests.tables.records import check_page_of, full_run

from stepmark.cases.case import Label
from stepmark.cases.message import summed
from stepmark.cases.record import Measured
from stepmark.cases.training import Training
from stepmark.findings.histogram import rows as histogram_rows
from stepmark.operators.op_columns import rows as operator_rows
from stepmark.runs import run_page
from stepmark.runs.summary import train_lines
from stepmark.tables.columns import Row, digits, number
from stepmark.tables.page import plotly_js
from stepmark.training.train_columns import per_rank_rows, rows
from stepmark.training.training_figures import MAX_CASES, figures, losses, phase_bars, samples
from stepmark.training.training_printing import (
    block,
    message_lines,
    print_training,
)

from .train_records import (
    MESSAGES,
    flat,
    fsdp,
    full_train_run,
    micro,
    single,
    told,
    train_device,
    train_measured,
    train_run,
    with_messages,
)


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows(full_train_run(), train_run(), train_device())


def told_by(record: Measured) -> Training:
    assert record.training
    return record.training


def printed(held: list[Row], per_rank: list[Row] | None = None, width: int = 0) -> str:
    file = io.StringIO()
    console = Console(width=width or 240, force_terminal=bool(width), file=file)
    print_training(held, console, per_rank or [])
    return file.getvalue()


def test_a_block_has_the_key_figures_side_by_side() -> None:
    (row,) = rows([flat(micro(), 0.5, n=8)], train_run(), train_device())
    text = "\n".join(block(row))
    first = text.splitlines()[0]
    assert first == (
        "llama-3.1-8b fsdp x8 mbs 2 seq 4096 micro: amp, compile block, ac 1/4, accum 4"
    )
    assert "500 ms per forward and backward (p10 500 ms, p90 500 ms" in text
    assert "8 samples after 2 of warm-up" in text
    assert "16,384 per GPU, 131,072 in all" in text
    for name, key in (("causal", "tflops"), ("palm-all", "tflops_palm_all")):
        assert f"{name} {digits(number(row, key))} (" in text
    assert re.search(r"hfu \d+\.\d \(\d\d\.\d %\) per GPU; of 1000 \(bf16 peak\)", text)
    assert "forward 150 ms, backward 275 ms, optimizer 50 ms" in text
    assert "67 GiB allocated at most, 77 reserved of 140" in text
    assert "11.0000 -> 10.1000 (random tokens, shifted labels)" in text
    assert "model and optimizer 12.5 s, first sample 40 s" in text
    assert "1 of 4 samples has the optimizer" in text


def test_what_is_unknown_is_not_claimed() -> None:
    case, seconds = single(), [[0.5] * 4]
    bare = Training(
        tokens_per_sample=8192, cycle=1, num_params=1, warmup_s=((),), loss=(), data="x"
    )
    (row,) = rows([train_measured(case, seconds, training=bare)], train_run())
    text = "\n".join(block(row))
    assert "peak n/a" in text
    for word in ("%", "memory", "phases", "loss ", "hfu", "nan", "None"):
        assert word not in text


def test_several_cases_get_a_table_and_gaps_a_reason(table: list[Row]) -> None:
    everything = printed(table)
    (heading,) = re.findall(r"^model .*tokens/s/GPU.*$", everything, re.M)
    assert "% FP8 peak (causal)" in heading
    assert "failed  llama-3.1-8b train fsdp x8 mbs 64" in everything
    assert "oom: tried 200 GiB; mbs 8 would fit" in everything
    assert "skipped" in everything
    assert "remark    wrong: 3 losses" in everything
    alone = printed(table[:1])
    assert "tokens/s/GPU" not in alone
    assert "tried 200 GiB" in printed(table[5:6])


def test_a_narrow_terminal_keeps_what_counts(table: list[Row]) -> None:
    narrow = printed(table, width=100)
    assert "tokens/s/GPU" in narrow
    assert "torchtitan " not in narrow.splitlines()[-8]


def test_ranks_are_listed_below_their_own_case() -> None:
    records = full_train_run()[:2]
    run = train_run()
    text = printed(rows(records, run, train_device()), per_rank_rows(records, run))
    assert len(re.findall(r"^ +[0-7]  .*\d ms", text, re.M)) == 1 + 8
    assert "/ median" in text


def test_summary_has_a_line_per_case_and_its_remarks(table: list[Row]) -> None:
    text = "\n".join(train_lines(table))
    assert text.startswith("training   4 measured, 1 wrong, 1 failed, 1 skipped")
    assert text.count("\nstep       llama-3.1-8b") == 5
    assert "rank 3 takes 1.0" in text
    assert text.count("straggler") == 3  # said once a case
    assert "throttled: sw_power_cap" in text
    assert "MFU 43.9 %" in text
    assert train_lines([]) == []


def test_every_sample_is_drawn_with_the_warm_up_shaded() -> None:
    record = flat(micro(), 0.5, n=8)
    figure = samples(record)
    lines = figure.series
    assert len(lines) == 8
    assert all(len(line.y) == 2 + 8 for line in lines)
    assert lines[0].y[0] == pytest.approx(2500)
    assert lines[0].y[2] == pytest.approx(500)
    shade, median = figure.marks
    assert median.y == (pytest.approx(500), pytest.approx(500))
    assert shade.x == (-0.5, 1.5)
    # Five times as long, and so above the edge: or it would flatten what is measured.
    assert figure.y.limits == (0, pytest.approx(625))


def test_many_ranks_are_one_line_of_the_slowest() -> None:
    case = fsdp(32)
    seconds = [[0.5 + 0.001 * rank] * 4 for rank in range(32)]
    (line,) = samples(train_measured(case, seconds)).series
    assert line.y[-1] == pytest.approx(531)
    assert line.name == "slowest of 32 ranks"


def test_phases_are_stacked_to_the_mean_sample() -> None:
    ran = [one for one in full_train_run() if isinstance(one, Measured)]
    phases = phase_bars(ran).series
    assert [series.name for series in phases] == [
        "forward",
        "backward",
        "optimizer",
        "other",
    ]
    assert len(set(phases[0].y)) == len(ran)  # two cases of one name are two bars
    assert sum(float(str(series.x[0])) for series in phases) == pytest.approx(900)


def test_losses_start_with_the_first_sample() -> None:
    record = flat(single(), 0.5)
    (curve,) = losses([record]).series
    assert list(curve.y) == list(told_by(record).loss)


def test_figures_of_what_was_measured() -> None:
    titles = [figure.title for figure in figures(full_train_run())]
    assert titles[-2:] == ["Phases of a sample", "Loss"]
    assert sum(title.startswith("Samples: ") for title in titles) == 5
    assert list(figures(full_run())) == []
    many = [flat(fsdp(mbs=mbs), 0.5) for mbs in range(1, MAX_CASES + 3)]
    found = list(figures(many))
    assert sum(figure.title.startswith("Samples: ") for figure in found) == MAX_CASES
    assert "2 more cases are not drawn" in found[0].note


def test_phases_and_losses_are_those_of_steps_not_of_their_calibration() -> None:
    part = replace(single(), mbs=1, labels=(Label(role="kernels"),))
    drawn = list(figures([flat(part, 0.1), flat(single(), 0.5)]))
    assert drawn[0].title.endswith("mbs 2 seq 4096: amp")  # the step comes first
    assert drawn[1].title.endswith("(calibration: kernels)")
    phases, loss = drawn[2:]
    assert [len(series.y) for series in phases.series] == [1] * 4
    assert len(loss.series) == 1


def page(with_operators: bool) -> str:
    records, run, device = full_train_run(), train_run(), train_device()
    held = full_run() if with_operators else []
    return (
        run_page.page(
            run,
            [*held, *records],
            operator_rows(held, run, device=device),
            device,
            (),
            rows([*held, *records], run, device),
        )
        .html()
        .replace(plotly_js(), "")
        .replace('href="#', "")
    )


def test_page_of_training_alone(table: list[Row]) -> None:
    own = page(with_operators=False)
    check_page_of(own, "Training", table)
    assert "tried 200 GiB; mbs 8 would fit" in own
    assert "TransformerEngine is missing" in own
    assert re.search("stepmark train llama-3.1-8b [^<]*--strategy single", own)


def test_page_of_both_has_two_tables_and_loads_nothing() -> None:
    own = page(with_operators=True)
    assert own.count('<div class="box rows">') == 2
    ids = re.findall(r'\bid="([^"]+)"', own)
    assert len(ids) == len(set(ids))
    assert not re.findall(r"(src|href|action)\s*=|url\(|@import|https?://|fetch\(", own)


def test_no_message_is_lost_on_the_way_to_the_histogram() -> None:
    training = told_by(with_messages())
    found = summed(training.messages)
    assert sum(tally.calls for tally in found.values()) == sum(t.calls for _, t in MESSAGES)
    assert sum(
        number(row, "bytes") or 0 for row in histogram_rows(found, num_ranks_seen=8)
    ) == sum((kind.message_bytes or 0) * tally.calls for kind, tally in MESSAGES)
    kind, tally = MESSAGES[0]
    twice = told(fsdp(), [[0.5] * 2] * 8, messages=((kind, tally), (kind, tally)))
    assert summed(twice.messages)[kind].calls == 2 * tally.calls


def test_messages_as_text() -> None:
    text = message_lines(told_by(with_messages()), 8)
    # 63 gathers of 8 MiB and 32 scatters of 16 MiB.
    assert text[0] == "messages of one sample, not timed: 95 calls, 1016 MiB per rank"
    assert "phase" in text[1]
    assert len(text) == 2 + 3
    micro_steps = message_lines(told_by(flat(micro(), 0.5)), 8)
    assert micro_steps == ["no messages in 4 samples, one with the optimizer"]
    assert message_lines(told_by(flat(single(), 0.5)), 1) == ["no messages in one sample"]
