"""What the pages about workloads list is what there is."""

import re
from pathlib import Path
from typing import Any

import pytest

from stepmark.ground.options import Option, options
from stepmark.workloads.formats import FORMATS
from stepmark.workloads.rules import RULES
from stepmark.workloads.workload_flags import NO_EFFECT, options_class

from .process import ROOT
from .workload_program import Program, program

REFERENCE, AICB = ROOT / "docs/workload.md", ROOT / "docs/howto/coming-from-aicb.md"


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    for name in ("examples", "tests", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    return program(capsysbinary, tmp_path, monkeypatch)


def settings_of(framework: str) -> list[Option]:
    title = f"Settings of {framework}"
    return [one for one in options(options_class(framework)) if one.group == title]


def test_settings_that_are_listed_are_there() -> None:
    text = REFERENCE.read_text()
    for name, rule in RULES.items():
        if rule.alias:
            continue
        section = text.split(f"\n### {name}\n")[1].partition("\n##")[0]
        known = {word for one in settings_of(name) for word in one.words}
        known |= {f"--{field.replace('_', '-')}" for field in rule.fields()}
        listed = re.findall(r"^\| (`--.*?) \| ", section, re.M)
        assert len(listed) > 5
        for cell in listed:
            assert set(re.findall(r"`(--[\w-]+)`", cell)) <= known, (name, cell)


def test_formats_that_are_listed_are_all() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \| .* \| (yes|no|as `.*`) \| (?:`--(\w+)`)?",
        REFERENCE.read_text(),
        re.M,
    )
    assert {name: (reads == "yes", picks) for name, reads, picks in rows} == {
        name: (one.reads, one.picks) for name, one in FORMATS.items()
    }


def test_every_parameter_of_aicb_is_listed() -> None:
    rows = AICB.read_text().split("## Parameters")[1].splitlines()
    flags = [one for name in RULES for one in settings_of(name)]
    words = {word.lstrip("-").replace("-", "_") for one in flags for word in one.words}
    somewhere = words | {one.name for one in flags}
    for name in NO_EFFECT:
        spelled = f"`--{name}`", f"`--{name.replace('_', '-')}`"
        row = next((row for row in rows if any(one in row for one in spelled)), "")
        assert row, name
        if not name.startswith("recompute"):  # Megatron-LM has it under another name
            assert ("no effect" in row) is (name not in somewhere), row


def test_output_in_the_reference_is_what_is_printed(run: Program) -> None:
    run("generate --model llama-3-70b --framework fsdp --world-size 8 -o w.json")
    printed = run("--from-workload w.json --print nccl-tests", verb="comm").text.splitlines()
    listed = [line for line in REFERENCE.read_text().splitlines() if "_perf -b " in line]
    assert len(listed) == 2
    assert set(listed) <= set(printed)
