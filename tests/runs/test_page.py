"""The HTML report: alone in its file, and safe with whatever a name contains."""

import re

import pytest
from tests.tables.records import EVIL, full_run, gemm, made_up_device, measured, run_info

from stepmark.operators.op_columns import rows
from stepmark.runs import run_page
from stepmark.runs.summary import summary_lines
from stepmark.store.commands import command_of
from stepmark.tables.page import plotly_js


@pytest.fixture(scope="module")
def page() -> str:
    run, device, records = run_info(), made_up_device(), full_run()
    return run_page.page(run, records, rows(records, run, device=device), device).html()


def test_nothing_is_loaded_from_the_network(page: str) -> None:
    assert page.count(plotly_js()) == 1
    own = page.replace(plotly_js(), "").replace('href="#', "")
    loads = (
        r"""(src|href|action)\s*=|url\(|@import|https?://|fetch\(|<(link|img|iframe|object)"""
    )
    assert re.findall(loads, own) == []


def test_markup_in_names_is_escaped(page: str) -> None:
    own = page.replace(plotly_js(), "")
    assert EVIL not in own
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in own
    assert "<b>WARN</b>" not in own


def test_script_tags_balance(page: str) -> None:
    own = page.replace(plotly_js(), "")
    assert len(re.findall(r"<script\b", own)) == len(re.findall(r"</script>", own)) == 5


def test_every_row_names_its_command_and_every_gap_its_reason(page: str) -> None:
    for record in full_run():
        assert command_of(record.case) in re.sub("</?i>", "", page.replace("&#x27;", "'"))
    assert "transformer-engine is not installed" in page
    assert "oom: tried 128 GiB" in page
    assert "power limit below default" in page


def test_a_run_without_measurements_still_has_a_page() -> None:
    text = run_page.page(run_info(), [], [], None).html()
    assert "Nothing was measured." in text
    assert "Roofline" not in text.replace(plotly_js(), "")


def test_summary_says_what_a_reader_asks_first() -> None:
    run, device = run_info(4), made_up_device()
    slow = measured(gemm(num_ranks=4), 2e-3, 2e-3, 3e-3, 2e-3)
    lines = summary_lines(run, rows([slow, *full_run()], run, device=device))
    text = "\n".join(lines)
    assert lines[0] == "device     4 x Made Up 9000"
    assert lines[1] == "cases      9 measured, 1 wrong, 1 skipped, 1 failed"
    assert "733 TFLOP/s bf16, 73.3 % of the dense peak (8192x8192x8192)" in text
    assert "copy       3579 GB/s, 89.5 % of memory bandwidth" in text
    assert "slow rank  2: up to 1.500 x the median rank, in 1 cases" in text
    assert "throttled  sw_power_cap: 10 cases" in text


def test_summary_without_a_known_device_claims_no_peak() -> None:
    run = run_info()
    text = "\n".join(summary_lines(run, rows(full_run(), run)))
    assert "peak n/a" in text
    assert "dense peak" not in text
