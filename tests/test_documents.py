"""The documents: every command works, and every link of pages outside the site leads somewhere.

Commands stand in blocks that open with ```sh. Those that measure are planned, on a device that
this machine need not have. Those that wait for a job, judge this machine or load torch are
parsed. The build of the site also executes blocks of ```sh run, and a test those of ```sh try.
Blocks of ```sh norun are for a shell, or name files that exist nowhere: they are parsed.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli import main
from stepmark.ground import options
from stepmark.operators.op_options import FAMILY_WORDS
from stepmark.step.workload import Workload
from stepmark.timeline.trace_columns import RankTrace
from stepmark.traces import trace_files
from stepmark.traces.kineto.reader import read_trace
from stepmark.workloads import workload
from stepmark.workloads.workload import generate
from stepmark.workloads.workload_options import GenerateOptions

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "diary"),
]
OUTSIDE = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "containers/README.md",
    "examples/README.md",
    "validation/README.md",
)
CHECKED = "sh(?: try| run[^\n]*)?"

PLANNED = {"run", "op", "comm", "train", "calibrate", "replay", "sweep"}
WITH_RANKS = {"run", "comm", "train", "calibrate"}
PARSED = (
    *("nodes.doctor:run", "watching.watch:run", "comparison.check:run"),
    *("measuring.measure:resume", "capture.workload_capture:run", "replays.workload_fill:run"),
)
# Files and runs that pages name as the reader's own: what stands in for them.
STAND_INS = {
    "captured.json": "results/h100-replays/llama-eager/generated.json",
    "before": "results/h200-x4-comm-queued-1",
    "after": "results/h200-x4-comm-queued-2",
    "before-1.txt": "results/h200-x4-nccl-tests/nccl-tests-queued-all_gather-1.txt",
    "after-1.txt": "results/h200-x4-nccl-tests/nccl-tests-queued-all_gather-2.txt",
    "rccl-tests.txt": "results/h200-x4-nccl-tests/nccl-tests-queued-all_gather-3.txt",
    "nccl.n1.1.log": "results/h200-x4-nccl-log/nccl.vm.957.log.gz",
    "slurm-4711.out": "tests/data/faults/dtype/output.txt.gz",
    "job-output": "tests/data/faults/dtype",
    "runs/RUN": "results/h200-x4-comm-queued-3",
}
# What `latest` is for a verb that does not read the run of a calibration, which is the latest.
LATEST = {"trace": "tests/data/gloo-traces", "logs": "results/h200-x4-comm-queued-1"}
CALIBRATION = ROOT / "results" / "h100-run"


def commands(page: Path, fence: str = CHECKED) -> Iterator[str]:
    """Yield the commands of stepmark on a page, without variables and comments of a shell."""
    for block in re.findall(rf"^```{fence}\n(.*?)^```$", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words and words[0] == "stepmark":
                yield shlex.join(words[1:])


WITH_COMMANDS = [page for page in PAGES if any(commands(page))]


def planned(line: str) -> list[str]:
    """Return the words of a command that lists what it would measure or submit."""
    verb = shlex.split(line)[0]
    latest = LATEST.get(verb, "latest")
    words = [latest if word == "latest" else word for word in shlex.split(line)]
    if verb == "predict" and words[1] == "--model" and "--device" not in words:
        return [*words, "--device", "h200"]  # a calibration of this machine, which is not there
    if verb == "launch":
        return [word for word in words if word != "--submit"]
    if verb not in PLANNED or {"--print", "--list", "--dry-run"} & set(words):
        return words
    added = ["--dry-run"]
    if verb != "sweep" and "--device" not in words:
        added += ["--device", "cpu" if "all" in words[2:] else "h200"]
    if verb in WITH_RANKS and not {"--nproc", "single"} & set(words):
        added += ["--nproc", "8"]
    return [verb, *added, *words[1:]]


@pytest.fixture
def _beside_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the checkout's data and the stand-ins."""
    for name in ("examples", "results", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    run = tmp_path / "runs" / "the-latest"
    run.mkdir(parents=True)
    for file in CALIBRATION.iterdir():
        (run / file.name).symlink_to(file)
    for name, stands_in in STAND_INS.items():
        (tmp_path / name).symlink_to(ROOT / stands_in)
    for name in ("venv-old", "venv-new"):
        (tmp_path / name).symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)


def _load_unless_parsed(*names: str) -> Callable[[str], Any]:
    """Return options.load for a verb whose handler does nothing if its name begins so."""
    load = options.load
    prefixes = tuple(f"stepmark.{name}" for name in names)
    return lambda name: (lambda _: 0) if name.startswith(prefixes) else load(name)


@pytest.mark.parametrize("name", PARSED)
def test_what_is_only_parsed_is_a_handler(name: str) -> None:
    handlers = "".join(file.read_text() for file in (ROOT / "src/stepmark/cli").glob("*.py"))
    assert f'"stepmark.{name}"' in handlers


@cache
def read_once(path: Path) -> RankTrace:
    return read_trace(path)


GENERATED: dict[str, Workload] = {}


def generate_once(options: GenerateOptions) -> Workload:
    """Pages show the same job."""
    key = repr(options)
    if key not in GENERATED:
        GENERATED[key] = generate(options)
    return GENERATED[key]


@pytest.fixture
def _read_and_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share traces and workloads between pages."""
    monkeypatch.setattr(trace_files, "cores", lambda: 1)
    monkeypatch.setattr(trace_files, "read_trace", lambda path: read_once(Path(path).resolve()))
    monkeypatch.setattr(workload, "generate", generate_once)


@pytest.mark.usefixtures("_beside_files", "_read_and_generated_once")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.relative_to(ROOT))
def test_commands_work(
    page: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, as later ones read what earlier ones wrote."""
    monkeypatch.setattr(options, "load", _load_unless_parsed(*PARSED))
    for line in commands(page):
        words = planned(line)
        code = main.status(words)
        shown = capfd.readouterr()
        allowed = (0, 1, 3) if words[0] in ("compare", "logs") else (0,)
        assert code in allowed, (line, shown.err)
        if "--dry-run" in words:
            assert re.search(r"[1-9]\d* (case|setting)|none was run", shown.out + shown.err), (
                line
            )


def test_other_commands_are_parsed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "load", _load_unless_parsed(""))
    lines = [line for page in PAGES for line in commands(page, "sh norun")]
    assert len(lines) > 20
    for line in lines:
        assert main.status(shlex.split(line)) == 0, (line, capfd.readouterr().err)


@pytest.mark.ranks
@pytest.mark.usefixtures("_beside_files", "forked_ranks")
@pytest.mark.parametrize(
    "page",
    [
        # The first page runs the main job, as cli/test_run does.
        pytest.param(page, marks=[pytest.mark.slow] * (page.stem == "start"), id=page.stem)
        for page in PAGES
        if any(commands(page, "sh try"))
    ],
)
def test_small_commands_measure(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first of each verb, with less time where --budget limits it."""
    first = {line.split()[0]: line for line in reversed([*commands(page, "sh try")])}
    for verb, line in first.items():
        shorter = ["--budget", "1s"] if "--budget" in line else []
        folder = Path("measured", verb)
        status = main.status([*shlex.split(line), *shorter, "--out", str(folder)])
        assert status == 0, (line, capfd.readouterr().err)
        [run] = folder.iterdir()
        kinds = re.findall(r'"kind":\s*"(\w+)"', (run / "records.jsonl").read_text())
        assert "measured" in kinds
        assert "failed" not in kinds


def test_every_verb_and_family_is_described() -> None:
    verbs = {page.stem for page in ROOT.glob("docs/verbs/*.md")} - {"index"}
    assert verbs == main.VERBS.keys()
    families = (ROOT / "docs/verbs/op.md").read_text().split("## Families")[1].split("## ")[0]
    assert set(re.findall(r"`([\w-]+)`", families)) == {*FAMILY_WORDS}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_lead_somewhere(name: str) -> None:
    """Of pages outside the site, whose build checks the others."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / name).read_text()):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
