"""Every command of the pages about workloads works; what they list is what there is."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from stepmark.app.workload_flags import NO_EFFECT, options_class
from stepmark.core.options import Option, options
from stepmark.workload.formats import FORMATS
from stepmark.workload.rules import RULES

from .process import ROOT
from .workload_program import Program, program

REFERENCE, AICB = ROOT / "docs/workload.md", ROOT / "docs/howto/coming-from-aicb.md"


def commands(page: Path, text: str = "") -> list[str]:
    """Lines of the page's blocks of commands."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text or page.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def readme() -> str:
    """The section about this verb."""
    text = (ROOT / "README.md").read_text()
    return text[text.index("\n**workload**: ") : text.index("\n**compare**: ")]


@pytest.fixture(name="run")
def _run(capsysbinary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    for name in ("examples", "tests", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    return program(capsysbinary, tmp_path, monkeypatch)


PAGES = {
    "workload.md": commands(REFERENCE),
    "coming-from-aicb.md": commands(AICB),
    "README.md": commands(Path(), readme()),
}


@pytest.mark.parametrize("page", PAGES)
def test_commands_work(run: Program, page: str) -> None:
    """In order, as later ones read what earlier ones wrote."""
    assert len(PAGES[page]) > 3
    for line in PAGES[page]:
        if " capture " in line:  # loads torch; its own tests run it
            continue
        name, verb, rest = line.split(" ", 2)
        if verb == "comm" and "--print" not in line:
            rest += " --device cpu --nproc 2 --dry-run"
        done = run(rest, verb=verb)
        assert (name, done.code) == ("stepmark", 0), (line, done.err)
        assert done.out or "wrote" in done.err
        for word, after in zip(shlex.split(rest), shlex.split(rest)[1:], strict=False):
            if word in ("-o", "--html"):
                assert Path(after).stat().st_size


def settings_of(framework: str) -> list[Option]:
    title = f"Settings of {framework}"
    return [one for one in options(options_class(framework)) if one.group == title]


def test_settings_that_are_listed_are_there() -> None:
    text = REFERENCE.read_text()
    for name, rule in RULES.items():
        section = text.split(f"\n### {name}\n")[1].partition("\n##")[0]
        known = {word for one in settings_of(name) for word in one.words}
        known |= {f"--{field.replace('_', '-')}" for field in rule.fields()}
        listed = re.findall(r"^\| (`--.*?) \| ", section, re.M)
        assert len(listed) > 5
        for cell in listed:
            assert set(re.findall(r"`(--[\w-]+)`", cell)) <= known, (name, cell)


def test_formats_that_are_listed_are_all() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| (yes|no|as `.*`) \| (?:`--(\w+)`)?", REFERENCE.read_text(), re.M
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


def test_output_in_the_readme_is_what_is_printed(run: Program) -> None:
    shown = run(
        "generate --model llama-3-70b --framework fsdp --world-size 8"
    ).text.splitlines()
    (block,) = re.findall(r"^```\n(.*?)^```$", readme(), re.M | re.S)
    for line in block.splitlines():
        assert line == "..." or line in shown, line
    made = run(
        "generate --model llama-3.1-405b --framework megatron --world-size 16384 --tp 8 "
        "--pp 16 --vpp 8 --sp --gbs 2048 --mbs 1 -o w.json"
    )
    assert made.code == 0
    said = re.search(r"the 405B above: (\d+) kB", readme())
    assert said
    assert abs(int(said[1]) - Path("w.json").stat().st_size / 1000) < 10


def test_output_in_the_reference_is_what_is_printed(run: Program) -> None:
    run("generate --model llama-3-70b --framework fsdp --world-size 8 -o w.json")
    printed = run("--from-workload w.json --print nccl-tests", verb="comm").text.splitlines()
    listed = [line for line in REFERENCE.read_text().splitlines() if "_perf -b " in line]
    assert len(listed) == 2
    assert set(listed) <= set(printed)
