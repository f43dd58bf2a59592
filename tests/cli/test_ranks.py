"""One real kill and one real interrupt per kind of case: what is kept, said and resumed."""

import os
import signal
import time
from pathlib import Path

import pytest

from .comm_process import Running, outcomes
from .process import stepmark

pytestmark = pytest.mark.ranks

# Cases that take a second or more each; --nproc and the rank that is hurt.
KINDS: dict[str, tuple[list[str], int]] = {
    "op": (["op", "gemm", "--m", "16,32,48", "--n", "32", "--k", "32", "--budget", "6s"], 0),
    "comm": (["comm", "all_reduce", "-b", "1K", "-e", "4K", "-f", "2", "--nproc", "2"], 1),
    "train": (
        [
            *("train", "gpt2-125m", "--strategy", "ddp", "--scale", "tiny", "--mbs", "1,2,4"),
            *("--steps", "1000000", "--budget", "6s"),
        ],
        1,
    ),
}


# Of what is supervised alike, one kind without other ranks and one with them is enough for
# `make test`, together with tests/measuring/test_rank_loop.py.
SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["op", "comm", pytest.param("train", marks=SLOW)])
def test_a_killed_rank_costs_one_case(kind: str, tmp_path: Path) -> None:
    words, rank = KINDS[kind]
    running = Running(*words, "--device", "cpu", cwd=tmp_path, is_forking=True)
    running.hurt(rank, signal.SIGKILL, after=1)
    assert running.end() == 3, running.err()
    records = running.records()
    assert outcomes(records) == ["measured", "lost rank", "measured"]
    assert len({record["case_id"] for record in records}) == 3, "each case once"
    assert records[1]["ranks"] == [rank]
    assert "was killed by signal 9 (SIGKILL)" in records[1]["message"]
    assert f"failed (lost rank): rank {rank} (pid" in running.err()
    assert "Traceback" not in running.err()


@pytest.mark.parametrize("kind", ["op", pytest.param("comm", marks=SLOW), "train"])
def test_an_interrupt_keeps_what_is_measured_and_resume_finishes(
    kind: str, tmp_path: Path
) -> None:
    words, _ = KINDS[kind]
    running = Running(*words, "--device", "cpu", cwd=tmp_path, is_forking=True)
    running.wait_for(1)
    time.sleep(0.7)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.end(20) == 130, running.err()
    run, kept = running.run(), running.records()
    assert set(outcomes(kept)) == {"measured"}
    if kind == "train":  # the steps of the case that was cut short are kept, and said so
        assert [record["training"]["interrupted"] for record in kept] == [False, True]
        assert kept[1]["samples"]["seconds"][0]
    hint = f"interrupted; finished cases are kept; go on with: stepmark resume runs/{run.name}"
    assert hint in running.err()
    assert running.out(), "what is finished is shown"
    assert "Traceback" not in running.err()

    done = stepmark("resume", "latest", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = running.records()
    assert records[: len(kept)] == kept
    assert set(outcomes(records)) == {"measured"}
    assert len({record["case_id"] for record in records}) == 3
    finished = len(kept) - (kind == "train")
    assert len(records) - len(kept) == 3 - finished, "no finished case is measured again"


def test_flags_that_resume_refuse_another_plan(tmp_path: Path) -> None:
    words, _ = KINDS["comm"]
    first = [*words, "--device", "cpu", "-n", "5"]
    assert stepmark(*first, cwd=tmp_path).returncode == 0
    refused = stepmark(*first, "-d", "fp16", "--resume", "latest", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert " ".join(first[:4]) in refused.stderr
    again = stepmark(*first, "--resume", "latest", "--csv", "-", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.splitlines()) == 1 + 3
