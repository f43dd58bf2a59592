"""The GitHub action: its shell step runs here, as a runner runs it, on stored runs."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from stepmark.comparison.check_options import CheckOptions
from stepmark.ground.options import options

from .process import environment

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
EXAMPLE: dict[str, Any] = yaml.safe_load((ROOT / "examples/github/check.yml").read_text())
[STEP] = ACTION["runs"]["steps"]
# The shell of a runner for `shell: bash`, by GitHub's workflow syntax (steps[*].shell).
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
PROGRAM = f'exec {sys.executable} -m stepmark "$@"'
LAUNCHES = "results/h200-x4-comm-launches"


@dataclass(frozen=True)
class Outcome:
    code: int
    summary: str
    outputs: dict[str, str]
    messages: str


def expanded(text: str, inputs: dict[str, str]) -> str:
    """Return a text with its ${{ inputs.X }}; another expression is an error."""
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]], text)


def outcome(folder: Path, program_text: str = PROGRAM, **given: str) -> Outcome:
    """Run the step with inputs, and the defaults of others. program_text: of `stepmark`."""
    unknown = given.keys() - ACTION["inputs"].keys()
    assert not unknown
    inputs = {
        name: given.get(name, declared.get("default", ""))
        for name, declared in ACTION["inputs"].items()
    }
    variables = {name: expanded(text, inputs) for name, text in STEP["env"].items()}
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "stepmark"
    program.write_text(f"#!/bin/sh\n{program_text}\n")
    program.chmod(0o755)
    script = folder / "step.sh"
    script.write_text(STEP["run"])
    own = environment()
    files = {"GITHUB_STEP_SUMMARY": folder / "summary.md", "GITHUB_OUTPUT": folder / "output"}
    done = subprocess.run(
        [*SHELL, str(script)],
        cwd=ROOT,
        env=own
        | variables
        | {name: str(path) for name, path in files.items()}
        | {"PATH": f"{programs}:{own['PATH']}", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = files["GITHUB_OUTPUT"].read_text().splitlines()
    return Outcome(
        code=done.returncode,
        summary=files["GITHUB_STEP_SUMMARY"].read_text(),
        outputs=dict(line.split("=", 1) for line in lines),
        messages=done.stderr,
    )


def copied(folder: Path, factor: float) -> str:
    """Return a copy of a stored run of 20 launches that takes this factor as long."""
    target = folder / "current"
    shutil.copytree(ROOT / LAUNCHES, target)
    file = target / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if samples := record.get("samples"):
            samples["seconds"] = [[s * factor for s in rank] for rank in samples["seconds"]]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run = json.loads((target / "run.json").read_text())
    (target / "run.json").write_text(json.dumps(run | {"run_id": "20260101-000000-aaaa"}))
    return str(target)


@pytest.mark.parametrize(
    ("factor", "threshold", "code", "verdict"),
    [
        (1.0, "0.3", 0, "accepted"),
        (0.5, "0.3", 0, "accepted"),
        (1.6, "0.3", 1, "slower"),
        (1.6, "0.9", 0, "accepted"),
    ],
)
def test_the_job_ends_as_the_check_and_the_summary_has_the_table(
    factor: float, threshold: str, code: int, verdict: str, tmp_path: Path
) -> None:
    current = copied(tmp_path, factor)
    own = outcome(tmp_path, baseline=LAUNCHES, current=current, threshold=threshold)
    assert (own.code, own.outputs["verdict"]) == (code, verdict), own.messages
    rows = json.loads(Path(own.outputs["json"]).read_text())
    assert len(rows) == 6
    assert own.summary.startswith(f"### stepmark check: {verdict}\n\n```text\n")
    assert own.summary.rstrip().endswith("```")
    assert own.summary.count("64 MiB") >= 2
    slow = sum(bool(row["too_slow"]) for row in rows)
    assert f"{slow} of 6 cases slower than h200-x4-comm-launches" in own.summary


def test_one_launch_cannot_tell(tmp_path: Path) -> None:
    runs = [f"h200-x4-comm-queued-{number}" for number in (1, 2)]
    own = outcome(tmp_path, baseline=runs[0], current=runs[1], runs="results")
    assert (own.code, own.outputs["verdict"]) == (3, "cannot tell")
    assert "cannot tell for 96" in own.summary


def test_what_is_refused_is_an_error_with_its_sentence(tmp_path: Path) -> None:
    own = outcome(tmp_path, baseline="$(touch broken)", current="x")
    assert (own.code, own.outputs["verdict"]) == (2, "error")
    assert "$(touch broken)" in own.summary
    assert not (ROOT / "broken").exists()


def test_without_a_run_to_judge_it_measures(tmp_path: Path) -> None:
    own = outcome(tmp_path, 'echo "$@"', baseline="a b", threshold="0.1")
    assert (own.code, own.outputs["verdict"]) == (0, "accepted")
    assert "\ncheck --baseline a b --floor 0.1 --runs runs --json /" in own.summary


def test_inputs_are_options_of_check_and_reach_the_shell_as_variables() -> None:
    flags = {word for option in options(CheckOptions) for word in option.spellings}
    used = set(re.findall(r"(?<=[ (])--\w+", STEP["run"]))
    assert used == {"--baseline", "--current", "--floor", "--runs", "--json"} <= flags
    assert "${{" not in STEP["run"]
    assert all(declared["description"] for declared in ACTION["inputs"].values())
    floor = next(option for option in options(CheckOptions) if option.name == "floor")
    assert float(ACTION["inputs"]["threshold"]["default"]) == floor.default


def test_the_example_uses_the_action_as_it_is() -> None:
    [job] = EXAMPLE["jobs"].values()
    [step] = (each for each in job["steps"] if each.get("uses") == "./stepmark")
    assert step["with"].keys() <= ACTION["inputs"].keys()
    required = {name for name, each in ACTION["inputs"].items() if each.get("required")}
    assert required <= step["with"].keys()
    outputs = re.findall(r"steps\.check\.outputs\.(\w+)", json.dumps(job))
    assert set(outputs) <= ACTION["outputs"].keys()
