"""No file and no output of a verb has a secret of its command line or of its environment."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepmark.cases.plan import Plan
from stepmark.cases.record import Failed
from stepmark.cases.sweep import Outcome
from stepmark.cli import main
from stepmark.comparison.sweep import notes
from stepmark.comparison.sweep import settings as swept
from stepmark.findings.finding import Evidence, Finding, Severity
from stepmark.ground.errors import StepmarkError
from stepmark.ground.redaction import REDACTED
from stepmark.measuring import child
from stepmark.store import sweeps
from stepmark.watching.output_copy import OutputFile

from .process import environment, stepmark, stepmark_process

SECRET = "Zq7xJ2vKp9"
URL = f"https://me:{SECRET}@host/a?sig={SECRET}"
# What is captured into run.json, and what is not; all of them are secret or have a secret.
VARIABLES = {
    "NCCL_MY_TOKEN": SECRET,
    "TORCH_HOME": URL,
    "NCCL_SOME_HEADER": f"Authorization: Bearer {SECRET}",
    "HF_TOKEN": SECRET,
    "STEPMARK_KEY": f"{SECRET}{SECRET}",
    "https_proxy": URL,
}
GEMM = ("op", "gemm", "--m", "64", "--n", "64", "--k", "64", "--device", "cpu")
COMM = ("comm", "all_reduce", "--device", "cpu", "--nproc", "2", "-b", "1K", "-e", "1K")


@pytest.fixture(autouse=True)
def secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def with_secret(folder: Path) -> list[Path]:
    """Return the files below the folder whose name or content has the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [
        path for path in files if SECRET in str(path) or SECRET.encode() in path.read_bytes()
    ]


@pytest.mark.ranks
def test_a_run_and_its_pages(tmp_path: Path) -> None:
    files = ("--csv", "a.csv", "-J", "nccl.json", "--json", "-")
    ran = stepmark(*COMM, "-n", "3", *files, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (run,) = tmp_path.glob("runs/*")
    variables = json.loads((run / "run.json").read_text())["environment"]["variables"]
    assert variables["NCCL_MY_TOKEN"] == REDACTED
    assert variables["TORCH_HOME"] == f"https://{REDACTED}@host/a?sig={REDACTED}"
    shown = [
        stepmark("report", str(run), "--html", "page.html", cwd=tmp_path),
        stepmark("runs", "show", str(run), cwd=tmp_path),
        stepmark("runs", "show", str(run), "--json", "-", cwd=tmp_path),
        stepmark("runs", "export", str(run), "--json", "-", cwd=tmp_path),
        stepmark(*COMM, "--dry-run", cwd=tmp_path),
        stepmark("doctor", "--device", "cpu", cwd=tmp_path),
    ]
    assert with_secret(tmp_path) == []
    for done in (ran, *shown):
        assert SECRET not in done.stdout + done.stderr, done.args


@pytest.mark.ranks
def test_a_command_line_in_files(tmp_path: Path) -> None:
    # The name of a folder stays in paths, but not in what is kept of the command line.
    ran = stepmark(*COMM, "-n", "1", "--out", "a?sig=Wb4of", "-J", "nccl.json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    (run,) = (tmp_path / "a?sig=Wb4of").glob("*")
    assert f"--out 'a?sig={REDACTED}'" in json.loads((run / "run.json").read_text())["command"]
    assert f"a?sig={REDACTED}" in json.loads((tmp_path / "nccl.json").read_text())["args"]
    assert "Wb4of" not in (run / "run.json").read_text() + (tmp_path / "nccl.json").read_text()


def test_a_plan_has_no_secret_of_its_command_line() -> None:
    words = ("train", "--model", URL, "--token", SECRET)
    plan = Plan(command="train", argv=words, device="cpu", world_size=1, entries=())
    assert SECRET not in repr(plan)
    assert plan.command_line.endswith(f"--token '{REDACTED}'")


JOB = """
import os, sys
print("arguments:", sys.argv[1:])
print("plain", sys.argv[2], flush=True)
print(os.environ["HF_TOKEN"], end="", flush=True)
sys.stderr.write("Traceback (most recent call last):\\n")
sys.exit("requests.HTTPError: 403 for " + os.environ["https_proxy"])
"""


@pytest.mark.ranks
def test_a_watched_job(tmp_path: Path) -> None:
    own = "Wb4_of-the-job"
    words = [
        "--token",
        own,
        "--header",
        f"Authorization: Bearer {SECRET}",
        f"HF_TOKEN={SECRET}",
    ]
    (tmp_path / "job.py").write_text(JOB)
    job = [sys.executable, "job.py", *words]
    done = stepmark_process("watch", "--json", "seen.json", "--", *job, cwd=tmp_path)
    assert done.returncode == 1
    # Its reader gets what the job prints as it is.
    before, _, after = done.stdout.partition("# watched: ")
    assert f"plain {own}" in before
    assert SECRET in before
    assert f"job.py --token '{REDACTED}' --header" in after
    assert "403 for" in after
    assert SECRET not in after
    assert own not in after
    assert with_secret(tmp_path) == []
    (run,) = tmp_path.glob("runs/*")
    output = (run / "output.log").read_text()
    assert f"plain {REDACTED}\n" in output
    assert own not in output + (run / "watch.json").read_text()
    again = stepmark("logs", str(run), cwd=tmp_path)
    assert SECRET not in again.stdout + again.stderr


@given(pieces=st.lists(st.integers(1, 40), min_size=1), end=st.sampled_from(["\n", "\r", ""]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_is_redacted_wherever_it_is_cut(
    tmp_path: Path, pieces: list[int], end: str
) -> None:
    line = f"step 1 token={'Q' * 20} é{end}"
    data = (line * 4).encode()
    file = OutputFile(tmp_path / "output.log")
    while data:
        size = pieces.pop() if pieces else 7
        file.write(data[:size])
        data = data[size:]
    file.close("the end")
    text = (tmp_path / "output.log").read_bytes().decode()
    assert "Q" not in text
    assert text.endswith("the end\n")
    if end:
        assert text == f"step 1 token={REDACTED} é{end}" * 4 + "\nthe end\n"


def test_what_a_launch_of_a_sweep_prints(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['HF_TOKEN']); sys.stderr.write('password=Qq9\\n')"
    out, err = tmp_path / "a.out", tmp_path / "a.err"
    ended = child.run(
        [sys.executable, "-c", code], environment(), out=out, err=err, limit_s=60.0
    )
    assert ended.exit_code == 0
    assert (out.read_text(), err.read_text()) == (f"{REDACTED}\n", f"password={REDACTED}\n")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_sweep(tmp_path: Path) -> None:
    words = ("--env", "UNREAD=1,2", "--no-default", "--repeats", "1", "--html", "page.html")
    done = stepmark("sweep", *words, "--", *GEMM, "--budget", "1s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("sweeps/*")
    assert {one.outcome for one in sweeps.read(folder).tries} == {Outcome.DONE}
    assert f"NCCL_MY_TOKEN={REDACTED} is the same for all" in sweeps.read(folder).notes
    assert with_secret(tmp_path) == []
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--env", f"HF_TOKEN={SECRET},b", "--", *GEMM),
        ("--env", f"NCCL_X={URL},b", "--", *GEMM),
        ("--env", "NCCL_ALGO=Ring,Tree", "--", *GEMM, "--model", URL),
    ],
)
def test_a_sweep_does_not_take_a_secret(words: tuple[str, ...], tmp_path: Path) -> None:
    done = stepmark("sweep", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "without secrets, which a sweep inherits from the environment" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_notes_of_a_sweep() -> None:
    remarks = notes(
        swept(["NCCL_NET=a,b"], [], default=False, force=False),
        {"NCCL_NET": URL, "NCCL_MY_KEY": SECRET},
    )
    assert SECRET not in "".join(remarks)


def test_refusals_do_not_quote_a_secret(tmp_path: Path) -> None:
    for words in (("predict", URL), ("op", "gemm", "--model", f"hf_{SECRET * 3}", "--m", URL)):
        done = stepmark(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert SECRET not in done.stdout + done.stderr
        assert REDACTED in done.stderr


def test_no_error_quotes_a_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise StepmarkError(f"cannot read {URL}")

    monkeypatch.setattr(main, "_code", fail)
    assert main.status([]) == 1
    assert SECRET not in capsys.readouterr().err


def test_failures_and_quoted_lines() -> None:
    failed = Failed(
        run_id="a",
        case=None,  # type: ignore[arg-type]
        cause="error",
        message=f"403 for {URL}",
        traceback=f"line\n{URL}",
        ranks=(0,),
    )
    line = Evidence(file="a", line=1, text=f"GET {URL}")
    finding = Finding(rule="a", severity=Severity.PROBLEM, text=URL, evidence=(line,))
    assert SECRET not in repr(failed) + repr(finding)


def test_logs_of_others(tmp_path: Path) -> None:
    text = f"Traceback (most recent call last):\nrequests.HTTPError: 403 for {URL}\n"
    (tmp_path / "job.log").write_text(f"[rank0]: {text}" * 2)
    done = stepmark("logs", "job.log", "--json", "a.json", cwd=tmp_path)
    assert "403 for" in done.stdout
    assert SECRET not in done.stdout + (tmp_path / "a.json").read_text()
