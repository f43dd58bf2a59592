"""Verbs that measure nothing need neither torch nor DuckDB, and print the same without them.

Others say in one sentence which command installs what they lack.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.cli.verbs import VERBS
from stepmark.ground import packages
from stepmark.ground.errors import ConfigError
from stepmark.measuring import machine

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABSENT = ("torch", "duckdb", "plotly", "pynvml", "pandas", "torchao", "transformers")

# Also for child processes. Of such a module `find_spec` returns None, and its import fails.
SITE = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
PROGRAM = """
import contextlib, io, json, sys
from stepmark.cli.main import status

results = []
for words in json.load(sys.stdin):
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = status(words)
        except Exception as error:
            code = repr(error)
    results.append((code, out.getvalue(), err.getvalue()))
json.dump(results, sys.__stdout__)
"""

TRACES = "tests/data/traces/fsdp8"
COMM = "results/h200-x4-comm-queued"
STEP = "--strategy fsdp --nproc 8 --mbs 2 --device h200"
CALIBRATION = "--calibration results/h100-run"
SWEEP = "sweep --env NCCL_ALGO=Ring,Tree --seed 1"
LIGHT = [
    f"predict llama-3.1-8b {STEP}",
    "predict --from-run results/h100-run",
    f"predict gpt2-1.5b {CALIBRATION} --seq-len 1024 --mbs 8 --nproc 1 --compile",
    "predict examples/configs/torchtitan-llama3-70b.toml --nproc 256 --device h100-sxm",
    "plan gpt2-125m --gpus 2 --gbs 2 --device h100-sxm --framework pytorch",
    "workload generate --model llama-3.1-8b --framework megatron --world-size 8 -o TMP/w.json",
    "workload show TMP/w.json",
    "workload convert TMP/w.json --compute-from roofline:h100-sxm --to aicb -o TMP/w.csv",
    f"trace ledger {TRACES}",
    f"trace kernels {TRACES}",
    f"trace breakdown {TRACES} --html TMP/page.html",
    f"trace to-workload {TRACES} --out TMP/step.json",
    "logs examples/logs/megatron.log",
    "logs results/h200-x4-nccl-log",
    "logs tests/data/flight-recorder/rank0.pickle.gz",
    f"compare {COMM}-1 {COMM}-2",
    "runs list --runs results",
    f"runs show {COMM}-1",
    f"runs export {COMM}-1 TMP/rows.csv --to csv",
    "report TMP/run",
    "launch --torchrun --hosts a,b --gpus-per-node 8 -- train llama-3.1-8b",
    f"train llama-3.1-8b {STEP} --dry-run",
    "comm all_reduce --device h200 --nproc 8 --dry-run",
    "op gemm --model llama-3.1-8b --device h200 --dry-run",
    "calibrate llama-3.1-8b --device h200 --nproc 8 --dry-run",
    "run gpt2-125m --scale tiny --device cpu --dry-run",
    "replay TMP/w.json --nproc 8 --device h200 --dry-run",
    f"{SWEEP} --dry-run -- comm all_reduce --device h200 --nproc 8",
    "completion bash",
    "--help",
    *(f"{verb} --help" for verb in VERBS),
]
GEMM = "op gemm --m 64 --n 64 --k 64 --device"
LACKING = {
    f"{GEMM} cpu --out TMP/ranks": "measure",
    f"{GEMM} cuda": "measure",
    "op gemm --find-max --device cpu --out TMP/search": "measure",
    "comm all_reduce --device cpu --nproc 2": "measure",
    "train gpt2-125m --scale tiny --device cpu": "measure",
    "run gpt2-125m --scale tiny --device cpu": "measure",
    "calibrate gpt2-125m --scale tiny --device cpu": "measure",
    "replay gpt2-125m --device cpu --nproc 2": "measure",
    "check --baseline results/h200-gemm-sustained-1": "measure",
    "doctor --nodes": "measure",
    f"{SWEEP} --out TMP/sweeps -- {GEMM} cpu": "measure",
    f"trace convert {TRACES} --to parquet --out TMP/parquet": "sql",
    "workload capture examples/capture_fsdp_tp.py:step --world-size 4": "measure",
    "runs sql 'SELECT 1' --runs results": "sql",
    f"runs export {COMM}-1 TMP/rows.parquet --to parquet": "sql",
}


def words(command: str, folder: Path) -> list[str]:
    return shlex.split(command.replace("TMP", str(folder)))


def without_time(text: str) -> str:
    """Return what `plan` prints without how long it searched."""
    return re.sub(r"layouts in [\d.]+ m?s", "layouts", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    shutil.copytree(ROOT / "results" / "h200-gemm-sustained-1", folder / "run")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, tuple[int | str, str, str]]:
    """Return the exit code, stdout and stderr of each command without these packages."""
    commands = [*LIGHT, *LACKING]
    paths = os.pathsep.join([str(folder), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([words(command, folder) for command in commands]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache")},
        check=True,
    )
    return dict(zip(commands, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("command", LIGHT)
def test_it_prints_the_same_without_torch(
    command: str,
    folder: Path,
    results: dict[str, tuple[int | str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = results[command]
    assert code in (0, 3), err  # 3: logs that do not say whether the job ended
    monkeypatch.chdir(ROOT)
    assert status(words(command, folder)) == code
    assert without_time(out) == without_time(capsys.readouterr().out)
    assert "is missing" not in err


@pytest.mark.parametrize("command", LACKING)
def test_what_is_missing_has_its_command_in_one_sentence(
    command: str, results: dict[str, tuple[int | str, str, str]]
) -> None:
    code, out, err = results[command]
    assert code == 2, err
    assert out == ""
    package = {"measure": "torch", "sql": "duckdb"}[LACKING[command]]
    assert err == f"stepmark: {packages.missing_package(package)}\n"
    assert f"pip install 'stepmark[{LACKING[command]}]'" in err
    assert f"pip install '.[{LACKING[command]}]'" in err


def test_nothing_is_made_for_a_run_that_cannot_begin(
    folder: Path, results: dict[str, tuple[int | str, str, str]]
) -> None:
    assert results
    assert not (ROOT / "node-check").exists()
    names = {path.name for path in folder.iterdir()}
    assert names >= {"w.json", "w.csv", "page.html"}
    assert not names & {"parquet", "rows.parquet", "ranks"}
    assert [*(folder / "search").iterdir()] == []


def test_doctor_reports_the_host_and_what_is_missing(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")])}
    done = subprocess.run(
        [sys.executable, "-m", "stepmark", "doctor", "--json", "-"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["environment"]["num_cores"] > 0
    assert found["environment"]["torch"] == ""
    assert found["devices"] == found["backends"] == found["transports"] == []
    assert "pip install 'stepmark[measure]'" in found["warnings"][0]


def test_accelerators_that_torch_cannot_list_are_not_taken_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_has_driver", lambda: True)
    monkeypatch.setattr(machine, "_cards", list)
    for name in ("torch", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    for device in (None, "cuda"):
        with pytest.raises(ConfigError, match=r"^torch is missing"):
            machine.machine(device, dry_run=True)
    assert machine.machine("cpu").device == "cpu"
    assert machine.machine("h200", dry_run=True).device == "cuda"


def name_of(requirement: str) -> str:
    match = re.match(r"[\w-]+", requirement)
    assert match
    return match[0]


def test_messages_name_the_extras_of_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    names = {extra: {name_of(text) for text in extras[extra]} for extra in extras}
    assert all(package in names[extra] for package, extra in packages.EXTRAS.values())
    assert {extra for _, extra in packages.EXTRAS.values()} == extras.keys() - {"all"}
    [everything] = extras["all"]
    assert everything == f"stepmark[{','.join(extra for extra in extras if extra != 'all')}]"
    base = {name_of(text) for text in PROJECT["dependencies"]}
    assert not base & {package for package, _ in packages.EXTRAS.values()}


def test_make_installs_what_measures_and_queries() -> None:
    extras = PROJECT["optional-dependencies"]
    torch, *others = [*extras["measure"], *extras["sql"], *PROJECT["dependencies"]]
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text()
    locked = re.findall(r"^([\w-]+)==", (ROOT / "requirements.lock").read_text(), re.M)
    assert {name_of(text) for text in others} <= {*locked}
