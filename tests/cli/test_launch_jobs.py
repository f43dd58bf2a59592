"""stepmark launch --submit and --follow: jobs that are followed."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepmark.launching import slurm
from stepmark.launching.slurm import Job, pending_reasons

from .launch_programs import COMM, SLURM, Programs, called, script_of

pytestmark = pytest.mark.usefixtures("launch_folder")


# Jobs


class FakeSlurm(Programs):
    """sbatch, scontrol and the like, as far as a job is followed.

    A line per question to scontrol; the last one is repeated. "error:..." is a refusal.
    """

    def answer(self, *lines: str, writes: Sequence[str] = (), signals: str = "") -> None:
        """signals: "2 INT": sent with the second answer, 3 with the third, and so on."""
        (self.folder / "states").write_text("".join(f"{line}\n" for line in lines))
        (self.folder / "count").write_text("0")
        for number, text in enumerate(writes, 1):
            (self.folder / f"write.{number}").write_text(text)
        self.add("sbatch", "cat > script; echo '12;cluster'")
        self.add("scancel", 'echo "$@" > cancelled')
        self.add(
            "scontrol",
            f"""echo "$@" > asked; n=$(($(cat count) + 1)); echo $n > count
            if [ -f write.$n ]; then cat write.$n >> job.out; fi
            for each in {signals}; do [ ${{each%:*}} = $n ] && kill -${{each#*:}} $PPID; done
            last=$(wc -l < states); line=$(sed -n "$((n < last ? n : last))p" states)
            case $line in error:*) echo "${{line#error:}}" >&2; exit 1;; esac
            echo "$line" """,
        )

    def job(self, state: str, reason: str = "None", code: str = "0:0", more: str = "") -> str:
        return (
            f"JobId=12 JobName=stepmark-comm UserId=me(1) JobState={state} Reason={reason} "
            f"Dependency=(null) Requeue=1 {more or 'Restarts=0'} ExitCode={code} "
            f"ReqNodeList=(null) NodeList=n[1-2] BatchHost=n1 TRES=cpu=4,node=2 "
            f"StdErr={self.folder}/job.out StdOut={self.folder}/job.out Power="
        )


@pytest.fixture(name="fake")
def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_a_job_is_submitted_and_followed(fake: FakeSlurm) -> None:
    fake.answer(
        fake.job("PENDING", "Resources"),
        fake.job("PENDING", "Resources"),
        fake.job("RUNNING"),
        fake.job("RUNNING"),
        fake.job("COMPLETING"),
        fake.job("COMPLETED"),
        writes=("", "", "first\nsec", "ond\n", "", "the end"),
    )
    code, out, err = called(*SLURM, "--submit", "--", *COMM)
    assert code == 0
    assert out == "first\nsecond\nthe end"
    assert err.splitlines() == [
        "job 12: submitted",
        "job 12: PENDING (Resources): it waits for hosts that other jobs use",
        "job 12: RUNNING on n[1-2]",
        "job 12: COMPLETING",
        "job 12: COMPLETED",
        "job 12: done (exit code 0)",
    ]
    assert (fake.folder / "script").read_text() == script_of(*SLURM)
    assert (fake.folder / "asked").read_text() == "-o show job 12\n"


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [
        *((f"FAILED {n}", f"{n}:0", n) for n in (1, 2, 3, 130, 143)),
        ("FAILED by TERM", "0:15", 143),
        ("FAILED by KILL", "137:0", 3),
        ("FAILED by KILL", "0:9", 3),
        ("FAILED no command", "127:0", 3),
        ("FAILED no folder", "0:53", 3),
        ("FAILED", "0:0", 3),
        ("TIMEOUT", "0:15", 143),
        ("CANCELLED", "0:15", 143),
        ("PREEMPTED", "0:15", 143),
        ("NODE_FAIL", "0:15", 3),
        ("OUT_OF_MEMORY", "0:125", 3),
        ("BOOT_FAIL", "0:0", 3),
    ],
)
def test_the_exit_code_is_that_of_the_job(
    state: str, exit_code: str, code: int, fake: FakeSlurm
) -> None:
    word = state.partition(" ")[0]
    fake.answer(fake.job("RUNNING"), fake.job(word, "NonZeroExitCode", exit_code))
    got, _, err = called("--follow", "12")
    assert got == code
    assert f"(exit code {code})" in err
    assert "cannot be read" in err  # it wrote nothing


@pytest.mark.parametrize("reason", pending_reasons())
def test_the_reason_of_a_pending_job_is_explained(reason: str) -> None:
    for text in (reason, f"{reason}SomeMore", f"{reason},_UnavailableNodes:n2"):
        assert Job(state="PENDING", reason=text).text.startswith(f"PENDING ({text}): ")
    assert pending_reasons()[reason] in Job(state="PENDING", reason=reason).text


def test_a_reason_that_is_not_known_is_shown() -> None:
    assert Job(state="PENDING", reason="Whim").text == "PENDING (Whim)"
    assert Job(state="PENDING", reason="None").text == "PENDING"
    never = Job(state="PENDING", reason="PartitionNodeLimit").text
    assert never == (
        "PENDING (PartitionNodeLimit): it asks for more nodes than the partition has; it will "
        "never start"
    )


def test_a_restarted_job_is_followed(fake: FakeSlurm) -> None:
    fake.answer(
        fake.job("RUNNING"),
        fake.job("PENDING", "BeginTime", more="Restarts=1"),
        fake.job("RUNNING", more="Restarts=1"),
        fake.job("COMPLETED", more="Restarts=1"),
        writes=("first\n", "", "second\n"),
    )
    code, out, err = called("--follow", "12")
    assert (code, out) == (0, "first\nsecond\n")
    assert "PENDING (BeginTime): its start time has not come" in err
    assert "RUNNING on n[1-2], restart 1" in err


@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_an_interrupt_leaves_the_job(name: str, code: int, fake: FakeSlurm) -> None:
    fake.answer(fake.job("RUNNING"), signals=f"2:{name}")
    before = signal.getsignal(signal.SIGINT)
    got, _, err = called(*SLURM, "--submit", "--", *COMM)
    assert got == code
    assert "goes on; follow it: stepmark launch --follow 12; cancel it: scancel 12" in err
    assert not (fake.folder / "cancelled").exists()
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_cancels_the_job_where_that_is_asked(fake: FakeSlurm) -> None:
    fake.answer(
        *(fake.job("RUNNING"), fake.job("RUNNING"), fake.job("COMPLETING")),
        fake.job("CANCELLED", code="0:15"),
        writes=("", "", "", "interrupted\n"),
        signals="2:INT",
    )
    code, out, err = called("--follow", "12", "--on-interrupt", "cancel")
    assert (code, out) == (130, "interrupted\n")
    assert "cancelling" in err
    assert (fake.folder / "cancelled").read_text() == "12\n"


def test_a_second_interrupt_leaves_the_job(fake: FakeSlurm) -> None:
    fake.answer(fake.job("RUNNING"), signals="2:INT 4:INT")
    code, _, err = called("--follow", "12", "--on-interrupt", "cancel")
    assert code == 130
    assert "it goes on" in err


def test_slurm_is_asked_at_most_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert slurm.POLL_S >= 2.0


def test_a_controller_that_restarts_is_waited_for(fake: FakeSlurm) -> None:
    refused = "error:slurm_load_jobs error: Unable to contact slurm controller"
    fake.answer(fake.job("RUNNING"), refused, refused, fake.job("COMPLETED"))
    fake.add("squeue", "echo 'slurm_load_jobs error: down' >&2; exit 1")
    code, _, err = called("--follow", "12")
    assert code == 0
    assert err.count("Unable to contact slurm controller") == 1
    fake.answer(refused)
    code, _, err = called("--follow", "12")
    assert (code, err.count("\n")) == (2, 1)


def test_squeue_and_sacct_are_asked_where_scontrol_is_refused(fake: FakeSlurm) -> None:
    fake.answer("error:Access/permission denied")
    fake.add("squeue", "[ -f gone ] && exit; touch gone; echo 'PENDING|Priority|'")
    fake.add("sacct", "echo 'CANCELLED by 1000|0:15'")
    code, _, err = called("--follow", "12")
    assert code == 143
    assert "PENDING (Priority): jobs of higher priority" in err


def test_a_job_that_slurm_forgot(fake: FakeSlurm) -> None:
    invalid = "error:slurm_load_jobs error: Invalid job id specified"
    fake.add("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    fake.answer(invalid)
    code, _, err = called("--follow", "12")
    assert (code, err.count("\n")) == (2, 1)
    assert "--follow 12 is invalid: it must be a job that Slurm still knows" in err
    fake.answer(fake.job("RUNNING"), invalid)
    code, _, err = called("--follow", "12")
    assert code == 3
    assert "no longer knows it" in err


def test_what_sbatch_refuses(fake: FakeSlurm) -> None:
    fake.answer()
    fake.add("sbatch", "echo 'sbatch: error: Batch job submission failed: no' >&2; exit 1")
    code, out, err = called(*SLURM, "--submit", "--", *COMM)
    assert (code, out) == (2, "")
    assert err == "stepmark: sbatch refused the job: Batch job submission failed: no\n"
